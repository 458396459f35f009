"""Augmentations from draws that are written down; which draws each image has; how the workers are started."""

import math
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from timm.data import auto_augment

from vitx.core.errors import InputError
from vitx.core.preprocess import ImageError, Preprocessing
from vitx.data.image_set import ImageSet
from vitx.train.loop.distributed.batch_part import WHOLE_BATCH
from vitx.train.loop.inputs import augment, training_data
from vitx.train.loop.inputs.augment import Augment, fix_posterize, random_crop
from vitx.train.loop.inputs.training_data import (
    CUTMIX,
    NETWORK,
    ORDER,
    SAMPLE,
    WEIGHTS,
    TrainingData,
    generator,
    seed_of,
)
from vitx.train.recipes.image_and_loss_settings import Augmentation


class Scripted:
    """Draws in [0, 1) that are written down, and how they are asked for."""

    def __init__(self, *draws: float) -> None:
        self.draws, self.asked = list(draws), list[Any]()

    def uniform(self, low: float = 0.0, high: float = 1.0, size: int | None = None) -> Any:
        if size is not None:
            return np.array([self.uniform(low, high) for _ in range(size)])
        return low + (high - low) * self.draws.pop(0)

    def random(self) -> float:
        return self.draws.pop(0)

    def integers(self, high: int, size: int | None = None) -> Any:
        self.asked.append(high)
        return [self.integers(high) for _ in range(size)] if size else math.floor(high * self.draws.pop(0))


def crop(width: int, height: int, smallest: float, *draws: float) -> tuple[int, int, int, int]:
    rng = Scripted(*draws)
    found = random_crop(width, height, smallest, rng)  # type: ignore[arg-type]
    assert rng.draws == []
    return found


def test_a_crop_from_its_draws() -> None:
    """Area, aspect, left, top; half of the way through the logarithms of 3/4 and 4/3 is a square."""
    assert crop(100, 100, 0.25, 0.0, 0.5, 0.0, 0.0) == (0, 0, 50, 50)
    assert crop(100, 100, 0.25, 0.0, 0.5, 0.999, 0.5) == (50, 25, 100, 75)
    # Of half the area: √(5000·4/3) by √(5000·3/4).
    assert crop(100, 100, 0.5, 0.0, 1.0, 0.0, 0.0) == (0, 0, 82, 61)
    assert crop(100, 100, 0.5, 0.0, 0.0, 0.0, 0.0) == (0, 0, 61, 82)
    # The area is uniform: 0.2 + 0.5 · 0.8 of 90 · 90 is 4,860.
    assert crop(90, 90, 0.2, 0.5, 0.5, 0.0, 0.0) == (0, 0, 70, 70)


def test_a_crop_that_does_not_fit_is_drawn_again() -> None:
    whole = (1.0, 1.0)  # wider than the image
    assert crop(100, 100, 0.5, *whole, *whole, 0.0, 0.5, 0.0, 0.0) == (0, 0, 71, 71)
    assert crop(100, 100, 0.5, *(1.0, 0.0), *whole * 9) == (0, 0, 100, 100), "after ten draws it is the whole"
    assert crop(100, 100, 1.0, 0.0, 0.5, 0.9, 0.9) == (0, 0, 100, 100)
    assert crop(3, 1, 0.3, 0.0, 0.5, 0.0, 0.9) == (0, 0, 1, 1), "one pixel is a crop"
    assert crop(2, 2, 0.02, 0.0, 0.5, *(1.0, 0.5), 0.0, 0.0) == (0, 0, 2, 2), "no pixel is none"
    with pytest.raises(IndexError):
        crop(100, 100, 0.5, *whole * 9)
    # As torchvision: of what is longer than the range, the middle.
    assert crop(400, 100, 1.0, *(0.0, 0.5) * 10) == (133, 0, 266, 100)
    assert crop(100, 400, 1.0, *(0.0, 0.5) * 10) == (0, 133, 100, 266)
    assert crop(120, 100, 1.0, *(0.0, 0.0) * 10) == (0, 0, 120, 100)
    assert augment.ASPECTS == (3 / 4, 4 / 3)
    assert augment.CROP_ATTEMPTS == 10


class Recorded:
    """An image of 40 by 20 that keeps what it is transformed with."""

    size = (40, 20)

    def transform(self, *given: Any) -> Any:
        return given


