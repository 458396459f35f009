"""Corrects the size of a full batch: what the start measures is short, without HTTP, and often disturbed."""

from collections.abc import Generator, Sequence

_WINDOW_SECONDS, _WINDOW_BATCHES = 0.25, 8  # at least so long, and so many batches of each instance
_LEAD = 3  # votes that decide: if 70 % of the windows are right, so are 93 % of the decisions (Wald 1945, SPRT)
_GAIN, _LOSS = 1.03, 0.99  # of a larger size that is worth it, and of a smaller one: it answers sooner
_SHORTEST_PAUSE, _LONGEST_PAUSE = 4, 512  # windows

# Gives the rows of a full batch; takes the rows of one that ran, and when it was computed, in seconds.
Ended = Generator[int, tuple[int, float], float]


def size_search(sizes: Sequence[int], best: int, instances: int) -> Ended:
    """Hill climbing under load: the best size and a neighbour take turns, and each pair of windows votes."""
    sizes, step, pause = sorted({*sizes, best}), 1, _SHORTEST_PAUSE
    while True:
        left, lead = pause, 0
        while left:
            left -= bool((yield from _rate(best, instances)))
        place = sizes.index(best) + step
        while place in range(len(sizes)) and abs(lead) < _LEAD:
            if usual := (yield from _rate(best, instances)):
                tried = yield from _rate(sizes[place], instances)
                lead += 1 if tried >= usual * (_GAIN if step > 0 else _LOSS) else -1
        if lead == _LEAD:
            best, pause = sizes[place], _SHORTEST_PAUSE
        else:
            step, pause = -step, min(2 * pause, _LONGEST_PAUSE)


def _rate(size: int, instances: int) -> Ended:
    """Images a second in a window of batches of this size; 0 if one was another's, for want of requests."""
    count, since, now = -3 * instances, 0.0, 0.0  # the first ones, or what ran beside them, may be of the size before
    while count < _WINDOW_BATCHES * instances or now < since + _WINDOW_SECONDS:
        rows, now = yield size
        count += 1
        if count <= 0:
            since = now
        elif rows != size:
            return 0.0
    return count * size / (now - since)
