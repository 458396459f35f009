"""Triton's statistics extension: counts and times of one model since it was loaded.

Source: Triton's docs/protocol/extension_statistics.md. `inference_stats` counts the times of a batch once
for each of its requests, `batch_stats` once.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_COMPUTE = {"compute_input": "gather", "compute_infer": "compute", "compute_output": "output"}  # fields of BatchTimes


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """Seconds of one batch."""

    rows: int
    gather: float  # copying the images of its requests into one array
    compute: float
    output: float  # from the end of the computation to the replies
    queue: Sequence[float]  # one entry for each request


@dataclass(slots=True)
class _Duration:
    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        self.count += count
        self.seconds += seconds


class ModelStatistics:
    """Counts and times of one model."""

    def __init__(self) -> None:
        names = ("success", "fail", "queue", *_COMPUTE, "cache_hit", "cache_miss")
        self._times = {name: _Duration() for name in names}
        self._by_size: dict[int, dict[str, _Duration]] = defaultdict(lambda: {name: _Duration() for name in _COMPUTE})
        self._images = 0
        self._last_inference = 0.0

    def add_success(self, seconds: float) -> None:
        """Count a request that was answered `seconds` after its arrival."""
        self._times["success"].add(seconds)

    def add_failure(self, seconds: float) -> None:
        """Count a request that was refused, failed or was cancelled."""
        self._times["fail"].add(seconds)

    def add_lookup(self, seconds: float, *, found: bool) -> None:
        """Count a search of the response cache; what is found answers a request, which as in Triton did not queue."""
        self._times["cache_hit" if found else "cache_miss"].add(seconds)
        if found:
            self._times["success"].add(seconds)
            self._times["queue"].add(0)

    def add_batch(self, times: BatchTimes) -> None:
        self._last_inference = time.time()
        self._images += times.rows
        requests, of_size = len(times.queue), self._by_size[times.rows]
        self._times["queue"].add(sum(times.queue), requests)
        for name, field in _COMPUTE.items():
            seconds = getattr(times, field)
            self._times[name].add(seconds * requests, requests)
            of_size[name].add(seconds)

    def as_json(self, name: str, version: str) -> dict[str, Any]:
        """One entry of `model_stats`; whole numbers, times in nanoseconds."""
        sizes = sorted(self._by_size.items())
        return {
            "name": name,
            "version": version,
            "last_inference": round(1e3 * self._last_inference),
            "inference_count": self._images,
            "execution_count": sum(durations["compute_infer"].count for _, durations in sizes),
            "inference_stats": _as_json(self._times),
            "batch_stats": [{"batch_size": size, **_as_json(durations)} for size, durations in sizes],
        }


def _as_json(durations: dict[str, _Duration]) -> dict[str, Any]:
    return {name: {"count": each.count, "ns": round(1e9 * each.seconds)} for name, each in durations.items()}
