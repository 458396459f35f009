"""One folder of images a class, without train/ and val/: a fifth of each class is kept for evaluation.

A run keeps the split that it began with in split.json, and every later stage reads that: images that are added to the
folder afterwards change neither what was trained on nor what is measured.
"""

import hashlib
import os
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from vitx.core.errors import InputError
from vitx.core.files import Record, read_record, unescape_invalid_utf8
from vitx.core.run import SPLIT_FILE, is_split_file
from vitx.data.folder import (
    CheckSize,
    FileReader,
    beside_classes,
    class_folders,
    folders_in,
    list_images,
    quoted,
    readable_images,
)
from vitx.data.image_set import EXTENSIONS, SPLIT_NAMES, ImageSet, Split

PARTS: dict[Split, str] = {"train": " among those to train on", "val": " among those kept for evaluation"}
EVALUATED_SHARE = 0.2
# What others call splits; folders of these names alone, in capitals or not, are hardly classes.
_LIKE_SPLITS = {"train", "training", "val", "valid", "validation", "test", "testing"}


class ImagesOfSplit(Record):
    """images: their paths below the folder, each class in turn, as `escape_invalid_utf8` writes them. skipped: those
    left out, and why.
    """

    images: tuple[str, ...]
    skipped: tuple[str, ...] = ()


class FolderSplit(Record):
    """`split.json`: which images of a folder are trained on, and which are for evaluation."""

    format_version: Literal[1] = 1
    folder: str
    class_names: tuple[str, ...]
    train: ImagesOfSplit
    val: ImagesOfSplit

    @classmethod
    def of(cls, train: ImageSet, val: ImageSet) -> "FolderSplit":
        """The split of two sets that `open_flat` has opened."""
        parts = [ImagesOfSplit(images=images.keys, skipped=images.skipped) for images in (train, val)]
        return cls(folder=train.name, class_names=train.class_names, train=parts[0], val=parts[1])


def check_outside(images: ImageSet, out: Path) -> None:
    """Raise InputError for a folder of results among the class folders of `images`, or among images without labels.

    Runs and reports have images too.
    """
    of_run = is_split_file(images.name)
    folder = read_record(Path(images.name), FolderSplit).folder if of_run else images.name
    root, made = (Path(os.path.realpath(path)) for path in (folder, out))
    listed = images.by_hash or of_run or not images.class_names
    if listed and made.is_relative_to(root) and not any(part.startswith(".") for part in made.relative_to(root).parts):
        taken = (
            "the next run would take it for a class of images" if images.class_names else "its pictures would be images"
        )
        raise InputError(f"'{out}' is in '{root}', where {taken}: pass another --out")


def is_flat(root: Path) -> bool:
    """Whether `root` holds folders beside those that splits are called."""
    of_splits = {name for names in SPLIT_NAMES.values() for name in names}
    return bool({*folders_in(root)} - of_splits) or not folders_in(root)


def open_flat(root: Path, split: Split, *, skip_bad: bool, check_size: CheckSize | None = None) -> ImageSet:
    """One split of a folder of class folders. Raises InputError when it has fewer than two classes, or images of each,
    or when all are called like splits.

    Which images are for evaluation follows from their names alone: the same on every machine, and in every process.
    """
    classes = class_folders(root)
    images = [list_images(root / name) for name in classes]
    _require_two_of_each(root, classes, [len(paths) for paths in images])
    chosen = [(path, label) for label, paths in enumerate(images) for path in _of_split(root, paths, split)]
    beside = beside_classes(root) if split == "train" else []  # said once
    images_of_split = readable_images(
        root, classes, chosen, beside, name=str(root), skip_bad=skip_bad, check_size=check_size, part=PARTS[split]
    )
    return replace(images_of_split, by_hash=True)


def open_split_file(path: Path, split: Split) -> ImageSet:
    """One split as the run of this `split.json` began with it; raise InputError when its images are gone."""
    if not path.is_file():
        raise InputError(f"{path} does not exist: if the run was moved, give the {SPLIT_FILE} in it with --data")
    kept = read_record(path, FolderSplit)
    part: ImagesOfSplit = getattr(kept, split)
    root, numbers = Path(kept.folder), {name: number for number, name in enumerate(kept.class_names)}
    names = [unescape_invalid_utf8(name) for name in part.images]
    paths = tuple(root / name for name in names)
    classless = [name for name in names if name.partition("/")[0] not in numbers]
    if classless or not paths:
        what = f"has {quoted(classless)}, below the folder of no class" if classless else f"has no {split} images"
        raise InputError(f"{path} {what}: restore the file, or train into another --out")
    missing = [str(file) for file in paths if not file.is_file()]
    if missing:
        raise InputError(
            f"{quoted(missing)} of {path} cannot be found: put the images back, or use other data: with vitx train in "
            "another --out, else with --data"
        )
    labels = np.array([numbers[name.partition("/")[0]] for name in names], np.int64)
    return ImageSet(str(path), kept.class_names, part.images, labels, FileReader(paths), part.skipped)


def _of_split(root: Path, paths: list[Path], split: Split) -> list[Path]:
    """The images of one class that are in `split`, sorted: the first fifth by a hash of their names, one at least."""
    by_hash = sorted(
        paths,
        key=lambda path: hashlib.sha256(path.relative_to(root).as_posix().encode("utf-8", "surrogateescape")).digest(),
    )
    evaluated = max(1, round(EVALUATED_SHARE * len(paths)))
    return sorted(by_hash[:evaluated] if split == "val" else by_hash[evaluated:])


def _require_two_of_each(root: Path, classes: tuple[str, ...], counts: list[int]) -> None:
    if len(classes) < 2:
        found = f"one folder, '{classes[0]}'" if classes else "no folders"
        raise InputError(f"'{root}' has {found}: expected one folder of images for each class, two classes at least")
    if all(name.lower() in _LIKE_SPLITS for name in classes):
        raise InputError(f"'{root}' has {quoted(classes)}, which look like splits: rename them to train and val")
    empty = [name for name, count in zip(classes, counts, strict=True) if not count]
    if empty:
        kinds = {path.suffix.lower() for path in (root / empty[0]).rglob("*") if path.is_file()}
        holds = f"its files are {', '.join(sorted(kinds))}" if kinds else "it is empty"
        raise InputError(
            f"'{root}' has no image of {quoted(empty)} ({holds}): expected {', '.join(sorted(EXTENSIONS))}; "
            "add images, or remove the folder"
        )
    lone = [name for name, count in zip(classes, counts, strict=True) if count == 1]
    if lone:
        raise InputError(
            f"'{root}' has one image alone of {quoted(lone)}: expected two at least, one to train on and one for "
            "evaluation; add images, or remove the folder"
        )
