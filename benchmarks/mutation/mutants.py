"""Every mutant of a source file: the file as a whole with one place changed."""

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import libcst as cst
from libcst.metadata import CodeRange, MetadataWrapper, PositionProvider

from mutation.operators import OPERATORS


@dataclass(frozen=True)
class Mutant:
    file: str  # "vitx/core/files.py"
    line: int  # the first line that differs, from 1
    last_line: int  # of the original's lines that differ
    operator: str
    before: str  # the lines that differ, without indentation, joined by ⏎
    after: str
    source: str

    @property
    def key(self) -> str:
        return hashlib.sha256(f"{self.file}\n{self.source}".encode()).hexdigest()[:20]


class _Places(cst.CSTVisitor):
    """Nodes and what may stand in their place. Types, docstrings and what only a type checker reads are left alone."""

    def __init__(self) -> None:
        self.found: list[tuple[str, cst.CSTNode, cst.CSTNode]] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.Annotation | cst.Import | cst.ImportFrom | cst.TypeAlias):
            return False
        if isinstance(node, cst.If) and isinstance(node.test, cst.Name) and node.test.value == "TYPE_CHECKING":
            return False
        if isinstance(node, cst.Arg) and node.keyword is not None and node.keyword.value == "slots":
            return False
        if isinstance(node, cst.Expr) and isinstance(node.value, cst.SimpleString | cst.ConcatenatedString):
            return False
        for kind, operator in OPERATORS:
            if isinstance(node, kind):
                name = operator.__name__.removeprefix("operator_")
                self.found.extend((name, *_smaller(node, mutated)) for mutated in operator(node))
        return True


def _smaller(node: cst.CSTNode, mutated: cst.CSTNode) -> tuple[cst.CSTNode, cst.CSTNode]:
    """Of an `if` or `while`, only the condition."""
    if isinstance(node, cst.If | cst.While) and isinstance(mutated, cst.If | cst.While):
        return node.test, mutated.test
    return node, mutated


def mutants_of(file: str, source: str) -> Iterator[Mutant]:
    """In the order of the file; no two are the same text, and each is Python."""
    wrapper = MetadataWrapper(cst.parse_module(source), unsafe_skip_copy=True)
    ranges = wrapper.resolve(PositionProvider)
    offsets = [0]
    for line in source.splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))
    places = _Places()
    wrapper.module.visit(places)
    seen = {source}
    mutants = []
    for operator, node, replacement in places.found:
        text = _replaced(wrapper.module, source, node, replacement, ranges.get(node), offsets)
        if text not in seen and _is_python(text):
            seen.add(text)
            mutants.append(_mutant(file, operator, source, text))
    yield from sorted(mutants, key=lambda mutant: mutant.line)


def _replaced(
    module: cst.Module,
    source: str,
    node: cst.CSTNode,
    replacement: cst.CSTNode,
    place: CodeRange | None,
    offsets: list[int],
) -> str:
    if place is not None:
        start = offsets[place.start.line - 1] + place.start.column
        end = offsets[place.end.line - 1] + place.end.column
        if source[start:end] == module.code_for_node(node):
            return source[:start] + module.code_for_node(replacement) + source[end:]
    # Its text is not what its place says (brackets, white space around it): let libcst write the file, in 90 ms.
    changed = module.deep_replace(node, replacement)
    return changed.code if isinstance(changed, cst.Module) else source


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


def _mutant(file: str, operator: str, source: str, text: str) -> Mutant:
    old, new = source.splitlines(), text.splitlines()
    same = 0
    while same < min(len(old), len(new)) and old[same] == new[same]:
        same += 1
    tail = 0
    while tail < min(len(old), len(new)) - same and old[-1 - tail] == new[-1 - tail]:
        tail += 1
    end = len(old) - tail
    before, after = _one_line(old[same:end]), _one_line(new[same : len(new) - tail])
    return Mutant(file, same + 1, max(end, same + 1), operator, before, after, text)


def _one_line(lines: list[str]) -> str:
    return " ⏎ ".join(line.strip() for line in lines)
