"""Calibration against the reference numbers of docs/maths.md §5.2."""

import numpy as np
import pytest

from vitx.core.probabilities import (
    brier_score,
    calibration_error,
    classification_metrics,
    log_softmax,
    margins,
    softmax,
)

PROBABILITIES = np.array(
    [
        [0.95, 0.03, 0.02],
        [0.55, 0.40, 0.05],
        [0.20, 0.45, 0.35],
        [0.10, 0.15, 0.75],
        [0.34, 0.33, 0.33],
        [0.02, 0.96, 0.02],
    ]
)
LABELS = np.array([0, 1, 1, 2, 0, 0])


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


def test_margins_are_of_the_largest_logit_or_of_a_given_one() -> None:
    logits = np.array([[1, 4, 2.5], [7, 7, -1], [-3, -8, -5]], dtype=np.float32)
    np.testing.assert_array_equal(margins(logits), [1.5, 0, 2])
    np.testing.assert_array_equal(margins(logits, np.array([0, 2, 1])), [-3, -8, -5])
    np.testing.assert_array_equal(margins(logits[:, :1]), [0, 0, 0])
