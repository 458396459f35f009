import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from vitx.parity.statistics import clopper_pearson_upper, flips_allowed, images_needed, mcnemar_exact


@pytest.mark.parametrize(
    ("k", "n", "bound"), [(0, 360, 0.008287), (2, 360, 0.017384), (5, 1000, 0.010484), (0, 10_000, 0.000300)]
)
def test_bound_of_the_reference_numbers(k: int, n: int, bound: float) -> None:
    assert clopper_pearson_upper(k, n) == pytest.approx(bound, abs=1e-6)


@given(st.integers(1, 1_000_000), st.floats(0, 1), st.sampled_from([0.5, 0.9, 0.95, 0.99, 0.9999]))
@settings(max_examples=300)
def test_bound_equals_scipy(n: int, share: float, confidence: float) -> None:
    k = min(n - 1, int(share * n))
    expected = stats.beta.ppf(confidence, k + 1, n - k)
    assert clopper_pearson_upper(k, n, confidence) == pytest.approx(expected, abs=1e-10)


@pytest.mark.parametrize("k", [0, 1, 2, 50, 1000, 499_999, 500_000, 999_000, 999_998, 999_999])
def test_bound_of_a_million_trials(k: int) -> None:
    assert clopper_pearson_upper(k, 10**6) == pytest.approx(stats.beta.ppf(0.95, k + 1, 10**6 - k), abs=1e-10)


@given(st.integers(2, 5000), st.data())
@settings(max_examples=100)
def test_bound_rises_with_events_and_confidence_and_falls_with_trials(n: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(0, n - 2))
    bound = clopper_pearson_upper(k, n)
    assert k / n < bound < clopper_pearson_upper(k + 1, n) <= 1
    assert clopper_pearson_upper(k, n + 1) < bound < clopper_pearson_upper(k, n, 0.99)


@pytest.mark.parametrize("rate", [0.0005, 0.002, 0.01, 0.05, 0.3, 0.9])
@pytest.mark.parametrize("n", [20, 360, 3000])
def test_bound_covers_the_true_rate_in_95_of_100_simulations(rate: float, n: int) -> None:
    events, counts = np.unique(np.random.default_rng(7).binomial(n, rate, 20_000), return_counts=True)
    covered = sum(count for k, count in zip(events, counts, strict=True) if clopper_pearson_upper(int(k), n) >= rate)
    assert covered / 20_000 >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / 20_000)


@given(st.integers(1, 400), st.floats(1e-4, 0.9999), st.sampled_from([0.8, 0.95, 0.99]))
@settings(max_examples=30)
def test_coverage_is_at_least_the_confidence_whatever_the_rate(n: int, rate: float, confidence: float) -> None:
    """No simulation: the probability that the bound holds is a sum of binomial terms, taken here exactly."""
    held = [k for k in range(n + 1) if clopper_pearson_upper(k, n, confidence) >= rate]
    terms = (
        math.exp(
            math.lgamma(n + 1)
            - math.lgamma(k + 1)
            - math.lgamma(n - k + 1)
            + k * math.log(rate)
            + (n - k) * math.log1p(-rate)
        )
        for k in held
    )
    assert math.fsum(terms) >= confidence - 1e-9


@pytest.mark.parametrize(("k", "n"), [(-1, 5), (6, 5), (0, 0)])
def test_impossible_counts_are_refused(k: int, n: int) -> None:
    with pytest.raises(ValueError, match="expected 0 ≤ k ≤ n"):
        clopper_pearson_upper(k, n)


@pytest.mark.parametrize("confidence", [0.4, 1.0, -1.0, float("nan")])
def test_impossible_confidence_is_refused(confidence: float) -> None:
    with pytest.raises(ValueError, match="confidence"):
        clopper_pearson_upper(1, 5, confidence)


@given(st.floats(1e-5, 0.99))
@settings(max_examples=200)
def test_images_needed_is_the_smallest_number_that_suffices(rate: float) -> None:
    needed = images_needed(rate)
    assert clopper_pearson_upper(0, needed) <= rate
    assert needed == 1 or clopper_pearson_upper(0, needed - 1) > rate


def test_images_needed_for_common_rates() -> None:
    assert [images_needed(rate) for rate in (0.01, 0.002, 0.001)] == [299, 1497, 2995]


