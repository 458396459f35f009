"""The latency curve a model starts with: what `vitx bench` measured of this setting here, or a quick measurement."""

import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from vitx.core.bundle import Bundle
from vitx.runtimes.session import Session, image_shape
from vitx.serve.batching.latency_curve import LatencyCurve
from vitx.serve.limits import Batching

# A start must stay short: a size whose calls would take longer than what is left of this is not measured, or not as
# often.
_SECONDS = 0.5
_CALLS = 12


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
    """Time batches of 1, 2, 4, … images in turns, every instance at once, for about `seconds`.

    The first pass goes from the smallest size up, so that a slow model is known by what it can do in the time. The
    first call of a size, which allocates, compiles or chooses algorithms, does not count.
    """
    images = np.zeros((batching.max_batch, *shape), dtype=np.uint8)
    taken: dict[int, list[float]] = {}
    end = time.perf_counter() + seconds
    with ThreadPoolExecutor(batching.instances) as callers:

        def measured(rows: int) -> list[float]:
            jobs = [callers.submit(_seconds_of, session, images[:rows]) for _ in range(batching.instances)]
            return [job.result() for job in jobs]

        for rows in _sizes(batching):
            if taken and time.perf_counter() + 2 * min(taken[max(taken)]) * rows / max(taken) > end:
                break
            measured(rows)
            taken[rows] = measured(rows)
        one_pass = sum(map(max, taken.values()))
        while time.perf_counter() + one_pass < end and len(taken[1]) < _CALLS * batching.instances:
            for rows in taken:
                taken[rows] += measured(rows)
    medians = {rows: statistics.median(times) for rows, times in taken.items()}
    return LatencyCurve(medians, {rows: min(times) for rows, times in taken.items()})


def _seconds_of(session: Session, images: "np.ndarray[Any, np.dtype[np.uint8]]") -> float:
    start = time.perf_counter()
    session.infer(images)
    return time.perf_counter() - start


def _sizes(batching: Batching) -> list[int]:
    powers = {2**exponent for exponent in range(batching.max_batch.bit_length())}
    return sorted(size for size in {*powers, *batching.preferred, batching.max_batch} if size <= batching.max_batch)


def _same_setting(measured: dict[str, Any], running: dict[str, Any]) -> bool:
    return all(measured.get(key) == running.get(key) for key in ("runtime", "version", "provider", "threads"))
