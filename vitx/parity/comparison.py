"""Two classifiers on the same images: flips, accuracies, logit errors, without a verdict (docs/parity.md).

Shape letters: N images, C classes, S the side of a prepared image.
"""

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from vitx.core.certificate import Flip
from vitx.core.console import Progress, progress
from vitx.core.errors import InputError
from vitx.core.files import sha256_bytes
from vitx.core.preprocess import Preprocessing, UInt8Array
from vitx.core.probabilities import Float64Array, calibration_error, confidences, margins
from vitx.data.image_set import ImageSet, evenly_spaced
from vitx.parity.statistics import clopper_pearson_upper, mcnemar_exact
from vitx.runtimes.session import Float32Array, Session

BATCH_SIZES = (1, 2, 7, 32)
REFERENCE_BATCH = 32
# Images decoded at once: the memory of a comparison, whatever the size of the split.
BLOCK_IMAGES = 256
# Images that are run at every batch size and in other orders; all others are run once.
PROBE_IMAGES = 192
# The error of a logit that is NaN or infinite: JSON has neither.
NOT_FINITE_ERROR = float(np.finfo(np.float32).max)

Order = Literal["in order", "shuffled", "reversed"]


@dataclass(frozen=True)
class Comparison:
    """What was measured; numbers that a certificate holds have the same names there.

    Every image was run at `batch_size`; `probe_images` of them, evenly spaced, at every one of `batch_sizes`, and in
    other orders. An image is flipped when any pass of the candidate put it into another class than the reference; it
    counts once, at the first pass that moved it, and the candidate's accuracy counts that other class. `probe_flips`
    counts the images whose class is not the same in every pass, `not_finite` those with a logit that is NaN or
    infinite. `logit_std` is that of all the reference's logits, `margins` (N,) its largest logit less the next, image
    by image. Errors are absolute differences of logits.
    """

    images: int
    batch_size: int
    batch_sizes: tuple[int, ...]
    probe_images: int
    probe_flips: int
    correct_reference: int
    correct_candidate: int
    only_reference_correct: int
    only_candidate_correct: int
    flips: tuple[Flip, ...]
    max_logit_error_by_batch_size: dict[int, float]
    mean_logit_error: float
    min_cosine: float
    mean_cosine: float
    ece_reference: float
    ece_candidate: float
    max_neighbour_error: float
    max_position_error: float
    not_finite: int
    logit_std: float
    classes_sha256: str
    margins: Float64Array = field(default_factory=lambda: np.zeros(0), repr=False, compare=False)

    @property
    def accuracy_reference(self) -> float:
        return self.correct_reference / self.images

    @property
    def accuracy_candidate(self) -> float:
        return self.correct_candidate / self.images

    @property
    def max_logit_error(self) -> float:
        return max(self.max_logit_error_by_batch_size.values())

    @property
    def flip_rate_bound(self) -> float:
        """One-sided 95 % Clopper–Pearson upper bound on the share of images that flip."""
        return clopper_pearson_upper(len(self.flips), self.images)

    @property
    def probe_flip_rate_bound(self) -> float:
        """The same bound on the share of images whose class depends on batch size, place or neighbours."""
        return clopper_pearson_upper(self.probe_flips, self.probe_images)

    @property
    def mcnemar_p(self) -> float:
        return mcnemar_exact(self.only_reference_correct, self.only_candidate_correct)


