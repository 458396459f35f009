"""Bounds, agreements, expected flips and the search for a small subset: by hand and by slow formulas."""

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from vitx.core.errors import CheckFailed
from vitx.export.graph.execution import logits_of
from vitx.export.precision import acceptance
from vitx.export.precision.acceptance import (
    Agreement,
    Bounds,
    Judge,
    Lowered,
    SamplingPlan,
    agreement_of,
    expected_flip_rate,
    minimal_subset,
)


def test_bounds_in_words_and_in_json() -> None:
    plain, planned = Bounds(0.5), Bounds(0.02, 0.985, SamplingPlan(360, 2))
    assert str(plain) == "0.5 and 0.01 of the images"
    assert str(planned) == (
        "0.02 and 0.015 of the images, and 2 of the 360 images of the certificate, to be met with probability 0.8"
    )
    assert plain.as_json() == {"logit_error": 0.5, "agreement": 0.99, "plan": None}
    plan = {"images": 360, "flips": 2}
    assert planned.as_json() == {"logit_error": 0.02, "agreement": 0.985, "plan": plan}


def test_an_agreement_in_words_and_in_json() -> None:
    found = Agreement(200, 3, 0.12345, 0.00123456, 0, 0.25)
    assert str(found) == (
        "3 of 200 images in another class, largest logit error 0.123 and mean 0.00123 standard deviations, 0 not finite"
    )
    assert found.agreement == 0.985
    assert found.as_json() == {
        "images": 200,
        "flips": 3,
        "max_error": 0.12345,
        "mean_error": 0.00123456,
        "not_finite": 0,
        "flip_rate": 0.25,
    }
    broken = Agreement(200, 3, math.inf, math.inf, 1, 1.0).as_json()
    assert (broken["max_error"], broken["mean_error"], broken["flip_rate"]) == ("inf", "inf", 1.0)
    json.dumps(broken, allow_nan=False)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_errors_are_in_standard_deviations_at_any_scale(scale: float) -> None:
    rng = np.random.default_rng(0)
    expected = rng.normal(0, scale, (20, 5)).astype(np.float32)
    found = (expected + rng.normal(0, 0.1 * scale, (20, 5))).astype(np.float32)
    wide, other = expected.astype(np.float64), found.astype(np.float64)
    std = math.sqrt(((wide - wide.mean()) ** 2).mean())
    agreement = agreement_of(expected, found)
    assert agreement.max_error == pytest.approx(np.abs(other - wide).max() / std, rel=1e-5)
    assert agreement.mean_error == pytest.approx(np.abs(other - wide).mean() / std, rel=1e-5)
    assert (agreement.images, agreement.not_finite) == (20, 0)
    assert agreement.flip_rate == expected_flip_rate(expected, found)


def test_logits_that_are_all_equal_have_a_spread_all_the_same() -> None:
    expected = np.ones((2, 3), np.float32)
    assert agreement_of(expected, expected).max_error == 0
    moved = expected.copy()
    moved[1, 2] = 1.5
    assert agreement_of(expected, moved).max_error == pytest.approx(0.5e12)
    assert agreement_of(expected, moved).flips == 1


def test_rows_that_are_not_finite_are_counted_once() -> None:
    expected = np.array([[2, 0, 1], [0, 3, 1], [1, 0, 4], [5, 0, 0]], np.float32)
    found = expected.copy()
    found[0] = np.nan
    found[1, :2] = -np.inf, np.inf  # the class stays
    found[2] = [9, 0, 0]  # a flip
    agreement = agreement_of(expected, found)
    assert (agreement.flips, agreement.not_finite, agreement.flip_rate) == (3, 2, 1.0)
    assert agreement.max_error == agreement.mean_error == math.inf, "also where the difference is NaN"


