"""Settings of a network that trains in a second, and the metrics that a run wrote."""

import json
from pathlib import Path
from typing import Any

TINY = (
    "model.kwargs.embed_dim=16",
    "model.kwargs.depth=2",
    "model.kwargs.num_heads=2",
    'model.kwargs.attention=["plain","re-attention"]',
    "batch_size=128",
)
TINY_SETTINGS = tuple(part for setting in TINY for part in ("--set", setting))


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl without the seconds, which differ between runs."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]
