"""Triton's statistics extension: counts and times of one model since it was loaded.

Source: Triton's docs/protocol/extension_statistics.md. `inference_stats` counts the times of a batch once
for each of its requests, `batch_stats` once.
"""

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

_COMPUTE = {"compute_input": "gather", "compute_infer": "compute", "compute_output": "output"}  # fields of BatchTimes


class BatchTimes(NamedTuple):
    """Seconds of one batch."""

    rows: int
    gather: float  # copying the images of its requests into one array
    compute: float
    output: float  # from the end of the computation to the replies
    queue: Sequence[float]  # one entry for each request


class _Durations(dict[str, tuple[int, float]]):
    """How often, and seconds in all, by name."""

    def add(self, name: str, seconds: float, count: int = 1) -> None:
        counted, before = self.get(name, (0, 0.0))
        self[name] = counted + count, before + seconds

    def as_json(self, *names: str) -> dict[str, Any]:
        found = {name: self.get(name, (0, 0.0)) for name in names}
        return {name: {"count": count, "ns": round(1e9 * seconds)} for name, (count, seconds) in found.items()}


class ModelStatistics:
    """Counts and times of one model."""

    def __init__(self) -> None:
        self._times = _Durations()
        self._by_size: dict[int, _Durations] = defaultdict(_Durations)
        self._images, self._last_inference = 0, 0.0

    def add_request(self, seconds: float, *, failed: bool = False) -> None:
        """Count a request that was answered `seconds` after its arrival; failed: refused, or cancelled, too."""
        self._times.add("fail" if failed else "success", seconds)

    def add_lookup(self, seconds: float, *, found: bool) -> None:
        """Count a search of the response cache; what is found answers a request, which as in Triton did not queue."""
        self._times.add("cache_hit" if found else "cache_miss", seconds)
        if found:
            self._times.add("success", seconds)
            self._times.add("queue", 0)

    def add_batch(self, times: BatchTimes) -> None:
        self._last_inference = time.time()
        self._images += times.rows
        requests, of_size = len(times.queue), self._by_size[times.rows]
        self._times.add("queue", sum(times.queue), requests)
        for name, field in _COMPUTE.items():
            seconds = getattr(times, field)
            self._times.add(name, seconds * requests, requests)
            of_size.add(name, seconds)

    def as_json(self, name: str, version: str) -> dict[str, Any]:
        """One entry of `model_stats`; whole numbers, times in nanoseconds."""
        sizes = sorted(self._by_size.items())
        about = {"name": name, "version": version, "last_inference": round(1e3 * self._last_inference)}
        return {
            **about,
            "inference_count": self._images,
            "execution_count": sum(durations["compute_infer"][0] for _, durations in sizes),
            "inference_stats": self._times.as_json("success", "fail", "queue", *_COMPUTE, "cache_hit", "cache_miss"),
            "batch_stats": [{"batch_size": size, **durations.as_json(*_COMPUTE)} for size, durations in sizes],
        }
