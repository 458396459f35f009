"""Whether what was measured meets its targets: a result of a report says so under `holds`."""

from typing import Any


def verdict(result: dict[str, Any]) -> str:
    return "holds" if result["holds"] else "MISSED"


def all_hold(report: Any) -> bool:
    """No measured target below `report` was missed."""
    if not isinstance(report, dict):
        return True
    return report.get("holds", True) and all(map(all_hold, report.values()))
