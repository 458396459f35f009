"""What a graph's tensors hold on real images, gathered in one pass, and the ranges that 8 bits are given from it."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime

from vitx.core.errors import CheckFailed, InputError
from vitx.core.preprocess import Preprocessing, UInt8Array
from vitx.data.image_set import ImageSet, evenly_spaced

Float32Array = npt.NDArray[np.float32]
Method = Literal["max", "percentile", "entropy"]
METHODS: tuple[Method, ...] = ("max", "percentile", "entropy")

# Ranges come from at least so many images; up to half of all are held out and judge them.
MIN_CALIBRATION = 256
MIN_IMAGES = 320
# What `calibration_images` keeps: as many images as 512 of 224 px (77 MB) have pixels, but no more than 2,048.
FEWEST, MOST, PIXELS = 512, 2048, 512 * 224 * 224
PERCENTILE = 0.9999
BINS = 2048
# Images per run while activations are read: a DeiT-S at 224 px then hands out some 200 MB.
BATCH = 4
# Of a large tensor every seventh value goes into the histogram; seven is coprime to the widths, so all channels do.
LARGE, STRIDE = 1 << 16, 7


def calibration_images(images: ImageSet, preprocessing: Preprocessing, limit: int | None = None) -> UInt8Array:
    """Evenly spaced images of a set, uint8 (n, S, S, 3), n ≤ `limit`: a folder's head is of one class.

    limit: default 512 at 224 px, 2,048 where the images are so small. Raises InputError when the set has fewer than
    MIN_IMAGES.
    """
    require_images(len(images))
    most = limit or min(MOST, max(FEWEST, PIXELS // preprocessing.image_size**2))
    chosen = evenly_spaced(len(images), most)
    return np.stack([preprocessing.from_bytes(images.read(int(index))) for index in chosen])


def split_images(images: UInt8Array) -> tuple[UInt8Array, UInt8Array]:
    """(for calibration, held out): half of them, evenly spaced, but at least 256 for calibration.

    Raises InputError when there are too few.
    """
    require_images(len(images))
    held_out = np.zeros(len(images), dtype=bool)
    held_out[evenly_spaced(len(images), min(len(images) // 2, len(images) - MIN_CALIBRATION))] = True
    return images[~held_out], images[held_out]


def require_images(count: int) -> None:
    """Raise InputError naming how many images were given and how many it takes."""
    if count < MIN_IMAGES:
        raise InputError(
            f"{count} images to calibrate on: ranges take at least {MIN_CALIBRATION} real images, and others are held "
            f"out to judge them, so give at least {MIN_IMAGES}"
        )


@dataclass
class Activations:
    """|x| of one tensor: its maximum over every value, a histogram over (0, `limit`], and how many were not finite.

    `limit` doubles when a larger value comes; pairs of bins merge then, so no count is ever spread by guessing.
    """

    limit: float = 0.0
    largest: float = 0.0
    smallest: float = 0.0
    not_finite: int = 0
    counts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(BINS, np.int64))

    def add(self, values: npt.NDArray[Any]) -> None:
        flat = values.reshape(-1).astype(np.float32, copy=False)
        low, high = float(flat.min(initial=0.0)), float(flat.max(initial=0.0))
        if not (np.isfinite(low) and np.isfinite(high)):
            finite = np.isfinite(flat)
            self.not_finite += int(flat.size - finite.sum())
            flat = flat[finite]
            low, high = float(flat.min(initial=0.0)), float(flat.max(initial=0.0))
        self.smallest = min(self.smallest, low)
        self.largest = max(self.largest, -low, high)
        self._widen()
        if self.limit > 0:
            sample = np.abs(flat[:: STRIDE if flat.size > LARGE else 1])
            bins = np.minimum((sample * (BINS / self.limit)).astype(np.int32), BINS - 1)
            self.counts += np.bincount(bins, minlength=BINS)

    def _widen(self) -> None:
        if self.limit == 0.0:
            self.limit = self.largest
        while self.limit < self.largest:
            self.limit *= 2
            self.counts = np.concatenate([self.counts.reshape(-1, 2).sum(axis=1), np.zeros(BINS // 2, np.int64)])

    def threshold(self, method: Method, levels: int = 128) -> float:
        """The |x| that becomes the largest code; `levels` codes lie on one side of zero."""
        if self.largest == 0.0:
            return 1.0
        if method == "max":
            return self.largest
        width = self.limit / BINS
        bins = _percentile_bins(self.counts) if method == "percentile" else _entropy_bins(self.counts, levels)
        return min(self.largest, bins * width)


def _percentile_bins(counts: npt.NDArray[np.int64]) -> int:
    cumulative = np.cumsum(counts) / counts.sum()
    return int(np.searchsorted(cumulative, PERCENTILE)) + 1


def _entropy_bins(counts: npt.NDArray[np.int64], levels: int) -> int:
    """How many bins to keep so that KL(what is there ‖ what the codes can say of it) is least.

    After Migacz, "8-bit Inference with TensorRT" (GTC 2017). The first bin, exact zeros and what rounds to them, takes
    its neighbour's count: a spike there would decide alone.
    """
    smoothed = counts.astype(np.float64)
    smoothed[0] = smoothed[1]
    last = int(np.flatnonzero(smoothed)[-1]) + 1 if smoothed.any() else BINS
    candidates = range(levels, max(levels, last) + 1, 8)
    divergences = [_divergence(smoothed, keep, levels) for keep in candidates]
    return candidates[int(np.argmin(divergences))]


def _divergence(counts: npt.NDArray[np.float64], keep: int, levels: int) -> float:
    reference = counts[:keep].copy()
    reference[-1] += counts[keep:].sum()
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
    # Mass that the codes cannot name at all counts as if it had one code in ten thousand.
    return float((p[both] * np.log(p[both] / q[both])).sum()) + lost * float(np.log(1e4))


def observe(graph: onnx.ModelProto, tensors: Sequence[str], images: UInt8Array) -> dict[str, Activations]:
    """Run `graph` over `images` and gather every named tensor; memory is that of one batch."""
    found = {name: Activations() for name in tensors}
    for values in run_with_outputs(graph, tensors, images):
        for name, value in values.items():
            found[name].add(value)
    return found


def require_finite(activations: Mapping[str, Activations], producers: Mapping[str, str]) -> None:
    """Raise CheckFailed naming the first tensor that is not finite in float32 already."""
    for name, activation in activations.items():
        if activation.not_finite:
            raise CheckFailed(
                f"'{name}', made by {producers.get(name, 'the input')}, holds {activation.not_finite} values that are "
                "not finite in float32 already: no lower precision can hold them"
            )


def run_with_outputs(
    graph: onnx.ModelProto, tensors: Sequence[str], images: UInt8Array, batch: int = BATCH
) -> Iterator[dict[str, npt.NDArray[Any]]]:
    """Yield the named tensors of each batch."""
    watched = onnx.ModelProto()
    watched.CopyFrom(graph)
    present = {value.name for value in watched.graph.output}
    watched.graph.output.extend(onnx.ValueInfoProto(name=name) for name in tensors if name not in present)
    session = open_session(watched)
    (source,) = session.get_inputs()
    for chunk in batches(images, batch):
        yield dict(zip(tensors, session.run(list(tensors), {source.name: chunk}), strict=True))


def logits_of(graph: onnx.ModelProto, images: UInt8Array, batch: int = 8, *, fused: bool = True) -> Float32Array:
    """Logits float32 (n, C) in ONNX Runtime on the CPU."""
    session = open_session(graph, fused=fused)
    (source,) = session.get_inputs()
    parts = [session.run(None, {source.name: chunk})[0] for chunk in batches(images, batch)]
    return np.concatenate(parts).astype(np.float32)


def batches(images: UInt8Array, size: int) -> Iterable[UInt8Array]:
    return (images[start : start + size] for start in range(0, len(images), size))


def open_session(graph: onnx.ModelProto, *, fused: bool = True) -> Any:
    """A session on the CPU; raise CheckFailed with the runtime's words when it cannot run the graph.

    Without `fused` Q and DQ run as they stand: ONNX Runtime fuses E4M3 into a kernel that then refuses the type.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    if not fused:
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    try:
        return onnxruntime.InferenceSession(graph.SerializeToString(), options, providers=["CPUExecutionProvider"])
    # ONNX Runtime's errors share no base but this one; each is a verdict on the graph.
    except Exception as error:  # noqa: BLE001
        raise CheckFailed(f"ONNX Runtime cannot run the graph on the CPU: {error}") from None
