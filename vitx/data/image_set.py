"""Labelled images: the record that every source makes and every stage reads."""

import hashlib
import io
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from PIL import Image

from vitx.core.preprocess import ImageError, Preprocessing, UInt8Array

Split = Literal["train", "val"]
EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
# All but the digits lie in a folder of their name in $VITX_DATA, or in ./data.
NAMED_SETS = ("digits", "cifar10", "cifar100", "imagenet")
# What data sets call the two splits; the first name that is found is taken.
SPLIT_NAMES: dict[Split, tuple[str, ...]] = {"train": ("train",), "val": ("val", "validation", "valid", "test")}


@dataclass(frozen=True)
class ImageSet:
    """Labelled images, read one at a time.

    keys: a name for each image, unique in the set. labels: class numbers int64 (N,), −1 where there are none.
    read: `read(i)` returns the encoded bytes (PNG, JPEG, …) of image i; raises ImageError where they are gone.
    skipped: files that were left out, and why.
    by_hash: whether the split was made here, of one folder, and a run has to keep it.
    """

    name: str
    class_names: tuple[str, ...]
    keys: tuple[str, ...]
    labels: npt.NDArray[np.int64]
    read: Callable[[int], bytes]
    skipped: tuple[str, ...] = ()
    by_hash: bool = False

    def __len__(self) -> int:
        return len(self.keys)

    def digest(self) -> str:
        """sha256 over keys, labels and bytes of all images, in order."""
        hasher = hashlib.sha256()
        for index, key in enumerate(self.keys):
            data = self.read(index)
            hasher.update(f"{key}\0{self.labels[index]}\0{len(data)}\0".encode())
            hasher.update(data)
        return hasher.hexdigest()

    def batches(self, preprocessing: Preprocessing, batch_size: int, threads: int = 2) -> Iterator[UInt8Array]:
        """Yield uint8 (B, image_size, image_size, 3) in order; the last batch may be smaller."""
        with ThreadPoolExecutor(threads) as pool:
            for start in range(0, len(self), batch_size):
                indices = range(start, min(start + batch_size, len(self)))
                yield np.stack(list(pool.map(lambda i: self._prepared(i, preprocessing), indices)))

    def _prepared(self, index: int, preprocessing: Preprocessing) -> UInt8Array:
        try:
            return preprocessing.from_bytes(self.read(index))
        except ImageError as error:
            raise ImageError(f"{self.keys[index]}: {error}") from None

    def first(self, count: int | None) -> "ImageSet":
        """The first `count` images (all of them for None)."""
        return self if count is None or count >= len(self) else self.subset(np.arange(count))

    def evenly_spaced(self, count: int | None) -> "ImageSet":
        """At most `count` images, evenly spaced over the set (all of them for None): see `evenly_spaced`."""
        return self if count is None else self.subset(evenly_spaced(len(self), count))

    def shuffled(self, seed: int) -> "ImageSet":
        """All images in an order drawn from the seed: batches of it are of most classes, however it is listed."""
        return self.subset(np.random.default_rng(seed).permutation(len(self)))

    def subset(self, indices: npt.NDArray[np.int64]) -> "ImageSet":
        """The images of `indices`, in that order."""
        keys = tuple(self.keys[index] for index in indices)
        read = SubsetReader(self.read, indices)
        return ImageSet(self.name, self.class_names, keys, self.labels[indices], read, self.skipped)


@dataclass(frozen=True)
class SubsetReader:
    """`ImageSet.read` of a subset; unlike a lambda it can be sent to another process."""

    read: Callable[[int], bytes]
    indices: npt.NDArray[np.int64]

    def __call__(self, index: int) -> bytes:
        return self.read(int(self.indices[index]))


def evenly_spaced(count: int, limit: int) -> npt.NDArray[np.int64]:
    """Ascending indices of at most `limit` of `count` images, evenly spaced from the first to the last.

    Images are mostly listed class by class, so the first `limit` would be of a few classes.
    """
    return np.linspace(0, count - 1, min(limit, count)).astype(np.int64)


def read_piece(path: Path, start: int = 0, size: int = -1) -> bytes:
    """`size` bytes of a file from `start` on, by default all; raise ImageError if it went away, or its disk did."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            return file.read(size)
    except OSError as error:
        raise ImageError(str(error)) from None


def encode_png(pixels: UInt8Array, compression: int = 0) -> bytes:
    """The PNG file of an image uint8 (H, W) or (H, W, 3), which keeps every byte.

    compression: zlib's, 0 to 9. Stored, with 0, the bytes, and so ImageSet.digest, are the same whatever version zlib
    has.
    """
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG", compress_level=compression)
    return buffer.getvalue()
