"""Softmax, the best classes, and how far probabilities can be trusted (docs/maths.md §5.2).

Every stage that makes probabilities of logits calls these functions, so training, analyses, server and prediction
report the same numbers. numpy alone: server and prediction have no torch.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vitx.core.errors import InputError

Float64Array = npt.NDArray[np.float64]
ECE_BINS = 15


def classification_metrics(logits: npt.NDArray[np.floating], labels: npt.NDArray[np.integer]) -> dict[str, float]:
    """top1, top5, nll (nats), ece and brier of logits (N, C) against labels (N,)."""
    log_probabilities = log_softmax(logits)
    probabilities = np.exp(log_probabilities)
    return {
        "top1": float((logits.argmax(axis=1) == labels).mean()),
        "top5": float((top_k(logits, 5) == labels[:, None]).any(axis=1).mean()),
        "nll": 0.0 - float(log_probabilities[np.arange(len(labels)), labels].mean()),  # -0.0 would show its sign
        "ece": calibration_error(probabilities, labels),
        "brier": brier_score(probabilities, labels),
    }


def require_finite(logits: npt.NDArray[np.floating]) -> None:
    """Raise InputError for logits (B, C) of which some are not finite: nothing can be said of such a network."""
    bad = int((~np.isfinite(logits).all(axis=1)).sum())
    if bad:
        raise InputError(
            f"logits of {bad} of {len(logits)} images are not finite: expected numbers; look for weights that are not "
            "finite, or take another checkpoint (--checkpoint)"
        )


def wilson_interval(events: int, trials: int, z: float = 1.959964) -> tuple[float, float]:
    """The two-sided interval of a rate (Wilson 1927), 95 % by default: it stays within [0, 1] and works for few trials.

    (p + z²/2n ± z·√(p(1−p)/n + z²/4n²)) / (1 + z²/n). Raises ValueError unless 0 ≤ events ≤ trials and trials ≥ 1.
    """
    if not 0 <= events <= trials or trials < 1:
        raise ValueError(f"events={events}, trials={trials}: expected 0 ≤ events ≤ trials and trials ≥ 1")
    rate, share = events / trials, z * z / trials
    half = z * math.sqrt(rate * (1 - rate) / trials + share / (4 * trials))
    return max(0.0, (rate + share / 2 - half) / (1 + share)), min(1.0, (rate + share / 2 + half) / (1 + share))


def softmax(logits: npt.NDArray[np.floating]) -> Float64Array:
    """Probabilities float64 (N, C) of logits (N, C)."""
    exponentials = np.exp(below_largest(logits))
    return np.asarray(exponentials / exponentials.sum(axis=1, keepdims=True))


def log_softmax(logits: npt.NDArray[np.floating]) -> Float64Array:
    """Log probabilities float64 (N, C) of logits (N, C)."""
    shifted = below_largest(logits)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def below_largest(logits: npt.NDArray[np.floating]) -> Float64Array:
    """Each row less its largest logit, float64: it changes no probability and keeps `exp` from overflowing."""
    return np.asarray(np.asarray(logits, dtype=np.float64) - np.max(logits, axis=1, keepdims=True))


def top_k(values: npt.NDArray[np.floating], k: int) -> npt.NDArray[np.int64]:
    """The columns of each row's `k` largest values, best first, int64 (N, min(k, C)) of values (N, C).

    Equal values are in the order of their columns.
    """
    k = min(k, values.shape[1])
    # Of many classes only the best are sorted, unless the last of them ties with one that would be left out.
    best = values >= np.partition(values, -k, axis=1)[:, -k, None]
    if np.count_nonzero(best) != len(values) * k:
        return np.argsort(-values, axis=1, kind="stable")[:, :k]
    rows = np.arange(len(values))[:, None]
    columns = np.nonzero(best)[1].reshape(-1, k)
    return columns[rows, np.argsort(-values[rows, columns], axis=1, kind="stable")]


def top_predictions(logits: npt.NDArray[np.floating], labels: Sequence[str], k: int) -> list[dict[str, Any]]:
    """Label, score (the softmax) and index of the `k` best classes of one row of finite logits (C,), best first."""
    scores = softmax(logits[None])
    best = top_k(scores, k)[0]
    return [{"label": labels[index], "score": float(scores[0, index]), "index": int(index)} for index in best]


def confidences(logits: npt.NDArray[np.float32]) -> Float64Array:
    """The largest probability of each row, float64 (N,), of logits (N, C); 1 where a logit is not finite.

    For whole evaluation splits: no probability but the largest is made, and the exponentials stay in float32.
    """
    with np.errstate(invalid="ignore"):
        exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    largest = 1 / exponentials.sum(axis=1, dtype=np.float64)  # the row's largest exponential is exp(0)
    return np.asarray(np.where(np.isfinite(largest), largest, 1.0))


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
