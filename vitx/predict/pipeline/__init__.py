"""One worker: read, decode, infer, write, at the same time."""
