"""The variants of each study: the rows of the papers' tables, and what each changes in a recipe."""

import inspect
from typing import Any

import pytest

from vitx.core.errors import InputError
from vitx.train.recipes.recipe import Recipe, apply_overrides, flat_settings
from vitx.train.recipes.registry import RECIPES, get_recipe
from vitx.train.study.result import Variant
from vitx.train.study.variants import DEPTHS, PUBLISHED, STUDIES, ablation_variants, depth_variants, methods_variants

DEIT = get_recipe("digits-deit")
# What a row changes in DEIT, which has the contrastive and the mixing loss and mixes patches of half of the images.
BASELINE = {"losses.contrastive": 0, "losses.mixing": 0, "cutmix.probability": 0, "mixup.mixup": 0.8, "mixup.cutmix": 1}
ALONE = {"losses.contrastive": 0, "losses.mixing": 0, "cutmix.probability": 0}
PLAIN = {"model.kwargs.attention": "plain", "model.kwargs.feat_scale": False, "model.kwargs.contranorm_scale": 0}


def changed(recipe: Recipe, variant: Variant) -> dict[str, Any]:
    before, now = (
        dict(flat_settings(each.model_dump(mode="json")))
        for each in (recipe, apply_overrides(recipe, variant.overrides))
    )
    return {key: value for key, value in now.items() if key not in before or before[key] != value}


def network(depth: int, attention: str) -> dict[str, Any]:
    return {"model.kwargs.depth": depth, "model.kwargs.attention": attention}


def test_the_ablation_has_the_rows_of_the_papers_table() -> None:
    recipe = apply_overrides(DEIT, ["losses.cosine=0.3"])
    baseline, *variants = ablation_variants(recipe)
    as_deit = apply_overrides(recipe, baseline.overrides)
    assert (as_deit.mixup.mixup, as_deit.mixup.cutmix, as_deit.cutmix.probability) == (0.8, 1, 0)
    assert (baseline.published, as_deit.losses.need_tokens) == (81.8, False)
    assert baseline.factors == {"mixed": "pixels", "cosine": 0, "contrastive": 0, "mixing": 0}
    assert len({tuple(variant.factors.values()) for variant in variants}) == len(variants) == 8
    for variant in variants:
        losses = apply_overrides(recipe, variant.overrides).losses
        on = tuple(name for name in ("cosine", "contrastive", "mixing") if getattr(losses, name))
        assert variant.name == ("+".join(on) or "none")
        assert losses.cosine in (0, 0.3)
        assert variant.published == PUBLISHED.get(on)
        of_losses = {name: getattr(losses, name) for name in ("cosine", "contrastive", "mixing")}
        assert variant.factors == {"mixed": "patches", **of_losses}
    assert ablation_variants(DEIT)[2].factors["cosine"] == 1.0


def test_a_weight_is_the_recipe_s_to_its_last_digit() -> None:
    recipe = apply_overrides(DEIT, ["losses.cosine=0.12345678"])
    of_ablation, of_methods = ablation_variants(recipe)[2], methods_variants(recipe)[1]
    assert (of_ablation.name, of_methods.name) == ("cosine", "cosine-loss")
    for variant in (of_ablation, of_methods):
        assert apply_overrides(recipe, variant.overrides).losses.cosine == 0.12345678


def test_the_paper_s_numbers_of_each_combination_of_losses() -> None:
    """Gong et al., Table 1, top to bottom."""
    assert [(variant.name, variant.published) for variant in ablation_variants(DEIT)] == [
        ("baseline", 81.8),
        ("none", None),
        ("cosine", 82.0),
        ("contrastive", 82.3),
        ("mixing", 82.4),
        ("cosine+contrastive", 82.3),
        ("cosine+mixing", 82.3),
        ("contrastive+mixing", 82.6),
        ("cosine+contrastive+mixing", None),
    ]


