"""Offline, server and single stream: the scenarios of MLPerf Inference for a bundle on this machine.

They measure what MLPerf's do, but not by its rules: no LoadGen, not its minimum of queries, no audit.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, get_args

from vitx.bench.open_loop import MOST_ARRIVALS, OpenLoopRun, ask, poisson_arrivals, run_open_loop
from vitx.bench.timing import Lane, percentiles_ms
from vitx.core.errors import CheckFailed, InputError, unknown_name
from vitx.core.files import Record
from vitx.core.preprocess import UInt8Array
from vitx.serve.batching.batcher import Batcher
from vitx.serve.batching.latency_curve import LatencyCurve
from vitx.serve.batching.request_queue import Infer
from vitx.serve.limits import Batching

Scenario = Literal["offline", "server", "single-stream"]
SCENARIOS: tuple[Scenario, ...] = get_args(Scenario)
# The bisection ends when the rates that pass and fail are this near to each other.
RATE_TOLERANCE = 0.02
# Of so many expected arrivals there are 101, at any rate and the same at every call: enough for a 99th percentile.
LEAST_ARRIVALS = 120


class ScenarioResult(Record):
    """A scenario's result. `value`, in `unit`, is the figure that MLPerf reports for it."""

    scenario: Scenario
    value: float
    unit: Literal["images/s", "ms"]
    images: int
    p50_ms: float | None = None
    p90_ms: float | None = None
    p95_ms: float | None = None
    p99_ms: float | None = None
    p99_bound_ms: float | None = None


@dataclass(frozen=True)
class ScenarioSettings:
    """p99: the bound of the server scenario, in seconds. seconds: how long each measurement takes.

    curve, under_load: see `Batcher`.
    """

    batching: Batching
    seconds: float
    p99: float
    curve: LatencyCurve | None = None
    under_load: Infer | None = None


def run_scenario(scenario: Scenario, infer: Infer, images: UInt8Array, settings: ScenarioSettings) -> ScenarioResult:
    """Measure one scenario. images: uint8 (M, S, S, 3), used one after another and again from the first.

    Raises CheckFailed when the model fails on an image, and when not even the slowest offered rate keeps the bound of
    the server scenario.
    """
    measure = {"offline": offline, "server": server, "single-stream": single_stream}[scenario]
    return measure(infer, images, settings)


def parse_scenarios(text: str) -> tuple[Scenario, ...]:
    """'offline,server' → the scenarios, in the order of SCENARIOS; raise InputError for an unknown name."""
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if name not in SCENARIOS:
            raise unknown_name("scenario", name, SCENARIOS)
    return tuple(name for name in SCENARIOS if name in names)


def offline(infer: Infer, images: UInt8Array, settings: ScenarioSettings) -> ScenarioResult:
    """All images are there at once: images per second, through the batcher.

    Raises InputError for a time in which more than `MOST_ARRIVALS` queries would be made, before they are.
    """
    size = len(images)
    pilot = asyncio.run(_all_at_once(infer, images, size, settings))
    queries = settings.seconds / pilot
    if queries > MOST_ARRIVALS:
        raise InputError(
            f"offline for {settings.seconds:g} s: expected at most {MOST_ARRIVALS:,} queries of {size} images, give a "
            "shorter time"
        )
    count = max(size, round(size * queries))
    elapsed = asyncio.run(_all_at_once(infer, images, count, settings))
    return ScenarioResult(scenario="offline", value=count / elapsed, unit="images/s", images=count)


async def _all_at_once(infer: Infer, images: UInt8Array, count: int, settings: ScenarioSettings) -> float:
    """Seconds until `count` images, queued together, are answered."""
    batching = replace(settings.batching, queue=count)
    batcher = Batcher(infer, batching, curve=settings.curve, under_load=settings.under_load)
    start = time.monotonic()
    whole, rest = divmod(count, len(images))
    queries = [images] * whole + ([images[:rest]] if rest else [])
    try:
        await asyncio.gather(*(ask(batcher, query) for query in queries))
        return time.monotonic() - start
    finally:
        await batcher.close()


def single_stream(infer: Infer, images: UInt8Array, settings: ScenarioSettings) -> ScenarioResult:
    """One caller, one image, the next when the last is back, at least `MIN_CALLS` times: its 90th percentile."""
    lane = Lane("single stream", lambda: infer(images[:1]))
    lane.warm_up()
    while lane.share_done(settings.seconds) < 1:
        lane.take_turn(settings.seconds)
    count = len(lane.times)
    return ScenarioResult(
        scenario="single-stream",
        value=1e3 * lane.percentile(0.9),
        unit="ms",
        images=count,
        **percentiles_ms(count, lane.percentile),
    )


def server(infer: Infer, images: UInt8Array, settings: ScenarioSettings) -> ScenarioResult:
    """The largest Poisson rate whose 99th percentile keeps the bound, by bisection below the offline rate."""
    tried: dict[float, OpenLoopRun] = {}

    def keeps_bound(rate: float) -> bool:
        tried[rate] = run_at_rate(infer, images, rate, settings)
        return tried[rate].percentile(0.99) <= settings.p99

    highest = offline(infer, images, settings).value
    if highest * settings.seconds > MOST_ARRIVALS:
        raise InputError(
            f"server for {settings.seconds:g} s at up to {highest:,.0f} images/s: expected at most {MOST_ARRIVALS:,} "
            "arrivals, give a shorter time"
        )
    lowest = LEAST_ARRIVALS / settings.seconds
    if lowest > highest:
        raise InputError(
            f"server for {settings.seconds:g} s at up to {highest:.3g} images/s: expected at least {LEAST_ARRIVALS} "
            "arrivals for a 99th percentile, give a longer time"
        )
    rate = largest_passing(keeps_bound, lowest, highest)
    if rate is None:
        found = tried[lowest].percentile(0.99)
        raise CheckFailed(
            f"server scenario: p99 is {1e3 * found:.3g} ms at {lowest:.3g} images/s, the lowest rate that was offered, "
            f"and {1e3 * settings.p99:g} ms were asked for: give a larger --p99"
        )
    return ScenarioResult(
        scenario="server",
        value=rate,
        unit="images/s",
        images=len(tried[rate].latencies),
        **tried[rate].percentiles_ms(),
        p99_bound_ms=1e3 * settings.p99,
    )


def run_at_rate(infer: Infer, images: UInt8Array, rate: float, settings: ScenarioSettings) -> OpenLoopRun:
    """One open-loop run at `rate` images a second."""
    arrivals = poisson_arrivals(rate, settings.seconds).tolist()
    return run_open_loop(
        infer, images, arrivals, settings.batching, curve=settings.curve, under_load=settings.under_load
    )


def largest_passing(passes: Callable[[float], bool], low: float, high: float) -> float | None:
    """The largest rate in [low, high] that passes, to RATE_TOLERANCE of it; None if `low` fails.

    `passes` is taken to be true up to some rate and false above. The rate returned did pass.
    """
    if not passes(low):
        return None
    if passes(high):
        return high
    while high - low > RATE_TOLERANCE * high:
        middle = (low + high) / 2
        if passes(middle):
            low = middle
        else:
            high = middle
    return low
