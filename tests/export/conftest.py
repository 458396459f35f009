"""One exported bundle for all tests of the exporter (a test that changes it takes a copy), and TensorRT's bindings."""

import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from filelock import FileLock

from vitx.export import SourceRequest

TYPINGS = Path(__file__).parents[2] / "typings"
SOURCE = ("model:deepvit_digits", "--weights", "random", "--data", "digits")


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For networks so small that they run slower on two threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def random_source() -> SourceRequest:
    """The source of `exported_bundle`: deepvit_digits with random weights."""
    return SourceRequest("model:deepvit_digits", weights="random", data="digits")


@pytest.fixture(scope="session")
def exported_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle that `vitx export` writes for it, certified on the digits; not to be changed.

    pytest's workers share it: the first that asks for it exports, the others wait.
    """
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    out = shared / "exported_bundle" / "net.vitx"
    out.parent.mkdir(exist_ok=True)
    with FileLock(shared / "exported_bundle.lock"):
        if not out.exists():  # it appears whole
            export(out)
    return out


def export(out: Path) -> None:
    from vitx.cli import main

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitx.export.bundling.run_limited", run_here)
        patch.setattr(sys, "argv", ["vitx", "export", *SOURCE, "--out", str(out), "--quiet"])
        with pytest.raises(SystemExit) as ended:
            main()
    assert not ended.value.code


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files, empty: a test sees what is left there."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def own_bundle(exported_bundle: Path, tmp_path: Path) -> Path:
    """A copy of `exported_bundle`, alone in a folder of the test's own."""
    return Path(shutil.copytree(exported_bundle, tmp_path / "own" / "net.vitx"))


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace and lower in this process, which has imported PyTorch; tests/core/test_sandbox.py tests the limits."""
    monkeypatch.setattr("vitx.export.bundling.run_limited", run_here)


def run_here(title: str, function: Callable[..., Any], *arguments: Any, **limits: Any) -> Any:
    """In place of a process of its own, which tests/house/test_readme.py starts."""
    return function(*arguments)


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_typings", TYPINGS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATOR = load_generator()


@pytest.fixture(scope="session", params=GENERATOR.CLASSIC)
def bindings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, str]]:
    """The real bindings of the classic TensorRT, imported over stand-ins for the libraries they link to."""
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        pytest.skip("the bindings' wheels that are tested are of Linux on x86-64")
    if shutil.which("cc") is None:
        pytest.skip("no C compiler to make the stand-in libraries with")
    folder = tmp_path_factory.mktemp(request.param)
    if GENERATOR.download_bindings(request.param, folder).returncode != 0:
        pytest.skip(f"the bindings of {request.param} cannot be downloaded here; our calls are checked all the same")
    environment: dict[str, str] = GENERATOR.unpack_bindings(next(folder.glob("*.whl")), folder)
    return request.param, environment
