"""Open loop: requests arrive by a schedule that does not wait for answers, through the server's own batcher.

A latency counts from the scheduled arrival, not from the moment the generator got round to it: a server that stalls
delays the requests behind the stall, and those delays are in the numbers (coordinated omission avoided).
"""

import asyncio
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from vitx.bench.timing import fewest_times, percentiles_ms
from vitx.core.errors import CheckFailed, InputError
from vitx.core.preprocess import UInt8Array
from vitx.serve.batching.batcher import Batcher
from vitx.serve.batching.latency_curve import LatencyCurve
from vitx.serve.batching.request_queue import Infer
from vitx.serve.errors import QueueFull, RequestError
from vitx.serve.limits import Batching

# The first arrival is due this long after the start, so that the generator's thread runs by then.
_LEAD_SECONDS = 0.05
MOST_ARRIVALS = 1_000_000  # half a minute of the generator's work, if it need not wait


@dataclass(frozen=True)
class OpenLoopRun:
    """One open-loop run. Times in seconds.

    latencies: of the answered requests, from scheduled arrival to answer. refused: requests that found the queue full.
    late: 99th percentile of how long after its schedule a request entered the queue, None of too few; it is part of the
    latency, and shows when the generator, not the model, is the limit.
    """

    latencies: tuple[float, ...]
    refused: int
    late: float | None
    elapsed: float

    def percentile(self, share: float) -> float:
        """The latency that `share` of all requests did not exceed; a refused request counts as infinitely late."""
        times = sorted([*self.latencies, *[math.inf] * self.refused])
        return times[math.ceil(share * len(times)) - 1]

    def percentiles_ms(self) -> dict[str, float | None]:
        """See `vitx.bench.timing.percentiles_ms`."""
        return percentiles_ms(len(self.latencies) + self.refused, self.percentile)

    @property
    def images_per_second(self) -> float:
        return len(self.latencies) / self.elapsed


def check_arrivals(rate: float, seconds: float) -> float:
    """Return `rate` × `seconds`; raise InputError when it is below one arrival or above `MOST_ARRIVALS`."""
    expected = rate * seconds
    if not expected >= 1:
        raise InputError(f"rate {rate:g} a second for {seconds:g} s: expected at least one arrival, give a longer time")
    if expected > MOST_ARRIVALS:
        raise InputError(
            f"rate {rate:g} a second for {seconds:g} s: expected at most {MOST_ARRIVALS:,} arrivals, give a lower rate "
            "or a shorter time"
        )
    return expected


def poisson_arrivals(rate: float, seconds: float) -> npt.NDArray[np.float64]:
    """Seconds at which requests arrive: gaps are exponential with mean 1/rate; sorted, all below `seconds`.

    The same at every call. Raises what `check_arrivals` raises.
    """
    expected = check_arrivals(rate, seconds)
    gaps = np.random.default_rng(0).exponential(1 / rate, int(expected + 10 * expected**0.5 + 10))
    arrivals: npt.NDArray[np.float64] = np.cumsum(gaps)
    return arrivals[arrivals < seconds]


def run_open_loop(
    infer: Infer,
    images: UInt8Array,
    arrivals: Sequence[float],
    batching: Batching,
    *,
    curve: LatencyCurve | None = None,
    under_load: Infer | None = None,
) -> OpenLoopRun:
    """Send one image at each of `arrivals` (seconds from the start) through a batcher; wait for all answers.

    images: uint8 (M, S, S, 3), taken in turn. curve, under_load: see `Batcher`. Raises CheckFailed when the model fails
    on one.
    """
    make = partial(Batcher, infer, batching, curve=curve, under_load=under_load)
    return asyncio.run(_OpenLoop(images, arrivals).run(make))


async def ask(batcher: Batcher, images: UInt8Array) -> None:
    """Wait until images are answered. Raises QueueFull, and CheckFailed when the model fails on them."""
    try:
        await batcher.submit(images)
    except QueueFull:
        raise
    except RequestError as error:
        raise CheckFailed(str(error)) from None


class _OpenLoop:
    """The state of one run; everything but the generator's waiting happens on the event loop."""

    def __init__(self, images: UInt8Array, arrivals: Sequence[float]) -> None:
        self._images, self._arrivals = images, arrivals
        self._latencies: list[float] = []
        self._lateness: list[float] = []
        self._refused = 0
        self._requests: set[asyncio.Task[None]] = set()
        self._sent = asyncio.Event()  # all of them, or one has failed

    async def run(self, make_batcher: Callable[[], Batcher]) -> OpenLoopRun:
        batcher = make_batcher()
        loop, stopped = asyncio.get_running_loop(), threading.Event()
        start = time.monotonic() + _LEAD_SECONDS

        def generate() -> None:
            # A thread of its own: the event loop's timers are as coarse as a millisecond.
            for index, arrival in enumerate(self._arrivals):
                if stopped.wait(start + arrival - time.monotonic()):
                    return
                loop.call_soon_threadsafe(self._send, batcher, index, start + arrival)
            loop.call_soon_threadsafe(self._sent.set)

        generator = threading.Thread(target=generate, name="arrivals", daemon=True)
        generator.start()
        try:
            await self._sent.wait()
            await asyncio.gather(*self._requests)
            elapsed = time.monotonic() - start
        finally:
            stopped.set()
            generator.join()
            await batcher.close()
            await asyncio.gather(*self._requests, return_exceptions=True)  # the closed batcher refuses what is left
        late = float(np.quantile(self._lateness, 0.99)) if len(self._lateness) >= fewest_times(99) else None
        return OpenLoopRun(tuple(self._latencies), self._refused, late, elapsed)

    def _send(self, batcher: Batcher, index: int, due: float) -> None:
        self._lateness.append(time.monotonic() - due)
        request = asyncio.create_task(self._request(batcher, index, due))
        self._requests.add(request)
        request.add_done_callback(self._done)

    def _done(self, request: asyncio.Task[None]) -> None:
        """Forget a request that was answered or refused; one that failed stays, and ends the run."""
        if not request.cancelled() and request.exception() is None:
            self._requests.discard(request)
        else:
            self._sent.set()

    async def _request(self, batcher: Batcher, index: int, due: float) -> None:
        row = index % len(self._images)
        try:
            await ask(batcher, self._images[row : row + 1])
        except QueueFull:
            self._refused += 1
        else:
            self._latencies.append(time.monotonic() - due)
