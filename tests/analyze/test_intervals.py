"""Intervals and exact tests: against scipy's own, counting, and resampling one image at a time."""

from fractions import Fraction
from math import comb, sqrt

import numpy as np
import pytest
import torch
from scipy import stats

from vitx.analyze.intervals import (
    FEWEST,
    LayerSamples,
    batch_interval,
    ends_text,
    few_events,
    holm,
    mean_interval,
    of_images,
    paired_change,
    percentiles,
    resample_weights,
    rounded,
    share_text,
    sign_test,
    with_interval,
)

VALUES = np.random.default_rng(5).exponential(size=40)


def test_batches_have_the_interval_of_scipys_t_test() -> None:
    values = [0.2, 0.5, 0.45, 0.9]
    expected = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert batch_interval(values)[""] == pytest.approx((expected.low, expected.high), rel=1e-12)
    assert batch_interval([0.5]) == {}


@pytest.mark.parametrize("images", [7, 1_500_000])
def test_a_resample_draws_as_many_as_there_are(images: int) -> None:
    """In pieces, however many images there are."""
    pieces = [*resample_weights(images, resamples=3)]
    assert sum(map(len, pieces)) == 3
    for weights in pieces:
        assert weights.shape[1] == images
        assert (weights.sum(axis=1) == images).all()


def test_pieces_are_the_resamples_of_one_piece() -> None:
    """Drawn one image after the other, from one generator."""
    drawn = np.random.default_rng(0).integers(0, 40, (1000, 40))
    by_hand = np.quantile(VALUES[drawn].mean(axis=1), (0.025, 0.975))
    assert mean_interval(VALUES)[""] == pytest.approx(by_hand, rel=1e-12)
    many = np.concatenate([*resample_weights(3000, resamples=700)])  # 666 and 34
    drawn = np.random.default_rng(0).integers(0, 3000, (700, 3000))
    assert many.shape == (700, 3000)
    assert (many[[0, 665, 666, 699], 17] == (drawn[[0, 665, 666, 699]] == 17).sum(axis=1)).all()


def test_a_bootstrap_interval_is_near_that_of_normal_means() -> None:
    low, high = mean_interval(VALUES)[""]
    half = 1.96 * VALUES.std() / sqrt(len(VALUES))
    assert (low, high) == pytest.approx((VALUES.mean() - half, VALUES.mean() + half), abs=0.25 * half)


def test_percentiles_are_of_each_number() -> None:
    resampled = np.stack([np.arange(201.0), 10 * np.arange(201.0)], axis=1)
    assert percentiles(resampled) == [pytest.approx((5, 195)), pytest.approx((50, 1950))]


def test_layers_have_means_and_intervals_over_all_batches() -> None:
    samples = LayerSamples()
    for part in (VALUES[:25], VALUES[25:]):
        samples.add("a", torch.from_numpy(part).requires_grad_())
        samples.add("b", torch.from_numpy(2 * part).float())
    assert samples.means() == {"a": VALUES.mean(), "b": pytest.approx(2 * VALUES.mean(), rel=1e-6)}
    intervals = samples.intervals()
    assert intervals["a"] == pytest.approx(mean_interval(VALUES)[""], rel=1e-12)
    assert intervals["b"] == pytest.approx([2 * end for end in intervals["a"]], rel=1e-6)


@pytest.mark.parametrize(("images", "there"), [(FEWEST - 1, False), (FEWEST, True)])
def test_fewer_than_ten_are_not_resampled(images: int, there: bool) -> None:
    assert (mean_interval(VALUES[:images]) != {}) == there
    samples = LayerSamples()
    assert samples.intervals() == {}
    samples.add("a", torch.from_numpy(VALUES[:images]))
    assert (samples.intervals() != {}) == there


def test_the_change_of_a_share_is_walds_of_counts_with_a_half_more() -> None:
    lost, gained, n = 4, 9, 60
    change = (9.5 - 4.5) / 62
    half = stats.norm.ppf(0.975) * sqrt((9.5 / 62 + 4.5 / 62 - change**2) / 62)
    assert paired_change(lost, gained, n) == pytest.approx((change - half, change + half), rel=1e-12)
    assert paired_change(0, 1, 1)[1] == 1.0
    assert paired_change(1, 0, 1)[0] == -1.0


def by_counting(ways: range, n: int, rate: Fraction) -> float:
    return float(sum(comb(n, k) * rate**k * (1 - rate) ** (n - k) for k in ways))


@pytest.mark.parametrize(("events", "n"), [(0, 5), (3, 5), (5, 5), (30, 40)])
def test_exact_tests_are_those_of_counting(events: int, n: int) -> None:
    assert sign_test(events, n) == pytest.approx(by_counting(range(events, n + 1), n, Fraction(1, 2)), rel=1e-9)
    assert few_events(events, n, 0.25) == pytest.approx(by_counting(range(events + 1), n, Fraction(1, 4)), rel=1e-9)


def test_holm_adjusts_in_the_order_of_the_p_values() -> None:
    """Holm 1979: the smallest times their number, the next times one less, none below the one before, none above 1."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.5]) == [1.0, 1.0]
    assert holm([0.02, 0.0201, 0.02]) == pytest.approx([0.06, 0.06, 0.06])
    assert holm([]) == []


def test_windows_of_an_image_count_as_one() -> None:
    values = torch.arange(12.0).reshape(6, 2)  # two images of three windows
    assert of_images(values, 2).tolist() == [[2.0, 3.0], [8.0, 9.0]]


def test_texts() -> None:
    assert rounded([1 / 3, 123456789.0]) == (0.333333, 123457000.0)
    assert rounded(np.array([2, 3])) == (2.0, 3.0)
    assert with_interval(0.41234, (0.39, 0.4321)) == "0.412 [0.39, 0.432]"
    assert with_interval(0.41234, None, ".1f", scale=100.0) == "41.2"
    assert with_interval(0.5, (0.25, 0.75), ".0f", scale=100.0) == "50 [25, 75]"
    assert share_text(0.5, 100) == "50.0 % [40.4, 59.6]"  # Wilson, 95 %
    ends = ends_text({"a": 0.1, "b": 0.2, "c": 0.3}, {"c": (0.25, 0.35)})
    assert ends == "0.1 → 0.3 [0.25, 0.35]"
