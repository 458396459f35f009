"""The recipes by name."""

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path

from vitx.core.errors import unknown_name
from vitx.train.recipes import imagenet
from vitx.train.recipes.digits import digits_alternet, digits_deepvit, digits_deit, digits_patchvit
from vitx.train.recipes.recipe import RECIPE_FILE, Recipe, apply_overrides, read_recipe

# A recipe has the name of its function, with dashes.
RECIPES: dict[str, Callable[[], Recipe]] = {
    make.__name__.replace("_", "-"): make
    for make in (
        digits_deit,
        digits_deepvit,
        digits_patchvit,
        digits_alternet,
        imagenet.deit_ti,
        imagenet.deit_s,
        imagenet.deit_b,
        imagenet.patchvit_s_12,
        imagenet.patchvit_s_24,
        imagenet.patchvit_b_12,
        imagenet.patchvit_b_24,
        imagenet.patchvit_b_12_384,
        imagenet.patchvit_b_24_512,
        imagenet.patchvit_l_finetune,
        imagenet.deepvit_16,
        imagenet.deepvit_24,
        imagenet.deepvit_32,
        imagenet.deepvit_s,
        imagenet.deepvit_l,
        imagenet.deepvit_l_384,
        imagenet.alternet_cifar,
    )
}


def get_recipe(name: str) -> Recipe:
    """Return the recipe called `name`; raise InputError with the nearest names when there is none."""
    if name not in RECIPES:
        raise unknown_name("recipe", name, RECIPES)
    return RECIPES[name]()


def describe(name: str) -> str:
    """The first line of a recipe's docstring."""
    return (inspect.getdoc(RECIPES[name]) or "").partition("\n")[0]


def resolve_recipe(
    name: str, *, data: str | None = None, overrides: Sequence[str] = (), resumed: Path | None = None
) -> Recipe:
    """Return the recipe `name` on `data` with `key=value` overrides.

    With a run folder `resumed` the overrides apply to its recipe.json, so that the overrides of the first start need
    not be given again.
    """
    recipe = get_recipe(name)
    if resumed is not None and (resumed / RECIPE_FILE).is_file():
        stored = read_recipe(resumed)
        recipe = stored if stored.name == name else recipe
    if data is not None and recipe.on_data(data).data != recipe.data:
        recipe = recipe.on_data(data)
    return apply_overrides(recipe, overrides)