@pytest.mark.parametrize("rate", [1e-300, 1e-310, math.ulp(0.0)])
def test_no_rate_is_too_small_for_a_number(rate: float) -> None:
    """`--max-flip-rate 1e-310` ended in a traceback."""
    assert images_needed(rate) > 1e300
    with pytest.raises(ValueError, match="n=1000: no count of flips proves"):
        flips_allowed(1000, rate)


@given(st.integers(0, 400), st.integers(0, 400))
@settings(max_examples=200)
def test_mcnemar_equals_scipy(b: int, c: int) -> None:
    expected = stats.binomtest(b, b + c, 0.5).pvalue if b + c else 1.0
    assert mcnemar_exact(b, c) == pytest.approx(expected, rel=1e-9)
    assert mcnemar_exact(b, c) == mcnemar_exact(c, b)


@given(st.integers(0, 12), st.integers(0, 12))
@settings(max_examples=60)
def test_mcnemar_equals_an_enumeration(b: int, c: int) -> None:
    """Under equal odds each disagreement goes either way: all 2^(b+c) ways are counted, those as uneven or more."""
    n = b + c
    ways = [math.comb(n, wins) for wins in range(n + 1) if abs(2 * wins - n) >= abs(b - c)]
    assert mcnemar_exact(b, c) == pytest.approx(sum(ways) / 2**n)


def test_mcnemar_of_none_of_ten_is_two_of_1024() -> None:
    assert mcnemar_exact(0, 10) == pytest.approx(2 / 1024)


@pytest.mark.parametrize(("n", "rate", "flips"), [(360, 0.01, 0), (360, 0.02, 2), (299, 0.01, 0), (50_000, 0.01, 463)])
def test_flips_allowed_is_the_most_that_prove_the_rate(n: int, rate: float, flips: int) -> None:
    assert flips_allowed(n, rate) == flips
    assert clopper_pearson_upper(flips, n) <= rate < clopper_pearson_upper(flips + 1, n)


def test_too_few_images_allow_no_count_of_flips() -> None:
    with pytest.raises(ValueError, match=r"n=298: no count of flips proves a rate of at most 0\.01"):
        flips_allowed(298, 0.01)


def test_edges_of_the_counts() -> None:
    assert clopper_pearson_upper(1, 1) == clopper_pearson_upper(7, 7) == 1
    assert clopper_pearson_upper(0, 1) == pytest.approx(0.95)
    assert clopper_pearson_upper(0, 1, 0.5) == pytest.approx(0.5)
    # P(X ≤ 1 | 2, p) = 1 − p² is 0.05.
    assert clopper_pearson_upper(1, 2) == pytest.approx(math.sqrt(0.95), abs=1e-15)
    assert mcnemar_exact(0, 0) == mcnemar_exact(3, 3) == 1
    assert (mcnemar_exact(1, 0), mcnemar_exact(0, 6)) == pytest.approx((1, 2 / 64))
    for b, c in ((-1, 2), (2, -1)):
        with pytest.raises(ValueError, match=f"b={b}, c={c}: expected counts"):
            mcnemar_exact(b, c)


@pytest.mark.parametrize("needed", [1, 2, 20, 299, 1497])
def test_images_needed_at_the_edge_of_a_rate(needed: int) -> None:
    """The rate that `needed` images just prove, and one float below it, which takes one image more."""
    rate = clopper_pearson_upper(0, needed)
    assert images_needed(rate) == needed
    assert images_needed(math.nextafter(rate, 0)) == needed + 1
    assert flips_allowed(needed, rate) == 0
    with pytest.raises(ValueError, match=f"n={needed}: no count of flips proves"):
        flips_allowed(needed, math.nextafter(rate, 0))


@pytest.mark.parametrize(("k", "n"), [(1, 2), (1, 100), (5, 1000), (298, 300), (463, 50_000)])
def test_flips_allowed_at_the_edge_of_a_rate(k: int, n: int) -> None:
    rate = clopper_pearson_upper(k, n)
    assert flips_allowed(n, rate) == k
    assert flips_allowed(n, math.nextafter(rate, 0)) == k - 1


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.1, 1.5, math.nan])
def test_rates_that_no_number_proves_are_refused(rate: float) -> None:
    with pytest.raises(ValueError, match=r"expected 0 < max_flip_rate < 1"):
        images_needed(rate)
