"""Image sets: one record, one file a source."""
