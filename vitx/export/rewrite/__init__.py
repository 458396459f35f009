"""Exact rewrites of a network before it is traced."""
