"""Over-smoothing: how alike patch tokens are after each block, and how even attention is (docs/maths.md §1)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from vitx.analyze.activations import Activations, Layout
from vitx.analyze.metric import Metric, NotApplicable, first_to_last
from vitx.analyze.metric_figures import draw_lines
from vitx.analyze.units import residual_units
from vitx.core.files import Record
from vitx.core.panels import Results, panels
from vitx.models import attention_std, token_similarity
from vitx.models.layer_metrics import LayerMeans

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class OverSmoothing(Record):
    """cos_sim by block and attention_std by attention layer, means over the images; no unit.

    cos_sim: from −1/(n−1) to 1, where all n patches point one way. attention_std: 0 where attention is uniform.
    """

    images: int
    cos_sim: dict[str, float]
    attention_std: dict[str, float]


class OverSmoothingMetric:
    """CosSim of the patch tokens after each block, and the standard deviation of attention over keys.

    CosSim(h) = (‖Σ_i ĥ_i‖² − n) / (n(n−1)), ĥ = h/‖h‖, of tokens h (B, n, D) without the class token: the mean cosine
    of two different patches (Gong et al., arXiv 2104.12753, §3; docs/maths.md §1.1). The standard deviation is that of
    a row of the softmax map (B, H, N, N) over its N keys, unbiased, mean over rows, heads and images (§1.2).
    """

    def __init__(self, model: nn.Module) -> None:
        self._layout = Layout.of(model)
        self._blocks = [(unit.name, unit.layer) for unit in residual_units(model) if unit.layer is not None]
        self._cos_sim, self._spread, self._images = LayerMeans(), LayerMeans(), 0

    def add(self, batch: Activations) -> None:
        self._images += batch.images
        for name, layer in self._blocks:
            patches = self._layout.patches(batch.streams[name])
            if patches is not None:
                self._cos_sim.add(layer, token_similarity(patches).item(), batch.images)
        for layer, maps in batch.maps.items():
            self._spread.add(layer, attention_std(maps).item(), batch.images)

    def result(self) -> OverSmoothing:
        cos_sim, spread = self._cos_sim.means(), self._spread.means()
        if not cos_sim and not spread:
            raise NotApplicable("the network has no tokens and no attention")
        return OverSmoothing(images=self._images, cos_sim=cos_sim, attention_std=spread)


def draw_over_smoothing(results: Results) -> "Figure":
    records: Mapping[str, OverSmoothing] = results
    figure, (left, right) = panels(2)
    cos_sim = {network: list(record.cos_sim.values()) for network, record in records.items()}
    spread = {network: list(record.attention_std.values()) for network, record in records.items()}
    draw_lines(left, cos_sim, "block", "CosSim of patch tokens")
    draw_lines(right, spread, "attention layer", "std of attention over keys")
    right.set_ylim(bottom=0)
    return figure


def _over_smoothing_line(found: OverSmoothing) -> str:
    parts = {"CosSim": found.cos_sim, "attention std": found.attention_std}
    return ", ".join(f"{name} {first_to_last(layers.values())}" for name, layers in parts.items() if layers)


OVER_SMOOTHING_METRIC = Metric(
    title="Over-smoothing",
    reading="CosSim is the mean cosine of different patch tokens after each block: at 1 all patches say the same. "
    "The spread of attention over keys falls to 0 where attention looks at everything alike.",
    record=OverSmoothing,
    line=_over_smoothing_line,
    activation=lambda context: OverSmoothingMetric(context.source.model),
    streams=True,
    maps=True,
    figure=draw_over_smoothing,
)
