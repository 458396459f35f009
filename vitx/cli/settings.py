"""`vitx settings`: what can be set in a recipe."""

import json
from typing import Annotated

import typer

from vitx.cli.options import Json
from vitx.core.console import print_json, print_table


def command(
    key: Annotated[
        str | None, typer.Argument(metavar="KEY", help="A setting, or a group such as optimizer. Default: all.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the keys of `vitx train --set` and of recipe files: type, bounds, default and reason."""
    from vitx.train.recipes.settings import all_settings, settings_named

    found = settings_named(key) if key else all_settings()
    if as_json:
        print_json([setting._asdict() for setting in found])
        return
    rows = [
        (one.key, one.type, one.bounds, "the recipe's" if one.default is None else as_given(one.default), one.meaning)
        for one in found
    ]
    print_table("vitx train --set KEY=VALUE", ("key", "type", "bounds", "default", "what it is"), rows)


def as_given(value: object) -> str:
    """A value as `--set` takes it."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
