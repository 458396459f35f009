"""Small installs stay small: the wheel in environments with the base only, or with the base and `serve`."""

import functools
import json
import os
import subprocess
import sys
import sysconfig
import venv
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from bundle_fixture import write_bundle
from vitx.cli import VERBS
from vitx.cli.doctor import EXTRAS


def closure(distribution: str, extras: set[str]) -> set[str]:
    """The distributions that `distribution[extras]` requires, directly or through others."""
    found: set[str] = set()
    todo = [(distribution, extras)]
    while todo:
        name, wanted = todo.pop()
        for text in metadata.requires(name) or ():
            requirement = Requirement(text)
            applies = requirement.marker is None or any(
                requirement.marker.evaluate({"extra": extra}) for extra in (*wanted, "")
            )
            if applies and requirement.name.lower() not in found:
                found.add(requirement.name.lower())
                todo.append((requirement.name, requirement.extras))
    return found - {"vitx"}


def environment(path: Path, extras: set[str], wheel: Path) -> Path:
    """Make a virtual environment with the wheel and links to the distributions it requires; return its python."""
    venv.create(path, with_pip=False)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(path), "platbase": str(path)}))
    source = Path(sysconfig.get_path("purelib"))
    for name in closure("vitx", extras):
        files = metadata.files(name) or []
        for top in {file.parts[0] for file in files if file.parts[0] not in ("..", "__pycache__")}:
            link = site / top
            if not link.exists():
                os.symlink(source / top, link)
    python = path / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*command, str(wheel)], check=True, env=without_path())
    return python


@pytest.fixture(scope="module")
def base_python(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    return environment(tmp_path_factory.mktemp("base"), set(), wheel)


@pytest.fixture(scope="module")
def serve_python(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    return environment(tmp_path_factory.mktemp("serve"), {"serve"}, wheel)


def without_path() -> dict[str, str]:
    """Through PYTHONPATH a clone of vitx would be found, and pip would hold that it is installed."""
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


def run(python: Path, *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command, clean = [str(python), *arguments], without_path()
    return subprocess.run(command, capture_output=True, text=True, check=False, env=clean, cwd=cwd)


def test_the_base_has_neither_torch_nor_starlette(base_python: Path) -> None:
    for package in ("torch", "timm", "onnx", "starlette", "sklearn"):
        assert run(base_python, "-c", f"import {package}").returncode == 1


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_in_the_base(base_python: Path, verb: str) -> None:
    finished = run(base_python, "-m", "vitx", *([verb] if verb else []), "-h")
    assert finished.returncode == 0, finished.stderr
    assert "Usage:" in finished.stdout
    assert "--help" in finished.stdout


def test_a_users_own_train_py_does_not_shadow_ours(base_python: Path, tmp_path: Path) -> None:
    for name in ("train", "export", "serve", "core", "models", "data"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('a file of the user was imported')\n")
    finished = run(base_python, "-c", "import vitx.core.bundle, vitx.serve, vitx.runtimes.session", cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr


def test_help_imports_nothing_heavy(base_python: Path) -> None:
    code = (
        "import sys, vitx.cli; "
        "print(sorted({'numpy', 'PIL', 'pydantic', 'onnxruntime', 'rich', 'torch'} & set(sys.modules)))"
    )
    assert run(base_python, "-c", code).stdout.strip() == "[]"


@pytest.mark.parametrize(("verb", "extra"), [("train", "train"), ("export", "export"), ("models", "train")])
def test_a_missing_extra_is_named(base_python: Path, tmp_path: Path, verb: str, extra: str) -> None:
    arguments = {"train": ["digits-deepvit"], "export": ["run"], "models": ["deepvit_s"]}[verb]
    finished = run(base_python, "-m", "vitx", verb, *arguments, cwd=tmp_path)
    assert finished.returncode == 3, finished.stderr
    assert f"pip install 'vitx[{extra}]'" in finished.stderr


def test_doctor_runs_in_the_base(base_python: Path) -> None:
    finished = run(base_python, "-m", "vitx", "doctor", "--json")
    assert finished.returncode == 0, finished.stderr
    assert "pip install 'vitx[train]'" in finished.stdout


@pytest.mark.parametrize("options", [("--batch", "1"), ("--scenario", "offline")])
def test_bench_runs_in_the_base(base_python: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    """Its load test takes the server's batcher, and what is imported with that."""
    bundle = write_bundle(tmp_path / "b.vitx").path
    finished = run(base_python, "-m", "vitx", "bench", str(bundle), "--seconds", "0.01", "--json", *options)
    assert finished.returncode == 0, finished.stderr
    assert json.loads(finished.stdout)["runtime"]["provider"] == "CPUExecutionProvider"


@functools.cache
def canonical_closure(extra: str) -> frozenset[str]:
    return frozenset(map(canonicalize_name, closure("vitx", {extra})))


@pytest.mark.parametrize("installed", [*EXTRAS, "otel", "openvino"])
def test_the_doctor_calls_no_extra_installed_that_lacks_a_package(installed: str) -> None:
    """Such as train after export, which brings torch too, or grpc after train, whose tensorboard brings grpcio."""
    there = canonical_closure(installed)
    distributions = metadata.packages_distributions()
    for extra, (packages, _) in EXTRAS.items():
        said = all({canonicalize_name(name) for name in distributions[package]} & there for package in packages)
        assert said == (canonical_closure(extra) <= there), f"{extra} where {installed} is installed"


def test_serving_modules_import_without_torch(serve_python: Path) -> None:
    code = (
        "import importlib, pathlib, sys, vitx; "
        "root = pathlib.Path(vitx.__file__).parent; "
        "[importlib.import_module('.'.join(['vitx', *p.relative_to(root).with_suffix('').parts])) "
        " for room in ('serve', 'predict', 'runtimes', 'bench', 'data') for p in (root / room).rglob('*.py') "
        " if p.parent.name not in ('grpc', 'ray') and p.name not in ('__init__.py', 'torch.py', "
        " 'opentelemetry.py', 'ray.py', 'ray_app.py', 'ray_cluster.py')]; "
        "print(sorted({'torch', 'vitx.models', 'grpc', 'opentelemetry', 'ray'} & set(sys.modules)))"
    )
    finished = run(serve_python, "-c", code)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.strip() == "[]"
