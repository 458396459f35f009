"""Every test function asserts something: itself, in a function of its own file, or by a helper that asserts."""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
# Calls that fail a test without the word assert.
ASSERTING_CALLS = {"raises", "warns", "fail", "deprecated_call"}


def name_of(function: ast.expr) -> str:
    """`pytest.raises` → raises, `self.check` → check."""
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def says_so_by_name(name: str) -> bool:
    return name in ASSERTING_CALLS or name.lstrip("_").startswith("assert")


def asserts_itself(function: ast.AST) -> bool:
    return any(
        isinstance(node, ast.Assert) or (isinstance(node, ast.Call) and says_so_by_name(name_of(node.func)))
        for node in ast.walk(function)
    )


@dataclass(frozen=True)
class Calls:
    name: str
    asserts: bool
    called: frozenset[str]


def functions_in(tree: ast.AST) -> list[Calls]:
    return [
        Calls(
            function.name,
            asserts_itself(function),
            frozenset(name_of(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)),
        )
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


@cache
def support_functions() -> list[Calls]:
    files = [file for file in sorted(TESTS.rglob("*.py")) if not file.name.startswith("test_")]
    return [function for file in files for function in functions_in(ast.parse(file.read_text(encoding="utf-8")))]


def without_assertion(functions: list[Calls], support: list[Calls]) -> list[str]:
    """The tests among `functions` that neither assert nor call, directly or through others, a helper that does."""
    helpers = [function for function in [*functions, *support] if not function.name.startswith("test_")]
    asserting = {helper.name for helper in helpers if helper.asserts}
    while more := {helper.name for helper in helpers if helper.called & asserting} - asserting:
        asserting |= more
    tests = [function for function in functions if function.name.startswith("test_")]
    return [test.name for test in tests if not test.asserts and not test.called & asserting]


@pytest.mark.parametrize("file", sorted(TESTS.rglob("test_*.py")), ids=lambda file: file.relative_to(TESTS).as_posix())
def test_every_test_asserts(file: Path) -> None:
    functions = functions_in(ast.parse(file.read_text(encoding="utf-8")))
    assert not without_assertion(functions, support_functions()), "tests that nothing but an error can make fail"


@pytest.mark.parametrize(
    ("body", "asserts"),
    [
        ("assert value", True),
        ("with pytest.raises(ValueError): run()", True),
        ("checked(value)", True),
        ("twice_removed(value)", True),
        ("assert_equal(value)", True),
        ("run()", False),
        ("value == 1", False),
    ],
)
def test_a_test_without_assertion_is_found(body: str, asserts: bool) -> None:
    helpers = "def checked(value):\n    assert value\ndef twice_removed(value):\n    checked(value)\ndef run(): ...\n"
    tree = ast.parse(f"{helpers}def test_it(value):\n    {body}\n")
    assert without_assertion(functions_in(tree), []) == ([] if asserts else ["test_it"])
