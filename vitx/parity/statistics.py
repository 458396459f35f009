"""The statistics of a certificate (docs/maths.md §6), in numpy alone: a machine that serves has no scipy."""

import math
import sys

import numpy as np

CONFIDENCE = 0.95


def clopper_pearson_upper(k: int, n: int, confidence: float = CONFIDENCE) -> float:
    """One-sided upper bound on a rate of which k events were seen in n trials.

    It is the p with P(X ≤ k | n, p) = 1 − confidence (Clopper & Pearson 1934), the same number as `beta.ppf(confidence,
    k + 1, n − k)`, accurate to 1e-10 for n up to 1e6. Raises ValueError unless 0 ≤ k ≤ n, n ≥ 1 and ½ ≤ confidence < 1.
    """
    if not 0 <= k <= n or n < 1:
        raise ValueError(f"k={k}, n={n}: expected 0 ≤ k ≤ n and n ≥ 1")
    if not 0.5 <= confidence < 1:
        raise ValueError(f"confidence={confidence}: expected 0.5 ≤ confidence < 1")
    if k == n:
        return 1.0
    target = math.log1p(-confidence)
    if k == 0:
        return -math.expm1(target / n)
    # The tail falls as p grows: bisect until no float64 lies between.
    low, high = k / n, 1.0
    while True:
        middle = (low + high) / 2
        if not low < middle < high:
            return high
        if _log_lower_tail(k, n, middle) > target:
            low = middle
        else:
            high = middle


def images_needed(max_flip_rate: float) -> int:
    """The smallest n for which no flip at all proves a flip rate of at most `max_flip_rate`."""
    if not 0 < max_flip_rate < 1:
        raise ValueError(f"max_flip_rate={max_flip_rate}: expected 0 < max_flip_rate < 1")
    images = math.log1p(-CONFIDENCE) / math.log1p(-max_flip_rate)
    needed = max(1, math.ceil(min(images, sys.float_info.max)))  # of a rate of 1e-310 it is infinite
    return needed if clopper_pearson_upper(0, needed) <= max_flip_rate else needed + 1


def flips_allowed(n: int, max_flip_rate: float) -> int:
    """The largest k for which k flips among n images still prove a flip rate of at most `max_flip_rate`.

    Raises ValueError when not even k = 0 does: `images_needed` says how many images it takes.
    """
    if n < images_needed(max_flip_rate):
        raise ValueError(f"n={n}: no count of flips proves a rate of at most {max_flip_rate}")
    allowed, refused = 0, n
    while refused - allowed > 1:
        middle = (allowed + refused) // 2
        within = clopper_pearson_upper(middle, n) <= max_flip_rate
        allowed, refused = (middle, refused) if within else (allowed, middle)
    return allowed


def mcnemar_exact(b: int, c: int) -> float:
    """Two-sided p of McNemar's exact test: only the reference is right on b images, only the candidate on c.

    It is min(1, 2·P(X ≤ min(b, c))), X binomial of b + c trials at ½.
    """
    if b < 0 or c < 0:
        raise ValueError(f"b={b}, c={c}: expected counts")
    if b == c:
        return 1.0
    return min(1.0, 2 * math.exp(_log_lower_tail(min(b, c), b + c, 0.5)))


def _log_lower_tail(k: int, n: int, p: float) -> float:
    """log P(X ≤ k) of a binomial with k ≤ np: log P(X = k), and the sum of the smaller terms relative to it."""
    log_term = _log_choose(n, k) + k * math.log(p) + (n - k) * math.log1p(-p)
    # The term at k − m is at most exp(−m²/2np(1−p)) times that at k: past m = 10√n it no longer changes a float64 sum.
    below = np.arange(k, max(0, k - 10 * math.isqrt(n) - 100), -1, dtype=np.float64)
    ratios = below / (n - below + 1) * ((1 - p) / p)
    return log_term + math.log1p(float(np.cumprod(ratios).sum()))


def stratified_upper(
    census_flips: int, sample_flips: int, *, census: int, sample: int, population: int, known: int = 0
) -> float:
    """One-sided upper bound on the flip rate of a source of images, from a part of a split that was drawn from it.

    Of the split's `population` images `census` were looked at because they were the likeliest to flip, and `sample` of
    the others by chance, without replacement. The census counts as what it is, so many images of the split; the sample
    speaks for all others. A fifth of the risk of error goes to the split being a sample itself, the rest to the choice
    within it, and by the union bound the whole errs at most as often as `1 − CONFIDENCE`, the risk:

        K = the most flips among the others that `sample_flips` allows (hypergeometric), confidence 1 − 0.8·risk
        bound = Clopper–Pearson of census_flips + K among population, confidence 1 − 0.2·risk

    Where the sample is all the others, K is known, and the bound is `clopper_pearson_upper`. It holds however images
    were ranked. known: flips of the split that are known beforehand and that neither count contains; they add to both.
    Raises ValueError for impossible counts.
    """
    others = population - census
    if not (0 <= census_flips <= census and 0 <= sample_flips <= sample <= others and population >= 1):
        raise ValueError(
            f"{census_flips} of {census} and {sample_flips} of {sample} flips, population {population}: impossible"
        )
    if sample == others:
        return clopper_pearson_upper(min(population, known + census_flips + sample_flips), population)
    risk = 1 - CONFIDENCE
    most = _most_events(sample_flips, sample, others, 0.8 * risk)
    return clopper_pearson_upper(min(population, known + census_flips + most), population, 1 - 0.2 * risk)


def rounded_up(rate: float) -> float:
    """A rate to three places, not below it: what can be asked for where this is the bound."""
    return math.ceil(rate * 1000) / 1000


def _most_events(seen: int, sample: int, total: int, risk: float) -> int:
    """The largest K with P(X ≤ seen) > risk, X the events in a `sample` from `total` of which K are events."""
    if sample == 0:
        return total
    low, high = seen, total - (sample - seen)  # it falls as K grows, and is 1 at K = seen
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _hypergeometric_tail(seen, sample, middle, total) > risk else (low, middle - 1)
    return low


def _hypergeometric_tail(seen: int, sample: int, events: int, total: int) -> float:
    """P(X ≤ seen): `sample` drawn without replacement from `total` of which `events` are events."""
    terms = [
        _log_choose(events, x) + _log_choose(total - events, sample - x) - _log_choose(total, sample)
        for x in range(max(0, sample - (total - events)), min(seen, events) + 1)
    ]
    return math.fsum(math.exp(term) for term in terms)


def _log_choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
