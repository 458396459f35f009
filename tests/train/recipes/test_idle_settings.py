"""Settings whose switch is off are said, each with the reason; those of a recipe as it stands are not."""

import pytest

from vitx.train.recipes.idle_settings import DEPENDENT, idle_settings
from vitx.train.recipes.recipe import apply_overrides, setting_names
from vitx.train.recipes.registry import RECIPES, get_recipe


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_recipe_has_none(name: str) -> None:
    assert idle_settings(get_recipe(name)) == []


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            ["augmentation.erasing_mode=rand", "losses.attention_pairs=2"],
            [
                "augmentation.erasing_mode=rand, as augmentation.erasing=0.0",
                "losses.attention_pairs=2, as losses.attention=0.0",
            ],
        ),
        (
            ["augmentation.interpolation=random"],
            ["augmentation.interpolation=random, as augmentation.smallest_crop=1.0 and augmentation.auto_augment="],
        ),
        (["augmentation.interpolation=random", "augmentation.smallest_crop=0.5"], []),
        (["augmentation.interpolation=random", "augmentation.auto_augment=3a"], []),
        (["ema_decay=0", "ema_warmup=false"], ["ema_warmup=False, as ema_decay=0.0"]),
        (["ema_warmup=false"], []),
        (
            ["distillation.teacher=timm:resnet18", "distillation.weight=0"],
            ["distillation.teacher=timm:resnet18, as distillation.weight=0.0"],
        ),
        (
            ["distillation.temperature=2", "distillation.teacher=timm:resnet18"],
            ["distillation.temperature=2.0, as distillation.kind=hard"],
        ),
        (["distillation.temperature=2", "distillation.teacher=timm:resnet18", "distillation.kind=soft"], []),
        (["optimizer.momentum=0.8"], ["optimizer.momentum=0.8, as optimizer.name=adamw"]),
        (["optimizer.momentum=0.8", "optimizer.name=lookahead_SGD"], []),
        (
            ["optimizer.betas=[0.8, 0.9]", "optimizer.name=sgd"],
            ["optimizer.betas=(0.8, 0.9), as optimizer.name=sgd"],
        ),
        (["optimizer.betas=[0.8, 0.9]"], []),
        (["schedule.name=constant"], ["schedule.min_lr=2e-05, as schedule.name=constant"]),
    ],
)
def test_what_has_no_effect_is_said(settings: list[str], said: list[str]) -> None:
    assert idle_settings(apply_overrides(get_recipe("digits-deit"), settings)) == said


def test_mixup_alone_has_no_use_for_the_share_of_cutmix() -> None:
    recipe = apply_overrides(get_recipe("digits-alternet"), ["mixup.switch_probability=0.3"])
    assert idle_settings(recipe) == ["mixup.switch_probability=0.3, as mixup.cutmix=0.0"]
    assert idle_settings(apply_overrides(recipe, ["mixup.cutmix=1"])) == []
    off = apply_overrides(recipe, ["mixup.cutmix=1", "mixup.probability=0"])
    assert idle_settings(off) == [
        "mixup.mixup=0.2, as mixup.probability=0.0",
        "mixup.cutmix=1.0, as mixup.probability=0.0",
    ]


def test_every_row_is_of_settings_that_there_are() -> None:
    names = {name for row in DEPENDENT.items() for names in row for name in names}
    assert names <= {*setting_names()}
