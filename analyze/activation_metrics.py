"""What is measured on activations, a batch at a time, by metrics that share one pass."""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor, nn

from vitx.analyze.activations import EMBEDDING, Activations, Layout, stream_order
from vitx.analyze.cka import SMALLEST_BATCH, MinibatchCKA
from vitx.analyze.spectrum import feature_variance, frequencies, log_amplitudes
from vitx.analyze.units import Kind, residual_units
from vitx.core.files import Record
from vitx.models import attention_std, token_similarity
from vitx.models.layer_metrics import LayerMeans

# Neighbouring blocks whose maps are more alike than this count as similar (DeepViT, §3.2).
SIMILAR = 0.9


class NotApplicable(Exception):
    """Why a metric says nothing of this network or these images."""


class ActivationMetric(Protocol):
    """Reads batches, then gives its result or raises NotApplicable."""

    def add(self, batch: Activations) -> None: ...

    def result(self) -> Record: ...


class OverSmoothing(Record):
    """By layer name: mean cosine of different patches (1: all alike), and the spread of attention over keys."""

    images: int
    cos_sim: dict[str, float]
    attention_std: dict[str, float]


class SimilarityMatrix(Record):
    """`matrix[i][j]` of `layers[i]` and `layers[j]` (`columns[j]` where another network is on the other side).

    None where two layers cannot be compared: their shapes differ, or one is the same for all images.
    """

    layers: tuple[str, ...]
    columns: tuple[str, ...]
    matrix: tuple[tuple[float | None, ...], ...]


class AttentionCollapse(SimilarityMatrix):
    """Cosine of maps between layers; how many are like the one before; 1 − cosine of a layer's heads to each other."""

    threshold: float
    similar_blocks: int
    head_diversity: dict[str, float]


class Spectrum(Record):
    """Of one unit: log amplitude relative to DC at `frequencies` (radians a pixel over π)."""

    kind: Kind | None
    frequencies: tuple[float, ...]
    log_amplitude: tuple[float, ...]


class Fourier(Record):
    """By unit, in the order of the network; `kind` is None for the embedding."""

    units: dict[str, Spectrum]


class Variance(Record):
    """Of feature maps over space, by unit, and what kind each unit is."""

    variance: dict[str, float]
    kinds: dict[str, Kind | None]


class OverSmoothingMetric:
    """Token similarity of block outputs and the spread of softmax maps."""

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


class AttentionCollapseMetric:
    """Cosine of every two layers' softmax maps, column by column (DeepViT, eq. 2), and of the heads of one layer."""

    def __init__(self, threshold: float = SIMILAR) -> None:
        self._similarity, self._diversity, self._threshold = _MeanGram(axis=-2), LayerMeans(), threshold

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


class FeatureSimilarityMetric:
    """Cosine of a token's vectors at two layers, mean over patches."""

    def __init__(self, model: nn.Module) -> None:
        self._layout = Layout.of(model)
        self._blocks = {EMBEDDING: EMBEDDING}
        self._blocks |= {unit.name: unit.layer for unit in residual_units(model) if unit.layer is not None}
        self._similarity = _MeanGram(axis=-1)

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


class FourierMetric:
    """Log amplitudes of what each unit hands on."""

    def __init__(self, model: nn.Module) -> None:
        self._layout, self._kinds = Layout.of(model), _kinds(model)
        self._sums: dict[str, Tensor] = {}
        self._sides: dict[str, int] = {}
        self._images = 0

    def add(self, batch: Activations) -> None:
        self._images += batch.images
        for name, features in _maps_of(self._layout, batch):
            found = log_amplitudes(features).double() * batch.images
            self._sums[name] = self._sums[name] + found if name in self._sums else found
            self._sides[name] = features.shape[-1]

    def result(self) -> Fourier:
        if not self._sums:
            raise NotApplicable("no unit hands on square feature maps")
        units = {}
        for name, kind in self._kinds.items():
            if name in self._sums:
                amplitudes = self._sums[name] / self._images
                units[name] = Spectrum(
                    kind=kind,
                    frequencies=tuple(frequencies(self._sides[name])),
                    log_amplitude=tuple((amplitudes - amplitudes[0]).tolist()),
                )
        return Fourier(units=units)


