"""Unpacked copies of CIFAR-10-C, CIFAR-100-C, Tiny-ImageNet-C and ImageNet-C, as their authors distribute them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vitx.analyze.corruption.constants import CORRUPTIONS
from vitx.analyze.corruption.synthesis import SEVERITIES, check_corruption
from vitx.core.errors import InputError
from vitx.core.files import sha256_bytes
from vitx.core.preprocess import ImageError, decode
from vitx.data.cifar import PngReader
from vitx.data.folder import CheckSize, FileReader, folders_in, list_images
from vitx.data.image_set import ImageSet, encode_png

_LABELS = "labels.npy"  # of all arrays beside it


@dataclass(frozen=True)
class CorruptedCopies:
    """The path of each corruption that a folder has: an array file or a folder.

    class_names: the network's; None to name the classes by their folders or numbers.
    """

    paths: dict[str, Path]
    class_names: tuple[str, ...] | None = None

    @property
    def corruptions(self) -> tuple[str, ...]:
        """Those that the folder has, in the order of the benchmark."""
        return tuple(self.paths)

    def open(self, corruption: str, severity: int) -> ImageSet:
        """The labelled images of one corruption at severity 1 to 5.

        Raises InputError for a corruption or severity that the folder lacks, for damaged files, and for classes that
        the network does not know.
        """
        check_corruption(corruption, severity)
        if corruption not in self.paths:
            raise InputError(f"no copies of '{corruption}': the folder has {', '.join(self.paths)}")
        path = self.paths[corruption]
        return _from_array(path, severity, self.class_names) if path.is_file() else self._from_folder(path, severity)

    def _from_folder(self, path: Path, severity: int) -> ImageSet:
        """ImageNet-C: path/SEVERITY/CLASS/image."""
        folder = path / str(severity)
        found = _images_by_class(folder)
        names = self.class_names or tuple(found)
        unknown = [name for name in found if name not in names]
        if unknown:
            raise InputError(f"{folder} has the class '{unknown[0]}', which the network does not know")
        items = [(path, names.index(name)) for name, listed in found.items() for path in listed]
        if not items:
            raise InputError(f"{folder} has no folders of images, one a class: unpack the copies again")
        paths = tuple(path for path, _ in items)
        return ImageSet(
            name=str(folder),
            class_names=names,
            keys=tuple(str(path.relative_to(folder.parents[1])) for path in paths),
            labels=np.array([label for _, label in items], dtype=np.int64),
            read=FileReader(paths),
        )

    def files(self) -> Iterator[Path]:
        """Every file that is read of them, also through links to folders."""
        for path in self.paths.values():
            if path.is_file():
                yield from (path, path.with_name(_LABELS))
            else:
                for severity in SEVERITIES:
                    yield from chain.from_iterable(_images_by_class(path / str(severity)).values())


@dataclass(frozen=True)
class BlankForUnreadable:
    """`ImageSet.read` with a black image for what cannot be read; `unreadable`, by index, gets its key and why."""

    images: ImageSet
    check_size: CheckSize
    unreadable: dict[int, str]

    def __call__(self, index: int) -> bytes:
        try:
            data = self.images.read(index)
            decode(data, check_size=self.check_size)
        except ImageError as error:
            self.unreadable.setdefault(index, f"{self.images.keys[index]}: {error}")
            return encode_png(np.zeros((1, 1, 3), np.uint8))
        return data


def open_corrupted_copies(folder: Path, class_names: Sequence[str] | None = None) -> CorruptedCopies:
    """Find CORRUPTION.npy with labels.npy (CIFAR-C), or CORRUPTION/SEVERITY/CLASS/image (ImageNet-C), in `folder`.

    ImageNet-C's corruptions may be in folders of their groups (noise, blur, …). class_names: the network's, in its
    order; class folders are matched by name. Raises InputError when the folder has none of the fifteen corruptions.
    """
    paths = {}
    for name in CORRUPTIONS:
        grouped = sorted(path for path in folder.glob(f"*/{name}") if not path.parent.name.startswith("."))
        candidates = [folder / f"{name}.npy", folder / name, *grouped]
        found = next((path for path in candidates if (path.is_file() if path.suffix else path.is_dir())), None)
        if found is not None:
            paths[name] = found
    if not paths:
        raise InputError(
            f"no corrupted copies in '{folder}': expected files such as gaussian_noise.npy (CIFAR-C), or folders such "
            "as gaussian_noise/1/CLASS (ImageNet-C)"
        )
    return CorruptedCopies(paths, tuple(class_names) if class_names is not None else None)


def files_digest(folder: Path) -> str:
    """sha256 over the folder's place, and names, sizes and times of change of all files that are read of its copies.

    Raises InputError as `open_corrupted_copies`.
    """
    files = open_corrupted_copies(folder).files()
    stats = ((str(path.relative_to(folder)), path.stat()) for path in files if path.is_file())
    found = sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
    return sha256_bytes(repr((str(folder.resolve()), found)).encode())


def _images_by_class(folder: Path) -> dict[str, list[Path]]:
    return {name: list_images(folder / name) for name in folders_in(folder)} if folder.is_dir() else {}


def _from_array(path: Path, severity: int, class_names: tuple[str, ...] | None) -> ImageSet:
    """CIFAR-C: one array holds the five severities in order; only the part that is read is loaded."""
    images, labels = _load(path), _load(path.with_name(_LABELS))
    if images.ndim != 4 or images.shape[3] != 3 or images.dtype != np.uint8 or len(images) % len(SEVERITIES):
        raise InputError(f"{path} has shape {images.shape} and type {images.dtype}: expected uint8 (5·N, S, S, 3)")
    if not len(images):
        raise InputError(f"{path} has no images: unpack the archive of CIFAR-C again")
    if labels.dtype.kind not in "iu":
        raise InputError(f"labels.npy is of type {labels.dtype}: expected whole numbers")
    if labels.shape != images.shape[:1]:
        raise InputError(f"{path} has {len(images)} images, but labels.npy {labels.size} labels: expected as many")
    count = len(images) // len(SEVERITIES)
    part = slice(count * (severity - 1), count * severity)
    numbers = np.asarray(labels[part], dtype=np.int64)
    names = class_names or tuple(str(number) for number in range(int(labels.max()) + 1))
    if numbers.max() >= len(names) or numbers.min() < 0:
        wrong = numbers.min() if numbers.min() < 0 else numbers.max()
        raise InputError(f"labels.npy has the label {wrong}, but the network knows {len(names)} classes")
    return ImageSet(
        name=f"{path}:{severity}",
        class_names=names,
        keys=tuple(f"{path.stem}/{severity}/{number:05d}" for number in range(count)),
        labels=numbers,
        read=PngReader(images[part]),
    )


def _load(path: Path) -> npt.NDArray[Any]:
    if not path.is_file():
        raise InputError(f"{path} does not exist: unpack the whole archive of CIFAR-C")
    try:
        return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
    except (ValueError, OSError, EOFError) as error:
        raise InputError(f"{path} is not a numpy array: {error}") from None
