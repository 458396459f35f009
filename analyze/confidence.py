"""How far a classifier's confidence can be trusted, and temperature scaling (Guo et al., arXiv 1706.04599)."""

import math

import numpy as np
import numpy.typing as npt
from scipy import optimize

from vitx.core.calibration import (
    ECE_BINS,
    Float64Array,
    brier_score,
    calibration_error,
    classification_metrics,
    confidence_bins,
    softmax,
)
from vitx.core.errors import InputError
from vitx.core.files import Record

CERTAIN = 0.9
TEMPERATURES = (0.01, 100.0)
_Logits = npt.NDArray[np.floating]
_Labels = npt.NDArray[np.integer]


class ReliabilityBin(Record):
    """Images whose confidence is in (lower, upper]; the first bin includes 0. Means are None without images."""

    lower: float
    upper: float
    count: int
    confidence: float | None
    accuracy: float | None


class Confidence(Record):
    """What `confidence` measures; those of "90" are None where no image is left to take the share of."""

    images: int
    nll: float
    accuracy: float
    brier: float
    ece: float
    signed_ece: float
    acc_90: float | None
    unc_90: float | None
    iou: float
    iou_90: float | None
    freq_90: float
    bins: tuple[ReliabilityBin, ...]


class TemperatureScaling(Record):
    """Dividing logits by `temperature`, and what that does to images it was not fitted on.

    `temperature` is fitted on all images, `temperatures_of_halves` on the even and on the odd ones; `nll` and `ece` are
    of logits as they are, the `scaled_` ones of each half divided by the temperature of the other.
    """

    images: int
    temperature: float
    temperatures_of_halves: tuple[float, float]
    nll: float
    scaled_nll: float
    ece: float
    scaled_ece: float


def confidence(probabilities: _Logits, labels: _Labels, *, bins: int = ECE_BINS) -> Confidence:
    """Measure probabilities (N, C) against labels (N,). The confidence of an image is its largest probability.

    - nll: −mean log p_y, nats; brier: mean ‖p − onehot(y)‖². Both reward right and honest; smaller is better.
    - ece: Σ_b n_b/N |accuracy_b − confidence_b| over equal bins; signed_ece without the bars, negative when
      overconfident.
    - acc_90: accuracy of the images that are certain, above 0.9; freq_90: their share.
    - unc_90: of the wrong images, the share that is not certain. 1 is best: every error is announced.
    - iou: mean over the labels' classes of |predicted ∩ true| / |predicted ∪ true|; iou_90: of the certain images.

    Park & Kim (arXiv 2202.06709) measure these; their code counts images by (lo, hi] and averages confidences by
    [lo, hi), here one rule, (lo, hi], holds for both. Raises InputError when rows are no distributions, or labels are
    no classes of them.
    """
    probabilities = np.asarray(probabilities, dtype=np.float64)
    _require_labels(probabilities, labels)
    if probabilities.min() < 0 or np.abs(probabilities.sum(axis=1) - 1).max() > 1e-3:
        raise InputError("rows of probabilities must be at least 0 and sum to 1: pass softmax(logits)")
    top = probabilities.max(axis=1)
    predicted = probabilities.argmax(axis=1)
    correct = predicted == labels
    certain = top > CERTAIN
    of_label = probabilities[np.arange(len(labels)), labels]
    return Confidence(
        images=len(labels),
        nll=-float(np.log(np.maximum(of_label, np.finfo(np.float64).tiny)).mean()),  # an underflow is not infinite
        accuracy=float(correct.mean()),
        brier=brier_score(probabilities, labels),
        ece=calibration_error(probabilities, labels, bins),
        signed_ece=calibration_error(probabilities, labels, bins, signed=True),
        acc_90=_share(correct[certain]),
        unc_90=_share(~certain[~correct]),
        iou=_mean_iou(predicted, labels),
        iou_90=_mean_iou(predicted[certain], labels[certain]) if certain.any() else None,
        freq_90=float(certain.mean()),
        bins=_reliability(top, correct, bins),
    )


