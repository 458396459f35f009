"""Variance over space of each unit's output (docs/maths.md §5.1)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from vitx.analyze.activations import Activations, unit_kinds
from vitx.analyze.intervals import Measured, ends_text, layer_intervals
from vitx.analyze.metric import Metric, NotApplicable
from vitx.analyze.metric_figures import draw_by_kind
from vitx.analyze.spectrum import feature_variances
from vitx.analyze.steps import MapSamples, steps_text
from vitx.analyze.units import Kind
from vitx.core.panels import WIDTH, Results, panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Variance(Measured):
    """The variance over space by unit, in squared units of the activations, and the kind of each unit.

    step: how much a unit raises it.
    """

    variance: dict[str, float]
    kinds: dict[str, Kind | None]
    step: dict[str, float]


class VarianceMetric:
    """The unbiased variance of a feature map (B, D, S, S) over its S² positions, mean over images and channels.

    (Park & Kim, arXiv 2202.06709, §3; docs/maths.md §5.1.)
    """

    def __init__(self, model: nn.Module) -> None:
        self._kinds, self._variances = unit_kinds(model), MapSamples(model, feature_variances)

    def add(self, batch: Activations) -> None:
        self._variances.add(batch)

    def result(self) -> Variance:
        maps = self._variances
        values = maps.after.values()
        if not values:
            raise NotApplicable("no unit has a square feature map as its output")
        ordered = {name: values[name] for name in self._kinds if name in values}
        steps = maps.steps(ordered, maps.before.values())
        return Variance(
            variance={name: float(found.mean()) for name, found in ordered.items()},
            kinds={name: self._kinds[name] for name in ordered},
            step={name: float(found.mean()) for name, found in steps.items()},
            intervals={"variance": layer_intervals(ordered), "step": layer_intervals(steps)},
        )


def draw_variance(results: Results) -> "Figure":
    records: Mapping[str, Variance] = results
    figure, (axes,) = panels(1, width=1.4 * WIDTH)
    heights = {
        network: [
            (record.kinds[name], value, record.interval("variance", name)) for name, value in record.variance.items()
        ]
        for network, record in records.items()
    }
    draw_by_kind(axes, heights, "variance over space")
    if any(value > 0 for record in records.values() for value in record.variance.values()):  # not of a dead network
        axes.set_yscale("log")
    return figure


def _variance_line(found: Variance) -> str:
    ends = ends_text(found.variance, found.intervals["variance"])
    return f"{ends}; {steps_text(found.step, found.intervals['step'], found.kinds)}"


VARIANCE_METRIC = Metric(
    title="Variance of feature maps",
    reading="Variance over space of the stream after each unit.",
    claim="Park & Kim (2202.06709): attention lowers it, MLPs and convolutions raise it.",
    precision="bootstrap over images",
    record=Variance,
    line=_variance_line,
    activation=lambda context: VarianceMetric(context.source.model),
    streams=True,
    figure=draw_variance,
)
