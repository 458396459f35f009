"""Feature similarity: how much the blocks between two layers change a token (docs/maths.md §1.4)."""

from torch import nn

from vitx.analyze.activations import Activations, Layout
from vitx.analyze.intervals import rounded
from vitx.analyze.metric import Metric, NotApplicable
from vitx.analyze.metric_figures import draw_matrices
from vitx.analyze.similarity_matrix import MeanCosine, SimilarityMatrix, matrix_line


class FeatureSimilarityMetric:
    """The cosine of one token's vectors (D,) after two blocks p and q, mean over patches and images.

    cos(h^p_i, h^q_i) of patch tokens h (B, n, D), for the embedding and every block: 1 where the blocks between only
    scale the token; no unit. Layers of different shapes are not compared. (Zhou et al., DeepViT, arXiv 2103.11886, plot
    such similarities; docs/maths.md §1.4.)
    """

    def __init__(self, model: nn.Module) -> None:
        self._layout = Layout.of(model)
        self._similarity = MeanCosine(axis=-1)

    def add(self, batch: Activations) -> None:
        self._similarity.add(self._layout.patches(batch.streams), batch.images)

    def result(self) -> SimilarityMatrix:
        values = self._similarity.values()
        if not values:
            raise NotApplicable("the network has no patch tokens")
        ends = self._similarity.layers[0], self._similarity.layers[-1]
        compared = {f"feature similarity, {ends[0]} to last block": rounded(values[ends])} if ends in values else {}
        return self._similarity.result(SimilarityMatrix, per_image=compared)


FEATURE_SIMILARITY_METRIC = Metric(
    title="Feature similarity",
    reading="Cosine of the same token's vectors after two blocks: 1 where the blocks between only scale it.",
    claim="Zhou et al. (2103.11886): tokens of neighbouring deep blocks are nearly the same.",
    precision="bootstrap over images; entries share the widest",
    record=SimilarityMatrix,
    line=matrix_line,
    activation=lambda context: FeatureSimilarityMetric(context.source.model),
    streams=True,
    figure=draw_matrices,
)
