"""`vitx` in a separate process, and a folder of images on which a network trains in a second."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image


@pytest.fixture
def start_vitx(tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Start `vitx` in a separate process with one thread and no GPU; its working directory is `tmp_path`."""

    def start(*arguments: object) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", "from vitx.cli import main; main()", *map(str, arguments)],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    """A data folder with three classes that differ in brightness: six images each to train, two to evaluate."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 6), ("val", 2)):
        for label in range(3):
            folder = tmp_path / "images" / split / f"class-{label}"
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 60, (24, 30, 3)) + 80 * label
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")
    return tmp_path / "images"
