"""Hugging Face data sets that lie on the disk: `save_to_disk` folders, and repositories with Parquet files."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitx.core.console import counted
from vitx.core.errors import UNUSABLE, InputError, missing_package
from vitx.core.preprocess import ImageError
from vitx.data.image_set import SPLIT_NAMES, ImageSet, Split, read_piece

LABEL_COLUMNS = ("label", "labels", "fine_label")


@dataclass(frozen=True)
class RowReader:
    """`ImageSet.read` of a data set: the encoded image of row i."""

    dataset: Any
    column: str

    def __call__(self, index: int) -> bytes:
        image = self.dataset[int(index)][self.column]
        if image is None:
            raise ImageError("no image in this row")
        content: bytes = image["bytes"] if image["bytes"] is not None else read_piece(Path(image["path"]))
        return content


def is_hugging_face(root: Path) -> bool:
    """Whether `root` was written by `save_to_disk`, or holds Parquet files that are not hidden."""
    found = (path.relative_to(root) for pattern in ("*.parquet", "*/*.parquet") for path in root.glob(pattern))
    shown = (not any(part.startswith(".") for part in path.parts) for path in found)
    return (root / "dataset_dict.json").is_file() or any(shown)


def open_hugging_face(root: Path, split: Split) -> ImageSet:
    """The images of one split; its ClassLabel names the classes. Parquet is converted once, into the library's cache.

    Raises EnvironmentMissing without the package `datasets`, InputError for data that it cannot read, without such a
    split, or without a column of images and one of class labels that says the class of each.
    """
    if importlib.util.find_spec("datasets") is None:
        raise missing_package("datasets", "huggingface")
    import datasets

    saved = (root / "dataset_dict.json").is_file()
    try:
        splits = datasets.load_from_disk(str(root)) if saved else datasets.load_dataset(str(root))
    except (OSError, datasets.exceptions.DatasetsError, *UNUSABLE) as error:
        raise InputError(f"'{root}' cannot be read as a Hugging Face data set: {error}") from None
    name = next((name for name in SPLIT_NAMES[split] if name in splits), None)
    if name is None:
        raise InputError(
            f"'{root}' has the splits {', '.join(splits)}: expected one of {', '.join(SPLIT_NAMES[split])}"
        )
    dataset = splits[name]
    images = [column for column, feature in dataset.features.items() if isinstance(feature, datasets.Image)]
    classes = {
        column: feature for column, feature in dataset.features.items() if isinstance(feature, datasets.ClassLabel)
    }
    label = next((column for column in (*LABEL_COLUMNS, *classes) if column in classes), None)
    if not images or label is None:
        raise InputError(
            f"'{root}' has the columns {', '.join(dataset.features)}: expected one of images and one of class labels"
        )
    # Undecoded: ImageSet.read returns encoded bytes, and every image goes through the one preprocessing.
    dataset = dataset.cast_column(images[0], datasets.Image(decode=False))
    labels = np.asarray([-1 if number is None else number for number in dataset[label][:]], dtype=np.int64)
    names = tuple(classes[label].names)
    unknown = np.flatnonzero((labels < 0) | (labels >= len(names)))
    if len(unknown):
        raise InputError(
            f"'{root}' says no class for {counted(len(unknown), 'image')} of the split '{name}', first in row "
            f"{unknown[0]}"
        )
    return ImageSet(
        name=str(root),
        class_names=names,
        keys=tuple(f"{name}/{row:07d}" for row in range(len(dataset))),
        labels=labels,
        read=RowReader(dataset.select_columns(images[0]), images[0]),
    )