def test_a_depth_is_one_network_of_one_kind_of_attention() -> None:
    assert [
        (variant.name, variant.factors, variant.published, changed(DEIT, variant))
        for variant in depth_variants((6, 16, 24, 32))
    ] == [
        (
            f"{depth}-{attention}",
            {"depth": depth, "attention": attention},
            published,
            {**network(depth, attention)},
        )
        for depth, numbers in (
            (6, (None, None, None)),
            (16, (78.88, None, 79.10)),
            (24, (79.35, None, 79.99)),
            (32, (79.27, None, 80.90)),
        )
        for attention, published in zip(("plain", "talking-heads", "re-attention"), numbers, strict=True)
    ]
    assert STUDIES["depth"].variants(DEIT) == depth_variants(DEPTHS)
    assert DEPTHS == (6, 12, 24, 32)


LOSSES = {"losses.contrastive": 1, "losses.mixing": 1}
RATHER_LESS = apply_overrides(DEIT, ["losses.contrastive=0.5", "losses.mixing=0.5", "losses.cosine=0.5"])


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        (
            "losses",
            [
                (12, "plain", False, 81.8),
                (12, "plain", True, 82.6),
                (24, "plain", False, 81.4),
                (24, "plain", True, None),
                (24, "talking-heads", True, 83.3),
            ],
        ),
        (
            "talking-heads",
            [
                (12, "plain", False, 81.8),
                (12, "talking-heads", False, None),
                (12, "plain", True, 82.6),
                (12, "talking-heads", True, 82.9),
            ],
        ),
    ],
)
def test_the_losses_at_the_paper_s_weights_or_as_deit_trains(
    kind: str, rows: list[tuple[int, str, bool, float | None]]
) -> None:
    assert [
        (variant.name, variant.factors, variant.published, changed(RATHER_LESS, variant))
        for variant in STUDIES[kind].variants(RATHER_LESS)  # type: ignore[index]
    ] == [
        (
            f"{depth}-{attention}-{'losses' if on else 'baseline'}",
            {"depth": depth, "attention": attention, "losses": "on" if on else 0},
            published,
            {**network(depth, attention), **(LOSSES if on else BASELINE), "losses.cosine": 0},
        )
        for depth, attention, on, published in rows
    ]


def test_fine_tuning_is_on_larger_images_at_a_constant_rate() -> None:
    recipe = apply_overrides(
        get_recipe("deit-s"),
        ["model.initial_checkpoint=run", "schedule.min_lr=1e-6", "losses.cosine=1", "schedule.cooldown_epochs=10"],
    )
    baseline, losses = STUDIES["finetune"].variants(recipe)
    assert (recipe.preprocessing.image_size, recipe.mixup.mixup, recipe.cutmix.probability) == (224, 0.8, 0)
    assert [(each.name, each.published) for each in (baseline, losses)] == [
        ("384px-baseline", 83.1),
        ("384px-losses", 84.2),
    ]
    assert [each.factors for each in (baseline, losses)] == [
        {"image size": 384, "losses": 0},
        {"image size": 384, "losses": "on"},
    ]
    common = {
        "preprocessing.image_size": 384,
        "optimizer.lr": pytest.approx(recipe.optimizer.lr / 100, rel=1e-5),
        "optimizer.weight_decay": 1e-8,
        "schedule.name": "constant",
        "schedule.min_lr": 0,
        "schedule.cooldown_epochs": 0,
        "losses.cosine": 0,
    }
    assert changed(recipe, baseline) == common
    digits = apply_overrides(DEIT, ["model.initial_checkpoint=run"])
    small = changed(digits, STUDIES["finetune"].variants(digits)[1])
    assert small == {
        "preprocessing.image_size": 48,
        "optimizer.lr": 2e-5,
        "optimizer.weight_decay": 1e-8,
        "schedule.name": "constant",
        "schedule.min_lr": 0,
    }


def test_fine_tuning_begins_with_weights() -> None:
    with pytest.raises(InputError, match=r"^a study of fine-tuning begins with weights: give --set model\.initial_che"):
        STUDIES["finetune"].variants(DEIT)


