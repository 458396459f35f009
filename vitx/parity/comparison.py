"""What two classifiers do on the same images, measured before any limit. Semantics: docs/parity.md."""

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from vitx.core.certificate import Flip
from vitx.core.console import Progress, progress
from vitx.core.errors import InputError
from vitx.core.files import sha256_bytes
from vitx.core.preprocess import Preprocessing, UInt8Array
from vitx.core.probabilities import calibration_error, margins
from vitx.data.image_set import ImageSet, evenly_spaced
from vitx.parity.statistics import clopper_pearson_upper, mcnemar_exact
from vitx.runtimes.session import Float32Array, Session

BATCH_SIZES = (1, 2, 7, 32)
REFERENCE_BATCH = 32
# Images decoded at once: the memory of a comparison, whatever the size of the split.
BLOCK_IMAGES = 256
# Images that are run at every batch size and in other company; all others are run once.
PROBE_IMAGES = 192
# What a logit that is NaN or infinite counts as: JSON has neither.
WORST = float(np.finfo(np.float32).max)

Float64Array = npt.NDArray[np.float64]
Order = Literal["in order", "shuffled", "reversed"]


@dataclass(frozen=True)
class Comparison:
    """What was measured on the images.

    Every image was run at `batch_size`; `probe_images` of them, evenly spaced, at every one of `batch_sizes`, and in
    other orders. An image is flipped when any pass of the candidate put it into another class than the reference; it
    counts once, at the first pass that moved it, and the candidate's accuracy counts that other class. `probe_flips`
    are the images whose class is not the same in every pass.
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
    `probe_images`: how many those are; as many as the largest batch size if that is more.
    Raises InputError for impossible batch sizes, a reference that is not finite, and another number of classes.
    """
    sizes = tuple(sorted(set(batch_sizes)))
    if not sizes or sizes[0] < 1:
        raise InputError(f"batch sizes {tuple(batch_sizes)}: expected one or more, each at least 1")
    main = max((size for size in sizes if size <= REFERENCE_BATCH), default=sizes[0])
    tally = _Tally(images, main)
    probe = _Probe(evenly_spaced(len(images), max(probe_images, sizes[-1])))
    steps = _probe_steps(sizes, main)
    with progress("parity", len(images) + len(probe.rows) * len(steps), quiet=quiet) as bar:
        for block in _blocks(images, preprocessing, candidate_preprocessing or preprocessing, _block_size(main)):
            expected, found = tally.add(block, reference, candidate)
            probe.keep(block, expected, found)
            bar.update(block.start + len(block), f"batch {main}")
        probe.run(candidate, steps, tally, bar)
    return tally.result(sizes, probe)


def subset(images: ImageSet, most: int) -> ImageSet:
    """At most `most` images of a set, evenly spaced."""
    chosen = evenly_spaced(len(images), most)
    keys = tuple(images.keys[index] for index in chosen)
    return ImageSet(images.name, images.class_names, keys, images.labels[chosen], lambda i: images.read(int(chosen[i])))


def infer(session: Session, images: UInt8Array, batch_size: int) -> Float32Array:
    """Logits float32 (N, C), computed `batch_size` rows at a time."""
    return np.concatenate([session.infer(images[i : i + batch_size]) for i in range(0, len(images), batch_size)])


def difference(a: Float32Array, b: Float32Array) -> Float32Array:
    """|a − b|, `WORST` where either is not finite. Two floats within a factor of two are subtracted exactly."""
    with np.errstate(invalid="ignore", over="ignore"):
        distance: Float32Array = np.abs(a - b)
    if not np.isfinite(distance.max()):
        distance[~np.isfinite(distance)] = WORST
    return distance


@dataclass(frozen=True)
class _Block:
    """Consecutive images of the split, prepared for either side; one array when both prepare alike."""

    start: int
    for_reference: UInt8Array
    for_candidate: UInt8Array

    def __len__(self) -> int:
        return len(self.for_reference)


