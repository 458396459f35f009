"""One exported bundle for every test of the exporter; a test that damages it takes a copy."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cli_fixture import Vitx, run_in_process
from vitx.export import SourceRequest

SOURCE = ("model:deepvit_digits", "--weights", "random", "--data", "digits")


@pytest.fixture(scope="session")
def random_source() -> SourceRequest:
    """What `exported_bundle` was made of: deepvit_digits with random weights."""
    return SourceRequest("model:deepvit_digits", weights="random", data="digits")


@pytest.fixture(scope="session")
def exported_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle that `vitx export` makes of it, certified on the digits; not to be changed."""
    from vitx.cli import main

    out = tmp_path_factory.mktemp("export") / "net.vitx"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["vitx", "export", *SOURCE, "--out", str(out), "--quiet"])
        with pytest.raises(SystemExit) as ended:
            main()
    assert not ended.value.code
    return out


@pytest.fixture
def own_bundle(exported_bundle: Path, tmp_path: Path) -> Path:
    """A copy of it, alone in a folder that is the test's."""
    return Path(shutil.copytree(exported_bundle, tmp_path / "own" / "net.vitx"))


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace and lower here, where PyTorch is imported already; tests/core/test_sandbox.py is about the limits."""

    def run(title: str, function: Callable[..., Any], *arguments: Any, **limits: Any) -> Any:
        return function(*arguments)

    monkeypatch.setattr("vitx.export.bundle.run_limited", run)


@pytest.fixture
def vitx(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Vitx:
    """Call `vitx(verb, …)` as on the command line: (exit code, standard output, standard error)."""
    return lambda *arguments: run_in_process(arguments, monkeypatch, capsys)
