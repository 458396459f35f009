"""The import rule: vitx.cli → stages → models → core; stages meet only in files."""

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STAGES = {"train", "analyze", "export", "serve"}
ALLOWED = {
    "core": {"core"},
    "models": {"models", "core"},
    **{stage: {stage, "models", "core"} for stage in STAGES},
    "cli": {"cli", "models", "core", *STAGES},
}
HEAVY = {
    "torch",
    "torchvision",
    "timm",
    "onnx",
    "onnxscript",
    "onnxruntime",
    "sklearn",
    "matplotlib",
    "pyarrow",
    "tensorboard",
}


def sources(room: str) -> list[Path]:
    return sorted((ROOT / ("vitx/cli" if room == "cli" else room)).rglob("*.py"))


def imported(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def rooms_of(names: set[str]) -> set[str]:
    return {name.split(".")[1] for name in names if name.startswith("vitx.")} & set(ALLOWED)


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_imports_go_down_one_way(room: str) -> None:
    files = sources(room)
    assert files
    for path in files:
        forbidden = rooms_of(imported(ast.parse(path.read_text()))) - ALLOWED[room]
        assert not forbidden, f"{path} imports {sorted(forbidden)}"


def test_serve_imports_models_and_torch_only_in_its_torch_runtime() -> None:
    for path in sources("serve"):
        names = imported(ast.parse(path.read_text()))
        if path.name != "torch.py":
            assert "models" not in rooms_of(names), path
            assert not {name for name in names if name.split(".")[0] in {"torch", "timm"}}, path


def top_level(tree: ast.Module) -> set[str]:
    """What importing the module imports: everything outside functions and outside `if TYPE_CHECKING`."""

    def runs(node: ast.stmt) -> bool:
        for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        return not for_types and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)

    return imported(ast.Module([node for node in tree.body if runs(node)], type_ignores=[]))


@pytest.mark.parametrize("room", ["cli", "core"])
def test_no_heavy_import_at_the_top(room: str) -> None:
    for path in sources(room):
        heavy = {name.split(".")[0] for name in top_level(ast.parse(path.read_text()))} & HEAVY
        assert not heavy, f"{path} imports {sorted(heavy)} when it is itself imported"


def test_every_import_is_a_declared_dependency() -> None:
    """Packages of the base and of an extra; what only tests use is not enough."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    requirements = project["dependencies"] + [entry for name in extras if name != "dev" for entry in extras[name]]
    declared = {requirement.split(">")[0].split("[")[0].strip() for requirement in requirements}
    import_name = {
        "scikit-learn": "sklearn",
        "pillow": "PIL",
        "prometheus-client": "prometheus_client",
        "onnx-ir": "onnx_ir",
        "tensorrt-rtx": "tensorrt_rtx",
        "ml-dtypes": "ml_dtypes",
        "grpcio": "grpc",
        "protobuf": "google",
        "cuda-bindings": "cuda",
        "opentelemetry-sdk": "opentelemetry",
    }
    known = {import_name.get(name, name) for name in declared} | {"onnxruntime", "vitx"}
    known.add("triton")  # torch brings it where it has a GPU to run it; elsewhere its user goes another way
    import sys

    for room in ALLOWED:
        for path in sources(room):
            roots = {name.split(".")[0] for name in imported(ast.parse(path.read_text()))}
            foreign = roots - known - sys.stdlib_module_names
            assert not foreign, f"{path} imports {sorted(foreign)}, which no extra brings"