def slow_flip_rate(expected: Any, found: Any) -> float:
    """The docstring's formula, image by image."""
    rows, chosen = expected.astype(float).tolist(), expected.argmax(axis=1).tolist()
    margin, after = [], []
    for row, other, best in zip(rows, found.astype(float).tolist(), chosen, strict=True):
        margin.append(row[best] - max(row[:best] + row[best + 1 :]))
        after.append(other[best] - max(other[:best] + other[best + 1 :]))
    order = sorted(range(len(margin)), key=margin.__getitem__)
    low = order[: max(16, len(margin) // 10)]
    known = sorted(margin)
    evenly = min(8, len(known))
    known[:evenly] = [known[evenly - 1] * (i + 1) / evenly for i in range(evenly)]
    points = [0.0, *known]
    total = 0.0
    for image in low:
        loss = margin[image] - after[image]
        if loss < 0:
            continue
        if loss >= points[-1]:
            total += 1
            continue
        i = max(j for j in range(len(points)) if points[j] <= loss)
        total += (i + (loss - points[i]) / (points[i + 1] - points[i])) / len(known)
    return total / len(low)


@pytest.mark.parametrize("images", [3, 8, 9, 16, 17, 100, 333])
@pytest.mark.parametrize("noise", [0.01, 0.5, 30.0])
def test_the_expected_flips_are_those_of_the_slow_formula(images: int, noise: float) -> None:
    rng = np.random.default_rng(images)
    expected = rng.normal(0, 3, (images, 4)).astype(np.float32)
    found = (expected + rng.normal(0, noise, expected.shape)).astype(np.float32)
    assert expected_flip_rate(expected, found) == pytest.approx(slow_flip_rate(expected, found), rel=1e-6, abs=1e-12)


def test_two_classes_may_flip_and_one_may_not() -> None:
    expected = np.array([[1.0, 0.0], [3.0, 0.0]], np.float32)
    swapped = np.ascontiguousarray(expected[:, ::-1])
    # Margins 1 and 3 are spread to 1.5 and 3; the losses are 2 and 6.
    assert expected_flip_rate(expected, swapped) == pytest.approx(((1 + 0.5 / 1.5) / 2 + 1) / 2)
    assert expected_flip_rate(expected[:, :1], swapped[:, :1]) == 0.0


@pytest.mark.parametrize(
    ("images", "flips", "rate"), [(360, 0, 0.001), (360, 2, 0.004), (50, 3, 0.1), (50_000, 459, 0.0085)]
)
def test_the_probability_of_a_plan_is_the_sum_of_poisson_terms(images: int, flips: int, rate: float) -> None:
    mean = images * rate
    term = total = math.exp(-mean)
    for k in range(1, flips + 1):
        term *= mean / k
        total += term
    assert SamplingPlan(images, flips).acceptance_probability(rate) == pytest.approx(total, rel=1e-9)


def test_a_plan_of_many_flips_is_met_for_certain_and_no_more() -> None:
    assert SamplingPlan(10, 0).acceptance_probability(0.0) == 1.0
    assert all(SamplingPlan(1000, 1000).acceptance_probability(k / 1000) <= 1.0 for k in (1, 100, 200, 700))
    assert SamplingPlan(10**7, 3).acceptance_probability(1.0) == 0.0


@pytest.mark.parametrize(("probability", "likely"), [(0.8, True), (0.79999, False)])
def test_a_plan_must_be_met_four_times_out_of_five(
    monkeypatch: pytest.MonkeyPatch, probability: float, likely: bool
) -> None:
    asked = []

    def answer(self: SamplingPlan, flip_rate: float) -> float:
        asked.append(flip_rate)
        return probability

    monkeypatch.setattr(SamplingPlan, "acceptance_probability", answer)
    assert Agreement(100, 0, 0.1, 0.1, 0, 0.125).within(Bounds(0.1, sampling_plan=SamplingPlan(9, 9))) is likely
    assert asked == [0.125]


def test_each_bound_holds_alone() -> None:
    fine = {"images": 100, "flips": 1, "max_error": 0.5, "mean_error": 0.1, "not_finite": 0, "flip_rate": 0.0}
    assert Agreement(**fine).within(Bounds(0.5))  # type: ignore[arg-type]
    for worse in ({"flips": 2}, {"max_error": 0.51}, {"not_finite": 1}):
        assert not Agreement(**{**fine, **worse}).within(Bounds(0.5))  # type: ignore[arg-type]
    assert not Agreement(**fine).within(Bounds(0.5, 1.0))  # type: ignore[arg-type]
    exact = {**fine, "flips": 0}
    assert Agreement(**exact).within(Bounds(0.5, 1.0))  # type: ignore[arg-type]


def linear(weight: Any) -> onnx.ModelProto:
    """uint8 (N, 1, 1, 3) → logits (N, 3)."""
    graph = helper.make_graph(
        [
            helper.make_node("Cast", ["images"], ["pixels"], to=TensorProto.FLOAT),
            helper.make_node("Flatten", ["pixels"], ["x"]),
            helper.make_node("MatMul", ["x", "W"], ["logits"]),
        ],
        "linear",
        [helper.make_tensor_value_info("images", TensorProto.UINT8, ["N", 1, 1, 3])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 3])],
        [numpy_helper.from_array(np.asarray(weight, np.float32), "W")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


EYE, TURNED = linear(np.eye(3)), linear(np.eye(3)[[1, 2, 0]])
IMAGES = np.random.default_rng(0).integers(0, 256, (20, 1, 1, 3), dtype=np.uint8)


def test_a_judge_measures_the_first_images_of_what_can_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, bool]] = []

    def recorded(graph: onnx.ModelProto, images: Any, *, fused: bool = True) -> Any:
        asked.append((len(images), fused))
        return logits_of(graph, images)

    monkeypatch.setattr(acceptance, "logits_of", recorded)
    judge = Judge(EYE, IMAGES, Bounds(0.5), runnable=lambda candidate: TURNED, fused=False)
    pixels = IMAGES[acceptance.judging_order(20)].reshape(20, 3).astype(np.float32)
    np.testing.assert_array_equal(judge.expected, pixels)
    for count, images in ((None, 20), (7, 7)):
        found = judge.measure(EYE, count)
        assert found == agreement_of(pixels[:images], pixels[:images, [2, 0, 1]], float(pixels.std()))
        assert found.images == images
    assert asked == [(20, True), (20, False), (7, False)]
    assert judge.trials == []
    assert Judge(EYE, IMAGES, Bounds(0.5)).measure(TURNED) == agreement_of(pixels, pixels[:, [2, 0, 1]])
    assert asked[-1] == (20, True)


