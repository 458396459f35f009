"""On how many images overflow is looked for."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from vitx.export.graph.dataflow import Dataflow
from vitx.export.precision.half import HalfGraph
from vitx.export.precision.islands import Overflow


def product_by(factor: float) -> onnx.ModelProto:
    """uint8 (N, 2, 2, 3) as numbers, times a factor."""
    nodes = [
        helper.make_node("Cast", ["images"], ["pixels"], to=TensorProto.FLOAT, name="cast"),
        helper.make_node("Mul", ["pixels", "grow"], ["logits"], name="grow"),
    ]
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("images", TensorProto.UINT8, ["N", 2, 2, 3])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 2, 2, 3])],
        [numpy_helper.from_array(np.array(factor, np.float32), "grow")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


@pytest.mark.parametrize(("factor", "observed"), [(30.0, 16), (40.0, 128)])
def test_values_near_the_end_of_the_type_are_looked_for_on_more_images(factor: float, observed: int) -> None:
    images = np.full((200, 2, 2, 3), 255, np.uint8)
    assert 30 * 255 * 8 < 65504 < 40 * 255 * 8
    graph = product_by(factor)
    found = Overflow(graph, HalfGraph(Dataflow(graph), TensorProto.FLOAT16), images)
    assert (len(found.images), found.nodes) == (observed, [])
