"""Similarity of every pair of layers: the matrix that three metrics give, and mean cosines accumulated over batches."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from vitx.analyze.intervals import FEWEST, Interval, Measured, layer_intervals, of_images, percentiles, resampled_means
from vitx.core.probabilities import Float64Array
from vitx.models.similarity import inverse_norm


class SimilarityMatrix(Measured):
    """`matrix[i][j]` is the similarity of `layers[i]` and `columns[j]`, at most 1; no unit.

    The columns are the layers again, or those of another network. None where two layers cannot be compared: their
    shapes differ, or one is the same for all images, or has all equally far from each other. widest: half the width of
    the widest interval of an entry; None where there are too few images or batches for one. intervals["neighbours"]:
    of a layer with the one before it.
    """

    layers: tuple[str, ...]
    columns: tuple[str, ...]
    matrix: tuple[tuple[float | None, ...], ...]
    widest: float | None = None

    def neighbours(self) -> dict[str, float]:
        """Layer → its similarity to the layer before, of the layers that can be compared."""
        pairs = zip(self.layers[1:], (self.matrix[i][i + 1] for i in range(len(self.layers) - 1)), strict=True)
        return {layer: value for layer, value in pairs if value is not None}


MatrixT = TypeVar("MatrixT", bound=SimilarityMatrix)


class MeanCosine:
    """The mean cosine, between every two layers of one shape, of their vectors along `axis`.

    The axis is that of one layer's tensor (B, …); the mean is over all its other axes.
    """

    def __init__(self, axis: int) -> None:
        self._axis = axis
        # Of each group of layers of one shape: of each image the matrix of mean cosines, (B, layers, layers).
        self._cosines: dict[tuple[str, ...], list[Float64Array]] = {}
        self._layers: dict[str, None] = {}
        # Reused between batches: fresh memory pages cost more than the arithmetic.
        self._buffers: dict[tuple[int, ...], Tensor] = {}

    def add(self, tensors: dict[str, Tensor], images: int) -> dict[str, Tensor]:
        """Add each layer's tensor of a batch of `images`; return the same as unit vectors, valid until the next call.

        The cosine of an image is the mean over its windows, where B counts these.
        """
        self._layers |= dict.fromkeys(tensors)
        found: dict[str, Tensor] = {}
        for names in _of_one_shape(tensors):
            units = self._unit_vectors([tensors[name] for name in names])
            found |= zip(names, units, strict=True)
            # The sum over an image's vectors of the product of two unit vectors is one entry of layers × layers.
            flat_BLX = units.flatten(2).transpose(0, 1)
            vectors = units[0, 0].numel() // units.shape[self._axis]
            cosines_BLL = of_images(torch.bmm(flat_BLX, flat_BLX.transpose(1, 2)).double() / vectors, images)
            self._cosines.setdefault(tuple(names), []).append(cosines_BLL.cpu().numpy())
        return found

    def _unit_vectors(self, layers: Sequence[Tensor]) -> Tensor:
        shape = (len(layers), *layers[0].shape)
        if shape not in self._buffers:
            self._buffers[shape] = layers[0].new_empty(shape)
        units = self._buffers[shape]
        for unit, layer in zip(units, layers, strict=True):
            torch.mul(layer, inverse_norm(layer, self._axis).unsqueeze(self._axis), out=unit)
        return units

    @property
    def layers(self) -> tuple[str, ...]:
        return tuple(self._layers)

    def values(self) -> dict[tuple[str, str], Float64Array]:
        """(layer, layer) → the mean cosine of each image (N,), of the layers of one shape."""
        groups = {names: np.concatenate(parts) for names, parts in self._cosines.items()}
        return {
            (first, second): cosines[:, row, column]
            for names, cosines in groups.items()
            for row, first in enumerate(names)
            for column, second in enumerate(names)
        }

    def neighbours(self) -> dict[str, Float64Array]:
        """Layer → its mean cosine with the layer before, of each image (N,), of those of one shape."""
        values = self.values()
        return {pair[1]: values[pair] for pair in pairwise(self.layers) if pair in values}

    def result(
        self, record: type[MatrixT], intervals: Mapping[str, dict[str, Interval]] | None = None, **fields: Any
    ) -> MatrixT:
        """The matrix of means with its intervals, others and `fields`; None for two layers of different shapes."""
        layers, values = self.layers, self.values()
        matrix = tuple(
            tuple(float(values[pair].mean()) if (pair := (first, second)) in values else None for second in layers)
            for first in layers
        )
        return record(
            layers=layers,
            columns=layers,
            matrix=matrix,
            widest=_widest([*values.values()]),
            intervals={"neighbours": layer_intervals(self.neighbours()), **(intervals or {})},
            **fields,
        )


def _widest(values: Sequence[Float64Array]) -> float | None:
    """Half the width of the widest bootstrap interval of the means of values (N,)."""
    if not values or len(values[0]) < FEWEST:
        return None
    return max(high - low for low, high in percentiles(resampled_means(np.stack(values, axis=1)))) / 2


def _of_one_shape(tensors: dict[str, Tensor]) -> Iterable[list[str]]:
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, value in tensors.items():
        groups.setdefault(tuple(value.shape), []).append(name)
    return groups.values()


def matrix_line(found: SimilarityMatrix) -> str:
    value, widest = found.matrix[0][-1], found.widest
    said = f"{found.layers[0]} to {found.columns[-1]}: {'not comparable' if value is None else f'{value:.3g}'}"
    if widest is None:
        return said
    # Of images that are all alike entries vary by the rounding of float32 activations alone.
    return f"{said}; {'no entry varies' if widest < 1e-6 else f'every entry ± {widest:.2g} or less'}"
