"""The steps of lease.py: a module for each of its parts, and what they share."""
