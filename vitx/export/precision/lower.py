"""Lower precision, written into the graph: what the ONNX file says is what a strongly typed runtime does.

int8 and fp8 are in quantization.py; this file chooses the float32 islands of fp16 and bf16.
"""

from collections.abc import Callable
from typing import Any, Literal, get_args

import numpy as np
import onnx

from vitx.core.console import log, progress
from vitx.core.errors import CheckFailed, InputError, unknown_name
from vitx.core.preprocess import UInt8Array
from vitx.core.tolerance import SHARE_OF_STD
from vitx.data.image_set import evenly_spaced
from vitx.export.graph.dataflow import Dataflow
from vitx.export.graph.execution import run_with_outputs
from vitx.export.options import Target
from vitx.export.precision.acceptance import Bounds, Judge, Lowered, minimal_subset
from vitx.export.precision.calibration import MIN_IMAGES, Activations, observe, require_finite, split_images
from vitx.export.precision.half import HALVES, LARGEST, HalfGraph, cpu_twin
from vitx.export.precision.quantization import quantize

LowerPrecision = Literal["fp16", "bf16", "int8", "fp8"]
HalfPrecision = Literal["fp16", "bf16"]
# fp16 and bf16 are judged on at least 32 images. Overflow is looked for on at most 128: every tensor is read there.
MIN_HALF_IMAGES, OBSERVED_IMAGES = 32, 128
# Images on which the error that each node adds is measured: few, because it only orders the candidates for islands.
SENSITIVITY_IMAGES = 8


def lower_precision(
    graph: onnx.ModelProto,
    precision: LowerPrecision,
    images: UInt8Array,
    *,
    target: Target = "cpu",
    bounds: Bounds | None = None,
    accept: Callable[[onnx.ModelProto], bool] | None = None,
    allow_islands: bool = True,
    quiet: bool = False,
) -> Lowered:
    """Return a float32 graph in lower precision; its input stays uint8 (N, S, S, 3), its output float32 logits.

    graph: opset ≥ 13, the batch dynamic. It is not changed.
    images: real images, uint8 (n, S, S, 3), prepared by the model's Preprocessing (`sample_images` picks them from
    a set). fp16 and bf16 take n ≥ 32, int8 and fp8 n ≥ 320. Memory is that of the images and of one batch.
    target: what int8 is for: "cpu", the form that ONNX Runtime has fast kernels for, or "tensorrt".
    bounds: how far the result may differ from the float32 graph on these images; by default what a certificate allows.
    accept: called with a graph within the bounds; if it returns False, the search goes on with more in float32.
    allow_islands: if False, everything must be lowered, or CheckFailed names what cannot be.

    Raises InputError for unusable images; CheckFailed for a frozen batch, for weights or activations that are not
    finite (naming them), and when nothing passes, with the numbers.
    """
    if precision not in get_args(LowerPrecision):
        raise unknown_name("precision", precision, get_args(LowerPrecision))
    _require_images(graph, images)
    if precision == "int8" or precision == "fp8":
        lowered = quantize(graph, precision, images, target=target, bounds=bounds, accept=accept, quiet=quiet)
        if lowered.islands and not allow_islands:
            raise CheckFailed(
                f"{precision} fails with every layer quantised; {len(lowered.islands)} would have to stay in float32, "
                f"first {lowered.islands[0]}"
            )
        return lowered
    return _to_half(graph, precision, images, bounds, accept, allow_islands=allow_islands, quiet=quiet)


def _require_images(graph: onnx.ModelProto, images: UInt8Array) -> None:
    expected = [dim.dim_value for dim in graph.graph.input[0].type.tensor_type.shape.dim][1:]
    if images.dtype != np.uint8 or images.ndim != 4 or list(images.shape[1:]) != expected:
        shape = ", ".join(map(str, ("n", *expected)))
        raise InputError(f"images are {images.dtype} {images.shape}: the graph takes uint8 ({shape})")
    if len(images) < MIN_HALF_IMAGES:
        raise InputError(
            f"{len(images)} images to judge a lower precision on: give at least {MIN_HALF_IMAGES} real ones, and 320 "
            "where ranges are calibrated (int8, fp8)"
        )


def _to_half(
    graph: onnx.ModelProto,
    precision: HalfPrecision,
    images: UInt8Array,
    bounds: Bounds | None,
    accept: Callable[[onnx.ModelProto], bool] | None,
    *,
    allow_islands: bool,
    quiet: bool,
) -> Lowered:
    flow = Dataflow(graph)
    half = HalfGraph(flow, HALVES[precision])
    chosen = images[evenly_spaced(len(images), OBSERVED_IMAGES)]
    # Half types need no calibration, so few images may all be judged; of many, the same half as for int8 is.
    judged = split_images(images)[1] if len(images) >= MIN_IMAGES else images
    log(f"{precision}: overflow looked for on {len(chosen)} images, islands judged on {len(judged)}", quiet=quiet)
    tensors = sorted({name for node in flow.nodes for name in node.output if flow.is_float(name)})
    activations = observe(graph, tensors, chosen)
    require_finite(activations, flow.producers())
    too_large = {name: found for name, found in activations.items() if found.largest > LARGEST[half.element_type]}
    overflow = _overflowing(flow, half, too_large)
    if overflow and not allow_islands:
        raise CheckFailed(_overflow_text(precision, overflow, too_large, flow))
    judge = Judge(graph, judged, bounds or Bounds(SHARE_OF_STD[precision]), accept, runnable=cpu_twin)
    with progress(f"{precision} islands", len(half.floating), quiet=quiet) as bar:
        judge.bar = bar
        islands, added_error = _islands(half, judge, overflow, chosen, allow_islands=allow_islands)
    lowered = half.build(islands)
    onnx.checker.check_model(lowered, full_check=True)
    details: dict[str, Any] = {
        "kind": precision,
        "observed_images": len(chosen),
        "held_out_images": len(judged),
        "measured_on": "float32 twin with every tensor rounded where it is made",
        "allowed": judge.bounds.as_json(),
        "largest_activation": max((found.largest for found in activations.values()), default=0.0),
        "overflow": {name: found.largest for name, found in too_large.items()},
        "without_kernel": list(half.without_kernel),
        "rounding": added_error,
        "nodes": len(half.floating),
        "trials": judge.trials,
    }
    return Lowered(lowered, tuple(dict.fromkeys((*islands, *half.without_kernel))), details)


