"""What can be set in a recipe: key, type, bounds, default and reason, read from the records."""

from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin

from pydantic.fields import FieldInfo

from vitx.core.errors import unknown_name
from vitx.train.recipes.recipe import NOT_OVERRIDABLE, Recipe, setting_fields

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
    return [_setting(key, field) for key, field in setting_fields(Recipe) if key not in NOT_OVERRIDABLE]


def settings_named(key: str) -> list[Setting]:
    """The setting `key`, or those of a group such as `optimizer`; raise InputError for a name that is neither."""
    found = [setting for setting in all_settings() if setting.key == key or setting.key.startswith(f"{key}.")]
    if not found:
        raise unknown_name("setting", key, [setting.key for setting in all_settings()])
    return found


def _setting(key: str, field: FieldInfo) -> Setting:
    bounds = [
        f"{sign} {getattr(one, end):g}" for end, sign in BOUNDS.items() for one in field.metadata if hasattr(one, end)
    ]
    return Setting(
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
