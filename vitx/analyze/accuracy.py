"""Top-1 accuracies by condition, counted batch by batch: memory is that of one batch.

Shape letters: B batch, S the side of an image, C classes.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator

import numpy as np
import numpy.typing as npt

from vitx.core.errors import InputError
from vitx.core.preprocess import UInt8Array
from vitx.core.probabilities import require_finite

# uint8 (B, S, S, 3) → logits (B, C): `vitx.analyze.predictor.predictor(…)`, a session's `infer`, or any function.
Predict = Callable[[UInt8Array], npt.NDArray[np.floating]]
Labels = npt.NDArray[np.integer]


def require_batch(images: UInt8Array) -> None:
    """Raise InputError unless `images` are uint8 (B, S, S, 3)."""
    if images.ndim != 4 or images.shape[1] != images.shape[2] or images.shape[3] != 3 or images.dtype != np.uint8:
        raise InputError(f"images of shape {images.shape} and type {images.dtype}: expected uint8 (B, S, S, 3)")


def labelled_batches(images: Iterable[UInt8Array], labels: Labels) -> Iterator[tuple[int, UInt8Array, Labels]]:
    """(index of its first image among all, the batch, its labels) of each batch uint8 (B, S, S, 3).

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


class AccuracyCounter:
    """Right and wrong answers by condition: None for clean images, or what was done to them or to the network."""

    def __init__(self) -> None:
        self._correct: defaultdict[Hashable, list[npt.NDArray[np.bool_]]] = defaultdict(list)

    def add(self, condition: Hashable, logits: npt.NDArray[np.floating], labels: Labels) -> None:
        """Count a batch: logits (B, C), labels (B,); logits that are not finite name no class, and so a wrong one.

        Raises InputError for clean images with such logits.
        """
        if condition is None:
            require_finite(logits)
        named = np.isfinite(logits).all(axis=1)  # argmax takes NaN for class 0
        self._correct[condition].append(named & (logits.argmax(axis=1) == labels))

    def correct(self, condition: Hashable) -> npt.NDArray[np.bool_]:
        """Whether the answer to each image was right, bool (N,)."""
        return np.concatenate(self._correct[condition])

    def keep(self, kept: npt.NDArray[np.bool_]) -> None:
        """Forget the answers to all other images, bool (N,), under every condition."""
        for condition in self._correct:
            self._correct[condition] = [self.correct(condition)[kept]]

    def accuracy(self, condition: Hashable) -> float:
        """The share of correct answers, 0 to 1."""
        return float(self.correct(condition).mean())

    def images(self, condition: Hashable) -> int:
        return len(self.correct(condition))
