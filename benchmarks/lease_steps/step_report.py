"""What the steps of lease.py share: the report that each writes as it goes, and their command line.

A part's report is one JSON file, replaced whole after every row: what a killed step has measured is there.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from support.triton_interpreter import patch_interpreter

# Dense float16 or bfloat16 products of an H100 or H200 SXM, by their datasheets.
DATASHEET_FLOPS = 989.5e12


class Report:
    """The rows of one step in its part's file, and the lines that it has in the final table."""

    def __init__(self, path: Path, step: str, *, rehearsed: bool = False) -> None:
        self.path, self.step, self.rehearsed = path, step, rehearsed

    @property
    def device(self) -> str:
        return "cpu" if self.rehearsed else "cuda"

    def row(self, name: str, value: Any, line: str = "") -> None:
        """Write a row; `line` is said in the log now and in the table at the end."""
        whole = read(self.path)
        entry = whole["steps"].setdefault(self.step, {})
        entry.setdefault("rows", {})[name] = value
        if line:
            entry.setdefault("lines", []).append(line)
            print(line, flush=True)
        write(self.path, whole)

    def rows_of(self, step: str) -> dict[str, Any]:
        """What an earlier step of this part has measured; empty where it did not run."""
        rows: dict[str, Any] = read(self.path)["steps"].get(step, {}).get("rows", {})
        return rows


def read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())) if path.is_file() else {"steps": {}}


def write(path: Path, whole: dict[str, Any]) -> None:
    """Replace the file at once; two processes never write at the same time."""
    new = path.with_name(f"{path.name}.{os.getpid()}")
    new.write_text(json.dumps(whole, indent=1, default=str) + "\n")
    new.replace(path)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def of_peak(flops_per_second: float, product: float | None) -> dict[str, float]:
    """FLOP/s, and its shares of the datasheet's peak and of the product that was measured."""
    shares = {"flops_per_second": flops_per_second, "of_datasheet": flops_per_second / DATASHEET_FLOPS}
    return shares if product is None else {**shares, "of_product": flops_per_second / product}


def run_step(steps: dict[str, Callable[[Report], None]]) -> None:
    """Run the step that the command line names: STEP --report FILE [--rehearse]."""
    parser = argparse.ArgumentParser()
    parser.add_argument("step", choices=steps)
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true")
    arguments = parser.parse_args()
    if arguments.rehearse:
        patch_interpreter()
    started = time.perf_counter()
    steps[arguments.step](Report(arguments.report, arguments.step, rehearsed=arguments.rehearse))
    print(f"{arguments.step}: {time.perf_counter() - started:.1f} s after imports", flush=True)
