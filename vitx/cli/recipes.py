"""`vitx recipes`: what `vitx train` can train."""

from typing import Annotated

import typer

from vitx.cli.options import Json
from vitx.core.console import print_fields, print_json


def command(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="A recipe to show in full.")] = None,
    as_json: Json = False,
) -> None:
    """List the recipes, or show one in full: its command, hardware, time, result, and every setting."""
    from vitx.train.recipes.registry import RECIPES, describe

    if name is not None:
        _show(name, as_json=as_json)
        return
    described = {name: describe(name).partition("\n")[0] for name in sorted(RECIPES)}
    if as_json:
        print_json([{"name": name, "description": text} for name, text in described.items()])
    else:
        print_fields("vitx recipes", described)


def _show(name: str, *, as_json: bool) -> None:
    from vitx.cli.settings import as_given
    from vitx.train.recipes.recipe import flat_settings
    from vitx.train.recipes.registry import describe, get_recipe

    recipe, text = get_recipe(name).model_dump(mode="json"), describe(name)
    if as_json:
        print_json({"name": name, "description": text, "recipe": recipe})
        return
    print(text)
    print_fields(f"settings of {name}", {key: as_given(value) for key, value in flat_settings(recipe)})
