"""Options of the command line: those that several verbs share, and those that come from an option record."""

import functools
import inspect
import json
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

import typer
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from typer.core import TyperCommand

from vitx.core import options as shared
from vitx.core.errors import InputError, unknown_name
from vitx.core.options import Options

_EMPTY = "it is empty: is a variable not set?"
# By the type of an option: which values it may have in a TOML file beside a text, and how an error calls them.
_OF_TOML: dict[type, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((int, float), "a text or a number"),
}


def not_empty(given: str | None) -> str | None:
    """A script whose variable is not set would get another data set than it means."""
    if given == "":
        raise typer.BadParameter(_EMPTY)
    return given


RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, made by `vitx train`.")]
BundleArgument = Annotated[Path, typer.Argument(metavar="BUNDLE", help="A bundle, made by `vitx export`.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, only the result.")]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave unreadable images out, and count them.")]
Data = Annotated[str | None, typer.Option("--data", help=shared.DATA_HELP, callback=not_empty)]
Which = Annotated[shared.Checkpoint, typer.Option("--checkpoint", help=shared.CHECKPOINT_HELP)]
DeviceOption = Annotated[shared.Device, typer.Option("--device", help=shared.DEVICE_HELP)]
Threads = Annotated[int | None, typer.Option("--threads", min=1, max=shared.MAX_THREADS, help=shared.THREADS_HELP)]
LOCAL_RAY = "local"
_RAY_ADDRESS = re.compile(r"auto|local|ray://.+|[^/]+:\d+")


class Command(TyperCommand):
    """A verb whose `--ray` needs no value: what follows it and is no address is an argument of its own.

    Of any verb an empty path is refused: it would be the current folder. `~/` is the home folder where no shell has
    made it that, in quotes and behind `--out=`: else a folder called ~ would be made.
    """

    # Any: newer versions of typer hold click inside, older ones depend on it.
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = [_expanded(one) for one in _with_ray_address(args)]
        given = self.make_parser(ctx).parse_args([*words])[0]
        paths = _path_names(self)
        for one in self.params:
            if one.name in paths and _has_empty(given.get(one.name)):
                name = one.opts[0] if one.param_type_name == "option" else one.metavar
                raise InputError(f"{name} '': {_EMPTY}")
        try:
            return super().parse_args(ctx, [*words])
        except typer.BadParameter as error:  # which does not say what was given, and of where only that it may be
            if error.param is None:
                raise
            value, source = error.param.consume_value(ctx, given)
            if value is None:  # it is missing
                raise
            parameter, message = error.param, error.message.removeprefix("Value error, ")  # pydantic's, of a choice
            name = f"{parameter.opts[0] if parameter.param_type_name == 'option' else parameter.metavar} "
            name = f"{parameter.envvar}=" if source.name == "ENVIRONMENT" else name
            raise InputError(f"{_file_of(parameter.name, ctx)}{name}{value or repr(value)}: {message}") from None

    def format_help(self, ctx: Any, formatter: Any) -> None:
        for one in self.params:  # `_config` says it once: half of the help was names of variables
            one.show_envvar = False  # type: ignore[attr-defined]
        super().format_help(ctx, formatter)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[Any]] = {}
        for one in self.get_params(ctx):
            title = getattr(one, "rich_help_panel", None) or f"{one.param_type_name.capitalize()}s"
            if (line := one.get_help_record(ctx)) is not None:
                sections.setdefault(title, []).append(line)
        for title, lines in sections.items():
            with formatter.section(title):
                formatter.write_dl(lines)


def _annotations(command: Any) -> dict[str, Any]:
    parameters = inspect.signature(command.callback, eval_str=True).parameters.values()
    return {one.name: one.annotation for one in parameters}


def _path_names(command: Any) -> set[str]:
    """The parameters of a verb that are paths, by their annotations; also an `out` that may be a URL."""
    return {"out", *(name for name, annotation in _annotations(command).items() if _has(annotation, Path))}


def _has(annotation: Any, kind: type) -> bool:
    return annotation is kind or any(_has(one, kind) for one in get_args(annotation))


def _has_empty(value: Any) -> bool:
    return "" in (value if isinstance(value, list | tuple) else (value,))


