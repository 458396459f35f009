"""How alike every two layers are: the matrix that three metrics give, and the mean cosine of two."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from vitx.core.files import Record


class SimilarityMatrix(Record):
    """`matrix[i][j]` of `layers[i]` and `layers[j]` (`columns[j]` where another network is on the other side).

    None where two layers cannot be compared: their shapes differ, or one is the same for all images.
    """

    layers: tuple[str, ...]
    columns: tuple[str, ...]
    matrix: tuple[tuple[float | None, ...], ...]


class MeanGram:
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


def matrix_line(found: SimilarityMatrix) -> str:
    value = found.matrix[0][-1]
    return f"{found.layers[0]} to {found.columns[-1]}: {'not comparable' if value is None else f'{value:.3g}'}"
