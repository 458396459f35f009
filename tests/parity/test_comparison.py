"""`compare` on eight images whose every number is worked out by hand, and on more by a slow formula in float64."""

import math
import struct
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from hashlib import sha256
from typing import Any

import numpy as np
import pytest

from table_session import PIXEL, Change, TableSession, numbered_images
from vitx.core.errors import InputError
from vitx.core.preprocess import UInt8Array
from vitx.parity import comparison
from vitx.parity.comparison import Comparison, compare, difference
from vitx.runtimes.session import Float32Array

CLASSES = ("a", "b", "c")
LABELS = (0, 1, 2, 0, 1, 2, 2, 0)
# Of the eight images the reference has 0, 1, 2, 3 and 7 right: five.
REFERENCE: list[list[float]] = [
    [2, 0, 0.5],
    [0, 3, 1],
    [0.5, 0, 4],
    [1, 0.75, 0],
    [0, 0.5, 1],
    [0, 2, 1.5],
    [1.125, 1.5, 0],
    [5, -1, -2],
]
# In batches of four: image 0 moves by 1/8 and keeps its class, 1 is lost to class 2, 4 is won.
CANDIDATE: list[list[float]] = [[2.125, 0, 0.5], [0, 2, 2.5], REFERENCE[2], REFERENCE[3], [0, 1.25, 1], *REFERENCE[5:]]
# Alone, 1 has class 0 and 3 is lost to class 1; in pairs, 5 goes from one wrong class to another.
OTHER_ROWS: dict[int, dict[int, Sequence[float]]] = {1: {1: (4, 3, 1), 3: (1, 1.25, 0)}, 2: {5: (2.25, 2, 1.5)}}
# Of five probe images: linspace(0, 7, 5) is 0, 1.75, 3.5, 5.25, 7.
PROBE = [0, 1, 3, 5, 7]


def moved_by_neighbours_and_place(numbers: list[int], logits: Float32Array) -> None:
    """Image 7 moves with image 3 in its batch of four, image 0 is lost to class 1 behind image 1."""
    if 3 in numbers and 7 in numbers:
        logits[numbers.index(7), 2] += 0.625
    if numbers == [1, 0]:
        logits[1] = (2.125, 3, 0.5)


def eight_images(*, change: Change = moved_by_neighbours_and_place) -> tuple[Comparison, TableSession, TableSession]:
    reference, candidate = TableSession(REFERENCE), TableSession(CANDIDATE, at_batch=OTHER_ROWS, change=change)
    images = numbered_images(LABELS, CLASSES)
    options: dict[str, Any] = {"batch_sizes": (4, 1, 2, 2), "probe_images": 5, "quiet": True}
    return compare(reference, candidate, images, PIXEL, **options), reference, candidate


def flip(image: int, classes: tuple[int, int], margin: float, size: int) -> dict[str, object]:
    return {
        "key": f"image {image}",
        "label": LABELS[image],
        "reference": classes[0],
        "candidate": classes[1],
        "reference_margin": margin,
        "batch_size": size,
    }


def softmax(row: Sequence[float]) -> list[float]:
    exponentials = [math.exp(value) for value in row]
    return [value / sum(exponentials) for value in exponentials]


def slow_ece(table: Sequence[Sequence[float]], labels: Sequence[int]) -> float:
    """Σ |images right − confidence| over 15 bins (lo, hi], a bin and an image at a time."""
    total = 0.0
    for number in range(15):
        gap = 0.0
        for row, label in zip(table, labels, strict=True):
            confidence = max(softmax(row))
            if number / 15 < confidence <= (number + 1) / 15:
                gap += (list(row).index(max(row)) == label) - confidence
        total += abs(gap)
    return total / len(labels)


def slow_cosine(a: Sequence[float], b: Sequence[float]) -> float:
    product = sum(x * y for x, y in zip(a, b, strict=True))
    return product / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))


