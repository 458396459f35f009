"""Parity: is the candidate the same classifier as the reference, on real images? Semantics: docs/parity.md.

`compare` measures, `judge` holds the numbers against the limits, `certify` does both and returns the certificate.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vitx.core.bundle import CERTIFICATE, SHARE_OF_STD, Bundle, Certificate, Flip, Precision, timestamp
from vitx.core.console import Progress, log, progress
from vitx.core.errors import InputError
from vitx.core.files import write_json
from vitx.core.images import ImageSet, open_images
from vitx.core.preprocess import Preprocessing, UInt8Array
from vitx.core.run import RunFolder
from vitx.serve.runtimes import Float32Array, Session, load_session
from vitx.serve.statistics import clopper_pearson_upper, images_needed, mcnemar_exact

BATCH_SIZES = (1, 2, 7, 32)
MAX_FLIP_RATE = 0.01
MAX_LOGIT_ERROR = 1e-4
REFERENCE_BATCH = 32
# Images decoded at once: the memory of a comparison, whatever the size of the split.
BLOCK_IMAGES = 256
# What a logit that is NaN or infinite counts as: JSON has neither.
WORST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Comparison:
    """What was measured on the images, before any limit.

    An image is flipped when the candidate put it into another class at any batch size or among any neighbours; it
    counts once, at the first pass that moved it, and the candidate's accuracy counts that other class.
    """

    images: int
    batch_sizes: tuple[int, ...]
    correct_reference: int
    correct_candidate: int
    only_reference_correct: int
    only_candidate_correct: int
    flips: tuple[Flip, ...]
    max_logit_error_by_batch_size: dict[int, float]
    mean_logit_error: float
    max_neighbour_error: float
    not_finite: int
    logit_std: float

    @property
    def max_logit_error(self) -> float:
        return max(self.max_logit_error_by_batch_size.values())

    @property
    def flip_rate_bound(self) -> float:
        """One-sided 95 % Clopper–Pearson upper bound on the share of images that flip."""
        return clopper_pearson_upper(len(self.flips), self.images)

    @property
    def mcnemar_p(self) -> float:
        return mcnemar_exact(self.only_reference_correct, self.only_candidate_correct)


def certify(
    reference: Session,
    candidate: Session,
    images: ImageSet,
    preprocessing: Preprocessing,
    *,
    candidate_preprocessing: Preprocessing | None = None,
    reference_name: str = "reference",
    reference_sha256: str = "",
    candidate_name: str = "candidate",
    subject: Mapping[str, str] | None = None,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    max_flip_rate: float = MAX_FLIP_RATE,
    max_logit_error: float | None = None,
    precision: Precision = "fp32",
    quiet: bool = False,
) -> Certificate:
    """Compare two sessions over every image of `images` and return the certificate, whether it says pass or fail.

    It passes when the 95 % upper bound on the flip rate is at most `max_flip_rate`, no logit differs by more than
    `max_logit_error` at any of `batch_sizes`, and no row's logits move by more than that with other neighbours. The
    default of `max_logit_error` is `allowed_logit_error` of `precision`.
    Each session gets the images through its own preprocessing. `subject` is what the certificate is bound to
    (`Bundle.subject()`). Raises InputError when the images are too few for `max_flip_rate`, naming how many it takes.
    """
    check_image_count(len(images), max_flip_rate)
    comparison = compare(
        reference,
        candidate,
        images,
        preprocessing,
        candidate_preprocessing=candidate_preprocessing,
        batch_sizes=batch_sizes,
        quiet=quiet,
    )
    if max_logit_error is None:
        max_logit_error = allowed_logit_error(precision, comparison.logit_std)
    failures, findings = judge(comparison, max_flip_rate=max_flip_rate, max_logit_error=max_logit_error)
    return Certificate(
        verdict="fail" if failures else "pass",
        reasons=failures or findings,
        subject=dict(subject or {}),
        reference=reference_name,
        reference_sha256=reference_sha256,
        candidate=candidate_name,
        runtime=candidate.describe(),
        data=images.name,
        data_sha256=images.digest(),
        images=comparison.images,
        batch_sizes=comparison.batch_sizes,
        accuracy_reference=comparison.correct_reference / comparison.images,
        accuracy_candidate=comparison.correct_candidate / comparison.images,
        flips=comparison.flips,
        flip_rate_bound=comparison.flip_rate_bound,
        max_flip_rate=max_flip_rate,
        mcnemar_p=comparison.mcnemar_p,
        max_logit_error=comparison.max_logit_error,
        mean_logit_error=comparison.mean_logit_error,
        max_logit_error_by_batch_size=comparison.max_logit_error_by_batch_size,
        max_logit_error_allowed=max_logit_error,
        max_neighbour_error=comparison.max_neighbour_error,
        created=timestamp(),
    )


def certify_bundle(
    run: RunFolder,
    bundle: Bundle,
    *,
    data: str | None = None,
    max_flip_rate: float = MAX_FLIP_RATE,
    which: str = "best",
    device: str = "auto",
    skip_bad: bool = False,
    quiet: bool = False,
) -> Certificate:
    """Certify a bundle against a run's checkpoint and write `certificate.json` into the bundle, pass or fail.

    `data` defaults to the run's own; its evaluation split is used whole. Raises InputError when the data's classes are
    not the bundle's labels or its images are too few.
    """
    from vitx.serve.runtimes.torch import load_run_session, weights_digest

    info, manifest = run.info, bundle.manifest
    images = open_images(data or info.data, "val", skip_bad=skip_bad)
    check_labels(images, manifest.labels)
    check_image_count(len(images), max_flip_rate)
    digest = weights_digest(run, which)
    if digest != manifest.provenance.checkpoint_sha256:
        log(f"parity: '{bundle.path}' was exported from other weights than this run's '{which}'", quiet=quiet)
    return certify_against(
        load_run_session(run, which, device=device),
        info.preprocessing,
        bundle,
        images,
        reference_name=f"{info.name}, checkpoint {which}",
        reference_sha256=digest,
        max_flip_rate=max_flip_rate,
        device=device,
        quiet=quiet,
    )


def certify_against(
    reference: Session,
    preprocessing: Preprocessing,
    bundle: Bundle,
    images: ImageSet,
    *,
    reference_name: str,
    reference_sha256: str,
    max_flip_rate: float = MAX_FLIP_RATE,
    device: str = "auto",
    quiet: bool = False,
) -> Certificate:
    """Certify a bundle against any reference session and write `certificate.json` into it, pass or fail."""
    check_labels(images, bundle.manifest.labels)
    certificate = certify(
        reference,
        load_session(bundle, device=device),
        images,
        preprocessing,
        candidate_preprocessing=bundle.manifest.preprocessing,
        reference_name=reference_name,
        reference_sha256=reference_sha256,
        candidate_name=bundle.manifest.name,
        subject=bundle.subject(),
        max_flip_rate=max_flip_rate,
        precision=bundle.manifest.precision,
        quiet=quiet,
    )
    write_json(bundle.path / CERTIFICATE, certificate)
    return certificate


def allowed_logit_error(precision: Precision, logit_std: float) -> float:
    """The largest logit error a precision may have: 1e-4 in float32, else a share of the reference logits' spread.

    The shares are set by the format, not by what was observed: a few units in the last place of a half (2⁻¹¹) and of a
    bfloat16 (2⁻⁸) per layer, and for 8 bits half a standard deviation, beyond which a classifier ranks other classes.
    """
    return MAX_LOGIT_ERROR if precision == "fp32" else SHARE_OF_STD[precision] * logit_std


def check_image_count(count: int, max_flip_rate: float) -> None:
    """Raise InputError when even no flip at all among `count` images would not prove `max_flip_rate`."""
    if not 0 < max_flip_rate < 1:
        raise InputError(
            f"max flip rate {max_flip_rate:g}: expected a rate above 0 and below 1, such as {MAX_FLIP_RATE}"
        )
    if count == 0:
        raise InputError("no images: parity needs real images to compare on")
    provable = clopper_pearson_upper(0, count)
    if provable > max_flip_rate:
        raise InputError(
            f"{count} images cannot prove a flip rate of at most {max_flip_rate:g}: it takes "
            f"{images_needed(max_flip_rate)} without a flip; give more with --data, or ask for "
            f"--max-flip-rate {math.ceil(provable * 1000) / 1000:g}"
        )


def check_labels(images: ImageSet, labels: Sequence[str]) -> None:
    """Raise InputError unless the image set has exactly the bundle's classes in its order."""
    if tuple(images.class_names) == tuple(labels):
        return
    if len(images.class_names) != len(labels):
        raise InputError(f"'{images.name}' has {len(images.class_names)} classes, the bundle has {len(labels)}")
    index = next(i for i, name in enumerate(images.class_names) if name != labels[i])
    raise InputError(
        f"class {index} is '{images.class_names[index]}' in '{images.name}' and '{labels[index]}' in the bundle: "
        "give the data the model was trained on"
    )


