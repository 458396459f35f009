"""Cosine of the same token at two layers."""

from torch import nn

from vitx.analyze.activations import EMBEDDING, Activations, Layout
from vitx.analyze.figures import draw_matrices
from vitx.analyze.metric import Metric, NotApplicable
from vitx.analyze.similarity_matrix import MeanGram, SimilarityMatrix, matrix_line
from vitx.analyze.units import residual_units


class FeatureSimilarityMetric:
    """Cosine of a token's vectors at two layers, mean over patches."""

    def __init__(self, model: nn.Module) -> None:
        self._layout = Layout.of(model)
        self._blocks = {EMBEDDING: EMBEDDING}
        self._blocks |= {unit.name: unit.layer for unit in residual_units(model) if unit.layer is not None}
        self._similarity = MeanGram(axis=-1)

    def add(self, batch: Activations) -> None:
        tokens = {}
        for name, layer in self._blocks.items():
            patches = self._layout.patches(batch.streams[name]) if name in batch.streams else None
            if patches is not None:
                tokens[layer] = patches
        self._similarity.add(tokens, batch.images)

    def result(self) -> SimilarityMatrix:
        layers, matrix = self._similarity.means()
        if not layers:
            raise NotApplicable("the network has no patch tokens")
        return SimilarityMatrix(layers=layers, columns=layers, matrix=matrix)


FEATURE_SIMILARITY_METRIC = Metric(
    title="Feature similarity",
    reading="Cosine of the same token's vectors at two layers: near 1 a block hands on what it was given.",
    record=SimilarityMatrix,
    line=matrix_line,
    activation=lambda measured: FeatureSimilarityMetric(measured.source.model),
    streams=True,
    figure=draw_matrices,
)
