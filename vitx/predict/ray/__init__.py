"""The same job on a Ray cluster."""
