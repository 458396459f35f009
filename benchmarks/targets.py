"""What was measured: whether it meets its targets (a result says so under `holds`), and its file of results."""

import json
from pathlib import Path
from typing import Any


def verdict(result: dict[str, Any]) -> str:
    return "holds" if result["holds"] else "MISSED"


def all_hold(report: Any) -> bool:
    """No measured target below `report` was missed."""
    if not isinstance(report, dict):
        return True
    return report.get("holds", True) and all(map(all_hold, report.values()))


def saved(report: dict[str, Any], path: Path | None) -> dict[str, Any]:
    """`report` over what the file at `path` holds, part by part, beside the commands that are there; written to it."""
    if path is None:
        return report
    old = json.loads(path.read_text()) if path.is_file() else {}
    whole = {**old, **report, "commands": {**old.get("commands", {}), **report["commands"]}}
    path.write_text(json.dumps(whole, indent=2) + "\n")
    return whole
