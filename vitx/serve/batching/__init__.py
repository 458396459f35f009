"""Dynamic batching: the requests of one model run in batches. Semantics: docs/serving.md."""
