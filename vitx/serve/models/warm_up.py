"""The first latency curve of a model: from `vitx bench` if it measured this setting here, else a quick measurement."""

import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import Any

import numpy as np

from vitx.core.bundle import Bundle
from vitx.runtimes.session import Session, image_shape
from vitx.serve.batching.latency_curve import LatencyCurve
from vitx.serve.limits import Batching

_SECONDS = 0.5  # for the whole measurement; a size that no longer fits is not measured, or less often
_CALLS = 12  # of each size at most
_LONE_CALLS = 2  # of one image on all cores
_SETTING = ("runtime", "version", "provider", "threads")


def starting_curve(bundle: Bundle, session: Session, batching: Batching) -> LatencyCurve:
    """The curve in the bundle's `latency.json` if it holds for this setting, else a measured one.

    It holds for the same runtime and machine with one instance: several instances slow each other down. In both cases a
    batch of the size that the batcher will aim at has run.
    """
    known, running = bundle.latency(), session.describe()
    same = known is not None and all(known.runtime.get(key) == running.get(key) for key in _SETTING)
    if known and known.points and same and batching.instances == 1:
        curve = LatencyCurve({point.batch_size: point.median_ms / 1e3 for point in known.points})
        full = curve.best_size(batching.max_batch, batching.preferred)
        session.infer(np.zeros((full, *image_shape(bundle)), dtype=np.uint8))
        return curve
    return measure_curve(session, image_shape(bundle), batching)


def measure_curve(
    session: Session, shape: Sequence[int], batching: Batching, seconds: float = _SECONDS
) -> LatencyCurve:
    """Time batches of 1, 2, 4, … images alternately, on all instances at once, for about `seconds`.

    shape: of one image. The first pass goes from the smallest size up, so that of a slow model at least the small sizes
    are measured. The first call of each size allocates, compiles or chooses algorithms, and is not counted.
    """
    images, several = np.zeros((batching.max_batch, *shape), dtype=np.uint8), session.under_load
    taken: dict[int, list[float]] = {}
    end = time.perf_counter() + seconds
    with ThreadPoolExecutor(batching.instances) as callers:

        def measured(rows: int) -> list[float]:
            """Seconds of one batch on each instance."""
            return list(callers.map(_seconds_of, [several] * batching.instances, repeat(images[:rows])))

        powers = {2**exponent for exponent in range(batching.max_batch.bit_length())}
        preferred = {size for size in batching.preferred if size < batching.max_batch}
        for rows in sorted({*powers, *preferred, batching.max_batch}):
            if taken and time.perf_counter() + 2 * min(taken[max(taken)]) * rows / max(taken) > end:
                break
            measured(rows)
            taken[rows] = measured(rows)
        one_pass = sum(map(max, taken.values()))
        while time.perf_counter() + one_pass < end and len(taken[1]) < _CALLS * batching.instances:
            for rows in taken:
                taken[rows] += measured(rows)
    medians = {rows: statistics.median(times) for rows, times in taken.items()}
    if several is not session:  # one image is mostly alone, and planned so; sizes are chosen by the least times
        medians[1] = min(medians[1], *(_seconds_of(session, images[:1]) for _ in range(_LONE_CALLS)))
    return LatencyCurve(medians, {rows: min(times) for rows, times in taken.items()})


def _seconds_of(session: Session, images: "np.ndarray[Any, np.dtype[np.uint8]]") -> float:
    start = time.perf_counter()
    session.infer(images)
    return time.perf_counter() - start