def test_each_method_is_alone() -> None:
    """Also where the recipe has one of its own."""
    own = ["model.kwargs.feat_scale=true", "model.kwargs.contranorm_scale=0.5", "cutmix.probability=0.5"]
    recipe = apply_overrides(get_recipe("digits-deepvit"), [*own, "losses.attention=0.1"])
    alone = {**PLAIN, **ALONE, "losses.cosine": 0, "losses.attention": 0}
    expected: dict[str, dict[str, Any]] = {
        "plain": {},
        "cosine-loss": {"losses.cosine": 0.3},
        "contrastive-loss": {"losses.contrastive": 1},
        "mixing-loss": {"losses.mixing": 1, "cutmix.probability": 1},
        **{
            name: {"model.kwargs.attention": name}
            for name in ("talking-heads", "re-attention", "attn-scale", "neutreno")
        },
        "feat-scale": {"model.kwargs.feat_scale": True},
        "contranorm": {"model.kwargs.contranorm_scale": 0.2},
    }
    base = dict(flat_settings(recipe.model_dump(mode="json")))
    assert [
        (variant.name, variant.factors, variant.published, base | changed(recipe, variant))
        for variant in methods_variants(recipe)
    ] == [(name, {"method": name}, None, base | alone | settings) for name, settings in expected.items()]


def test_neighbourhoods_and_all_patches_are_pooled_alike() -> None:
    pooled = {"model.kwargs.global_pool": "avg"}
    local = {"model.kwargs.attention": "local"}
    assert [
        (variant.name, variant.factors, variant.published, changed(DEIT, variant))
        for variant in STUDIES["kernel-size"].variants(DEIT)
    ] == [
        ("3x3", {"neighbourhood": "3x3"}, None, {**pooled, **local, "model.kwargs.local_kernel_size": 3}),
        ("5x5", {"neighbourhood": "5x5"}, None, {**pooled, **local, "model.kwargs.local_kernel_size": 5}),
        ("7x7", {"neighbourhood": "7x7"}, None, {**pooled, **local, "model.kwargs.local_kernel_size": 7}),
        ("all", {"neighbourhood": "all"}, None, {**pooled, "model.kwargs.attention": "plain"}),
    ]


def test_each_precision_trains_deepvit_16b_s_network() -> None:
    assert [
        (variant.name, variant.factors, variant.published, changed(DEIT, variant))
        for variant in STUDIES["precision"].variants(DEIT)
    ] == [
        (name, {"precision": name}, None, {**network(16, "re-attention"), "execution.precision": name})
        for name in ("float32", "bfloat16", "float16")
    ]


def test_a_study_names_what_its_paper_trained_and_the_recipe_that_it_varies() -> None:
    assert STUDIES["alternet"].variants(DEIT) == []
    assert {kind: study.recipe for kind, study in STUDIES.items() if study.recipe != "digits-deit"} == {
        "alternet": "digits-alternet"
    }
    assert {kind: study.paper.partition(":")[0].partition(" ")[0] for kind, study in STUDIES.items()} == {
        **dict.fromkeys(("ablation", "losses", "talking-heads", "finetune"), "Gong"),
        **dict.fromkeys(("depth", "precision"), "DeepViT's"),
        "methods": "no",
        **dict.fromkeys(("kernel-size", "alternet"), "Park"),
    }


def test_published_numbers_are_those_of_the_recipes() -> None:
    """The recipes' docstrings quote the same tables."""
    quoted = {"losses": ("patchvit-b-12", "patchvit-b-24"), "talking-heads": ("patchvit-b-12",)}
    quoted |= {"finetune": ("patchvit-b-12-384",), "depth": ("deepvit-16", "deepvit-24", "deepvit-32")}
    base = apply_overrides(DEIT, ["model.initial_checkpoint=run"])
    for kind, names in quoted.items():
        variants = depth_variants((16, 24, 32)) if kind == "depth" else STUDIES[kind].variants(base)  # type: ignore[index]
        text = " ".join(inspect.getdoc(RECIPES[name]) or "" for name in names)
        numbers = {f"{variant.published:.{2 if kind == 'depth' else 1}f}" for variant in variants if variant.published}
        assert numbers
        assert all(number in text for number in numbers), (kind, numbers)