def _overflowing(flow: Dataflow, half: HalfGraph, too_large: dict[str, Activations]) -> list[str]:
    """The nodes that produce or read a value beyond the half type's range, constants included."""
    limit = LARGEST[half.element_type]
    constants = {
        name for name in flow.constants if flow.is_float(name) and np.abs(flow.array(name)).max(initial=0) > limit
    }
    beyond = set(too_large) | constants
    return [
        node.name
        for node in flow.nodes
        if node.name in half.floating and beyond.intersection((*node.input, *node.output))
    ]


def _overflow_text(
    precision: HalfPrecision, overflow: list[str], too_large: dict[str, Activations], flow: Dataflow
) -> str:
    limit = LARGEST[HALVES[precision]]
    if not too_large:
        return f"a constant of '{overflow[0]}' is beyond {limit:g}, where {precision} ends, and islands are forbidden"
    first = next(name for node in flow.nodes for name in node.output if name in too_large)
    return (
        f"'{first}', made by '{flow.producers()[first]}', reaches {too_large[first].largest:g} on these images: "
        f"{precision} ends at {limit:g}, and islands in float32 are forbidden"
    )


def _islands(
    half: HalfGraph, judge: Judge, overflow: list[str], images: UInt8Array, *, allow_islands: bool
) -> tuple[tuple[str, ...], dict[str, float]]:
    """The fewest nodes in float32, and the error that each node adds (measured only if islands are needed)."""
    if judge.passes(half.build(()), "no island"):
        return (), {}
    added = _added_error_by_node(half, overflow, images[:SENSITIVITY_IMAGES])
    # Overflow first: one infinite value ruins the logits, which no number of rounding errors does.
    ordered = [*overflow, *sorted((name for name in added if name not in overflow), key=lambda name: -added[name])]
    if not allow_islands:
        raise CheckFailed(
            f"without islands: {_last(judge)}; '{ordered[0]}' adds most rounding, {added[ordered[0]]:.3g} of its result"
        )
    if overflow and judge.passes(half.build(overflow), f"{len(overflow)} islands, where it overflows"):
        # No other island is needed, and perhaps not all of these: a large value may be harmless (before a Softmax).
        ordered = list(overflow)
    islands = minimal_subset(ordered, lambda names: judge.passes(half.build(names), f"{len(names)} islands"))
    return islands, {name: added.get(name, 0.0) for name in ordered[: max(20, len(islands))]}


def _last(judge: Judge) -> str:
    trial = judge.trials[-1]
    return (
        f"{trial['flips']} of {trial['images']} images in another class, largest logit error "
        f"{float(trial['max_error']):.3g} standard deviations where {judge.bounds.logit_error:g} is allowed"
    )


def _added_error_by_node(half: HalfGraph, islands: list[str], images: UInt8Array) -> dict[str, float]:
    """The relative error ‖exact - rounded‖ / ‖exact‖ of each node's result less that of its inputs, in half precision.

    The float32 graph and the twin of the half graph run side by side. `islands`, the nodes that overflow, stay in
    float32, or everything after them would be NaN.
    """
    flow = half.flow
    tensors = [name for node in flow.nodes for name in node.output if flow.is_float(name) and name not in flow.outputs]
    twin = cpu_twin(half.build(islands))
    made = {name for node in twin.graph.node for name in node.output}
    tensors = [name for name in tensors if name in made]
    # Sums of squares over all images, from which each tensor's norms are taken at the end.
    error, size = dict.fromkeys(tensors, 0.0), dict.fromkeys(tensors, 0.0)
    exact_graph = flow.assemble(flow.nodes)
    for exact, rounded in zip(
        run_with_outputs(exact_graph, tensors, images), run_with_outputs(twin, tensors, images), strict=True
    ):
        for name in tensors:
            error[name] += float(np.square(exact[name].astype(np.float64) - rounded[name]).sum())
            size[name] += float(np.square(exact[name], dtype=np.float64).sum())
    relative = {name: float(np.sqrt(error[name] / size[name])) if size[name] else 0.0 for name in tensors}
    return {
        node.name: max((relative.get(name, 0.0) for name in node.output), default=0.0)
        - max((relative.get(name, 0.0) for name in node.input), default=0.0)
        for node in flow.nodes
        if node.name in half.floating
    }
