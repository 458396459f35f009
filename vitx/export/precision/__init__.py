"""Graphs of lower precision: half, 8 bits, and what decides whether they are accepted."""
