"""Labelled image sets by name or by folder; the formats are listed at `open_images`."""

import hashlib
import importlib.util
import io
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
from PIL import Image

from vitx.core.errors import InputError, missing_package
from vitx.core.preprocess import ImageError, Preprocessing, UInt8Array, decode

Split = Literal["train", "val"]
EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
# Beside the digits: found in the folder of their name in $VITX_DATA, or in ./data.
NAMED_SETS = ("digits", "cifar10", "cifar100", "imagenet")
# How others call the two splits; the first found is taken.
SPLIT_NAMES: dict[Split, tuple[str, ...]] = {"train": ("train",), "val": ("val", "validation", "valid", "test")}
# A folder with more images than this is not read through before a run begins.
CHECKED_IMAGES = 20_000


@dataclass(frozen=True)
class ImageSet:
    """Labelled images, read one at a time: `read(i)` returns the encoded bytes of image i."""

    name: str
    class_names: tuple[str, ...]
    keys: tuple[str, ...]
    labels: npt.NDArray[np.int64]
    read: Callable[[int], bytes]
    skipped: tuple[str, ...] = ()

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

    def subset(self, indices: npt.NDArray[np.int64]) -> "ImageSet":
        """The images of `indices`, in that order."""
        keys = tuple(self.keys[index] for index in indices)
        read = self.read
        return ImageSet(
            *(self.name, self.class_names, keys, self.labels[indices]),
            read=lambda index: read(int(indices[index])),
            skipped=self.skipped,
        )


def evenly_spaced(count: int, limit: int) -> npt.NDArray[np.int64]:
    """Ascending indices of at most `limit` of `count` images: the head of a folder is of one class."""
    return np.linspace(0, count - 1, min(limit, count)).astype(np.int64)


def open_images(data: str, split: Split, *, skip_bad: bool = False) -> ImageSet:
    """Open a named set, or what lies at `data`: a folder with train/ and val/, each with a folder of images a class;
    CIFAR's own files; WebDataset shards; a Hugging Face data set. Shards may also be given as a pattern with {split}.

    Raises InputError when nothing is there, when train/ and val/ hold different classes, or when an image of a folder
    of at most 20,000 cannot be read; with `skip_bad` such images are left out and listed in `skipped`.
    """
    from vitx.core import cifar, hugging_face, webdataset  # they make an ImageSet, so they import this module

    if data == "digits":
        return _digits(split)
    if "{split}" in data:
        return webdataset.open_shards(data, split)
    root = _root(data)
    if any(path.is_dir() for path in (root / "train").glob("*")):
        return _image_folder(root / split, _class_names(root), skip_bad=skip_bad)
    if (folder := cifar.find(root)) is not None:
        return cifar.open_cifar(folder, split)
    if hugging_face.is_dataset(root):
        return hugging_face.open_dataset(root, split)
    if any(webdataset.find_shards(str(root), name) for name in SPLIT_NAMES):
        return webdataset.open_shards(str(root), split)
    return _image_folder(root / split, _class_names(root), skip_bad=skip_bad)


def _root(data: str) -> Path:
    """The folder of a named set or of a path."""
    root = Path(os.environ.get("VITX_DATA", "data")) / data if data in NAMED_SETS else Path(data)
    if not root.is_dir():
        hint = ", which are looked for in $VITX_DATA" if data in NAMED_SETS else ""
        raise InputError(
            f"no data at '{root}': expected a folder with train/ and val/, or one of: {', '.join(NAMED_SETS)}{hint}"
        )
    return root


def list_images(folder: Path) -> list[Path]:
    """All image files under `folder`, recursively, in sorted order; hidden files and folders are left out."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in EXTENSIONS
        and path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def _class_names(root: Path) -> tuple[str, ...]:
    """The classes of train/ and of val/, which must be the same."""
    found: dict[str, set[str]] = {}
    for split in ("train", "val"):
        folder = root / split
        if not folder.is_dir():
            raise InputError(
                f"{folder} does not exist: expected train/ and val/ in '{root}', each with a folder a class"
            )
        found[split] = {path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")}
        if not found[split]:
            raise InputError(f"{folder} is empty: expected one folder of images a class")
    for here, there in (("train", "val"), ("val", "train")):
        missing = sorted(found[here] - found[there])
        if missing:
            raise InputError(f"{root / there} has no folder for {_quoted(missing)}, which {root / here} has")
    return tuple(sorted(found["train"]))


def _quoted(names: Sequence[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _image_folder(folder: Path, class_names: tuple[str, ...], *, skip_bad: bool) -> ImageSet:
    found = [(path, label) for label, name in enumerate(class_names) for path in list_images(folder / name)]
    checked = [path for path, _ in found] if len(found) <= CHECKED_IMAGES else []
    with ThreadPoolExecutor() as pool:
        problems = list(pool.map(_problem, checked)) or [None] * len(found)
    bad = [f"{path}: {problem}" for (path, _), problem in zip(found, problems, strict=True) if problem]
    if bad and not skip_bad:
        more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        raise InputError(f"unreadable image {bad[0]}{more}; repair or remove it, or pass --skip-bad to leave it out")
    good = [item for item, problem in zip(found, problems, strict=True) if not problem]
    counts = np.bincount([label for _, label in good], minlength=len(class_names))
    empty = [class_names[label] for label in np.flatnonzero(counts == 0)]
    if empty:
        raise InputError(f"{folder} has no readable image of {_quoted(empty)}")
    paths = tuple(path for path, _ in good)
    return ImageSet(
        name=str(folder.parent),
        class_names=class_names,
        keys=tuple(str(path.relative_to(folder)) for path in paths),
        labels=np.array([label for _, label in good], dtype=np.int64),
        read=_Files(paths),
        skipped=tuple(bad),
    )


@dataclass(frozen=True)
class _Files:
    """Reads file i; unlike a lambda it can be sent to a process."""

    paths: tuple[Path, ...]

    def __call__(self, index: int) -> bytes:
        return self.paths[index].read_bytes()


def _problem(path: Path) -> str | None:
    """Why an image cannot be read, or None."""
    try:
        decode(path)
    except ImageError as error:
        return str(error)
    return None


def _digits(split: Split) -> ImageSet:
    """scikit-learn's handwritten digits (UCI, 8×8 grey) as PNG: every fifth image is in `val`, 360 of 1,797."""
    pngs, labels = _digits_png()
    index = np.arange(len(labels))
    chosen = index[index % 5 == 0] if split == "val" else index[index % 5 != 0]
    return ImageSet(
        name="digits",
        class_names=tuple(str(digit) for digit in range(10)),
        keys=tuple(f"{i:04d}.png" for i in chosen),
        labels=labels[chosen],
        read=[pngs[i] for i in chosen].__getitem__,
    )


@lru_cache(maxsize=1)
def _digits_png() -> tuple[list[bytes], npt.NDArray[np.int64]]:
    if importlib.util.find_spec("sklearn") is None:
        raise missing_package("scikit-learn", "train")
    from sklearn.datasets import load_digits

    digits = load_digits()
    return [encode_png(np.rint(image * (255 / 16)).astype(np.uint8)) for image in digits.images], digits.target.astype(
        np.int64
    )


def encode_png(pixels: UInt8Array) -> bytes:
    buffer = io.BytesIO()
    # Stored, not compressed: the bytes, and so the digest, do not depend on the version of a compressor.
    Image.fromarray(pixels).save(buffer, format="PNG", compress_level=0)
    return buffer.getvalue()
