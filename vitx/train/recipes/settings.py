"""What can be set in a recipe: key, type, bounds, default and reason, read from the records."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from vitx.core.errors import unknown_name
from vitx.core.files import Record
from vitx.train.recipes.recipe import NOT_OVERRIDABLE, Recipe

BOUNDS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}


class Setting(NamedTuple):
    """One key of `--set`. default: None where each recipe has its own."""

    key: str
    type: str
    bounds: str
    default: Any
    meaning: str


def all_settings() -> list[Setting]:
    """Every setting of a recipe, in the order of the records."""
    return [setting for setting in _settings(Recipe, "") if setting.key not in NOT_OVERRIDABLE]


def settings_named(key: str) -> list[Setting]:
    """The setting `key`, or those of a group such as `optimizer`; raise InputError for a name that is neither."""
    found = [setting for setting in all_settings() if setting.key == key or setting.key.startswith(f"{key}.")]
    if not found:
        raise unknown_name("setting", key, [setting.key for setting in all_settings()])
    return found


def _settings(record: type[Record], prefix: str) -> Iterator[Setting]:
    for name, field in record.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Record):
            yield from _settings(field.annotation, f"{prefix}{name}.")
            continue
        key = f"{prefix}{name}" + (".NAME" if get_origin(field.annotation) is dict else "")
        bounds = [
            f"{sign} {getattr(one, end):g}"
            for end, sign in BOUNDS.items()
            for one in field.metadata
            if hasattr(one, end)
        ]
        yield Setting(
            key,
            _type_name(field.annotation),
            ", ".join(bounds),
            None if field.is_required() else field.get_default(call_default_factory=True),
            field.description or "",
        )


def _type_name(annotation: Any) -> str:
    """A type as one would say it: a choice is listed, a tuple is a list."""
    arguments, origin = get_args(annotation), get_origin(annotation)
    if origin is Annotated:
        return _type_name(arguments[0])
    if origin is tuple:
        return f"list of {_type_name(arguments[0])}s"
    if origin is Literal:
        return " | ".join(map(str, arguments))
    name = getattr(origin or annotation, "__name__", "")
    return {"str": "text", "int": "whole number", "float": "number", "bool": "true | false", "Stage": "table"}.get(
        name, "value"
    )