def test_every_field_of_the_comparison_of_eight_images() -> None:
    found, _, _ = eight_images()
    cosines = [slow_cosine(*rows) for rows in zip(REFERENCE, CANDIDATE, strict=True)]
    # 24 logits: their sum is 22.375 and that of their squares 73.078125; their root mean square would be 1.745.
    logit_std = math.sqrt(73.078125 / 24 - (22.375 / 24) ** 2)
    assert logit_std == pytest.approx(1.475043770)
    expected = {
        "images": 8,
        "batch_size": 4,
        "batch_sizes": (1, 2, 4),
        "probe_images": 5,
        "probe_flips": 4,  # 1 and 3 alone, 5 in pairs, 0 in its other place
        "correct_reference": 5,
        "correct_candidate": 3,  # five, less three lost, and one won
        "only_reference_correct": 3,  # 0, 1 and 3
        "only_candidate_correct": 1,  # 4; 5 is wrong both times
        # Each once, at the first pass that moved it: 1 is moved again alone, to class 0.
        "flips": (
            flip(0, (0, 1), 1.5, 2),
            flip(1, (1, 2), 2.0, 4),
            flip(3, (0, 1), 0.25, 1),
            flip(4, (2, 1), 0.5, 4),
            flip(5, (1, 0), 0.5, 2),
        ),
        # Image 1 alone: |4 − 0|; image 0 behind 1: |3 − 0|; image 1 in a batch of four: |2.5 − 1|.
        "max_logit_error_by_batch_size": {1: 4.0, 2: 3.0, 4: 1.5},
        "mean_logit_error": 3.375 / 24,  # 0.125 + (1 + 1.5) + 0.75, in batches of four
        "min_cosine": pytest.approx(min(cosines), abs=1e-12),
        "mean_cosine": pytest.approx(sum(cosines) / 8, abs=1e-12),
        "ece_reference": pytest.approx(slow_ece(REFERENCE, LABELS), abs=1e-6),
        "ece_candidate": pytest.approx(slow_ece(CANDIDATE, LABELS), abs=1e-6),
        "max_neighbour_error": 0.625,
        "max_position_error": 3.0,
        "not_finite": 0,
        "logit_std": pytest.approx(logit_std, abs=1e-12),
        "classes_sha256": sha256(struct.pack("<8i", 0, 2, 2, 0, 1, 1, 1, 0)).hexdigest(),
        "margins": [max(row) - sorted(row)[-2] for row in REFERENCE],
    }
    assert set(expected) == {field.name for field in fields(Comparison)}
    assert {
        **asdict(found),
        "flips": tuple(flip.model_dump() for flip in found.flips),
        "margins": [*found.margins],
    } == expected
    # The numbers that the formulas above stand for.
    assert (min(cosines), sum(cosines) / 8) == pytest.approx((0.8395701572, 0.9684291381))
    assert (found.ece_reference, found.ece_candidate) == pytest.approx((0.3259893965, 0.2497582135))


def test_what_follows_from_the_counts() -> None:
    found, _, _ = eight_images()
    assert (found.accuracy_reference, found.accuracy_candidate) == (5 / 8, 3 / 8)
    assert found.max_logit_error == 4
    # P(X ≤ 5 | 8, p) = 1 − 8·p⁷(1 − p) − 28·p⁶(1 − p)² − p⁸ + … is 0.05 at this p.
    p = found.flip_rate_bound
    assert sum(math.comb(8, k) * p**k * (1 - p) ** (8 - k) for k in range(6)) == pytest.approx(0.05, abs=1e-9)
    assert found.probe_flip_rate_bound == pytest.approx(0.95 ** (1 / 5), abs=1e-12)  # P(X ≤ 4 | 5, p) = 1 − p⁵
    assert found.mcnemar_p == pytest.approx(0.625)  # 2 · (1 + 4) / 2⁴ of 3 against 1


def test_passes_over_eight_images() -> None:
    _, reference, candidate = eight_images()
    assert reference.batches == [[*range(8)]]
    assert candidate.batches == [
        *([0, 1, 2, 3], [4, 5, 6, 7]),  # all, in batches of four
        *([0], [1], [3], [5], [7]),
        *([0, 1], [3, 5], [7]),
        *([3, 7, 0, 1], [5]),  # shuffled, the same way in every run
        *([1, 0], [5, 3], [7]),  # each batch reversed
    ]


