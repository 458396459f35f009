"""Findings: seeded networks get the right first one, a healthy one none, and chance makes none."""

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from math import comb
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from run_fixture import DIGITS_PREPROCESSING, digits_source, trained_deepvit
from vitx.analyze import Analysis, AnalysisOptions, analyze, chosen_metrics
from vitx.analyze.accuracy import AccuracyCounter
from vitx.analyze.analysis_report import ReportWriter
from vitx.analyze.findings.differences import differences
from vitx.analyze.findings.finding import Finding, Rule, find
from vitx.analyze.findings.rules import RULES
from vitx.analyze.images import open_analysis_images
from vitx.analyze.intervals import Measured, holm, mean_interval, paired_change
from vitx.analyze.metrics.confidence import confidence
from vitx.analyze.metrics.over_smoothing import OverSmoothing
from vitx.analyze.metrics.temperature import fit_temperature, temperature_scaling
from vitx.analyze.predictor import predictor
from vitx.core.errors import InputError
from vitx.core.files import Record
from vitx.models.source import Source

READ_BY_RULES = (
    *("residual-update", "over-smoothing", "attention-collapse", "attention-collapse-mixed"),
    *("lesions", "confidence"),
)


def source(change: Callable[[Any], None]) -> Source:
    model = deepcopy(_healed())
    change(model)
    return digits_source("seeded", model)


def measured(change: Callable[[Any], None], images: int, names: tuple[str, ...] = READ_BY_RULES) -> Analysis:
    options = AnalysisOptions(batch_size=60)
    return analyze(source(change), open_analysis_images("digits", images), names, options, quiet=True)


@cache
def _healed() -> Any:
    """Six epochs leave the network underconfident, and two MLPs that could go: both are mended."""
    model = deepcopy(trained_deepvit())
    with torch.no_grad():
        for block in model.blocks[1:]:  # what the attention takes away from the class, its MLP gives back
            shift = 40 * model.head.weight[3] / model.head.weight[3].norm()
            block.attn.proj.bias -= shift
            block.mlp.fc2.bias += shift
    images = open_analysis_images("digits")
    answers = predictor(model, DIGITS_PREPROCESSING)
    logits = np.concatenate([answers(pixels) for pixels in images.batches(DIGITS_PREPROCESSING, 60)])
    temperature = fit_temperature(logits, images.labels)
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter /= temperature
    return model


def healthy(model: Any) -> None:
    pass


def collapsed(model: Any) -> None:
    def to_the_mean(_block: nn.Module, _inputs: Any, tokens: Tensor) -> Tensor:
        patches = tokens[:, 1:].mean(dim=1, keepdim=True).expand_as(tokens[:, 1:])
        return torch.cat([tokens[:, :1], patches], dim=1)

    model.blocks[1].register_forward_hook(to_the_mean)


@torch.no_grad()
def overconfident(model: Any) -> None:
    for parameter in model.head.parameters():
        parameter *= 20


@torch.no_grad()
def dead_block(model: Any) -> None:
    for layer in (model.blocks[1].attn.proj, model.blocks[1].mlp.fc2):
        for parameter in layer.parameters():
            parameter.zero_()


@pytest.mark.parametrize(
    ("change", "images", "kind", "said"),
    [
        (collapsed, 60, "over-smoothing", "Over-smoothing begins at blocks.1"),
        (overconfident, 120, "miscalibration", "overconfident"),
        (dead_block, 60, "dead-block", "Dead: blocks.1."),
    ],
)
def test_a_seeded_network_gets_the_right_first_finding(
    change: Callable[[Any], None], images: int, kind: str, said: str
) -> None:
    first = measured(change, images).findings().found[0]
    assert first.kind == kind
    assert said in first.statement
    assert first.interval is not None
    assert first.interval[0] <= first.effect <= first.interval[1]
    assert first.p <= 0.05
    assert first.baseline


