"""The settings of the digits' recipes are those whose results their docstrings tell."""

from typing import Any

import pytest

from vitx.train.recipes.recipe import Recipe, flat_settings, setting_fields
from vitx.train.recipes.registry import get_recipe

# Whoever changes one of these trains anew, and writes what was found into the docstring and the README.
MEASURED: dict[str, Any] = {
    "data": "digits",
    "model.name": "deit_digits",
    "model.kwargs.weight_init": "jax",
    "model.kwargs.position_std": 0.5,
    "preprocessing.image_size": 32,
    "augmentation.rotation": 12,
    "augmentation.translation": 0.1,
    "augmentation.scale": 0.1,
    "augmentation.shear": 8,
    "cutmix.probability": 0.5,
    "losses.contrastive": 1,
    "losses.mixing": 1,
    "losses.label_smoothing": 0.1,
    "optimizer.lr": 2e-3,
    "optimizer.weight_decay": 0.05,
    "schedule.warmup_epochs": 4.5,
    "schedule.min_lr": 2e-5,
    "ema_decay": 0.98,
    "epochs": 30,
    "batch_size": 64,
}
PATCHVIT = {
    "model.kwargs.depth": 12,
    "model.kwargs.attention": "talking-heads",
    "model.kwargs.talking_heads_init": "identity",
    "model.kwargs.drop_path_rate": 0.1,
    "cutmix.box": "sample",
    "losses.cosine": 0.3,
}
NOT_OF_ALTERNET = ("model.kwargs.w", "model.kwargs.p", "cutmix.", "losses.contrastive", "losses.mixing")
ALTERNET = {
    "model.name": "alternet_18_cifar",
    "model.kwargs.depths": [1, 1, 2, 2],
    "model.kwargs.attention_depths": [0, 0, 1, 1],
    "model.kwargs.head_dim": 32,
    "preprocessing.image_size": 16,
    "mixup.mixup": 0.2,
    "schedule.warmup_epochs": 1.5,
    "epochs": 10,
}


@pytest.mark.parametrize(
    ("name", "measured"),
    [
        ("digits-deit", MEASURED),
        ("digits-deepvit", {**MEASURED, "model.name": "deepvit_digits", "losses.cosine": 0.3}),
        ("digits-patchvit", MEASURED | PATCHVIT),
        (
            "digits-alternet",
            {key: value for key, value in MEASURED.items() if not key.startswith(NOT_OF_ALTERNET)} | ALTERNET,
        ),
    ],
)
def test_the_settings_are_those_that_were_measured(name: str, measured: dict[str, Any]) -> None:
    """All others have their defaults."""
    defaults = {key: field.get_default(call_default_factory=True) for key, field in setting_fields(Recipe)}
    settings = dict(flat_settings(get_recipe(name).model_dump()))
    changed = {key: value for key, value in settings.items() if key in measured or value != defaults.get(key)}
    assert changed == {"name": name, **measured}
