"""Write the typing stub of TensorRT's Python bindings: what we call of them, in each of three versions.

    python typings/generate.py

Needs pybind11-stubgen, ruff, a C compiler, tensorrt-rtx installed, and a registry that has the classic bindings' wheels
for Linux on x86-64. The classic bindings are imported without their libraries and without a GPU: the compiler makes
stand-ins for the nine functions that they link to. See README.md.
"""

import ast
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
RTX = "TENSORRT_RTX_1_7"
# The names are constants of which a type checker is told that one is true; the values are releases of the bindings.
CLASSIC = {"TENSORRT_10_16": "10.16.1.11", "TENSORRT_11_4": "11.4.0.106"}
VERSIONS = (*CLASSIC, RTX)

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
PLUGIN_FILES = ("_tensor", "_autotune", "_top_level", "_lib")
LIBRARIES = ("libnvinfer", "libnvinfer_plugin", "libnvonnxparser")
HEADER = """# Made by typings/generate.py: what we call, names and signatures only.
# mypy: ignore-errors
# ruff: noqa
"""
# Called by operators and built-in functions, which leave no name in our sources.
SPECIAL_METHODS = {"__init__", "__getitem__", "__len__", "__int__", "__buffer__", "__mul__", "__members__"}

Members = dict[str, list[ast.stmt]]  # all definitions of a name: overloads, a property and its setter


def download_bindings(version: str, folder: Path) -> subprocess.CompletedProcess[bytes]:
    """Fetch the wheel of one of `CLASSIC` into `folder`, with pip."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--retries=1", "--timeout=10", "-d", str(folder)]
    return subprocess.run([*command, f"tensorrt-cu13-bindings=={CLASSIC[version]}"], capture_output=True, check=False)


def unpack_bindings(wheel: Path, folder: Path) -> dict[str, str]:
    """Unpack a classic bindings wheel beside stand-in libraries; return the environment in which it imports."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    source, major = folder / "entry_points.c", wheel.name.split("-")[1].split(".")[0]
    source.write_text(ENTRY_POINTS)
    for library in LIBRARIES:
        name = f"{library}.so.{major}"
        command = ["cc", "-shared", "-fPIC", "-o", str(folder / name), f"-Wl,-soname,{name}", str(source)]
        subprocess.run(command, check=True, capture_output=True)
    return {**os.environ, "LD_LIBRARY_PATH": str(folder), "PYTHONPATH": str(folder)}


def raw_stub(module: str, environment: dict[str, str]) -> str:
    """What pybind11-stubgen writes, made valid: a parameter named `in`, and a default before none, are mended."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pybind11_stubgen", module, "-o", folder, "--ignore-all-errors"]
        subprocess.run(command, check=True, capture_output=True, env=environment)
        text = (Path(folder) / f"{module.replace('.', '/')}.pyi").read_text()
    text = re.sub(r"([( ])in: ", r"\1in_: ", text)
    return re.sub(r"(channel_axis: typing\.SupportsInt)\)", r"\1 = ...)", text)


def used_names() -> set[str]:
    """Every attribute, method and quoted name in those of our sources that import TensorRT; NAME.setter if assigned."""
    names = set(SPECIAL_METHODS)
    for path in (path for folder in ("vitx", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        if not imported & {"tensorrt", "tensorrt.plugin"}:
            continue
        for node in nodes:
            if isinstance(node, ast.Attribute):
                names |= {node.attr, f"{node.attr}.setter"} if isinstance(node.ctx, ast.Store) else {node.attr}
            elif isinstance(node, ast.FunctionDef):  # a subclass overrides it
                names.add(node.name)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # a quoted annotation
                names |= set(re.findall(r"\btrtp?\.(\w+)", node.value))
    return names


class Signatures(ast.NodeTransformer):
    """Without bodies and without decorators that only export; `bool` is the type, not the bindings' constant."""

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        node.decorator_list = []
        if node.name == "IHostMemory":  # has the buffer protocol, which Python < 3.12 cannot tell pybind11-stubgen
            node.body += ast.parse("def __buffer__(self, flags: int, /) -> memoryview: ...").body
        self.generic_visit(node)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        kept = ("property", "staticmethod", "classmethod", "setter", "overload")
        node.decorator_list = [entry for entry in node.decorator_list if ast.unparse(entry).endswith(kept)]
        node.body = [ast.Expr(ast.Constant(...))]
        self.generic_visit(node)
        return node

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name("_bool") if node.id == "bool" and isinstance(node.ctx, ast.Load) else node


