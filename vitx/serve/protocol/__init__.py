"""The Open Inference Protocol v2, without a socket."""
