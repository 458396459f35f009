"""How long a batch takes, by its size. The batcher plans with it.

The curve starts with measured points (a bundle's `latency.json`, or the warm-up) and learns from the batches that run.
It is linear between its points, and proportional to the number of rows beyond the last one.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

# The weight of one live batch in the curve: after about twenty batches an outdated point is corrected.
_LEARNING_RATE = 0.05
# The points of other sizes move half as far: a machine that slows down slows every size.
_SHARED = 0.5
# A live batch counts as at most this many times the expected time: one that was descheduled says little.
_OUTLIER = 2.0
# The overhead of a batch under load: hand-over between threads, gathering the images, preemption, cold caches.
_HAND_OVER_SECONDS = 0.001
# A larger batch must be faster by this factor for each image: less is noise, and a smaller batch answers sooner.
_WORTH_GROWING = 1.03
# Where no batch stands by, an instance is idle after one for this long an image: replies, clients, their next requests.
_IDLE_SECONDS = 0.00015
# Of the requests in the server some are always on their way from a reply to the next request.
_ON_THEIR_WAY = 1.1
# `at_most` is the mean plus this many mean deviations, as in TCP's timeout (RFC 6298 takes 4).
_DEVIATIONS = 2.0


class LatencyCurve:
    """Seconds of a batch by its number of images; empty until something was measured.

    Live batches move the whole curve, but say little of its shape: only the size in use is measured. So `best_size`
    compares the `fastest` times of the first measurement, which timed the sizes alternately.
    """

    def __init__(
        self, seconds_by_rows: Mapping[int, float] | None = None, fastest: Mapping[int, float] | None = None
    ) -> None:
        """`seconds_by_rows`: the usual seconds of each size. `fastest`: the least seconds, default: the usual ones."""
        usual = dict(sorted((seconds_by_rows or {}).items()))
        self._measured = tuple(usual)
        self._fastest = [(fastest or usual)[rows] for rows in usual]
        self._rows, self._seconds = [*usual], [*usual.values()]
        self._deviation = 0.0  # mean of |measured / expected − 1|

    def seconds(self, rows: int) -> float:
        """Expected seconds of a batch of `rows` images; 0 before anything was measured."""
        return _between(self._rows, self._seconds, rows) if self._rows else 0.0

    def at_most(self, rows: int) -> float:
        """Seconds that a batch rarely exceeds: the mean plus twice the mean deviation."""
        return self.seconds(rows) * (1 + _DEVIATIONS * self._deviation)

    def fastest(self, rows: int) -> float:
        """The least seconds of a batch of `rows` images when the sizes were first measured; 0 without that."""
        return _between(self._measured, self._fastest, rows) if self._measured else 0.0

    def best_size(self, rows: int, preferred: Sequence[int] = ()) -> int:
        """The smallest size up to `rows` whose images a second are within 3 % of the best; 1 if it is 3 % better.

        preferred: choose among these sizes only, such as the optima of an engine's profiles. A size beyond the largest
        measured one is never chosen. Without a measurement: the largest preferred size, else `rows`.
        """
        if not self._measured:
            return max((size for size in preferred if size <= rows), default=rows)
        sizes = self.sizes(min(rows, self._measured[-1]), preferred)
        rates = {size: size / (self.fastest(size) + _HAND_OVER_SECONDS) for size in sizes}
        best = max((rate for size, rate in rates.items() if size > 1), default=0.0)
        # A batch of one loses more under load than its timing says, and a lone request runs alone with any size.
        least = {size: best * _WORTH_GROWING if size == 1 else best / _WORTH_GROWING for size in rates}
        return min((size for size, rate in rates.items() if rate >= least[size]), default=rows)

    def size_to_stand_by(self, rows: int, instances: int, best: int, preferred: Sequence[int] = ()) -> int:
        """The largest size up to `best` of which `rows` images make a batch for each instance and one that stands by.

        `best` where there is none, or where it would be too slow: then a batch for each instance is all there is, and
        an instance is idle from the end of its batch until the next requests are there.
        """
        fitting = [size for size in self.sizes(best, preferred) if size * (instances + 1) <= _ON_THEIR_WAY * rows]
        if not fitting:
            return best
        size = max(fitting)
        both = size, min(best, max(size, rows // instances))
        stands_by, idle = (self.fastest(rows) / rows for rows in both)
        return size if stands_by <= _WORTH_GROWING * idle + _IDLE_SECONDS else best

    def sizes(self, largest: int, preferred: Sequence[int]) -> Sequence[int]:
        """The preferred sizes, or those that were measured."""
        return [size for size in preferred if size <= largest] or [size for size in self._measured if size <= largest]

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from a batch that ran live."""
        if not self._rows:
            self._rows, self._seconds = [rows], [seconds]
            return
        ratio = min(seconds / self.seconds(rows), _OUTLIER) - 1
        self._deviation += _LEARNING_RATE * (abs(ratio) - self._deviation)
        near = _shares(self._rows, rows)
        for index in range(len(self._rows)):
            self._seconds[index] *= 1 + _LEARNING_RATE * ratio * max(_SHARED, near.get(index, 0.0))


def _between(points: Sequence[int], seconds: Sequence[float], rows: int) -> float:
    return sum(share * seconds[index] for index, share in _shares(points, rows).items()) * max(1.0, rows / points[-1])


def _shares(points: Sequence[int], rows: int) -> dict[int, float]:
    """How near the points around `rows` are; below the smallest measured size nothing is known to be faster."""
    right = min(bisect_left(points, rows), len(points) - 1)
    if right == 0 or rows >= points[right]:
        return {right: 1.0}
    share = (rows - points[right - 1]) / (points[right] - points[right - 1])
    return {right - 1: 1 - share, right: share}
