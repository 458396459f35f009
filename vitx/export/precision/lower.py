"""Lower precision, written into the graph: what the ONNX file says is what a strongly typed runtime does.

int8 and fp8 are in quantization.py, the choice of float32 islands of fp16 and bf16 in islands.py.
"""

from collections.abc import Callable
from typing import Any, Literal, get_args

import numpy as np
import onnx

from vitx.core.bundle import Base
from vitx.core.console import log, progress
from vitx.core.errors import InputError, unknown_name
from vitx.core.preprocess import UInt8Array
from vitx.core.tolerance import SHARE_OF_STD
from vitx.export.graph.dataflow import Dataflow, inputs_of
from vitx.export.options import Target
from vitx.export.precision.acceptance import Bounds, Judge, Lowered
from vitx.export.precision.calibration import MIN_IMAGES, require_images, split_images
from vitx.export.precision.half import HALVES, HalfGraph, cpu_twin
from vitx.export.precision.islands import OBSERVED_IMAGES, Overflow, find_islands
from vitx.export.precision.quantization import quantize

LowerPrecision = Literal["fp16", "bf16", "int8", "fp8"]
HalfPrecision = Literal["fp16", "bf16"]
# fp16 and bf16 are judged on at least 32 images.
MIN_HALF_IMAGES = 32


def least_images(precision: LowerPrecision) -> int:
    """How many real images a precision takes: half types need no ranges, so none are held out from these."""
    return MIN_HALF_IMAGES if precision in HALVES else MIN_IMAGES


def lower_precision(
    graph: onnx.ModelProto,
    precision: LowerPrecision,
    images: UInt8Array,
    *,
    target: Target = "cpu",
    base: Base = "fp32",
    bounds: Bounds | None = None,
    accept: Callable[[onnx.ModelProto], bool] | None = None,
    quiet: bool = False,
) -> Lowered:
    """Return a float32 graph in lower precision; its input stays uint8 (N, S, S, 3), its output float32 logits.

    graph: opset ≥ 13, the batch dynamic. It is not changed.
    images: real images, uint8 (n, S, S, 3), prepared by the model's Preprocessing (`sample_images` picks them from
    a set). fp16 and bf16 take n ≥ 32, int8 and fp8 n ≥ 320. Memory is that of the images and of one batch.
    target: what int8 is for: "cpu", the form that ONNX Runtime has fast kernels for, or "tensorrt".
    base: what computes beside the quantised products of int8 and fp8; a half type with islands as fp16 and bf16 have.
    bounds: how far the result may differ from the float32 graph on these images; by default what a certificate allows.
    accept: called with a graph within the bounds; if it returns False, the search goes on with more in float32.

    Raises InputError for unusable images and for a graph that takes or gives something else; CheckFailed for a frozen
    batch, for weights or activations that are not finite (naming them), and when nothing passes, with the numbers.
    """
    if precision not in get_args(LowerPrecision):
        raise unknown_name("precision", precision, get_args(LowerPrecision))
    _require_images(graph, images)
    _require_logits(graph)
    if base != "fp32" and precision in HALVES:
        raise InputError(f"base {base} is of int8 and fp8: {precision} is its own")
    if base != "fp32" and precision == "int8" and target == "cpu":
        raise InputError(f"base {base} of int8 is for target tensorrt: ONNX Runtime's CPU computes another result")
    if precision == "int8" or precision == "fp8":
        return quantize(graph, precision, images, target=target, base=base, bounds=bounds, accept=accept, quiet=quiet)
    return _to_half(graph, precision, images, bounds, accept, quiet=quiet)


def _require_images(graph: onnx.ModelProto, images: UInt8Array) -> None:
    inputs = inputs_of(graph.graph)
    types = [onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type).lower() for value in inputs]
    if types != ["uint8"]:
        found = ", ".join(f"{value.name} ({kind})" for value, kind in zip(inputs, types, strict=True)) or "nothing"
        raise InputError(f"the graph takes {found}: expected one input, uint8 images (n, S, S, 3)")
    expected = [dim.dim_value for dim in inputs[0].type.tensor_type.shape.dim][1:]
    if images.dtype != np.uint8 or images.ndim != 4 or list(images.shape[1:]) != expected:
        shape = ", ".join(map(str, ("n", *expected)))
        raise InputError(f"images are {images.dtype} {images.shape}: the graph takes uint8 ({shape})")
    require_images(len(images), MIN_HALF_IMAGES)  # what ranges need beyond that is asked where images are split


def _require_logits(graph: onnx.ModelProto) -> None:
    """Refuse a graph whose first output, by which it is judged, is no vector of floats an image."""
    found = "no output"
    for value in graph.graph.output[:1]:
        given = value.type.tensor_type
        kind = onnx.TensorProto.DataType.Name(given.elem_type).lower()
        sizes = [str(dim.dim_value or dim.dim_param or "?") for dim in given.shape.dim]
        if kind == "float" and (len(sizes) == 2 or not given.HasField("shape")):
            return
        found = f"'{value.name}', {kind} ({', '.join(sizes)}), as its first output"
    raise InputError(f"the graph gives {found}: expected logits, float (N, C)")


def _to_half(
    graph: onnx.ModelProto,
    precision: HalfPrecision,
    images: UInt8Array,
    bounds: Bounds | None,
    accept: Callable[[onnx.ModelProto], bool] | None,
    *,
    quiet: bool,
) -> Lowered:
    half = HalfGraph(Dataflow(graph), HALVES[precision])
    # Half types need no calibration, so few images may all be judged; of many, the same half as for int8 is.
    judged = split_images(images)[1] if len(images) >= MIN_IMAGES else images
    observed = min(len(images), OBSERVED_IMAGES)
    log(
        f"{precision}: overflow looked for on up to {observed} images, islands judged on up to {len(judged)}",
        quiet=quiet,
    )
    overflow = Overflow(graph, half, images)
    judge = Judge(graph, judged, bounds or Bounds(SHARE_OF_STD[precision]), accept, runnable=cpu_twin)
    with progress(f"{precision} trials", 0, quiet=quiet) as bar:
        judge.bar = bar
        islands, added_error = find_islands(overflow, judge)
    lowered = half.build(islands)
    onnx.checker.check_model(lowered, full_check=True)
    details: dict[str, Any] = {
        "kind": precision,
        "observed_images": len(overflow.images),
        "held_out_images": len(judged),
        "measured_on": "float32 twin with every tensor rounded where it is made",
        "allowed": judge.bounds.as_json(),
        "largest_activation": max(overflow.largest.values(), default=0.0),
        "overflow": overflow.tensors,
        "without_kernel": list(half.without_kernel),
        "rounding": added_error,
        "nodes": len(half.floating),
        "trials": judge.trials,
    }
    return Lowered(lowered, tuple(dict.fromkeys((*islands, *half.without_kernel))), details)
