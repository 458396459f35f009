"""Training data: the same for any number of threads, and for any starting point."""

import io
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from vitx.core.images import ImageSet, open_images
from vitx.core.preprocess import ImageError, Preprocessing, UInt8Array
from vitx.train.data import TrainingData, augment, generator, random_crop
from vitx.train.recipe import Augmentation

AFFINE = Augmentation(rotation=12, translation=0.1, scale=0.1, shear=8)
CROPS = Augmentation(smallest_crop=0.3, flip=0.5)
PREPROCESSING = Preprocessing(image_size=32)


def data(augmentation: Augmentation, *, images: int = 50, batch_size: int = 16, seed: int = 3) -> TrainingData:
    chosen = open_images("digits", "train").first(images)
    return TrainingData(chosen, PREPROCESSING, augmentation, batch_size=batch_size, seed=seed)


def picture(width: int, height: int) -> Image.Image:
    rows, columns = np.mgrid[0:height, 0:width]
    return Image.fromarray(np.stack([rows % 256, columns % 256, (rows + columns) % 256], axis=-1).astype(np.uint8))


@pytest.mark.parametrize("augmentation", [AFFINE, CROPS], ids=["affine", "crops"])
def test_batches_do_not_depend_on_threads(augmentation: Augmentation) -> None:
    alone = list(data(augmentation).batches(4))
    for workers in (1, 3):
        for expected, found in zip(alone, data(augmentation).batches(4, workers), strict=True):
            assert expected.number == found.number
            np.testing.assert_array_equal(expected.images, found.images)
            np.testing.assert_array_equal(expected.labels, found.labels)


def test_an_epoch_does_not_depend_on_what_was_read_before() -> None:
    used = data(AFFINE)
    for epoch in (1, 2):
        list(used.batches(epoch, workers=2))
    np.random.default_rng().random()
    for expected, found in zip(used.batches(3), data(AFFINE).batches(3), strict=True):
        np.testing.assert_array_equal(expected.images, found.images)


def test_epochs_seeds_and_images_differ() -> None:
    first = data(AFFINE)
    assert not np.array_equal(first.order(1), first.order(2))
    assert not np.array_equal(first.order(1), data(AFFINE, seed=4).order(1))
    assert not np.array_equal(first.sample(1, 0), first.sample(2, 0))
    assert not np.array_equal(first.sample(1, 0), data(AFFINE, seed=4).sample(1, 0))


@pytest.mark.parametrize(("images", "batch_size", "steps"), [(50, 16, 3), (48, 16, 3), (16, 16, 1), (5, 16, 1)])
def test_a_smaller_last_batch_is_dropped_unless_it_is_the_only_one(images: int, batch_size: int, steps: int) -> None:
    chosen = data(AFFINE, images=images, batch_size=batch_size)
    sizes = [len(batch.labels) for batch in chosen.batches(1)]
    assert chosen.steps == steps
    assert sizes == [min(images, batch_size)] * steps


def test_an_epoch_sees_every_image_once_with_its_label() -> None:
    chosen = data(Augmentation(), images=48)
    seen: Counter[bytes] = Counter()
    for batch in chosen.batches(1):
        seen.update(image.tobytes() + bytes([label]) for image, label in zip(batch.images, batch.labels, strict=True))
    expected: Counter[bytes] = Counter()
    for number in range(48):
        pixels = PREPROCESSING.from_bytes(chosen.images.read(number))
        expected[pixels.tobytes() + bytes([chosen.images.labels[number]])] += 1
    assert seen == expected


def changed(augmentation: Augmentation, image: Image.Image, size: int = 32) -> UInt8Array:
    return augment(image, Preprocessing(image_size=size), augmentation, generator(0, 1))


def test_without_augmentation_it_is_the_preprocessing() -> None:
    image = picture(70, 50)
    np.testing.assert_array_equal(changed(Augmentation(), image), PREPROCESSING.apply(image))


def test_a_certain_flip_mirrors() -> None:
    image = picture(32, 32)
    np.testing.assert_array_equal(changed(Augmentation(flip=1), image), np.asarray(image)[:, ::-1])


def test_the_affine_map_keeps_the_centre_and_turns_the_rest() -> None:
    pixels = np.zeros((33, 33, 3), np.uint8)
    pixels[15:18, 15:18] = 255
    pixels[16, 28:31] = 255
    turned = changed(Augmentation(rotation=90), Image.fromarray(pixels), size=33)
    assert turned[16, 16, 0] == 255
    rows, columns = np.nonzero(turned[..., 0] > 80)
    distances = np.hypot(rows - 16, columns - 16)
    assert distances.max() == pytest.approx(13, abs=1.5), "a rotation keeps distances"
    assert not np.array_equal(turned, pixels)


def test_crops_are_within_the_image_and_the_range_of_areas() -> None:
    rng = np.random.default_rng(0)
    for width, height in ((64, 48), (31, 200), (5, 5), (1, 300)):
        for _ in range(300):
            left, top, right, bottom = random_crop(width, height, 0.25, rng)
            assert 0 <= left < right <= width
            assert 0 <= top < bottom <= height
            if (width, height) == (64, 48):
                assert (right - left) * (bottom - top) >= 0.24 * width * height


@pytest.mark.parametrize("size", [(1, 1), (3, 500), (500, 3)])
def test_extreme_shapes_give_the_asked_size(size: tuple[int, int]) -> None:
    for augmentation in (AFFINE, CROPS):
        assert changed(augmentation, picture(*size)).shape == (32, 32, 3)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_image_that_breaks_later_is_named(workers: int) -> None:
    buffer = io.BytesIO()
    picture(8, 8).save(buffer, format="PNG")
    good = buffer.getvalue()
    images = ImageSet(
        "memory",
        ("a",),
        tuple(f"{i}.png" for i in range(8)),
        np.zeros(8, np.int64),
        lambda i: good[:40] if i == 5 else good,
    )
    broken = TrainingData(images, PREPROCESSING, AFFINE, batch_size=2, seed=0)
    with pytest.raises(ImageError, match=r"^5\.png: "):
        list(broken.batches(1, workers))