def _block_size(main: int) -> int:
    """A multiple of both batch sizes where one is small enough, so that few batches are cut short."""
    multiple = math.lcm(main, REFERENCE_BATCH)
    return multiple * max(1, BLOCK_IMAGES // multiple) if multiple <= 2 * BLOCK_IMAGES else max(BLOCK_IMAGES, main)


def _blocks(
    images: ImageSet, for_reference: Preprocessing, for_candidate: Preprocessing, size: int
) -> Iterator[_Block]:
    """Yield the split in blocks, the next one being decoded while this one is compared."""
    # What is normalised inside the graph does not change the pixels.
    inside = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
    alike = for_reference.model_copy(update=inside) == for_candidate.model_copy(update=inside)
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


class _Tally:
    """Per image: its classes, margin, cosine and confidence. Over all images: sums and maxima."""

    def __init__(self, images: ImageSet, batch_size: int) -> None:
        count = len(images)
        self.images, self.batch_size = images, batch_size
        self.before, self.after = np.zeros(count, np.int64), np.zeros(count, np.int64)
        self.margin, self.cosine = np.zeros(count), np.zeros(count)
        self.confidence_before, self.confidence_after = np.zeros(count), np.zeros(count)
        self.flipped: dict[int, tuple[int, int]] = {}
        self.not_finite: set[int] = set()
        self.worst: dict[int, float] = {}
        self.logit_sum = self.logit_squares = self.error_sum = 0.0
        self.logit_count = 0

    def add(self, block: _Block, reference: Session, candidate: Session) -> tuple[Float32Array, Float32Array]:
        """Run both sides over a block; return (logits of the reference, of the candidate)."""
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
        self.before[rows], self.after[rows] = expected.argmax(axis=1), found.argmax(axis=1)
        self.margin[rows] = margins(expected)
        self.cosine[rows] = _cosines(expected, found)
        self.confidence_before[rows], self.confidence_after[rows] = _confidences(expected), _confidences(found)
        self.logit_sum += float(expected.sum(dtype=np.float64))
        self.logit_squares += float(np.square(expected, dtype=np.float64).sum())
        self.logit_count += expected.size
        self.error_sum += self.add_pass(np.arange(rows.start, rows.stop), self.batch_size, expected, found)
        return expected, found

    def add_pass(self, indices: npt.NDArray[np.int64], size: int, expected: Float32Array, found: Float32Array) -> float:
        """Count one pass of the candidate over the images `indices`; return the sum of its logit errors."""
        error = difference(expected, found)
        self.worst[size] = max(self.worst.get(size, 0.0), float(error.max()))
        classes = found.argmax(axis=1)
        for row in np.flatnonzero(classes != self.before[indices]):
            self.flipped.setdefault(int(indices[row]), (int(classes[row]), size))
        self.not_finite.update(int(index) for index in indices[~np.isfinite(found).all(axis=1)])
        return float(error.sum(dtype=np.float64))

    def result(self, sizes: tuple[int, ...], probe: "_Probe") -> Comparison:
        flips = tuple(self._flip(index) for index in sorted(self.flipped))
        lost = sum(flip.reference == flip.label for flip in flips)
        won = sum(flip.candidate == flip.label for flip in flips)
        labels = self.images.labels
        correct = int((self.before == labels).sum())
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
            max_logit_error_by_batch_size={size: self.worst[size] for size in sizes},
            mean_logit_error=self.error_sum / self.logit_count,
            min_cosine=float(self.cosine.min()),
            mean_cosine=float(self.cosine.mean()),
            ece_reference=_ece(self.confidence_before, self.before == labels),
            ece_candidate=_ece(self.confidence_after, self.after == labels),
            max_neighbour_error=probe.neighbour,
            max_position_error=probe.position,
            not_finite=len(self.not_finite),
            logit_std=math.sqrt(max(0.0, self.logit_squares / self.logit_count - mean * mean)),
            classes_sha256=sha256_bytes(self.after.astype("<i4").tobytes()),
        )

    def _flip(self, index: int) -> Flip:
        candidate, size = self.flipped[index]
        return Flip(
            key=self.images.keys[index],
            label=int(self.images.labels[index]),
            reference=int(self.before[index]),
            candidate=candidate,
            reference_margin=float(self.margin[index]),
            batch_size=size,
        )


def _probe_steps(sizes: Sequence[int], main: int) -> list[tuple[int, Order]]:
    """The candidate's passes over the probe images; the pass in order at `main` is part of the one over all images."""
    steps: list[tuple[int, Order]] = [(size, "in order") for size in sizes if size != main]
    # A row that depends on its neighbours at another size differs from the reference there.
    steps += [(size, "shuffled") for size in sorted({main, sizes[-1]}) if size > 1]
    below = [size for size in sizes if 1 < size < main]
    if main > 1:
        steps.append((below[-1] if below else main, "reversed"))
    return steps


class _Probe:
    """The images that are run at every batch size and in other company, gathered while all images pass."""

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

    def run(self, candidate: Session, steps: Sequence[tuple[int, Order]], tally: _Tally, bar: Progress) -> None:
        pixels, expected = np.concatenate(self.pixels), np.concatenate(self.expected)
        whole = np.concatenate(self.found)
        in_order = {tally.batch_size: whole}
        done, count = len(tally.images), len(pixels)
        for size, order in steps:
            # The same shuffle in every run.
            places = _places(order, count, size)
            found = np.empty_like(expected)
            found[places] = infer(candidate, pixels[places], size)
            if order == "in order":
                in_order[size] = found
            moved = float(difference(in_order[size], found).max())
            if order == "shuffled":
                self.neighbour = max(self.neighbour, moved)
            if order == "reversed":
                self.position = max(self.position, moved)
            tally.add_pass(self.rows, size, expected, found)
            self.unstable.update(int(row) for row in np.flatnonzero(found.argmax(axis=1) != whole.argmax(axis=1)))
            done += count
            bar.update(done, f"batch {size}, {order}")


def _places(order: Order, count: int, size: int) -> npt.NDArray[np.int64]:
    """Which image stands at each place: as they are, anywhere, or each batch of `size` from its end."""
    if order == "shuffled":
        return np.random.default_rng(size).permutation(count)
    places = np.arange(count)
    if order == "reversed":
        return np.concatenate([places[start : start + size][::-1] for start in range(0, count, size)])
    return places


def _cosines(a: Float32Array, b: Float32Array) -> Float64Array:
    """The cosine of each pair of rows; −1 where a logit is not finite, 1 where both rows are zero."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        products, squares = np.einsum("nc,nc->n", x, y), np.einsum("nc,nc->n", y, y)
        lengths = np.sqrt(np.einsum("nc,nc->n", x, x) * squares)
    alike = np.where(lengths > 0, products / np.where(lengths > 0, lengths, 1), (x == y).all(axis=1))
    return np.asarray(np.where(np.isfinite(squares), alike.clip(-1, 1), -1.0))


def _confidences(logits: Float32Array) -> Float64Array:
    """The largest probability of each row; 1 where a logit is not finite."""
    with np.errstate(invalid="ignore"):
        shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    confidence = 1 / shifted.sum(axis=1, dtype=np.float64)
    return np.asarray(np.where(np.isfinite(confidence), confidence, 1.0))


def _ece(confidence: Float64Array, correct: npt.NDArray[np.bool_]) -> float:
    """The expected calibration error needs no more of an image than its confidence and whether it was right."""
    two_classes = np.stack([confidence, np.zeros_like(confidence)], axis=1)
    return calibration_error(two_classes, np.where(correct, 0, 1))
