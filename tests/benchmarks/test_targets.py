"""The command line and the exit code of a benchmark: what it refuses before it measures anything."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.targets import (
    at_least,
    command_line,
    exit_code,
    network_name,
    require_package,
    require_program,
    some_of,
)
from vitx.core.errors import EnvironmentMissing
from vitx.core.machine import describe_machine


def test_some_of_the_parts_are_named_with_commas_between() -> None:
    parser = command_line("")
    parser.add_argument("--parts", type=some_of("abc"), default=[*"abc"])
    assert parser.parse_args([]).parts == ["a", "b", "c"]
    assert parser.parse_args(["--parts", "c,a"]).parts == ["c", "a"]


@pytest.mark.parametrize("given", ["d", "a,d", "", "a,"])
def test_a_part_that_there_is_not_is_refused(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = command_line("")
    parser.add_argument("--parts", type=some_of("abc"))
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["--parts", given])
    unknown = given.removeprefix("a,")
    assert f"argument --parts: unknown: {unknown}; known: a, b, c" in capsys.readouterr().err


def test_results_of_this_machine_are_added_to(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    assert command_line("").parse_args(["--json", str(path)]).json == path
    # A script may have noted more of the machine than is asked for here.
    path.write_text(json.dumps({"machine": {**describe_machine(), "torch's gpu": "H200"}}))
    assert command_line("").parse_args(["--json", str(path)]).json == path


def test_results_of_another_machine_are_not_mixed_with_these(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.json"
    path.write_text(json.dumps({"machine": {**describe_machine(), "processor": "abacus"}}))
    with pytest.raises(SystemExit, match="2"):
        command_line("").parse_args(["--json", str(path)])
    assert f"argument --json: {path} was measured on another machine: choose another file" in capsys.readouterr().err


def test_the_exit_code_is_that_of_main() -> None:
    assert exit_code(lambda: 1) == 1
    assert exit_code(lambda: None) == 0


def test_an_error_of_vitx_is_one_line_and_has_its_own_code(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        raise EnvironmentMissing("no virtual environment with litserve")

    assert exit_code(main) == 3
    assert capsys.readouterr().err == "error: no virtual environment with litserve\n"


def test_a_number_has_its_least(capsys: pytest.CaptureFixture[str]) -> None:
    parser = command_line("")
    parser.add_argument("--repeats", type=at_least(2))
    assert parser.parse_args(["--repeats", "2"]).repeats == 2
    for given in ("1", "-3", "2.5", "two", ""):
        with pytest.raises(SystemExit, match="2"):
            parser.parse_args([f"--repeats={given}"])
        assert f"argument --repeats: {given!r} is no whole number from 2 on" in capsys.readouterr().err


def test_a_network_is_one_that_timm_or_vitx_knows(capsys: pytest.CaptureFixture[str]) -> None:
    parser = command_line("")
    parser.add_argument("--network", type=network_name)
    for name in ("deepvit_digits", "resnet50"):
        assert parser.parse_args(["--network", name]).network == name
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["--network", "nonsense"])
    assert "argument --network: neither timm nor vitx has a network 'nonsense'" in capsys.readouterr().err


def test_a_peer_that_is_not_installed_is_named_with_the_command_that_installs_it() -> None:
    assert require_package("pytest", "pip install pytest") == pytest.__version__
    with pytest.raises(EnvironmentMissing, match="the package 'no-such-peer' is not installed: pip install it"):
        require_package("no-such-peer", "pip install it")
    require_program(sys.executable)
    with pytest.raises(EnvironmentMissing, match="the program 'no-such-program' is not installed"):
        require_program("no-such-program")


@pytest.mark.parametrize("captured", [False, True])
def test_a_process_that_fails_says_why_once_and_its_code_is_the_scripts(
    captured: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    def main() -> int:
        program = "import sys; print('error: no such runtime', file=sys.stderr); sys.exit(2)"
        return subprocess.run([sys.executable, "-c", program], check=True, capture_output=captured).returncode

    assert exit_code(main) == 2
    assert capfd.readouterr().err == "error: no such runtime\n"
