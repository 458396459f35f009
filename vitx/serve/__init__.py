"""The server: batching, protocol, HTTP, gRPC, models, processes, what it tells of itself. Never imports torch."""
