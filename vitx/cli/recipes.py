"""`vitx recipes`: what `vitx train` can train."""

from vitx.cli.options import Json


def command(as_json: Json = False) -> None:
    """List the recipes."""
    from vitx.core.console import print_fields, print_json
    from vitx.train.recipes.registry import RECIPES, describe

    described = {name: describe(name) for name in sorted(RECIPES)}
    if as_json:
        print_json([{"name": name, "description": text} for name, text in described.items()])
    else:
        print_fields("vitx recipes", described)
