"""The bound on the flip rate from a witness set: against counting, and by simulation (docs/maths.md §6)."""

from fractions import Fraction
from math import comb

import numpy as np
import pytest

from vitx.parity.statistics import clopper_pearson_upper, stratified_upper


def most_events_by_counting(seen: int, sample: int, total: int, risk: float) -> int:
    """The largest K that leaves P(X ≤ seen) above `risk`, by exact fractions and one by one."""
    ways = comb(total, sample)
    found = seen
    for events in range(seen, total + 1):
        below = sum(comb(events, x) * comb(total - events, sample - x) for x in range(seen + 1) if x <= sample)
        if Fraction(below, ways) > risk:
            found = events
    return found


@pytest.mark.parametrize(
    "counts", [(0, 0, 3, 7), (0, 1, 3, 7), (2, 0, 5, 20), (1, 3, 10, 9), (0, 0, 0, 5), (4, 2, 4, 30), (0, 20, 3, 30)]
)
def test_the_bound_is_that_of_exact_counting(counts: tuple[int, int, int, int]) -> None:
    census_flips, sample_flips, census, sample = counts
    population = 40
    most = most_events_by_counting(sample_flips, sample, population - census, 0.04)
    expected = clopper_pearson_upper(census_flips + most, population, 0.99)
    sizes = {"census": census, "sample": sample, "population": population}
    assert stratified_upper(census_flips, sample_flips, **sizes) == pytest.approx(expected, abs=1e-9)
    with_known = clopper_pearson_upper(min(population, 3 + census_flips + most), population, 0.99)
    assert stratified_upper(census_flips, sample_flips, **sizes, known=3) == pytest.approx(with_known, abs=1e-9)


@pytest.mark.parametrize("flips", [(0, 0), (1, 0), (2, 3)])
def test_the_whole_split_has_the_bound_of_a_certificate(flips: tuple[int, int]) -> None:
    found = stratified_upper(*flips, census=90, sample=270, population=360)
    assert found == clopper_pearson_upper(sum(flips), 360)
    known = stratified_upper(*flips, census=90, sample=270, population=360, known=7)
    assert known == clopper_pearson_upper(7 + sum(flips), 360)
    assert stratified_upper(*flips, census=90, sample=270, population=360, known=360) == 1.0


def test_values() -> None:
    """100 images of 10,000, 25 of them chosen: none flipped proves 4.66 %, and three of the chosen cost .03 % more."""
    few = {"census": 25, "sample": 75, "population": 10_000}
    assert stratified_upper(0, 0, **few) == pytest.approx(0.0465849, abs=1e-6)
    assert stratified_upper(3, 0, **few) == pytest.approx(0.0469007, abs=1e-6)
    # Nothing drawn by chance: all but the ten may flip.
    assert stratified_upper(0, 0, census=10, sample=0, population=10_000) == clopper_pearson_upper(9990, 10_000, 0.99)


@pytest.mark.parametrize(
    "counts", [(3, 0, 2, 5, 10), (0, 6, 2, 5, 10), (0, 0, 6, 5, 10), (-1, 0, 2, 5, 10), (0, -1, 2, 5, 10)]
)
def test_impossible_counts_are_refused(counts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="impossible"):
        stratified_upper(counts[0], counts[1], census=counts[2], sample=counts[3], population=counts[4])


@pytest.mark.parametrize(("n", "rate"), [(60, 0.03), (100, 0.01), (100, 0.05), (200, 0.002), (300, 0.01), (300, 0.1)])
@pytest.mark.parametrize("steepness", [0.0, 5.0])
def test_the_bound_covers_the_rate(n: int, rate: float, steepness: float) -> None:
    """At least 95 times in 100, whether flips fall on images of small margin (steepness 5) or on any (0).

    Margins are exponential, an image flips with probability c·exp(−steepness·margin), c = (1 + steepness)·rate, so
    `rate` of all images flip. A quarter of the n are those of smallest margin, the others drawn by chance.
    """
    generator, population, trials = np.random.default_rng([n, int(1000 * rate), int(steepness)]), 1000, 400
    census, known, missed = n // 4, dict[tuple[int, int], float](), 0
    for _ in range(trials):
        margins = generator.exponential(size=population)
        flipped = generator.random(population) < (1 + steepness) * rate * np.exp(-steepness * margins)
        by_margin = np.argsort(margins)
        drawn = generator.permutation(by_margin[census:])[: n - census]
        flips = int(flipped[by_margin[:census]].sum()), int(flipped[drawn].sum())
        if flips not in known:
            known[flips] = stratified_upper(*flips, census=census, sample=n - census, population=population)
        missed += known[flips] < rate
    assert missed <= 0.05 * trials
