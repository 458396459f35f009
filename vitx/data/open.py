"""Labelled image sets by name or by folder; `open_images` lists the formats."""

import os
from collections.abc import Callable
from functools import partial
from itertools import zip_longest
from pathlib import Path

from vitx.core.console import counted, log
from vitx.core.errors import InputError, unknown_name
from vitx.core.run import is_split_file
from vitx.data import cifar, hugging_face, webdataset
from vitx.data.digits import open_digits
from vitx.data.flat_folder import is_flat, open_flat, open_split_file
from vitx.data.folder import CheckSize, class_names_in, folders_in, list_images, open_folder, split_folder
from vitx.data.image_set import NAMED_SETS, SPLIT_NAMES, ImageSet, Split


def open_images(
    data: str | Path, split: Split, *, skip_bad: bool = False, check_size: CheckSize | None = None
) -> ImageSet:
    """Open one split of a named set ("digits", "imagenet", …) or of what lies at the path `data`.

    In a path are recognised, in this order: train/ and val/, each with one folder of images a class; CIFAR's own files;
    a Hugging Face data set; WebDataset shards; one folder a class, of which a fifth is the evaluation split. `data` may
    also be a pattern of shards with {split} in it, or the split.json of a run.

    Raises InputError for another split, when `data` is none of them, when train/ and val/ hold different class folders
    (`open_splits` compares the classes of every form), or when an image of a folder of at most 20,000 cannot be read
    or does not pass `check_size`; with `skip_bad` such images are left out and listed in `skipped`.
    """
    if split not in SPLIT_NAMES:
        raise unknown_name("split", split, SPLIT_NAMES)
    data = str(data)
    if data == "digits":
        return open_digits(split)
    if "{split}" in data:
        return webdataset.open_shards(data, split)
    if is_split_file(data):
        return open_split_file(Path(data), split)
    root = folder_of(data)
    if not ((root / "train").is_dir() and folders_in(root / "train")):
        if (open_split := _in_files(root)) is not None:
            return open_split(split)
        if is_flat(root):
            return open_flat(root, split, skip_bad=skip_bad, check_size=check_size)
    # Where nothing was recognised, this raises the error that says what a folder must hold.
    return open_folder(split_folder(root, split), class_names_in(root), skip_bad=skip_bad, check_size=check_size)


def _in_files(root: Path) -> Callable[[Split], ImageSet] | None:
    """What opens a split of a set that is no folder a class: CIFAR, Hugging Face, shards; None for another."""
    if (folder := cifar.find_folder(root)) is not None:
        return partial(cifar.open_cifar, folder)
    if hugging_face.is_hugging_face(root):
        return partial(hugging_face.open_hugging_face, root)
    if any(webdataset.find_shards(str(root), name) for name in SPLIT_NAMES):
        return partial(webdataset.open_shards, str(root))
    return None


def open_splits(
    data: str | Path, *, skip_bad: bool = False, check_size: CheckSize | None = None
) -> tuple[ImageSet, ImageSet]:
    """The images to train on and those to evaluate on; raise InputError as `open_images`, and for different classes.

    Hugging Face sets and shards name their classes a split each, so a label may mean another class in the other.
    """
    train, val = (open_images(data, split, skip_bad=skip_bad, check_size=check_size) for split in SPLIT_NAMES)
    for number, names in enumerate(zip_longest(train.class_names, val.class_names)):
        here, there = (f"'{name}'" if name is not None else "missing" for name in names)
        if here != there:
            raise InputError(
                f"'{data}': class {number} is {here} in train and {there} in val: give both splits the same classes, "
                "in the same order"
            )
    return train, val


def log_skipped(*sets: ImageSet) -> None:
    """Say how many images of each set were left out, and name the first."""
    for images in sets:
        if count := len(images.skipped):
            more = f" and {count - 1} more" if count > 1 else ""
            log(f"left out {counted(count, 'image')}: {images.skipped[0]}{more}")


def has_splits(root: Path) -> bool:
    """Whether a folder holds splits in a form that `open_images` knows: not images, nor class folders alone."""
    if any((root / split).is_dir() for split in SPLIT_NAMES):
        return True
    # A table or an archive beside images makes no set of them. Asked last, because it walks the whole folder.
    return _in_files(root) is not None and not list_images(root)


def folder_of(data: str) -> Path:
    """The folder of a named set, in $VITX_DATA or ./data, or `data` as a path; raise InputError when there is none."""
    root = Path(os.environ.get("VITX_DATA", "data")) / data if data in NAMED_SETS else Path(data)
    if not root.is_dir():
        hint = ", which are looked for in $VITX_DATA" if data in NAMED_SETS else ""
        found = f"'{root}' is a file" if root.exists() else f"no data at '{root}'"
        raise InputError(
            f"{found}: expected a folder with train/ and val/, or with a folder of images for each class, or one of: "
            f"{', '.join(NAMED_SETS)}{hint}"
        )
    return root
