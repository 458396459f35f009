"""Training: recipes, data, the losses against over-smoothing, the loop and its checkpoints.

Recipes can be read without torch; all is imported on first use, so that `vitx train -h` waits for none of it.
"""

from typing import TYPE_CHECKING

from vitx.core.lazy import lazy_names

if TYPE_CHECKING:
    from vitx.train.loop.result import TrainingResult
    from vitx.train.loop.trainer import train
    from vitx.train.losses.patch_losses import patch_contrastive_loss, patch_cosine_loss, patch_mixing_loss
    from vitx.train.recipes.recipe import Recipe, apply_overrides
    from vitx.train.recipes.registry import get_recipe, resolve_recipe

__all__ = [
    "Recipe",
    "TrainingResult",
    "apply_overrides",
    "get_recipe",
    "patch_contrastive_loss",
    "patch_cosine_loss",
    "patch_mixing_loss",
    "resolve_recipe",
    "train",
]


__getattr__ = lazy_names(
    __name__,
    {
        "vitx.train.loop.result": ("TrainingResult",),
        "vitx.train.loop.trainer": ("train",),
        "vitx.train.losses.patch_losses": ("patch_contrastive_loss", "patch_cosine_loss", "patch_mixing_loss"),
        "vitx.train.recipes.recipe": ("Recipe", "apply_overrides"),
        "vitx.train.recipes.registry": ("get_recipe", "resolve_recipe"),
    },
)
