"""docs/architecture.md names files, classes and functions that exist, and every room."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()


def test_what_the_walks_name_exists() -> None:
    named = re.findall(r"`(vitx/[\w/]+\.py)(?::(\w+))?`", PAGE)
    assert len(named) > 25
    for path, name in named:
        tree = ast.parse((ROOT / path).read_text())
        kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        defined = {node.name for node in tree.body if isinstance(node, kinds)}
        assert not name or name in defined, f"{path} defines no {name}"


def test_every_room_is_described() -> None:
    rooms = {path.parent.name for path in (ROOT / "vitx").glob("*/__init__.py")}
    assert rooms == set(re.findall(r"^\| `vitx/(\w+)` \|", PAGE, re.MULTILINE))
