"""Attention collapse (DeepViT, arXiv 2103.11886, §3.2): layers whose maps repeat those of the one before."""

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

from vitx.analyze.activations import Activations
from vitx.analyze.figures import draw_lines, draw_matrix
from vitx.analyze.metric import SIMILAR, Metric, NotApplicable, ends
from vitx.analyze.similarity_matrix import MeanGram, SimilarityMatrix
from vitx.core.panels import Results, panels
from vitx.models.layer_metrics import LayerMeans

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class AttentionCollapse(SimilarityMatrix):
    """Cosine of maps between layers; how many are like the one before; 1 − cosine of a layer's heads to each other."""

    threshold: float
    similar_blocks: int
    head_diversity: dict[str, float]


class AttentionCollapseMetric:
    """Cosine of every two layers' softmax maps, column by column (DeepViT, eq. 2), and of the heads of one layer."""

    def __init__(self, threshold: float = SIMILAR) -> None:
        self._similarity, self._diversity, self._threshold = MeanGram(axis=-2), LayerMeans(), threshold

    def add(self, batch: Activations) -> None:
        for layer, maps in self._similarity.add(batch.maps, batch.images).items():
            heads = maps.shape[1]
            if heads > 1:
                alike = (maps.sum(dim=1).square().sum(dim=-2) - heads) / (heads * (heads - 1))
                self._diversity.add(layer, 1 - alike.mean().item(), batch.images)

    def result(self) -> AttentionCollapse:
        layers, matrix = self._similarity.means()
        if not layers:
            raise NotApplicable("the network has no attention whose maps can be observed")
        neighbours = [matrix[index][other] for index, other in pairwise(range(len(layers)))]
        return AttentionCollapse(
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
    alike = f"{found.similar_blocks} of {len(found.layers) - 1} layers above {found.threshold:g} to the one before"
    diversity = f"; 1 − cosine of heads {ends(found.head_diversity.values())}" if found.head_diversity else ""
    return alike + diversity


ATTENTION_COLLAPSE_METRIC = Metric(
    title="Attention collapse",
    reading="Cosine of the attention maps of two layers, column by column. Deep layers that repeat the maps of the "
    "one before add little; 1 − cosine between heads says how much the heads of one layer differ.",
    record=AttentionCollapse,
    line=_collapse_line,
    activation=lambda measured: AttentionCollapseMetric(measured.options.similar_above),
    maps=True,
    options=("similar_above",),
    figure=draw_attention_collapse,
)
