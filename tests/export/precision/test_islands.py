"""On how many images overflow is looked for, and constants that a half type cannot hold."""

from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from vitx.export.graph.dataflow import Dataflow
from vitx.export.precision.half import HalfGraph
from vitx.export.precision.islands import Overflow
from vitx.export.precision.lower import lower_precision


def graph_of(nodes: Sequence[onnx.NodeProto], **constants: float | np.ndarray) -> onnx.ModelProto:
    """uint8 (N, 2, 2, 3) as numbers `pixels`, from which `nodes` make `result`, of the same shape; logits (N, 12)."""
    first = helper.make_node("Cast", ["images"], ["pixels"], to=TensorProto.FLOAT, name="cast")
    last = helper.make_node("Flatten", ["result"], ["logits"], name="last")
    graph = helper.make_graph(
        [first, *nodes, last],
        "small",
        [helper.make_tensor_value_info("images", TensorProto.UINT8, ["N", 2, 2, 3])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 12])],
        [numpy_helper.from_array(np.array(value, np.float32), name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def product_by(factor: float) -> onnx.ModelProto:
    return graph_of([helper.make_node("Mul", ["pixels", "grow"], ["result"], name="grow")], grow=factor)


@pytest.mark.parametrize(("factor", "observed"), [(30.0, 16), (40.0, 128)])
def test_values_near_the_end_of_the_type_are_looked_for_on_more_images(factor: float, observed: int) -> None:
    images = np.full((200, 2, 2, 3), 255, np.uint8)
    assert 30 * 255 * 8 < 65504 < 40 * 255 * 8
    graph = product_by(factor)
    found = Overflow(graph, HalfGraph(Dataflow(graph), TensorProto.FLOAT16), images)
    assert (len(found.images), found.nodes) == (observed, [])


NOISE = np.random.default_rng(0).integers(0, 256, (32, 2, 2, 3), dtype=np.uint8)


def test_nodes_that_need_a_constant_beyond_the_type_are_islands() -> None:
    """Only the constant is beyond: no tensor is, and in half all would become zero and then not a number."""
    nodes = [
        helper.make_node("Div", ["pixels", "million"], ["tiny"], name="shrink"),
        helper.make_node("Mul", ["tiny", "million"], ["result"], name="grow"),
    ]
    lowered = lower_precision(graph_of(nodes, million=1e6), "fp16", NOISE, quiet=True)
    assert lowered.islands == ("shrink", "grow")
    assert [trial["within_bounds"] for trial in lowered.details["trials"]][:2] == [False, True]


def test_a_mask_that_becomes_infinite_in_half_is_no_island() -> None:
    nodes = [
        helper.make_node("Add", ["pixels", "mask"], ["masked"], name="mask"),
        helper.make_node("Softmax", ["masked"], ["result"], name="softmax"),
    ]
    lowered = lower_precision(graph_of(nodes, mask=np.array([0, 0, -1e9])), "fp16", NOISE, quiet=True)
    assert "mask" not in lowered.islands, "the sum is below all others of its row in half too"
