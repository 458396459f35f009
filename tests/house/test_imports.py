"""The import rule: cli → bench → serve → predict → parity → {train, analyze, export, runtimes} → models → data → core.

An import counts wherever it stands: at the top, within a function, or under `if TYPE_CHECKING`.
"""

import ast
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = (
    {"cli"},
    {"bench"},
    {"serve"},
    {"predict"},
    {"parity"},
    {"train", "analyze", "export", "runtimes"},
    {"models"},
    {"data"},
    {"core"},
)
ALLOWED = {room: {room}.union(*LAYERS[level + 1 :]) for level, rooms in enumerate(LAYERS) for room in rooms}
MOST_FILES = 20
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


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in sorted((ROOT / "vitx").rglob("*.py"))}


def sources(room: str) -> list[Path]:
    return [path for module, path in MODULES.items() if module.split(".")[1:2] == [room]]


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(nodes: Iterable[ast.AST]) -> set[str]:
    """The modules that import statements name; for modules of ours, the file that is meant."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= inner & MODULES.keys() or {node.module}
            if inner - MODULES.keys():
                names.add(node.module)
    return names


def imports_of(path: Path) -> set[str]:
    return imported(ast.walk(tree_of(path)))


def top_level(tree: ast.Module) -> set[str]:
    """The modules that are imported with this one: by statements outside functions and `if TYPE_CHECKING`."""

    def runs(node: ast.stmt) -> bool:
        for_types = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        return not for_types and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)

    return imported(node for statement in tree.body if runs(statement) for node in ast.walk(statement))


def rooms_of(names: set[str]) -> set[str]:
    return {name.split(".")[1] for name in names if name.startswith("vitx.")}


def test_every_room_has_its_layer() -> None:
    folders = {path.name for path in (ROOT / "vitx").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == ALLOWED.keys()


@pytest.mark.parametrize("room", sorted(ALLOWED))
def test_imports_go_down_one_way(room: str) -> None:
    files = sources(room)
    assert files
    for path in files:
        forbidden = rooms_of(imports_of(path)) - ALLOWED[room]
        assert not forbidden, f"{path} imports {sorted(forbidden)}"


def test_only_parity_sees_export_and_runtimes_together() -> None:
    for module, path in MODULES.items():
        if not module.startswith("vitx.parity"):
            assert not {"export", "runtimes"} <= rooms_of(imports_of(path)), path


def test_imports_have_no_cycles() -> None:
    graph = {module: imports_of(path) & MODULES.keys() for module, path in MODULES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as cycle:
        pytest.fail(f"import cycle: {' → '.join(reversed(cycle.args[1]))}")


@pytest.mark.parametrize("top", ["vitx", "tests"])
def test_no_folder_is_crowded(top: str) -> None:
    files = Counter(path.parent.relative_to(ROOT) for path in (ROOT / top).rglob("*.py"))
    crowded = {str(folder): count for folder, count in files.items() if count > MOST_FILES}
    assert not crowded, f"at most {MOST_FILES} Python files in a folder"


@pytest.mark.parametrize("room", ["serve", "predict"])
def test_serving_imports_no_torch(room: str) -> None:
    """Neither its own files, nor any file that is imported with them, directly or through others."""
    reached = {module_of(path) for path in sources(room)}
    todo = list(reached)
    while todo:
        module = todo.pop()
        names = top_level(tree_of(MODULES[module]))
        packages = {".".join(name.split(".")[:length]) for name in names for length in range(1, name.count(".") + 1)}
        heavy = {name.split(".")[0] for name in names} & {"torch", "timm", "torchvision"}
        assert not heavy, f"{module}, which {room} imports, imports {sorted(heavy)}"
        new = (names | packages) & MODULES.keys() - reached
        reached |= new
        todo += new
    for path in sources(room):
        names = imports_of(path)
        assert not {name for name in names if name.split(".")[0] in {"torch", "timm"}}, path
        assert not rooms_of(names) & {"models", "train", "export", "analyze"}, path


@pytest.mark.parametrize(
    ("room", "torch_files"), [("bench", ()), ("runtimes", ("torch.py",)), ("parity", ("divergence.py",))]
)
def test_what_runs_bundles_leaves_torch_to_one_file(room: str, torch_files: tuple[str, ...]) -> None:
    for path in sources(room):
        if path.name not in torch_files:
            names = imports_of(path)
            assert not {name for name in names if name.split(".")[0] in {"torch", "timm"}}, path
            assert "models" not in rooms_of(names), path


@pytest.mark.parametrize("room", ["cli", "core", "data"])
def test_no_heavy_import_at_the_top(room: str) -> None:
    for path in sources(room):
        heavy = {name.split(".")[0] for name in top_level(tree_of(path))} & HEAVY
        assert not heavy, f"{path} imports {sorted(heavy)} when it is itself imported"


def test_every_import_is_a_declared_dependency() -> None:
    """As a dependency of the base or of an extra; the extra `dev`, which is for tests, does not count."""
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
        "model-signing": "model_signing",
        "nvidia-ml-py": "pynvml",
        "opentelemetry-sdk": "opentelemetry",
    }
    known = {import_name.get(name, name) for name in declared} | {"onnxruntime", "vitx"}
    known.add("huggingface_hub")  # timm depends on it
    known.add("aiohttp")  # fsspec opens no http:// without it
    known.add("triton")  # torch for GPUs depends on it; without it another path is taken
    for path in MODULES.values():
        roots = {name.split(".")[0] for name in imports_of(path)}
        foreign = roots - known - sys.stdlib_module_names
        assert not foreign, f"{path} imports {sorted(foreign)}, which no extra brings"
