"""The losses: cross-entropy, the patch losses against over-smoothing, DeepViT's regulariser, distillation."""
