"""gRPC: the Open Inference Protocol v2 with Triton's extensions. Semantics: docs/serving.md."""
