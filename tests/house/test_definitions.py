"""The code that results of `vitx analyze` are computed by is that of golden/definitions.json, with its version.

Results are cached under vitx.analyze.metric.DEFINITIONS_VERSION. Where a result may differ after a change, raise it: a
second call on an old folder would mix old numbers with new ones. Then, and where nothing but the form has changed:
`python tests/house/test_definitions.py --write`, and commit the file with the change. What is drawn, what is said, and
comments do not count.
"""

import ast
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vitx.analyze.metric import DEFINITIONS_VERSION

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden" / "definitions.json"
PLACES = (
    "vitx/analyze/metrics/*.py",
    "vitx/analyze/corruption/*.py",
    *(f"vitx/analyze/{name}.py" for name in ("accuracy", "activations", "curvature", "intervals", "lanczos")),
    *(f"vitx/analyze/{name}.py" for name in ("predictor", "similarity_matrix", "spectrum", "steps", "units")),
    "vitx/models/similarity.py",
    "vitx/core/probabilities.py",
)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def definitions() -> dict[str, Any]:
    paths = sorted(path for place in PLACES for path in ROOT.glob(place))
    digests = {path.relative_to(ROOT).as_posix(): digest(path.read_text(encoding="utf-8")) for path in paths}
    return {"version": DEFINITIONS_VERSION, "sources": digests}


def digest(source: str) -> str:
    """Of the syntax tree: the same for every version of Python, which print and dump one in different ways."""
    return hashlib.sha256(_text(ast.parse(source)).encode()).hexdigest()[:16]


def _text(node: object) -> str:
    if isinstance(node, list):
        return f"[{','.join(_text(each) for each in node)}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = {name: value for name, value in ast.iter_fields(node) if value not in (None, [])}
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        fields["body"] = [*_computing(node)]
    return f"{type(node).__name__}({','.join(f'{name}={_text(value)}' for name, value in fields.items())})"


def _computing(scope: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.stmt]:
    """The statements of a body without its docstring, imports, figures, lines of text and records of a Metric."""
    for statement in scope.body:
        text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        shown = isinstance(statement, FUNCTIONS) and (
            statement.name.lstrip("_").startswith("draw") or statement.name.endswith("_line")
        )
        value = statement.value if isinstance(statement, ast.Assign) else None
        metric = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "Metric"
        if not (text or shown or metric or isinstance(statement, ast.Import | ast.ImportFrom)):
            yield statement


def test_what_defines_results_is_what_the_version_stands_for() -> None:
    golden, found = json.loads(GOLDEN.read_text(encoding="utf-8")), definitions()
    before, after = golden["sources"], found["sources"]
    changed = sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))
    said = [f"version {golden['version']} → {found['version']}, changed: {', '.join(changed) or 'nothing'}"]
    assert golden == found, "\n".join(["not as golden/definitions.json has it", *said, str(__doc__)])


def test_only_what_computes_counts() -> None:
    source = '"""Means."""\nimport numpy\n\ndef mean(x, n=3):\n    """Of x."""\n    return sum(x) / n  # all of them\n'
    shown = "def draw_mean(results):\n    return 3\n\ndef _mean_line(found):\n    return 0\n\nMEAN = Metric(title=3)\n"
    same = "def mean(x, n=3):\n    return (sum(x)\n            / n)\n"
    assert digest(source) == digest(source + shown) == digest(same)
    assert len({digest(same), digest(same.replace("3", "4")), digest(same.replace("/", "*"))}) == 3


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    GOLDEN.write_text(json.dumps(definitions(), indent=1) + "\n", encoding="utf-8")
