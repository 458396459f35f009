"""The same training in several variants and seeds, side by side."""
