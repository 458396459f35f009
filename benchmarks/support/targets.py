"""What was measured: whether it meets its targets (a result says so under `holds`), and its file of results."""

import json
import sys
from pathlib import Path
from typing import Any

from vitx.core.bundle import timestamp
from vitx.core.machine import describe_machine, installed_versions


def verdict(result: dict[str, Any]) -> str:
    return "holds" if result["holds"] else "MISSED"


def all_hold(report: Any) -> bool:
    """No measured target below `report` was missed."""
    if not isinstance(report, dict):
        return True
    return report.get("holds", True) and all(map(all_hold, report.values()))


def begun() -> dict[str, Any]:
    """A report that names its machine and versions, and no results yet."""
    return {"machine": describe_machine(), "versions": installed_versions()}


def saved(report: dict[str, Any], path: Path | None, command: str | None = None) -> dict[str, Any]:
    """`report` over what the file at `path` holds, part by part, beside the commands that are there; written to it.

    command: of this run, which has ended now; by default that of this process.
    """
    if path is None:
        return report
    command = command or " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    old = json.loads(path.read_text()) if path.is_file() else {}
    whole = {**old, **report, "commands": {**old.get("commands", {}), command: timestamp()}}
    path.write_text(json.dumps(whole, indent=2) + "\n")
    return whole
