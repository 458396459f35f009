"""Features and logits: a bundle's graph with a second output, the input of the classifier's matrix product.

Any bundle will do: a copy of its graph gets the output, and nothing else in it changes.
"""

import tempfile
from pathlib import Path
from typing import cast

import numpy as np
import onnx
import onnxruntime
from onnx import helper

from vitx.core.bundle import Bundle
from vitx.core.errors import CheckFailed, InputError
from vitx.core.preprocess import UInt8Array
from vitx.core.tolerance import allowed_logit_error
from vitx.runtimes.onnxruntime import OnnxRuntimeSession
from vitx.runtimes.session import Device, FeatureArray, Float32Array, check_images, image_shape

# Operators between the classifier's product and the logits: its bias, a scale, the casts of lower precisions.
_AFTER_PRODUCT = {"Add", "Cast", "DequantizeLinear", "Identity", "Mul", "QuantizeLinear"}
_FLOATS = {"tensor(float)": onnx.TensorProto.FLOAT, "tensor(float16)": onnx.TensorProto.FLOAT16}
# Random images for the check at loading.
PROBES = 4


class OnnxRuntimeFeatures(OnnxRuntimeSession):
    """A bundle's graph in ONNX Runtime that also gives the pooled features before the classifier.

    Loading checks, on random images, that the logits equal those of the bundle's own graph, and that the classifier
    alone computes the same logits from the features. Raises CheckFailed when either differs, InputError for a graph
    whose logits are not one product of features (N, D): a distilled DeiT averages two.
    """

    has_features = True

    def __init__(self, bundle: Bundle, *, device: Device = "auto", threads: int | None = None) -> None:
        images = np.random.default_rng(0).integers(0, 256, (PROBES, *image_shape(bundle)), dtype=np.uint8)
        with OnnxRuntimeSession(bundle, device=device, threads=threads) as plain:
            expected = plain.infer(images)
        model = onnx.load(bundle.model_path)
        logits = bundle.manifest.output.name
        self._features = classifier_input(model, logits)
        model.graph.output.append(onnx.ValueInfoProto(name=self._features))
        with tempfile.TemporaryDirectory(prefix="vitx-features-") as folder:
            graph = Path(folder) / "model-with-features.onnx"
            onnx.save(model, graph)
            super().__init__(bundle, device=device, threads=threads, graph=graph)
        output = next(tensor for tensor in self._session.get_outputs() if tensor.name == self._features)
        if output.type not in _FLOATS or len(output.shape) != 2:
            raise InputError(
                f"the classifier of '{bundle.manifest.name}' takes {output.type} of {len(output.shape)} axes: expected "
                "float32 or float16 (N, D)"
            )
        self._check(images, expected, classifier(model, self._features, _FLOATS[output.type], logits))

    def _infer_features(self, images: UInt8Array) -> tuple[Float32Array, FeatureArray]:
        check_images(images, self._shape)
        logits, features = self._outputs([self._manifest.output.name, self._features], images)
        return logits, cast(FeatureArray, features)

    def _check(self, images: UInt8Array, expected: Float32Array, head: onnx.ModelProto) -> None:
        logits, features = self.infer_features(images)
        runner = onnxruntime.InferenceSession(head.SerializeToString(), providers=["CPUExecutionProvider"])
        (again,) = runner.run(None, {self._features: features})
        allowed = allowed_logit_error(self._manifest.precision, float(expected.std()))
        for what, found in (("with this output", logits), ("from the features alone", again)):
            error = float(np.abs(found - expected).max())
            if not error <= allowed:
                raise CheckFailed(
                    f"the logits of '{self._manifest.name}' {what} differ by {error:.3g}, allowed {allowed:.3g}: its "
                    "features cannot be had without changing its predictions"
                )


def load_features(
    bundle: Bundle, runtime: str, *, device: Device = "auto", threads: int | None = None
) -> OnnxRuntimeFeatures:
    """Load a bundle so that it also gives features; raise InputError for any runtime but ONNX Runtime's two."""
    if runtime not in ("onnxruntime", "onnxruntime-cpu", "onnxruntime-cuda"):
        raise InputError(f"the runtime {runtime} gives logits alone: features need onnxruntime")
    where = device if runtime == "onnxruntime" else cast(Device, runtime.removeprefix("onnxruntime-"))
    return OnnxRuntimeFeatures(bundle, device=where, threads=threads)


def classifier_input(model: onnx.ModelProto, logits: str) -> str:
    """The name of the tensor that the last matrix product before `logits` multiplies with constant weights.

    Raises InputError when the logits come from elsewhere.
    """
    producers = {name: node for node in model.graph.node for name in node.output}
    constants = _constants(model)
    name = logits
    while name in producers:
        node = producers[name]
        variable = {tensor for tensor in node.input if tensor and tensor not in constants}
        if len(variable) != 1:
            break
        name = variable.pop()
        if node.op_type in ("Gemm", "MatMul"):
            return str(name)
        if node.op_type not in _AFTER_PRODUCT:
            break
    raise InputError(
        "the graph's logits are not one matrix product of features (N, D): there are no embeddings of this network"
    )


def classifier(model: onnx.ModelProto, features: str, kind: int, logits: str) -> onnx.ModelProto:
    """The part of a graph from `features`, of element type `kind`, to `logits`, as a graph of its own."""
    needed: set[str] = {logits}
    nodes: list[onnx.NodeProto] = []
    for node in reversed(model.graph.node):
        if needed & set(node.output) and features not in node.output:
            needed |= set(node.input)
            nodes.insert(0, node)
    graph = helper.make_graph(
        nodes,
        "classifier",
        [helper.make_tensor_value_info(features, kind, None)],
        [onnx.ValueInfoProto(name=logits)],
        [tensor for tensor in model.graph.initializer if tensor.name in needed],
    )
    return helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)


def _constants(model: onnx.ModelProto) -> set[str]:
    """The names of the tensors that do not depend on an input of the graph."""
    found = {tensor.name for tensor in model.graph.initializer}
    for node in model.graph.node:  # ONNX keeps them in topological order
        if all(name in found or not name for name in node.input):
            found |= set(node.output)
    return found
