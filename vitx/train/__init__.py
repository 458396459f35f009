"""Training: recipes, data, the over-smoothing losses, the loop and its checkpoints.

Recipes can be read without torch; everything that needs it is imported when it is first asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

from vitx.train.recipes.recipe import Recipe, apply_overrides
from vitx.train.recipes.registry import get_recipe, resolve_recipe

if TYPE_CHECKING:
    from vitx.train.loop.trainer import TrainingResult, train
    from vitx.train.losses.over_smoothing import patch_contrastive_loss, patch_cosine_loss, patch_mixing_loss

_LAZY = {
    "TrainingResult": "vitx.train.loop.trainer",
    "train": "vitx.train.loop.trainer",
    "patch_contrastive_loss": "vitx.train.losses.over_smoothing",
    "patch_cosine_loss": "vitx.train.losses.over_smoothing",
    "patch_mixing_loss": "vitx.train.losses.over_smoothing",
}

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


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'vitx.train' has no attribute '{name}'")
    return getattr(importlib.import_module(_LAZY[name]), name)
