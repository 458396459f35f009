"""Confidence against the reference numbers of Park & Kim's definitions, slow formulas and known temperatures."""

import json
import math

import numpy as np
import pytest
import torch
from scipy import optimize
from torch import nn

from reference import LABELS, PROBABILITIES
from run_fixture import digits_source
from vitx.analyze.activations import Activations
from vitx.analyze.intervals import resample_weights
from vitx.analyze.metric import AnalysisOptions, MetricContext
from vitx.analyze.metrics.confidence import ConfidenceMetric, confidence, null_calibration_errors
from vitx.analyze.metrics.temperature import fit_temperature, temperature_scaling
from vitx.core.errors import InputError
from vitx.core.probabilities import classification_metrics, log_softmax, softmax
from vitx.data.image_set import ImageSet


def noisy_logits(n: int = 400, classes: int = 5, overconfidence: float = 3.0) -> tuple[np.ndarray, np.ndarray]:
    """Labels drawn from softmax(z), and the logits `overconfidence`·z."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 1.5, (n, classes))
    labels = np.array([rng.choice(classes, p=row) for row in softmax(logits)])
    return overconfidence * logits, labels


def test_reference_numbers() -> None:
    measured = confidence(PROBABILITIES, LABELS)
    expected = {
        "nll": 1.174101,
        "accuracy": 0.666667,
        "brier": 0.627433,
        "ece": 0.486667,
        "signed_ece": 0,
        "acc_90": 0.5,
        "unc_90": 0.5,
        "iou": 0.611111,
        "iou_90": 0.5,
        "freq_90": 0.333333,
    }
    assert {name: getattr(measured, name) for name in expected} == pytest.approx(expected, abs=1e-6)
    json.dumps(measured.model_dump(mode="json"), allow_nan=False)


def test_a_network_that_is_sure_and_right_has_a_likelihood_without_a_sign() -> None:
    logits, labels = np.array([[1000.0, 0.0], [0.0, 1000.0]] * 6), np.array([0, 1] * 6)
    scaled = temperature_scaling(logits, labels)
    sure = confidence(softmax(logits), labels, log_probabilities=log_softmax(logits))
    ends = scaled.intervals["scaled_nll"][""]
    for nll in (sure.nll, scaled.nll, scaled.scaled_nll, *ends, classification_metrics(logits, labels)["nll"]):
        assert f"{nll:.3f}" == "0.000"


def test_bins_give_the_ece_again_and_hold_every_image_once() -> None:
    logits, labels = noisy_logits()
    measured = confidence(softmax(logits), labels, bins=10)
    assert [(entry.lower, entry.upper) for entry in measured.bins] == [(i / 10, (i + 1) / 10) for i in range(10)]
    assert sum(entry.count for entry in measured.bins) == measured.images == len(labels)
    gaps = [
        (entry.count, entry.accuracy - entry.confidence)
        for entry in measured.bins
        if entry.accuracy is not None and entry.confidence is not None
    ]
    assert sum(count * abs(gap) for count, gap in gaps) / len(labels) == pytest.approx(measured.ece)
    assert sum(count * gap for count, gap in gaps) / len(labels) == pytest.approx(measured.signed_ece)
    for entry in measured.bins:
        assert (entry.confidence is None) == (entry.count == 0)
        assert entry.confidence is None or entry.lower < entry.confidence <= entry.upper


def test_shares_and_overlaps_are_those_of_a_confusion_matrix() -> None:
    logits, labels = noisy_logits()
    probabilities = softmax(logits)
    predicted, certain = probabilities.argmax(axis=1), probabilities.max(axis=1) > 0.9

    def overlap(kept: np.ndarray) -> float:
        matrix = np.zeros((5, 5))
        np.add.at(matrix, (labels[kept], predicted[kept]), 1)
        occurring = matrix.sum(axis=1) > 0
        union = matrix.sum(axis=0) + matrix.sum(axis=1) - matrix.diagonal()
        return float((matrix.diagonal()[occurring] / union[occurring]).mean())

    measured = confidence(probabilities, labels)
    assert measured.iou == pytest.approx(overlap(np.full(len(labels), True)))
    assert measured.iou_90 == pytest.approx(overlap(certain))
    wrong = predicted != labels
    assert measured.unc_90 == pytest.approx((wrong & ~certain).sum() / wrong.sum())
    assert measured.acc_90 == pytest.approx((~wrong & certain).sum() / certain.sum())


def test_numbers_of_each_image_and_the_ece_of_perfect_calibration() -> None:
    """Answers drawn by the confidences themselves, one draw after the other, and the ECE of each by its bins."""
    logits, labels = noisy_logits(60)
    probabilities = softmax(logits)
    measured = confidence(probabilities, labels)
    top, right = probabilities.max(axis=1), probabilities.argmax(axis=1) == labels
    assert list(measured.per_image) == ["accuracy", "NLL", "confidence"]
    assert measured.per_image["confidence"] == pytest.approx(top, rel=1e-5)
    assert measured.per_image["NLL"] == pytest.approx(-np.log(probabilities[np.arange(60), labels]), rel=1e-5)
    assert measured.per_image["accuracy"] == tuple(right)
    ordered, generator = np.sort(top), np.random.default_rng(0)
    bins = np.ceil(15 * ordered)
    errors = []
    for _ in range(4999):
        drawn = generator.random(60) < ordered
        errors.append(sum(abs((drawn - ordered)[bins == number].sum()) for number in range(1, 16)) / 60)
    assert measured.null_ece == pytest.approx((np.mean(errors), np.quantile(errors, 0.975)))
    assert measured.ece_p == (1 + sum(error >= measured.ece - 1e-12 for error in errors)) / 5000
    assert len(null_calibration_errors(np.full(8000, 0.5))) == 2500
    assert len(null_calibration_errors(np.full(30_000, 0.5))) == 1999


def test_what_has_no_images_is_none() -> None:
    unsure = confidence(np.full((3, 4), 0.25), np.array([0, 0, 0]))
    assert (unsure.acc_90, unsure.iou_90, unsure.freq_90, unsure.unc_90) == (None, None, 0, None)
    assert confidence(np.full((3, 4), 0.25), np.array([1, 2, 0])).unc_90 == 1
    sure = confidence(np.eye(2), np.array([1, 1]))
    assert (sure.acc_90, sure.unc_90) == (0.5, 0)
    assert 300 < sure.nll < 400  # half of −log of the smallest float, not infinite


def test_a_very_sure_mistake_costs_all_its_nats() -> None:
    """Its probability is 0 in float64, its logarithm is not: −z_y + log Σ e^z by hand."""
    logits = np.array([[3000.0, 0.0, 0.0], [0.0, 5.0, 0.0]])
    context = MetricContext(digits_source("sure", nn.Identity()), labelled(1, 1), AnalysisOptions())
    metric = ConfidenceMetric(context)
    metric.add(Activations(2, {}, {}, {}, torch.tensor(logits)))
    assert metric.result().nll == pytest.approx((3000 + math.log(math.exp(5) + 2) - 5) / 2)
    assert metric.result().per_image["NLL"][0] == 3000
    assert confidence(softmax(logits), np.array([1, 1])).nll < 360  # of the probabilities alone no more is known


def labelled(*labels: int) -> ImageSet:
    """Images that are never read."""
    names = tuple(map(str, labels))
    return ImageSet("labels", ("0", "1", "2"), names, np.array(labels), lambda index: b"")


@pytest.mark.parametrize(
    ("probabilities", "labels", "message"),
    [
        (np.full((2, 2), 0.4), np.array([0, 1]), "sum to 1"),
        (np.array([[1.5, -0.5]]), np.array([0]), "at least 0"),
        (np.array([[0.5, 0.5], [np.nan, 1.0]]), np.array([0, 1]), "at least 0 and sum to 1"),
        (np.full((2, 2), 0.5), np.array([0, 2]), "labels from 0 to 2: expected classes 0 to 1"),
        (np.full((2, 2), 0.5), np.array([0]), "and 1 labels"),
        (np.empty((0, 2)), np.empty(0, int), "at least one"),
    ],
)
def test_bad_input_is_refused(probabilities: np.ndarray, labels: np.ndarray, message: str) -> None:
    with pytest.raises(InputError, match=message):
        confidence(probabilities, labels)


def test_temperature_is_the_minimum_and_scales_with_the_logits() -> None:
    logits, labels = noisy_logits()
    temperature = fit_temperature(logits, labels)
    assert temperature == pytest.approx(3, rel=0.15)

    def nll(value: float) -> float:
        return classification_metrics(logits / value, labels)["nll"]

    found = optimize.minimize_scalar(nll, bounds=(0.5, 10), method="bounded", options={"xatol": 1e-9})
    assert temperature == pytest.approx(found.x, rel=1e-5)
    assert fit_temperature(0.2 * logits, labels) == pytest.approx(0.2 * temperature)
    assert fit_temperature(logits + 7, labels) == pytest.approx(temperature)


def test_temperature_stays_in_its_bounds() -> None:
    never_wrong = np.tile(5 * np.eye(3), (4, 1))
    right = np.arange(12) % 3
    for labels, bound in ((right, 0.01), ((right + 1) % 3, 100)):
        assert fit_temperature(never_wrong, labels) == bound
        assert temperature_scaling(never_wrong, labels).interval("temperature") is None


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_have_no_temperature(value: float) -> None:
    with pytest.raises(InputError, match="logits must be finite"):
        fit_temperature(np.array([[0.0, value], [1.0, 2.0]]), np.array([0, 1]))


@pytest.mark.parametrize("level", [0.0, 0.1, -7.3])
@pytest.mark.parametrize("classes", [1, 3])
def test_a_network_that_says_the_same_of_every_class_has_no_temperature_but_one(level: float, classes: int) -> None:
    """At the bound of 100 it would be called overconfident."""
    labels = np.arange(12) % classes
    scaling = temperature_scaling(np.full((12, classes), level), labels)
    assert (scaling.temperature, scaling.temperatures_of_halves) == (1, (1, 1))
    assert scaling.interval("temperature") is None
    assert scaling.scaled_nll == scaling.nll == pytest.approx(math.log(classes))


@pytest.mark.parametrize("less", [0.0005, 0.005])
def test_the_interval_of_a_temperature_stays_in_its_bounds(less: float) -> None:
    """Half of the answers are wrong, by nearly as much as the others are right: T could be anything."""
    logits = np.zeros((20, 2))
    logits[:10, 0], logits[10:, 0] = 0.02, 0.02 * (1 - less)
    scaling = temperature_scaling(logits, np.repeat([0, 1], 10))
    assert 0.01 < scaling.temperature < 100
    assert scaling.interval("temperature") == (0.01, 100)


def test_the_interval_of_a_temperature_is_that_of_its_equation() -> None:
    """The sandwich of mean(E_p[z] − z_y) = 0 in 1/T, its slope by differences, on a logarithmic scale."""
    logits, labels = noisy_logits()
    scaling = temperature_scaling(logits, labels)
    inverse, n = 1 / scaling.temperature, len(labels)

    def terms(factor: float) -> np.ndarray:
        return np.asarray((softmax(factor * logits) * logits).sum(axis=1) - logits[np.arange(n), labels])

    slope = (terms(inverse + 1e-5).mean() - terms(inverse - 1e-5).mean()) / 2e-5
    half = 1.96 * terms(inverse).std() / slope / math.sqrt(n) / inverse
    expected = scaling.temperature * math.exp(-half), scaling.temperature * math.exp(half)
    assert scaling.interval("temperature") == pytest.approx(expected, rel=1e-6)
    assert temperature_scaling(logits[:10], labels[:10]).interval("temperature") is not None
    assert temperature_scaling(logits[:9], labels[:9]).interval("temperature") is None


def test_the_interval_of_an_ece_is_reflected_at_the_estimate() -> None:
    """By the definition, bin by bin, on each resample; of what is scaled as of what is not."""
    logits, labels = noisy_logits(60)
    even, odd = temperature_scaling(logits, labels).temperatures_of_halves
    scaled = logits / np.where(np.arange(60) % 2, even, odd)[:, None]
    (weights,) = resample_weights(60)
    for given, found, field in (
        (logits, confidence(softmax(logits), labels), "ece"),
        (scaled, temperature_scaling(logits, labels), "scaled_ece"),
    ):
        top, right = softmax(given).max(axis=1), given.argmax(axis=1) == labels
        bins = np.ceil(15 * top)
        resampled = sum(abs(weights @ ((bins == number) * (right - top))) / 60 for number in range(1, 16))
        low, high = np.quantile(resampled, (0.025, 0.975))
        ece = getattr(found, field)
        assert found.interval(field) == pytest.approx((max(0, 2 * ece - high), 2 * ece - low))


def test_scaling_repairs_images_it_was_not_fitted_on() -> None:
    logits, labels = noisy_logits()
    scaling = temperature_scaling(logits, labels)
    assert scaling.scaled_nll < 0.8 * scaling.nll
    assert scaling.scaled_ece < 0.5 * scaling.ece
    even, odd = scaling.temperatures_of_halves
    assert even == fit_temperature(logits[::2], labels[::2])
    halves = [classification_metrics(logits[i::2] / t, labels[i::2])["nll"] for i, t in ((0, odd), (1, even))]
    assert scaling.scaled_nll == pytest.approx(np.mean(halves))
    low, high = scaling.intervals["scaled_nll"][""]
    assert low < scaling.scaled_nll < high
    with pytest.raises(InputError, match="at least 2"):
        temperature_scaling(logits[:1], labels[:1])