def compare(
    reference: Session,
    candidate: Session,
    images: ImageSet,
    preprocessing: Preprocessing,
    *,
    candidate_preprocessing: Preprocessing | None = None,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    probe_images: int = PROBE_IMAGES,
    quiet: bool = False,
) -> Comparison:
    """Run both sessions over all images, block by block, so that memory does not grow with the split.

    All images: the reference once, the candidate once at the largest of `batch_sizes` up to 32. Then the candidate over
    the probe images at every batch size in the images' order, at the largest sizes in a shuffled order (other
    neighbours, another place), and at one size with each batch reversed (the same neighbours, another place).
    `probe_images`: how many those are; as many as the largest batch size if that is more. Of a batch size beyond the
    number of images that number is taken, and told: no larger batch has run. Raises InputError for impossible batch
    sizes, a reference that is not finite, and another number of classes.
    """
    sizes = tuple(sorted({min(size, len(images)) for size in batch_sizes}))
    if not sizes or sizes[0] < 1:
        raise InputError(f"batch sizes {tuple(batch_sizes)}: expected one or more, each at least 1")
    main_size = max((size for size in sizes if size <= REFERENCE_BATCH), default=sizes[0])
    statistics = _Statistics(images, main_size)
    probe = _ProbeImages(evenly_spaced(len(images), max(probe_images, sizes[-1])))
    passes = _probe_passes(sizes, main_size)
    with progress("parity", len(images) + len(probe.rows) * len(passes), quiet=quiet) as bar:
        for block in _blocks(images, preprocessing, candidate_preprocessing or preprocessing, _block_size(main_size)):
            expected, found = statistics.add(block, reference, candidate)
            probe.keep(block, expected, found)
            bar.update(block.start + len(block), f"batch {main_size}")
        probe.run(candidate, passes, statistics, bar)
    return statistics.result(sizes, probe)


def prepared(images: ImageSet, preprocessing: Preprocessing) -> UInt8Array:
    """All images as they enter a session: uint8 (N, S, S, 3)."""
    return np.concatenate(list(images.batches(preprocessing, REFERENCE_BATCH)))


def infer(session: Session, images: UInt8Array, batch_size: int) -> Float32Array:
    """Logits float32 (N, C) of images uint8 (N, S, S, 3), computed `batch_size` rows at a time."""
    return np.concatenate([session.infer(images[i : i + batch_size]) for i in range(0, len(images), batch_size)])


def difference(a: Float32Array, b: Float32Array) -> Float32Array:
    """|a − b| (N, C), `NOT_FINITE_ERROR` where either is not finite.

    In float32, for two floats within a factor of two of each other are subtracted exactly (Sterbenz).
    """
    with np.errstate(invalid="ignore", over="ignore"):
        distance: Float32Array = np.abs(a - b)
    if not np.isfinite(distance.max()):
        distance[~np.isfinite(distance)] = NOT_FINITE_ERROR
    return distance


def answers_ece(confidence: Float64Array, correct: npt.NDArray[np.bool_]) -> float:
    """The expected calibration error (docs/maths.md §5.2) of N images.

    It needs an image's confidence and whether it was right, so two classes stand for all.
    """
    two_classes = np.stack([confidence, np.zeros_like(confidence)], axis=1)
    return calibration_error(two_classes, np.where(correct, 0, 1))


@dataclass(frozen=True)
class _Block:
    """Consecutive images of the split as either model reads them, uint8 (n, S, S, 3); the same array if both agree."""

    start: int
    for_reference: UInt8Array
    for_candidate: UInt8Array

    def __len__(self) -> int:
        return len(self.for_reference)


