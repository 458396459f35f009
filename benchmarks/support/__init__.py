"""What several scripts here share."""
