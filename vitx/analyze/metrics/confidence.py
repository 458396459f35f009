"""How far a classifier's confidence can be trusted (docs/maths.md §5.2).

Shape letters: N images, C classes.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vitx.analyze.accuracy import Labels
from vitx.analyze.activations import Activations
from vitx.analyze.intervals import (
    FEWEST,
    Interval,
    Measured,
    mean_interval,
    percentiles,
    resampled_means,
    rounded,
    share_text,
    with_interval,
)
from vitx.analyze.metric import Metric, MetricContext
from vitx.analyze.metric_figures import BARS, Curve, draw_curve
from vitx.core.errors import InputError
from vitx.core.files import Record
from vitx.core.panels import LINES, Results, panels
from vitx.core.probabilities import (
    ECE_BINS,
    Float64Array,
    brier_score,
    calibration_error,
    confidence_bins,
    log_softmax,
    softmax,
    wilson_interval,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CERTAIN = 0.9  # an image is certain above this confidence
MISTAKES = 12  # the surest wrong answers that are kept
LogitArray = npt.NDArray[np.floating]


class ReliabilityBin(Record):
    """Images whose confidence is in (lower, upper]; the first bin includes 0. Means are None without images."""

    lower: float
    upper: float
    count: int
    confidence: float | None
    accuracy: float | None


class Mistake(Record):
    """A wrong answer: the image's place in the set, its class, the predicted class, and how surely (0 to 1)."""

    image: int
    label: int
    predicted: int
    confidence: float


class Confidence(Measured):
    """What `confidence` measures: `nll` in nats, `brier` 0 to 2, the signed ECE −1 to 1, all else shares of 0 to 1.

    A "90" value is None where there is no image to take the share of. null_ece: the mean and the 97.5 % quantile of the
    ECE of a perfectly calibrated network with these confidences on so many images, ece_p the probability that its ECE
    is as large as this network's. mistakes: the wrong answers of largest confidence, the surest first.
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
    null_ece: tuple[float, float]
    ece_p: float
    mistakes: tuple[Mistake, ...]


def confidence(
    probabilities: LogitArray, labels: Labels, *, bins: int = ECE_BINS, log_probabilities: LogitArray | None = None
) -> Confidence:
    """Measure probabilities (N, C) against labels (N,). The confidence of an image is its largest probability.

    log_probabilities: log_softmax(logits), which says how small a probability is that underflowed to 0; without it such
    an image counts as 708 nats.

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
    # Said so that a NaN is refused too: no comparison with one is true.
    if not (probabilities.min() >= 0 and np.abs(probabilities.sum(axis=1) - 1).max() <= 1e-3):
        raise InputError("rows of probabilities must be at least 0 and sum to 1: pass softmax(logits)")
    top = probabilities.max(axis=1)
    predicted = probabilities.argmax(axis=1)
    correct = predicted == labels
    certain = top > CERTAIN
    of_label = probabilities[np.arange(len(labels)), labels]
    if log_probabilities is None:
        log_probabilities = np.log(np.maximum(probabilities, np.finfo(np.float64).tiny))
    nll = 0.0 - np.asarray(log_probabilities, dtype=np.float64)[np.arange(len(labels)), labels]
    squares = np.square(probabilities).sum(axis=1) - 2 * of_label + 1
    ece = calibration_error(probabilities, labels, bins)
    null = null_calibration_errors(top, bins)
    wrong = np.flatnonzero(~correct)
    return Confidence(
        images=len(labels),
        nll=float(nll.mean()),
        accuracy=float(correct.mean()),
        brier=brier_score(probabilities, labels),
        ece=ece,
        signed_ece=calibration_error(probabilities, labels, bins, signed=True),
        acc_90=_share(correct[certain]),
        unc_90=_share(~certain[~correct]),
        iou=_mean_iou(predicted, labels),
        iou_90=_mean_iou(predicted[certain], labels[certain]) if certain.any() else None,
        freq_90=float(certain.mean()),
        bins=_reliability(top, correct, bins),
        null_ece=(float(null.mean()), float(np.quantile(null, 0.975))),
        ece_p=(1 + int((null >= ece - 1e-12).sum())) / (1 + len(null)),
        mistakes=tuple(
            Mistake(
                image=int(image),
                label=int(labels[image]),
                predicted=int(predicted[image]),
                confidence=float(top[image]),
            )
            for image in wrong[np.argsort(-top[wrong], kind="stable")][:MISTAKES]
        ),
        intervals={
            "accuracy": {"": wilson_interval(int(correct.sum()), len(labels))},
            "nll": mean_interval(nll),
            "brier": mean_interval(squares),
            "ece": ece_interval(top, correct, ece, bins),
        },
        per_image={"accuracy": rounded(correct), "NLL": rounded(nll), "confidence": rounded(top)},
    )


