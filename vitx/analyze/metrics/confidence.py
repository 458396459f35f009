"""How far a classifier's confidence can be trusted (docs/maths.md §5.2).

Shape letters: N images, C classes.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vitx.analyze.accuracy import Labels
from vitx.analyze.activations import Activations
from vitx.analyze.metric import Metric, MetricContext, percent
from vitx.core.errors import InputError
from vitx.core.files import Record
from vitx.core.panels import LINES, Results, panels
from vitx.core.probabilities import ECE_BINS, Float64Array, brier_score, calibration_error, confidence_bins, softmax

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CERTAIN = 0.9  # an image is certain above this confidence
LogitArray = npt.NDArray[np.floating]


class ReliabilityBin(Record):
    """Images whose confidence is in (lower, upper]; the first bin includes 0. Means are None without images."""

    lower: float
    upper: float
    count: int
    confidence: float | None
    accuracy: float | None


class Confidence(Record):
    """What `confidence` measures: `nll` in nats, `brier` 0 to 2, the signed ECE −1 to 1, all else shares of 0 to 1.

    A "90" value is None where there is no image to take the share of.
    """

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


def confidence(probabilities: LogitArray, labels: Labels, *, bins: int = ECE_BINS) -> Confidence:
    """Measure probabilities (N, C) against labels (N,). The confidence of an image is its largest probability.

    - nll: −mean log p_y, nats; brier: mean ‖p − onehot(y)‖². Both are least for the true probabilities.
    - ece: Σ_b n_b/N |accuracy_b − confidence_b| over equal bins b (Guo et al., arXiv 1706.04599, eq. 3); signed_ece:
      without the bars, negative when overconfident.
    - acc_90: the accuracy of the certain images, those with confidence above 0.9; freq_90: their share.
    - unc_90: of the wrong images, the share that is not certain. 1 is best: no error is certain.
    - iou: mean over the labels' classes of |predicted ∩ true| / |predicted ∪ true|; iou_90: of the certain images.

    Park & Kim (arXiv 2202.06709) measure these. Their code counts the images of a bin by (lo, hi] and averages
    confidences over [lo, hi); here both are over (lo, hi]. Raises InputError for rows that are no distributions, and
    for labels that are no classes of them.
    """
    probabilities = np.asarray(probabilities, dtype=np.float64)
    require_labels(probabilities, labels)
    if probabilities.min() < 0 or np.abs(probabilities.sum(axis=1) - 1).max() > 1e-3:
        raise InputError("rows of probabilities must be at least 0 and sum to 1: pass softmax(logits)")
    top = probabilities.max(axis=1)
    predicted = probabilities.argmax(axis=1)
    correct = predicted == labels
    certain = top > CERTAIN
    of_label = probabilities[np.arange(len(labels)), labels]
    return Confidence(
        images=len(labels),
        nll=-float(np.log(np.maximum(of_label, np.finfo(np.float64).tiny)).mean()),  # finite for an underflow to 0
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


def require_labels(scores: LogitArray, labels: Labels) -> None:
    """Raise InputError unless scores are (N, C) and labels (N,) are classes of them, N at least 1."""
    if scores.ndim != 2 or len(scores) != len(labels) or not len(labels):
        raise InputError(
            f"scores of shape {scores.shape} and {len(labels)} labels: expected (N, C) and N, at least one"
        )
    if labels.min() < 0 or labels.max() >= scores.shape[1]:
        raise InputError(f"labels from {labels.min()} to {labels.max()}: expected classes 0 to {scores.shape[1] - 1}")


def _share(flags: npt.NDArray[np.bool_]) -> float | None:
    return float(flags.mean()) if len(flags) else None


def _mean_iou(predicted: npt.NDArray[np.integer], labels: Labels) -> float:
    ratios = []
    for label in np.unique(labels):
        is_predicted, is_true = predicted == label, labels == label
        ratios.append((is_predicted & is_true).sum() / (is_predicted | is_true).sum())
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


class LogitCollector:
    """Collects the logits (N, C) of the shared pass."""

    def __init__(self, context: MetricContext) -> None:
        self.labels, self._parts = context.images.labels, list[Any]()

    def add(self, batch: Activations) -> None:
        self._parts.append(batch.logits.cpu().numpy())

    def logits(self) -> Any:
        return np.concatenate(self._parts)


class ConfidenceMetric(LogitCollector):
    """`confidence` of the softmax of the logits (N, C)."""

    def result(self) -> Confidence:
        return confidence(softmax(self.logits()), self.labels)


def draw_confidence(results: Results) -> "Figure":
    records: Mapping[str, Confidence] = results
    figure, (axes,) = panels(1)
    axes.plot([0, 1], [0, 1], color="0.7", linewidth=1)
    for (network, record), style in zip(records.items(), LINES, strict=False):
        filled = [(part.confidence, part.accuracy) for part in record.bins if part.count]
        axes.plot(*zip(*filled, strict=True), label=f"{network}, ECE {100 * record.ece:.1f} %", markersize=4, **style)
    axes.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1.02))
    axes.legend(fontsize="small", loc="lower right")
    return figure


def _confidence_line(found: Confidence) -> str:
    return f"top-1 {percent(found.accuracy)}, NLL {found.nll:.3f}, ECE {percent(found.ece)}, Brier {found.brier:.3f}"


CONFIDENCE_METRIC = Metric(
    title="Confidence and calibration",
    reading="Below the diagonal the network is surer than it is right. ECE is the mean distance from the diagonal.",
    record=Confidence,
    line=_confidence_line,
    activation=ConfidenceMetric,
    labels=True,
    figure=draw_confidence,
)
