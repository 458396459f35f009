"""FLOPs and bytes of a bundle's graph, counted from ONNX Runtime's own profile; export keeps no count.

The graph runs twice on one black image on the CPU. Once as it was exported, operator by operator, for the FLOPs, which
are the model's whatever a runtime fuses. Once optimised, for the bytes, which depend on the kernels that run. So any
bundle that a CPU can run is counted, however old.
"""

import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitx.core.bundle import Bundle
from vitx.core.latency import GraphCost
from vitx.core.machine import set_quantization
from vitx.runtimes.session import image_shape

# Operators whose output is their input's memory under another shape: they move no bytes.
VIEWS = ("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Shape")
Shape = Sequence[int]


def count_cost(bundle: Bundle) -> GraphCost | None:
    """Return the FLOPs and activation bytes of one image, and the bytes of the weights that each call reads.

    None for a graph that ONNX Runtime has no kernels for on a CPU: those of bf16.
    """
    from onnxruntime.capi import onnxruntime_pybind11_state as native

    try:
        as_exported = _profile(bundle, optimized=False)
        kernels = [kernel for kernel in _profile(bundle, optimized=True) if kernel["op_name"] not in VIEWS]
    except native.NotImplemented:
        return None
    return GraphCost(
        flops=sum(node_flops(node["op_name"], *_shapes(node)) for node in as_exported),
        activation_bytes=sum(int(kernel["activation_size"]) + int(kernel["output_size"]) for kernel in kernels),
        weight_bytes=sum(int(kernel["parameter_size"]) for kernel in kernels),
    )


def node_flops(kind: str, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> int:
    """FLOPs of one operator, from its shapes: a multiply-add counts two, operators without products count nothing."""
    if kind == "Gemm":  # (M, K) or, with transA, (K, M): the product of all three is the first input's size times N
        return 2 * math.prod(inputs[0]) * outputs[0][-1]
    if kind in ("MatMul", "MatMulInteger", "QLinearMatMul"):
        return 2 * math.prod(outputs[0]) * inputs[0][-1]
    if kind in ("Conv", "ConvInteger", "QLinearConv"):
        weight = next(shape for shape in inputs[1:] if len(shape) == len(inputs[0]))
        return 2 * math.prod(outputs[0]) * math.prod(weight[1:])
    if kind == "Attention":  # ONNX's: queries, keys and values (N, H, L, d) or (N, L, H·d)
        queries, keys, values = inputs[:3]
        maps = math.prod(queries[:-1]) * keys[-2]
        return 2 * maps * (queries[-1] + values[-1])
    return 0


def _shapes(node: dict[str, Any]) -> tuple[list[Shape], list[Shape]]:
    """Input and output shapes; each entry of the profile is {element type: shape}."""
    inputs, outputs = node["input_type_shape"], node["output_type_shape"]
    return [next(iter(entry.values())) for entry in inputs], [next(iter(entry.values())) for entry in outputs]


def _profile(bundle: Bundle, *, optimized: bool) -> list[dict[str, Any]]:
    """ONNX Runtime's record of each kernel that ran for one image: operator, shapes, sizes in bytes."""
    import onnxruntime

    from vitx.runtimes.onnxruntime import rewrites_break

    levels = onnxruntime.GraphOptimizationLevel
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimized else levels.ORT_DISABLE_ALL
    # The profile leaves out the shapes and sizes of prepacked weights.
    options.add_session_config_entry("session.disable_prepacking", "1")
    disabled = set_quantization(options, fused=not rewrites_break(bundle.manifest))
    with tempfile.TemporaryDirectory() as folder:
        options.enable_profiling = True
        options.profile_file_prefix = str(Path(folder) / "profile")
        session = onnxruntime.InferenceSession(
            str(bundle.model_path), options, providers=["CPUExecutionProvider"], disabled_optimizers=disabled
        )
        images = np.zeros((1, *image_shape(bundle)), dtype=np.uint8)
        session.run([bundle.manifest.output.name], {bundle.manifest.input.name: images})
        events = json.loads(Path(session.end_profiling()).read_text())
    return [event["args"] for event in events if event["cat"] == "Node" and event["name"].endswith("_kernel_time")]