def _block_size(main_size: int) -> int:
    """A multiple of both models' batch sizes, if there is one that is small enough: then few batches are cut short."""
    multiple = math.lcm(main_size, REFERENCE_BATCH)
    return multiple * max(1, BLOCK_IMAGES // multiple) if multiple <= 2 * BLOCK_IMAGES else max(BLOCK_IMAGES, main_size)


def _blocks(
    images: ImageSet, for_reference: Preprocessing, for_candidate: Preprocessing, size: int
) -> Iterator[_Block]:
    """Yield the split in blocks; the next block is decoded while this one is compared."""
    # Mean and std are applied inside the network, so they do not change the pixels, but a border has the mean's colour.
    ignored: dict[str, Any] = {"std": (1.0, 1.0, 1.0)}
    if "border" not in (for_reference.crop_mode, for_candidate.crop_mode):
        ignored["mean"] = (0.0, 0.0, 0.0)
    alike = for_reference.model_copy(update=ignored) == for_candidate.model_copy(update=ignored)
    reference_batches = images.batches(for_reference, size)
    candidate_batches = None if alike else images.batches(for_candidate, size)

    def decode_next(start: int) -> _Block | None:
        batch = next(reference_batches, None)
        if batch is None:
            return None
        return _Block(start, batch, batch if candidate_batches is None else next(candidate_batches))

    with ThreadPoolExecutor(1) as pool:
        upcoming = pool.submit(decode_next, 0)
        while (block := upcoming.result()) is not None:
            upcoming = pool.submit(decode_next, block.start + len(block))
            yield block


class _Statistics:
    """Collects of each image its classes, margin, cosine and confidences, and sums and maxima over all images."""

    def __init__(self, images: ImageSet, batch_size: int) -> None:
        count = len(images)
        self.images, self.batch_size = images, batch_size
        self.reference_class, self.candidate_class = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self.margin, self.cosine = np.zeros(count), np.zeros(count)
        self.reference_confidence, self.candidate_confidence = np.zeros(count), np.zeros(count)
        self.flipped: dict[int, tuple[int, int]] = {}  # image → (class of the candidate, batch size)
        self.not_finite: set[int] = set()
        self.largest_error: dict[int, float] = {}  # by batch size
        self.logit_sum = self.logit_squares = self.error_sum = 0.0
        self.logit_count = 0

    def add(self, block: _Block, reference: Session, candidate: Session) -> tuple[Float32Array, Float32Array]:
        """Run both models over a block of n images; return the logits (n, C) of the reference and of the candidate."""
        expected = infer(reference, block.for_reference, REFERENCE_BATCH)
        if not np.isfinite(expected).all():
            key = self.images.keys[block.start + int(np.flatnonzero(~np.isfinite(expected).all(axis=1))[0])]
            raise InputError(f"the reference itself gives logits that are not finite, first for {key}")
        found = infer(candidate, block.for_candidate, self.batch_size)
        if found.shape != expected.shape:
            raise InputError(
                f"the candidate returns logits {found.shape} where the reference returns {expected.shape}: "
                "they are not the same classifier"
            )
        rows = slice(block.start, block.start + len(block))
        self.reference_class[rows], self.candidate_class[rows] = expected.argmax(axis=1), found.argmax(axis=1)
        self.margin[rows] = margins(expected)
        self.cosine[rows] = _cosines(expected, found)
        self.reference_confidence[rows], self.candidate_confidence[rows] = confidences(expected), confidences(found)
        self.logit_sum += float(expected.sum(dtype=np.float64))
        self.logit_squares += float(np.square(expected, dtype=np.float64).sum())
        self.logit_count += expected.size
        self.error_sum += self.add_pass(np.arange(rows.start, rows.stop), self.batch_size, expected, found)
        return expected, found

    def add_pass(self, indices: npt.NDArray[np.int64], size: int, expected: Float32Array, found: Float32Array) -> float:
        """Count one pass of the candidate over the images `indices`; return the sum of its logit errors."""
        error = difference(expected, found)
        self.largest_error[size] = max(self.largest_error.get(size, 0.0), float(error.max()))
        classes = found.argmax(axis=1)
        for row in np.flatnonzero(classes != self.reference_class[indices]):
            self.flipped.setdefault(int(indices[row]), (int(classes[row]), size))
        self.not_finite.update(int(index) for index in indices[~np.isfinite(found).all(axis=1)])
        return float(error.sum(dtype=np.float64))

    def result(self, sizes: tuple[int, ...], probe: "_ProbeImages") -> Comparison:
        flips = tuple(self._flip(index) for index in sorted(self.flipped))
        lost = sum(flip.reference == flip.label for flip in flips)
        won = sum(flip.candidate == flip.label for flip in flips)
        labels = self.images.labels
        correct = int((self.reference_class == labels).sum())
        mean = self.logit_sum / self.logit_count
        return Comparison(
            images=len(self.images),
            batch_size=self.batch_size,
            batch_sizes=sizes,
            probe_images=len(probe.rows),
            probe_flips=len(probe.unstable),
            correct_reference=correct,
            correct_candidate=correct - lost + won,
            only_reference_correct=lost,
            only_candidate_correct=won,
            flips=flips,
            max_logit_error_by_batch_size={size: self.largest_error[size] for size in sizes},
            mean_logit_error=self.error_sum / self.logit_count,
            min_cosine=float(self.cosine.min()),
            mean_cosine=float(self.cosine.mean()),
            ece_reference=answers_ece(self.reference_confidence, self.reference_class == labels),
            ece_candidate=answers_ece(self.candidate_confidence, self.candidate_class == labels),
            max_neighbour_error=probe.neighbour,
            max_position_error=probe.position,
            not_finite=len(self.not_finite),
            logit_std=math.sqrt(max(0.0, self.logit_squares / self.logit_count - mean * mean)),
            classes_sha256=sha256_bytes(self.candidate_class.astype("<i4").tobytes()),
            margins=self.margin,
        )

    def _flip(self, index: int) -> Flip:
        candidate, size = self.flipped[index]
        return Flip(
            key=self.images.keys[index],
            label=int(self.images.labels[index]),
            reference=int(self.reference_class[index]),
            candidate=candidate,
            reference_margin=float(self.margin[index]),
            batch_size=size,
        )


def _probe_passes(sizes: Sequence[int], main_size: int) -> list[tuple[int, Order]]:
    """The candidate's passes over the probe images, but for the one in order at `main_size`: all images take that."""
    passes: list[tuple[int, Order]] = [(size, "in order") for size in sizes if size != main_size]
    # Two sizes are enough: a row that depends on its neighbours at another one differs from the reference there.
    passes += [(size, "shuffled") for size in sorted({main_size, sizes[-1]}) if size > 1]
    below = [size for size in sizes if 1 < size < main_size]
    if main_size > 1:
        passes.append((below[-1] if below else main_size, "reversed"))
    return passes


class _ProbeImages:
    """The images that are run at every batch size and in other orders, gathered while all images pass.

    rows: their indices in the split. neighbour, position: the largest change of a logit in shuffled batches and in
    reversed ones. unstable: those whose class is not the same in every pass.
    """

    def __init__(self, rows: npt.NDArray[np.int64]) -> None:
        self.rows = rows
        self.pixels: list[UInt8Array] = []
        self.expected: list[Float32Array] = []
        self.found: list[Float32Array] = []
        self.neighbour = self.position = 0.0
        self.unstable: set[int] = set()

    def keep(self, block: _Block, expected: Float32Array, found: Float32Array) -> None:
        chosen = self.rows[(self.rows >= block.start) & (self.rows < block.start + len(block))] - block.start
        if len(chosen):
            self.pixels.append(block.for_candidate[chosen])
            self.expected.append(expected[chosen])
            self.found.append(found[chosen])

    def run(
        self, candidate: Session, passes: Sequence[tuple[int, Order]], statistics: _Statistics, bar: Progress
    ) -> None:
        pixels, expected = np.concatenate(self.pixels), np.concatenate(self.expected)
        first = np.concatenate(self.found)
        in_order = {statistics.batch_size: first}
        done, count = len(statistics.images), len(pixels)
        for size, order in passes:
            indices = _order_of(order, count, size)
            found = np.empty_like(expected)
            found[indices] = infer(candidate, pixels[indices], size)
            if order == "in order":
                in_order[size] = found
            moved = float(difference(in_order[size], found).max())
            if order == "shuffled":
                self.neighbour = max(self.neighbour, moved)
            if order == "reversed":
                self.position = max(self.position, moved)
            statistics.add_pass(self.rows, size, expected, found)
            self.unstable.update(int(row) for row in np.flatnonzero(found.argmax(axis=1) != first.argmax(axis=1)))
            done += count
            bar.update(done, f"batch {size}, {order}")


def _order_of(order: Order, count: int, size: int) -> npt.NDArray[np.int64]:
    """Which image is run at each place. The shuffle is the same in every run; "reversed" reverses within batches."""
    if order == "shuffled":
        return np.random.default_rng(size).permutation(count)
    indices = np.arange(count)
    if order == "reversed":
        return np.concatenate([indices[start : start + size][::-1] for start in range(0, count, size)])
    return indices


def _cosines(a: Float32Array, b: Float32Array) -> Float64Array:
    """The cosine of each pair of rows, (N,); −1 where a logit is not finite, 1 where both rows are zero."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        products, squares = np.einsum("nc,nc->n", x, y), np.einsum("nc,nc->n", y, y)
        lengths = np.sqrt(np.einsum("nc,nc->n", x, x) * squares)
        alike = np.where(lengths > 0, products / np.where(lengths > 0, lengths, 1), (x == y).all(axis=1))
    return np.asarray(np.where(np.isfinite(squares), alike.clip(-1, 1), -1.0))