@pytest.mark.parametrize(
    "settings",
    [
        {"rotation": 30.0},
        {"translation": 0.25},
        {"scale": 0.5},
        {"shear": 20.0},
        {"rotation": 30.0, "translation": 0.25, "scale": 0.5, "shear": 20.0},
    ],
)
def test_an_affine_map_from_its_six_draws(settings: dict[str, float]) -> None:
    """Pillow reads the source at M⁻¹: what the map takes there comes back."""
    shares = np.array([0.5, -0.25, 0.75, 0.5, -0.5, 0.25])
    augmentation = Augmentation.model_validate(settings)
    rng: Any = Scripted(*((shares + 1) / 2))
    image: Any = Recorded()
    found: Any = augment._affine(image, augmentation, rng)
    size, method, coefficients, resampling = found
    assert (size, method, resampling) == ((40, 20), Image.Transform.AFFINE, Image.Resampling.BILINEAR)
    angle = math.radians(settings.get("rotation", 0) * 0.5)
    along, across = (math.tan(math.radians(settings.get("shear", 0) * share)) for share in (-0.5, 0.25))
    grown = 1 + settings.get("scale", 0) * 0.5
    shift = (settings.get("translation", 0) * 40 * -0.25, settings.get("translation", 0) * 20 * 0.75)
    for x, y in ((0.0, 0.0), (20.0, 10.0), (33.0, 4.0), (40.0, 20.0)):
        u, v = x - 20, y - 10
        u, v = u + along * v, across * u + v
        u, v = math.cos(angle) * u - math.sin(angle) * v, math.sin(angle) * u + math.cos(angle) * v
        u, v = grown * u + 20 + shift[0], grown * v + 10 + shift[1]
        a, b, c, d, e, f = coefficients
        assert (a * u + b * v + c, d * u + e * v + f) == pytest.approx((x, y), abs=1e-9)


@pytest.mark.parametrize("name", ["rotation", "translation", "scale", "shear"])
def test_each_of_the_affine_settings_turns_the_map_on(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(augment, "_affine", lambda image, augmentation, rng: asked.append(augmentation) or image)  # type: ignore[func-returns-value]
    image = Image.new("RGB", (8, 8))
    for value in (0.0, 0.5):
        augmentation = Augmentation.model_validate({name: value})
        Augment(Preprocessing(image_size=8), augmentation)(image, Scripted(0.5))  # type: ignore[arg-type]
    assert asked == [augmentation]


def pixels(image: Image.Image) -> list[list[int]]:
    found: list[list[int]] = np.asarray(image)[..., 0].tolist()
    return found


def test_padding_and_flips_from_their_draws() -> None:
    image = Image.fromarray(np.arange(1, 10, dtype=np.uint8).reshape(3, 3, 1).repeat(3, axis=2))
    rng = Scripted(0.0, 0.999)
    assert pixels(augment._pad_and_crop(image, 1, rng)) == [[0, 4, 5], [0, 7, 8], [0, 0, 0]]  # type: ignore[arg-type]
    assert rng.asked[1:] == [3, 3], "shifts of −1, 0 and 1"
    flipped = Augment(Preprocessing(image_size=3), Augmentation(flip=0.5))
    for draw, row in ((0.4999, [3, 2, 1]), (0.5, [1, 2, 3])):
        assert flipped(image, Scripted(draw))[0, :, 0].tolist() == row  # type: ignore[arg-type]
    assert flipped(image, Scripted(0.9)).dtype == np.uint8  # type: ignore[arg-type]


def test_a_crop_is_resized_as_pillow_does_it() -> None:
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 60, 3), dtype=np.uint8))
    cropped = Augment(Preprocessing(image_size=7), Augmentation(smallest_crop=0.5))
    found = cropped(image, Scripted(0.25, 0.5, 0.5, 0.5, 0.9))  # type: ignore[arg-type]
    box = random_crop(60, 90, 0.5, Scripted(0.25, 0.5, 0.5, 0.5))  # type: ignore[arg-type]
    expected = image.resize((7, 7), Image.Resampling.BICUBIC, box=box, reducing_gap=3.0)
    np.testing.assert_array_equal(found, np.asarray(expected))
    assert box != (0, 0, 60, 90)