def test_a_healthy_network_gets_none_of_as_many_images_as_would_show_a_unit_that_can_go() -> None:
    analysis = measured(healthy, 360)
    findings = analysis.findings()
    assert findings.found == ()
    kinds = ("dead-block", "over-smoothing", "attention-collapse", "miscalibration", "units", "depth")
    assert findings.tests == dict(zip(kinds, (3, 3, 2, 1, 6, 3), strict=True))


def test_three_images_are_no_finding_however_bad_the_network(tmp_path: Any) -> None:
    analysis = measured(collapsed, 3, chosen_metrics(None))
    assert analysis.findings().found == ()
    assert "no batch of 4 images" in analysis.not_applicable["cka"]
    ReportWriter(tmp_path).write([analysis])
    assert "No finding." in (tmp_path / "index.html").read_text()


def test_logits_that_are_not_finite_are_one_error() -> None:
    def broken(model: Any) -> None:
        torch.nn.init.constant_(model.head.bias, float("nan"))

    for names in (("confidence",), ("lesions",)):
        with pytest.raises(InputError, match="logits of 6 of 6 images are not finite"):
            measured(broken, 6, names)


def test_logits_that_are_not_finite_are_wrong_where_the_network_or_the_image_was_changed() -> None:
    """NumPy's argmax of NaN is 0: a network that breaks down would know class 0."""
    counter = AccuracyCounter()
    logits = np.array([[np.nan, np.nan], [np.nan, 1], [np.inf, 0], [1, 0], [1, 0]], np.float32)
    counter.add("lesion", logits, np.array([0, 0, 0, 0, 1]))
    assert counter.correct("lesion").tolist() == [False, False, False, True, False]
    with pytest.raises(InputError, match="logits of 3 of 5 images are not finite"):
        counter.add(None, logits, np.zeros(5, np.int64))


def test_what_differs_between_two_networks_is_what_was_changed() -> None:
    @torch.no_grad()
    def unsure(model: Any) -> None:
        for parameter in model.head.parameters():
            parameter /= 10

    one, other = (measured(change, 120, ("confidence", "over-smoothing")) for change in (healthy, unsure))
    found = {each.quantity: each for each in differences(one.results, other.results)}
    assert {name for name, each in found.items() if each.significant} == {"NLL", "ECE"}
    assert found["accuracy"].difference == 0
    low, high = found["NLL"].interval
    assert 0 < low < found["NLL"].difference < high
    before, after = (record.results["confidence"].ece for record in (one, other))  # type: ignore[attr-defined]
    assert found["ECE"].difference == pytest.approx(after - before, abs=1e-4)
    assert not any(each.significant for each in differences(one.results, one.results))


def test_chance_makes_a_finding_in_at_most_one_of_twenty_families() -> None:
    """p values of healthy networks are uniform; both forms of a rule, and all rules together, keep to 5 %."""
    generator = np.random.default_rng(0)

    def rule(kind: str, tests: int, *, in_order: bool) -> Rule:
        finding = Finding(kind="", statement="", effect=0, interval=None, unit="", baseline="", p=1, metric="")
        return Rule(
            kind,
            ("x",),
            lambda _: dict(zip("abcdefgh", generator.random(tests), strict=False)),
            lambda *_: finding,
            in_order,
        )

    rules = rule("one", 8, in_order=False), rule("two", 8, in_order=True), rule("three", 1, in_order=False)
    wrong = sum(bool(find({"x": Record()}, rules).found) for _ in range(4000))
    assert 0.03 < wrong / 4000 < 0.06


def test_an_onset_goes_back_until_a_layer_does_not_follow() -> None:
    stated: list[list[str]] = []

    def rule(kind: str, p_values: dict[str, float]) -> Rule:
        return Rule(kind, ("x",), lambda _: p_values, lambda _, subjects: stated.append([*subjects]), in_order=True)

    p_values = {"last": 0.001, "before": 0.02, "gap": 0.04, "first": 0.001}  # two chains: each may err in 1 of 40
    found = find(
        {"x": Record()}, (rule("chain", p_values), rule("none", {"last": 0.03, "before": 0.0}), rule("no", {}))
    )
    assert stated == [["last", "before"], ["last", "before"]]
    assert found.tests == {"chain": 4, "none": 2, "no": 0}
    # Of each chain the first test alone has a share of the 5 %: two tests, not four.
    find({"x": Record()}, (rule("one", {"last": 0.02, "before": 0.04}), rule("two", {"last": 0.5, "before": 0.6})))
    assert stated[2:] == [["last"]]


