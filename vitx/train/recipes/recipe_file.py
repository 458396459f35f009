"""A file of settings, TOML or JSON, as `--recipe` takes it: those it has are changed, and the others stay."""

import contextlib
import json
import tomllib
from pathlib import Path
from typing import Any

from vitx.core.errors import InputError
from vitx.train.recipes.recipe import NOT_OVERRIDABLE, Recipe, check_effect, check_key, validated


def read_settings(path: Path) -> dict[str, Any]:
    """The tables of a .toml or .json file, such as a run's recipe.json; raise InputError for a file that has none."""
    read = {".toml": tomllib.loads, ".json": json.loads}.get(path.suffix.lower())
    if read is None:
        raise InputError(f"--recipe {path}: expected a .toml or .json file, such as a run's recipe.json")
    try:
        plain = read(path.read_text(encoding="utf-8"))
        with contextlib.suppress(RecursionError):  # of which `with_settings` says more
            repr(plain)  # a hexadecimal number may have more digits than can be printed
    except (OSError, ValueError, RecursionError) as error:  # what either format and UTF-8 raise is a ValueError
        raise InputError(f"--recipe {path} cannot be read: {error}") from None
    if not isinstance(plain, dict):
        raise InputError(f"--recipe {path}: expected settings by name, such as epochs = 10")
    return plain


def with_settings(recipe: Recipe, plain: dict[str, Any], path: Path) -> Recipe:
    """The recipe with the settings of a file; another network, optimizer or schedule drops the recipe's `kwargs` of it.

    Raises InputError, naming file and key, for one that is unknown, of another type or out of range, and for settings
    that contradict each other. `name` and `data` are read elsewhere.
    """
    given = {key: value for key, value in plain.items() if key not in NOT_OVERRIDABLE}
    try:
        _check_keys(given, recipe)
        return validated(_merged(recipe.model_dump(mode="json"), given))
    except InputError as error:
        raise InputError(f"--recipe {path}: {error}") from None
    except RecursionError:  # the parser takes dotted keys of any length
        expected = "expected a few names with dots between, such as model.kwargs.depth = 12"
        raise InputError(f"--recipe {path} has settings nested too deeply: {expected}") from None


def _check_keys(plain: dict[str, Any], recipe: Recipe, prefix: str = "") -> None:
    for key, value in plain.items():
        if "." in key:
            raise InputError(f"'{prefix}{key}' is one name with dots in it: expected a table in place of each dot")
        if isinstance(value, dict) and not prefix.endswith("kwargs."):
            _check_keys(value, recipe, f"{prefix}{key}.")
        else:
            check_key(f"{prefix}{key}")
            check_effect(f"{prefix}{key}", value, recipe.model.kwargs)
            try:
                json.dumps(value)
            except TypeError:  # TOML has dates and times
                expected = "a text, a number, true, false, a list or a table"
                raise InputError(f"{prefix}{key} is {value}: expected {expected}") from None


def _merged(before: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """A whole table, as of a run's recipe.json, says which arguments there are, and so which there are not."""
    whole = before.keys() <= given.keys()
    merged = dict(before)
    if "kwargs" in before and given.get("name", before.get("name")) != before.get("name"):
        merged["kwargs"] = {}  # they were chosen for another network, optimizer or schedule
    for key, value in given.items():
        inner = merged.get(key)
        if not (whole and key == "kwargs") and isinstance(value, dict) and isinstance(inner, dict):
            merged[key] = _merged(inner, value)
        else:
            merged[key] = value
    return merged
