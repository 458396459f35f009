"""What is minimised: cross-entropy, the over-smoothing losses, DeepViT's regulariser, distillation."""

from vitx.train.losses.over_smoothing import (
    patch_contrastive_loss,
    patch_cosine_loss,
    patch_mixing_loss,
    region_mixing_loss,
)

__all__ = ["patch_contrastive_loss", "patch_cosine_loss", "patch_mixing_loss", "region_mixing_loss"]
