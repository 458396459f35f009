"""The variants of each study beside the papers' tables."""

import inspect

from vitx.train.recipes.recipe import apply_overrides
from vitx.train.recipes.registry import RECIPES, get_recipe
from vitx.train.study.variants import PUBLISHED, STUDIES, ablation_variants, depth_variants


def test_the_ablation_has_the_rows_of_the_papers_table() -> None:
    recipe = apply_overrides(get_recipe("digits-deit"), ["losses.cosine=0.3"])
    baseline, *variants = ablation_variants(recipe)
    as_deit = apply_overrides(recipe, baseline.overrides)
    assert (as_deit.mixup.mixup, as_deit.mixup.cutmix, as_deit.cutmix.probability) == (0.8, 1, 0)
    assert (baseline.published, as_deit.losses.need_tokens) == (81.8, False)
    assert len({tuple(variant.factors.values()) for variant in variants}) == len(variants) == 8
    for variant in variants:
        losses = apply_overrides(recipe, variant.overrides).losses
        on = tuple(name for name in ("cosine", "contrastive", "mixing") if getattr(losses, name))
        assert variant.name == ("+".join(on) or "none")
        assert losses.cosine in (0, 0.3)
        assert variant.published == PUBLISHED.get(on)
    assert [variant.published for variant in variants].count(None) == 2  # none of the losses, and all
    assert ablation_variants(get_recipe("digits-deit"))[2].factors["cosine"] == 1.0


def test_a_depth_is_one_network_of_one_kind_of_attention() -> None:
    variants = depth_variants((6, 12))
    assert [variant.name for variant in variants][:3] == ["6-plain", "6-talking-heads", "6-re-attention"]
    kwargs = apply_overrides(get_recipe("digits-deepvit"), variants[5].overrides).model.kwargs
    assert (kwargs["depth"], kwargs["attention"]) == (12, "re-attention")


def test_published_numbers_are_those_of_the_recipes() -> None:
    """The recipes' docstrings quote the same tables."""
    quoted = {"losses": ("patchvit-b-12", "patchvit-b-24"), "talking-heads": ("patchvit-b-12",)}
    quoted |= {"finetune": ("patchvit-b-12-384",), "depth": ("deepvit-16", "deepvit-24", "deepvit-32")}
    base = apply_overrides(get_recipe("digits-deit"), ["model.initial_checkpoint=run"])
    for kind, names in quoted.items():
        variants = depth_variants((16, 24, 32)) if kind == "depth" else STUDIES[kind].variants(base)  # type: ignore[index]
        text = " ".join(inspect.getdoc(RECIPES[name]) or "" for name in names)
        numbers = {f"{variant.published:.{2 if kind == 'depth' else 1}f}" for variant in variants if variant.published}
        assert numbers
        assert all(number in text for number in numbers), (kind, numbers)
