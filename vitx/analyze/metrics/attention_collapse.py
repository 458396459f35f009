"""Attention collapse: layers whose attention maps repeat those of the layer before (docs/maths.md §1.3)."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

from vitx.analyze.activations import Activations
from vitx.analyze.metric import SIMILARITY_THRESHOLD, Metric, NotApplicable, first_to_last
from vitx.analyze.metric_figures import draw_lines, draw_matrix
from vitx.analyze.similarity_matrix import MeanCosine, SimilarityMatrix
from vitx.core.panels import Results, panels
from vitx.models.layer_metrics import LayerMeans

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Maps = Literal["softmax", "mixed"]
_NO_MAPS: dict[Maps, str] = {
    "softmax": "the network has no attention whose maps can be observed",
    "mixed": "no layer mixes its maps over heads, so they are those of the softmax",
}


class AttentionCollapse(SimilarityMatrix):
    """`matrix`: the mean cosine M of two layers' maps; no unit.

    maps: which were compared. similar_blocks: how many layers have M above `threshold` with the layer before.
    head_diversity: by layer, 1 − the mean cosine of two different heads; 0 where all heads are the same.
    """

    maps: Maps = "softmax"

    threshold: float
    similar_blocks: int
    head_diversity: dict[str, float]


class AttentionCollapseMetric:
    """Similarity of the maps A (B, H, N, N) of every two layers p and q, and of the heads of one layer.

    M^{p,q} = mean over heads h, columns t and images of cos(A^p_{h,:,t}, A^q_{h,:,t}): a column is a vector over the N
    queries (Zhou et al., DeepViT, arXiv 2103.11886, eq. 2; docs/maths.md §1.3). The maps are those
    of the softmax or, "mixed", those that meet V. Maps of different sizes are not compared.
    """

    def __init__(self, threshold: float = SIMILARITY_THRESHOLD, maps: Maps = "softmax") -> None:
        self._similarity, self._diversity = MeanCosine(axis=-2), LayerMeans()
        self._threshold = threshold
        self._maps: Maps = maps

    def add(self, batch: Activations) -> None:
        maps = batch.maps if self._maps == "softmax" else batch.mixed
        for layer, columns in self._similarity.add(maps, batch.images).items():
            heads = columns.shape[1]
            if heads > 1:
                # ‖Σ_h u_h‖² of unit vectors u is Σ_{g≠h} cos + H: the mean cosine without a product for each pair.
                cosine = (columns.sum(dim=1).square().sum(dim=-2) - heads) / (heads * (heads - 1))
                self._diversity.add(layer, 1 - cosine.mean().item(), batch.images)

    def result(self) -> AttentionCollapse:
        layers, matrix = self._similarity.means()
        if not layers:
            raise NotApplicable(_NO_MAPS[self._maps])
        neighbours = [matrix[before][after] for before, after in pairwise(range(len(layers)))]
        return AttentionCollapse(
            maps=self._maps,
            layers=layers,
            columns=layers,
            matrix=matrix,
            threshold=self._threshold,
            similar_blocks=sum(value is not None and value > self._threshold for value in neighbours),
            head_diversity=self._diversity.means(),
        )


def draw_attention_collapse(results: Results) -> "Figure":
    records: Mapping[str, AttentionCollapse] = results
    figure, axes_of = panels(len(records) + 1, height=3.6)
    for axes, (network, record) in zip(axes_of, records.items(), strict=False):
        title = f"{network}\n{record.similar_blocks} layers > {record.threshold:g} to the one before"
        draw_matrix(axes, record, title, "attention layer", "attention layer")
    diversity = {network: list(record.head_diversity.values()) for network, record in records.items()}
    draw_lines(axes_of[-1], diversity, "attention layer", "1 − cosine between heads")
    return figure


def _collapse_line(found: AttentionCollapse) -> str:
    similar = f"{found.similar_blocks} of {len(found.layers) - 1} layers above {found.threshold:g} to the one before"
    diversity = f"; 1 − cosine of heads {first_to_last(found.head_diversity.values())}" if found.head_diversity else ""
    return similar + diversity


ATTENTION_COLLAPSE_METRIC = Metric(
    title="Attention collapse, softmax maps",
    reading="Cosine of the attention maps of two layers, column by column. Deep layers that repeat the maps of the "
    "one before add little; 1 − cosine between heads says how much the heads of one layer differ.",
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
    "heads. Re-Attention is there to make them differ where the softmax maps repeat. Layers without a mix have their "
    "softmax maps here.",
    activation=lambda context: AttentionCollapseMetric(context.options.similar_above, "mixed"),
    maps=False,
    mixed=True,
)
