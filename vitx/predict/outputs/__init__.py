"""Predictions as Parquet, each part whole or not there."""
