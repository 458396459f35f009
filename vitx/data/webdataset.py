"""WebDataset shards: tar files whose members 000123.jpg and 000123.cls (or .json) are one sample.

Shards are indexed, not streamed: an image is read at its offset in the file, so a shuffle is over the whole set and
does not depend on the number of workers. In a compressed tar an image has no offset, so those are refused.
"""

import json
import tarfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from vitx.core.errors import InputError
from vitx.data.image_set import EXTENSIONS, SPLIT_NAMES, ImageSet, Split, read_piece
from vitx.data.whole_tar import WholeTarInfo, check_only_zeros

CLASS_NAMES_FILE = "classnames.txt"
_MOST_CLASSES = 1 << 20  # without names, each number up to the largest becomes one
_MOST_LABEL_BYTES = 1 << 20  # they are read whole


@dataclass(frozen=True)
class TarReader:
    """`ImageSet.read` of tar files: image i is the `size[i]` bytes from `start[i]` on of file `file_index[i]`."""

    files: tuple[Path, ...]
    file_index: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]
    size: npt.NDArray[np.int64]

    def __call__(self, index: int) -> bytes:
        return read_piece(self.files[int(self.file_index[index])], int(self.start[index]), int(self.size[index]))


class _Sample(NamedTuple):
    key: str
    label: int
    shard: int
    start: int
    size: int


def find_shards(data: str, split: Split) -> tuple[Path, ...]:
    """The shards of a split: by a pattern with {split} in it, or in the folder `data` as SPLIT/*.tar or *SPLIT*.tar.

    Hidden files are left out: macOS writes a ._train-000.tar beside each file that it copies.
    """
    for name in SPLIT_NAMES[split]:
        if "{split}" in data:
            pattern = Path(data.replace("{split}", name))
            found = sorted(pattern.parent.glob(pattern.name))
        else:
            found = sorted([*Path(data).glob(f"{name}/*.tar"), *Path(data).glob(f"*{name}*.tar")])
        if shown := tuple(path for path in found if not path.name.startswith(".")):
            return shown
    return ()


def open_shards(data: str, split: Split) -> ImageSet:
    """The images of `find_shards`.

    Labels are class numbers, in .cls or as "label" in .json; the names are the lines of classnames.txt beside the
    shards, or else the numbers up to the largest of both splits. Raises InputError for a split without shards, a shard
    that is damaged, compressed or of both splits, and a sample without image or label.
    """
    shards = find_shards(data, split)
    if not shards:
        raise InputError(f"no {split} shards at '{data}': expected names such as {split}-000.tar, or a pattern")
    both = {*find_shards(data, "train")} & {*find_shards(data, "val")}
    if both:  # *train*.tar and *val*.tar find trainval.tar, and retrieval-train.tar
        raise InputError(
            f"'{min(both)}' is a shard of both splits by its name: give a pattern with {{split}} in it "
            "that finds it once"
        )
    samples = _index(shards)
    names = _class_names(data, shards[0].parent)
    labels = np.array([sample.label for sample in samples], dtype=np.int64)
    if labels.max() >= len(names):
        raise InputError(f"'{data}' has labels from {labels.min()} to {labels.max()} but {len(names)} class names")
    places = np.array([(sample.shard, sample.start, sample.size) for sample in samples], dtype=np.int64)
    return ImageSet(
        name=data,
        class_names=names,
        keys=tuple(f"{shards[sample.shard].name}/{sample.key}" for sample in samples),
        labels=labels,
        read=TarReader(shards, *places.T),
    )


@lru_cache(maxsize=4)
def _index(shards: tuple[Path, ...]) -> tuple[_Sample, ...]:
    """All samples, shard by shard; kept, as class names without a file are counted from both splits."""
    return tuple(sample for number, path in enumerate(shards) for sample in _samples(path, number))


def _samples(path: Path, shard: int) -> list[_Sample]:
    """The samples of one shard, by their members' names and offsets; of the contents the labels alone are read."""
    places: dict[str, tuple[int, int]] = {}
    labels: dict[str, int] = {}
    try:
        with path.open("rb") as content, tarfile.open(fileobj=content, mode="r:", tarinfo=WholeTarInfo) as archive:
            for member in archive:
                folder, _, file = member.name.rpartition("/")
                stem, _, kind = file.partition(".")
                key = f"{folder}/{stem}" if folder else stem
                is_image = f".{kind.lower()}" in EXTENSIONS
                if not is_image and kind not in ("cls", "json"):
                    continue
                if not member.isreg() or member.issparse():
                    raise InputError(f"{path}: '{member.name}' is a link or sparse: write a shard of plain files")
                if is_image:
                    if key in places:
                        raise InputError(f"{path}: sample '{key}' has two images: expected one")
                    places[key] = (member.offset_data, member.size)
                    continue
                if member.size > _MOST_LABEL_BYTES:
                    expected = f"expected at most {_MOST_LABEL_BYTES:,} in a label"
                    raise InputError(f"{path}: '{member.name}' has {member.size:,} bytes: {expected}")
                if (text := archive.extractfile(member)) is not None:
                    labels.setdefault(key, _label(text.read(), kind, f"{path}: {member.name}"))
            content.seek(archive.offset)
            check_only_zeros(content, archive.offset)
    except tarfile.TarError as error:
        raise InputError(
            f"{path} is not a plain tar file, or not whole ({error}): repair it, or unpack it where it is compressed"
        ) from None
    if places.keys() != labels.keys() or not places:
        lone = min(places.keys() ^ labels.keys(), default="nothing")
        raise InputError(f"{path}: expected an image and a .cls or .json label for each sample, got '{lone}'")
    return [_Sample(key, labels[key], shard, *place) for key, place in places.items()]


def _label(content: bytes, kind: str, where: str) -> int:
    try:
        given = content if kind == "cls" else json.loads(content)["label"]
        number = int(given)
        if isinstance(given, float) and number != given:
            raise ValueError(given)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise InputError(f'{where} holds no class number: expected digits in .cls, or "label" in .json') from None
    if not 0 <= number < _MOST_CLASSES:
        raise InputError(f"{where} says class {number}: expected 0 to {_MOST_CLASSES - 1:,}")
    return number


def _class_names(data: str, folder: Path) -> tuple[str, ...]:
    """The lines of classnames.txt beside the shards or one folder up, else the numbers up to the largest label."""
    for place in (folder, folder.parent):
        if (place / CLASS_NAMES_FILE).is_file():
            return _names_in(place / CLASS_NAMES_FILE)
    largest = max(sample.label for split in SPLIT_NAMES for sample in _index(find_shards(data, split)))
    return tuple(str(number) for number in range(largest + 1))


def _names_in(path: Path) -> tuple[str, ...]:
    """One name a line; two classes may have one name, as ImageNet's two of "sunglasses" in the list of CLIP."""
    try:
        names = path.read_text("utf-8-sig").rstrip().split("\n")  # Windows' editors begin it with a byte order mark
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not a text in UTF-8: {error}") from None
    empty = [number for number, name in enumerate(names, 1) if not name.strip()]
    if empty or not names:
        raise InputError(f"{path} names no class in line {min(empty, default=1)}: expected one name a line")
    return tuple(names)
