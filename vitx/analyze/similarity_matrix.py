"""Similarity of every pair of layers: the matrix that three metrics give, and mean cosines accumulated over batches."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from vitx.core.files import Record


class SimilarityMatrix(Record):
    """`matrix[i][j]` is the similarity of `layers[i]` and `columns[j]`, at most 1; no unit.

    The columns are the layers again, or those of another network. None where two layers cannot be compared: their
    shapes differ, or one is the same for all images.
    """

    layers: tuple[str, ...]
    columns: tuple[str, ...]
    matrix: tuple[tuple[float | None, ...], ...]


class MeanCosine:
    """The mean cosine, between every two layers of one shape, of their vectors along `axis`.

    The axis is that of one layer's tensor (B, …); the mean is over all its other axes.
    """

    def __init__(self, axis: int) -> None:
        self._axis = axis
        self._sums: dict[tuple[str, str], float] = {}
        self._layers: dict[str, None] = {}
        self._images = 0
        # Reused between batches: fresh memory pages cost more than the arithmetic.
        self._buffers: dict[tuple[int, ...], Tensor] = {}

    def add(self, tensors: dict[str, Tensor], images: int) -> dict[str, Tensor]:
        """Add each layer's tensor of a batch; return the same as unit vectors, valid until the next call."""
        self._images += images
        self._layers |= dict.fromkeys(tensors)
        found: dict[str, Tensor] = {}
        for names in _of_one_shape(tensors):
            units = self._unit_vectors([tensors[name] for name in names])
            found |= zip(names, units, strict=True)
            # The sum over all vectors of the product of two unit vectors is one entry of this layers × layers product.
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
        if shape not in self._buffers:
            self._buffers[shape] = layers[0].new_empty(shape)
        units = self._buffers[shape]
        for unit, layer in zip(units, layers, strict=True):
            lengths = torch.linalg.vector_norm(layer, dim=self._axis, keepdim=True).clamp_min(1e-12)
            torch.div(layer, lengths, out=unit)
        return units

    def means(self) -> tuple[tuple[str, ...], tuple[tuple[float | None, ...], ...]]:
        """(layers, the matrix of mean cosines); None for two layers of different shapes."""
        layers = tuple(self._layers)
        values = {pair: total / self._images for pair, total in self._sums.items()}
        return layers, tuple(tuple(values.get((first, second)) for second in layers) for first in layers)


def _of_one_shape(tensors: dict[str, Tensor]) -> Iterable[list[str]]:
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, value in tensors.items():
        groups.setdefault(tuple(value.shape), []).append(name)
    return groups.values()


def matrix_line(found: SimilarityMatrix) -> str:
    value = found.matrix[0][-1]
    return f"{found.layers[0]} to {found.columns[-1]}: {'not comparable' if value is None else f'{value:.3g}'}"
