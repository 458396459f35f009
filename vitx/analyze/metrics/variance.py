"""Variance over space of each unit's output (docs/maths.md §5.1)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from vitx.analyze.activations import Activations, Layout, feature_maps_of, unit_kinds
from vitx.analyze.metric import Metric, NotApplicable, first_to_last
from vitx.analyze.metric_figures import draw_by_kind
from vitx.analyze.spectrum import feature_variance
from vitx.analyze.units import Kind
from vitx.core.files import Record
from vitx.core.panels import WIDTH, Results, panels
from vitx.models.layer_metrics import LayerMeans

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Variance(Record):
    """The variance over space by unit, in squared units of the activations, and the kind of each unit."""

    variance: dict[str, float]
    kinds: dict[str, Kind | None]


class VarianceMetric:
    """The unbiased variance of a feature map (B, D, S, S) over its S² positions, mean over images and channels.

    Attention averages positions, so it lowers it (Park & Kim, arXiv 2202.06709, §3; docs/maths.md §5.1).
    """

    def __init__(self, model: nn.Module) -> None:
        self._layout, self._kinds, self._means = Layout.of(model), unit_kinds(model), LayerMeans()

    def add(self, batch: Activations) -> None:
        for name, features in feature_maps_of(self._layout, batch):
            self._means.add(name, feature_variance(features).item(), batch.images)

    def result(self) -> Variance:
        means = self._means.means()
        if not means:
            raise NotApplicable("no unit has a square feature map as its output")
        order = [name for name in self._kinds if name in means]
        return Variance(
            variance={name: means[name] for name in order}, kinds={name: self._kinds[name] for name in order}
        )


def draw_variance(results: Results) -> "Figure":
    records: Mapping[str, Variance] = results
    figure, (axes,) = panels(1, width=1.4 * WIDTH)
    heights = {
        network: [(record.kinds[name], value) for name, value in record.variance.items()]
        for network, record in records.items()
    }
    draw_by_kind(axes, heights, "variance over space")
    axes.set_yscale("log")
    return figure


VARIANCE_METRIC = Metric(
    title="Variance of feature maps",
    reading="Variance over space of each unit's output: attention lowers it, MLPs and convolutions raise it.",
    record=Variance,
    line=lambda found: first_to_last(found.variance.values()),
    activation=lambda context: VarianceMetric(context.source.model),
    streams=True,
    figure=draw_variance,
)