def compare(
    reference: Session,
    candidate: Session,
    images: ImageSet,
    preprocessing: Preprocessing,
    *,
    candidate_preprocessing: Preprocessing | None = None,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    quiet: bool = False,
) -> Comparison:
    """Run both sessions over all images, block by block, so that memory does not grow with the split.

    The reference runs once; the candidate at every batch size in the images' order, and at every batch size above one
    in a shuffled order too, which changes each row's neighbours and position.
    """
    sizes = tuple(sorted(set(batch_sizes)))
    if not sizes or sizes[0] < 1:
        raise InputError(f"batch sizes {tuple(batch_sizes)}: expected one or more, each at least 1")
    tally = _Tally(images, sizes)
    orders = len(sizes) + sum(size > 1 for size in sizes)
    with progress("parity", len(images) * orders, quiet=quiet) as bar:
        for block in _blocks(images, preprocessing, candidate_preprocessing or preprocessing, _block_size(sizes)):
            _compare_block(reference, candidate, block, tally, bar)
    return tally.result()


def judge(
    comparison: Comparison, *, max_flip_rate: float, max_logit_error: float
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Hold the measurements against the limits; return (what failed, what holds) as sentences with the numbers."""
    flips, n = len(comparison.flips), comparison.images
    largest = max((flip.reference_margin for flip in comparison.flips), default=0.0)
    margin = f", the clearest with a reference margin of {largest:.3g}" if flips else ""
    worst_size = max(
        comparison.max_logit_error_by_batch_size, key=lambda size: comparison.max_logit_error_by_batch_size[size]
    )
    checks = (
        (
            comparison.flip_rate_bound <= max_flip_rate,
            f"{flips} of {n} images flipped{margin}: flip rate at most {comparison.flip_rate_bound:.6f} "
            f"(95 %), allowed {max_flip_rate:g}",
        ),
        (
            comparison.max_logit_error <= max_logit_error,
            f"largest logit error {comparison.max_logit_error:.3g}, at batch size {worst_size}, "
            f"allowed {max_logit_error:g}",
        ),
        (
            comparison.max_neighbour_error <= max_logit_error,
            f"a row's logits move by up to {comparison.max_neighbour_error:.3g} with other neighbours in its batch, "
            f"allowed {max_logit_error:g}",
        ),
        (
            comparison.not_finite == 0,
            f"{comparison.not_finite} of {n} images have logits that are not finite, allowed 0",
        ),
    )
    return (
        tuple(text for holds, text in checks if not holds),
        tuple(text for holds, text in checks if holds),
    )


@dataclass(frozen=True)
class _Block:
    """Consecutive images of the split, prepared for either side; one array when both prepare alike."""

    start: int
    for_reference: UInt8Array
    for_candidate: UInt8Array

    def __len__(self) -> int:
        return len(self.for_reference)


def _block_size(sizes: Sequence[int]) -> int:
    """A multiple of every batch size where one is small enough, so that few batches are cut short."""
    multiple = math.lcm(*sizes)
    return multiple * max(1, BLOCK_IMAGES // multiple) if multiple <= 2 * BLOCK_IMAGES else max(BLOCK_IMAGES, sizes[-1])


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


def _compare_block(reference: Session, candidate: Session, block: _Block, tally: "_Tally", bar: Progress) -> None:
    expected = _infer(reference, block.for_reference, REFERENCE_BATCH)
    if not np.isfinite(expected).all():
        row = int(np.flatnonzero(~np.isfinite(expected).all(axis=1))[0])
        raise InputError(f"the reference itself gives logits that are not finite, first for {tally.key(block, row)}")
    tally.add_reference(block, expected)
    # The same shuffle in every run, another one for every block.
    order = np.random.default_rng(block.start).permutation(len(block))
    shuffled = block.for_candidate[order]
    for size in tally.sizes:
        found = _infer(candidate, block.for_candidate, size)
        tally.add(block, size, expected, found)
        bar.update(tally.advance(block), f"batch {size}")
        if size > 1:
            among_others = np.empty_like(found)
            among_others[order] = _infer(candidate, shuffled, size)
            tally.add_neighbours(block, size, expected, found, among_others)
            bar.update(tally.advance(block), f"batch {size}, other neighbours")


def _infer(session: Session, images: UInt8Array, batch_size: int) -> Float32Array:
    """Logits float32 (N, C), computed `batch_size` rows at a time."""
    return np.concatenate([session.infer(images[i : i + batch_size]) for i in range(0, len(images), batch_size)])


def _difference(a: Float32Array, b: Float32Array) -> npt.NDArray[np.float64]:
    """|a − b| in float64, `WORST` where either is not finite."""
    finite = np.isfinite(a) & np.isfinite(b)
    with np.errstate(invalid="ignore"):
        return np.where(finite, np.abs(a.astype(np.float64) - b.astype(np.float64)), WORST)


@dataclass
class _Tally:
    """Counts and maxima over the blocks seen so far."""

    images: ImageSet
    sizes: tuple[int, ...]
    steps: int = 0
    correct_reference: int = 0
    flips: dict[int, Flip] = field(default_factory=dict)
    logit_sum: float = 0.0
    logit_squares: float = 0.0
    logit_count: int = 0
    error_sum: float = 0.0
    error_count: int = 0
    worst: dict[int, float] = field(default_factory=dict)
    neighbour: float = 0.0
    not_finite: set[int] = field(default_factory=set)

    def key(self, block: _Block, row: int) -> str:
        return self.images.keys[block.start + row]

    def advance(self, block: _Block) -> int:
        self.steps += len(block)
        return self.steps

    def add_reference(self, block: _Block, expected: Float32Array) -> None:
        labels = self.images.labels[block.start : block.start + len(block)]
        self.correct_reference += int((expected.argmax(axis=1) == labels).sum())
        self.logit_sum += float(expected.sum(dtype=np.float64))
        self.logit_squares += float(np.square(expected, dtype=np.float64).sum())
        self.logit_count += expected.size

    def add(self, block: _Block, size: int, expected: Float32Array, found: Float32Array) -> None:
        if found.shape != expected.shape:
            raise InputError(
                f"the candidate returns logits {found.shape} where the reference returns {expected.shape}: "
                "they are not the same classifier"
            )
        error = _difference(expected, found)
        self.worst[size] = max(self.worst.get(size, 0.0), float(error.max()))
        self.error_sum += float(error.sum())
        self.error_count += error.size
        self._add_flips(block, size, expected, found)

    def add_neighbours(
        self, block: _Block, size: int, expected: Float32Array, found: Float32Array, among_others: Float32Array
    ) -> None:
        self.neighbour = max(self.neighbour, float(_difference(found, among_others).max()))
        self._add_flips(block, size, expected, among_others)

    def _add_flips(self, block: _Block, size: int, expected: Float32Array, found: Float32Array) -> None:
        before, after = expected.argmax(axis=1), found.argmax(axis=1)
        for row in np.flatnonzero(before != after):
            index = block.start + int(row)
            self.flips.setdefault(
                index,
                Flip(
                    key=self.images.keys[index],
                    label=int(self.images.labels[index]),
                    reference=int(before[row]),
                    candidate=int(after[row]),
                    reference_margin=_margin(expected[row]),
                    batch_size=size,
                ),
            )
        self.not_finite.update(block.start + int(row) for row in np.flatnonzero(~np.isfinite(found).all(axis=1)))

    def result(self) -> Comparison:
        flips = tuple(self.flips[index] for index in sorted(self.flips))
        lost = sum(flip.reference == flip.label for flip in flips)
        won = sum(flip.candidate == flip.label for flip in flips)
        return Comparison(
            images=len(self.images),
            batch_sizes=self.sizes,
            correct_reference=self.correct_reference,
            correct_candidate=self.correct_reference - lost + won,
            only_reference_correct=lost,
            only_candidate_correct=won,
            flips=flips,
            max_logit_error_by_batch_size=self.worst,
            mean_logit_error=self.error_sum / self.error_count,
            max_neighbour_error=self.neighbour,
            not_finite=len(self.not_finite),
            logit_std=self._logit_std(),
        )

    def _logit_std(self) -> float:
        mean = self.logit_sum / self.logit_count
        return math.sqrt(max(0.0, self.logit_squares / self.logit_count - mean * mean))


def _margin(logits: Float32Array) -> float:
    """The largest logit less the next one; 0 where there is only one class."""
    if len(logits) < 2:
        return 0.0
    second, first = np.partition(logits, -2)[-2:]
    return float(first) - float(second)
