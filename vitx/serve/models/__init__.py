"""Models: loaded from bundles, served, replaced, unloaded."""
