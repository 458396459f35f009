"""The Open Inference Protocol v2: reads requests and writes replies, without sockets."""
