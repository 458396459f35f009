"""Every metric by name: what it needs, what it depends on, and how it is measured."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from vitx.analyze import measures
from vitx.analyze.activation_metrics import (
    ActivationMetric,
    AttentionCollapse,
    AttentionCollapseMetric,
    CKAMetric,
    FeatureSimilarityMetric,
    Fourier,
    FourierMetric,
    OverSmoothing,
    OverSmoothingMetric,
    SimilarityMatrix,
    Variance,
    VarianceMetric,
)
from vitx.analyze.adversarial import AdversarialRobustness
from vitx.analyze.confidence import Confidence, TemperatureScaling
from vitx.analyze.hessian import HessianDensity, HessianSpectrum
from vitx.analyze.landscape import LossLandscape
from vitx.analyze.lesions import Lesions
from vitx.analyze.measures import ConfidenceMetric, Measured, TemperatureMetric
from vitx.analyze.noise import FrequencyRobustness
from vitx.analyze.occlusion import Occlusion
from vitx.analyze.robustness import CorruptionRobustness
from vitx.analyze.trajectory import Trajectory
from vitx.core.files import Record

# Raised when a metric's definition changes: kept results of older ones are measured again.
VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One of `activation` (shares the pass over `streams` and `maps`) and `measure` is given.

    reading: how to read the figure. line: the result in a few words. options: names of Options' fields that it depends
    on, besides the batch size. default: measured unless others are asked for.
    """

    title: str
    reading: str
    record: type[Record]
    line: Callable[[Any], str]
    activation: Callable[[Measured], ActivationMetric] | None = None
    measure: Callable[[Measured], Record] | None = None
    streams: bool = False
    maps: bool = False
    labels: bool = False
    options: tuple[str, ...] = ()
    default: bool = True

    def collector(self, measured: Measured) -> ActivationMetric:
        assert self.activation is not None, "only of a metric that shares the pass"
        return self.activation(measured)


def _ends(values: Iterable[float]) -> str:
    """The first and the last of some values along the network."""
    first, *_, last = [*values] * 2
    return f"{first:.3g} → {last:.3g}"


def _over_smoothing_line(found: OverSmoothing) -> str:
    parts = {"CosSim": found.cos_sim, "attention std": found.attention_std}
    return ", ".join(f"{name} {_ends(layers.values())}" for name, layers in parts.items() if layers)


def _collapse_line(found: AttentionCollapse) -> str:
    alike = f"{found.similar_blocks} of {len(found.layers) - 1} layers above {found.threshold:g} to the one before"
    diversity = f"; 1 − cosine of heads {_ends(found.head_diversity.values())}" if found.head_diversity else ""
    return alike + diversity


def _matrix_line(found: SimilarityMatrix) -> str:
    value = found.matrix[0][-1]
    return f"{found.layers[0]} to {found.columns[-1]}: {'not comparable' if value is None else f'{value:.3g}'}"


def _fourier_line(found: Fourier) -> str:
    return f"highest frequency {_ends(unit.log_amplitude[-1] for unit in found.units.values())}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _confidence_line(found: Confidence) -> str:
    return f"top-1 {_percent(found.accuracy)}, NLL {found.nll:.3f}, ECE {_percent(found.ece)}, Brier {found.brier:.3f}"


def _temperature_line(found: TemperatureScaling) -> str:
    gain = f"NLL {found.nll:.3f} → {found.scaled_nll:.3f}, ECE {_percent(found.ece)} → {_percent(found.scaled_ece)}"
    return f"T = {found.temperature:.3g}: {gain}"


def _corruptions_line(found: CorruptionRobustness) -> str:
    name = min(found.accuracy, key=lambda key: sum(found.accuracy[key]))
    worst = sum(found.accuracy[name]) / len(found.accuracy[name])
    return f"{_percent(found.clean)} → {_percent(found.mean_accuracy)} on average, {_percent(worst)} under {name}"


