"""The tables of docs/studies.md say what the files of results that they link say, rounded once."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RESULT = re.compile(r"\.\./benchmarks/results/([\w-]+)\.json")
# The column of a table, the field of the rows in the file, and the unit of the table.
FIELDS = {
    "top-1 (%)": ("top1", 100),
    "CosSim, last block": ("cos_sim_last_block", 1),
    "attention std, last quarter": ("attention_std_last_layers", 1),
    "NLL": ("nll", 1),
}


def measured_cells() -> Iterator[Any]:
    """(text of a cell, value, unit) of each number in the first table behind each link; tables have the file's rows."""
    name, header = "", list[str]()
    for line in (ROOT / "docs" / "studies.md").read_text(encoding="utf-8").splitlines():
        if found := RESULT.search(line):
            name, header = found[1], []
            rows = iter(json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_bytes())["rows"])
        if name and line.startswith("|"):
            cells = [cell.strip().replace("**", "").replace("−", "-") for cell in line.strip("|").split("|")]
            if not header:
                header = cells
            elif "---" not in line:
                row = next(rows)
                for title, text in zip(header, cells, strict=True):
                    if title in FIELDS:
                        field, unit = FIELDS[title]
                        yield pytest.param(text, row[field], unit, id=f"{name[11:]}-{cells[0]}-{cells[1]}-{field}")
        elif header:
            name, header = "", []


@pytest.mark.parametrize(("text", "measured", "unit"), [*measured_cells()])
def test_a_table_rounds_what_was_measured(text: str, measured: dict[str, float], unit: int) -> None:
    numbers = text.split(" ± ")
    decimals = len(numbers[0].partition(".")[2])
    expected = [f"{unit * measured[name]:.{decimals}f}" for name in ("mean", "std")[: len(numbers)]]
    assert [f"{float(number):.{decimals}f}" for number in numbers] == expected
