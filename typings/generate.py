"""Write the typing stubs of TensorRT's Python bindings: what exists in which version, and with which signature.

    python typings/generate.py tensorrt-10.16 --wheel tensorrt_cu13_bindings-10.16.1.11-cp311-…_x86_64.whl
    python typings/generate.py tensorrt-11.4 --wheel tensorrt_cu13_bindings-11.4.0.106-cp311-…_x86_64.whl
    python typings/generate.py tensorrt-rtx-1.7

Needs pybind11-stubgen. Without --wheel it reads the installed `tensorrt_rtx`. A classic bindings wheel is imported
without its libraries and without a GPU: a C compiler makes stand-ins for the nine functions that it links to. Each
stub is the module `tensorrt`, whatever the flavour, so that one source is checked against all of them.
"""

import argparse
import ast
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

# What the bindings link to; each answers "nothing", so the module imports and its objects cannot be made.
ENTRY_POINTS = """
#include <stddef.h>
void *createInferBuilder_INTERNAL(void *logger, int version) { return NULL; }
void *createInferRefitter_INTERNAL(void *engine, void *logger, int version) { return NULL; }
void *createInferRuntime_INTERNAL(void *logger, int version) { return NULL; }
void *createNvOnnxParser_INTERNAL(void *network, void *logger, int version) { return NULL; }
void *createNvOnnxParserRefitter_INTERNAL(void *refitter, void *logger, int version) { return NULL; }
void *getBuilderPluginRegistry(int capability) { return NULL; }
void *getPluginRegistry(void) { return NULL; }
_Bool initLibNvInferPlugins(void *logger, const char *name_space) { return 1; }
int getNvOnnxParserVersion(void) { return 0; }
"""
LIBRARIES = ("libnvinfer", "libnvinfer_plugin", "libnvonnxparser")
HEADER = """# Made by typings/generate.py from {origin}: names and signatures only.
# mypy: ignore-errors
# ruff: noqa
# fmt: off
"""
# Every enumeration has them, and they say nothing about it.
ENUMERATION_METHODS = {"__eq__", "__ge__", "__getstate__", "__gt__", "__hash__", "__init__", "__le__", "__lt__"}
ENUMERATION_METHODS |= {"__ne__", "__repr__", "__setstate__", "__str__", "__or__", "__and__", "__xor__", "__invert__"}


def build_stand_ins(folder: Path, major: int, compiler: str = "cc") -> None:
    """Compile the libraries that the classic bindings of a major version link to."""
    source = folder / "entry_points.c"
    source.write_text(ENTRY_POINTS)
    for library in LIBRARIES:
        name = f"{library}.so.{major}"
        command = [compiler, "-shared", "-fPIC", "-o", str(folder / name), f"-Wl,-soname,{name}", str(source)]
        subprocess.run(command, check=True, capture_output=True)