def test_timm_draws_after_the_flip_from_a_seed_of_its_own() -> None:
    jitter = Augment(Preprocessing(image_size=4), Augmentation(color_jitter=0.4))
    assert jitter.timm_transform is not None
    assert Augment(Preprocessing(image_size=4), Augmentation()).timm_transform is None
    rng = Scripted(0.9, 0.5)
    jitter(Image.new("RGB", (4, 4), (50, 90, 130)), rng)  # type: ignore[arg-type]
    assert rng.asked == [2**63]
    with pytest.raises(InputError) as refused:
        Augment(Preprocessing(image_size=4), Augmentation(auto_augment="rand-m9-q5x"))
    assert str(refused.value).startswith("augmentation.auto_augment 'rand-m9-q5x' is not known to timm (")
    assert str(refused.value).endswith(
        "): expected a name such as rand-m9-mstd0.5-inc1, 3a, augmix-m5-w4-d2, original or v0"
    )


@pytest.mark.parametrize("name", ["rand-mfoo", "rand-m9-mstdinf", "augmix-m-w4", "rand-m9-"])
def test_a_part_of_timms_name_that_timm_would_skip_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=rf"auto_augment '{name}' is not known to timm \('.*' has no number\)"):
        Augment(Preprocessing(image_size=4), Augmentation(auto_augment=name))
    Augment(Preprocessing(image_size=4), Augmentation(auto_augment="rand-mstd1-tweights"))


def test_a_posterize_of_no_bits_is_black() -> None:
    posterize = SimpleNamespace(aug_fn=auto_augment.posterize)
    other = SimpleNamespace(aug_fn=auto_augment.solarize)
    nested = SimpleNamespace(aug_fn=auto_augment.posterize)
    fix_posterize(SimpleNamespace(ops=[posterize, other]))
    fix_posterize(SimpleNamespace(policy=[[nested], [other]]))
    fix_posterize(SimpleNamespace())
    assert other.aug_fn is auto_augment.solarize
    image = Image.new("RGB", (2, 2), (200, 200, 200))
    for fixed in (posterize, nested):
        assert pixels(fixed.aug_fn(image, 0)) == pixels(fixed.aug_fn(image, -1)) == [[0, 0], [0, 0]]
        assert pixels(fixed.aug_fn(image, 1)) == [[128, 128], [128, 128]]


def test_streams_of_random_numbers() -> None:
    """Every published result depends on these numbers."""
    assert (ORDER, SAMPLE, CUTMIX, WEIGHTS, NETWORK) == (0, 1, 2, 3, 4)
    assert generator(7, 2, 3, 4).random() == np.random.default_rng((7, 2, 3, 4)).random()
    assert seed_of(7, 2, 3) == int(np.random.default_rng((7, 2, 3)).integers(2**63))


IMAGE = Image.new("RGB", (4, 4))


def images_of(count: int, *, broken: Sequence[int] = ()) -> ImageSet:
    import io

    file = io.BytesIO()
    IMAGE.save(file, format="PNG")

    def read(index: int) -> bytes:
        return b"broken" if index in broken else file.getvalue()

    return ImageSet("memory", ("a", "b"), tuple(f"{i}.png" for i in range(count)), np.arange(count), read)


def data(count: int = 6, *, repeats: int = 1, batch_size: int = 2, **more: Any) -> tuple[Any, list[float]]:
    made: Any = TrainingData(
        images_of(count, **more),
        Preprocessing(image_size=4),
        Augmentation(repeats=repeats),
        batch_size=batch_size,
        seed=9,
    )
    drawn: list[float] = []

    def record(image: Image.Image, rng: np.random.Generator) -> Any:
        drawn.append(rng.random())
        return np.full((4, 4, 3), len(drawn), np.uint8)

    record.preprocessing = Preprocessing(image_size=4)  # type: ignore[attr-defined]
    made._dataset.augment = record
    return made, drawn


@pytest.mark.parametrize("repeats", [1, 3])
def test_each_image_draws_from_its_place(repeats: int) -> None:
    made, drawn = data(repeats=repeats)
    order = np.repeat(np.random.default_rng((9, 0, 5)).permutation(6), repeats)[:6]
    assert made.order(5).tolist() == order.tolist()
    batches = list(made.batches(5))
    assert [batch.number for batch in batches] == [0, 1, 2]
    assert np.concatenate([batch.labels for batch in batches]).tolist() == order.tolist()
    expected = []
    for position, index in enumerate(order.tolist()):
        repeat = position % repeats
        place = (5, index, repeat) if repeat else (5, index)
        expected.append(np.random.default_rng((9, 1, *place)).random())
    assert drawn == expected
    assert [image[0, 0, 0] for batch in batches for image in batch.images] == [1, 2, 3, 4, 5, 6]
    assert made.sample(5, 2).shape == (4, 4, 3)
    assert drawn[-1] == np.random.default_rng((9, 1, 5, 2)).random()
    made.sample(5, 2, 1)
    assert drawn[-1] == np.random.default_rng((9, 1, 5, 2, 1)).random()