def names_in(node: ast.AST) -> Iterator[str]:
    """The names that a definition refers to, quoted ones too."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


def members_of(body: Iterable[ast.stmt]) -> Members:
    """Definitions by their names, in order; imports and docstrings have none."""
    members: Members = {}
    for entry in body:
        if isinstance(entry, ast.FunctionDef | ast.ClassDef):
            members.setdefault(entry.name, []).append(entry)
        elif isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
            members.setdefault(entry.target.id, []).append(entry)
    return members


def needed(text: str, used: set[str]) -> Members:
    """What we use of a module, and the classes that it refers to; of every class the members that we use."""

    def reduce(entry: ast.stmt) -> ast.stmt:
        if isinstance(entry, ast.ClassDef):
            members = {name: parts for name, parts in members_of(entry.body).items() if name in used}
            if "__members__" in members:  # nobody makes a value of an enumeration
                members.pop("__init__", None)
            parts = [part for parts in members.values() for part in parts]
            entry.body = [reduce(part) for part in parts if _setters(part) <= used]
        return entry

    tree = Signatures().visit(ast.parse(text))
    whole = {name: [reduce(entry) for entry in entries] for name, entries in members_of(tree.body).items()}
    kept: set[str] = set()
    waiting = [name for name in whole if name in used]
    while waiting:
        name = waiting.pop()
        if name not in kept:
            kept.add(name)
            waiting += [other for entry in whole[name] for other in names_in(entry) if other in whole]
    return {name: entries for name, entries in whole.items() if name in kept}


def _setters(entry: ast.stmt) -> set[str]:
    decorators = entry.decorator_list if isinstance(entry, ast.FunctionDef) else []
    return {text for text in map(ast.unparse, decorators) if text.endswith(".setter")}


def merge(versions: dict[str, Members]) -> list[str]:
    """The lines of all versions in one: what they do not share stands under an `if` with the versions' names."""
    blocks: list[tuple[list[str], list[str]]] = []
    for name in sorted({name for members in versions.values() for name in members}):
        alike: dict[str, dict[str, list[ast.stmt]]] = {}
        for version in (version for version in versions if name in versions[version]):
            entries = versions[version][name]
            alike.setdefault(_text(entries), {})[version] = entries
        for text, found in alike.items():
            classes = {version: entry for version, (entry, *_) in found.items() if isinstance(entry, ast.ClassDef)}
            body = merge({version: members_of(entry.body) for version, entry in classes.items()})
            lines = text.split("\n") + _indented(body or ["..."] * bool(classes))
            if not blocks or blocks[-1][0] != list(found):
                blocks.append((list(found), []))
            blocks[-1][1].extend(lines)
    lines = []
    for shared, block in blocks:
        lines += block if len(shared) == len(versions) else [f"if {' or '.join(shared)}:", *_indented(block)]
    return lines


def _text(entries: list[ast.stmt]) -> str:
    """All definitions of a name; of a class its first line, since versions may share some of its members."""
    first = entries[0]
    if not isinstance(first, ast.ClassDef):
        return ast.unparse(ast.Module(entries, []))
    bases = ", ".join(map(ast.unparse, [*first.bases, *first.keywords]))
    return f"class {first.name}({bases}):" if bases else f"class {first.name}:"


def _indented(lines: list[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def read_modules(used: set[str]) -> tuple[dict[str, Members], dict[str, Members]]:
    """`tensorrt` by version, and `tensorrt.plugin`, which is written in Python, of the classic ones."""
    modules, plugins = {}, {}
    for version in CLASSIC:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            download_bindings(version, folder).check_returncode()
            environment = unpack_bindings(next(folder.glob("*.whl")), folder)
            modules[version] = needed(raw_stub("tensorrt_bindings.tensorrt", environment), used)
            sources = [(folder / "tensorrt_bindings" / "plugin" / f"{name}.py").read_text() for name in PLUGIN_FILES]
            plugins[version] = needed("\n".join(map(_without_conditions, sources)), used)
    modules[RTX] = needed(raw_stub("tensorrt_rtx_bindings.tensorrt_rtx", dict(os.environ)), used)
    return modules, {**plugins, RTX: {}}


def _without_conditions(source: str) -> str:
    """Definitions that a module makes below an `if`, as its others."""
    bodies = [entry.body if isinstance(entry, ast.If) else [entry] for entry in ast.parse(source).body]
    return ast.unparse(ast.Module([entry for body in bodies for entry in body], []))


def write(module: str, imports: str, versions: dict[str, Members]) -> None:
    target = FOLDER / module / "__init__.pyi"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(HEADER + imports + "\n".join(merge(versions)) + "\n")
    subprocess.run([sys.executable, "-m", "ruff", "format", "--quiet", str(target)], check=True)
    print(f"{target}: {len(target.read_text().splitlines())} lines")


def main() -> None:
    modules, plugins = read_modules(used_names())
    flags = "".join(f"{version}: _bool\n" for version in VERSIONS)
    basic = "import typing\nfrom builtins import bool as _bool\n"
    write("tensorrt", f"{basic}import collections.abc\nimport typing_extensions\n{flags}__version__: str\n", modules)
    names = f"import tensorrt as trt\nfrom tensorrt import {', '.join(CLASSIC)}\nTuple = tuple\n"
    write("tensorrt/plugin", f"{basic}from typing import *\nfrom abc import ABC\n{names}", plugins)


if __name__ == "__main__":
    main()
