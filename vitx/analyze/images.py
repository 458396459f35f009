"""The images of an analysis: an evaluation split, or a plain folder of images without labels."""

from pathlib import Path

from vitx.core.errors import InputError
from vitx.data.folder import CheckSize, list_images, readable_images
from vitx.data.image_set import NAMED_SETS, ImageSet
from vitx.data.open import has_splits, open_images


def open_analysis_images(
    data: str | Path, limit: int | None = None, *, skip_bad: bool = False, check_size: CheckSize | None = None
) -> ImageSet:
    """The evaluation split of `data`, as every verb reads it, or all images below a folder without splits.

    The latter has no labels: `class_names` is empty and every label -1. At most `limit` images, evenly spaced. Raises
    InputError when there are none, and as `open_images` for what cannot be read.
    """
    data = str(data)
    if is_plain_folder(data):
        root = Path(data)
        found = [(path, -1) for path in list_images(root)]
        if not found:
            raise InputError(f"no image below '{root}': expected image files, or train/ and val/ with a folder a class")
        images = readable_images(root, (), found, (), name=str(root), skip_bad=skip_bad, check_size=check_size)
    else:
        images = open_images(data, "val", skip_bad=skip_bad, check_size=check_size)
    return images.evenly_spaced(limit)


def is_plain_folder(data: str) -> bool:
    """Whether `data` is a folder of images without labels."""
    # The name of a set is no folder, even where one has that name: a run's, such as runs/digits seen from runs.
    return data not in NAMED_SETS and Path(data).is_dir() and not has_splits(Path(data))
