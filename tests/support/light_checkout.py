"""A copy of a few files of the package, to test that they work without the rest and what the rest imports."""

import shutil
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def copy_modules(folder: Path, names: Iterable[str]) -> Path:
    """Copy vitx/core and the files `names`, such as vitx/export/triton.py. Their packages get empty __init__.py."""
    shutil.copytree(ROOT / "vitx" / "core", folder / "vitx" / "core", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "vitx" / "__init__.py").touch()
    for name in names:
        target = folder / name
        for package in target.relative_to(folder).parents[:-1]:
            (folder / package).mkdir(exist_ok=True, parents=True)
            (folder / package / "__init__.py").touch()
        shutil.copy(ROOT / name, target)
    return folder
