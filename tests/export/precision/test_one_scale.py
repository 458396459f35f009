"""What is tried with 8 bits: one scale for a weight instead of one for each channel, layers switched, none left out."""

import dataclasses
import itertools
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from vitx.export.graph.dataflow import Dataflow
from vitx.export.graph.execution import logits_of, open_session
from vitx.export.precision import placement, qdq, quantization
from vitx.export.precision.acceptance import Bounds, SamplingPlan
from vitx.export.precision.calibration import MIN_IMAGES, observe, split_images
from vitx.export.precision.lower import lower_precision
from vitx.export.precision.qdq import SWITCHES, QuantizedGraph
from vitx.export.precision.quantization import quantize

LARGE = Bounds(100.0, 0.0)
LAYERS = ["first", "second", "third"]


def three_products() -> onnx.ModelProto:
    """uint8 (N, 2, 2, 3) → three products with 12 × 12 matrices → logits (N, 12)."""
    rng = np.random.default_rng(0)
    nodes = [
        helper.make_node("Cast", ["images"], ["pixels"], to=TensorProto.FLOAT, name="cast"),
        helper.make_node("Flatten", ["pixels"], ["x"], name="flatten"),
        helper.make_node("MatMul", ["x", "A"], ["h"], name="first"),
        helper.make_node("Relu", ["h"], ["r"], name="r"),
        helper.make_node("MatMul", ["r", "B"], ["s"], name="second"),
        helper.make_node("Tanh", ["s"], ["t"], name="t"),
        helper.make_node("MatMul", ["t", "C"], ["logits"], name="third"),
    ]
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("images", TensorProto.UINT8, ["N", 2, 2, 3])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 12])],
        [numpy_helper.from_array((rng.normal(size=(12, 12)) / 99).astype(np.float32), name) for name in "ABC"],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


GRAPH = three_products()
IMAGES = np.random.default_rng(1).integers(0, 256, (MIN_IMAGES, 2, 2, 3)).astype(np.uint8)


@pytest.fixture(autouse=True)
def _small_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "MIN_SIDE", 1)


@pytest.mark.parametrize("base", ["fp32", "fp16"])
def test_a_switched_graph_is_that_of_the_layers_switched_on(base: Any) -> None:
    calibration, held_out = split_images(IMAGES)
    ranges = observe(GRAPH, ["r", "t", "x"], calibration)
    quantized = QuantizedGraph(Dataflow(GRAPH), "int8", "tensorrt", base)
    session = open_session(quantized.switched(ranges, "max"), fused=False)
    exact = QuantizedGraph(Dataflow(GRAPH), "int8", "tensorrt")
    exact.scale = quantized.scale  # type: ignore[method-assign]
    for on in itertools.product([False, True], repeat=3):
        (found,) = session.run(None, {"images": held_out, SWITCHES: np.array(on)})
        chosen = [name for name, switch in zip(LAYERS, on, strict=True) if switch]
        graph = exact.build(chosen, ranges, "max") if chosen else GRAPH
        np.testing.assert_allclose(found, logits_of(graph, held_out, fused=False), rtol=1e-5, atol=1e-5)


def gaining_by_one_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer gains by one scale for its weight, whatever it computes."""
    found = placement.find_layers
    monkeypatch.setattr(
        qdq, "find_layers", lambda *given: [dataclasses.replace(layer, one_scale=True) for layer in found(*given)]
    )


def test_one_scale_for_each_weight_is_tried_first(monkeypatch: pytest.MonkeyPatch) -> None:
    gaining_by_one_scale(monkeypatch)
    lowered = quantize(GRAPH, "int8", IMAGES, target="tensorrt", bounds=LARGE, quiet=True)
    assert sorted(lowered.details["weights_with_one_scale"]) == LAYERS
    assert [trial["what"] for trial in lowered.details["trials"]] == ["0 layers in float32, 3 weights with one scale"]
    scales = {tensor.name: tensor.dims for tensor in lowered.graph.graph.initializer if tensor.name.endswith("/scale")}
    assert [list(scales[f"{name}/per tensor/scale"]) for name in "ABC"] == [[], [], []]


def test_a_scale_for_each_channel_where_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    gaining_by_one_scale(monkeypatch)
    monkeypatch.setattr(quantization, "SHARES", (2 / 3, 1 / 3))
    answers = iter([False, True, False, True])  # all with one scale, none, two, one
    lowered = quantize(
        GRAPH, "int8", IMAGES, target="tensorrt", bounds=LARGE, accept=lambda _: next(answers), quiet=True
    )
    (coarse,) = lowered.details["weights_with_one_scale"]
    assert [trial["what"] for trial in lowered.details["trials"]] == [
        "0 layers in float32, 3 weights with one scale",
        "0 layers in float32",
        "0 layers in float32, 2 weights with one scale",
        "0 layers in float32, 1 weight with one scale",
    ]
    weights = {"first": "A", "second": "B", "third": "C"}
    names = {tensor.name for tensor in lowered.graph.graph.initializer}
    assert {name for name in names if name.endswith("per tensor/scale")} == {f"{weights[coarse]}/per tensor/scale"}
    assert lowered.islands == ()


def test_the_target_and_the_caller_s_own_check_reach_the_search() -> None:
    lowered = lower_precision(GRAPH, "int8", IMAGES, bounds=LARGE, target="tensorrt", quiet=True)
    assert lowered.details["target"] == "tensorrt"
    planned = Bounds(100.0, 0.0, SamplingPlan(360, 360))
    asked: list[onnx.ModelProto] = []
    lower_precision(GRAPH, "fp8", IMAGES, bounds=planned, accept=lambda graph: not asked.append(graph), quiet=True)  # type: ignore[func-returns-value]
    assert len(asked) == 1
