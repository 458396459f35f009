"""Calibration against the reference numbers of docs/maths.md §5.2."""

import numpy as np
import pytest

from reference import LABELS, PROBABILITIES
from vitx.core.probabilities import (
    brier_score,
    calibration_error,
    classification_metrics,
    confidence_bins,
    confidences,
    log_softmax,
    margins,
    softmax,
    top_k,
    wilson_interval,
)


def test_calibration_reference_numbers() -> None:
    assert calibration_error(PROBABILITIES, LABELS) == pytest.approx(0.486667, abs=1e-6)
    assert calibration_error(PROBABILITIES, LABELS, signed=True) == pytest.approx(0, abs=1e-12)
    assert brier_score(PROBABILITIES, LABELS) == pytest.approx(0.627433, abs=1e-6)
    metrics = classification_metrics(np.log(PROBABILITIES), LABELS)
    assert metrics["nll"] == pytest.approx(1.174101, abs=1e-6)
    assert metrics["top1"] == pytest.approx(0.666667, abs=1e-6)
    assert metrics["ece"] == pytest.approx(0.486667, abs=1e-6)


def test_bins_are_open_below_and_closed_above() -> None:
    # .7 belongs to (.6, .7]: beside .65 the errors +.3 and −.65 cancel in part, apart they would add up.
    probabilities = np.array([[0.7, 0.3], [0.65, 0.35]])
    together = calibration_error(probabilities, np.array([0, 1]), bins=10)
    assert together == pytest.approx(abs(0.3 - 0.65) / 2)
    assert calibration_error(np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([0, 1])) == 0


def test_softmax_of_huge_logits_is_finite() -> None:
    logits = np.array([[1e4, 0, -1e4], [3, 3, 3]], dtype=np.float32)
    np.testing.assert_allclose(softmax(logits).sum(axis=1), 1)
    assert np.isfinite(log_softmax(logits)).all()
    assert softmax(logits)[1] == pytest.approx(1 / 3)


def test_the_probability_of_every_class_is_the_exponential_of_its_logarithm() -> None:
    logits = np.random.default_rng(0).normal(0, 5, (20, 30)).astype(np.float32)
    np.testing.assert_allclose(softmax(logits), np.exp(log_softmax(logits)), rtol=1e-13)


@pytest.mark.parametrize("classes", [1, 2, 7, 1000])
def test_the_best_are_those_of_a_whole_sort(classes: int) -> None:
    rng = np.random.default_rng(0)
    tied = rng.integers(-3, 3, (20, classes)).astype(np.float32)
    for values in (tied, rng.normal(size=(20, classes))):
        for k in {1, min(5, classes), classes, 2 * classes}:
            assert top_k(values, k).tolist() == np.argsort(-values, axis=1, kind="stable")[:, :k].tolist()


def test_margins_are_of_the_largest_logit_or_of_a_given_one() -> None:
    logits = np.array([[1, 4, 2.5], [7, 7, -1], [-3, -8, -5]], dtype=np.float32)
    np.testing.assert_array_equal(margins(logits), [1.5, 0, 2])
    np.testing.assert_array_equal(margins(logits, np.array([0, 2, 1])), [-3, -8, -5])
    np.testing.assert_array_equal(margins(logits[:, :1]), [0, 0, 0])


def test_calibration_tells_right_from_wrong() -> None:
    """By hand: in the bin of .9 one right and one wrong, .1 − .9; in that of .55 one right, .45."""
    probabilities = np.array([[0.9, 0.1], [0.9, 0.1], [0.45, 0.55]])
    labels = np.array([0, 1, 1])
    assert calibration_error(probabilities, labels) == pytest.approx((0.8 + 0.45) / 3, abs=1e-12)
    assert calibration_error(probabilities, labels, signed=True) == pytest.approx((-0.8 + 0.45) / 3, abs=1e-12)
    # All wrong: as overconfident as it gets. Right and wrong swapped would be .1.
    sure = np.array([[0.9, 0.1], [0.9, 0.1]])
    assert calibration_error(sure, np.array([1, 1])) == pytest.approx(0.9, abs=1e-12)
    assert calibration_error(sure, np.array([1, 1]), signed=True) == pytest.approx(-0.9, abs=1e-12)
    assert calibration_error(sure, np.array([0, 0]), signed=True) == pytest.approx(0.1, abs=1e-12)