class Bar:
    def __init__(self) -> None:
        self.shown: list[tuple[int, str]] = []

    def update(self, done: int, note: str = "") -> None:
        self.shown.append((done, note))


def test_a_trial_is_recorded_with_its_numbers() -> None:
    bar, plan = Bar(), SamplingPlan(20, 3)
    judge = Judge(EYE, IMAGES, Bounds(5.0, 0.0, plan), lambda graph: graph is EYE, bar=bar)
    assert not judge.passes(TURNED, "turned")
    assert judge.passes(EYE, "itself")
    turned, same = judge.measure(TURNED, 16), judge.measure(EYE)  # the first says enough of what fails
    chance = plan.acceptance_probability(turned.flip_rate)
    assert chance < 0.8
    assert judge.trials == [
        {"what": "turned", **turned.as_json(), "within_bounds": False, "chance": chance},
        {"what": "itself", **same.as_json(), "within_bounds": True, "chance": 1.0, "accepted": True},
    ]
    assert bar.shown == [(1, "turned"), (2, "itself")]
    free = Judge(EYE, IMAGES, Bounds(5.0, 0.0))
    assert free.passes(TURNED, "turned")
    assert free.trials == [{"what": "turned", **free.measure(TURNED).as_json(), "within_bounds": True}]


def test_a_float32_graph_that_is_not_finite_is_refused() -> None:
    with pytest.raises(CheckFailed) as refused:
        Judge(linear(np.diag([3e38, 1, 1])), IMAGES, Bounds(0.5))
    assert str(refused.value) == ("the float32 graph itself gives logits that are not finite: look at the checkpoint")


@pytest.mark.parametrize(
    ("needed", "asked"),
    [
        ("a", ["a"]),
        ("b", ["a", "ab", "b"]),
        ("c", ["a", "ab", "abcd", "abc", "ac", "c"]),
        ("ad", ["a", "ab", "abcd", "abc", "ad", "d", "d"]),
        ("be", ["a", "ab", "abcd", "abcdefg", "abcde", "abe", "e", "ae", "be"]),
        ("ag", ["a", "ab", "abcd", "abcdefg", "abcde", "abcdef", "abcg", "g", "abg", "ag", "g"]),
    ],
)
def test_a_subset_is_found_in_so_many_trials(needed: str, asked: list[str]) -> None:
    tried: list[str] = []

    def passes(names: Sequence[str]) -> bool:
        tried.append("".join(names))
        return set(needed) <= set(names)

    assert "".join(minimal_subset("abcdefg", passes)) == needed
    assert tried == asked