def _expanded(word: str) -> str:
    option, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    return f"{option}{equals}{_at_home(value)}"


def _at_home(value: Any) -> Any:
    """A text, a path, or a list of these, with `~/` as the home folder; any other value as it is."""
    if isinstance(value, list):
        return [_at_home(one) for one in value]
    if isinstance(value, str | Path) and str(value).startswith("~/"):
        return type(value)(os.path.expanduser(value))
    return value


def _with_ray_address(arguments: Sequence[str]) -> list[str]:
    return [
        f"--ray={LOCAL_RAY}" if one == "--ray" and not _RAY_ADDRESS.fullmatch(after) else one
        for one, after in pairwise([*arguments, ""])
    ]


def _file_of(name: str | None, context: typer.Context) -> str:
    """What an error begins with if a parameter's value is from --config."""
    source = context.get_parameter_source(name or "")
    return f"--config {context.params['config']}: " if source is not None and source.name == "DEFAULT_MAP" else ""


def from_records(verb: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a verb take option records: each field becomes an option, in the place of the record.

    Options are also read from --config and from the environment, VITX_VERB_OPTION; the command line goes before the
    environment, that before the file, that before the default. A record is made of what was given, so that its
    `model_fields_set` says what that was. Raises InputError for values that the record refuses.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        given = inspect.signature(command)
        records = {one.name: one.annotation for one in given.parameters.values() if _is_record(one.annotation)}
        parameters = [_parameter("context", typer.Context, inspect.Parameter.empty)]
        for one in given.parameters.values():
            own = [one.replace(kind=one.KEYWORD_ONLY)]
            parameters += _parameters(one.annotation, verb) if one.name in records else own
        parameters.append(_config(verb))

        @functools.wraps(command)
        def run(context: typer.Context, config: Path | None = None, **values: Any) -> None:
            made = {name: _record(record, context, values) for name, record in records.items()}
            command(**made, **{name: values[name] for name in given.parameters if name not in records})

        run.__signature__ = given.replace(parameters=parameters)  # type: ignore[attr-defined]  # functions may have one
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        return run

    return decorate


def _is_record(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Options)


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _parameters(record: type[Options], verb: str, heading: str | None = None) -> Iterator[inspect.Parameter]:
    for name, field in record.model_fields.items():
        heading = record.headings.get(name, heading)
        if _is_record(field.annotation):
            yield from _parameters(field.annotation, verb, heading)  # type: ignore[arg-type]  # it is a record
        else:
            yield _option(name, field, verb, heading)


def _option(name: str, field: FieldInfo, verb: str, heading: str | None) -> inspect.Parameter:
    """The parameter from which typer makes the option of this field."""
    extra: dict[str, Any] = field.json_schema_extra or {}  # type: ignore[assignment]  # a dict where `option` made it
    flag = _flag(name, field)
    annotation: Any = field.annotation
    default = field.default
    if extra.get("text"):
        annotation = str if default else str | None
        default = ",".join(map(str, default)) if default else None
    elif get_origin(annotation) is tuple:
        (item, _) = get_args(annotation)
        annotation, default = list[item] | None, default or None  # type: ignore[valid-type]  # a value, to mypy
    bounds = {
        end: getattr(one, key)
        for one in field.metadata
        for end, key in (("min", "ge"), ("max", "le"))
        if hasattr(one, key)
    }
    said: dict[str, Any] = {"help": field.description, "metavar": extra.get("metavar"), **bounds}
    if extra.get("argument"):
        return _parameter(name, Annotated[annotation, typer.Argument(**said)], default)
    said |= {"envvar": _environment(verb, flag), "rich_help_panel": heading}
    return _parameter(name, Annotated[annotation, typer.Option(flag, **said)], default)


def _record(record: type[Options], context: typer.Context, values: dict[str, Any]) -> Any:
    """The record of those values that did not come from their defaults."""
    made: dict[str, Any] = {}
    for name, field in record.model_fields.items():
        if _is_record(field.annotation):
            made[name] = _record(field.annotation, context, values)  # type: ignore[arg-type]  # it is a record
            continue
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            made[name] = _at_home(values[name]) if source.name == "ENVIRONMENT" else values[name]
            if values[name] is None and context.default_map:  # typer 0.19 leaves arguments of --config out
                made[name] = context.default_map.get(name)
    try:
        return record(**made)
    except ValidationError as error:
        first = error.errors()[0]
        message = str(first["msg"]).removeprefix("Value error, ")
        if not first["loc"]:
            raise InputError(message) from None
        name = str(first["loc"][0])
        flag = _flag(name, record.model_fields[name])
        raise InputError(f"{_file_of(name, context)}{flag} {first['input']}: {message}") from None


def require_effect(options: Options, fields: set[str], otherwise: str) -> None:
    """Raise InputError naming an option that was given and is none of `fields`, those that have an effect."""
    for name, field in type(options).model_fields.items():
        if name in options.model_fields_set - fields and getattr(options, name) != field.default:
            raise InputError(f"{_flag(name, field)} has no effect {otherwise}")


def _flag(name: str, field: FieldInfo) -> str:
    extra: Any = field.json_schema_extra or {}
    return extra.get("flag") or f"--{name.rstrip('_').replace('_', '-')}"


def _environment(verb: str, flag: str) -> str:
    return f"VITX_{verb}_{flag.removeprefix('--').replace('-', '_')}".upper()


def _config(verb: str) -> inspect.Parameter:
    said = "Read options from this file: device = 'cpu'. Or each from the environment: "
    said += f"{_environment(verb, '--device')}."
    envvar = _environment(verb, "--config")
    option = typer.Option(
        "--config", envvar=envvar, metavar="FILE.toml", help=said, is_eager=True, callback=_read_config
    )
    return _parameter("config", Annotated[Path | None, option], None)


def _read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Let a TOML file give defaults; raise InputError for one that is no such file, or an option that is unknown."""
    if path is None:
        return None
    path = _at_home(path)  # of a variable
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
        repr(values)  # a hexadecimal number may have more digits than can be printed
    except (OSError, ValueError, RecursionError) as error:  # what TOML, its numbers and UTF-8 raise is a ValueError
        raise InputError(f"--config {path}: cannot be read as TOML: {error}") from None
    # By the name on the command line, with dashes or underscores.
    known = {
        flag.lstrip("-").replace("-", "_"): parameter
        for parameter in context.command.params
        for flag in (parameter.opts[:1] if parameter.param_type_name == "option" else [parameter.name or ""])
        if flag != "--config"
    }
    paths, annotations = _path_names(context.command), _annotations(context.command)
    defaults: dict[str, Any] = {}
    for name, value in values.items():
        parameter = known.get(name.replace("-", "_"))
        if parameter is None or parameter.name is None:
            raise unknown_name(f"option in --config {path}:", name, known)
        if parameter.name in defaults:
            raise InputError(f"--config {path}: '{name}' is there with dashes and with underscores: expected it once")
        if parameter.name in paths and _has_empty(value):
            raise InputError(f"--config {path}: {name} = '': {_EMPTY}")
        defaults[parameter.name] = _config_value(path, name, value, parameter, annotations[parameter.name])
    context.default_map = defaults
    return path


def _config_value(path: Path, name: str, value: Any, parameter: Any, annotation: Any) -> Any:
    """A value of a TOML file as the command line gives it: true, false, a text, or texts; several for one of commas.

    `~/` is the home folder there too.
    """
    types, expected = next((of for kind, of in _OF_TOML.items() if _has(annotation, kind)), ((), "a text"))
    several = getattr(parameter, "multiple", False) or parameter.nargs == -1
    values = value if isinstance(value, list) else [value]
    if all(type(one) in (str, *types) for one in values):
        texts = [_at_home(str(one)) for one in values]
        joined = ",".join(texts)
        if several:
            return texts
        if not isinstance(value, list):
            return value if types == (bool,) else joined
        if _has(annotation, str) and joined.split(",") == texts:  # there is one, and none has a comma
            return joined
    if several or _has(annotation, str):
        expected += f", or a list of them{'' if several else ' without commas'}"
    raise InputError(f"--config {path}: {name} = {json.dumps(value, default=str)}: expected {expected}")