def test_the_calibration_error_equals_a_loop_over_bins() -> None:
    rng = np.random.default_rng(1)
    probabilities = softmax(rng.normal(0, 2, (400, 5)))
    labels = rng.integers(0, 5, 400)
    expected = 0.0
    for number in range(15):
        low, high = number / 15, (number + 1) / 15
        inside = [row for row in range(400) if low < probabilities[row].max() <= high]
        if inside:
            accuracy = sum(int(probabilities[row].argmax() == labels[row]) for row in inside) / len(inside)
            confidence = sum(probabilities[row].max() for row in inside) / len(inside)
            expected += len(inside) / 400 * abs(accuracy - confidence)
    assert calibration_error(probabilities, labels) == pytest.approx(expected, abs=1e-12)


def test_the_edges_of_the_bins() -> None:
    edge = 1 / 15
    confidence = np.array([0.0, edge, np.nextafter(edge, 1), 14 / 15, np.nextafter(14 / 15, 1), 1.0])
    assert confidence_bins(confidence).tolist() == [0, 0, 1, 13, 14, 14]
    assert confidence_bins(np.array([0.1, 0.10001, 0.5, 0.9, 0.91]), bins=10).tolist() == [0, 1, 4, 8, 9]


def test_metrics_of_three_images_by_hand() -> None:
    """Probabilities ⅘ and ⅕; right, wrong, right."""
    logits = np.log(np.array([[0.8, 0.2], [0.8, 0.2], [0.2, 0.8]], dtype=np.float64))
    metrics = classification_metrics(logits, np.array([0, 1, 1]))
    assert set(metrics) == {"top1", "top5", "nll", "ece", "brier"}
    assert metrics["top5"] == 1.0, "of two classes"
    assert metrics["top1"] == pytest.approx(2 / 3, abs=1e-12)
    assert metrics["nll"] == pytest.approx(-(2 * np.log(0.8) + np.log(0.2)) / 3, abs=1e-12)
    assert metrics["ece"] == pytest.approx(abs(2 / 3 - 0.8), abs=1e-12)
    assert metrics["brier"] == pytest.approx((0.04 + 0.04 + 0.64 + 0.64 + 0.04 + 0.04) / 3, abs=1e-12)


def test_top5_of_eight_classes_by_hand() -> None:
    logits = np.tile(np.arange(8.0), (4, 1))  # the best five are the classes 7 to 3
    assert classification_metrics(logits, np.array([7, 3, 2, 5]))["top5"] == 0.75


def test_confidences_are_the_largest_probabilities_and_one_where_a_logit_is_not_finite() -> None:
    logits = np.random.default_rng(2).normal(0, 5, (50, 7)).astype(np.float32)
    np.testing.assert_allclose(confidences(logits), softmax(logits).max(axis=1), rtol=1e-6)
    wrong = np.array([[1, np.nan], [np.inf, 0], [1e4, -1e4], [2, 2]], dtype=np.float32)
    assert confidences(wrong).tolist() == [1.0, 1.0, 1.0, 0.5]
    assert confidences(wrong).dtype == np.float64


def test_the_labels_of_a_score_are_not_changed() -> None:
    probabilities = np.array([[0.25, 0.75]])
    assert brier_score(probabilities, np.array([0])) == pytest.approx(2 * 0.75**2)
    assert probabilities.tolist() == [[0.25, 0.75]]
    logits = np.array([[1.0, 4.0]])
    assert margins(logits).tolist() == [3.0]
    assert logits.tolist() == [[1.0, 4.0]]


@pytest.mark.parametrize(
    ("events", "trials", "low", "high"),
    [(15, 148, 0.0624, 0.1605), (81, 263, 0.2553, 0.3662), (0, 20, 0.0, 0.1611), (20, 20, 0.8389, 1.0)],
)
def test_wilsons_interval(events: int, trials: int, low: float, high: float) -> None:
    """The first three are examples of Newcombe (1998), table I, method 3."""
    assert wilson_interval(events, trials) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize(("events", "trials"), [(-1, 3), (4, 3), (0, 0)])
def test_an_interval_of_impossible_counts(events: int, trials: int) -> None:
    with pytest.raises(ValueError, match="expected 0 ≤ events ≤ trials and trials ≥ 1"):
        wilson_interval(events, trials)
