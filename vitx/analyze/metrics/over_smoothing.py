"""Over-smoothing: how alike patch tokens are after each block, and how even attention is (docs/maths.md §1)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from vitx.analyze.activations import EMBEDDING, Activations, Layout
from vitx.analyze.intervals import LayerSamples, Measured, ends_text, of_images, rounded
from vitx.analyze.metric import Metric, NotApplicable
from vitx.analyze.metric_figures import Curve, draw_lines
from vitx.core.panels import Results, panels
from vitx.models.similarity import attention_stds, dc_shares, longest_tokens, token_similarities

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# Ours, the papers name no bound: at 0.9 the mean angle between patches is 26°, and 81 % of their energy is common.
SMOOTHED_ABOVE = 0.9


class OverSmoothing(Measured):
    """cos_sim, dc_share and longest by block, attention_std by attention layer, means over the images; no unit.

    cos_sim: from −1/(n−1) to 1, where all n patches point one way. embedding: that of the patches before the first
    block, None where they cannot be observed. smoothed: by block, on how many images its cos_sim is above `threshold`
    and above the embedding's. dc_share: of the patches' energy, what is in their mean; 1 where all are the same.
    longest: the length of the longest patch over the median's. attention_std: 0 where attention is uniform.
    """

    images: int
    threshold: float
    embedding: float | None
    cos_sim: dict[str, float]
    smoothed: dict[str, int]
    dc_share: dict[str, float]
    longest: dict[str, float]
    attention_std: dict[str, float]


class OverSmoothingMetric:
    """CosSim of the patch tokens after each block, and the standard deviation of attention over keys.

    CosSim(h) = (‖Σ_i ĥ_i‖² − n) / (n(n−1)), ĥ = h/‖h‖, of tokens h (B, n, D) without the class token: the mean cosine
    of two different patches (Gong et al., arXiv 2104.12753, §3; docs/maths.md §1.1). It counts long and short tokens
    alike; the share of their energy in their mean does not (Wang et al., arXiv 2203.05962; §1.5), and the longest
    token's length over the median's says by how much that matters. The standard deviation is that of a row of the
    softmax map (B, H, N, N) over its N keys, unbiased, mean over rows, heads and images (§1.2).
    """

    def __init__(self, model: nn.Module) -> None:
        self._layout = Layout.of(model)
        self._images = 0
        self._cos_sim, self._dc_share, self._longest, self._spread = (LayerSamples() for _ in range(4))

    def add(self, batch: Activations) -> None:
        self._images += batch.images
        for layer, patches in self._layout.patches(batch.streams).items():
            self._cos_sim.add(layer, token_similarities(patches))
            if layer != EMBEDDING:
                self._dc_share.add(layer, dc_shares(patches))
                self._longest.add(layer, longest_tokens(patches))
        for layer, maps in batch.maps.items():
            self._spread.add(layer, of_images(attention_stds(maps), batch.images))

    def result(self) -> OverSmoothing:
        cos_sim, spread = self._cos_sim.values(), self._spread.values()
        if not cos_sim and not spread:
            raise NotApplicable("the network has no tokens and no attention")
        before = cos_sim.pop(EMBEDDING, None)
        bound = SMOOTHED_ABOVE if before is None else before.clip(min=SMOOTHED_ABOVE)
        ends = {"CosSim, last block": cos_sim, "attention std, last layer": spread}
        measured = {
            "cos_sim": self._cos_sim,
            "dc_share": self._dc_share,
            "longest": self._longest,
            "attention_std": self._spread,
        }
        return OverSmoothing(
            images=self._images,
            threshold=SMOOTHED_ABOVE,
            embedding=None if before is None else float(before.mean()),
            cos_sim={layer: float(values.mean()) for layer, values in cos_sim.items()},
            smoothed={layer: int((values > bound).sum()) for layer, values in cos_sim.items()},
            dc_share=self._dc_share.means(),
            longest=self._longest.means(),
            attention_std=self._spread.means(),
            intervals={name: samples.intervals() for name, samples in measured.items()},
            per_image={name: rounded([*values.values()][-1]) for name, values in ends.items() if values},
        )


def draw_over_smoothing(results: Results) -> "Figure":
    records: Mapping[str, OverSmoothing] = results
    figure, (similar, common, longest, spread) = panels(4, columns=2)
    for axes, field, x, y in (
        (similar, "cos_sim", "block", "CosSim of patch tokens"),
        (common, "dc_share", "block", "share of energy in the mean patch"),
        (longest, "longest", "block", "length of the longest patch / median"),
        (spread, "attention_std", "attention layer", "std of attention over keys"),
    ):
        curves = {
            network: Curve.of(getattr(found, field), found.intervals[field]) for network, found in records.items()
        }
        draw_lines(axes, curves, x, y)
    spread.set_ylim(bottom=0)
    return figure


def _over_smoothing_line(found: OverSmoothing) -> str:
    parts = (
        ("CosSim", "cos_sim", found.cos_sim),
        ("DC share", "dc_share", found.dc_share),
        ("longest patch", "longest", found.longest),
        ("attention std", "attention_std", found.attention_std),
    )
    return ", ".join(f"{name} {ends_text(layers, found.intervals[field])}" for name, field, layers in parts if layers)


OVER_SMOOTHING_METRIC = Metric(
    title="Over-smoothing",
    reading="CosSim: the mean cosine of different patch tokens of an image after each block; at 1 all point one way. "
    "DC share: how much of the patches' energy is in their mean; where it is far above CosSim, it is that of a few "
    "long patches. Longest patch: its length over the median's. Spread: the standard deviation of attention over keys; "
    "at 0 a query attends to all keys equally.",
    claim="Gong et al. (2104.12753): CosSim rises with depth in vision transformers, and accuracy suffers.",
    precision="bootstrap over images",
    record=OverSmoothing,
    line=_over_smoothing_line,
    activation=lambda context: OverSmoothingMetric(context.source.model),
    streams=True,
    maps=True,
    figure=draw_over_smoothing,
)