def unpack_bindings(wheel: Path, folder: Path) -> dict[str, str]:
    """Unpack a classic bindings wheel with stand-in libraries; return the environment in which it imports."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    build_stand_ins(folder, int(wheel.name.split("-")[1].split(".")[0]))
    return {**os.environ, "LD_LIBRARY_PATH": str(folder), "PYTHONPATH": str(folder)}


def raw_stub(module: str, environment: dict[str, str]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pybind11_stubgen", module, "-o", folder, "--ignore-all-errors"]
        subprocess.run(command, check=True, capture_output=True, env=environment)
        return (Path(folder) / f"{module.replace('.', '/')}.pyi").read_text()


class Compact(ast.NodeTransformer):
    """Without docstrings and an enumeration's operators; `bool` is the type, not the bindings' constant."""

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        is_enumeration = any(isinstance(entry, ast.AnnAssign) and _name(entry) == "__members__" for entry in node.body)
        dropped = ENUMERATION_METHODS if is_enumeration else set()
        node.body = [entry for entry in node.body if getattr(entry, "name", None) not in dropped]
        if node.name == "IHostMemory":  # has the buffer protocol, which Python < 3.12 cannot tell pybind11-stubgen
            node.body.append(ast.parse("def __buffer__(self, flags: int, /) -> memoryview: ...").body[0])
        return self._without_docstring(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.body = [ast.Expr(ast.Constant(...))]
        self.generic_visit(node)
        return node

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name("_bool") if node.id == "bool" and isinstance(node.ctx, ast.Load) else node

    def _without_docstring(self, node: ast.ClassDef) -> ast.ClassDef:
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:]
        node.body = node.body or [ast.Expr(ast.Constant(...))]
        self.generic_visit(node)
        return node


def _name(entry: ast.AnnAssign) -> str:
    return entry.target.id if isinstance(entry.target, ast.Name) else ""


class Signatures(Compact):
    """Of modules written in Python: no decorators that only export, and what their bodies assign to `self`."""

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        node.decorator_list = []
        assigned = [ast.unparse(target) for target in ast.walk(node) if _is_public_attribute(target)]
        named = {entry.name for entry in node.body if isinstance(entry, ast.FunctionDef)}
        for name in sorted({text.removeprefix("self.") for text in assigned} - named):
            node.body.append(ast.parse(f"{name}: typing.Any").body[0])
        return self._without_docstring(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        kept = ("property", "staticmethod", "classmethod")
        node.decorator_list = [entry for entry in node.decorator_list if ast.unparse(entry).endswith((*kept, "setter"))]
        return super().visit_FunctionDef(node)


def _is_public_attribute(node: ast.AST) -> bool:
    stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    return stored and ast.unparse(node.value) == "self" and not node.attr.startswith("_")


def plugin_stub(folder: Path, origin: str) -> str:
    """The stub of `tensorrt.plugin`, which is written in Python: its public classes and functions."""
    imports = "import typing\nfrom typing import *\nfrom builtins import bool as _bool\nfrom abc import ABC\n"
    lines = [HEADER.format(origin=origin) + imports + "import tensorrt as trt\nTuple = tuple\nList = list"]
    for name in ("_tensor", "_autotune", "_top_level", "_lib"):
        tree = ast.parse((folder / f"{name}.py").read_text())
        bodies = [entry.body if isinstance(entry, ast.If) else [entry] for entry in tree.body]
        for entry in (entry for body in bodies for entry in body):
            if isinstance(entry, ast.ClassDef | ast.FunctionDef) and not entry.name.startswith("_"):
                lines.append(ast.unparse(ast.fix_missing_locations(Signatures().visit(entry))))
    text = re.sub(r":\n +\.\.\.$", ": ...", "\n".join(lines), flags=re.MULTILINE)
    return re.sub(r"\n\n+", "\n", text) + "\n"


def clean_stub(raw: str, origin: str) -> str:
    """Make pybind11-stubgen's output a valid stub, and short."""
    # The bindings name a parameter `in`, and give one a default before one without.
    valid = re.sub(r"([( ])in: ", r"\1in_: ", raw)
    valid = re.sub(r"(channel_axis: typing\.SupportsInt)\)", r"\1 = ...)", valid)
    tree = Compact().visit(ast.parse(valid))
    tree.body = [entry for entry in tree.body if not _is_all(entry)]
    text = ast.unparse(ast.fix_missing_locations(tree))
    text = re.sub(r":\n +\.\.\.$", ": ...", text, flags=re.MULTILINE)
    text = re.sub(r"\n\n+", "\n", text).replace(
        "\nimport typing\n", "\nimport typing\nfrom builtins import bool as _bool\n", 1
    )
    return HEADER.format(origin=origin) + text + "\n__version__: str\n"


def _is_all(entry: ast.stmt) -> bool:
    return isinstance(entry, ast.AnnAssign) and _name(entry) == "__all__"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="the folder below typings/")
    parser.add_argument("--wheel", type=Path, help="a wheel of the classic bindings")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.wheel:
            environment = unpack_bindings(arguments.wheel, Path(folder))
            origin, raw = arguments.wheel.name, raw_stub("tensorrt_bindings.tensorrt", environment)
            write(arguments.name, "plugin", plugin_stub(Path(folder) / "tensorrt_bindings" / "plugin", origin))
        else:
            import tensorrt_rtx

            origin = f"tensorrt_rtx {tensorrt_rtx.__version__}"
            raw = raw_stub("tensorrt_rtx_bindings.tensorrt_rtx", dict(os.environ))
    write(arguments.name, "", clean_stub(raw, origin))


def write(name: str, module: str, text: str) -> None:
    target = Path(__file__).parent / name / "tensorrt" / module / "__init__.pyi"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
    print(f"{target}: {target.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
