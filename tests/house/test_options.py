"""Every verb's arguments, options and defaults are those of golden/options.json, and docs/options.md lists them; the
settings of a recipe are those of golden/settings.json.

When a change is meant: `python tests/house/test_options.py --write`, and commit the files with it.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from typer.main import get_command

from vitx.cli import app
from vitx.train.recipes.settings import all_settings

GOLDEN = Path(__file__).parent / "golden" / "options.json"
SETTINGS = GOLDEN.with_name("settings.json")
PAGE = Path(__file__).parents[2] / "docs" / "options.md"
HEAD = """# Options

Every argument and option of every verb, as `vitx VERB -h` prints them, and the variable of each. Units are in the names
or in the meaning.

Where a verb has `--config FILE.toml`, each option may come from four places; the first that has it counts:

1. the command line: `--max-batch 64`;
2. the environment, under the name that the table gives: several values with spaces between, several paths with ':';
3. the file: `max-batch = 64`, `watch = true`, `bundles = ["a.vitx"]`, `batch = [1, 8]`, or a text as on the command
   line, `batch = "1,8"`; a name in it that is no option is refused, and a value of another type;
4. the default.

`~/` at the beginning of a value is the home folder in all of them, in quotes and behind `--out=` too.

A value that is refused is one line that says where it came from (`error: VITX_SERVE_PORT=a: …`) and exit code 2. In
Python the same options are one record: `vitx.serve.options.ServeOptions(max_batch=64)`.

Kubernetes sets `VITX_SERVE_PORT` by itself where a Service is called `vitx-serve`: name it otherwise, or set
`enableServiceLinks: false`.
"""
# Python's names for click's types, for versions of typer whose parameters have a click type.
CLICK_TYPES = {"text": "str", "integer": "int", "boolean": "bool", "filename": "Path", "directory": "Path"}

# verb path ("" for vitx itself) -> its help and parameters
Options = dict[str, dict[str, Any]]


def read_options() -> Options:
    return dict(_commands("", get_command(app)))


def formatted(options: Options) -> str:
    """JSON with one line for each parameter, so that a changed option is one line of a diff."""
    verbs = []
    for path, command in options.items():
        parameters = [f"{_json(name)}: {_json(fields)}" for name, fields in command["parameters"].items()]
        lines = [f"{_json(key)}: {_json(value)}" for key, value in command.items() if key != "parameters"]
        lines.append(f'"parameters": {_object(parameters, 2)}')
        verbs.append(f"{_json(path)}: {_object(lines, 1)}")
    return _object(verbs, 0) + "\n"


def formatted_settings() -> str:
    """JSON with one line for each setting, as `vitx settings` lists them."""
    settings = [one._asdict() for one in all_settings()]
    return _object([f"{_json(one.pop('key'))}: {_json(one)}" for one in settings], 0) + "\n"


def _object(members: list[str], indent: int) -> str:
    outer = "\n" + " " * indent
    return "{" + ",".join(f"{outer} {member}" for member in members) + outer + "}"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# The types are Any below because newer versions of typer contain click and older ones depend on it.
def _commands(path: str, command: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a verb and, for a group, its sub-verbs, in the order of the help text."""
    yield (
        path,
        _without_empty(
            help=command.help,
            help_flags=command.context_settings.get("help_option_names"),
            env_prefix=command.context_settings.get("auto_envvar_prefix"),
            hidden=command.hidden,
            parameters={_name(parameter): _parameter(parameter) for parameter in command.params},
        ),
    )
    if hasattr(command, "list_commands"):
        for name in command.list_commands(None):
            yield from _commands(f"{path} {name}".strip(), command.get_command(None, name))


def _name(parameter: Any) -> str:
    """The name that a user sees, --batch-sizes or BUNDLE, not that of the Python parameter."""
    if parameter.param_type_name == "option":
        return str(parameter.opts[0])
    name = str(parameter.metavar or parameter.name.upper())
    return name if parameter.required else f"[{name}]"


def _parameter(parameter: Any) -> dict[str, Any]:
    type_name, choices, least, most = _type(parameter)
    return _without_empty(
        kind=parameter.param_type_name,
        other_flags=parameter.opts[1:] or None,
        opposite_flags=parameter.secondary_opts or None,
        type=type_name,
        choices=choices,
        min=least,
        max=most,
        default=_plain(parameter.default),
        required=parameter.required,
        multiple=bool(getattr(parameter, "multiple", False)) or parameter.nargs == -1,
        metavar=parameter.metavar,
        envvar=parameter.envvar,
        hidden=bool(getattr(parameter, "hidden", False)),
        heading=getattr(parameter, "rich_help_panel", None),
        help=parameter.help,
    )


def _without_empty(**fields: Any) -> dict[str, Any]:
    """The fields that are not null or false; a default of false stays."""
    return {
        name: value for name, value in fields.items() if value is not None and (value is not False or name == "default")
    }


