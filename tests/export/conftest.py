"""One exported bundle for every test of the exporter; a test that damages it takes a copy. TensorRT's real bindings."""

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vitx.export import SourceRequest

TYPINGS = Path(__file__).parents[2] / "typings"
BINDINGS = {"tensorrt-10.16": "10.16.1.11", "tensorrt-11.4": "11.4.0.106"}
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


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_typings", TYPINGS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session", params=sorted(BINDINGS))
def bindings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, str]]:
    """The real bindings of the classic TensorRT, imported over stand-ins for the libraries they link to."""
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        pytest.skip("the bindings' wheels that are tested are of Linux on x86-64")
    if shutil.which("cc") is None:
        pytest.skip("no C compiler to make the stand-in libraries with")
    folder = tmp_path_factory.mktemp(request.param)
    requirement = f"tensorrt-cu13-bindings=={BINDINGS[request.param]}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--retries=1", "--timeout=10", "-d", str(folder), requirement]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip(f"{requirement} cannot be downloaded here; the committed stubs are checked all the same")
    environment: dict[str, str] = load_generator().unpack_bindings(next(folder.glob("*.whl")), folder)
    return request.param, environment
