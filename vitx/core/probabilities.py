"""Probabilities and how far they can be trusted (docs/maths.md §5.2); numpy alone, so that every stage counts alike."""

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]
ECE_BINS = 15


def classification_metrics(logits: npt.NDArray[np.floating], labels: npt.NDArray[np.integer]) -> dict[str, float]:
    """top1, nll (nats), ece and brier of logits (N, C) against labels (N,)."""
    log_probabilities = log_softmax(logits)
    probabilities = np.exp(log_probabilities)
    return {
        "top1": float((logits.argmax(axis=1) == labels).mean()),
        "nll": -float(log_probabilities[np.arange(len(labels)), labels].mean()),
        "ece": calibration_error(probabilities, labels),
        "brier": brier_score(probabilities, labels),
    }


def softmax(logits: npt.NDArray[np.floating]) -> Float64Array:
    """Probabilities float64 (N, C) of logits (N, C)."""
    return np.asarray(np.exp(log_softmax(logits)))


def log_softmax(logits: npt.NDArray[np.floating]) -> Float64Array:
    """Log probabilities float64 (N, C) of logits (N, C)."""
    shifted = np.asarray(logits, dtype=np.float64) - np.max(logits, axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def margins(logits: npt.NDArray[np.floating], classes: npt.NDArray[np.integer] | None = None) -> Float64Array:
    """The logit of each row's class less the largest of its others, float64 (N,), of logits (N, C).

    classes: (N,), by default each row's largest. 0 where there is only one class.
    """
    if logits.shape[1] < 2:
        return np.zeros(len(logits))
    rows = np.arange(len(logits))
    others = logits.astype(np.float64)
    chosen = others.argmax(axis=1) if classes is None else classes
    given = others[rows, chosen]
    others[rows, chosen] = -np.inf
    return np.asarray(given - others.max(axis=1))


def calibration_error(
    probabilities: npt.NDArray[np.floating],
    labels: npt.NDArray[np.integer],
    bins: int = ECE_BINS,
    *,
    signed: bool = False,
) -> float:
    """Expected calibration error of probabilities (N, C) against labels (N,), over equal bins of the top confidence.

    Bins are (lo, hi], the first includes 0; one rule for counts, confidences and accuracies (docs/maths.md §5.2).
    `signed` keeps the sign of accuracy − confidence, so that over- and under-confidence cancel.
    """
    confidence = np.asarray(probabilities, dtype=np.float64).max(axis=1)
    correct = np.argmax(probabilities, axis=1) == labels
    bin_of_image = confidence_bins(confidence, bins)
    gaps = np.bincount(bin_of_image, weights=correct - confidence, minlength=bins)
    return float(gaps.sum() if signed else np.abs(gaps).sum()) / len(confidence)


def confidence_bins(confidence: Float64Array, bins: int = ECE_BINS) -> npt.NDArray[np.int64]:
    """The bin 0 … bins − 1 of each confidence (N,): (lo, hi], the first includes 0."""
    return np.searchsorted(np.arange(1, bins) / bins, confidence, side="left").astype(np.int64)


def brier_score(probabilities: npt.NDArray[np.floating], labels: npt.NDArray[np.integer]) -> float:
    """Mean over images of the squared distance of probabilities (N, C) from the one-hot labels (N,)."""
    distance = np.array(probabilities, dtype=np.float64)
    distance[np.arange(len(labels)), labels] -= 1
    return float((distance**2).sum(axis=1).mean())