def fit_temperature(logits: _Logits, labels: _Labels) -> float:
    """The T > 0 that minimises the NLL of softmax(logits / T), logits (N, C) and labels (N,).

    The NLL is convex in 1/T, so its derivative, mean(E_p[z] − z_y), has one root. Where that lies beyond 0.01 or 100,
    the bound is returned: a network that is never wrong would have T = 0, one worse than chance ∞. Above 1 the network
    was overconfident. Accuracy does not change. Raises InputError for labels that are no classes of the logits.
    """
    logits = np.asarray(logits, dtype=np.float64)
    _require_labels(logits, labels)
    if not np.isfinite(logits).all():
        raise InputError("logits must be finite")
    of_label = logits[np.arange(len(labels)), labels]

    def slope(log_inverse: float) -> float:
        return float(((softmax(logits * math.exp(log_inverse)) * logits).sum(axis=1) - of_label).mean())

    low, high = (-math.log(bound) for bound in reversed(TEMPERATURES))
    if slope(low) >= 0:
        return TEMPERATURES[1]
    if slope(high) <= 0:
        return TEMPERATURES[0]
    return math.exp(-optimize.brentq(slope, low, high, xtol=1e-10))


def temperature_scaling(logits: _Logits, labels: _Labels) -> TemperatureScaling:
    """Fit a temperature on the even images and apply it to the odd ones, and the other way round.

    `scaled_ece` well below `ece` says that one number repairs the confidence; as it is, it says that the error is not
    one of scale. Raises InputError for fewer than two images.
    """
    if len(labels) < 2:
        raise InputError(
            f"{len(labels)} images: expected at least 2, one to fit a temperature on, one to measure it on"
        )
    halves = (fit_temperature(logits[::2], labels[::2]), fit_temperature(logits[1::2], labels[1::2]))
    scaled = np.array(logits, dtype=np.float64)
    scaled[::2] /= halves[1]
    scaled[1::2] /= halves[0]
    before, after = classification_metrics(logits, labels), classification_metrics(scaled, labels)
    return TemperatureScaling(
        images=len(labels),
        temperature=fit_temperature(logits, labels),
        temperatures_of_halves=halves,
        nll=before["nll"],
        scaled_nll=after["nll"],
        ece=before["ece"],
        scaled_ece=after["ece"],
    )


def _require_labels(scores: _Logits, labels: _Labels) -> None:
    if scores.ndim != 2 or len(scores) != len(labels) or not len(labels):
        raise InputError(
            f"scores of shape {scores.shape} and {len(labels)} labels: expected (N, C) and N, at least one"
        )
    if labels.min() < 0 or labels.max() >= scores.shape[1]:
        raise InputError(f"labels from {labels.min()} to {labels.max()}: expected classes 0 to {scores.shape[1] - 1}")


def _share(flags: npt.NDArray[np.bool_]) -> float | None:
    return float(flags.mean()) if len(flags) else None


def _mean_iou(predicted: npt.NDArray[np.integer], labels: _Labels) -> float:
    ratios = []
    for label in np.unique(labels):
        said, true = predicted == label, labels == label
        ratios.append((said & true).sum() / (said | true).sum())
    return float(np.mean(ratios))


def _reliability(top: Float64Array, correct: npt.NDArray[np.bool_], bins: int) -> tuple[ReliabilityBin, ...]:
    bin_of_image = confidence_bins(top, bins)
    found = []
    for index in range(bins):
        inside = bin_of_image == index
        found.append(
            ReliabilityBin(
                lower=index / bins,
                upper=(index + 1) / bins,
                count=int(inside.sum()),
                confidence=float(top[inside].mean()) if inside.any() else None,
                accuracy=_share(correct[inside]),
            )
        )
    return tuple(found)
