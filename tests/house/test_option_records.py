"""Option records on the command line: --config, the environment, their order, and what is refused."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from pydantic import BeforeValidator, ValidationError
from typer.testing import CliRunner

from vitx.bench.options import BenchOptions
from vitx.cli import app as verbs
from vitx.cli.options import Command, from_records, require_effect
from vitx.core.errors import InputError
from vitx.core.options import Options, comma_separated, number_range, option
from vitx.export.options import EngineOptions, ExportOptions
from vitx.parity.options import ParityOptions
from vitx.predict.options import PredictOptions
from vitx.serve.options import ServeOptions


class Oven(Options):
    trays: int = option(2, "Trays.", ge=1, le=9)
    racks: Annotated[tuple[str, ...], BeforeValidator(comma_separated)] = option((), "Racks.", text=True)


class Bake(Options):
    heat: float = option(180.0, "In °C.", flag="--celsius")
    oven: Oven = Oven()
    fan: bool = option(False, "With the fan.")
    hot_air: int = option(0, "In °C.")
    tins: tuple[Path, ...] = option((), "Tins.", flag="--tin")
    range_: Annotated[tuple[int, int] | None, BeforeValidator(number_range)] = option(
        None, "Minutes.", flag="--minutes", text=True
    )


def bake(*arguments: str, **environment: str) -> dict[str, Any]:
    """What the verb was given, by field; "set" names those that did not come from a default."""
    app = typer.Typer(add_completion=False)

    @from_records("bake")
    def command(cake: str, options: Bake = Bake()) -> None:  # frozen
        given = options.model_dump(mode="json")
        print(json.dumps({"cake": cake, **given, "set": sorted(options.model_fields_set)}))

    app.command(cls=Command)(command)
    finished = CliRunner().invoke(app, arguments, env=environment)
    if finished.exception is not None and not isinstance(finished.exception, SystemExit):
        raise finished.exception
    if finished.exit_code:
        raise RuntimeError(f"{finished.exit_code}: {finished.output}")
    found: dict[str, Any] = json.loads(finished.stdout)
    return found


def test_each_field_is_an_option() -> None:
    nothing = bake("plum")
    assert nothing == {
        "cake": "plum",
        "heat": 180.0,
        "oven": {"trays": 2, "racks": []},
        "fan": False,
        "hot_air": 0,
        "tins": [],
        "range_": None,
        "set": ["oven"],
    }
    many = bake("plum", "--celsius", "200", "--trays", "3", "--racks", "a, b", "--fan", "--tin", "x", "--tin", "y")
    assert many["oven"] == {"trays": 3, "racks": ["a", "b"]}
    assert many["tins"] == ["x", "y"]
    assert many["set"] == ["fan", "heat", "oven", "tins"]
    assert bake("plum", "--minutes", "4:9")["range_"] == [4, 9]


def test_home_is_home_where_no_shell_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """bash leaves `--out=~/x` as it is: vitx predict made a folder called ~ of it."""
    monkeypatch.setenv("HOME", "/home/me")
    found = bake("~/cake", "--tin=~/a", "--tin", "~/b", "--tin", "./~/c", "--tin=d/~", "--tin", "~e")
    assert (found["cake"], found["tins"]) == ("/home/me/cake", ["/home/me/a", "/home/me/b", "~/c", "d/~", "~e"])


def test_home_is_home_in_a_file_and_in_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing expands it there: `plot = "~/p.png"` made a folder called ~."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "c.toml").write_text('cake = "~/cake"\ntin = ["~/a", "./~/b"]\nracks = "~/r,s"\n')
    a, r = f"{tmp_path}/a", f"{tmp_path}/r"
    for given in ({"VITX_BAKE_CONFIG": "~/c.toml"}, {"VITX_BAKE_CONFIG": "~/c.toml", "VITX_BAKE_TIN": "~/a:d/~"}):
        found = bake(**given)
        assert (found["cake"], found["oven"]["racks"]) == (f"{tmp_path}/cake", [r, "s"])
        assert found["tins"] == ([a, "d/~"] if "VITX_BAKE_TIN" in given else [a, "~/b"])
    assert bake("plum", VITX_BAKE_RACKS="~/r,s", VITX_BAKE_CELSIUS="9")["oven"]["racks"] == [r, "s"]


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("serve", "--repository", ""), "--repository"),
        (("serve", "a.vitx", ""), "BUNDLE"),
        (("serve", "a.vitx", "--token-file="), "--token-file"),
        (("serve", "a.vitx", "--config", ""), "--config"),
        (("predict", "", "images", "--out", "o"), "BUNDLE"),
        (("predict", "a.vitx", "images", "--out", ""), "--out"),
        (("predict", "a.vitx", "images", "--out", "s3://o", "--state", ""), "--state"),
        (("export", "run", "--out="), "--out"),
    ],
)
def test_a_path_that_is_empty_is_not_the_current_folder(words: tuple[str, ...], name: str) -> None:
    """A script whose variable is not set would serve or overwrite what happens to be there."""
    with pytest.raises(InputError, match=f"^{name} '': it is empty: is a variable not set"):
        CliRunner().invoke(verbs, words, catch_exceptions=False)


def test_a_text_may_be_empty_and_the_current_folder_be_named() -> None:
    assert bake("", "--racks", "", "--tin", ".")["tins"] == ["."]


@pytest.mark.parametrize(
    ("arguments", "ray", "cakes"),
    [
        (("--ray", "plum"), "local", ["plum"]),
        (("plum", "--ray"), "local", ["plum"]),
        (("--ray", "auto", "plum"), "auto", ["plum"]),
        (("--ray", "local", "plum"), "local", ["plum"]),
        (("--ray", "ray://head:10001", "plum"), "ray://head:10001", ["plum"]),
        (("--ray", "head:6379", "plum"), "head:6379", ["plum"]),
        (("--ray", "./head:6379", "plum"), "local", ["./head:6379", "plum"]),
        (("--ray", "automatic"), "local", ["automatic"]),
        (("--ray=elsewhere", "plum"), "elsewhere", ["plum"]),
    ],
)
def test_ray_takes_an_address_and_leaves_anything_else(arguments: tuple[str, ...], ray: str, cakes: list[str]) -> None:
    app = typer.Typer(add_completion=False)
    found: list[tuple[str | None, list[str]]] = []

    @app.command(cls=Command)
    def command(cakes: list[str], ray: Annotated[str | None, typer.Option("--ray")] = None) -> None:
        found.append((ray, cakes))

    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert found == [(ray, cakes)]


def test_an_option_without_an_effect_is_named() -> None:
    require_effect(Bake(heat=200.0, hot_air=0), {"heat"}, "when cold")  # what is given as its default is no mistake
    require_effect(Bake(), set(), "when cold")
    for options, flag in (
        (Bake(heat=200.0), "--celsius"),
        (Bake(hot_air=3), "--hot-air"),
        (Bake(range_=(1, 2)), "--minutes"),
    ):
        with pytest.raises(InputError, match=f"^{flag} has no effect when cold$"):
            require_effect(options, {"fan", "tins"}, "when cold")


def test_the_help_names_one_variable_for_all() -> None:
    app = typer.Typer(add_completion=False, rich_markup_mode=None)

    @app.command(cls=Command)
    @from_records("bake")
    def command(options: Bake = Bake()) -> None:  # frozen
        raise AssertionError(options)

    text = " ".join(CliRunner().invoke(app, ["--help"]).stdout.split())
    assert "Or each from the environment: VITX_BAKE_DEVICE." in text
    assert text.count("VITX_BAKE_") == 1


def test_the_command_line_goes_before_the_environment_and_that_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "bake.toml"
    file.write_text('celsius = 100\ntrays = 4\nfan = true\ntin = ["a", "b"]\nracks = ["1", "2"]\n')
    config = ("--config", str(file))
    assert bake("plum", *config)["heat"] == 100
    assert bake("plum", *config)["fan"] is True
    assert bake("plum", *config)["tins"] == ["a", "b"]
    assert bake("plum", *config)["oven"] == {"trays": 4, "racks": ["1", "2"]}
    assert bake("plum", VITX_BAKE_CELSIUS="5")["heat"] == 5  # by the name of the option, not of the field
    assert bake("plum", VITX_BAKE_TIN=os.pathsep.join("ab"))["tins"] == ["a", "b"]
    assert bake("plum", *config, VITX_BAKE_TRAYS="5")["oven"]["trays"] == 5
    assert bake("plum", *config, "--trays", "6", VITX_BAKE_TRAYS="5")["oven"]["trays"] == 6
    assert bake("plum", "--trays", "6", *config)["oven"]["trays"] == 6  # wherever --config stands
    assert bake("plum", VITX_BAKE_CONFIG=str(file))["heat"] == 100
    file.write_text('tin = "a"')
    assert bake("plum", *config)["tins"] == ["a"]
    file.write_text('celsius = 100\ntrays = 4\nfan = true\ntin = ["a", "b"]\n')
    assert bake("plum", *config)["set"] == ["fan", "heat", "oven", "tins"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trys = 4", "unknown option in --config .*'trys': did you mean trays"),
        ("[oven]\ntrays = 4", "unknown option in --config .*'oven'"),
        ("[trays]\nx = 4", r'trays = \{"x": 4\}: expected a whole number$'),
        ("trays = ", "cannot be read as TOML"),
        ("tin = ''", r"--config .*bake\.toml: tin = '': it is empty: is a variable not set\?"),
        ("tin = ['a', '']", "tin = '': it is empty"),
        (f"trays = {'[' * 5000}{']' * 5000}", "cannot be read as TOML: maximum recursion depth"),
        (f"trays = {'1' * 5000}", "cannot be read as TOML: Exceeds the limit"),
        (f"racks = [[0x{'f' * 5000}]]", "cannot be read as TOML: Exceeds the limit"),
        (f"celsius = 0x{'f' * 400}", r"--config .*bake\.toml: --celsius \w+: "),
        ("trays = true", "trays = true: expected a whole number$"),
        ("trays = 4.0", r"trays = 4\.0: expected a whole number$"),
        ("trays = [4]", r"trays = \[4\]: expected a whole number$"),
        ("celsius = 2026-01-01", 'celsius = "2026-01-01": expected a number$'),
        ("celsius = nan", r"--config .*bake\.toml: --celsius nan: expected a number below"),
        ("fan = 1", "fan = 1: expected true or false$"),
        ("fan = [true]", r"fan = \[true\]: expected true or false$"),
        ("tin = 1", "tin = 1: expected a text, or a list of them$"),
        ("tin = [['a']]", r'tin = \[\["a"\]\]: expected a text, or a list of them$'),
        ("racks = []", r"racks = \[\]: expected a text or a number, or a list of them without commas$"),
        ("racks = [[1], [2]]", r"racks = \[\[1\], \[2\]\]: expected a text or a number, or a list"),
        ("racks = ['1,2']", r'racks = \["1,2"\]: expected a text or a number, or a list of them without commas$'),
        ("racks = [07:30:00]", r'racks = \["07:30:00"\]: expected a text or a number, or a list'),
        ("config = 'other.toml'", "unknown option in --config .*'config'"),
        ("help = true", "unknown option in --config .*'help'"),
        ("cake = true", "cake = true: expected a text or a number, or a list of them"),
        ('minutes = "9:4"', r"--config .*bake\.toml: --minutes 9:4: expected a number such as 4, or a "),
        ("trays = 0", r"--config .*bake\.toml: --trays 0: "),
        ('celsius = "hot"', r"--config .*bake\.toml: --celsius hot: "),
        ("hot-air = 1\nhot_air = 2", "'hot_air' is there with dashes and with underscores: expected it once"),
    ],
)
def test_a_file_that_says_something_else_is_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "bake.toml"
    file.write_text(text)
    with pytest.raises(InputError, match=message):
        bake("plum", "--config", str(file))


def test_values_of_a_file_are_those_of_the_command_line(tmp_path: Path) -> None:
    """Each as TOML has it, or as a text."""
    file = tmp_path / "bake.toml"
    file.write_text("celsius = 99\ntrays = '4'\nracks = ['a', 2, 0.5]\ntin = []\nfan = false\nminutes = 7\n")
    found = bake("plum", "--config", str(file))
    assert (found["heat"], found["fan"], found["tins"], found["range_"]) == (99, False, [], [7, 7])
    assert found["oven"] == {"trays": 4, "racks": ["a", "2", "0.5"]}
    file.write_text("racks = 3\nminutes = '4:9'\ncelsius = '1e2'\ntin = 'a,b'\n")
    found = bake("plum", "--config", str(file))
    assert (found["oven"]["racks"], found["range_"], found["heat"], found["tins"]) == (["3"], [4, 9], 100, ["a,b"])


def test_bounds_hold_wherever_the_value_comes_from(tmp_path: Path) -> None:
    """And the error says what was given, and by which of the three, in one line."""
    config = tmp_path / "bake.toml"
    config.write_text("trays = 0")
    for arguments, environment, given in (
        (("--trays", "0"), {}, "--trays 0: "),
        (("--trays", "many"), {}, "--trays many: "),
        (("--trays=",), {}, "--trays '': "),
        ((), {"VITX_BAKE_TRAYS": "0"}, "VITX_BAKE_TRAYS=0: "),
        (("--config", str(config)), {}, f"--config {config}: --trays 0: "),
    ):
        with pytest.raises(InputError, match=f"^{re.escape(given)}.+$"):
            bake("plum", *arguments, **environment)
    with pytest.raises(ValidationError):
        Oven(trays=0)
    with pytest.raises(InputError, match=r"missing\.toml: cannot be read as TOML"):
        bake("plum", "--config", str(tmp_path / "missing.toml"))


def test_a_config_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "bake.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="cannot be read as TOML"):
        bake("plum", "--config", str(tmp_path / "bake.toml"))
    with pytest.raises(InputError, match="cannot be read as TOML"):
        bake("plum", "--config", str(tmp_path))


@pytest.mark.parametrize("record", [ServeOptions, PredictOptions, ExportOptions, EngineOptions])
def test_every_option_has_its_line_of_help_and_no_record_can_be_changed(record: type[Options]) -> None:
    for name, field in record.model_fields.items():
        assert field.description or name == "engine", name
    with pytest.raises(ValidationError, match="frozen"):
        setattr(record(), next(iter(record.model_fields)), 1)
    with pytest.raises(ValidationError, match="extra"):
        record(no_such_option=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("text", ["", "1,,2", "0", "a", "1.5", "-1"])
def test_batch_sizes_are_positive_numbers_wherever_they_are_options(text: str) -> None:
    for make in (
        lambda: BenchOptions(batch=text),  # type: ignore[arg-type]  # a text, as on the command line
        lambda: EngineOptions(batches=text),  # type: ignore[arg-type]
        lambda: ParityOptions(batch_sizes=text),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValidationError, match="expected batch sizes such as 1,8,32"):
            make()
    assert ParityOptions(batch_sizes="1, 8,32").batch_sizes == (1, 8, 32)  # type: ignore[arg-type]


def test_the_server_reads_its_port_from_a_file_and_the_environment(tmp_path: Path) -> None:
    """Through the real command; the bundle is missing, so that it ends at once, and names what it was given."""
    (tmp_path / "serve.toml").write_text('bundles = ["from-file.vitx"]\nmax-batch = 8\n')
    command = [sys.executable, "-m", "vitx", "serve", "--config", str(tmp_path / "serve.toml")]

    def error(**environment: str) -> str:
        finished = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**os.environ, **environment}
        )
        assert finished.returncode == 2, finished.stderr
        return finished.stderr

    assert "from-file.vitx" in error(VITX_SERVE_PORT="0")
    assert "VITX_SERVE_PORT" in error(VITX_SERVE_PORT="tcp://10.0.0.1:80")  # as Kubernetes sets it for a service


def test_the_help_has_a_section_for_each_heading() -> None:
    """`vitx serve -h`, with 48 options: what stands under no heading is in the usual sections."""
    lines = CliRunner().invoke(verbs, ["serve", "-h"]).stdout.splitlines()
    sections: dict[str, list[str]] = {}
    for line in lines:
        if line[:1].strip() and line.endswith(":"):
            sections[line[:-1]] = []
        elif line.startswith("  ") and sections:
            [*sections.values()][-1].append(line.split()[0])
    assert [*sections] == ["Arguments", *ServeOptions.headings.values(), "Options"]
    assert sections["Arguments"][0] == "BUNDLE"
    assert [word for word in sections["Network"] if word.startswith("--")] == [
        *("--host", "--port", "--grpc-port", "--server-id", "--shared-memory")
    ]
    assert [word for word in sections["Options"] if word.startswith("-")] == ["--config", "-h,"]


@pytest.mark.parametrize("record", [ServeOptions, ExportOptions, PredictOptions])
def test_headings_are_of_fields(record: type[Options]) -> None:
    assert {*record.headings} <= {*record.model_fields}
