"""The mistakes that a diagnosis tries: each one's images and logits, by plain numpy; where it stops being one."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from table_session import PIXEL, TableSession, numbered_images
from vitx.core.errors import InputError
from vitx.core.preprocess import Preprocessing, Triple, UInt8Array
from vitx.data.image_set import ImageSet, encode_png
from vitx.parity.comparison import prepared
from vitx.parity.diagnosis import Diagnosis, _ReferenceWithMistakes, _reordered, _systematic, diagnose
from vitx.runtimes.session import Float32Array, Session

SIZE, COUNT = 4, 40
PREPARED = Preprocessing(
    image_size=SIZE, mean=(0.25, 0.5, 0.75), std=(0.5, 0.125, 0.25), interpolation="bicubic", crop_fraction=0.9
)
PICTURES = np.random.default_rng(4).integers(0, 256, (COUNT, 9, 7, 3), dtype=np.uint8)
WEIGHT = np.random.default_rng(5).standard_normal((SIZE * SIZE * 3, 5))
IMAGES = ImageSet(
    "pictures",
    tuple("abcde"),
    tuple(f"{index}" for index in range(COUNT)),
    np.zeros(COUNT, np.int64),
    lambda index: encode_png(PICTURES[index]),
)


class Linear(Session):
    """Each pixel less mean, over std, times a weight of its own; notes its batches and whether it was closed."""

    def __init__(self, mean: Triple = PREPARED.mean, std: Triple = PREPARED.std) -> None:
        super().__init__()
        self.mean, self.std = mean, std
        self.batches: list[int] = []
        self.ended = False

    def _infer(self, images: UInt8Array) -> Float32Array:
        self.batches.append(len(images))
        logits: Float32Array = logits_of(images, self.mean, self.std)
        return logits

    def describe(self) -> dict[str, Any]:
        return {}

    def _close(self) -> None:
        self.ended = True


def logits_of(images: UInt8Array, mean: Sequence[float] = PREPARED.mean, std: Sequence[float] = PREPARED.std) -> Any:
    normal = (images / 255 - np.array(mean)) / np.array(std)
    return (normal.reshape(len(images), -1) @ WEIGHT).astype(np.float32)


def pixels_of(**changes: Any) -> UInt8Array:
    preprocessing = PREPARED.model_copy(update=changes)
    return np.stack([preprocessing.from_bytes(IMAGES.read(index)) for index in range(COUNT)])


PIXELS_OF_IMAGES = pixels_of()


def mistakes(**changes: Any) -> list[tuple[str, Float32Array]]:
    given: dict[str, Any] = {
        "reference": Linear(),
        "images": IMAGES,
        "preprocessing": PREPARED,
        "pixels": PIXELS_OF_IMAGES,
        "expected": logits_of(PIXELS_OF_IMAGES),
        "renormalized": Linear,
    }
    return list(_ReferenceWithMistakes(**(given | changes)).all())


def assert_mistakes(found: list[tuple[str, Float32Array]], expected: list[tuple[str, Float32Array]]) -> None:
    assert [cause for cause, _ in found] == [cause for cause, _ in expected]
    for (cause, logits), (_, wanted) in zip(found, expected, strict=True):
        np.testing.assert_allclose(logits, wanted, rtol=1e-4, atol=1e-4, err_msg=cause)


BGR = "BGR: the candidate reads the colour channels in reverse"


def expected_channels(*, renormalized: bool) -> list[tuple[str, Float32Array]]:
    pixels = PIXELS_OF_IMAGES
    bgr = pixels[..., [2, 1, 0]]
    in_the_weights = [(BGR, logits_of(bgr, (0.75, 0.5, 0.25), (0.25, 0.125, 0.5)))] if renormalized else []
    turned = np.transpose(pixels, (0, 2, 1, 3))
    return [(BGR, logits_of(bgr)), *in_the_weights, ("rows and columns of the image are swapped", logits_of(turned))]


def expected_normalizations() -> list[tuple[str, Float32Array]]:
    mean, std = PREPARED.mean, PREPARED.std
    over_255 = [tuple(value / 255 for value in values) for values in (mean, std)]
    return [
        (f"normalisation: {cause}", logits_of(PIXELS_OF_IMAGES, *numbers))
        for cause, numbers in (
            ("mean and std are swapped", (std, mean)),
            ("mean and std are left out", ((0, 0, 0), (1, 1, 1))),
            ("mean and std are applied twice", ((0.375, 0.5625, 0.9375), (0.25, 0.015625, 0.0625))),
            ("pixels are not divided by 255", over_255),
            ("mean and std are ImageNet's", ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))),
            ("mean and std are 0.5", ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))),
        )
    ]


def expected_preparations() -> list[tuple[str, Float32Array]]:
    filters = [
        (
            f"interpolation: images are resized {name}, not bicubic",
            logits_of(pixels_of(interpolation=name)),
        )
        for name in ("nearest", "bilinear", "lanczos")
    ]
    crops = [
        (f"crop: fraction {crop:g}, not 0.9", logits_of(pixels_of(crop_fraction=crop))) for crop in (0.875, 0.95, 1.0)
    ]
    return filters + crops


def expected_labels() -> list[tuple[str, Float32Array]]:
    logits = logits_of(PIXELS_OF_IMAGES)
    orders = {"off by +1": [4, 0, 1, 2, 3], "off by +2": [3, 4, 0, 1, 2]}
    orders |= {"off by -2": [2, 3, 4, 0, 1], "off by -1": [1, 2, 3, 4, 0], "in reverse order": [4, 3, 2, 1, 0]}
    return [(f"labels are {name}", logits[:, order]) for name, order in orders.items()]


def expected_scales() -> list[tuple[str, Float32Array]]:
    powers = np.exp(logits_of(PIXELS_OF_IMAGES).astype(np.float64))
    probabilities = powers / powers.sum(axis=1, keepdims=True)
    return [("log probabilities, not logits", np.log(probabilities)), ("probabilities, not logits", probabilities)]


def test_every_mistake_and_the_logits_it_leads_to() -> None:
    made: list[Linear] = []

    def renormalized(mean: Triple, std: Triple) -> Linear:
        made.append(Linear(mean, std))
        return made[-1]

    reference = Linear()
    found = mistakes(reference=reference, renormalized=renormalized)
    expected = expected_channels(renormalized=True) + expected_normalizations()
    assert_mistakes(found, expected + expected_preparations() + expected_labels() + expected_scales())
    # Reversed channels, rows and columns, three filters and three crops; forty images, 32 at a time.
    assert reference.batches == [32, 8] * 8
    assert [(session.batches, session.ended) for session in made] == [([32, 8], True)] * 7


def test_without_a_reference_of_other_normalisation_none_is_tried() -> None:
    found = mistakes(renormalized=None)
    expected = expected_channels(renormalized=False) + expected_preparations() + expected_labels() + expected_scales()
    assert_mistakes(found, expected)


@pytest.mark.parametrize("mean", [(0.0, 0.5, 0.5), (0.5, 0.5, 0.0), (0.0, 0.0, 0.0)])
def test_a_mean_of_nought_is_not_divided_by(mean: Triple) -> None:
    found = mistakes(preprocessing=PREPARED.model_copy(update={"mean": mean}))
    causes = [cause for cause, _ in found if cause.startswith("normalisation")]
    assert causes == [cause for cause, _ in expected_normalizations()][1:]


def test_what_the_model_does_anyway_is_no_mistake() -> None:
    changes = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5), "interpolation": "nearest", "crop_fraction": 1.0}
    causes = [cause for cause, _ in mistakes(preprocessing=PREPARED.model_copy(update=changes))]
    assert "normalisation: mean and std are 0.5" not in causes
    assert "normalisation: mean and std are ImageNet's" in causes
    assert [cause for cause in causes if "resized" in cause or "crop" in cause] == [
        *(f"interpolation: images are resized {name}, not nearest" for name in ("bilinear", "bicubic", "lanczos")),
        *(f"crop: fraction {crop}, not 1" for crop in ("0.875", "0.9", "0.95")),
    ]


def test_a_crop_that_an_image_is_too_thin_for_is_left_out_and_the_next_one_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = Preprocessing.from_bytes

    def from_bytes(self: Preprocessing, data: bytes) -> UInt8Array:
        if self.crop_fraction < 0.92:
            raise InputError("too thin")
        return original(self, data)

    monkeypatch.setattr(Preprocessing, "from_bytes", from_bytes)
    uncropped = PREPARED.model_copy(update={"crop_fraction": 1.0})
    found = mistakes(preprocessing=uncropped, pixels=np.zeros((1, SIZE, SIZE, 3), np.uint8), expected=np.zeros((1, 5)))
    assert [cause for cause, _ in found if cause.startswith("crop")] == ["crop: fraction 0.95, not 1"]


@pytest.mark.parametrize(
    ("classes", "shifts"),
    [(1, []), (2, ["+1"]), (3, ["+1", "-1"]), (4, ["+1", "+2", "-1"]), (9, ["+1", "+2", "-2", "-1"])],
)
def test_labels_are_shifted_by_one_and_two_either_way(classes: int, shifts: list[str]) -> None:
    expected = np.arange(classes, dtype=np.float32)[None]
    found = mistakes(expected=expected)
    labels = {cause: logits.tolist()[0] for cause, logits in found if cause.startswith("labels")}
    assert list(labels) == [*(f"labels are off by {shift}" for shift in shifts), "labels are in reverse order"]
    for shift in shifts:  # class c's logit stands at c + shift
        assert labels[f"labels are off by {shift}"] == [(place - int(shift)) % classes for place in range(classes)]
    assert labels["labels are in reverse order"] == [*range(classes)][::-1]


def test_images_are_prepared_in_their_order() -> None:
    np.testing.assert_array_equal(prepared(IMAGES, PREPARED), PIXELS_OF_IMAGES)


def table(*rows: Sequence[float]) -> Float32Array:
    return np.array(rows, np.float32)


def test_a_constant_explains_what_it_leaves_a_fiftieth_of() -> None:
    """Class 0 is off by 1 ± 1, class 1 by −2: a remainder of 1, which is a fiftieth of 50."""
    reference = table([3, 5], [-1, 4])
    candidate = reference + table([2, -2], [0, -2])
    text = "bias of the classifier dropped or changed: class 1 has -2 on every image"
    assert _systematic(reference, candidate, 50.0) == Diagnosis(text, 50.0, 1.0)
    assert _systematic(reference, candidate, math.nextafter(50, 0)).cause is None
    other = table([30, 50, 1], [-1, 4, 2])
    text = text.replace("class 1 has -2", "class 2 has +3")
    assert _systematic(other, other + table([0, 0, 3]), 3.0) == Diagnosis(text, 3.0, 0.0)


@pytest.mark.parametrize("scale", [1.0, 2.0**-6])
def test_a_factor_explains_what_it_leaves_a_fiftieth_of(scale: float) -> None:
    """Twice the reference, and a remainder at right angles to it, of which the largest number is 2."""
    reference = table([1, 2], [3, -4]) * np.float32(scale)
    candidate = 2 * reference + table([2, -1], [0, 0]) * np.float32(scale)
    error = 100 * scale
    assert _systematic(reference, candidate, error) == Diagnosis("logits scaled by 2", error, 2 * scale)
    below = math.nextafter(error, 0)
    assert _systematic(reference, candidate, below) == Diagnosis(None, below, below)
    # A reference of zeros has no factor.
    assert _systematic(np.zeros_like(reference), candidate, 1e-3) == Diagnosis(None, 1e-3, 1e-3)


# Logits of eight images, whole numbers, which no constant and no factor makes of each other.
TABLE = np.random.default_rng(2).integers(-40, 40, (8, 3)).astype(np.float32)
OFF_BY_ONE = np.roll(TABLE, 1, axis=1)
PIXELS = numbered_images([0] * 8, ("a", "b", "c"))


def diagnosed(candidate: Session, allowed: float, reference: Session | None = None) -> Diagnosis:
    return diagnose(reference or TableSession(TABLE), candidate, PIXELS, PIXEL, allowed=allowed)


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ([0, 1, 4, 3, 2], "2 of 5: 2 has the logits of 4, 4 has the logits of 2"),
        # As names are sorted: 0, 1, 10, 2, …
        ([2, 3, 0, 4, 1], "5 of 5: 0 has the logits of 2, 1 has the logits of 3, 2 has the logits of 0"),
        ([0, 1, 2, 2, 4], "1 of 5: 3 has the logits of 2"),
    ],
)
def test_classes_in_any_other_order_are_named(order: list[int], words: str) -> None:
    logits = np.random.default_rng(3).integers(-40, 40, (8, 5)).astype(np.float32)
    found = diagnosed(TableSession(logits[:, order]), 1e-3, TableSession(logits))
    assert found.cause == f"labels are in another order, {words}"
    assert found.remaining_error == 0


def test_of_classes_that_are_alike_none_is_moved() -> None:
    logits = np.random.default_rng(3).integers(-40, 40, (8, 5)).astype(np.float32)
    logits[:, 4] = logits[:, 0]
    found = diagnosed(TableSession(logits[:, [0, 2, 1, 3, 4]]), 1e-3, TableSession(logits))
    words = "2 of 5: 1 has the logits of 2, 2 has the logits of 1"
    assert found.cause == f"labels are in another order, {words}"


def test_more_classes_in_another_order_than_are_compared_at_once() -> None:
    generator = np.random.default_rng(3)
    logits, order = generator.normal(size=(8, 600)).astype(np.float32), generator.permutation(600)
    _, found = _reordered(logits, logits[:, order])
    assert (found == logits[:, order]).all()


def test_what_comes_behind_a_softmax_is_named() -> None:
    powers = np.exp(TABLE.astype(np.float64) / 8)
    probabilities = powers / powers.sum(axis=1, keepdims=True)
    for logits, cause in ((probabilities, "probabilities, not logits"), (np.log(probabilities), "log probabilities")):
        found = diagnosed(TableSession(logits), 1e-4, TableSession(TABLE / 8))
        assert str(found.cause).startswith(cause)


def test_a_mistake_leaves_no_more_than_is_allowed() -> None:
    candidate = OFF_BY_ONE.copy()
    candidate[3, 1] += 0.5
    error = float(np.abs(candidate - TABLE).max())
    assert diagnosed(TableSession(candidate), 0.5) == Diagnosis("labels are off by +1", error, 0.5)
    assert diagnosed(TableSession(candidate), math.nextafter(0.5, 0)).cause is None


def test_a_mistake_leaves_no_more_than_a_fifth_of_the_error() -> None:
    reference, candidate = np.zeros((8, 3), np.float32), np.zeros((8, 3), np.float32)
    reference[:, 0], candidate[:, 1] = 5.0, 5.0
    reference[1, 2] = 1.0
    found = diagnosed(TableSession(candidate), 3.0, TableSession(reference))
    assert found == Diagnosis("labels are off by +1", 5.0, 1.0)
    candidate[1, 0] = -0.5  # the error stays 5.5, the remainder is 1.5
    assert diagnosed(TableSession(candidate), 3.0, TableSession(reference)).cause != "labels are off by +1"


def moving(by: float, table: Float32Array = OFF_BY_ONE) -> TableSession:
    """Image 0's first logit is larger by `by` in a batch than alone."""

    def change(numbers: list[int], logits: Any) -> None:
        if len(numbers) > 1 and 0 in numbers:
            logits[numbers.index(0), 0] += by

    return TableSession(table, change=change)


