"""scikit-learn's handwritten digits: the data set that comes with a package and needs no download."""

import importlib.util
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vitx.core.errors import missing_package
from vitx.data.image_set import ImageSet, Split, encode_png


def open_digits(split: Split) -> ImageSet:
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
    table = _table()
    grey = np.rint(table[:, :-1].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)  # the set counts grey from 0 to 16
    return [encode_png(image) for image in grey], table[:, -1].astype(np.int64)


def _table() -> npt.NDArray[np.float64]:
    """(1797, 65): an image's 64 pixels in rows, then its digit."""
    found = importlib.util.find_spec("sklearn")
    if found is None:
        raise missing_package("scikit-learn", "train")
    file = Path(found.origin or "").parent / "datasets" / "data" / "digits.csv.gz"
    if file.is_file():  # what load_digits reads; to import that takes seconds, most of them for scipy
        return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits

    digits = load_digits()
    return np.column_stack([digits.data, digits.target])
