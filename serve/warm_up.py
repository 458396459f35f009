"""The latency curve a model starts with: what `vitx bench` measured of this setting here, or a quick measurement."""

import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from vitx.core.bundle import Bundle
from vitx.serve.latency_curve import LatencyCurve
from vitx.serve.limits import Batching
from vitx.serve.runtimes import Session, image_shape

# A start must stay short: a size whose calls would take longer than what is left of this is not measured, or not as
# often.
_SECONDS = 0.5
_CALLS = 4


def starting_curve(bundle: Bundle, session: Session, batching: Batching) -> LatencyCurve:
    """The bundle's `latency.json` if it is of this runtime, alone on this machine; else `measure_curve`.

    Several instances slow one another down, which a measurement of one session does not know. Either way a batch of the
    size that the batcher will aim at has been run.
    """
    known = bundle.latency()
    measured = known is not None and known.points and batching.instances == 1
    if known and measured and _same_setting(known.runtime, session.describe()):
        curve = LatencyCurve({point.batch_size: point.median_ms / 1e3 for point in known.points})
        full = curve.best_size(batching.max_batch, batching.preferred)
        session.infer(np.zeros((full, *image_shape(bundle)), dtype=np.uint8))
        return curve
    return measure_curve(session, image_shape(bundle), batching)


def measure_curve(
    session: Session, shape: Sequence[int], batching: Batching, seconds: float = _SECONDS
) -> LatencyCurve:
    """Time batches of 1, 2, 4, … images, every instance at once, for about `seconds`.

    The sizes are measured from the smallest up, so that a slow model is known by what it can do in the time. The first
    call of a size, which allocates, compiles or chooses algorithms, does not count.
    """
    images = np.zeros((batching.max_batch, *shape), dtype=np.uint8)
    points: dict[int, float] = {}
    left = seconds
    with ThreadPoolExecutor(batching.instances) as callers:
        for rows in _sizes(batching):
            expected = points[max(points)] * rows / max(points) if points else 0.0
            calls = _CALLS if not points else min(_CALLS, int(left / expected) - 1)
            if calls < 1:
                break
            jobs = [callers.submit(_times, session, images[:rows], calls) for _ in range(batching.instances)]
            points[rows] = statistics.median(taken for job in jobs for taken in job.result())
            left -= (1 + calls) * points[rows]
    return LatencyCurve(points)


def _times(session: Session, images: "np.ndarray[Any, np.dtype[np.uint8]]", calls: int) -> list[float]:
    """Seconds of so many calls after a first one."""
    stamps = []
    for _ in range(1 + calls):
        session.infer(images)
        stamps.append(time.perf_counter())
    return list(np.diff(stamps))


def _sizes(batching: Batching) -> list[int]:
    powers = {2**exponent for exponent in range(batching.max_batch.bit_length())}
    return sorted(size for size in {*powers, *batching.preferred, batching.max_batch} if size <= batching.max_batch)


def _same_setting(measured: dict[str, Any], running: dict[str, Any]) -> bool:
    return all(measured.get(key) == running.get(key) for key in ("runtime", "version", "provider", "threads"))
