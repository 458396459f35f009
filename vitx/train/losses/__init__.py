"""The losses: cross-entropy, the patch losses against over-smoothing, DeepViT's regulariser, distillation."""

from vitx.train.losses.patch_losses import (
    patch_contrastive_loss,
    patch_cosine_loss,
    patch_mixing_loss,
    region_mixing_loss,
)

__all__ = ["patch_contrastive_loss", "patch_cosine_loss", "patch_mixing_loss", "region_mixing_loss"]
