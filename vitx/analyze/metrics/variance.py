"""Variance over space of what each unit hands on (Park & Kim, arXiv 2202.06709, §3)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from vitx.analyze.activations import Activations, Layout, feature_maps_of, kinds_of
from vitx.analyze.figures import draw_by_kind
from vitx.analyze.metric import Metric, NotApplicable, ends
from vitx.analyze.spectrum import feature_variance
from vitx.analyze.units import Kind
from vitx.core.files import Record
from vitx.core.panels import WIDTH, Results, panels
from vitx.models.layer_metrics import LayerMeans

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Variance(Record):
    """Of feature maps over space, by unit, and what kind each unit is."""

    variance: dict[str, float]
    kinds: dict[str, Kind | None]


class VarianceMetric:
    """Variance over space of what each unit hands on."""

    def __init__(self, model: nn.Module) -> None:
        self._layout, self._kinds, self._means = Layout.of(model), kinds_of(model), LayerMeans()

    def add(self, batch: Activations) -> None:
        for name, features in feature_maps_of(self._layout, batch):
            self._means.add(name, feature_variance(features).item(), batch.images)

    def result(self) -> Variance:
        means = self._means.means()
        if not means:
            raise NotApplicable("no unit hands on square feature maps")
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
    reading="Variance over space of what each unit hands on: attention lowers it, MLPs and convolutions raise it.",
    record=Variance,
    line=lambda found: ends(found.variance.values()),
    activation=lambda measured: VarianceMetric(measured.source.model),
    streams=True,
    figure=draw_variance,
)
