"""Training data: the same for any number of processes, and for any starting point."""

import io
import multiprocessing
import random
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from timm.data.transforms_factory import transforms_imagenet_train

from vitx.core.errors import EnvironmentMissing, InputError
from vitx.core.preprocess import ImageError, Preprocessing, UInt8Array
from vitx.data.image_set import ImageSet
from vitx.data.open import open_images
from vitx.train.loop.distributed.batch_part import BatchPart
from vitx.train.loop.inputs.augment import Augment, random_crop
from vitx.train.loop.inputs.training_data import TrainingData, generator
from vitx.train.randomness import seeded
from vitx.train.recipes.image_and_loss_settings import Augmentation

AFFINE = Augmentation(rotation=12, translation=0.1, scale=0.1, shear=8)
CROPS = Augmentation(smallest_crop=0.3, flip=0.5)
TIMMS = {
    "RandAugment": Augmentation(smallest_crop=0.3, auto_augment="rand-m9-mstd0.5-inc1"),
    "three-augment": Augmentation(smallest_crop=0.3, flip=0.5, auto_augment="3a", color_jitter=0.3),
    "AugMix": Augmentation(auto_augment="augmix-m5-w4-d2"),
    "jitter": Augmentation(padding=4, flip=0.5, color_jitter=0.4),
    "repeats": Augmentation(smallest_crop=0.3, repeats=3),
}
PREPROCESSING = Preprocessing(image_size=32)


def data(augmentation: Augmentation, *, images: int = 50, batch_size: int = 16, seed: int = 3) -> TrainingData:
    chosen = open_images("digits", "train").first(images)
    return TrainingData(chosen, PREPROCESSING, augmentation, batch_size=batch_size, seed=seed)


def picture(width: int, height: int) -> Image.Image:
    rows, columns = np.mgrid[0:height, 0:width]
    return Image.fromarray(np.stack([rows % 256, columns % 256, (rows + columns) % 256], axis=-1).astype(np.uint8))


@pytest.mark.parametrize(("size", "taken"), [(5, 255), (256, 256), (300, 300)])
def test_the_averaged_statistics_are_measured_on_the_same_images_each_time(size: int, taken: int) -> None:
    whole = data(AFFINE, images=400, batch_size=size)
    found = list(whole.calibration_batches(PREPROCESSING))
    assert {len(batch) for batch in found} == {size}
    expected = [PREPROCESSING.from_bytes(whole.images.read(index)) for index in whole.shuffled(0)[:taken]]
    np.testing.assert_array_equal(np.concatenate(found), expected)


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")  # on fewer cores
@pytest.mark.parametrize("augmentation", [AFFINE, *TIMMS.values()], ids=["affine", *TIMMS])
def test_batches_do_not_depend_on_workers(augmentation: Augmentation) -> None:
    alone = list(data(augmentation).batches(4))
    for workers in (1, 3):
        for expected, found in zip(alone, data(augmentation).batches(4, workers), strict=True):
            assert expected.number == found.number
            np.testing.assert_array_equal(expected.images, found.images)
            np.testing.assert_array_equal(expected.labels, found.labels)


def test_workers_go_on_from_any_batch_and_epoch() -> None:
    """The same two processes prepare an epoch that is broken off, then rest and half batches of two others."""
    used, fresh = data(CROPS, images=64, batch_size=8), data(CROPS, images=64, batch_size=8)
    next(used.batches(1, workers=2))
    for epoch, first, part in ((1, 5, BatchPart()), (2, 0, BatchPart(1, 2))):
        wanted = list(fresh.batches(epoch, first=first, part=part))
        found = list(used.batches(epoch, workers=2, first=first, part=part))
        assert [batch.number for batch in found] == list(range(first, 8))
        for one, other in zip(wanted, found, strict=True):
            np.testing.assert_array_equal(one.images, other.images)
    assert len(multiprocessing.active_children()) == 2
    del used
    assert multiprocessing.active_children() == []


def test_global_randomness_is_neither_read_nor_moved() -> None:
    chosen = data(TIMMS["three-augment"])
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]
    first = next(chosen.batches(1)).images
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[index]
    random.seed(2), np.random.seed(2), torch.manual_seed(2)
    np.testing.assert_array_equal(first, next(chosen.batches(1)).images)


