"""Labelled image sets by name or by folder; the formats are listed at `open_images`."""

import os
from pathlib import Path

from vitx.core.errors import InputError
from vitx.data.digits import open_digits
from vitx.data.folder import class_names_in, open_folder
from vitx.data.image_set import NAMED_SETS, SPLIT_NAMES, ImageSet, Split


def open_images(data: str, split: Split, *, skip_bad: bool = False) -> ImageSet:
    """Open a named set, or what lies at `data`: a folder with train/ and val/, each with a folder of images a class;
    CIFAR's own files; WebDataset shards; a Hugging Face data set. Shards may also be given as a pattern with {split}.

    Raises InputError when nothing is there, when train/ and val/ hold different classes, or when an image of a folder
    of at most 20,000 cannot be read; with `skip_bad` such images are left out and listed in `skipped`.
    """
    from vitx.data import cifar, hugging_face, webdataset  # each with libraries of its own

    if data == "digits":
        return open_digits(split)
    if "{split}" in data:
        return webdataset.open_shards(data, split)
    root = folder_of(data)
    if any(path.is_dir() for path in (root / "train").glob("*")):
        return open_folder(root / split, class_names_in(root), skip_bad=skip_bad)
    if (folder := cifar.find(root)) is not None:
        return cifar.open_cifar(folder, split)
    if hugging_face.is_dataset(root):
        return hugging_face.open_dataset(root, split)
    if any(webdataset.find_shards(str(root), name) for name in SPLIT_NAMES):
        return webdataset.open_shards(str(root), split)
    return open_folder(root / split, class_names_in(root), skip_bad=skip_bad)


def folder_of(data: str) -> Path:
    """The folder of a named set or of a path."""
    root = Path(os.environ.get("VITX_DATA", "data")) / data if data in NAMED_SETS else Path(data)
    if not root.is_dir():
        hint = ", which are looked for in $VITX_DATA" if data in NAMED_SETS else ""
        raise InputError(
            f"no data at '{root}': expected a folder with train/ and val/, or one of: {', '.join(NAMED_SETS)}{hint}"
        )
    return root