def test_rows_that_move_in_their_batch_by_more_than_is_allowed_come_before_a_mistake() -> None:
    error = float(np.abs(OFF_BY_ONE - TABLE).max())
    moved = error / 2
    batched = OFF_BY_ONE.copy()
    batched[0, 0] += moved
    larger = float(np.abs(batched - TABLE).max())
    text = f"batch-dependent graph: rows move by {moved:.3g} in batches of 32"
    assert diagnosed(moving(moved), math.nextafter(moved, 0)) == Diagnosis(text, larger, error)
    assert diagnosed(moving(moved), moved) == Diagnosis("labels are off by +1", larger, 0.0)


def test_rows_that_move_by_a_fifth_of_the_error_are_not_the_cause() -> None:
    zeros = np.zeros((8, 3), np.float32)
    for by, begins in ((1.0, "labels"), (1.25, "batch-dependent graph")):
        candidate, reference = zeros.copy(), zeros.copy()
        reference[:, 1], candidate[:, 2] = 5.0, 5.0
        found = diagnosed(moving(by, candidate), 0.5, TableSession(reference))
        assert (found.error, str(found.cause).startswith(begins)) == (5.0, True)


def test_sixty_four_evenly_spaced_images_in_batches_of_32_and_alone() -> None:
    logits = np.random.default_rng(6).integers(-40, 40, (127, 3))
    reference, candidate = TableSession(logits), TableSession(logits)
    images = numbered_images([0] * 127, ("a", "b", "c"))
    found = diagnose(reference, candidate, images, PIXEL, allowed=1.0)
    even = [*range(0, 127, 2)]
    assert reference.batches[:2] == [even[:32], even[32:]]
    assert candidate.batches == [even[:32], even[32:], *([number] for number in [*even, *even])]
    assert found.error == 0


def test_an_overflow_has_the_error_of_the_batch() -> None:
    candidate = replace_at(TABLE, (7, 2), math.nan)
    largest = float(np.finfo(np.float32).max)
    assert diagnosed(TableSession(candidate), 1.0) == Diagnosis(
        "overflow: logits are NaN or infinite", largest, largest
    )
    with pytest.raises(AttributeError, match="cannot assign"):
        setattr(Diagnosis(None, 1.0, 1.0), "cause", "x")  # noqa: B010


def replace_at(values: Float32Array, place: tuple[int, int], value: float) -> Float32Array:
    changed = values.copy()
    changed[place] = value
    return changed


def test_each_model_s_own_preprocessing_is_used() -> None:
    class Size(TableSession):
        def _infer(self, images: UInt8Array) -> Float32Array:
            assert images.shape[1] == side
            return super()._infer(images)

    side = 2
    larger = PIXEL.model_copy(update={"image_size": side})
    found = diagnose(TableSession(TABLE), Size(TABLE), PIXELS, PIXEL, candidate_preprocessing=larger, allowed=1.0)
    assert found.error == 0