def _noise_line(found: FrequencyRobustness) -> str:
    return f"clean {_percent(found.clean)}; lowest to highest band {_ends(100 * value for value in found.accuracy)} %"


def _occlusion_line(found: Occlusion) -> str:
    half = min(range(len(found.ratios)), key=lambda index: abs(found.ratios[index] - 0.5))
    parts = {"random": found.random, "most salient": found.most_salient, "least salient": found.least_salient}
    named = (f"{name} {_percent(values[half])}" for name, values in parts.items() if values is not None)
    return f"{_percent(found.clean)}; without {found.ratios[half]:.0%} of the patches: {', '.join(named)}"


def _attack_line(found: AdversarialRobustness) -> str:
    radius = f"ε = {255 * found.epsilons[-1]:.3g}/255"
    return f"{_percent(found.clean)}; {radius}: FGSM {_percent(found.fgsm[-1])}, PGD {_percent(found.pgd[-1])}"


def _hessian_line(found: HessianSpectrum) -> str:
    largest = max(value for batch in found.batches for value in batch.values)
    mean = "–" if found.mean_positive is None else f"{found.mean_positive:.3g}"
    return f"largest {largest:.3g}, mean of the positive {mean}, negative {_percent(found.negative_share)}"


def _density_line(found: HessianDensity) -> str:
    return f"nodes from {min(found.nodes):.3g} to {max(found.nodes):.3g}, {found.products} products"


def _landscape_line(found: LossLandscape) -> str:
    middle = len(found.axis) // 2
    edge = [value for row in (found.nll[0], found.nll[-1]) for value in row if value is not None]
    return f"NLL {found.nll[middle][middle]:.3f} at the weights, {min(edge):.3g} to {max(edge):.3g} at the edge"


def _trajectory_line(found: Trajectory) -> str:
    return f"{len(found.steps)} checkpoints, radius {_ends(found.radius)}"


def _lesions_line(found: Lesions) -> str:
    name, worst = min(found.units.items(), key=lambda item: item[1].accuracy)
    return f"{100 * found.accuracy:.1f} %; without {name} {100 * worst.accuracy:.1f} %"


