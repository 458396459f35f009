"""HTTP: the Open Inference Protocol v2, image bytes, and the pages. Semantics: docs/serving.md."""
