"""Ranges of activations by hand and by slow formulas: histograms, percentiles, entropy, what is not finite."""

import math
from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from vitx.core.errors import CheckFailed, InputError
from vitx.core.preprocess import Preprocessing
from vitx.export.precision import calibration
from vitx.export.precision.calibration import (
    BINS,
    Activations,
    _divergence,
    _entropy_bins,
    _percentile_bins,
    observe,
    require_finite,
    sample_images,
)
from vitx.export.precision.lower import LowerPrecision, least_images


def of(*parts: Any) -> Activations:
    found = Activations()
    for part in parts:
        found.add(np.asarray(part, np.float32))
    return found


def test_a_histogram_is_over_absolute_values_up_to_the_largest() -> None:
    found = of([0.0, 1.0, -3.0], [[4.0], [-4.0]])
    assert (found.limit, found.largest, found.smallest, found.not_finite) == (6.0, 4.0, -4.0, 0)
    counts = {int(index): int(found.counts[index]) for index in np.flatnonzero(found.counts)}
    # The first batch had a limit of 3: its bins merged in pairs when the limit became 6.
    assert counts == {0: 1, BINS // 3 // 2: 1, BINS // 2 - 1: 1, 4 * BINS // 6: 2}
    assert found.counts.shape == (BINS,)


def test_zeros_alone_have_no_range_yet() -> None:
    found = of([0.0, 0.0])
    assert (found.limit, found.largest, found.smallest, found.counts.sum()) == (0.0, 0.0, 0.0, 0)
    assert found.threshold("max") == found.threshold("entropy") == 1.0
    found.add(np.array([-2.0], np.float32))
    assert (found.limit, found.counts.sum(), found.counts[-1]) == (2.0, 1, 1)


@pytest.mark.parametrize("largest", [1e-36, 1e-44])
def test_a_tensor_of_numbers_next_to_zero_has_a_range(largest: float) -> None:
    """2,048 bins over 1e-36 would be more than a float32 holds for each unit."""
    found = of([largest, 0.0, -largest / 2], [[largest]])
    assert found.counts.sum() == 4
    for method in calibration.METHODS:
        assert found.threshold(method) == float(np.float32(largest))


def test_the_limit_doubles_until_it_holds_the_largest() -> None:
    found = of([1.0], [16.0])
    assert (found.limit, found.counts[BINS // 16 - 1], found.counts[-1]) == (16.0, 1, 1)
    assert found.counts.sum() == 2


def test_what_is_not_finite_is_counted_and_left_out() -> None:
    for values, count, largest, smallest in (
        ([1.0, np.nan, np.inf, -np.inf, -2.0], 3, 2.0, -2.0),
        ([np.inf, 1.0], 1, 1.0, 0.0),
        ([-np.inf, 1.0], 1, 1.0, 0.0),
        ([np.nan], 1, 0.0, 0.0),
    ):
        found = of(values)
        assert (found.not_finite, found.largest, found.smallest) == (count, largest, smallest)
        assert found.counts.sum() == len(values) - count if largest else True
    twice = of([np.nan], [np.nan, 1.0])
    assert twice.not_finite == 2


def test_of_a_large_tensor_every_seventh_value_is_counted() -> None:
    small, large = of(np.ones(1 << 16)), of(np.ones((1 << 16) + 1))
    assert (small.counts.sum(), large.counts.sum()) == (1 << 16, math.ceil(((1 << 16) + 1) / 7))
    values = np.zeros((1 << 16) + 6, np.float32)
    values[3] = 5.0  # between two that are counted: the range is exact all the same
    assert of(values).largest == 5.0


def test_the_percentile_is_the_first_bin_that_holds_its_share() -> None:
    counts = np.zeros(BINS, np.int64)
    counts[[10, 20, 30]] = 9_998, 1, 1
    assert _percentile_bins(counts) == 21  # 9,999 of 10,000
    counts[30] = 2
    assert _percentile_bins(counts) == 31
    assert Activations(8.0, 8.0, 0.0, 0, counts).threshold("percentile") == 31 * 8.0 / BINS
    assert Activations(8.0, 0.1, 0.0, 0, counts).threshold("percentile") == 0.1, "no more than the largest value"


def slow_divergence(counts: Sequence[float], keep: int, levels: int) -> float:
    """KL(P ‖ Q), bin by bin."""
    p = [float(each) for each in counts[:keep]]
    p[-1] += sum(counts[keep:])
    q = [0.0] * keep
    for level in range(levels):
        bins = [i for i in range(keep) if min(i * levels // keep, levels - 1) == level and counts[i] > 0]
        for i in bins:
            q[i] = sum(counts[j] for j in bins) / len(bins)
    if not sum(p) or not sum(q):
        return math.inf
    total = 0.0
    for one, other in zip(p, q, strict=True):
        share, coded = one / sum(p), other / sum(q)
        if share and coded:
            total += share * math.log(share / coded)
        elif share:
            total += share * math.log(1e4)
    return total


@pytest.mark.parametrize("seed", range(6))
def test_the_divergence_is_that_of_the_slow_formula(seed: int) -> None:
    rng = np.random.default_rng(seed)
    counts = rng.poisson(3 * np.exp(-np.arange(64) / 12)).astype(float)
    for keep in (8, 16, 23, 40, 64):
        assert _divergence(counts, keep, 8) == pytest.approx(slow_divergence(counts.tolist(), keep, 8), rel=1e-12)


def test_mass_without_a_code_costs_as_if_it_had_a_ten_thousandth() -> None:
    counts = np.array([4.0, 4.0, 0.0, 0.0, 8.0])  # the clipped half falls on a bin that Q has not
    assert _divergence(counts, 4, 4) == pytest.approx(0.5 * math.log(0.5) + 0.5 * math.log(1e4))
    assert _divergence(np.zeros(8), 4, 4) == math.inf
    assert _divergence(np.array([0.0, 0, 0, 0, 1]), 4, 4) == math.inf


@pytest.mark.parametrize("seed", range(3))
def test_the_entropy_method_takes_the_least_divergence(seed: int) -> None:
    rng = np.random.default_rng(seed)
    counts = np.histogram(np.abs(rng.standard_t(3, 20_000)), bins=256, range=(0, 30))[0].astype(np.int64)
    counts[0] = 10**9  # exact zeros hide nothing: their bin takes the count of its neighbour
    smoothed = counts.astype(float)
    smoothed[0] = smoothed[1]
    last = int(np.flatnonzero(smoothed)[-1]) + 1
    divergences = {keep: slow_divergence(smoothed.tolist(), keep, 16) for keep in range(16, max(16, last) + 1, 8)}
    assert _entropy_bins(counts, 16) == min(divergences, key=lambda keep: divergences[keep])


def test_the_first_bin_counts_as_its_neighbour(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(calibration, "_divergence", lambda counts, keep, levels: seen.append(counts.copy()) or 0.0)  # type: ignore[func-returns-value]
    counts = np.arange(100, 132)
    assert _entropy_bins(counts, 16) == 16, "the first of equals"
    assert [found.tolist() for found in seen] == [[101.0, 101.0, *map(float, range(102, 132))]] * 3
    assert counts[0] == 100


def test_a_range_of_few_bins_keeps_as_many_as_there_are_codes() -> None:
    counts = np.zeros(BINS, np.int64)
    counts[1:3] = 5
    assert _entropy_bins(counts, 128) == 128
    found = Activations(16.0, 16.0, 0.0, 0, counts)
    assert found.threshold("entropy") == 1.0  # 128 bins of 16/2048
    assert found.threshold("max") == 16.0


def test_the_last_value_may_decide_and_the_first_bin_alone_does_not() -> None:
    counts = np.zeros(256, np.int64)
    counts[:200], counts[255] = 10, 4000
    best = min(range(16, 257, 8), key=lambda keep: slow_divergence(counts.tolist(), keep, 16))
    assert _entropy_bins(counts, 16) == best == 256
    first = np.zeros(BINS, np.int64)
    first[0] = 9
    assert _entropy_bins(first, 128) == 128
    assert calibration.METHODS == ("max", "percentile", "entropy")


def graph() -> onnx.ModelProto:
    nodes = [
        helper.make_node("Cast", ["images"], ["pixels"], to=TensorProto.FLOAT, name="cast"),
        helper.make_node("Mul", ["pixels", "minus"], ["h"], name="mul"),
        helper.make_node("ReduceMean", ["h", "axes"], ["logits"], name="mean", keepdims=0),
    ]
    made = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("images", TensorProto.UINT8, ["N", 2, 2, 3])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 3])],
        [
            numpy_helper.from_array(np.array(-0.5, np.float32), "minus"),
            numpy_helper.from_array(np.array([1, 2]), "axes"),
        ],
    )
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def test_every_tensor_is_observed_on_every_image() -> None:
    images = np.arange(3 * 12, dtype=np.uint8).reshape(3, 2, 2, 3)
    found = observe(graph(), ["pixels", "h"], images)
    assert list(found) == ["pixels", "h"]
    assert (found["pixels"].largest, found["pixels"].smallest) == (35.0, 0.0)
    assert (found["h"].largest, found["h"].smallest) == (17.5, -17.5)
    assert found["h"].counts.sum() == 36


def test_the_first_tensor_that_is_not_finite_is_named_with_its_maker() -> None:
    good, bad = of([1.0]), of([np.nan, np.inf, 1.0])
    require_finite({"a": good}, {})
    makers = {"b": onnx.NodeProto(name="product"), "c": onnx.NodeProto(name="other")}
    with pytest.raises(
        CheckFailed, match=r"^'b', made by product, holds 2 values that are not finite in float32 already"
    ):
        require_finite({"a": good, "b": bad, "c": bad}, makers)
    with pytest.raises(CheckFailed, match=r"^'x', made by the input, holds 2 values"):
        require_finite({"x": bad}, {})


class Numbered:
    """An image set of which only the numbers of its images are asked."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def read(self, index: int) -> bytes:
        return index.to_bytes(4, "big")


@pytest.mark.parametrize(
    ("size", "images", "limit", "taken"),
    [
        (224, 5000, None, 512),
        (448, 5000, None, 512),  # never fewer
        (160, 5000, None, 1003),  # as many pixels as 512 of 224
        (32, 5000, None, 2048),  # never more
        (32, 5000, 400, 400),
        (32, 400, None, 400),
    ],
)
def test_small_images_are_taken_in_larger_numbers(
    monkeypatch: pytest.MonkeyPatch, size: int, images: int, limit: int | None, taken: int
) -> None:
    monkeypatch.setattr(
        Preprocessing, "from_bytes", lambda self, data: np.full((1, 1, 3), int.from_bytes(data, "big"), np.int64)
    )
    chosen: Any = sample_images(Numbered(images), Preprocessing(image_size=size), limit)  # type: ignore[arg-type]
    numbers = chosen[:, 0, 0, 0]
    assert len(set(numbers.tolist())) == len(numbers) == taken
    assert (numbers[0], numbers[-1]) == (0, images - 1)
    steps = np.diff(numbers)
    assert steps.max() - steps.min() <= 1, "evenly spaced"
    assert calibration.FEWEST == 512
    with pytest.raises(InputError, match="319 images to calibrate on"):
        sample_images(Numbered(319), Preprocessing(image_size=size))  # type: ignore[arg-type]


def test_half_types_take_fewer_images_than_ranges_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Preprocessing, "from_bytes", lambda self, data: np.zeros((1, 1, 3)))
    assert {name: least_images(name) for name in get_args(LowerPrecision)} == {
        "fp16": 32,
        "bf16": 32,
        "int8": 320,
        "fp8": 320,
    }
    for count in (32, 48, 319, 400):
        chosen = sample_images(Numbered(count), Preprocessing(image_size=32), least=32)  # type: ignore[arg-type]
        assert len(chosen) == count
    with pytest.raises(
        InputError, match="31 images to judge a lower precision on: give at least 32 real ones, and 320"
    ):
        sample_images(Numbered(31), Preprocessing(image_size=32), least=32)  # type: ignore[arg-type]
    for least, why in ((32, "to judge a lower precision on"), (320, "to calibrate on")):
        with pytest.raises(InputError, match=f"^1 image {why}: "):
            sample_images(Numbered(1), Preprocessing(image_size=32), least=least)  # type: ignore[arg-type]


def test_a_threshold_is_that_of_all_values_so_far() -> None:
    found = Activations()
    found.add(np.array([1.0, -2.0], np.float32))
    assert found.threshold("max") == 2.0
    found.add(np.array([3.0], np.float32))
    assert found.threshold("max") == 3.0
    found.add(np.array([-4.0, np.inf], np.float32), histogram=False)
    assert (found.largest, found.smallest, found.not_finite, found.counts.sum()) == (4.0, -4.0, 1, 3)