def test_p_of_an_onset_is_that_of_its_weakest_layer() -> None:
    """61 of 100 images at blocks.1 are less sure than 100 of 100 at blocks.2, and the onset says both."""
    record = OverSmoothing(
        images=100,
        threshold=0.9,
        embedding=0.1,
        cos_sim={"blocks.0": 0.5, "blocks.1": 0.91, "blocks.2": 0.99},
        smoothed={"blocks.0": 10, "blocks.1": 61, "blocks.2": 100},
        dc_share={},
        longest={},
        attention_std={},
    )
    (found,) = find({"over-smoothing": record}, RULES).found
    assert "begins at blocks.1" in found.statement
    ways = sum(comb(100, count) for count in range(61, 101))
    assert found.p == pytest.approx(ways / 2**100)


def test_holm_and_the_intervals_are_those_of_the_literature() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    values = np.random.default_rng(0).normal(size=400)
    ((low, high),) = mean_interval(values).values()
    error = values.std(ddof=1) / 20
    assert (low, high) == pytest.approx((values.mean() - 1.96 * error, values.mean() + 1.96 * error), abs=0.15 * error)
    assert mean_interval(values[:9]) == {}


def test_paired_intervals_hold_what_they_promise() -> None:
    """95 of 100 hold the true change, of pairs that are wrong together more often than apart."""
    generator = np.random.default_rng(0)
    counts = generator.multinomial(200, (0.05, 0.02, 0.93), size=2000)
    held = [low <= -0.03 <= high for low, high in (paired_change(int(b), int(c), 200) for b, c, _ in counts)]
    assert 0.93 < np.mean(held) < 0.98


@pytest.mark.parametrize(("lost", "gained"), [(0, 0), (1, 4)])
def test_the_interval_of_a_difference_of_accuracy_is_that_of_pairs(lost: int, gained: int) -> None:
    """Wald's with half a pair more in each cell of the table; where no answer differs it still has a width."""
    right = np.arange(50) < 30
    other = right ^ (np.arange(50) < lost) ^ (np.arange(50) >= 50 - gained)
    records = [Measured(per_image={"accuracy": tuple(answers.astype(float))}) for answers in (right, other)]
    (found,) = differences({"confidence": records[0]}, {"confidence": records[1]})
    b, c, n = lost + 0.5, gained + 0.5, 52
    half = 1.959964 * np.sqrt(b + c - (c - b) ** 2 / n) / n
    assert found.difference == pytest.approx((gained - lost) / 50)
    assert found.interval == pytest.approx(((c - b) / n - half, (c - b) / n + half))
    assert not found.significant


def test_a_perfectly_calibrated_network_is_called_miscalibrated_one_time_in_twenty() -> None:
    generator = np.random.default_rng(0)
    top = generator.uniform(0.5, 1, 100)
    probabilities = np.stack([top, 1 - top], axis=1)
    p_values = [confidence(probabilities, (generator.random(100) > top).astype(int)).ece_p for _ in range(60)]
    assert 0.3 < np.mean(np.array(p_values) < 0.5) < 0.7
    assert np.mean(np.array(p_values) < 0.05) <= 0.1


def test_one_class_is_calibrated_and_has_no_temperature() -> None:
    logits, labels = np.zeros((20, 1)), np.zeros(20, dtype=int)
    found = confidence(np.ones((20, 1)), labels)
    assert (found.ece, found.ece_p, found.mistakes) == (0, 1, ())
    assert temperature_scaling(logits, labels).interval("temperature") is None
