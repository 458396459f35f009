"""Why a candidate differs: the usual suspects are tried on the reference, and the one that explains it is named.

A suspect changes what the reference does (its channels, its normalisation, the filter that resizes, the order of its
classes). If the changed reference agrees with the candidate, the candidate has that fault.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from vitx.core.errors import InputError
from vitx.core.preprocess import Preprocessing, UInt8Array
from vitx.data.image_set import ImageSet
from vitx.parity.compared import Side, Triple
from vitx.parity.comparison import Float64Array, difference, infer, subset
from vitx.runtimes.session import Float32Array, Session

Renormalized = Callable[[Triple, Triple], Session]

IMAGES = 64
BATCH = 32
# A suspect explains the difference if it leaves at most this share of it, and less than is allowed.
EXPLAINED = 0.2
# A constant added to every image's logits, or a factor on all of them, leaves this share of the difference at most.
SYSTEMATIC = 0.02
IMAGENET: tuple[Triple, Triple] = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF: tuple[Triple, Triple] = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
CROPS = (0.875, 0.9, 0.95, 1.0)


@dataclass(frozen=True)
class Diagnosis:
    """The fault that explains the difference, or None; errors are the largest of a logit, before and after."""

    fault: str | None
    error: float
    error_explained: float

    def __str__(self) -> str:
        if self.fault is None:
            return f"no usual suspect explains the logit error of {self.error:.3g}: --trace names the layer"
        return f"{self.fault} (largest logit error {self.error:.3g}, {self.error_explained:.3g} once it is undone)"


def diagnose(
    reference: Session,
    candidate: Session,
    images: ImageSet,
    preprocessing: Preprocessing,
    *,
    candidate_preprocessing: Preprocessing | None = None,
    renormalized: Renormalized | None = None,
    allowed: float,
) -> Diagnosis:
    """Name the fault of a candidate that is not the reference's equal, from at most 64 evenly spaced images.

    `renormalized` gives the reference with another mean and std; without it those suspects are left out.
    `allowed` is the largest logit error that counts as agreement.
    """
    some = subset(images, IMAGES)
    pixels = _prepared(some, preprocessing)
    own = pixels if candidate_preprocessing is None else _prepared(some, candidate_preprocessing)
    expected = infer(reference, pixels, BATCH)
    together, alone = infer(candidate, own, BATCH), infer(candidate, own, 1)
    error = float(difference(expected, together).max())
    if not np.isfinite(alone).all():
        return Diagnosis("overflow: logits are NaN or infinite", error, error)
    depends = float(difference(together, alone).max())
    if depends > allowed and depends > EXPLAINED * error:
        text = f"batch-dependent graph: rows move by {depends:.3g} with who shares their batch"
        return Diagnosis(text, error, float(difference(expected, alone).max()))
    baseline = float(difference(expected, alone).max())
    suspects = _Suspects(reference, some, preprocessing, pixels, expected, renormalized)
    found = min(
        ((float(difference(logits, alone).max()), fault) for fault, logits in suspects.all()),
        default=(baseline, ""),
    )
    if found[0] <= min(allowed, EXPLAINED * baseline):
        return Diagnosis(found[1], error, found[0])
    return _systematic(expected, alone, error)


def diagnose_sides(reference: Side, candidate: Side, images: ImageSet, *, allowed: float) -> Diagnosis:
    """`diagnose` for two sides, each with its own preprocessing."""
    return diagnose(
        reference.session,
        candidate.session,
        images,
        reference.preprocessing,
        candidate_preprocessing=candidate.preprocessing,
        renormalized=reference.renormalized,
        allowed=allowed,
    )


def _prepared(images: ImageSet, preprocessing: Preprocessing) -> UInt8Array:
    return np.concatenate(list(images.batches(preprocessing, BATCH)))


def _systematic(expected: Float32Array, found: Float32Array, error: float) -> Diagnosis:
    """A bias or a factor that is the same for every image."""
    a, b = expected.astype(np.float64), found.astype(np.float64)
    shift: Float64Array = (b - a).mean(axis=0)
    rest = float(np.abs(b - a - shift).max())
    if rest <= SYSTEMATIC * error:
        largest = int(np.abs(shift).argmax())
        text = f"bias of the classifier dropped or changed: class {largest} has {shift[largest]:+.3g} on every image"
        return Diagnosis(text, error, rest)
    factor = float((a * b).sum() / max(float((a * a).sum()), 1e-30))
    rest = float(np.abs(b - factor * a).max())
    if rest <= SYSTEMATIC * error:
        return Diagnosis(f"logits scaled by {factor:.4g}", error, rest)
    return Diagnosis(None, error, error)


class _Suspects:
    """The reference with one thing changed at a time: (what is wrong with a candidate that agrees, its logits)."""

    def __init__(
        self,
        reference: Session,
        images: ImageSet,
        preprocessing: Preprocessing,
        pixels: UInt8Array,
        expected: Float32Array,
        renormalized: Renormalized | None,
    ) -> None:
        self.reference, self.images, self.preprocessing = reference, images, preprocessing
        self.pixels, self.expected, self.renormalized = pixels, expected, renormalized

    def all(self) -> Iterator[tuple[str, Float32Array]]:
        yield from self._channels()
        yield from self._normalizations()
        yield from self._preparations()
        yield from self._labels()

    def _channels(self) -> Iterator[tuple[str, Float32Array]]:
        reversed_channels = np.ascontiguousarray(self.pixels[..., ::-1])
        fault = "BGR: the candidate reads the colour channels in reverse"
        yield fault, infer(self.reference, reversed_channels, BATCH)
        if self.renormalized is not None:  # reversed behind the normalisation, in the first layer's weights
            p = self.preprocessing
            swapped = self.renormalized((p.mean[2], p.mean[1], p.mean[0]), (p.std[2], p.std[1], p.std[0]))
            yield fault, infer(swapped, reversed_channels, BATCH)
        turned = np.ascontiguousarray(self.pixels.swapaxes(1, 2))
        yield "rows and columns of the image are swapped", infer(self.reference, turned, BATCH)

    def _normalizations(self) -> Iterator[tuple[str, Float32Array]]:
        if self.renormalized is None:
            return
        mean, std = self.preprocessing.mean, self.preprocessing.std
        # A scale of zero cannot be: such a mean cannot have been swapped with its std.
        swapped = [("mean and std are swapped", std, mean)] if min(mean) > 0 else []
        for fault, other_mean, other_std in (
            *swapped,
            ("mean and std are left out", (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
            ("pixels are not divided by 255", _over_255(mean), _over_255(std)),
            ("mean and std are ImageNet's", *IMAGENET),
            ("mean and std are 0.5", *HALF),
        ):
            if (other_mean, other_std) != (mean, std):
                session = self.renormalized(other_mean, other_std)
                yield f"normalisation: {fault}", infer(session, self.pixels, BATCH)

    def _preparations(self) -> Iterator[tuple[str, Float32Array]]:
        p = self.preprocessing
        for name in ("nearest", "bilinear", "bicubic", "lanczos"):
            if name != p.interpolation:
                other = p.model_copy(update={"interpolation": name})
                fault = f"interpolation: images are resized {name}, not {p.interpolation}"
                yield fault, infer(self.reference, _prepared(self.images, other), BATCH)
        for crop in CROPS:
            if crop != p.crop_fraction:
                other = p.model_copy(update={"crop_fraction": crop})
                try:
                    pixels = _prepared(self.images, other)
                except InputError:  # too thin to be resized that far
                    continue
                yield f"crop: fraction {crop:g}, not {p.crop_fraction:g}", infer(self.reference, pixels, BATCH)

    def _labels(self) -> Iterator[tuple[str, Float32Array]]:
        classes = self.expected.shape[1]
        for step in sorted({1, 2, classes - 2, classes - 1} - {0, classes}):
            if 0 < step < classes:
                by = step if step <= classes // 2 else step - classes
                yield f"labels are off by {by:+d}", np.roll(self.expected, step, axis=1)
        yield "labels are in reverse order", self.expected[:, ::-1]


def _over_255(values: Triple) -> Triple:
    return (values[0] / 255, values[1] / 255, values[2] / 255)
