"""The server: batching, protocol, HTTP, gRPC, models, processes, observability. Never imports torch."""
