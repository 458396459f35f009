"""How long a batch takes, by its size: what the batcher plans with.

The curve begins with measured points (a bundle's `latency.json`, or the warm-up) and follows what is measured live. It
is linear between its points, and proportional to the rows beyond them.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

# The weight of one live batch in the curve: some twenty batches forget a stale point.
_LEARNING_RATE = 0.05
# Points that a batch says nothing of directly move half as far: a machine that slows down slows every size.
_SHARED = 0.5
# A live batch counts for at most this much more than was expected: one that was descheduled teaches little.
_OUTLIER = 2.0
# What a batch costs beside its computation: hand-over between threads, gathering, the wake-up of the event loop.
_HAND_OVER_SECONDS = 0.0002
# A larger batch must be this much faster an image: below it lies noise, and a smaller one answers sooner.
_WORTH_GROWING = 1.03
# The planner allows for this many mean deviations above the mean, as TCP does for its timeout (RFC 6298 takes 4).
_DEVIATIONS = 2.0


class LatencyCurve:
    """Seconds of a batch by its number of images; empty until something was measured.

    What is measured live moves the whole curve, and tells little of its shape: the size that is in use is measured
    beside everything else that the server does, the others not at all. So sizes are compared as they were `fastest`
    when they were measured in turns.
    """

    def __init__(
        self, seconds_by_rows: Mapping[int, float] | None = None, fastest: Mapping[int, float] | None = None
    ) -> None:
        """`fastest`, of the same sizes: the least seconds instead of the usual ones."""
        points = sorted((seconds_by_rows or {}).items())
        self._measured = tuple(rows for rows, _ in points)
        self._fastest = [(fastest or dict(points))[rows] for rows in self._measured]
        self._rows = list(self._measured)
        self._seconds = [seconds for _, seconds in points]
        self._deviation = 0.0  # mean of |measured / expected − 1|

    def __bool__(self) -> bool:
        return bool(self._rows)

    def seconds(self, rows: int) -> float:
        """What a batch of `rows` images takes on average; 0 while nothing is known."""
        return _between(self._rows, self._seconds, rows) if self._rows else 0.0

    def at_most(self, rows: int) -> float:
        """What such a batch hardly ever exceeds: its mean and twice the mean deviation."""
        return self.seconds(rows) * (1 + _DEVIATIONS * self._deviation)

    def best_size(self, rows: int, preferred: Sequence[int] = ()) -> int:
        """The smallest size up to `rows` that has nearly the most images a second of all that were measured.

        preferred: the only sizes to choose from, such as the optima of an engine's profiles. A size beyond the largest
        measured one is never chosen. Without a measurement: the largest preferred size, else `rows`.
        """
        if not self._measured:
            return max((size for size in preferred if size <= rows), default=rows)
        largest = min(rows, self._measured[-1])
        sizes = [size for size in preferred if size <= largest] or [size for size in self._measured if size <= largest]
        rates = {size: size / (_between(self._measured, self._fastest, size) + _HAND_OVER_SECONDS) for size in sizes}
        fast_enough = max(rates.values(), default=0.0) / _WORTH_GROWING
        return min((size for size, rate in rates.items() if rate >= fast_enough), default=rows)

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from a batch that ran live."""
        if not self._rows:
            self._rows, self._seconds = [rows], [seconds]
            return
        ratio = min(seconds / self.seconds(rows), _OUTLIER) - 1
        self._deviation += _LEARNING_RATE * (abs(ratio) - self._deviation)
        right = bisect_left(self._rows, rows)
        for index in range(len(self._rows)):
            self._seconds[index] *= 1 + _LEARNING_RATE * ratio * max(_SHARED, self._nearness(index, right, rows))

    def _nearness(self, index: int, right: int, rows: int) -> float:
        """1 for the point at `rows`, between its neighbours their share of it, 0 for the others."""
        last = len(self._rows) - 1
        if right > last or right == 0:
            return float(index == min(right, last))
        share = _share(self._rows, right, rows)
        return share if index == right else 1 - share if index == right - 1 else 0.0


def _between(points: Sequence[int], seconds: Sequence[float], rows: int) -> float:
    right = bisect_left(points, rows)
    if right == len(points):
        return seconds[-1] * rows / points[-1]
    if right == 0 or points[right] == rows:
        return seconds[right]  # a smaller batch than the smallest measured is not known to be faster
    share = _share(points, right, rows)
    return seconds[right - 1] * (1 - share) + seconds[right] * share


def _share(points: Sequence[int], right: int, rows: int) -> float:
    """Where `rows` lies between the points right − 1 (0) and right (1)."""
    left = points[right - 1]
    return (rows - left) / (points[right] - left)