def _type(parameter: Any) -> tuple[str, list[str] | None, float | None, float | None]:
    """Return (name, choices, minimum, maximum) of a parameter's type."""
    if (described := getattr(parameter, "type_descriptor", None)) is not None:
        annotation = described.annotation
        if get_origin(annotation) is list:
            (annotation,) = get_args(annotation)
        choices = [str(choice) for choice in described.choices] if described.is_choice else None
        name = "choice" if choices else annotation.__name__
        return name, choices, parameter.min, parameter.max
    click = parameter.type
    choices = [str(choice) for choice in click.choices] if click.name == "choice" else None
    name = click.name.removesuffix(" range")
    if name == "path" or (name in ("file", "directory") and click.path_type):
        name = "Path"
    return CLICK_TYPES.get(name, name), choices, getattr(click, "min", None), getattr(click, "max", None)


def _plain(default: Any) -> Any:
    if callable(default):
        return f"computed by {default.__name__}"
    if isinstance(default, list | tuple):
        return [_plain(value) for value in default] or None
    return default if default is None or isinstance(default, bool | int | float | str) else str(default)


def page(options: Options) -> str:
    """docs/options.md: one table a verb."""
    parts = [HEAD]
    for path, command in options.items():
        if not path:
            continue
        named = any("envvar" in fields for fields in command["parameters"].values())
        columns = ["option", "value", "default", *(["environment"] if named else []), "meaning"]
        rows = [columns, ["---"] * len(columns)]
        heading = None
        # As the help has them: what has no heading first.
        for name, fields in sorted(command["parameters"].items(), key=lambda each: "heading" in each[1]):
            if fields.get("heading") != heading:
                heading = fields["heading"]
                rows.append([f"**{heading}**", *[""] * (len(columns) - 1)])
            environment = [f"`{fields['envvar']}`" if "envvar" in fields else ""] if named else []
            cells = [f"`{name}`", _value(fields), _default(fields), *environment, fields["help"]]
            rows.append([cell.replace("|", "\\|") for cell in cells])
        table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
        parts.append(f"## vitx {path}\n\n{command['help']}\n\n{table}\n")
    return "\n".join(parts)


def _value(fields: dict[str, Any]) -> str:
    if "choices" in fields:
        return ", ".join(fields["choices"])
    if fields["type"] == "bool":
        return "flag"
    least, most = fields.get("min"), fields.get("max")
    bounds = f", {least:g} to {most:g}" if most is not None else f", at least {least:g}" if least is not None else ""
    return f"{fields.get('metavar') or fields['type']}{bounds}{', repeated' if fields.get('multiple') else ''}"


def _default(fields: dict[str, Any]) -> str:
    default = fields.get("default")
    return "required" if fields.get("required") else "" if default is None or default is False else str(default)


def differences(golden: Options, found: Options) -> list[str]:
    """One line for each field that changed: `serve --port, default: 8000 → 8001`."""
    lines = _names("", list(golden), list(found))
    for verb in golden.keys() & found.keys():
        before, after = dict(golden[verb]), dict(found[verb])
        old, new = before.pop("parameters"), after.pop("parameters")
        lines += _fields(verb or "vitx", before, after)
        lines += _names(f"{verb or 'vitx'} ", list(old), list(new))
        for name in old.keys() & new.keys():
            lines += _fields(f"{verb or 'vitx'} {name}", old[name], new[name])
    return sorted(lines)


def _names(where: str, before: list[str], after: list[str]) -> list[str]:
    removed = [f"{where}{name}: is gone" for name in before if name not in after]
    added = [f"{where}{name}: is new" for name in after if name not in before]
    old, new = [name for name in before if name in after], [name for name in after if name in before]
    return [*removed, *added, *([f"{where}order: {old} → {new}"] if old != new else [])]


def _fields(where: str, before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [
        f"{where}, {field}: {_json(before.get(field))} → {_json(after.get(field))}"
        for field in before.keys() | after.keys()
        if before.get(field) != after.get(field)
    ]


def test_options_and_defaults_are_the_golden_ones() -> None:
    found = differences(json.loads(GOLDEN.read_text(encoding="utf-8")), read_options())
    assert not found, "\n".join(["the command line is not that of golden/options.json", *found, str(__doc__)])


def test_the_settings_of_a_recipe_are_the_golden_ones() -> None:
    assert json.loads(formatted_settings()) == json.loads(SETTINGS.read_text(encoding="utf-8")), __doc__


def test_the_page_lists_them() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(read_options()), "python tests/house/test_options.py --write"


def test_a_change_is_named() -> None:
    before = {"--port": {"type": "int", "default": 8000}, "--timeout-ms": {"type": "float"}, "--host": {"type": "str"}}
    after = {"--host": {"type": "str"}, "--port": {"type": "int", "default": 8001, "max": 65535}, "--late": {}}
    assert differences(
        {"serve": {"help": "Serve.", "parameters": before}, "top": {"parameters": {}}},
        {"serve": {"parameters": after}},
    ) == [
        "serve --late: is new",
        "serve --port, default: 8000 → 8001",
        "serve --port, max: null → 65535",
        "serve --timeout-ms: is gone",
        "serve order: ['--port', '--host'] → ['--host', '--port']",
        'serve, help: "Serve." → null',
        "top: is gone",
    ]


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(formatted(read_options()), encoding="utf-8")
    SETTINGS.write_text(formatted_settings(), encoding="utf-8")
    PAGE.write_text(page(read_options()), encoding="utf-8")