def null_calibration_errors(top: Float64Array, bins: int = ECE_BINS, seed: int = 0) -> Float64Array:
    """ECEs of networks that are right as often as they say, by their confidences (N,): answers drawn at random.

    An ECE of few images is above 0 for a perfect network too: this is what it is measured against.
    """
    order = np.argsort(top, kind="stable")
    ordered = top[order]
    _, starts = np.unique(confidence_bins(ordered, bins), return_index=True)
    draws = max(1999, min(4999, 20_000_000 // len(top)))
    generator, found = np.random.default_rng(seed), []
    piece = max(1, 2_000_000 // len(top))
    for first in range(0, draws, piece):
        right = generator.random((min(piece, draws - first), len(top))) < ordered
        found.append(np.abs(np.add.reduceat(right - ordered, starts, axis=1)).sum(axis=1) / len(top))
    return np.asarray(np.concatenate(found))


def ece_interval(
    top: Float64Array, correct: npt.NDArray[np.bool_], ece: float, bins: int = ECE_BINS
) -> dict[str, Interval]:
    """The basic bootstrap interval of the ECE, as {"": interval}; empty for fewer than ten images.

    Resampling adds once more what few images have added to the ECE, so percentiles are reflected at the estimate.
    """
    if len(top) < FEWEST:
        return {}
    gaps = (confidence_bins(top, bins)[:, None] == np.arange(bins)) * (correct - top)[:, None]
    ((low, high),) = percentiles(np.abs(resampled_means(gaps)).sum(axis=1, keepdims=True))
    return {"": (max(0.0, 2 * ece - high), max(0.0, 2 * ece - low))}


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
        logits = self.logits()
        return confidence(softmax(logits), self.labels, log_probabilities=log_softmax(logits))


def draw_confidence(results: Results) -> "Figure":
    records: Mapping[str, Confidence] = results
    figure, (axes, counts) = panels(2, height=3.9)
    axes.plot([0, 1], [0, 1], color="0.7", linewidth=1)
    for index, ((network, record), style) in enumerate(zip(records.items(), LINES, strict=False)):
        filled = [part for part in record.bins if part.count]
        values = [part.accuracy or 0.0 for part in filled]
        ends = [wilson_interval(round((part.accuracy or 0.0) * part.count), part.count) for part in filled]
        curve = Curve(values, ends)
        label = f"{network}, ECE {100 * record.ece:.1f} %"
        draw_curve(axes, [part.confidence or 0.0 for part in filled], curve, label, style)
        width = 1 / len(record.bins) / len(records)
        lefts = [part.lower + index * width for part in record.bins]
        bars = counts.bar(lefts, [part.count for part in record.bins], width, align="edge", **BARS[index % len(BARS)])
        if len(records) == 1:
            counts.bar_label(bars, [str(part.count or "") for part in record.bins], fontsize="x-small")
    axes.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1.02))
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.18))
    counts.set(xlabel="confidence", ylabel="images", xlim=(0, 1))
    return figure


def _confidence_line(found: Confidence) -> str:
    parts = (
        f"top-1 {share_text(found.accuracy, found.images)}",
        f"NLL {with_interval(found.nll, found.interval('nll'), '.3f')}",
        f"ECE {with_interval(found.ece, found.interval('ece'), '.1f', scale=100)} % "
        f"(perfect calibration: {100 * found.null_ece[0]:.1f} %, up to {100 * found.null_ece[1]:.1f} %)",
        f"Brier {with_interval(found.brier, found.interval('brier'), '.3f')}",
    )
    return ", ".join(parts)


CONFIDENCE_METRIC = Metric(
    title="Confidence and calibration",
    reading="Left: accuracy of the images of each bin of confidence, on the diagonal if the network is right as often "
    "as it says; below it, it is surer than it is right. Right: the images in each bin.",
    claim="Guo et al. (1706.04599): modern networks are overconfident.",
    precision="Wilson's for accuracies, bootstrap over images for the others; the ECE of perfect calibration is drawn "
    "from the network's own confidences",
    record=Confidence,
    line=_confidence_line,
    activation=ConfidenceMetric,
    labels=True,
    figure=draw_confidence,
)
