"""The picture of a run's first images."""

import io
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from vitx.train.loop.first_batch import contact_sheet, first_batch


def image(value: int) -> npt.NDArray[np.uint8]:
    """Of 2×2 pixels, none like its neighbours."""
    return np.arange(12, dtype=np.uint8).reshape(2, 2, 3) + np.uint8(20 * value)


@pytest.mark.parametrize(("count", "rows", "columns"), [(1, 1, 1), (2, 1, 2), (4, 2, 2), (5, 2, 3), (7, 3, 3)])
def test_images_stand_row_by_row_and_what_is_left_is_black(count: int, rows: int, columns: int) -> None:
    pixels = np.asarray(contact_sheet(np.stack([image(number) for number in range(count)])))
    assert pixels.shape == (2 * rows, 2 * columns, 3)
    for place in range(rows * columns):
        row, column = divmod(place, columns)
        found = pixels[2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
        assert np.array_equal(found, image(place) if place < count else np.zeros((2, 2, 3)))


@pytest.mark.parametrize(("batch_size", "shown"), [(3, 3), (40, 16)])
def test_the_first_images_of_the_first_epoch_are_shown_as_they_are_repeated(batch_size: int, shown: int) -> None:
    asked: list[Any] = []

    def sample(epoch: int, index: int, repeat: int) -> npt.NDArray[np.uint8]:
        asked.append((epoch, index, repeat))
        return image(len(asked) % 9)

    data: Any = SimpleNamespace(
        order=lambda epoch: np.arange(100, 200) // 2 + epoch,
        batch_size=batch_size,
        augmentation=SimpleNamespace(repeats=2),
        sample=sample,
    )
    with Image.open(io.BytesIO(first_batch(data))) as picture:
        assert (picture.format, np.asarray(picture)[:2, :2].tolist()) == ("PNG", image(1).tolist())
    assert asked == [(1, 51 + row // 2, row % 2) for row in range(shown)]
