"""Calibration: the distribution of each tensor on real images, and the range that its 8-bit codes are given."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import onnx

from vitx.core.console import Progress, counted
from vitx.core.errors import CheckFailed, InputError
from vitx.core.preprocess import Preprocessing, UInt8Array
from vitx.data.image_set import ImageSet, evenly_spaced
from vitx.export.graph.execution import BATCH, run_with_outputs

Method = Literal["max", "percentile", "entropy"]
METHODS: tuple[Method, ...] = get_args(Method)

# Ranges come from at least 256 images. Up to half of all images, and at least 64, are held out to judge them.
MIN_CALIBRATION = 256
MIN_IMAGES = 320
# What `sample_images` keeps by default: as many images as 512 of 224 px (77 MB) have pixels, but no more than 2,048.
FEWEST, MOST, PIXELS = 512, 2048, 512 * 224 * 224
PERCENTILE = 0.9999
# Of the histogram of |x|, and int8's codes on one side of zero.
BINS, LEVELS = 2048, 128
# Of a tensor with more than LARGE values every seventh goes into the histogram. Seven is coprime to the usual widths,
# so every channel is sampled.
LARGE, STRIDE = 1 << 16, 7
# As the least scale is (qdq.py): of a smaller limit the bins for each unit are more than a float32 can hold.
LEAST_LIMIT = 1e-30


def sample_images(
    images: ImageSet, preprocessing: Preprocessing, limit: int | None = None, *, least: int = MIN_IMAGES
) -> UInt8Array:
    """Evenly spaced images of a set, uint8 (n, S, S, 3), n ≤ `limit`; the first images of a folder are of one class.

    limit: by default 512 at 224 px, more for smaller images, up to 2,048. least: what the precision takes
    (`least_images`); raises InputError when the set has fewer.
    """
    require_images(len(images), least)
    most = limit or min(MOST, max(FEWEST, PIXELS // preprocessing.image_size**2))
    chosen = evenly_spaced(len(images), most)
    return np.stack([preprocessing.from_bytes(images.read(int(index))) for index in chosen])


def split_images(images: UInt8Array) -> tuple[UInt8Array, UInt8Array]:
    """(calibration images, held-out images): half each, evenly spaced, but at least 256 for calibration.

    Raises InputError for fewer than MIN_IMAGES.
    """
    require_images(len(images))
    held_out = np.zeros(len(images), dtype=bool)
    held_out[evenly_spaced(len(images), min(len(images) // 2, len(images) - MIN_CALIBRATION))] = True
    return images[~held_out], images[held_out]


def require_images(count: int, least: int = MIN_IMAGES) -> None:
    """Raise InputError, saying how many images are needed, when `count` is below `least`."""
    if count >= least:
        return
    if least < MIN_IMAGES:
        raise InputError(
            f"{counted(count, 'image')} to judge a lower precision on: give at least {least} real ones, and "
            f"{MIN_IMAGES} where ranges are calibrated (int8, fp8)"
        )
    raise InputError(
        f"{counted(count, 'image')} to calibrate on: ranges take at least {MIN_CALIBRATION} real images, and others "
        f"are held out to judge them, so give at least {MIN_IMAGES}"
    )


@dataclass
class Activations:
    """The distribution of |x| of one tensor: maximum, histogram over (0, `limit`], number of values not finite.

    `largest` is of |x| and exact; `smallest` is the least x or 0. When a value above `limit` comes, the limit doubles
    and pairs of bins merge, so counts stay exact: no bin is ever split.
    """

    limit: float = 0.0
    largest: float = 0.0
    smallest: float = 0.0
    not_finite: int = 0
    counts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(BINS, np.int64))
    # Thresholds since the last values: the entropy of a tensor takes 15 ms, and every candidate of a search asks for
    # that of all tensors.
    _known: dict[Method, float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def add(self, values: npt.NDArray[Any], *, histogram: bool = True) -> None:
        self._known.clear()
        flat = values.reshape(-1).astype(np.float32, copy=False)
        low, high = float(flat.min(initial=0.0)), float(flat.max(initial=0.0))
        if not (np.isfinite(low) and np.isfinite(high)):
            finite = np.isfinite(flat)
            self.not_finite += int(flat.size - finite.sum())
            flat = flat[finite]
            low, high = float(flat.min(initial=0.0)), float(flat.max(initial=0.0))
        self.smallest = min(self.smallest, low)
        self.largest = max(self.largest, -low, high)
        if not histogram:
            return
        self._widen()
        if self.limit > 0:
            sample = np.abs(flat[:: STRIDE if flat.size > LARGE else 1])
            bins = np.minimum((sample * (BINS / self.limit)).astype(np.int32), BINS - 1)
            self.counts += np.bincount(bins, minlength=BINS)

    def _widen(self) -> None:
        if self.limit == 0.0 and self.largest > 0.0:
            self.limit = max(self.largest, LEAST_LIMIT)
        while self.limit < self.largest:
            self.limit *= 2
            self.counts = np.concatenate([self.counts.reshape(-1, 2).sum(axis=1), np.zeros(BINS // 2, np.int64)])

    def threshold(self, method: Method) -> float:
        """The |x| that is given the largest code; larger values saturate."""
        if method not in self._known:
            self._known[method] = self._threshold(method)
        return self._known[method]

    def _threshold(self, method: Method) -> float:
        if self.largest == 0.0:
            return 1.0  # any scale codes a tensor of zeros exactly
        if method == "max":
            return self.largest
        width = self.limit / BINS
        bins = _percentile_bins(self.counts) if method == "percentile" else _entropy_bins(self.counts, LEVELS)
        return min(self.largest, bins * width)


def _percentile_bins(counts: npt.NDArray[np.int64]) -> int:
    cumulative = np.cumsum(counts) / counts.sum()
    return int(np.searchsorted(cumulative, PERCENTILE)) + 1


def _entropy_bins(counts: npt.NDArray[np.int64], levels: int) -> int:
    """How many bins to keep so that KL(distribution ‖ its quantised form) is least.

    After Migacz, "8-bit Inference with TensorRT" (GTC 2017): fewer bins clip more, more bins make each code coarser.
    The first bin (exact zeros, as after a ReLU, and values that round to zero) takes its neighbour's count: zeros are
    coded exactly at any scale, and so large a count would hide every other difference.
    """
    smoothed = counts.astype(np.float64)
    smoothed[0] = smoothed[1]
    last = int(np.flatnonzero(smoothed)[-1]) + 1 if smoothed.any() else BINS
    candidates = range(levels, max(levels, last) + 1, 8)
    divergences = [_divergence(smoothed, keep, levels) for keep in candidates]
    return candidates[int(np.argmin(divergences))]


def _divergence(counts: npt.NDArray[np.float64], keep: int, levels: int) -> float:
    """KL(P ‖ Q) of the first `keep` bins: P with the clipped mass in its last bin, Q as `levels` codes give it back."""
    reference = counts[:keep].copy()
    reference[-1] += counts[keep:].sum()
    # Bins that share a code cannot be told apart any more: the code's mass is spread evenly over its nonempty bins.
    code = np.minimum(np.arange(keep) * levels // keep, levels - 1)
    present = counts[:keep] > 0
    mass = np.bincount(code, weights=counts[:keep], minlength=levels)
    members = np.bincount(code, weights=present, minlength=levels)
    coded = np.where(present, (mass / np.maximum(members, 1))[code], 0.0)
    if coded.sum() == 0 or reference.sum() == 0:
        return float("inf")
    p, q = reference / reference.sum(), coded / coded.sum()
    both = (p > 0) & (q > 0)
    lost = float(p[(p > 0) & (q == 0)].sum())
    # Where q is 0 the divergence is infinite; with q = p/10,000 there instead, ranges can still be compared.
    return float((p[both] * np.log(p[both] / q[both])).sum()) + lost * float(np.log(1e4))


def observe(
    graph: onnx.ModelProto,
    tensors: Sequence[str],
    images: UInt8Array,
    *,
    histograms: bool = True,
    bar: Progress | None = None,
) -> dict[str, Activations]:
    """The distribution of every named tensor while `graph` runs over `images`; memory is that of one batch.

    Without `histograms` only the extremes and the number of values that are not finite. bar: told of images.
    """
    found = {name: Activations() for name in tensors}
    # Tensors are independent, and numpy computes outside of the interpreter's lock.
    with ThreadPoolExecutor() as pool:
        for done, values in enumerate(run_with_outputs(graph, tensors, images), start=1):
            list(pool.map(lambda name: found[name].add(values[name], histogram=histograms), found))  # noqa: B023
            if bar is not None:
                bar.update(min(done * BATCH, len(images)))
    return found


def require_finite(activations: Mapping[str, Activations], producers: Mapping[str, onnx.NodeProto]) -> None:
    """Raise CheckFailed, naming it, for the first tensor that is not even finite in float32."""
    for name, activation in activations.items():
        if activation.not_finite:
            maker = producers[name].name if name in producers else "the input"
            raise CheckFailed(
                f"'{name}', made by {maker}, holds {activation.not_finite} values that are "
                "not finite in float32 already: no lower precision can hold them"
            )
