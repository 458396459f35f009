"""Where an executable leaves the graph: the first named tensor that OpenVINO computes otherwise than ONNX Runtime."""

import re
from importlib.util import find_spec

import numpy as np
import numpy.typing as npt

from vitx.core.bundle import Bundle
from vitx.core.machine import openvino_core
from vitx.core.preprocess import UInt8Array
from vitx.runtimes.openvino import IR
from vitx.runtimes.session import Session

IMAGES = 4
# Of a layer's output, relative to its norm: float32 stays a thousand times below, bfloat16 a few times.
_DIFFERENT = 0.05
_LAYER = re.compile(r"embedding|blocks\.\d+|logits")

Tensors = dict[str, npt.NDArray[np.floating]]


def first_divergence(bundle: Bundle, session: Session, pixels: UInt8Array) -> str:
    """A clause that names the first layer that differs from model.onnx here; empty where it cannot be told.

    pixels: prepared images, uint8 (n, S, S, 3), of which the first four are run.

    OpenVINO keeps the names of the graph's tensors (`embedding`, `blocks.0`, …) and gives them as further outputs, so
    the same images are run through both graphs on this machine. The other runtimes do not, and without the package
    onnx the graph gets no further outputs.
    """
    of_ir = session.describe()["runtime"].startswith("openvino") and not session.outputs
    if not of_ir or find_spec("onnx") is None:
        return ""
    pixels = pixels[:IMAGES]
    found = _openvino_tensors(bundle, pixels)
    for name, expected in _graph_tensors(bundle, pixels, found).items():
        error = _relative(found[name], expected)
        if not error <= _DIFFERENT:
            return f"the first layer that differs from {bundle.model_path.name} is {name}, by {error:.2g} of its norm"
    return f"its layers agree with those of {bundle.model_path.name}"


def _openvino_tensors(bundle: Bundle, pixels: UInt8Array) -> Tensors:
    core = openvino_core()
    model = core.read_model(str(bundle.path / IR))
    names = {name for operation in model.get_ops() for port in operation.outputs() for name in port.get_names()}
    layers = sorted(filter(_LAYER.fullmatch, names))
    outputs = {name for port in model.outputs for name in port.get_names()}
    model.add_outputs([name for name in layers if name not in outputs])
    compiled = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    result = compiled.create_infer_request().infer({bundle.manifest.input.name: pixels})
    return {name: np.array(result[name]) for name in layers}


def _graph_tensors(bundle: Bundle, pixels: UInt8Array, wanted: Tensors) -> Tensors:
    """The tensors of model.onnx that have one of the `wanted` names, in the graph's order."""
    from vitx.export.graph.dataflow import read_onnx
    from vitx.export.graph.execution import run_with_outputs

    graph = read_onnx(bundle.model_path)
    layers = [name for node in graph.graph.node for name in node.output if name in wanted]
    return next(run_with_outputs(graph, layers, pixels, IMAGES))


def _relative(found: npt.NDArray[np.floating], expected: npt.NDArray[np.floating]) -> float:
    if found.shape != expected.shape:
        return float("inf")
    norm = float(np.linalg.norm(expected.astype(np.float64)))
    difference = float(np.linalg.norm(found.astype(np.float64) - expected))
    return difference / norm if norm else difference
