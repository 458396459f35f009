"""What each finding says, word for word, of records that were written by hand; and what differs, of a few numbers."""

from typing import Any

import numpy as np
import pytest
from scipy import stats

from vitx.analyze.findings.differences import differences
from vitx.analyze.findings.finding import Finding, effect_text, find, p_text
from vitx.analyze.findings.rules import RULES
from vitx.analyze.intervals import Interval, Measured, paired_change, resample_weights
from vitx.analyze.metrics.attention_collapse import AttentionCollapse
from vitx.analyze.metrics.confidence import Confidence
from vitx.analyze.metrics.lesions import Lesion, Lesions, Removal
from vitx.analyze.metrics.over_smoothing import OverSmoothing
from vitx.analyze.metrics.residual_update import ResidualUpdate


def only(metric: str, record: Measured) -> Finding:
    (found,) = find({metric: record}, RULES).found
    assert found.metric == metric
    return found


def test_dead_blocks_are_listed_and_the_largest_update_is_told() -> None:
    record = ResidualUpdate(
        images=20,
        threshold=0.01,
        update={"a": 0.5, "b": 0.002, "c": 0.004, "d": 0.003, "e": 0.3},
        unchanged={"a": 0, "b": 20, "c": 20, "d": 19, "e": 0},
        intervals={"update": {"b": (0.001, 0.002), "c": (0.003, 0.005)}},
    )
    found = only("residual-update", record)
    assert found.kind == "dead-block"
    assert found.statement == "Dead: b, c and d. Tokens leave as they came."
    assert (found.effect, found.interval) == (0.004, (0.003, 0.005))
    assert found.unit == "length of the update over that of the token"
    assert found.baseline == "the other blocks' median, 0.4"
    assert found.p == pytest.approx(21 / 2**20 * 3)  # the third of five tests
    assert effect_text(found) == "0.004 [0.003, 0.005] length of the update over that of the token"
    alone = ResidualUpdate(images=20, threshold=0.01, update={"a": 0.002}, unchanged={"a": 20})
    found = only("residual-update", alone)
    assert (found.statement, found.baseline) == (
        "Dead: a. Tokens leave as they came.",
        "no other block is alive",
    )
    assert found.interval is None
    assert found.p == pytest.approx(2**-20)


@pytest.mark.parametrize(("embedding", "before"), [(None, ""), (0.123, ", 0.123 before the first block")])
def test_an_onset_of_smoothing_is_told_with_its_bound(embedding: float | None, before: str) -> None:
    record = OverSmoothing(
        images=20,
        threshold=0.9,
        embedding=embedding,
        cos_sim={"a": 0.95, "b": 0.5, "c": 0.93, "d": 0.99},
        smoothed={"a": 20, "b": 0, "c": 18, "d": 20},
        dc_share={},
        longest={},
        attention_std={},
        intervals={"cos_sim": {"c": (0.92, 0.94), "d": (0.98, 1)}},
    )
    found = only("over-smoothing", record)
    assert found.kind == "over-smoothing"
    assert found.statement == "Over-smoothing begins at c: to the end, d, the patch tokens of an image are nearly one."
    assert (found.effect, found.interval) == (0.93, (0.92, 0.94))
    assert found.unit == "mean cosine of different patches after c"
    assert found.baseline == f"bound 0.9{before}"
    assert found.p == pytest.approx(211 / 2**20)  # 18 of 20 or more: 190 + 20 + 1 ways


def collapse(similarities: tuple[float, ...], repeated: tuple[int, ...], **more: Any) -> AttentionCollapse:
    layers = tuple("abcdefgh"[: len(similarities) + 1])
    matrix = np.eye(len(layers))
    matrix[np.arange(len(layers) - 1), np.arange(1, len(layers))] = similarities
    return AttentionCollapse(
        layers=layers,
        columns=layers,
        matrix=tuple(map(tuple, matrix.tolist())),
        images=20,
        threshold=0.8,
        repeated=dict(zip(layers[1:], repeated, strict=True)),
        similar_blocks=0,
        head_diversity={},
        **more,
    )


