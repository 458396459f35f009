"""Interleaved timing: round after round, every lane is measured for a short turn, and the machine's probes before it.

A machine that slows down slows all lanes alike, and a lane is compared with the probes of its own round.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from vitx.core.console import log, progress

TURN_SECONDS = 0.1
PERCENTILES = (50, 90, 95, 99)
WARM_UP_SECONDS = 0.1
WARM_UP_WINDOWS = 20
SETTLED = 0.03

Clock = Callable[[], float]


def fewest_times(percent: int) -> int:
    """How many times a percentile needs, 100 the 99th: of fewer none lies beyond, and it would be the largest."""
    return 100 // (100 - percent)


MIN_CALLS = fewest_times(95)


@dataclass
class Lane:
    """One thing to call again and again, and the seconds that each call took.

    energy: joules that the device has used so far, read before and after a turn.
    """

    title: str
    call: Callable[[], object]
    energy: Callable[[], float] | None = None
    clock: Clock = time.perf_counter
    times: list[float] = field(default_factory=list)
    turn_medians: list[float] = field(default_factory=list)
    joules: float = 0.0
    measured: float = 0.0

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    def percentile(self, share: float) -> float:
        """Seconds that `share` of the calls did not exceed, linear between neighbouring times."""
        return float(np.quantile(self.times, share))

    def share_done(self, seconds: float) -> float:
        """Of the seconds and the calls that it is to have, at most 1."""
        return min(1.0, self.measured / seconds, len(self.times) / MIN_CALLS)

    def warm_up(self) -> bool:
        """Call until the medians of two windows in a row agree; return False if they never did."""
        last = statistics.median(self._calls(WARM_UP_SECONDS))
        for _ in range(WARM_UP_WINDOWS):
            median = statistics.median(self._calls(WARM_UP_SECONDS))
            if abs(median - last) <= SETTLED * last:
                return True
            last = median
        return False

    def take_turn(self, seconds: float) -> None:
        # Not timed: the first call pays for the caches that the lane before it filled.
        self.call()
        before = self.energy() if self.energy else 0.0
        times = self._calls(seconds)
        self.joules += self.energy() - before if self.energy else 0.0
        self.times += times
        self.turn_medians.append(statistics.median(times))
        self.measured += sum(times)

    def _calls(self, seconds: float) -> list[float]:
        """Call for about `seconds`, at least once; return the time of each call in seconds."""
        call, clock = self.call, self.clock
        times = list[float]()
        now = clock()
        end = now + seconds
        while now < end or not times:  # of seconds too few for the clock one call is left
            call()
            before, now = now, clock()
            times.append(now - before)
        return times


@dataclass
class Probe:
    """A kernel of known work (FLOPs or bytes a call), timed for one turn before every round and after the last."""

    work: float
    lane: Lane

    @property
    def rates(self) -> list[float]:
        """Work a second in each turn."""
        return [self.work / seconds for seconds in self.lane.turn_medians]

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    def share(self, lane: Lane, work: float) -> float:
        """The lane's rate as a share of the probe's: median over the rounds.

        work: of one call of the lane. In each round its work a second is divided by the mean of the probe's rates
        before and after that round.
        """
        before, after = self.rates[:-1], self.rates[1:]
        return statistics.median(
            work / seconds / ((first + second) / 2)
            for seconds, first, second in zip(lane.turn_medians, before, after, strict=False)
        )


def warm_up(lanes: Sequence[Lane], *, quiet: bool) -> None:
    for lane in lanes:
        if not lane.warm_up():
            log(f"bench: {lane.title} did not settle in {WARM_UP_WINDOWS} windows; read it with care", quiet=quiet)


def take_turns(lanes: Sequence[Lane], seconds: float, probes: Sequence[Probe] = (), *, quiet: bool) -> None:
    """Measure the lanes in rounds of one turn each, until every lane has had `seconds` and `MIN_CALLS` calls."""
    turn = min(TURN_SECONDS, seconds)
    with progress("bench", 100 * len(lanes), quiet=quiet) as bar:
        while waiting := [lane for lane in lanes if lane.share_done(seconds) < 1]:
            for lane in (*(probe.lane for probe in probes), *waiting):
                lane.take_turn(turn)
                bar.update(round(100 * sum(lane.share_done(seconds) for lane in lanes)), lane.title)
    for probe in probes:
        probe.lane.take_turn(turn)


def percentiles_ms(count: int, percentile: Callable[[float], float]) -> dict[str, float | None]:
    """PERCENTILES of `count` times, as reports name them; None where the times are too few, or one is infinite.

    percentile: the seconds that a share of the times did not exceed.
    """
    known = {percent: percentile(percent / 100) for percent in PERCENTILES if count >= fewest_times(percent)}
    found = {percent: 1e3 * seconds for percent, seconds in known.items() if math.isfinite(seconds)}
    return {f"p{percent}_ms": found.get(percent) for percent in PERCENTILES}
