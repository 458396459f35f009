"""Every metric by name: what it needs, what it depends on, and how it is measured."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from pydantic import Field, PositiveInt

from vitx.analyze.activation_metrics import (
    SIMILAR,
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
from vitx.analyze.lesions import Lesions, lesion_study
from vitx.core.files import Record
from vitx.core.images import ImageSet
from vitx.models.source import Source

# Raised when a metric's definition changes: kept results of older ones are measured again.
VERSION = 1


class Options(Record):
    """What metrics depend on besides the network and the images."""

    batch_size: PositiveInt = 16
    seed: int = 0
    similar_above: float = Field(default=SIMILAR, ge=-1, le=1, description="cosine that makes two layers similar")


class Measured(NamedTuple):
    """What is measured, and how."""

    source: Source
    images: ImageSet
    options: Options
    quiet: bool = True


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


def _lesions(measured: Measured) -> Lesions:
    source, images, options, quiet = measured
    return lesion_study(source.model, images, source.preprocessing, batch_size=options.batch_size, quiet=quiet)


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
        measure=_lesions,
        labels=True,
    ),
}
