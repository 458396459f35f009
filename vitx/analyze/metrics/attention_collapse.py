"""Attention collapse: layers whose attention maps repeat those of the layer before (docs/maths.md §1.3)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from vitx.analyze.activations import Activations
from vitx.analyze.intervals import LayerSamples, ends_text, of_images, rounded
from vitx.analyze.metric import SIMILARITY_THRESHOLD, Metric, NotApplicable
from vitx.analyze.metric_figures import Curve, draw_lines, draw_matrix
from vitx.analyze.similarity_matrix import MeanCosine, SimilarityMatrix
from vitx.core.panels import Results, panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Maps = Literal["softmax", "mixed"]
_ONE_QUERY = "its attention has one query, the class token: there are no columns over queries to compare"
_NO_MAPS: dict[Maps, str] = {
    "softmax": "the network has no attention whose maps can be observed",
    "mixed": "no layer mixes its maps over heads, so they are those of the softmax",
}


class AttentionCollapse(SimilarityMatrix):
    """`matrix`: the mean cosine M of two layers' maps; no unit.

    maps: which were compared. similar_blocks: how many layers have M above `threshold` with the layer before.
    repeated: by layer, on how many images its M with the layer before is above `threshold`. head_diversity: by layer,
    1 − the mean cosine of two different heads; 0 where all heads are the same.
    """

    maps: Maps = "softmax"
    images: int
    threshold: float
    repeated: dict[str, int]
    similar_blocks: int
    head_diversity: dict[str, float]


class AttentionCollapseMetric:
    """Similarity of the maps A (B, H, N, N) of every two layers p and q, and of the heads of one layer.

    M^{p,q} = mean over heads h, columns t and images of cos(A^p_{h,:,t}, A^q_{h,:,t}): a column is a vector over the N
    queries (Zhou et al., DeepViT, arXiv 2103.11886, eq. 2; docs/maths.md §1.3). The maps are those
    of the softmax or, "mixed", those that meet V. Maps of different sizes are not compared.

    Maps of one query, those of class attention, are left out: any two positive vectors of one entry have cosine 1.
    """

    def __init__(self, threshold: float = SIMILARITY_THRESHOLD, maps: Maps = "softmax") -> None:
        self._similarity, self._diversity = MeanCosine(axis=-2), LayerSamples()
        self._threshold = threshold
        self._maps: Maps = maps
        self._saw_maps = False

    def add(self, batch: Activations) -> None:
        maps = batch.maps if self._maps == "softmax" else batch.mixed
        self._saw_maps = self._saw_maps or bool(maps)
        several = {layer: value for layer, value in maps.items() if value.shape[-2] > 1}
        for layer, columns in self._similarity.add(several, batch.images).items():
            heads = columns.shape[1]
            if heads > 1:
                # ‖Σ_h u_h‖² is Σ_{g≠h} cos + Σ_h ‖u_h‖²: the mean cosine without a product for each pair.
                own = columns.square().sum(dim=(1, -2))  # of each head 1, or 0 where its column has no direction
                cosine = (columns.sum(dim=1).square().sum(dim=-2) - own) / (heads * (heads - 1))
                self._diversity.add(layer, of_images(1 - cosine.mean(dim=-1), batch.images))

    def result(self) -> AttentionCollapse:
        values = self._similarity.values()
        if not values:
            raise NotApplicable(_ONE_QUERY if self._saw_maps else _NO_MAPS[self._maps])
        neighbours = self._similarity.neighbours()
        compared = f"{self._maps} maps, similarity to the layer before"
        return self._similarity.result(
            AttentionCollapse,
            {"head_diversity": self._diversity.intervals()},
            maps=self._maps,
            images=len(next(iter(values.values()))),
            threshold=self._threshold,
            similar_blocks=sum(bool(each.mean() > self._threshold) for each in neighbours.values()),
            repeated={layer: int((each > self._threshold).sum()) for layer, each in neighbours.items()},
            head_diversity=self._diversity.means(),
            per_image={compared: rounded(np.mean([*neighbours.values()], axis=0))} if neighbours else {},
        )


def draw_attention_collapse(results: Results) -> "Figure":
    records: Mapping[str, AttentionCollapse] = results
    figure, axes_of = panels(len(records) + 2, height=3.6, columns=3 if len(records) == 1 else 2)
    for axes, (network, record) in zip(axes_of, records.items(), strict=False):
        draw_matrix(axes, record, network, "attention layer", "attention layer")
    neighbours = {
        network: Curve.of(found.neighbours(), found.intervals["neighbours"]) for network, found in records.items()
    }
    draw_lines(axes_of[-2], neighbours, "attention layer after the first", "similarity to the layer before")
    axes_of[-2].axhline(next(iter(records.values())).threshold, color="0.5", linestyle=":", linewidth=1)
    diversity = {
        network: Curve.of(found.head_diversity, found.intervals["head_diversity"]) for network, found in records.items()
    }
    draw_lines(axes_of[-1], diversity, "attention layer", "1 − cosine between heads")
    return figure


def _collapse_line(found: AttentionCollapse) -> str:
    neighbours, intervals = found.neighbours(), found.intervals
    similar = f"{found.similar_blocks} of {len(neighbours)} layers above {found.threshold:g} to the one before"
    parts = {
        "similarity to it": (neighbours, "neighbours"),
        "1 − cosine of heads": (found.head_diversity, "head_diversity"),
    }
    ends = [f"{name} {ends_text(values, intervals[field])}" for name, (values, field) in parts.items() if values]
    return "; ".join([similar, *ends])


ATTENTION_COLLAPSE_METRIC = Metric(
    title="Attention collapse, softmax maps",
    reading="Cosine of the attention maps of two layers, column by column; dotted: the bound above which a layer "
    "counts as a repetition of the one before. 1 − cosine between heads: how much the heads of one layer differ.",
    claim="Zhou et al. (2103.11886): the softmax maps of deep layers repeat each other, and such layers add little.",
    precision="bootstrap over images; entries of a matrix share the widest",
    record=AttentionCollapse,
    line=_collapse_line,
    activation=lambda context: AttentionCollapseMetric(context.options.similar_above),
    maps=True,
    options=("similar_above",),
    figure=draw_attention_collapse,
)

MIXED_ATTENTION_COLLAPSE_METRIC = replace(
    ATTENTION_COLLAPSE_METRIC,
    title="Attention collapse, mixed maps",
    reading="The same of the maps that meet V: after the mix over heads of Re-Attention, with its norm, or of talking "
    "heads. Layers without a mix have their softmax maps here.",
    claim="Zhou et al. (2103.11886): Re-Attention makes maps differ where softmax maps repeat.",
    activation=lambda context: AttentionCollapseMetric(context.options.similar_above, "mixed"),
    maps=False,
    mixed=True,
)