def test_a_collapse_is_told_from_its_first_layer_to_its_last() -> None:
    intervals = {"neighbours": {"d": (0.86, 0.88)}}
    found = only("attention-collapse", collapse((0.25, 0.5, 0.875, 0.9), (20, 0, 20, 20), intervals=intervals))
    assert found.kind == "attention-collapse"
    assert (
        found.statement
        == "Attention collapse begins at d: its softmax maps repeat those of the layer before, and so on to e."
    )
    assert (found.effect, found.interval) == (0.875, (0.86, 0.88))
    assert found.unit == "cosine of the maps of d and of the layer before"
    assert found.baseline == "bound 0.8, mean of the layers before 0.375"
    mixed = collapse((0.9,), (20,), maps="mixed")
    found = find({"attention-collapse-mixed": mixed, "attention-collapse": collapse((0.1,), (0,))}, RULES).found[0]
    assert found.metric == "attention-collapse-mixed"
    assert found.statement == "Attention collapse begins at b: its mixed maps repeat those of the layer before."
    assert found.baseline == "bound 0.8"


def calibration(ece: float, signed: float, null: tuple[float, float], interval: Interval | None = None) -> Confidence:
    return Confidence(
        images=100,
        nll=1,
        accuracy=0.75,
        brier=0.5,
        ece=ece,
        signed_ece=signed,
        acc_90=None,
        unc_90=None,
        iou=0,
        iou_90=None,
        freq_90=0,
        bins=(),
        null_ece=null,
        ece_p=0.001,
        mistakes=(),
        intervals={"ece": {} if interval is None else {"": interval}},
    )


@pytest.mark.parametrize(
    ("signed", "how", "mean"),
    [
        (-0.125, "overconfident; mean confidence 87.5 %", 87.5),
        (0.125, "underconfident; mean confidence 62.5 %", 62.5),
        (0.0625, "miscalibrated both ways; mean confidence 68.8 %", 68.75),  # not above half of the ECE
        (-0.0625, "miscalibrated both ways; mean confidence 81.2 %", 81.25),
    ],
)
def test_miscalibration_is_told_in_points_and_by_its_direction(signed: float, how: str, mean: float) -> None:
    found = only("confidence", calibration(0.125, signed, (0.03, 0.05), (0.0625, 0.1875)))
    assert (found.kind, found.unit) == ("miscalibration", "points of ECE")
    assert found.statement == f"Miscalibrated: the network is {how}, accuracy 75.0 %."
    assert (found.effect, found.interval) == (12.5, (6.25, 18.75))
    assert found.baseline == "perfect calibration on so many images: 3.0, up to 5.0"
    assert found.p == 0.001


def test_an_ece_within_two_points_of_perfect_calibration_is_no_finding() -> None:
    assert find({"confidence": calibration(0.125, 0.1, (0.1055, 0.11))}, RULES).found == ()
    assert only("confidence", calibration(0.125, 0.1, (0.1045, 0.11))).interval is None


def lesions(units: dict[str, int], depth: dict[str, int]) -> Lesions:
    """By name, how many of the 800 right answers of 1,000 were lost; two were gained."""

    def removal(lost: int) -> dict[str, Any]:
        return {"accuracy": 0.8 - (lost - 2) / 1000, "lost": lost, "gained": 2}

    return Lesions(
        images=1000,
        accuracy=0.8,
        units={name: Lesion(kind="mlp", **removal(lost)) for name, lost in units.items()},
        depth={name: Removal(**removal(lost)) for name, lost in depth.items()},
    )


def test_units_that_can_go_are_told_with_the_worst_of_them() -> None:
    found = only("lesions", lesions({"a": 3, "b": 300, "c": 5, "d": 1}, {"x": 500}))
    assert found.kind == "units"
    assert found.statement == "3 of 4 units can go, each alone: a, c and d."
    assert found.effect == pytest.approx(-0.3)
    assert found.interval == pytest.approx([100 * end for end in paired_change(5, 2, 1000)])
    assert found.unit == "points, change of accuracy without c"
    assert found.baseline == "the whole network, 80.0 %; may cost 2 points"
    assert found.p == pytest.approx(3 * stats.binom.cdf(5, 1000, 0.02))  # the third of five tests
    assert only("lesions", lesions({"a": 3, "b": 300}, {"x": 500})).statement == "A unit can go: a."


def test_depth_that_can_go_is_told_from_its_first_block() -> None:
    found = only("lesions", lesions({"a": 300}, {"w": 2, "x": 400, "y": 4, "z": 2}))
    assert found.kind == "depth"
    assert found.statement == "Depth that buys nothing: the last 2 of 4 blocks (from y) can go together."
    assert found.effect == pytest.approx(-0.2)
    assert found.unit == "points, change of accuracy without y and all behind it"
    found = only("lesions", lesions({"a": 300}, {"x": 400, "y": 90, "z": 2}))
    assert found.statement == "Depth that buys nothing: the last block (from z) can go together."


