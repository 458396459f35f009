"""A folder with train/ and val/, each with one folder of images a class."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from unicodedata import normalize

import numpy as np

from vitx.core.errors import InputError
from vitx.core.files import escape_invalid_utf8, is_utf8
from vitx.core.preprocess import ImageError, decode
from vitx.data.image_set import EXTENSIONS, SPLIT_NAMES, ImageSet, Split, read_piece

# Up to so many images are decoded before a run begins, to find unreadable ones; with more that would take too long.
CHECKED_IMAGES = 20_000
# Called with width and height; raises ImageError. That of `Preprocessing` refuses what is too thin to be resized.
CheckSize = Callable[[int, int], object]


def list_images(folder: Path, *, below: bool = True) -> list[Path]:
    """The image files in `folder`, and `below` it, in sorted order; hidden files and folders are left out.

    Links to folders are followed, but to those that are listed already. A link that leads nowhere is an image: it is
    unreadable, and whoever reads it says so. Raises InputError for a folder that cannot be listed.
    """
    found: list[Path] = []
    entered = [folder.resolve()]
    for place, folders, names in os.walk(folder, followlinks=True, onerror=_refuse):
        inside = Path(place)
        visible = sorted(name for name in folders if below and _is_shown(name))
        folders[:] = [name for name in visible if _is_new(inside / name, entered)]
        paths = (inside / name for name in names if not name.startswith("."))
        images = (path for path in paths if path.suffix.lower() in EXTENSIONS)
        found += (path for path in images if path.is_file() or (path.is_symlink() and not path.exists()))
    return sorted(found)


def _refuse(error: OSError) -> None:
    raise InputError(f"the folder {error.filename} cannot be listed: {error.strerror}")


def _is_new(path: Path, entered: list[Path]) -> bool:
    """Whether it is no link, or one to a folder that is listed under no other name; `entered` gets that."""
    if not path.is_symlink():
        return True
    real = path.resolve()
    if entered[0].is_relative_to(real) or any(real.is_relative_to(one) for one in entered):
        return False
    entered.append(real)
    return True


def split_folder(root: Path, split: Split) -> Path:
    """`root`/train, or `root`/val under the first of its names that exists."""
    return next((root / name for name in SPLIT_NAMES[split] if (root / name).is_dir()), root / split)


def folders_in(folder: Path) -> list[str]:
    """The names of the folders in `folder`, sorted; hidden ones, and those that systems make, are left out.

    Raises InputError for a link that leads nowhere and may have been to the folder of a class.
    """
    shown = [path for path in folder.iterdir() if _is_shown(path.name)]
    for path in shown:
        if path.is_symlink() and not path.exists() and path.suffix.lower() not in EXTENSIONS:
            raise InputError(f"{path} is a link that leads nowhere: restore '{path.readlink()}', or remove the link")
    return sorted(path.name for path in shown if path.is_dir())


def _is_shown(name: str) -> bool:
    """Whether the folder `name` may hold images.

    Not lost+found of every ext4 volume, which root alone may list, nor __MACOSX of a Mac's archives: a hidden file for
    each of theirs, by its name and ending an image.
    """
    return not name.startswith(".") and name not in ("lost+found", "__MACOSX")


def class_names_in(root: Path) -> tuple[str, ...]:
    """The names of the class folders, sorted; raise InputError unless train/ and val/ have the same."""
    train, val = folders = [split_folder(root, split) for split in ("train", "val")]
    for folder in folders:
        if not folder.is_dir():
            raise InputError(
                f"{folder} does not exist: expected train/ and val/ in '{root}', each with a folder a class, or the "
                "class folders alone, of which a fifth of the images is then kept for evaluation"
            )
        if not folders_in(folder):
            raise InputError(f"{folder} is empty: expected one folder of images a class")
    for here, there in ((train, val), (val, train)):
        missing = sorted({*folders_in(here)} - {*folders_in(there)})
        composed = {normalize("NFC", name) for name in folders_in(there)}
        if twins := [name for name in missing if normalize("NFC", name) in composed]:
            raise InputError(
                f"{there} has {quoted(twins)}, but spelled in another Unicode form (NFC or NFD) than in {here}: rename "
                "one of the two folders"
            )
        if missing:
            raise InputError(
                f"{there} has no folder for {quoted(missing)}, which {here} has: add it there, or remove it here"
            )
    return class_folders(train)


def class_folders(folder: Path) -> tuple[str, ...]:
    """The names of the folders in `folder`, sorted; raise InputError where two look the same: they are one class.

    And for one that is not UTF-8, as archives of old systems unpack: no graph, certificate or answer can hold it.
    """
    names, seen = folders_in(folder), set[str]()
    for name in names:
        if not is_utf8(name):
            raise InputError(f"'{folder}' has a folder whose name is not UTF-8, {name!a}: rename it")
        if (composed := normalize("NFC", name)) in seen:
            raise InputError(
                f"'{folder}' has '{composed}' twice, in two Unicode forms (NFC and NFD): move the images of both into "
                "one folder"
            )
        seen.add(composed)
    return tuple(names)


def quoted(names: Sequence[str]) -> str:
    """The first five names, and how many more there are."""
    shown = ", ".join(f"'{name}'" for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def open_folder(
    folder: Path, class_names: tuple[str, ...], *, skip_bad: bool, check_size: CheckSize | None = None
) -> ImageSet:
    """The images of one split, a folder a class; `skip_bad` leaves out what cannot be read (see `open_images`)."""
    found = [(path, label) for label, name in enumerate(class_names) for path in list_images(folder / name)]
    beside = beside_classes(folder)
    name = str(folder.parent)
    return readable_images(folder, class_names, found, beside, name=name, skip_bad=skip_bad, check_size=check_size)


def beside_classes(folder: Path) -> list[str]:
    """The images that lie in `folder` itself, or in a hidden folder of it, of which no class is known.

    They are as `ImageSet.skipped` has them. Of a hidden folder its own images count alone: it may be a file system's,
    with all that was ever in this one.
    """
    found = [f"{path}: in no class's folder" for path in list_images(folder, below=False)]
    for hidden in sorted(path for path in folder.glob(".*") if path.is_dir()):
        with suppress(InputError):  # such as a desktop's waste, which root alone may list
            found += [f"{path}: in a hidden folder" for path in list_images(hidden, below=False)]
    return found


def readable_images(
    folder: Path,
    class_names: tuple[str, ...],
    found: Sequence[tuple[Path, int]],
    beside: Sequence[str],
    *,
    name: str,
    skip_bad: bool,
    check_size: CheckSize | None,
    part: str = "",
) -> ImageSet:
    """Those images `found` in `folder`, each with its class number, that can be read; beside: of `beside_classes`.

    Without classes every number is -1. part: which images of the folder these are, in words. Raises InputError for a
    class without a readable image, or where none is.
    """
    checked = [path for path, _ in found] if len(found) <= CHECKED_IMAGES else []
    with ThreadPoolExecutor() as pool:
        problems = list(pool.map(partial(_why_unreadable, check_size), checked)) or [None] * len(found)
    bad = [f"{path}: {problem}" for (path, _), problem in zip(found, problems, strict=True) if problem]
    if bad and not skip_bad:
        more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
        raise InputError(f"unreadable image {bad[0]}{more}; repair or remove it, or pass --skip-bad to leave it out")
    good = [item for item, problem in zip(found, problems, strict=True) if not problem]
    counts = np.bincount([label for _, label in good if class_names], minlength=len(class_names))
    empty = [class_names[label] for label in np.flatnonzero(counts == 0)]
    if empty or not good:
        raise InputError(f"{folder} has no readable image{' of ' * bool(empty)}{quoted(empty)}{part}")
    paths = tuple(path for path, _ in good)
    return ImageSet(
        name=name,
        class_names=class_names,
        keys=tuple(escape_invalid_utf8(path.relative_to(folder).as_posix()) for path in paths),
        labels=np.array([label for _, label in good], dtype=np.int64),
        read=FileReader(paths),
        skipped=tuple(escape_invalid_utf8(each) for each in (*bad, *beside)),
    )


@dataclass(frozen=True)
class FileReader:
    """`ImageSet.read` of files; unlike a lambda it can be sent to another process."""

    paths: tuple[Path, ...]

    def __call__(self, index: int) -> bytes:
        return read_piece(self.paths[index])


def _why_unreadable(check_size: CheckSize | None, path: Path) -> str | None:
    try:
        state = path.stat()
    except OSError as error:  # it went away since the folder was listed
        return str(error)
    found = _upright_size(path, state.st_size, state.st_mtime_ns)
    if isinstance(found, str):
        return found
    try:
        if check_size is not None:
            check_size(*found)
    except ImageError as error:
        return str(error)
    return None


@lru_cache(maxsize=2 * CHECKED_IMAGES)  # a run opens its images more than once, and this decodes them all
def _upright_size(path: Path, size: int, changed: int) -> tuple[int, int] | str:
    """Width and height, or why it cannot be read."""
    try:
        return decode(path).size
    except ImageError as error:
        return str(error)
