"""Accuracies by condition, counted over batches of labelled images: memory is that of one batch."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator

import numpy as np
import numpy.typing as npt

from vitx.core.errors import InputError
from vitx.core.preprocess import UInt8Array

# uint8 (B, S, S, 3) → logits (B, C): `vitx.analyze.predictor`'s, a session of a server, or any function.
Predict = Callable[[UInt8Array], npt.NDArray[np.floating]]
Labels = npt.NDArray[np.integer]


def require_batch(images: UInt8Array) -> None:
    """Raise InputError unless `images` are uint8 (B, S, S, 3)."""
    if images.ndim != 4 or images.shape[1] != images.shape[2] or images.shape[3] != 3 or images.dtype != np.uint8:
        raise InputError(f"images of shape {images.shape} and type {images.dtype}: expected uint8 (B, S, S, 3)")


def numbered(images: Iterable[UInt8Array], labels: Labels) -> Iterator[tuple[int, UInt8Array, Labels]]:
    """Each batch with the number of its first image and its labels.

    Raises InputError for batches of another shape or type, and when there are not as many images as labels.
    """
    first = 0
    for batch in images:
        require_batch(batch)
        if first + len(batch) > len(labels):
            raise InputError(f"more images than the {len(labels)} labels")
        yield first, batch, labels[first : first + len(batch)]
        first += len(batch)
    if first != len(labels) or not first:
        raise InputError(f"{first} images and {len(labels)} labels: expected as many, at least one")


class Tally:
    """Accuracies by condition."""

    def __init__(self) -> None:
        self._correct: Counter[Hashable] = Counter()
        self._images: Counter[Hashable] = Counter()

    def add(self, condition: Hashable, logits: npt.NDArray[np.floating], labels: Labels) -> None:
        self._correct[condition] += int((logits.argmax(axis=1) == labels).sum())
        self._images[condition] += len(labels)

    def accuracy(self, condition: Hashable) -> float:
        return self._correct[condition] / self._images[condition]

    def images(self, condition: Hashable) -> int:
        return self._images[condition]