def test_p_values_are_told_with_two_digits() -> None:
    assert [p_text(p) for p in (0.0, 0.00099, 0.001, 0.0123, 1.0)] == [
        *("p < 0.001", "p < 0.001", "p = 0.001", "p = 0.012", "p = 1")
    ]


def measured(**per_image: Any) -> dict[str, Measured]:
    return {"metric": Measured(per_image={name: tuple(map(float, values)) for name, values in per_image.items()})}


def test_a_mean_is_compared_by_the_bootstrap_of_the_paired_difference() -> None:
    one, change = np.arange(40.0), np.tile([0.5, 0.1, -0.1, 0.3], 10)
    (found,) = differences(measured(depth=one), measured(depth=one + change, other=one))
    (weights,) = resample_weights(40)
    means = weights @ change / 40
    assert found.quantity == "depth"
    assert (found.first, found.second) == pytest.approx((19.5, 19.7))
    assert found.difference == pytest.approx(0.2)
    assert found.interval == pytest.approx(np.quantile(means, (0.025, 0.975)))
    assert found.p == pytest.approx(2 * stats.norm.sf(means.mean() / means.std()))  # of no resample the sign is other
    assert found.significant
    fewer = differences(measured(depth=one[:9]), measured(depth=one[:9] + 1))
    assert fewer == []
    assert len(differences(measured(depth=one[:10]), measured(depth=one[:10] + 1))) == 1
    assert differences(measured(depth=one), measured(depth=one[:20])) == [], "other images"


@pytest.mark.parametrize("sign", [1, -1])
def test_a_difference_of_one_image_alone_is_not_significant(sign: int) -> None:
    """A third of the resamples lack it; the normal law, says less."""
    one, (weights,) = np.zeros(40), resample_weights(40)
    change = sign * np.array([20.0] + [-0.1, 0.1, -0.05] * 13)
    (found,) = differences(measured(depth=one), measured(depth=one + change))
    means = weights @ change / 40
    assert found.p == pytest.approx(2 * float((sign * means <= 0).mean()))
    assert found.p > 2 * stats.norm.sf(abs(means.mean()) / means.std())
    assert not found.significant


def test_an_equal_change_of_every_image_needs_no_chance() -> None:
    one = np.arange(40.0)
    (same,) = differences(measured(depth=one), measured(depth=one))
    assert (same.p, same.significant) == (1, False)
    (shifted,) = differences(measured(depth=one), measured(depth=one + 0.25))
    assert (shifted.p, shifted.significant, shifted.interval) == (0, True, (0.25, 0.25))


def test_accuracies_are_compared_by_mcnemars_exact_test() -> None:
    right = np.arange(50) < 40
    other = right ^ (np.arange(50) < 9) ^ (np.arange(50) >= 49)
    (found,) = differences(measured(accuracy=right), measured(accuracy=other))
    assert (found.first, found.second) == pytest.approx((0.8, 0.64))
    assert found.p == pytest.approx(2 * 11 / 2**10)  # one of ten, or none, either way
    assert found.interval == pytest.approx(paired_change(9, 1, 50))


def test_eces_are_compared_on_the_same_resamples() -> None:
    """By their definition, bin by bin, on each resample."""
    generator = np.random.default_rng(0)
    tops = generator.uniform(0.1, 1, (2, 30))
    rights = (generator.random((2, 30)) < 0.6).astype(float)
    records = [measured(confidence=top, accuracy=right) for top, right in zip(tops, rights, strict=True)]
    names = [each.quantity for each in differences(*records)]
    assert names == ["accuracy", "ECE"], "confidence is compared as the ECE alone"
    found = differences(*records)[-1]

    def ece(top: np.ndarray, right: np.ndarray, weights: np.ndarray) -> float:
        bins = np.ceil(top * 15)
        return float(
            sum(abs((weights * (right - top))[bins == number].sum()) for number in range(1, 16)) / weights.sum()
        )

    whole = [ece(top, right, np.ones(30)) for top, right in zip(tops, rights, strict=True)]
    assert (found.first, found.second) == pytest.approx(tuple(whole))
    (weights,) = resample_weights(30)
    changes = [ece(tops[1], rights[1], row) - ece(tops[0], rights[0], row) for row in weights]
    assert found.interval == pytest.approx(np.quantile(changes, (0.025, 0.975)))
