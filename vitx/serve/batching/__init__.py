"""Requests of one model become batches. Semantics: docs/serving.md."""
