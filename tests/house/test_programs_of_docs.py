"""docs/api.md and the notebooks are programs: each is run as it stands, but for smaller networks.

The notebooks are run in one process, each in a folder of its own: what the first imports is there for the others.
"""

import ast
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from training_jobs import TINY, context, script_in

DOCS = Path(__file__).parents[2] / "docs"
NOTEBOOKS = ("over-smoothing", "tour")
MOST_BYTES = 600_000  # of a notebook in the repository
KINDS = ("image/png", "text/html", "text/plain")  # a notebook shows the first that an object has
ENVIRONMENT = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
SMALLER = ["epochs=1", "workers=0", *TINY]
DRIVER = """
import os
import runpy
import tempfile
import traceback
from pathlib import Path

for program in {programs}:
    print("program", program, flush=True)
    tempfile.tempdir = str(Path.cwd())
    os.chdir(tempfile.mkdtemp())
    try:
        runpy.run_path(program)
    except BaseException as error:
        print(error, traceback.format_exc(), flush=True)
"""
# How a notebook shows each of `values`.
SHOW = """
import json
from vitx.core.panels import Picture

def kind(value):
    if isinstance(value, Picture):
        return "image/png" if value._repr_png_().startswith(b"\\x89PNG") else "no picture"
    return "text/html" if getattr(value, "_repr_html_", str)().startswith("<table>") else "text/plain"

print(json.dumps({number: kind(value) for number, value in values.items()}))
"""


def code_cells(notebook: str) -> list[dict[str, Any]]:
    cells = json.loads((DOCS / f"{notebook}.ipynb").read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def program_of_notebook(notebook: str) -> str:
    """The cells as one file; the value at the end of a cell is kept with the cell's number."""
    lines = ["values = {}"]
    for number, cell in enumerate(code_cells(notebook)):
        tree = ast.parse("".join(cell["source"]))
        last = tree.body[-1]
        if isinstance(last, ast.Expr) and not ast.unparse(last).startswith("os.chdir"):
            tree.body[-1] = ast.parse(f"values[{number}] = {ast.unparse(last)}").body[0]
        lines.append(ast.unparse(tree))
        if "parameters" in cell["metadata"].get("tags", ()):
            lines.append(f"SETTINGS = {SMALLER}")
    return "\n".join([*lines, SHOW])


def program_of_page() -> str:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "api.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) > 8
    program = "\n".join(blocks).replace('"epochs=1"', ", ".join(map(repr, SMALLER)))
    return 'if __name__ == "__main__":\n' + textwrap.indent(program, "    ")


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each program printed, and the error that ended it."""
    folder = tmp_path_factory.mktemp("docs")
    sources = {name: program_of_notebook(name) for name in NOTEBOOKS}
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
    (folder / "driver").write_text(DRIVER.format(programs=[str(folder / f"{name}.py") for name in sources]))
    process = context().Process(target=script_in, args=(folder, folder / "driver", folder / "printed"))
    process.start()
    process.join()
    _, *parts = (folder / "printed").read_text().split(f"program {folder}/")
    return {part.partition(".py\n")[0]: part.partition(".py\n")[2] for part in parts}


def test_the_page_runs_as_a_file(tmp_path: Path) -> None:
    """The processes of its conversions import the file."""
    (tmp_path / "program.py").write_text(program_of_page())
    command = [sys.executable, "program.py"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=ENVIRONMENT)
    for expected in ("after 1 epoch", "torch.Size([2, 197, 384])", "run.vitx pass", "(2, 10) CPUExecutionProvider"):
        assert expected in ran.stdout, ran.stdout + ran.stderr
    assert ran.returncode == 0


@pytest.mark.parametrize("page", [path.stem for path in DOCS.glob("*.md") if b"```python\n" in path.read_bytes()])
def test_the_blocks_of_a_page_have_all_that_they_name(page: str) -> None:
    """Five were parts of programs: who copied them got a NameError."""
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / f"{page}.md").read_text(encoding="utf-8"), re.DOTALL)
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "-"]
    ran = subprocess.run(command, input="\n".join(blocks), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_a_notebook_runs_and_shows_what_it_keeps(notebook: str, printed: dict[str, str]) -> None:
    kept = {
        str(number): next(kind for kind in KINDS if kind in output["data"])
        for number, cell in enumerate(code_cells(notebook))
        for output in cell["outputs"]
        if "data" in output
    }
    said = printed[notebook]
    assert "Traceback" not in said, said
    assert json.loads(said.splitlines()[-1]) == kept


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_a_notebook_is_small_and_keeps_no_error_and_no_path(notebook: str) -> None:
    text = (DOCS / f"{notebook}.ipynb").read_text(encoding="utf-8")
    assert len(text) < MOST_BYTES
    assert "/tmp" not in text
    outputs = [output["output_type"] for cell in code_cells(notebook) for output in cell["outputs"]]
    assert set(outputs) <= {"execute_result", "stream"}