METRICS: dict[str, Metric] = {
    "over-smoothing": Metric(
        title="Over-smoothing",
        reading="CosSim is the mean cosine of different patch tokens after each block: at 1 all patches say the same. "
        "The spread of attention over keys falls to 0 where attention looks at everything alike.",
        record=OverSmoothing,
        line=_over_smoothing_line,
        activation=lambda measured: OverSmoothingMetric(measured.source.model),
        streams=True,
        maps=True,
    ),
    "attention-collapse": Metric(
        title="Attention collapse",
        reading="Cosine of the attention maps of two layers, column by column. Deep layers that repeat the maps of the "
        "one before add little; 1 − cosine between heads says how much the heads of one layer differ.",
        record=AttentionCollapse,
        line=_collapse_line,
        activation=lambda measured: AttentionCollapseMetric(measured.options.similar_above),
        maps=True,
        options=("similar_above",),
    ),
    "feature-similarity": Metric(
        title="Feature similarity",
        reading="Cosine of the same token's vectors at two layers: near 1 a block hands on what it was given.",
        record=SimilarityMatrix,
        line=_matrix_line,
        activation=lambda measured: FeatureSimilarityMetric(measured.source.model),
        streams=True,
    ),
    "fourier": Metric(
        title="Fourier analysis",
        reading="Log amplitude of feature maps relative to the constant part. A falling curve along the network means "
        "that high frequencies are lost: attention is a low-pass filter, MLPs and convolutions are not.",
        record=Fourier,
        line=_fourier_line,
        activation=lambda measured: FourierMetric(measured.source.model),
        streams=True,
    ),
    "variance": Metric(
        title="Variance of feature maps",
        reading="Variance over space of what each unit hands on: attention lowers it, MLPs and convolutions raise it.",
        record=Variance,
        line=lambda found: _ends(found.variance.values()),
        activation=lambda measured: VarianceMetric(measured.source.model),
        streams=True,
    ),
    "cka": Metric(
        title="CKA between units",
        reading="Whether two layers tell images apart in the same way (1), whatever their widths and rotations.",
        record=SimilarityMatrix,
        line=_matrix_line,
        activation=lambda measured: CKAMetric(measured.source.model),
        streams=True,
    ),
    "lesions": Metric(
        title="Lesion study",
        reading="Accuracy with one unit removed, its shortcut left. Units whose removal changes nothing add nothing.",
        record=Lesions,
        line=_lesions_line,
        measure=measures.lesions,
        labels=True,
    ),
    "confidence": Metric(
        title="Confidence and calibration",
        reading="Below the diagonal the network is surer than it is right. ECE is the mean distance from the diagonal.",
        record=Confidence,
        line=_confidence_line,
        activation=ConfidenceMetric,
        labels=True,
    ),
    "temperature": Metric(
        title="Temperature scaling",
        reading="Logits divided by one number T, fitted on half of the images and judged on the other. T above 1: the "
        "network was surer than it is right; an ECE that stays is no error of scale.",
        record=TemperatureScaling,
        line=_temperature_line,
        activation=TemperatureMetric,
        labels=True,
    ),
    "corruptions": Metric(
        title="Corruptions",
        reading="Accuracy under 15 corruptions at 5 severities. The mean over the 75 is the number to compare.",
        record=CorruptionRobustness,
        line=_corruptions_line,
        measure=measures.corruptions,
        labels=True,
        options=("seed", "corrupted"),
        default=False,
    ),
    "frequency-noise": Metric(
        title="Noise by frequency",
        reading="Accuracy under noise of one band of frequencies and equal power: convolutions suffer from high "
        "frequencies, attention from low ones.",
        record=FrequencyRobustness,
        line=_noise_line,
        measure=measures.frequency_noise,
        labels=True,
        options=("seed",),
        default=False,
    ),
    "occlusion": Metric(
        title="Occlusion",
        reading="Accuracy while patches are painted over: random, most salient or least salient ones first.",
        record=Occlusion,
        line=_occlusion_line,
        measure=measures.occluded,
        labels=True,
        options=("seed",),
        default=False,
    ),
    "adversarial": Metric(
        title="Adversarial images",
        reading="Accuracy when each value of an image moves by at most ε against the network. Quote PGD; neither is a "
        "bound.",
        record=AdversarialRobustness,
        line=_attack_line,
        measure=measures.attacked,
        labels=True,
        options=("seed",),
        default=False,
    ),
    "hessian": Metric(
        title="Largest eigenvalues of the Hessian",
        reading="Of the loss of each batch. Large ones mean a sharp loss, negative ones that it is not convex there; "
        "attention makes fewer large and more negative ones than convolutions.",
        record=HessianSpectrum,
        line=_hessian_line,
        measure=measures.spectrum,
        labels=True,
        options=("seed", "eigenvalues", "loss_batches", "weight_decay", "module"),
        default=False,
    ),
    "hessian-density": Metric(
        title="Density of all eigenvalues",
        reading="By stochastic Lanczos quadrature: the bulk near zero, and the outliers that decide the step size.",
        record=HessianDensity,
        line=_density_line,
        measure=measures.density,
        labels=True,
        options=("seed", "loss_batches", "weight_decay", "module"),
        default=False,
    ),
    "landscape": Metric(
        title="Loss landscape",
        reading="NLL around the weights along two random directions whose filters have the norms of the network's.",
        record=LossLandscape,
        line=_landscape_line,
        measure=measures.landscape,
        labels=True,
        options=("seed", "loss_batches", "weight_decay", "landscape_points"),
        default=False,
    ),
    "trajectory": Metric(
        title="Trajectory of training",
        reading="Distance from the first weights over that of the last ones, and the angle between the two ways.",
        record=Trajectory,
        line=_trajectory_line,
        measure=measures.trajectory,
        default=False,
    ),
}
