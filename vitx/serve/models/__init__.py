"""From a bundle on disk to a model in service, and back out of it."""
