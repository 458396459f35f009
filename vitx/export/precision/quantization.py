"""int8 and fp8 as explicit Q/DQ: ranges from real images, and the fewest layers left in float32 that pass."""

from collections.abc import Callable, Sequence
from typing import Any

import onnx

from vitx.core.console import log, progress
from vitx.core.errors import CheckFailed
from vitx.core.preprocess import UInt8Array
from vitx.core.tolerance import SHARE_OF_STD
from vitx.export.graph.dataflow import Dataflow
from vitx.export.options import Target
from vitx.export.precision.acceptance import Agreement, Bounds, Judge, Lowered, minimal_subset
from vitx.export.precision.calibration import (
    METHODS,
    PERCENTILE,
    Activations,
    Method,
    observe,
    require_finite,
    split_images,
)
from vitx.export.precision.qdq import EightBit, QuantizedGraph

# The entropy method assumes evenly spaced codes, which E4M3's are not.
METHODS_FOR: dict[EightBit, tuple[Method, ...]] = {"int8": METHODS, "fp8": ("max", "percentile")}
# Held-out images on which the error of one layer is measured: few, because it only orders the layers.
SENSITIVITY_IMAGES = 16


def quantize(
    graph: onnx.ModelProto,
    kind: EightBit,
    images: UInt8Array,
    *,
    target: Target = "cpu",
    bounds: Bounds | None = None,
    accept: Callable[[onnx.ModelProto], bool] | None = None,
    quiet: bool = False,
) -> Lowered:
    """Return `graph` with Q/DQ around as many layers as the bounds, and then `accept`, allow.

    Up to half of `images` (uint8 (n, S, S, 3), n ≥ 320) is held out; the others give the ranges. The range methods are
    compared on the held-out images with every layer quantised, and the one with the least mean logit error is taken. If
    that graph fails, layers stay in float32, the most sensitive first, until it passes; then each is quantised again if
    the graph passes with it.
    Raises InputError for too few images, CheckFailed for weights or activations that are not finite, or when nothing
    passes.
    """
    flow = Dataflow(graph)
    quantized = QuantizedGraph(flow, kind, target)
    calibration, held_out = split_images(images)
    log(f"{kind}: ranges from {len(calibration)} images, judged on {len(held_out)} others", quiet=quiet)
    tensors = sorted({name for layer in quantized.layers.values() for name in layer.tensors()})
    ranges = observe(graph, tensors, calibration)
    require_finite(ranges, flow.producers())
    # int8 is judged as ONNX Runtime will run it, in fused integer kernels; it has none for fp8.
    judge = Judge(graph, held_out, bounds or Bounds(SHARE_OF_STD[kind]), accept, fused=kind == "int8")
    search = _Search(quantized, ranges, judge)
    compared = {method: search.fully_quantized(method) for method in METHODS_FOR[kind]}
    search.method = min(compared, key=lambda method: compared[method].mean_error)
    with progress(f"{kind} layers", 2 * len(quantized.layers), quiet=quiet) as bar:
        judge.bar = bar
        islands, sensitivity = search.fewest_in_float()
    lowered = search.without(islands)
    onnx.checker.check_model(lowered, full_check=True)
    details: dict[str, Any] = {
        "kind": kind,
        "target": target,
        "calibration_images": len(calibration),
        "held_out_images": len(held_out),
        "allowed": judge.bounds.as_json(),
        "methods": {method: agreement.as_json() for method, agreement in compared.items()},
        "method": search.method,
        "percentile": PERCENTILE,
        "layers": len(quantized.layers),
        "quantized": len(quantized.layers) - len(islands),
        "sensitivity": sensitivity,
        "trials": judge.trials,
        "ranges": {name: ranges[name].threshold(search.method) for name in tensors},
    }
    return Lowered(lowered, islands, details)


class _Search:
    """The search for the layers that stay in float32, for one graph and its ranges."""

    def __init__(self, quantized: QuantizedGraph, ranges: dict[str, Activations], judge: Judge) -> None:
        self.quantized, self.ranges, self.judge = quantized, ranges, judge
        self.method: Method = "max"

    def fully_quantized(self, method: Method) -> Agreement:
        """The agreement with every layer quantised by `method`."""
        return self.judge.measure(self.quantized.build(list(self.quantized.layers), self.ranges, method))

    def without(self, left_out: Sequence[str]) -> onnx.ModelProto:
        chosen = [name for name in self.quantized.layers if name not in set(left_out)]
        return self.quantized.build(chosen, self.ranges, self.method)

    def passes(self, left_out: Sequence[str]) -> bool:
        if len(left_out) == len(self.quantized.layers):
            raise CheckFailed(self._nothing_passes())
        return self.judge.passes(self.without(left_out), f"{len(left_out)} layers in float32")

    def fewest_in_float(self) -> tuple[tuple[str, ...], dict[str, float]]:
        """The layers left in float32, and the mean logit error of each layer quantised alone (if that was needed)."""
        if self.passes(()):
            return (), {}
        sensitivity = {
            name: self.judge.measure(
                self.quantized.build([name], self.ranges, self.method), SENSITIVITY_IMAGES
            ).mean_error
            for name in self.quantized.layers
        }
        ordered = sorted(sensitivity, key=lambda name: -sensitivity[name])
        return minimal_subset(ordered, self.passes), sensitivity

    def _nothing_passes(self) -> str:
        last = self.judge.trials[-1]
        best = min(self.judge.trials, key=lambda trial: float(trial["max_error"]))
        refused = " and was then refused by the caller's own check" if last.get("accepted") is False else ""
        return (
            f"no choice of layers passes: the best, {best['what']}, has {best['flips']} of {best['images']} images in "
            f"another class and a largest logit error of {float(best['max_error']):.3g} standard deviations{refused}; "
            f"allowed are {self.judge.bounds}"
        )