def test_a_set_without_images_and_one_that_breaks() -> None:
    with pytest.raises(InputError) as refused:
        data(0)
    assert str(refused.value) == "'memory' has no images to train on"
    one_class = replace(images_of(2), class_names=("a",))
    with pytest.raises(InputError, match=r"^'memory' has one class, 'a': expected two at least$"):
        TrainingData(one_class, Preprocessing(image_size=4), Augmentation(), batch_size=2, seed=0)
    made, _ = data(broken=[3])
    with pytest.raises(ImageError, match=r"^3\.png: "):
        list(made.batches(1))
    whole, _ = data(5, batch_size=2)
    assert (whole.steps, whole.batch_size) == (2, 2)
    small, _ = data(5, batch_size=8)
    assert (small.steps, small.batch_size) == (1, 5)


def test_workers_are_started_once_and_anew_for_another_number(monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = data()
    started: list[Any] = []

    class Loader:
        def __init__(self, dataset: Any, **settings: Any) -> None:
            started.append((dataset, settings))
            self.sampler, self.num_workers = settings["sampler"], settings["num_workers"]

        def __iter__(self) -> Any:
            return iter([request.number for request in self.sampler])

    monkeypatch.setattr(training_data, "DataLoader", Loader)
    assert list(made._prepared_ahead(made._requests_of(1, WHOLE_BATCH), 2)) == [0, 1, 2]
    assert list(made._prepared_ahead(made._requests_of(2, WHOLE_BATCH)[1:], 2)) == [1, 2]
    assert len(started) == 1
    list(made._prepared_ahead([], 3))
    assert len(started) == 2
    dataset, settings = started[0]
    assert dataset is made._dataset
    assert settings.pop("sampler") is made._requests
    assert settings == {
        "batch_size": None,
        "num_workers": 2,
        "prefetch_factor": 2,
        "persistent_workers": True,
        "worker_init_fn": training_data._start_worker,
    }


def test_workers_begin_with_sigterm_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    """So do threads that OpenBLAS starts in them before all else: one that did not block it would end its worker."""
    masks: list[set[int | signal.Signals]] = []

    class Loader:
        def __init__(self, *_: Any, num_workers: int, **__: Any) -> None:
            self.num_workers = num_workers

        def __iter__(self) -> Any:
            masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, []))
            return iter([])

    monkeypatch.setattr(training_data, "DataLoader", Loader)
    assert list(data()[0]._prepared_ahead([], 1)) == []
    masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, []))
    assert [signal.SIGTERM in mask for mask in masks] == [True, False]


def test_a_worker_leaves_signals_to_the_process_that_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    stand_in = SimpleNamespace(
        **{name: getattr(signal, name) for name in ("SIGINT", "SIGHUP", "SIGTERM", "SIG_IGN", "SIG_BLOCK")},
        signal=lambda *given: done.append(given),
        pthread_sigmask=lambda *given: done.append(given),
        sigwaitinfo=None,
    )

    class Thread:
        def __init__(self, target: Any, args: Any, daemon: bool) -> None:
            done.append((target, args, daemon))

        def start(self) -> None:
            done.append("started")

    monkeypatch.setattr(training_data, "signal", stand_in)
    monkeypatch.setattr(training_data, "threading", SimpleNamespace(Thread=Thread))
    monkeypatch.setattr(training_data, "ignore_image_warnings", lambda: done.append("bombs"))
    monkeypatch.setattr(os, "getppid", lambda: 77)
    training_data._start_worker(0)
    ignored = [(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)]
    blocked = (signal.SIG_BLOCK, [signal.SIGTERM])
    assert done == [*ignored, "bombs", blocked, (training_data._end_with_parent, (77,), True), "started"]
    senders, codes = iter([5, 77, 6]), list[int]()
    stand_in.sigwaitinfo = lambda signals: (
        SimpleNamespace(si_pid=next(senders)) if signals == [signal.SIGTERM] else None
    )
    monkeypatch.setattr(os, "_exit", codes.append)
    training_data._end_with_parent(77)
    assert codes == [0]
    assert next(senders) == 6, "nothing is waited for after the signal of the parent"