def test_the_probe_alone_moves_when_neighbours_alone_do() -> None:
    """Image 7 gains 0.625 beside image 3 and keeps its class: no flip, no change by place."""

    def beside(numbers: list[int], logits: Float32Array) -> None:
        if 3 in numbers and 7 in numbers:
            logits[numbers.index(7), 2] += 0.625

    images = numbered_images(LABELS, CLASSES)
    candidate = TableSession(REFERENCE, change=beside)
    found = compare(
        TableSession(REFERENCE), candidate, images, PIXEL, batch_sizes=(1, 2, 4), probe_images=5, quiet=True
    )
    assert (found.max_neighbour_error, found.max_position_error, found.probe_flips) == (0.625, 0, 0)
    assert found.max_logit_error_by_batch_size == {1: 0, 2: 0, 4: 0.625}
    assert (found.flips, found.mean_logit_error) == ((), 0)


def test_rows_that_are_not_finite_are_the_worst_and_no_other_row_moves() -> None:
    table = [list(row) for row in REFERENCE]
    table[2][0], table[5][2], table[6][1] = math.nan, math.inf, -math.inf
    found = compare(
        TableSession(REFERENCE),
        TableSession(table),
        numbered_images(LABELS, CLASSES),
        PIXEL,
        batch_sizes=(4,),
        probe_images=5,
        quiet=True,
    )
    largest = comparison.NOT_FINITE_ERROR
    assert largest == 3.4028234663852886e38
    assert found.not_finite == 3
    assert found.max_logit_error_by_batch_size == {4: largest}
    assert found.mean_logit_error == pytest.approx(3 * largest / 24)
    # numpy's largest of a row with NaN is NaN; infinity is the largest; −∞ never is.
    moved = [(flip.key, flip.reference, flip.candidate) for flip in found.flips]
    assert moved == [("image 2", 2, 0), ("image 5", 1, 2), ("image 6", 1, 0)]
    assert (found.correct_reference, found.only_reference_correct, found.only_candidate_correct) == (5, 1, 1)
    assert found.correct_candidate == 5
    assert found.min_cosine == -1
    assert found.mean_cosine == pytest.approx((5 - 3) / 8)  # −1 for each of the three
    assert found.logit_std == pytest.approx(1.475043770)  # the reference's
    assert math.isfinite(found.ece_candidate)
    # Image 5 is a probe image: infinite in every pass, so it is infinitely far from itself.
    assert found.max_neighbour_error == largest


