"""Which images `vitx analyze` can show to a network: the others are named before anything is measured, or left out."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from cli_fixture import Vitx

TINY = "model:deit_digits?embed_dim=16&depth=2&num_heads=2"
TOO_THIN = (70_000, 1)  # resized to 32 on its short side, its long one would have 2,240,000 pixels


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """Class folders with two images each, and a damaged one and one too thin to be resized among those to look at."""
    for split in ("train", "val"):
        for number, name in enumerate(("cat", "dog")):
            (tmp_path / split / name).mkdir(parents=True)
            for index in range(2):
                Image.new("RGB", (40, 40), (90 * number, 60 * index, 9)).save(tmp_path / split / name / f"{index}.png")
    return tmp_path


def too_thin(folder: Path) -> None:
    Image.new("RGB", TOO_THIN).save(folder / "thin.png")


def damaged(folder: Path) -> None:
    (folder / "damaged.png").write_bytes(b"no image")


@pytest.mark.parametrize(("spoil", "said"), [(too_thin, "too thin to be resized"), (damaged, "damaged.png")])
def test_images_that_no_network_can_see_are_named_or_left_out(
    vitx: Vitx, pets: Path, spoil: Callable[[Path], None], said: str
) -> None:
    spoil(pets / "val" / "dog")
    command = ("analyze", TINY, "--weights", "random", "--data", str(pets), "--only", "confidence", "-q", "--json")
    code, _, error = vitx(*command)
    assert code == 2
    assert "unreadable image" in error
    assert said in error
    assert "--skip-bad" in error
    code, output, error = vitx(*command, "--skip-bad")
    assert code == 0, error
    assert error.startswith("left out 1 image: ")
    assert said in error
    assert json.loads(output)["networks"][0]["images"] == 4


def test_a_report_is_not_written_among_the_images_that_it_is_of(vitx: Vitx, pets: Path) -> None:
    """The second call would measure the figures of the first as images."""
    folder = pets / "train"
    command = ("analyze", TINY, "--weights", "random", "--data", str(folder), "--only", "variance", "-q")
    code, _, error = vitx(*command, "--out", str(folder / "report"))
    assert (code, "where its pictures would be images: pass another --out" in error) == (2, True), error
    assert not (folder / "report").exists()
    code, _, error = vitx(*command, "--out", str(pets / "report"))
    assert code == 0, error
