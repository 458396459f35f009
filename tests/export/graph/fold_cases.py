"""A graph for one fold, and the check that the fold keeps its values."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

from vitx.export.graph import linear_folds as linear
from vitx.export.graph import view_folds as views

Array = npt.NDArray[Any]
RNG = np.random.default_rng(0)


def values(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def graph(
    x: Sequence[Any], nodes: Sequence[onnx.NodeProto], outputs: Sequence[str] = ("y",), **constants: Any
) -> onnx.ModelProto:
    """A graph of float32 `x` (the first dimension 'N' is the batch) with these constants."""
    made = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x)],
        [onnx.ValueInfoProto(name=name) for name in outputs],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    model = helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True)


node = helper.make_node


def run(model: onnx.ModelProto, x: Array) -> list[Array]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    found: list[Array] = session.run(None, {"x": x})
    return found


def beside(first: onnx.ModelProto, second: onnx.ModelProto) -> onnx.ModelProto:
    """One graph of two, each with its own input; the names of the second begin with "other"."""
    return onnx.compose.merge_models(first, onnx.compose.add_prefix(second, "other "), io_map=[])


def folded(model: onnx.ModelProto, fold: Callable[[ir.Graph], int], places: int) -> Counter[str]:
    """The operators after a fold that must apply in so many places and keep the values at three batches.

    Whatever it finds in this graph, it finds in others behind it.
    """
    before = ir.serde.deserialize_model(model)
    assert fold(before.graph) == places
    assert fold(ir.serde.deserialize_model(beside(model, one_place(fold))).graph) == places + 1
    after = ir.serde.serialize_model(before)
    onnx.checker.check_model(after)
    shape = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]
    for batch in (1, 2, 3):
        x = values(shape[0] or batch, *(size or 4 for size in shape[1:]))
        for expected, found in zip(run(model, x), run(after, x), strict=True):
            np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)
    return Counter(each.op_type for each in after.graph.node)


def one_place(fold: Callable[[ir.Graph], int]) -> onnx.ModelProto:
    """A graph in which the fold applies once."""
    sums = [node("Add", ["x", "a"], ["t"]), node("Add", ["t", "a"], ["y"])]
    twice = [node("Transpose", ["x"], ["t"]), node("Transpose", ["t"], ["u"]), node("Neg", ["u"], ["y"])]
    viewed = [node("Reshape", ["x", "s"], ["t"]), node("Relu", ["t"], ["u"]), node("Reshape", ["u", "s"], ["y"])]
    slices = [node("Slice", ["x", "o", "t", "o"], ["s"]), node("Slice", ["s", "o", "t", "t"], ["y"])]
    parts = [node("Split", ["a"], ["b", "c"], num_outputs=2), node("Sum", ["x", "b", "c"], ["y"])]
    shaped = [node("Shape", ["x"], ["s"]), node("Reshape", ["x", "s"], ["y"])]
    gathers = [node("Gather", ["t", "zero"], ["q"]), node("Gather", ["t", "one"], ["k"])]
    pixels = [node("BatchNormalization", ["x", *NORM], ["n"]), node("Conv", ["n", "k"], ["y"])]
    maxima = [node("Pad", ["x", "p", "least"], ["t"]), node("MaxPool", ["t"], ["y"], kernel_shape=[2])]
    largest = [node("ReduceMax", ["x", "o"], ["m"]), node("Expand", ["m", "s"], ["e"]), node("Div", ["x", "e"], ["y"])]
    if fold is linear.split_joint_projections:
        return joint(gathers)
    places: dict[Any, tuple[list[onnx.NodeProto], dict[str, Any]]] = {
        linear.fold_scales: ([*LINEAR, node("Mul", ["l", "c"], ["y"])], {**WEIGHTS, "c": values(4)}),
        linear.linears_as_gemm: ([*LINEAR, node("Neg", ["l"], ["y"])], WEIGHTS),
        linear.join_added_constants: (sums, {"a": values(6)}),
        views.fix_reshape_targets: (shaped, {}),
        linear.fold_norms_ahead: (pixels, {**norm_of(5), "k": values(3, 5, 2)}),
        views.drop_expands: (largest, {"o": [1], "s": [1, 5, 6]}),
        views.drop_empty_pads: ([node("Pad", ["x", "p"], ["t"]), node("Neg", ["t"], ["y"])], {"p": [0] * 6}),
        views.fold_pads_of_maxima: (maxima, {"p": [0, 0, 0, 0, 0, 1], "least": np.float32(-np.inf)}),
        views.split_constants: (parts, {"a": values(2, 1, 1)}),
        views.merge_transposes: (twice, {}),
        views.view_transposes: ([node("Transpose", ["x"], ["y"], perm=[0, 1, 2])], {}),
        views.merge_views: ([node("Reshape", ["x", "s"], ["t"]), node("Neg", ["t"], ["y"])], {"s": [-1, 5, 6]}),
        views.view_after_elementwise: (viewed, {"s": [-1, 30]}),
        views.merge_slices: (slices, {"o": [1], "t": [2]}),
    }
    nodes, constants = places[fold]
    return graph(["N", 5, 6], nodes, **constants)


LINEAR = [node("MatMul", ["x", "w"], ["p"]), node("Add", ["p", "b"], ["l"])]
WEIGHTS: dict[str, Any] = {"w": values(6, 4), "b": values(4)}
NORM = ("gamma", "beta", "mean", "variance")


def norm_of(channels: int) -> dict[str, Any]:
    """The constants of a BatchNormalization."""
    return {name: values(channels) for name in NORM[:3]} | {"variance": np.abs(values(channels))}


def joint(takers: list[onnx.NodeProto], outputs: Sequence[str] = ("q", "k"), **more: Any) -> onnx.ModelProto:
    """(N, 5, 6) · (6, 2·2·3) + b, viewed as (N, 5, 2, 2, 3) and transposed to (2, N, 2, 5, 3)."""
    nodes = [*LINEAR, node("Reshape", ["l", "s"], ["v"]), node("Transpose", ["v"], ["t"], perm=[2, 0, 3, 1, 4])]
    sizes: dict[str, Any] = {
        "s": [-1, 5, 2, 2, 3],
        "zero": np.int64(0),
        "one": np.int64(1),
        "at0": [0],
        "at1": [1],
        "at2": [2],
    }
    return graph(["N", 5, 6], [*nodes, *takers], outputs, w=values(6, 12), b=values(12), **sizes, **more)
