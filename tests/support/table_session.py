"""Classifiers that are tables, for numbers worked out by hand: image i is a pixel that says i, its logits are row i."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vitx.core.preprocess import Preprocessing, UInt8Array
from vitx.data.image_set import ImageSet, encode_png
from vitx.runtimes.session import Float32Array, Session

PIXEL = Preprocessing(image_size=1)

# (the images of a batch in their order, their logits) → their logits
Change = Callable[[list[int], Float32Array], None]


def numbered_images(labels: Sequence[int], class_names: tuple[str, ...], name: str = "numbers") -> ImageSet:
    """Images that say their number; image i has the key "image i"."""

    def read(index: int) -> bytes:
        return encode_png(np.array([[[index >> 16, index >> 8 & 255, index & 255]]], np.uint8))

    keys = tuple(f"image {index}" for index in range(len(labels)))
    return ImageSet(name, class_names, keys, np.array(labels, np.int64), read)


class TableSession(Session):
    """Logits by image number. at_batch: other rows in batches of a size, by image; change: alters a batch in place.

    batches: the images of each call, in the order in which they came.
    """

    def __init__(
        self,
        table: npt.ArrayLike,
        *,
        at_batch: Mapping[int, Mapping[int, Sequence[float]]] | None = None,
        change: Change | None = None,
        provider: str = "cpu",
    ) -> None:
        super().__init__()
        self.table = np.array(table, np.float32)
        self.at_batch = at_batch or {}
        self.change = change
        self.provider = provider
        self.batches: list[list[int]] = []
        self.was_freed = False

    def _infer(self, images: UInt8Array) -> Float32Array:
        # Channels that are reversed say another number: it gets a row too.
        numbers = [(int(r) << 16 | int(g) << 8 | int(b)) % len(self.table) for r, g, b in images[:, 0, 0]]
        self.batches.append(numbers)
        logits: Float32Array = self.table[numbers]
        for place, number in enumerate(numbers):
            if number in self.at_batch.get(len(numbers), {}):
                logits[place] = self.at_batch[len(numbers)][number]
        if self.change is not None:
            self.change(numbers, logits)
        return logits

    def describe(self) -> dict[str, Any]:
        return {"runtime": "table", "provider": self.provider}

    def _close(self) -> None:
        self.was_freed = True