def test_an_image_that_is_not_finite_in_one_pass_counts_once() -> None:
    nan: dict[int, dict[int, Sequence[float]]] = {
        1: {3: (math.nan, 0, 0)},
        2: {3: (math.nan, 0, 0), 5: (0, 0, math.nan)},
    }
    found = compare(
        TableSession(REFERENCE),
        TableSession(REFERENCE, at_batch=nan),
        numbered_images(LABELS, CLASSES),
        PIXEL,
        batch_sizes=(1, 2, 4),
        probe_images=5,
        quiet=True,
    )
    assert found.not_finite == 2
    largest = comparison.NOT_FINITE_ERROR
    assert found.max_logit_error_by_batch_size == {1: largest, 2: largest, 4: 0}
    # NaN is taken for the largest: image 3 keeps class 0, image 5 goes from class 1 to 2.
    assert [(flip.key, flip.batch_size) for flip in found.flips] == [("image 5", 2)]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 32 images."""
    monkeypatch.setattr(comparison, "BLOCK_IMAGES", 16)


def random_tables(count: int) -> tuple[list[int], Float32Array, Float32Array]:
    """Labels, and tables that disagree on some images; as eighths, so that differences are exact."""
    rng = np.random.default_rng(5)
    reference = rng.integers(-32, 32, (count, 3)) / 8
    candidate = reference + rng.integers(-16, 17, (count, 3)) / 8
    return rng.integers(0, 3, count).tolist(), reference.astype(np.float32), candidate.astype(np.float32)


def test_numbers_of_many_blocks_are_those_of_the_slow_formulas(small_blocks: None) -> None:
    labels, first, second = random_tables(75)
    reference, candidate = TableSession(first), TableSession(second)
    images = numbered_images(labels, CLASSES)
    found = compare(reference, candidate, images, PIXEL, batch_sizes=(1, 8), probe_images=6, quiet=True)
    assert reference.batches == [[*range(32)], [*range(32, 64)], [*range(64, 75)]]
    rows = list(zip(first.tolist(), second.tolist(), labels, strict=True))
    classes = [(a.index(max(a)), b.index(max(b)), label) for a, b, label in rows]
    assert found.correct_reference == sum(a == label for a, _, label in classes)
    assert found.correct_candidate == sum(b == label for _, b, label in classes)
    assert found.only_reference_correct == sum(a == label != b for a, b, label in classes) > 0
    assert found.only_candidate_correct == sum(b == label != a for a, b, label in classes)
    assert found.only_reference_correct != found.only_candidate_correct
    assert [(f.key, f.reference, f.candidate) for f in found.flips] == [
        (f"image {index}", a, b) for index, (a, b, _) in enumerate(classes) if a != b
    ]
    errors = [abs(x - y) for a, b, _ in rows for x, y in zip(a, b, strict=True)]
    assert found.mean_logit_error == pytest.approx(sum(errors) / len(errors), abs=1e-12)
    assert found.max_logit_error_by_batch_size[8] == max(errors)
    logits = [value for a, _, _ in rows for value in a]
    mean = sum(logits) / len(logits)
    assert found.logit_std == pytest.approx(math.sqrt(sum((x - mean) ** 2 for x in logits) / len(logits)), abs=1e-12)
    cosines = [slow_cosine(a, b) for a, b, _ in rows]
    assert (found.min_cosine, found.mean_cosine) == pytest.approx((min(cosines), sum(cosines) / 75), abs=1e-12)
    assert found.ece_reference == pytest.approx(slow_ece([a for a, _, _ in rows], labels), abs=1e-6)
    assert found.ece_candidate == pytest.approx(slow_ece([b for _, b, _ in rows], labels), abs=1e-6)
    # As many probe images as the largest batch: linspace(0, 74, 8), two or three of each block.
    probe = [0, 10, 21, 31, 42, 52, 63, 74]
    assert candidate.batches[10:18] == [[number] for number in probe]
    assert candidate.batches[-1] == probe[::-1]
    assert found.max_logit_error_by_batch_size[1] == np.abs(first - second)[probe].max()
    margins = [sorted(a)[-1] - sorted(a)[-2] for a, _, _ in rows]
    assert [f.reference_margin for f in found.flips] == [margins[int(f.key.split()[1])] for f in found.flips]


def test_the_largest_errors_are_of_all_blocks_and_passes(small_blocks: None) -> None:
    """The largest error is in the first block, and the first of two shuffled passes moves a row most."""
    table = np.zeros((75, 3), np.float32)
    table[:, 0] = 1
    worse = table.copy()
    worse[1, 1], worse[70, 1] = 0.5, 0.25

    def shuffled(numbers: list[int], logits: Float32Array) -> None:
        if numbers not in (sorted(numbers), sorted(numbers)[::-1]) and 74 in numbers:
            logits[numbers.index(74), 2] += 0.75 if len(numbers) == 8 else 0.125

    images = numbered_images([0] * 75, CLASSES)
    candidate = TableSession(worse, change=shuffled)
    found = compare(TableSession(table), candidate, images, PIXEL, batch_sizes=(8, 40), probe_images=6, quiet=True)
    assert found.max_logit_error_by_batch_size == {8: 0.75, 40: 0.5}
    assert (found.max_neighbour_error, found.max_position_error) == (0.75, 0)
    assert (found.batch_size, found.probe_images) == (8, 40)


def test_a_reference_that_is_not_finite_later_on_is_named(small_blocks: None) -> None:
    table = np.zeros((75, 3), np.float32)
    table[66, 1] = table[70, 2] = np.inf
    with pytest.raises(InputError) as caught:
        compare(TableSession(table), TableSession(table), numbered_images([0] * 75, CLASSES), PIXEL, quiet=True)
    assert str(caught.value) == "the reference itself gives logits that are not finite, first for image 66"


def test_another_number_of_classes_says_both() -> None:
    with pytest.raises(InputError) as caught:
        compare(
            TableSession(REFERENCE),
            TableSession([[1, 2]] * 8),
            numbered_images(LABELS, CLASSES),
            PIXEL,
            quiet=True,
        )
    assert str(caught.value) == (
        "the candidate returns logits (8, 2) where the reference returns (8, 3): they are not the same classifier"
    )


class Sides(TableSession):
    """Notes the side of the images that it is given."""

    sides: set[int]

    def _infer(self, images: UInt8Array) -> Float32Array:
        self.sides = {*getattr(self, "sides", set()), images.shape[1]}
        return super()._infer(images)


def test_each_model_reads_images_of_its_own_preprocessing_in_every_pass() -> None:
    reference, candidate = Sides(REFERENCE), Sides(REFERENCE)
    larger = PIXEL.model_copy(update={"image_size": 2})
    images = numbered_images(LABELS, CLASSES)
    found = compare(reference, candidate, images, PIXEL, candidate_preprocessing=larger, quiet=True)
    assert (reference.sides, candidate.sides, found.max_logit_error) == ({1}, {2}, 0)


def test_of_a_batch_larger_than_the_images_what_ran_is_told() -> None:
    session = TableSession(np.eye(3, dtype=np.float32))
    images = numbered_images([0, 1, 2], ("a", "b", "c"))
    found = compare(session, session, images, PIXEL, batch_sizes=(2, 3, 500), quiet=True)
    assert (found.batch_size, found.batch_sizes, set(found.max_logit_error_by_batch_size)) == (3, (2, 3), {2, 3})


def test_images_are_decoded_once_for_two_models_that_differ_in_normalisation_alone() -> None:
    images = numbered_images(LABELS, CLASSES)
    reads: list[int] = []

    def read(index: int) -> bytes:
        reads.append(index)
        return images.read(index)

    counted = replace(images, read=read)
    border = PIXEL.model_copy(update={"crop_mode": "border"})
    for first, changes, times in (
        (PIXEL, {"mean": (0.1, 0.2, 0.3), "std": (1.0, 2.0, 3.0)}, 1),
        (PIXEL, {"crop_fraction": 0.9}, 2),
        (border, {"std": (1.0, 2.0, 3.0)}, 1),
        (border, {"mean": (0.1, 0.2, 0.3)}, 2),  # the colour of the border
    ):
        reads.clear()
        other = first.model_copy(update=changes)
        session = TableSession(REFERENCE)
        compare(session, session, counted, first, candidate_preprocessing=other, quiet=True)
        assert sorted(reads) == sorted([*range(8)] * times)


@pytest.mark.parametrize(
    ("sizes", "main"),
    [((1, 2, 7, 32), 32), ((31, 33), 31), ((32, 33), 32), ((33, 40), 33), ((5,), 5), ((64, 1), 1)],
)
def test_all_images_run_at_the_largest_size_up_to_32(sizes: tuple[int, ...], main: int) -> None:
    labels, first, _ = random_tables(70)
    session = TableSession(first)
    found = compare(
        TableSession(first), session, numbered_images(labels, CLASSES), PIXEL, batch_sizes=sizes, quiet=True
    )
    assert found.batch_size == main
    assert len(session.batches[0]) == main
    assert found.batch_sizes == tuple(sorted(sizes))


@pytest.mark.parametrize(
    ("main", "size"),
    # The reference runs 32 at a time: lcm(main, 32), repeated up to 256, if it is at most 512.
    [(1, 256), (7, 224), (12, 192), (15, 480), (16, 256), (17, 256), (32, 256), (128, 256), (512, 512), (700, 700)],
)
def test_a_block_holds_whole_batches_of_both_models(main: int, size: int) -> None:
    assert comparison._block_size(main) == size


@pytest.mark.parametrize(
    ("sizes", "main", "passes"),
    [
        ((1,), 1, []),
        ((4,), 4, [(4, "shuffled"), (4, "reversed")]),
        ((1, 2), 2, [(1, "in order"), (2, "shuffled"), (2, "reversed")]),
        ((1, 4), 4, [(1, "in order"), (4, "shuffled"), (4, "reversed")]),
        (
            (1, 2, 7, 32),
            32,
            [(1, "in order"), (2, "in order"), (7, "in order"), (32, "shuffled"), (7, "reversed")],
        ),
        ((1, 64), 1, [(64, "in order"), (64, "shuffled")]),
        ((8, 64), 8, [(64, "in order"), (8, "shuffled"), (64, "shuffled"), (8, "reversed")]),
    ],
)
def test_passes_over_the_probe_images(sizes: tuple[int, ...], main: int, passes: list[tuple[int, str]]) -> None:
    assert comparison._probe_passes(sizes, main) == passes


def test_rows_are_reversed_within_their_batch_and_shuffled_over_all() -> None:
    assert comparison._order_of("reversed", 7, 3).tolist() == [2, 1, 0, 5, 4, 3, 6]
    assert comparison._order_of("in order", 3, 2).tolist() == [0, 1, 2]
    shuffled = comparison._order_of("shuffled", 192, 32)
    assert sorted(shuffled.tolist()) == [*range(192)]
    assert len({*shuffled[:32].tolist()} & {*range(32)}) < 16  # other neighbours
    assert shuffled.tolist() == comparison._order_of("shuffled", 192, 32).tolist()
    assert shuffled.tolist() != comparison._order_of("shuffled", 192, 7).tolist()


def test_difference_of_what_is_not_finite_is_the_largest_float() -> None:
    a = np.array([[1, np.nan, np.inf, np.inf, 3e38, -2]], np.float32)
    b = np.array([[2.5, 0, np.inf, 0, -3e38, -2]], np.float32)
    largest = comparison.NOT_FINITE_ERROR
    assert difference(a, b).tolist() == [[1.5, largest, largest, largest, largest, 0]]


def test_cosines_of_rows_of_zeros_and_of_what_is_not_finite() -> None:
    a = np.array([[3, 4], [0, 0], [0, 0], [1, 0], [1, 0], [1, 2], [1, 2]], np.float32)
    b = np.array([[4, 3], [0, 0], [1, 0], [0, 2], [-5, 0], [np.nan, 2], [np.inf, 2]], np.float32)
    expected = [24 / 25, 1, 0, 0, -1, -1, -1]
    assert comparison._cosines(a, b).tolist() == pytest.approx(expected, abs=1e-15)


def test_progress_ends_where_it_said_it_would(monkeypatch: pytest.MonkeyPatch, small_blocks: None) -> None:
    seen: list[tuple[int, str]] = []
    promised = 8 + 4 * 5

    class Bar:
        def __init__(self, title: str, total: int, *, quiet: bool) -> None:
            assert (title, total, quiet) == ("parity", promised, True)

        def __enter__(self) -> "Bar":
            return self

        def __exit__(self, *exception: object) -> None: ...

        def update(self, done: int, text: str) -> None:
            seen.append((done, text))

    monkeypatch.setattr(comparison, "progress", Bar)
    eight_images()
    passes = [
        (13, "batch 1, in order"),
        (18, "batch 2, in order"),
        (23, "batch 4, shuffled"),
        (28, "batch 2, reversed"),
    ]
    assert seen == [(8, "batch 4"), *passes]
    seen.clear()
    promised = 75 + 2 * 6
    session = TableSession(np.eye(75, 3))
    compare(session, session, numbered_images([0] * 75, CLASSES), PIXEL, batch_sizes=(4,), probe_images=6, quiet=True)
    assert [done for done, _ in seen] == [32, 64, 75, 81, 87]
