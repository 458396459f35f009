"""int8 and fp8 as explicit Q/DQ: ranges from real images, and the fewest layers left in the base's type that pass."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx

from vitx.core.bundle import Base
from vitx.core.console import counted, log, progress
from vitx.core.errors import CheckFailed
from vitx.core.preprocess import UInt8Array
from vitx.core.tolerance import SHARE_OF_STD
from vitx.export.graph.dataflow import Dataflow
from vitx.export.graph.execution import open_session
from vitx.export.options import Target
from vitx.export.precision.acceptance import (
    SCREENED_IMAGES,
    Agreement,
    Bounds,
    Judge,
    Lowered,
    agreement_of,
    minimal_subset,
)
from vitx.export.precision.calibration import (
    METHODS,
    PERCENTILE,
    Activations,
    Method,
    observe,
    require_finite,
    split_images,
)
from vitx.export.precision.half import HALVES, HalfGraph, cpu_twin
from vitx.export.precision.islands import Overflow, find_islands
from vitx.export.precision.placement import EightBit
from vitx.export.precision.qdq import SWITCHES, QuantizedGraph

# The entropy method assumes evenly spaced codes, which E4M3's are not.
METHODS_FOR: dict[EightBit, tuple[Method, ...]] = {"int8": METHODS, "fp8": ("max", "percentile")}
# Held-out images on which the error of one layer is measured: few, because it only orders the layers.
SENSITIVITY_IMAGES = 8
# Of the weights that gain by one scale instead of one for each channel, the shares that are tried if not all may.
SHARES = (7 / 8, 3 / 4, 1 / 2)
FLOAT_NAMES: dict[Base, str] = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


def quantize(
    graph: onnx.ModelProto,
    kind: EightBit,
    images: UInt8Array,
    *,
    target: Target = "cpu",
    base: Base = "fp32",
    bounds: Bounds | None = None,
    accept: Callable[[onnx.ModelProto], bool] | None = None,
    quiet: bool = False,
) -> Lowered:
    """Return `graph` with Q/DQ around as many layers as the bounds, and then `accept`, allow.

    Up to half of `images` (uint8 (n, S, S, 3), n ≥ 320) is held out; the others give the ranges. The range methods are
    compared on the first held-out images with every layer quantised, and the one with the least mean logit error is
    taken. If that graph fails, layers stay in the base's type, the most sensitive first, until it passes; then each is
    quantised again if the graph passes with it. Of a half base the islands in float32 are chosen before, without Q/DQ
    and by the same bounds, if anything overflows.
    Raises InputError for too few images, CheckFailed for weights or activations that are not finite, or when nothing
    passes.
    """
    flow = Dataflow(graph)
    calibration, held_out = split_images(images)
    log(f"{kind}: ranges from {len(calibration)} images, judged on up to {len(held_out)} others", quiet=quiet)
    bounds = bounds or Bounds(SHARE_OF_STD[kind])
    base_islands = _base_islands(graph, flow, base, calibration, held_out, bounds)
    quantized = QuantizedGraph(flow, kind, target, base, base_islands)
    tensors = sorted({name for layer in quantized.layers.values() for name in layer.tensors()})
    with progress(f"{kind} ranges", len(calibration), quiet=quiet) as bar:
        ranges = observe(graph, tensors, calibration, bar=bar)
    require_finite(ranges, flow.producers())
    # int8 is judged as ONNX Runtime will run it, in fused integer kernels; it has none for fp8.
    judge = Judge(graph, held_out, bounds, accept, fused=kind == "int8")
    if base != "fp32":
        judge.runnable = cpu_twin
    search = _Search(quantized, ranges, judge)
    compared = {method: search.fully_quantized(method) for method in METHODS_FOR[kind]}
    search.method = min(compared, key=lambda method: compared[method].mean_error)
    with progress(f"{kind} trials", 0, quiet=quiet) as bar:
        judge.bar = bar
        left_out, sensitivity = search.run()
    lowered = search.without(left_out)
    onnx.checker.check_model(lowered, full_check=True)
    details: dict[str, Any] = {
        "kind": kind,
        "target": target,
        "base": base,
        "calibration_images": len(calibration),
        "held_out_images": len(held_out),
        "allowed": judge.bounds.as_json(),
        "methods": {method: agreement.as_json() for method, agreement in compared.items()},
        "method": search.method,
        "percentile": PERCENTILE,
        "layers": len(quantized.layers),
        "quantized": len(quantized.layers) - len(left_out),
        "not_quantized": list(left_out),
        "weights_with_one_scale": list(search.one_scale),
        "sensitivity": sensitivity,
        "trials": judge.trials,
        "ranges": {name: ranges[name].threshold(search.method) for name in tensors},
    }
    return Lowered(lowered, left_out if base == "fp32" else base_islands, details)


def _base_islands(
    graph: onnx.ModelProto, flow: Dataflow, base: Base, calibration: UInt8Array, held_out: UInt8Array, bounds: Bounds
) -> tuple[str, ...]:
    """The nodes in float32 of a half base: those without a kernel, and of those that overflow as many as are needed."""
    if base == "fp32":
        return ()
    half = HalfGraph(flow, HALVES[base])
    overflow = Overflow(graph, half, calibration)
    if not overflow.nodes:
        return half.without_kernel
    judge = Judge(graph, held_out, bounds, runnable=cpu_twin)
    return tuple(dict.fromkeys((*find_islands(overflow, judge)[0], *half.without_kernel)))


class _Search:
    """The search for the layers that are not quantised, for one graph and its ranges."""

    def __init__(self, quantized: QuantizedGraph, ranges: dict[str, Activations], judge: Judge) -> None:
        self.quantized, self.ranges, self.judge = quantized, ranges, judge
        self.method: Method = "max"
        self.one_scale: tuple[str, ...] = ()  # layers whose weight has one scale instead of one for each channel
        self.rest = FLOAT_NAMES[quantized.base]

    def fully_quantized(self, method: Method) -> Agreement:
        """The agreement on the first images with every layer quantised by `method`."""
        candidate = self.quantized.build(list(self.quantized.layers), self.ranges, method)
        return self.judge.measure(candidate, SCREENED_IMAGES)

    def without(self, left_out: Sequence[str]) -> onnx.ModelProto:
        chosen = [name for name in self.quantized.layers if name not in set(left_out)]
        return self.quantized.build(chosen, self.ranges, self.method, self.one_scale)

    def passes(self, left_out: Sequence[str]) -> bool:
        if len(left_out) == len(self.quantized.layers):
            raise CheckFailed(self._nothing_passes())
        coarse = f", {counted(len(self.one_scale), 'weight')} with one scale" if self.one_scale else ""
        return self.judge.passes(self.without(left_out), f"{counted(len(left_out), 'layer')} in {self.rest}{coarse}")

    def run(self) -> tuple[tuple[str, ...], dict[str, float]]:
        """The layers that are not quantised, and the mean logit error of each alone (if that was needed).

        Everything with one scale for each weight that gains by it is tried first. If that fails, the layers are chosen
        with a scale for each channel, and then so many of those weights as pass, those that round least.
        """
        gaining = sorted((layer.node for layer in self.quantized.layers.values() if layer.one_scale), key=self.rounding)
        self.one_scale = tuple(gaining)
        if gaining and self.passes(()):
            return (), {}
        self.one_scale = ()
        left_out, sensitivity = self.fewest_left_out()
        for share in SHARES if gaining else ():
            self.one_scale = tuple(gaining[: int(share * len(gaining))])
            if self.passes(left_out):
                return left_out, sensitivity
        self.one_scale = ()
        return left_out, sensitivity

    def rounding(self, layer: str) -> float:
        """‖weight - rounded‖ / ‖weight‖ with one scale."""
        name = self.quantized.layers[layer].weight
        assert name is not None
        exact, rounded = self.quantized.flow.array(name), self.quantized.weight(name, None)
        error = float(np.linalg.norm(exact - rounded["scale"] * rounded["codes"]))
        return error / max(float(np.linalg.norm(exact)), 1e-30)

    def fewest_left_out(self) -> tuple[tuple[str, ...], dict[str, float]]:
        """The layers that are not quantised, and the mean logit error of each quantised alone (if that was needed)."""
        if self.passes(()):
            return (), {}
        sensitivity = self.error_of_each()
        ordered = sorted(sensitivity, key=lambda name: -sensitivity[name])
        return minimal_subset(ordered, self.passes), sensitivity

    def error_of_each(self) -> dict[str, float]:
        """The mean logit error of each layer quantised alone, in one session for all of them."""
        session = open_session(self.quantized.switched(self.ranges, self.method), fused=False)
        feeds = {self.quantized.flow.inputs[0]: self.judge.images[:SENSITIVITY_IMAGES]}
        expected = self.judge.expected[:SENSITIVITY_IMAGES]
        errors = {}
        for name, switches in zip(self.quantized.layers, np.eye(len(self.quantized.layers), dtype=bool), strict=True):
            (found,) = session.run(None, {**feeds, SWITCHES: switches})
            errors[name] = agreement_of(expected, found, self.judge.std).mean_error
            if self.judge.bar is not None:
                self.judge.bar.update(
                    len(self.judge.trials), f"{len(errors)} of {len(self.quantized.layers)} layers alone"
                )
        return errors

    def _nothing_passes(self) -> str:
        last = self.judge.trials[-1]
        best = min(self.judge.trials, key=lambda trial: float(trial["max_error"]))
        refused = " and was then refused by the caller's own check" if last.get("accepted") is False else ""
        remedy = "; train longer, or allow more (--max-flip-rate)" if self.judge.bounds.sampling_plan else ""
        return (
            f"no choice of layers passes: the best, {best['what']}, has {best['flips']} of {best['images']} images in "
            f"another class and a largest logit error of {float(best['max_error']):.3g} standard deviations{refused}; "
            f"allowed are {self.judge.bounds}{remedy}"
        )
