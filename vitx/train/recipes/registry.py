"""The recipes by name."""

import inspect
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from vitx.core.errors import InputError, unknown_name
from vitx.train.recipes import imagenet
from vitx.train.recipes.digits import digits_alternet, digits_deepvit, digits_deit, digits_patchvit
from vitx.train.recipes.photos import fitted, photos
from vitx.train.recipes.recipe import RECIPE_FILE, ModelChoice, Recipe, apply_overrides, from_root, read_recipe
from vitx.train.recipes.recipe_file import read_settings, with_settings

# A recipe has the name of its function, with dashes.
RECIPES: dict[str, Callable[[], Recipe]] = {
    make.__name__.replace("_", "-"): make
    for make in (
        photos,
        digits_deit,
        digits_deepvit,
        digits_patchvit,
        digits_alternet,
        imagenet.deit_ti,
        imagenet.deit_s,
        imagenet.deit_b,
        imagenet.attnscale_s_12,
        imagenet.attnscale_s_24,
        imagenet.featscale_s_12,
        imagenet.featscale_s_24,
        imagenet.attnscale_cait_s24,
        imagenet.featscale_cait_s24,
        imagenet.neutreno_ti,
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
    """A recipe's docstring, whose first line is its summary."""
    return inspect.getdoc(RECIPES[name]) or "not described: python -OO leaves the docstrings out"


def resolve_recipe(
    name: str | None,
    *,
    data: str | None = None,
    overrides: Sequence[str] = (),
    resumed: Path | None = None,
    start: str | None = None,
    file: Path | None = None,
    device: str = "auto",
) -> Recipe:
    """Return the recipe `name` on `data`, begun from `start`, with the settings of `file`, then `key=value` overrides.

    file: TOML or JSON (`recipe_file`); its `name` is the recipe where none is given, its `data` the images. start:
    weights to fine-tune (`starting_point.begun_from`). device: where the run will be, to which `photos` is fitted.
    With a run folder `resumed` the overrides apply to its recipe.json, so that what the first start was given, the name
    too, need not be given again. Raises InputError for what cannot be used.
    """
    settings = read_settings(file) if file is not None else {}
    stored = read_recipe(resumed) if resumed is not None and (resumed / RECIPE_FILE).is_file() else None
    name = name or settings.get("name") or (stored.name if stored else None)
    if not isinstance(name, str):
        raise InputError('no recipe: expected a name, such as photos, or --recipe FILE with one (name = "photos")')
    recipe = get_recipe(name)
    goes_on = stored is not None and stored.name == name
    if stored is not None and goes_on:
        recipe = stored
    given = f"--recipe {file}: data" if data is None else "--data"
    data = settings.get("data", recipe.data) if data is None else data
    if not isinstance(data, str) or (recipe.data and not data):  # empty such as of a variable that is not set
        raise InputError(f"{given} is {data!r}: expected a text, such as the path of a folder of images")
    if data and recipe.on_data(data).data != (recipe.data and recipe.on_data(recipe.data).data):
        recipe = recipe.on_data(data)
    if not recipe.data:
        raise InputError(f"recipe '{name}' has no images of its own: give --data FOLDER, with a folder for each class")
    if start is not None or not goes_on:
        recipe = _fitted(recipe, start, device, goes_on=goes_on)
    begun = recipe.model
    if file is not None:
        recipe = with_settings(recipe, settings, file)
    recipe = apply_overrides(recipe, overrides)
    if start is not None:
        _check_still_begun_from(start, begun, recipe.model)
    return _from_any_folder(recipe, stored)


def _check_still_begun_from(start: str, begun: ModelChoice, chosen: ModelChoice) -> None:
    """Raise InputError where a file, such as a run's whole recipe.json, or --set has other initial weights."""
    compared = ("name", "initial_checkpoint") if begun.initial_checkpoint == "timm" else ("initial_checkpoint",)
    needed = [
        f"model.{name}={getattr(begun, name)}" for name in compared if getattr(begun, name) != getattr(chosen, name)
    ]
    if needed:
        raise InputError(
            f"--from {start} has no effect: --recipe or --set, which go before it, begin with other weights; leave it "
            f"out, or give {shlex.join(word for setting in needed for word in ('--set', setting))}"
        )


def _from_any_folder(recipe: Recipe, stored: Recipe | None) -> Recipe:
    """The recipe with the teacher and the initial weights by absolute paths, but those that the run had `stored`.

    A run that is resumed needs its teacher, and a copy of recipe.json both, wherever they are used from.
    """
    teacher, weights = recipe.distillation.teacher, recipe.model.initial_checkpoint
    changed = {}
    if teacher not in ("", stored and stored.distillation.teacher):
        network, at, file = teacher.partition("@") if teacher.startswith("timm:") else ("", "", teacher)
        changed["distillation.teacher"] = f"{network}{at}{from_root(file)}" if file else teacher
    if weights not in ("", "timm", stored and stored.model.initial_checkpoint):
        changed["model.initial_checkpoint"] = from_root(weights)
    return recipe.changed(changed)


def _fitted(recipe: Recipe, start: str | None, device: str, *, goes_on: bool) -> Recipe:
    """A new run's recipe begun from `start`, if one is given, and `photos` as its images and the machine ask for."""
    if start is not None:
        from vitx.train.starting_point import begun_from

        begun = begun_from(recipe, start)
        if goes_on:
            now, before = ((each.model.initial_checkpoint, each.model.name) for each in (begun, recipe))
            if now != before:
                began = f"'{recipe.model.initial_checkpoint}'" if recipe.model.initial_checkpoint else "random weights"
                raise InputError(f"--from {start}: the run began from {began}: leave it out, or pass another --out")
            return recipe
        recipe = begun
    if recipe.name == photos.__name__:
        from vitx.train.starting_point import photographs_of

        recipe = fitted(recipe, photographs_of(recipe.data, device))
    return recipe
