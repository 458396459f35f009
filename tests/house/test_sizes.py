"""How large files and functions may be; what one cannot take in at a glance is split."""

import ast
from collections.abc import Iterator
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2]
MOST_LINES_OF_A_FILE, MOST_LINES_OF_A_FUNCTION, MOST_PARAMETERS = 500, 100, 12


def files(*folders: str) -> dict[str, str]:
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def functions(text: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs])


def test_no_file_and_no_function_is_long() -> None:
    sources = files("vitx", "tests", "benchmarks")
    assert len(sources) > 400
    long = [path for path, text in sources.items() if text.count("\n") > MOST_LINES_OF_A_FILE]
    for path, text in sources.items():
        long += [f"{path}:{node.name}" for node in functions(text) if lines(node) > MOST_LINES_OF_A_FUNCTION]
    assert long == []


def test_no_signature_is_long() -> None:
    long = [
        f"{path}:{node.name}"
        for path, text in files("vitx", "benchmarks").items()
        for node in functions(text)
        if parameters(node) > MOST_PARAMETERS
    ]
    assert long == []


def test_half_the_files_are_short_and_the_server_is_a_fifth() -> None:
    sizes = {path: text.count("\n") for path, text in files("vitx").items()}
    assert median(sizes.values()) <= 130
    server = sum(size for path, size in sizes.items() if path.startswith("vitx/serve/"))
    assert server < 0.22 * sum(sizes.values())
