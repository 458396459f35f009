"""docs/server-benchmarks.md says of the runs with wrk what their files say: each row, the misses, the medians."""

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "server-benchmarks.md").read_text(encoding="utf-8")
# As the table's columns stand.
COLUMNS = ("rate over triton", "rate over no log", "rate over sessions", "p99 over triton", "JPEG")


def measured(path: Path) -> list[dict[str, Any]]:
    found = json.loads(path.read_text(encoding="utf-8"))
    ratios = {**found["32 px, 64 connections"]["ratios"], "JPEG": found["JPEG"]}
    return [ratios[name] for name in COLUMNS]


RUNS = {path.name: measured(path) for path in sorted((ROOT / "benchmarks" / "results").glob("*-wrk*.json"))}


def test_each_run_has_its_row() -> None:
    rows = dict(re.findall(r"^\| \[[^]]+\]\(\S+/([^/]+-wrk\S*)\)[^|]*\|[^|]*\|[^|]*\| (.*) \|$", PAGE, re.MULTILINE))
    assert sorted(rows) == sorted(RUNS)
    for name, ratios in RUNS.items():
        for cell, each in zip(rows[name].split(" | "), ratios, strict=True):
            numbers = [float(number) for number in re.findall(r"\d*\.\d+", cell)]
            assert numbers == pytest.approx([each["ratio"], each["min"], each["max"]], abs=0.0051), name


def test_the_misses_are_counted() -> None:
    rate, no_log, sessions, p99, jpeg = (
        sum(not run[column]["holds"] for run in RUNS.values()) for column in range(len(COLUMNS))
    )
    said = PAGE.partition("**Missed** of the ")[2].partition("Beside")[0]
    numbers = [int(number) for number in re.findall(r"(?:^|\sin\s)(\d+)\b", said)]
    assert numbers == [len(RUNS), p99, sessions, rate, jpeg, no_log], said


def test_the_medians_and_extremes_of_all_runs_are_in_the_summary() -> None:
    rate, _, sessions, p99, jpeg = ([run[column]["ratio"] for run in RUNS.values()] for column in range(len(COLUMNS)))
    said = re.search(r"\| (\S+) of Triton's rate and (\S+) of its p99, medians of (\d+) runs \((.*?)\); (.*?) \|", PAGE)
    assert said is not None
    numbers = [float(number) for number in re.findall(r"\d*\.?\d+", " ".join(said.groups()))]
    extremes = (min(rate), max(rate), min(p99), max(p99))
    expected = (median(rate), median(p99), len(RUNS), *extremes, median(sessions), median(jpeg))
    assert numbers == pytest.approx(expected, abs=0.0051)
