"""Triton's statistics extension: counts and times of one model since it was loaded.

Source: Triton's docs/protocol/extension_statistics.md. `inference_stats` counts the times of a batch once
for each of its requests, `batch_stats` once.
"""

import time
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """Seconds of one batch."""

    rows: int
    gather: float  # copying the images of its requests into one array
    compute: float
    output: float  # from the end of the computation to the replies
    queue: tuple[float, ...]  # one entry for each request


@dataclass(slots=True)
class _Duration:
    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float, count: int = 1) -> None:
        self.count += count
        self.seconds += seconds

    def as_json(self) -> dict[str, int]:
        return {"count": self.count, "ns": round(1e9 * self.seconds)}


@dataclass(slots=True)
class _Compute:
    input: _Duration = field(default_factory=_Duration)
    infer: _Duration = field(default_factory=_Duration)
    output: _Duration = field(default_factory=_Duration)

    def add(self, times: BatchTimes, count: int) -> None:
        self.input.add(times.gather * count, count)
        self.infer.add(times.compute * count, count)
        self.output.add(times.output * count, count)

    def as_json(self) -> dict[str, Any]:
        return {f"compute_{part}": getattr(self, part).as_json() for part in ("input", "infer", "output")}


class ModelStatistics:
    """Counts and times of one model."""

    def __init__(self) -> None:
        self._success, self._fail, self._queue = _Duration(), _Duration(), _Duration()
        self._compute = _Compute()
        self._by_size: dict[int, _Compute] = {}
        self._images = 0
        self._last_inference = 0.0

    def add_success(self, seconds: float) -> None:
        """Count a request that was answered `seconds` after its arrival."""
        self._success.add(seconds)

    def add_failure(self, seconds: float) -> None:
        """Count a request that was refused, failed or was cancelled."""
        self._fail.add(seconds)

    def add_batch(self, times: BatchTimes) -> None:
        """Count a batch that ran."""
        self._last_inference = time.time()
        self._images += times.rows
        self._queue.add(sum(times.queue), len(times.queue))
        self._compute.add(times, len(times.queue))
        self._by_size.setdefault(times.rows, _Compute()).add(times, 1)

    def as_json(self, name: str, version: str) -> dict[str, Any]:
        """One entry of `model_stats`; whole numbers, times in nanoseconds."""
        return {
            "name": name,
            "version": version,
            "last_inference": round(1e3 * self._last_inference),
            "inference_count": self._images,
            "execution_count": sum(compute.infer.count for compute in self._by_size.values()),
            "inference_stats": {
                "success": self._success.as_json(),
                "fail": self._fail.as_json(),
                "queue": self._queue.as_json(),
                **self._compute.as_json(),
                "cache_hit": _Duration().as_json(),
                "cache_miss": _Duration().as_json(),
            },
            "batch_stats": [{"batch_size": size, **self._by_size[size].as_json()} for size in sorted(self._by_size)],
        }
