"""One training in several processes."""
