"""CIFAR-10 and CIFAR-100 as their authors distribute them, unpacked: the binary version and the Python version."""

import io
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vitx.core.errors import UNUSABLE, InputError
from vitx.core.preprocess import UInt8Array
from vitx.data.image_set import ImageSet, Split, encode_png


class _Archive(NamedTuple):
    """The files of one of the four archives that the authors offer, and where labels and class names are in them.

    Binary: `label_bytes` stand before the pixels of each image, the last of them is the (fine) class. Python: pickled
    dictionaries with these keys.
    """

    train: tuple[str, ...]
    val: str
    class_names: str
    label_bytes: int = 0
    label_key: str = ""
    names_key: str = ""


_ARCHIVES = {
    "cifar-10-batches-bin": _Archive(
        tuple(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin", "batches.meta.txt", label_bytes=1
    ),
    "cifar-100-binary": _Archive(("train.bin",), "test.bin", "fine_label_names.txt", label_bytes=2),
    "cifar-10-batches-py": _Archive(
        tuple(f"data_batch_{i}" for i in range(1, 6)),
        "test_batch",
        "batches.meta",
        label_key="labels",
        names_key="label_names",
    ),
    "cifar-100-python": _Archive(("train",), "test", "meta", label_key="fine_labels", names_key="fine_label_names"),
}
IMAGE_BYTES = 3 * 32 * 32


@dataclass(frozen=True)
class PngReader:
    """`ImageSet.read` of an array uint8 (N, H, W, 3): the bytes of image i as PNG."""

    images: UInt8Array

    def __call__(self, index: int) -> bytes:
        return encode_png(self.images[index])


def find_folder(root: Path) -> Path | None:
    """The folder with CIFAR's files: `root` or one directly in it."""
    root = root.resolve()  # its own name, where it is a link or the current folder
    places = [place for name in _ARCHIVES for place in (root, root / name) if place.name == name]
    return next((place for place in places if place.is_dir()), None)


def open_cifar(folder: Path, split: Split) -> ImageSet:
    """One split of a folder that `find_folder` found; raise InputError for a file that is missing or damaged."""
    archive = _ARCHIVES[folder.name]
    read = _read_binary if archive.label_bytes else _read_python
    files = archive.train if split == "train" else (archive.val,)
    parts = [read(_existing(folder / name), archive) for name in files]
    labels = np.concatenate([part[1] for part in parts])
    names = _class_names(_existing(folder / archive.class_names), archive)
    for label in (labels.min(), labels.max()):
        if not 0 <= label < len(names):
            raise InputError(f"{folder} has the label {label} but names {len(names)} classes: unpack it again")
    return ImageSet(
        name=str(folder),
        class_names=names,
        keys=tuple(f"{split}/{number:05d}" for number in range(len(labels))),
        labels=labels,
        read=PngReader(np.concatenate([part[0] for part in parts])),
    )


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise InputError(f"{path} does not exist: unpack the whole archive of CIFAR")
    return path


def _as_images(flat: UInt8Array) -> UInt8Array:
    """(N, 3·32·32), all red, then all green, then all blue → (N, 32, 32, 3)."""
    return np.ascontiguousarray(flat.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


def _read_binary(path: Path, archive: _Archive) -> tuple[UInt8Array, npt.NDArray[np.int64]]:
    """Images uint8 (N, 32, 32, 3) and labels int64 (N,) of one file."""
    row = archive.label_bytes + IMAGE_BYTES
    data = np.fromfile(path, np.uint8)
    if not len(data) or len(data) % row:
        raise InputError(f"{path} has {len(data)} bytes, not a multiple of {row}: unpack it again")
    rows = data.reshape(-1, row)
    return _as_images(rows[:, archive.label_bytes :]), rows[:, archive.label_bytes - 1].astype(np.int64)


def _read_python(path: Path, archive: _Archive) -> tuple[UInt8Array, npt.NDArray[np.int64]]:
    batch = _unpickle(path)
    try:
        flat = np.asarray(batch[b"data"], np.uint8)
        labels = np.asarray(batch[archive.label_key.encode()], np.int64)
        images = _as_images(flat)
        if labels.ndim != 1:
            raise ValueError(f"labels of {labels.ndim} axes")
    except UNUSABLE as error:
        raise InputError(f"{path} is not a batch of CIFAR: {error}") from None
    if len(images) != len(labels) or not len(labels):
        raise InputError(f"{path} has {len(images)} images and {labels.size} labels: unpack it again")
    return images, labels


def _class_names(path: Path, archive: _Archive) -> tuple[str, ...]:
    content = path.read_bytes() if archive.label_bytes else _unpickle(path)
    try:
        if isinstance(content, bytes):
            return tuple(content.decode().split())
        return tuple(name.decode() for name in content[archive.names_key.encode()])
    except UNUSABLE as error:
        raise InputError(f"{path} does not name the classes of CIFAR ({error}): unpack it again") from None


class _ArraysOnly(pickle.Unpickler):
    """CIFAR's Python version is pickled: nothing but numpy's arrays may be built from it."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in {("numpy.core.multiarray", "_reconstruct"), ("numpy._core.multiarray", "_reconstruct")}:
            return np._core.multiarray._reconstruct  # type: ignore[attr-defined]  # what the file asks for by name
        if (module, name) in {("numpy", "ndarray"), ("numpy", "dtype")}:
            return getattr(np, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def _unpickle(path: Path) -> dict[bytes, Any]:
    try:
        content = _ArraysOnly(io.BytesIO(path.read_bytes()), encoding="bytes").load()
    # A damaged or hostile pickle can raise anything; all of it means the same to the user.
    except Exception as error:  # noqa: BLE001
        raise InputError(f"{path} is not a file of CIFAR: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} is not a file of CIFAR: it holds a {type(content).__name__}")
    return content
