"""What benchmarks/predict/readers.py calls equal: the rows that a reader finds, and those of pyarrow."""

import datetime
import math
from typing import Any

import numpy as np
import pytest
from readers import first_difference

NOON = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC)
EXPECTED: list[dict[str, Any]] = [
    {"path": "a", "tags": ["x"], "weight": None, "taken": NOON},
    {"path": "b", "tags": None, "weight": 0.25, "taken": None},
]


def test_the_same_rows_in_another_order_and_in_a_readers_own_types_are_equal() -> None:
    found: list[dict[str, Any]] = [
        {"path": "b", "tags": None, "weight": np.float64(0.25), "taken": math.nan},
        {"path": "a", "tags": np.array(["x"]), "weight": math.nan, "taken": NOON},
    ]
    assert first_difference(found, EXPECTED) == ""


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (EXPECTED[:0], "not 2 rows"),
        (EXPECTED[:1], "not 2 rows"),
        ([{**row, "extra": 1} for row in EXPECTED], "columns of one alone: extra"),
        ([{"path": row["path"]} for row in EXPECTED], "columns of one alone: tags, taken, weight"),
        ([{"tags": None}] * 2, "columns of one alone: path, taken, weight"),
        ([{**row, "weight": 0.5} for row in EXPECTED], "weight: 0.5 is not None"),
    ],
    ids=["no rows", "a row less", "a column more", "columns less", "no path", "another value"],
)
def test_what_differs_is_said(found: list[dict[str, Any]], said: str) -> None:
    assert first_difference(found, EXPECTED) == said