def test_the_shortest_prefix_is_bisected() -> None:
    """Of 100 with the first 77 needed: doubled to 64, all 100, then halved between."""
    tried: list[int] = []

    def passes(names: Sequence[str]) -> bool:
        tried.append(len(names))
        return len(names) >= 77

    names = [str(number) for number in range(100)]
    assert minimal_subset(names, passes) == tuple(names[:77])
    assert tried[:14] == [1, 2, 4, 8, 16, 32, 64, 100, 82, 73, 77, 75, 76, 39]


def test_when_all_together_do_not_pass_the_search_ends() -> None:
    tried: list[str] = []
    with pytest.raises(CheckFailed) as refused:
        minimal_subset("abc", lambda names: bool(tried.append("".join(names))))  # type: ignore[func-returns-value]
    assert tried == ["a", "ab", "abc"]
    assert str(refused.value) == (
        "even with every node left in float32 the graph is not accepted: is it the caller's check that fails?"
    )


def test_what_was_measured_stays_as_it_was() -> None:
    found = Agreement(200, 3, 0.5, 0.25, 0, 0.25)
    graph = Lowered(onnx.ModelProto(), (), {})
    for thing, field in (
        (found, "flips"),
        (Bounds(0.5), "agreement"),
        (SamplingPlan(9, 1), "flips"),
        (graph, "islands"),
    ):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(thing, field, 0)


MANY = np.random.default_rng(2).integers(0, 256, (200, 1, 1, 3), dtype=np.uint8)


def shifted(amount: float) -> onnx.ModelProto:
    """The logits are the pixels, of which those of the first class are off by `amount` of their value."""
    return linear(np.diag([1 + amount, 1, 1]))


@pytest.mark.parametrize(
    ("share", "images", "verdict"),
    [(0.3, 64, True), (0.37, 200, True), (0.9, 200, True), (1.6, 16, False)],
)
def test_a_clear_verdict_takes_few_images(share: float, images: int, verdict: bool) -> None:
    """`share` of the error that is allowed: a third of it is clear, and more than all of it too."""
    pixels = MANY.reshape(200, 3).astype(np.float32)
    bounds = Bounds(0.1, 0.0)
    amount = share * bounds.logit_error * float(pixels.std()) / float(pixels[:, 0].max())
    judge = Judge(EYE, MANY, bounds)
    first = np.linspace(0, 199, 64).astype(int).reshape(16, 4).T.reshape(-1)
    np.testing.assert_array_equal(judge.images[:64], MANY[first])
    assert sorted(map(bytes, judge.images)) == sorted(map(bytes, MANY))
    assert judge.passes(shifted(amount), "off") is verdict
    assert judge.trials[0]["images"] == images


def test_flips_that_are_too_many_for_all_images_end_the_trial() -> None:
    """Of 200 images 1 % may flip; three that do are too many, wherever they are found."""
    judge = Judge(EYE, MANY, Bounds(1e9, 0.99))
    assert not judge.passes(linear(np.diag([-1, 1, 1])), "turned")
    assert (judge.trials[0]["images"], judge.trials[0]["flips"] > 2) == (16, True)


def test_a_verdict_on_the_first_images_is_that_on_all() -> None:
    """Normal errors on normal logits, of sizes from far below a plan to far beyond it: no early verdict is wrong."""
    rng = np.random.default_rng(0)
    early = refused = 0
    for scale in np.geomspace(1e-4, 0.3, 600):
        expected = rng.normal(size=(256, 10)).astype(np.float32)
        found = (expected + scale * rng.normal(size=expected.shape)).astype(np.float32)
        bounds = Bounds(0.5, 0.99, SamplingPlan(360, 2))
        larger = expected + acceptance.RESERVE * (found - expected)
        if agreement_of(expected[:64], larger[:64]).within(bounds):
            early += 1
            assert agreement_of(expected, found).within(bounds), scale
        smaller = expected + (found - expected) / acceptance.RESERVE
        if not agreement_of(expected[:16], smaller[:16]).within(bounds):
            refused += 1
            assert not agreement_of(expected, found).within(bounds), scale
    assert (early, refused) == (210, 212)
