"""Why a candidate differs: common export mistakes are made in the reference, one at a time.

A mistake changes what the reference does: its channels, its normalisation, the filter that resizes, the order of its
classes. If the reference with a mistake agrees with the candidate, the candidate has that mistake.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from vitx.core.errors import InputError
from vitx.core.preprocess import HALF, IMAGENET_MEAN, IMAGENET_STD, Preprocessing, Triple, UInt8Array
from vitx.core.probabilities import Float64Array, log_softmax
from vitx.data.image_set import ImageSet
from vitx.parity.comparison import difference, infer, prepared
from vitx.runtimes.session import Float32Array, Session

Renormalized = Callable[[Triple, Triple], Session]

IMAGES = 64
BATCH = 32
# A mistake explains the difference if it leaves at most this share of it, and no more than is allowed.
EXPLAINED = 0.2
# A constant added to every image's logits, or a factor on them, explains it if it leaves at most this share: fitted
# to the difference, it would leave less than `EXPLAINED` by chance.
SYSTEMATIC = 0.02
CROPS = (0.875, 0.9, 0.95, 1.0)


@dataclass(frozen=True)
class Diagnosis:
    """The mistake that explains the difference, or None.

    error: the largest logit error. remaining_error: the largest one against a reference with the same mistake.
    among: " in 64 of 360 images", the images that were looked at, where they are not all.
    """

    cause: str | None
    error: float
    remaining_error: float
    among: str = ""

    def __str__(self) -> str:
        if self.cause is None:
            return (
                f"no common mistake explains the logit error of {self.error:.3g}{self.among}: --trace names the layer"
            )
        error = f"largest logit error {self.error:.3g}{self.among}"
        return f"{self.cause} ({error}, {self.remaining_error:.3g} once it is undone)"


def diagnose(
    reference: Session,
    candidate: Session,
    images: ImageSet,
    preprocessing: Preprocessing,
    *,
    candidate_preprocessing: Preprocessing | None = None,
    renormalized: Renormalized | None = None,
    batch_size: int = BATCH,
    allowed: float,
) -> Diagnosis:
    """Name the mistake in a candidate that is not the reference's equal, from at most 64 evenly spaced images.

    renormalized: returns the reference with another (mean, std); without it, wrong normalisations are not tried.
    batch_size: one that the candidate takes; it is run alone, too. allowed: the largest logit error that counts as
    agreement.
    """
    sample = images.evenly_spaced(IMAGES)
    pixels = prepared(sample, preprocessing)
    candidate_pixels = pixels if candidate_preprocessing is None else prepared(sample, candidate_preprocessing)
    expected = infer(reference, pixels, BATCH)
    batched, alone, again = (infer(candidate, candidate_pixels, size) for size in (batch_size, 1, 1))
    error = float(difference(expected, batched).max())
    if not np.isfinite(alone).all():
        return Diagnosis("overflow: logits are NaN or infinite", error, error)
    if (moved := float(difference(alone, again).max())) > allowed:
        text = f"not deterministic, as of dropout that is left on: an image run twice alone moves by {moved:.3g}"
        return Diagnosis(text, error, error)
    error_alone = float(difference(expected, alone).max())
    moved = float(difference(batched, alone).max())
    if moved > allowed and moved > EXPLAINED * error:
        text = f"batch-dependent graph: rows move by {moved:.3g} in batches of {batch_size}"
        return Diagnosis(text, error, error_alone)
    # From here on an image's logits alone: what is left of the error is not of the batch.
    mistakes = _ReferenceWithMistakes(reference, sample, preprocessing, pixels, expected, renormalized)
    for tried in (mistakes.all(), (_reordered(expected, alone),)):
        remaining, cause = min((float(difference(logits, alone).max()), cause) for cause, logits in tried)
        if remaining <= min(allowed, EXPLAINED * error_alone):
            return Diagnosis(cause, error, remaining)
    return _systematic(expected, alone, error)


def _reordered(expected: Float32Array, found: Float32Array) -> tuple[str, Float32Array]:
    """Of each class of the candidate the reference's that is nearest, and their logits; all (n, C)."""
    reference, candidate = expected.astype(np.float64), found.astype(np.float64)
    squares = np.square(reference).sum(axis=0)
    # ‖found − expected‖² less ‖found‖², some classes at a time: of ImageNet-21k's all pairs would take 4 GB.
    parts = np.array_split(candidate.T, -(-candidate.shape[1] // 256))
    nearest = np.concatenate([(squares - 2 * part @ reference).argmin(axis=1) for part in parts])
    moved = np.flatnonzero((expected[:, nearest] != expected).any(axis=0))  # not of two that are alike
    pairs = ", ".join(f"{place} has the logits of {nearest[place]}" for place in moved[:3])
    return f"labels are in another order, {len(moved)} of {len(nearest)}: {pairs}", expected[:, nearest]


def _systematic(expected: Float32Array, found: Float32Array, error: float) -> Diagnosis:
    """A bias or a factor that is the same for every image; logits are (n, C)."""
    reference, candidate = expected.astype(np.float64), found.astype(np.float64)
    shift: Float64Array = (candidate - reference).mean(axis=0)
    remaining = float(np.abs(candidate - reference - shift).max())
    if remaining <= SYSTEMATIC * error:
        largest = int(np.abs(shift).argmax())
        text = f"bias of the classifier dropped or changed: class {largest} has {shift[largest]:+.3g} on every image"
        return Diagnosis(text, error, remaining)
    # The least-squares factor.
    factor = float((reference * candidate).sum() / max(float((reference * reference).sum()), 1e-30))
    remaining = float(np.abs(candidate - factor * reference).max())
    if remaining <= SYSTEMATIC * error:
        return Diagnosis(f"logits scaled by {factor:.4g}", error, remaining)
    return Diagnosis(None, error, error)


@dataclass(frozen=True)
class _ReferenceWithMistakes:
    """The reference with one mistake at a time: (the mistake's description, the logits (n, C) it leads to)."""

    reference: Session
    images: ImageSet
    preprocessing: Preprocessing
    pixels: UInt8Array
    expected: Float32Array
    renormalized: Renormalized | None

    def all(self) -> Iterator[tuple[str, Float32Array]]:
        yield from self._channels()
        yield from self._normalizations()
        yield from self._preparations()
        yield from self._labels()
        log_probabilities = log_softmax(self.expected).astype(np.float32)
        yield "log probabilities, not logits", log_probabilities
        yield "probabilities, not logits", np.exp(log_probabilities)

    def _channels(self) -> Iterator[tuple[str, Float32Array]]:
        reversed_channels = np.ascontiguousarray(self.pixels[..., ::-1])
        cause = "BGR: the candidate reads the colour channels in reverse"
        yield cause, infer(self.reference, reversed_channels, BATCH)
        if self.renormalized is not None:
            # Reversed behind the normalisation, in the first layer's weights: each channel keeps its own mean and std.
            p = self.preprocessing
            with self.renormalized((p.mean[2], p.mean[1], p.mean[0]), (p.std[2], p.std[1], p.std[0])) as swapped:
                logits = infer(swapped, reversed_channels, BATCH)
            yield cause, logits
        transposed = np.ascontiguousarray(self.pixels.swapaxes(1, 2))
        yield "rows and columns of the image are swapped", infer(self.reference, transposed, BATCH)

    def _normalizations(self) -> Iterator[tuple[str, Float32Array]]:
        if self.renormalized is None:
            return
        mean, std = self.preprocessing.mean, self.preprocessing.std
        # With a mean of 0 a swap would divide by 0.
        swapped = [("mean and std are swapped", std, mean)] if min(mean) > 0 else []
        for cause, other_mean, other_std in (
            *swapped,
            ("mean and std are left out", (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
            ("mean and std are applied twice", *_twice(mean, std)),
            ("pixels are not divided by 255", _over_255(mean), _over_255(std)),
            ("mean and std are ImageNet's", IMAGENET_MEAN, IMAGENET_STD),
            ("mean and std are 0.5", HALF, HALF),
        ):
            if (other_mean, other_std) != (mean, std):
                with self.renormalized(other_mean, other_std) as session:
                    logits = infer(session, self.pixels, BATCH)
                yield f"normalisation: {cause}", logits

    def _preparations(self) -> Iterator[tuple[str, Float32Array]]:
        p = self.preprocessing
        for name in ("nearest", "bilinear", "bicubic", "lanczos"):
            if name != p.interpolation:
                other = p.model_copy(update={"interpolation": name})
                cause = f"interpolation: images are resized {name}, not {p.interpolation}"
                yield cause, infer(self.reference, prepared(self.images, other), BATCH)
        for crop in CROPS:
            if crop != p.crop_fraction:
                other = p.model_copy(update={"crop_fraction": crop})
                try:
                    pixels = prepared(self.images, other)
                except InputError:  # an image is too thin for the larger size that this crop is cut from
                    continue
                yield f"crop: fraction {crop:g}, not {p.crop_fraction:g}", infer(self.reference, pixels, BATCH)

    def _labels(self) -> Iterator[tuple[str, Float32Array]]:
        classes = self.expected.shape[1]
        for shift in sorted({1, 2, classes - 2, classes - 1}):
            if 0 < shift < classes:
                signed = shift if shift <= classes // 2 else shift - classes
                yield f"labels are off by {signed:+d}", np.roll(self.expected, shift, axis=1)
        yield "labels are in reverse order", self.expected[:, ::-1]


def _twice(mean: Triple, std: Triple) -> tuple[Triple, Triple]:
    """((x − m) / s − m) / s = (x − m − m·s) / s²."""
    (a, b, c), (x, y, z) = mean, std
    return (a + a * x, b + b * y, c + c * z), (x * x, y * y, z * z)


def _over_255(values: Triple) -> Triple:
    return (values[0] / 255, values[1] / 255, values[2] / 255)