class VarianceMetric:
    """Variance over space of what each unit hands on."""

    def __init__(self, model: nn.Module) -> None:
        self._layout, self._kinds, self._means = Layout.of(model), _kinds(model), LayerMeans()

    def add(self, batch: Activations) -> None:
        for name, features in _maps_of(self._layout, batch):
            self._means.add(name, feature_variance(features).item(), batch.images)

    def result(self) -> Variance:
        means = self._means.means()
        if not means:
            raise NotApplicable("no unit hands on square feature maps")
        order = [name for name in self._kinds if name in means]
        return Variance(
            variance={name: means[name] for name in order}, kinds={name: self._kinds[name] for name in order}
        )


class CKAMetric:
    """CKA between all units of one network (arXiv 2010.15327); the last batch counts if it has 4 images or more."""

    def __init__(self, model: nn.Module) -> None:
        self._order, self._cka = stream_order(model), MinibatchCKA()

    def add(self, batch: Activations) -> None:
        if batch.images >= SMALLEST_BATCH and batch.streams:
            self._cka.add([batch.streams[name] for name in self._order])

    def result(self) -> SimilarityMatrix:
        if len(self._order) < 2:
            raise NotApplicable("the network has no residual units that are known")
        return cka_matrix(self._cka, self._order, self._order)


def cka_matrix(cka: MinibatchCKA, layers: Sequence[str], columns: Sequence[str]) -> SimilarityMatrix:
    matrix = tuple(tuple(_number(value) for value in row) for row in cka.result().tolist())
    return SimilarityMatrix(layers=tuple(layers), columns=tuple(columns), matrix=matrix)


class _MeanGram:
    """The mean cosine of vectors along one axis between every two layers of one shape."""

    def __init__(self, axis: int) -> None:
        self._axis = axis
        self._sums: dict[tuple[str, str], float] = {}
        self._layers: dict[str, None] = {}
        self._images = 0
        self._memory: dict[tuple[int, ...], Tensor] = {}  # kept: fresh pages cost more than the arithmetic

    def add(self, tensors: dict[str, Tensor], images: int) -> dict[str, Tensor]:
        """Add a batch; return its unit vectors, which hold until the next one."""
        self._images += images
        self._layers |= dict.fromkeys(tensors)
        found: dict[str, Tensor] = {}
        for names in _of_one_shape(tensors):
            units = self._unit_vectors([tensors[name] for name in names])
            found |= zip(names, units, strict=True)
            flat = units.flatten(1)
            vectors = units[0].numel() // units.shape[self._axis]
            gram = (flat @ flat.T).double() * (images / vectors)
            for row, first in enumerate(names):
                for column, second in enumerate(names):
                    pair = first, second
                    self._sums[pair] = self._sums.get(pair, 0.0) + gram[row, column].item()
        return found

    def _unit_vectors(self, layers: Sequence[Tensor]) -> Tensor:
        shape = (len(layers), *layers[0].shape)
        if shape not in self._memory:
            self._memory[shape] = layers[0].new_empty(shape)
        units = self._memory[shape]
        for unit, layer in zip(units, layers, strict=True):
            lengths = torch.linalg.vector_norm(layer, dim=self._axis, keepdim=True).clamp_min(1e-12)
            torch.div(layer, lengths, out=unit)
        return units

    def means(self) -> tuple[tuple[str, ...], tuple[tuple[float | None, ...], ...]]:
        layers = tuple(self._layers)
        values = {pair: total / self._images for pair, total in self._sums.items()}
        return layers, tuple(tuple(values.get((first, second)) for second in layers) for first in layers)


def _of_one_shape(tensors: dict[str, Tensor]) -> Iterable[list[str]]:
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, value in tensors.items():
        groups.setdefault(tuple(value.shape), []).append(name)
    return groups.values()


def _maps_of(layout: Layout, batch: Activations) -> Iterable[tuple[str, Tensor]]:
    for name, stream in batch.streams.items():
        features = layout.feature_map(stream)
        if features is not None:
            yield name, features


def _kinds(model: nn.Module) -> dict[str, Kind | None]:
    return {EMBEDDING: None, **{unit.name: unit.kind for unit in residual_units(model)}}


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
