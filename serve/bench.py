"""Closed-loop latency: one caller, the next batch when the last one is back. See docs/benchmarks.md.

Several sessions and batch sizes are measured in turns, so that a machine that slows down slows all of them alike.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from vitx.core.bundle import LATENCY, Bundle, Latency, LatencyPoint, timestamp
from vitx.core.console import log, progress
from vitx.core.errors import InputError
from vitx.core.files import write_json
from vitx.core.machine import describe_machine
from vitx.core.preprocess import UInt8Array
from vitx.serve.runtimes import Session

BATCH_SIZES = (1, 8, 32)
SECONDS = 2.0
# One turn of one session at one batch size.
TURN_SECONDS = 0.1
# Below this many calls a 95th percentile is the largest value under another name.
MIN_CALLS = 20
WARM_UP_SECONDS = 0.1
WARM_UP_WINDOWS = 20
SETTLED = 0.03


def bench(
    session: Session,
    image_shape: Sequence[int],
    *,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    seconds: float = SECONDS,
    quiet: bool = True,
) -> tuple[LatencyPoint, ...]:
    """Measure a session on images uint8 `image_shape` (S, S, 3), for `seconds` at each batch size.

    The images are random: the time of a matrix product does not depend on what it multiplies. Times include the copy of
    uint8 images into the runtime and of float32 logits out of it; decoding is not in them.
    """
    points = bench_together({"": session}, image_shape, batch_sizes=batch_sizes, seconds=seconds, quiet=quiet)
    return points[""]


def bench_together(
    sessions: Mapping[str, Session],
    image_shape: Sequence[int],
    *,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    seconds: float = SECONDS,
    quiet: bool = True,
) -> dict[str, tuple[LatencyPoint, ...]]:
    """Measure several sessions in one run, in turns; the points by session name."""
    sizes = tuple(sorted(set(batch_sizes)))
    if not sizes or sizes[0] < 1:
        raise InputError(f"batch sizes {tuple(batch_sizes)}: expected one or more, each at least 1")
    if not seconds > 0:
        raise InputError(f"seconds {seconds:g}: expected more than 0")
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (sizes[-1], *image_shape), dtype=np.uint8)
    lanes = [_Lane(name, session, images[:size]) for name, session in sessions.items() for size in sizes]
    for lane in lanes:
        if not lane.warm_up():
            log(f"bench: {lane.title} did not settle in {WARM_UP_WINDOWS} windows; read it with care", quiet=quiet)
    _take_turns(lanes, seconds, quiet=quiet)
    return {name: tuple(lane.point() for lane in lanes if lane.name == name) for name in sessions}


def bench_bundle(
    bundle: Bundle,
    session: Session,
    others: Mapping[str, Session] | None = None,
    *,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    seconds: float = SECONDS,
    quiet: bool = False,
) -> tuple[Latency, dict[str, Latency]]:
    """Measure a bundle's session, beside `others` in the same run, and write `latency.json` into the bundle.

    Returns the bundle's latency and that of each of the others. The file holds the bundle's own.
    """
    own = "the bundle"
    shape = tuple(int(extent) for extent in bundle.manifest.input.shape[1:])
    sessions = {own: session, **(others or {})}
    points = bench_together(sessions, shape, batch_sizes=batch_sizes, seconds=seconds, quiet=quiet)
    machine, now = describe_machine(), timestamp()
    latencies = {
        name: Latency(runtime=sessions[name].describe(), machine=machine, points=points[name], created=now)
        for name in sessions
    }
    write_json(bundle.path / LATENCY, latencies[own])
    return latencies.pop(own), latencies


def parse_batch_sizes(text: str) -> tuple[int, ...]:
    """'1,8,32' → (1, 8, 32); raise InputError for anything but positive whole numbers."""
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise InputError(f"batch sizes '{text}': expected positive whole numbers with commas between, such as 1,8,32")
    return sizes


def _take_turns(lanes: Sequence["_Lane"], seconds: float, *, quiet: bool) -> None:
    """Give every lane turn after turn until each has been measured for `seconds` and `MIN_CALLS` calls."""
    with progress("bench", round(100 * seconds * len(lanes)), quiet=quiet) as bar:
        while waiting := [lane for lane in lanes if not lane.done(seconds)]:
            for lane in waiting:
                lane.take_turn(min(TURN_SECONDS, seconds))
                measured = sum(min(seconds, lane.measured) for lane in lanes)
                bar.update(round(100 * measured), lane.title)


@dataclass
class _Lane:
    """One session at one batch size, with the seconds each of its calls took."""

    name: str
    session: Session
    images: UInt8Array
    times: list[float] = field(default_factory=list)
    measured: float = 0.0

    @property
    def title(self) -> str:
        return f"{self.name} batch {len(self.images)}".strip()

    def done(self, seconds: float) -> bool:
        return self.measured >= seconds and len(self.times) >= MIN_CALLS

    def warm_up(self) -> bool:
        """Run until the medians of two windows in a row agree; return whether they did."""
        last = statistics.median(self._calls(WARM_UP_SECONDS))
        for _ in range(WARM_UP_WINDOWS):
            median = statistics.median(self._calls(WARM_UP_SECONDS))
            if abs(median - last) <= SETTLED * last:
                return True
            last = median
        return False

    def take_turn(self, seconds: float) -> None:
        # The first call pays for the caches that the lane before it filled.
        self.session.infer(self.images)
        times = self._calls(seconds)
        self.times += times
        self.measured += sum(times)

    def _calls(self, seconds: float) -> list[float]:
        """Call for about `seconds`, once at least; return the time of each call in seconds."""
        times = []
        now = time.perf_counter()
        end = now + seconds
        while now < end:
            self.session.infer(self.images)
            before, now = now, time.perf_counter()
            times.append(now - before)
        return times

    def point(self) -> LatencyPoint:
        median = statistics.median(self.times)
        return LatencyPoint(
            batch_size=len(self.images),
            median_ms=1e3 * median,
            p95_ms=1e3 * float(np.quantile(self.times, 0.95)),
            images_per_second=len(self.images) / median,
        )
