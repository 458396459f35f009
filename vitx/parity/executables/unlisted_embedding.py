"""The embedding of a bundle that lists none: what its classifier reads, found in the graph, not certified as such.

Any bundle will do: nothing in its graph changes, and it gets one more output. It is not compared with the checkpoint:
the rewrite fold-layer-norm-affine may have moved the last norm's scale and shift out of it.
"""

from importlib.util import find_spec
from typing import TYPE_CHECKING, cast

import numpy as np

from vitx.core.bundle import Bundle
from vitx.core.errors import CheckFailed, InputError, missing_package
from vitx.core.tolerance import allowed_logit_error
from vitx.runtimes.session import LOGITS, Device, image_shape

if TYPE_CHECKING:
    import onnx

    from vitx.runtimes.onnxruntime import OnnxRuntimeSession

# Random images for the check at loading.
PROBES = 4


def load_unlisted_embedding(
    bundle: Bundle, runtime: str, *, device: Device = "auto", threads: int | None = None
) -> "OnnxRuntimeSession":
    """Load a bundle without outputs so that it also gives the input of its classifier, as `embedding`.

    Loading checks, on random images, that the logits equal those of the bundle's own graph, and that the classifier
    alone computes the same logits from the features. Raises CheckFailed when either differs, InputError for any runtime
    but ONNX Runtime's two, and for a graph whose logits are not one product of features (N, D); EnvironmentMissing
    without the package onnx.
    """
    if runtime not in ("onnxruntime", "onnxruntime-cpu", "onnxruntime-cuda"):
        raise InputError(
            f"'{bundle.path}' lists no embedding, and only onnxruntime finds one in a graph, not {runtime}: choose it, "
            "or export the bundle again with --output embedding"
        )
    if find_spec("onnx") is None:
        raise missing_package("onnx", "export")
    from vitx.export.graph.dataflow import read_onnx
    from vitx.export.graph.outputs import classifier_inputs, embedding_part

    name = bundle.manifest.output.name
    model = read_onnx(bundle.model_path)
    features = classifier_inputs(model, name)
    if len(features) > 1:
        raise InputError(
            f"the logits of '{bundle.manifest.name}' are of {len(features)} classifiers: export it again with --output "
            "embedding"
        )
    kind = _element_type(bundle, model, features[0])
    where = device if runtime == "onnxruntime" else cast(Device, runtime.removeprefix("onnxruntime-"))
    images = np.random.default_rng(0).integers(0, 256, (PROBES, *image_shape(bundle)), dtype=np.uint8)
    from vitx.runtimes.onnxruntime import OnnxRuntimeSession

    with OnnxRuntimeSession(bundle, device=where, threads=threads) as plain:
        expected = plain.infer(images)
    part = embedding_part(features, None)
    session = OnnxRuntimeSession(bundle, device=where, threads=threads, outputs=("embedding",), parts=(part,))
    try:
        found = session.infer_outputs(images)
        again = _classified(classifier(model, features[0], kind, name), found["embedding"], kind)
        allowed = allowed_logit_error(bundle.manifest.precision, float(expected.std()))
        for what, logits in (("with this output", found[LOGITS]), ("from the features alone", again)):
            error = float(np.abs(logits - expected).max())
            if not error <= allowed:
                raise CheckFailed(
                    f"the logits of '{bundle.manifest.name}' {what} differ by {error:.3g}, allowed {allowed:.3g}: its "
                    "features cannot be had without changing its predictions"
                )
    except BaseException:
        session.close()
        raise
    return session


def classifier(model: "onnx.ModelProto", features: str, kind: int, logits: str) -> "onnx.ModelProto":
    """The part of a graph from `features`, of element type `kind`, to `logits`, as a graph of its own."""
    import onnx

    needed: set[str] = {logits}
    nodes: list[onnx.NodeProto] = []
    for node in reversed(model.graph.node):
        if needed & set(node.output) and features not in node.output:
            needed |= set(node.input)
            nodes.insert(0, node)
    graph = onnx.helper.make_graph(
        nodes,
        "classifier",
        [onnx.helper.make_tensor_value_info(features, kind, None)],
        [onnx.ValueInfoProto(name=logits)],
        [tensor for tensor in model.graph.initializer if tensor.name in needed],
    )
    return onnx.helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)


def _element_type(bundle: Bundle, model: "onnx.ModelProto", features: str) -> int:
    import onnx

    inferred = onnx.shape_inference.infer_shapes(model).graph
    values = {value.name: value.type.tensor_type for value in (*inferred.value_info, *inferred.input)}
    kind, axes = (values[features].elem_type, len(values[features].shape.dim)) if features in values else (0, 0)
    if kind not in (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16) or axes != 2:
        said = onnx.TensorProto.DataType.Name(kind).lower()
        raise InputError(
            f"the classifier of '{bundle.manifest.name}' takes {said} of {axes} axes: expected float32 or float16 "
            "(N, D)"
        )
    return int(kind)


def _classified(head: "onnx.ModelProto", features: np.ndarray, kind: int) -> np.ndarray:
    import onnx

    from vitx.export.graph.execution import open_session

    runner = open_session(head)
    given = features.astype(onnx.helper.tensor_dtype_to_np_dtype(kind))
    (logits,) = runner.run(None, {head.graph.input[0].name: given})
    return np.asarray(logits)