def test_repeats_show_fewer_images_each_with_other_augmentations() -> None:
    chosen = data(Augmentation(smallest_crop=0.3, repeats=3), images=50, batch_size=12)
    order = chosen.order(1)
    counts = Counter(order.tolist())
    assert len(order) == 50
    assert sorted(counts.values()) == [2] + [3] * 16
    batches = list(chosen.batches(1))
    images = np.concatenate([batch.images for batch in batches])
    assert len(images) == 48
    assert len({image.tobytes() for image in images}) > 40
    assert np.concatenate([batch.labels for batch in batches]).tolist() == chosen.images.labels[order[:48]].tolist()
    assert set(order.tolist()) != set(chosen.order(2).tolist())


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
    return Augment(Preprocessing(image_size=size), augmentation)(image, generator(0, 1))


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


def test_padding_shifts_over_black() -> None:
    """Every shift of −2 to 2 pixels, and nothing else."""
    image = picture(16, 16)
    black = np.asarray(ImageOps.expand(image, 2))
    wanted = {black[top : top + 16, left : left + 16].tobytes() for top in range(5) for left in range(5)}
    shift = Augment(Preprocessing(image_size=16), Augmentation(padding=2))
    assert {shift(image, generator(seed, 0)).tobytes() for seed in range(400)} == wanted


@pytest.mark.parametrize("name", ["rand-m9-mstd0.5-inc1", "3a", "augmix-m5-w4-d2", "original-mstd0.5"])
def test_the_policies_are_those_of_timms_own_pipeline(name: str) -> None:
    """The same draws from the global generators give the same image as timm's second of three parts."""
    image, mean = picture(32, 32), (0.485, 0.456, 0.406)
    ours = Augment(Preprocessing(image_size=32, mean=mean), Augmentation(auto_augment=name, color_jitter=0.2))
    theirs = transforms_imagenet_train(
        32, auto_augment=name, color_jitter=0.2, force_color_jitter=True, mean=mean,
        interpolation="bicubic", separate=True,
    )[1]  # fmt: skip
    changed = 0
    for seed in range(10):
        found = ours(image, generator(seed, 0))
        rng = generator(seed, 0)
        rng.random()  # the flip
        with seeded(int(rng.integers(2**63))):
            np.testing.assert_array_equal(found, np.asarray(theirs(image)))
        changed += not np.array_equal(found, np.asarray(image))
    assert changed >= 8


@pytest.mark.parametrize("name", ["rand-m10-inc1-n8", "rand-m10-n8", "augmix-m10-w4-d4", "original-mstd5", "v0-mstd5"])
def test_the_strongest_of_each_policy_is_applied(name: str) -> None:
    """Pillow 13 raises at a posterize of no bits, which timm asks for at magnitude 10."""
    strongest = Augment(Preprocessing(image_size=16), Augmentation(auto_augment=name))
    image = picture(16, 16)
    for seed in range(60):
        assert strongest(image, generator(seed, 0)).shape == (16, 16, 3)


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(InputError, match=r"augmentation\.auto_augment 'rando' is not known to timm .* expected a name"):
        data(Augmentation(auto_augment="rando"))


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
        ("a", "b"),
        tuple(f"{i}.png" for i in range(8)),
        np.zeros(8, np.int64),
        lambda i: good[:40] if i == 5 else good,
    )
    broken = TrainingData(images, PREPROCESSING, AFFINE, batch_size=2, seed=0)
    with pytest.raises(ImageError, match=r"^5\.png: "):
        list(broken.batches(1, workers))


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("No space left on device (28)", r"each worker needs 3 .*--shm-size\), or lower workers"),
        ("File too large (27)", r"raise the limit of a file's size \(ulimit -f\), or lower workers"),
    ],
)
def test_full_shared_memory_says_what_to_do(monkeypatch: pytest.MonkeyPatch, reason: str, remedy: str) -> None:
    """Docker's /dev/shm has 64 MB, less than three batches of 128 images of 224 px for each of two workers."""

    def full(_: torch.Tensor) -> None:
        raise RuntimeError(f"unable to allocate shared memory(shm): {reason}\n")

    monkeypatch.setattr(torch.Tensor, "share_memory_", full)
    words = rf"^no shared memory for a batch of 49,152 bytes \(unable .* \(\d\d\)\): {remedy}"
    with pytest.raises(EnvironmentMissing, match=words):
        list(data(AFFINE).batches(1, workers=1))
