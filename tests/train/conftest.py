"""`vitx` in a separate process, and a folder of images on which a network trains in a second."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from training_jobs import VitxProcess


@pytest.fixture
def start_vitx(tmp_path: Path) -> Iterator[Callable[..., VitxProcess]]:
    """Start `vitx` in a separate process; its working directory is `tmp_path`."""
    started: list[VitxProcess] = []

    def start(*arguments: object, held: tuple[int, int] | None = None) -> VitxProcess:
        started.append(VitxProcess(tmp_path, tuple(map(str, arguments)), tmp_path / f"errors-{len(started)}", held))
        return started[-1]

    yield start
    for process in started:
        process.kill()


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    """Three classes of six images each to train, two to evaluate."""
    return write_images(tmp_path / "images", 6, 2)


@pytest.fixture(scope="module")
def larger_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three classes of forty images each to train, eight to evaluate."""
    return write_images(tmp_path_factory.mktemp("larger") / "images", 40, 8)


def write_images(images: Path, to_train: int, to_evaluate: int) -> Path:
    """A data folder with three classes that differ in brightness."""
    rng = np.random.default_rng(0)
    for split, count in (("train", to_train), ("val", to_evaluate)):
        for label in range(3):
            folder = images / split / f"class-{label}"
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 60, (24, 30, 3)) + 80 * label
                Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")
    return images
