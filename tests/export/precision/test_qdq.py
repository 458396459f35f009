"""Codes, scales, zero points and biases by hand; which nodes are layers; what decides whether a graph is accepted."""

import math
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from vitx.core.errors import CheckFailed, InputError
from vitx.core.preprocess import UInt8Array
from vitx.export.graph.dataflow import Dataflow
from vitx.export.graph.execution import logits_of
from vitx.export.precision.acceptance import Bounds, Judge, SamplingPlan, agreement_of
from vitx.export.precision.calibration import (
    MIN_IMAGES,
    PERCENTILE,
    Activations,
    observe,
    require_images,
    split_images,
)
from vitx.export.precision.lower import lower_precision
from vitx.export.precision.placement import find_layers
from vitx.export.precision.qdq import QuantizedGraph

ROWS = numpy_helper.from_array(np.array([-1, 48]), "rows")
RANGES = {"x": Activations(limit=4.0, largest=2.0, smallest=-1.0), "h": Activations(limit=4.0, largest=3.0)}


def graph_of(nodes: list[onnx.NodeProto], **constants: Any) -> onnx.ModelProto:
    """uint8 (N, 4, 4, 3) → `x` float (N, 48) → `nodes` → `logits`."""
    first = [
        helper.make_node("Cast", ["images"], ["pixels"], to=TensorProto.FLOAT, name="cast"),
        helper.make_node("Reshape", ["pixels", "rows"], ["x"], name="reshape"),
    ]
    values = [numpy_helper.from_array(np.asarray(value, np.float32), name) for name, value in constants.items()]
    graph = helper.make_graph(
        [*first, *nodes],
        "small",
        [helper.make_tensor_value_info("images", TensorProto.UINT8, ["N", 4, 4, 3])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 48])],
        [ROWS, *values],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def weight(*shape: int) -> Any:
    """Every row and every column has a largest entry of its own; one column is zero."""
    values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    values[..., 5] = 0
    return values


def constants(graph: onnx.ModelProto) -> dict[str, Any]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.graph.initializer}


def built(graph: onnx.ModelProto, target: Any = "cpu") -> dict[str, Any]:
    quantized = QuantizedGraph(Dataflow(graph), "int8", target)
    return constants(quantized.build(list(quantized.layers), RANGES, "max"))


@pytest.mark.parametrize(
    ("op_type", "options", "axis"), [("MatMul", {}, 1), ("Gemm", {}, 1), ("Gemm", {"transB": 1}, 0)]
)
def test_codes_of_a_weight_have_one_scale_an_output_channel(op_type: str, options: dict[str, Any], axis: int) -> None:
    w = weight(48, 48)
    found = built(graph_of([helper.make_node(op_type, ["x", "W"], ["logits"], name="product", **options)], W=w))
    largest = np.abs(w).max(axis=1 - axis)
    scale = np.where(largest > 0, largest / 127, 1).astype(np.float32)
    np.testing.assert_allclose(found[f"W/axis{axis}/scale"], scale, rtol=1e-6)
    codes = np.round(w.astype(np.float64) / (scale[:, None] if axis == 0 else scale))
    assert found[f"W/axis{axis}/quantized"].dtype == np.int8
    assert np.abs(found[f"W/axis{axis}/quantized"] - codes).max() <= 1  # a tie may go either way in float32
    assert (found[f"W/axis{axis}/quantized"] == codes).mean() > 0.999
    assert np.array_equal(found[f"W/axis{axis}/zero_point"], np.zeros(48, np.int8))


@pytest.mark.parametrize(
    ("target", "smallest", "scale", "zero_point", "dtype"),
    [
        ("cpu", -1.0, 2 / 127, 128, np.uint8),  # symmetric codes, shifted
        ("cpu", 0.0, 2 / 255, 0, np.uint8),  # never negative: all codes are for positive numbers
        ("tensorrt", -1.0, 2 / 127, 0, np.int8),
        ("tensorrt", 0.0, 2 / 127, 0, np.int8),
    ],
)
def test_scale_and_zero_point_of_an_activation(
    target: Any, smallest: float, scale: float, zero_point: int, dtype: type
) -> None:
    graph = graph_of([helper.make_node("MatMul", ["x", "W"], ["logits"], name="product")], W=weight(48, 48))
    quantized = QuantizedGraph(Dataflow(graph), "int8", target)
    ranges = {"x": Activations(limit=4.0, largest=2.0, smallest=smallest)}
    found = constants(quantized.build(["product"], ranges, "max"))
    assert found["x/scale"] == pytest.approx(scale, rel=1e-6)
    assert (int(found["x/zero_point"]), found["x/zero_point"].dtype) == (zero_point, dtype)


@pytest.mark.parametrize("added", [False, True])
def test_a_bias_is_in_the_unit_of_the_sums(added: bool) -> None:
    w, b = weight(48, 48), np.linspace(-3, 3, 48, dtype=np.float32)
    if added:
        nodes = [
            helper.make_node("MatMul", ["x", "W"], ["h"], name="product"),
            helper.make_node("Add", ["h", "b"], ["logits"], name="add"),
        ]
    else:
        nodes = [helper.make_node("Gemm", ["x", "W", "b"], ["logits"], name="product")]
    found = built(graph_of(nodes, W=w, b=b))
    unit = (2 / 127) * found["W/axis1/scale"].astype(np.float64)
    assert found["b/of product/quantized"].dtype == np.int32
    np.testing.assert_allclose(found["b/of product/scale"], unit, rtol=1e-6)
    np.testing.assert_allclose(found["b/of product/quantized"] * unit, b, atol=0.51 * unit.max())
    # TensorRT reads no int32 Q/DQ.
    assert "b/of product/quantized" not in built(graph_of(nodes, W=w, b=b), "tensorrt")


def test_a_bias_beside_tiny_weights_is_kept() -> None:
    """Their scale is raised to one in which the bias fits int32; the product of the other layer keeps its own."""
    tiny, b = weight(48, 48), np.linspace(-1000, 1000, 48, dtype=np.float32)
    tiny[:, 1] *= 1e-9
    nodes = [
        helper.make_node("Gemm", ["x", "W", "b"], ["logits"], name="product"),
        helper.make_node("MatMul", ["x", "W"], ["other"], name="second"),
    ]
    graph = graph_of(nodes, W=tiny, b=b)
    graph.graph.output.append(helper.make_tensor_value_info("other", TensorProto.FLOAT, ["N", 48]))
    quantized = QuantizedGraph(Dataflow(graph), "int8", "cpu")
    found = constants(quantized.build(["product", "second"], {"x": Activations(127.0, 127.0, -127.0)}, "max"))
    values = found["b/of product/quantized"] * found["b/of product/scale"].astype(np.float64)
    np.testing.assert_allclose(values, b, rtol=1e-3, atol=0.01)
    raised, own = found["W/axis1/scale"], found["W/axis1/again/scale"]
    assert raised[1] >= abs(b[1]) / 2**30 > own[1]
    np.testing.assert_array_equal(np.delete(raised, 1), np.delete(own, 1))
    np.testing.assert_array_equal(found["b/of product/scale"], raised)


@pytest.mark.parametrize("target", ["cpu", "tensorrt"])
@pytest.mark.parametrize("per_tensor", [(), ("first", "second")])
def test_one_weight_of_two_layers_runs_in_8_bits(target: Any, per_tensor: tuple[str, ...]) -> None:
    """Of one set of codes for both ONNX Runtime says "Attempt to replace the existing tensor" without VNNI."""
    nodes = [
        helper.make_node("MatMul", ["x", "W"], ["h"], name="first"),
        helper.make_node("MatMul", ["h", "W"], ["logits"], name="second"),
    ]
    graph, images = graph_of(nodes, W=weight(48, 48)), np.random.default_rng(0).integers(0, 256, (4, 4, 4, 3), np.uint8)
    quantized, expected = QuantizedGraph(Dataflow(graph), "int8", target), logits_of(graph, images)
    built = quantized.build(["first", "second"], observe(graph, ["x", "h"], images), "max", per_tensor)
    assert np.abs(logits_of(built, images) - expected).max() < 0.1 * expected.std()


@pytest.mark.parametrize("name", ["W/axis1", "x/quantized", "x/scale", "W/axis1/zero_point", "W/axis1/dequantized"])
@pytest.mark.parametrize("target", ["cpu", "tensorrt"])
def test_a_graphs_own_names_may_be_any(name: str, target: Any) -> None:
    """Of an activation called `W/axis1` the scale had been that of the weight W, and two nodes made one tensor."""
    nodes = [
        helper.make_node("MatMul", ["x", "W"], [name], name="first"),
        helper.make_node("MatMul", [name, "V"], ["logits"], name="second"),
    ]
    graph, images = graph_of(nodes, W=weight(48, 48), V=weight(48, 48)), np.full((4, 4, 4, 3), 9, np.uint8)
    images[1:] = np.random.default_rng(0).integers(0, 256, (3, 4, 4, 3))
    quantized, expected = QuantizedGraph(Dataflow(graph), "int8", target), logits_of(graph, images)
    built = quantized.build(["first", "second"], observe(graph, ["x", name], images), "max")
    onnx.checker.check_model(built, full_check=True)
    assert np.abs(logits_of(built, images) - expected).max() < 0.1 * expected.std()


NOT_LAYERS: dict[str, tuple[list[onnx.NodeProto], dict[str, Any]]] = {
    "alpha": ([helper.make_node("Gemm", ["x", "W"], ["logits"], name="n", alpha=2.0)], {"W": weight(48, 48)}),
    "beta": (
        [helper.make_node("Gemm", ["x", "W", "b"], ["logits"], name="n", beta=0.5)],
        {"W": weight(48, 48), "b": np.ones(48)},
    ),
    "transA": ([helper.make_node("Gemm", ["x", "W"], ["logits"], name="n", transA=1)], {"W": weight(48, 48)}),
    "a matrix a head": (
        [
            helper.make_node("MatMul", ["x", "W"], ["h"], name="n"),
            helper.make_node("Reshape", ["h", "rows"], ["logits"], name="flatten"),
        ],
        {"W": weight(3, 48, 48)},
    ),
}


@pytest.mark.parametrize("name", NOT_LAYERS)
def test_a_product_of_another_form_is_left_alone(name: str) -> None:
    nodes, values = NOT_LAYERS[name]
    with pytest.raises(InputError, match="nothing in the graph can be int8"):
        find_layers(Dataflow(graph_of(nodes, **values)), "int8", "cpu")


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_graph_whose_only_layer_overflows_the_base_is_refused(kind: Any) -> None:
    graph = graph_of([helper.make_node("MatMul", ["x", "W"], ["logits"], "H")], W=1e4 * weight(48, 48))
    images = np.random.default_rng(0).integers(0, 256, (320, 4, 4, 3), dtype=np.uint8)
    with pytest.raises(InputError, match=f"can be {kind}: all that could be overflows fp16, so it stays in float32"):
        lower_precision(graph, kind, images, target="tensorrt", base="fp16", quiet=True)


def test_a_bias_that_is_not_of_the_product_alone_is_left_alone() -> None:
    product = helper.make_node("MatMul", ["x", "W"], ["h"], name="product")
    w = weight(48, 48)
    read_twice = [
        product,
        helper.make_node("Add", ["h", "b"], ["y"], name="add"),
        helper.make_node("Mul", ["h", "y"], ["logits"], name="mul"),
    ]
    scalar = [product, helper.make_node("Add", ["h", "b"], ["logits"], name="add")]
    other = [product, helper.make_node("Mul", ["h", "b"], ["logits"], name="mul")]
    cases = ((read_twice, np.ones(48)), (scalar, np.ones(1)), (scalar, np.ones((1, 48))), (other, np.ones(48)))
    for nodes, bias in cases:
        (layer,) = find_layers(Dataflow(graph_of(nodes, W=w, b=bias)), "int8", "cpu")
        assert layer.bias is None
    varying = [
        helper.make_node("ReduceMax", ["x", "axis"], ["v"], name="max", keepdims=0),
        product,
        helper.make_node("Add", ["h", "v"], ["logits"], name="add"),
    ]
    graph = graph_of(varying, W=w)
    graph.graph.initializer.append(numpy_helper.from_array(np.array([0]), "axis"))
    assert [layer.bias for layer in find_layers(Dataflow(graph), "int8", "cpu")] == [None], "a row that is no constant"
    (layer,) = find_layers(Dataflow(graph_of(scalar, W=w, b=np.ones(48))), "int8", "cpu")
    assert layer.bias == ("add", "b")


@pytest.mark.parametrize(
    ("opset", "kind", "refused"),
    [(12, "int8", True), (13, "int8", False), (18, "fp8", True), (19, "fp8", False)],
)
def test_an_opset_before_the_types_is_refused(opset: int, kind: Any, refused: bool) -> None:
    graph = graph_of([helper.make_node("MatMul", ["x", "W"], ["logits"], name="product")], W=weight(48, 48))
    graph.opset_import[0].version = opset
    flow = Dataflow(graph)
    if not refused:
        assert len(find_layers(flow, kind, "cpu")) == 1
        return
    with pytest.raises(InputError, match=f"{kind} takes opset .* or newer, the graph has {opset}"):
        find_layers(flow, kind, "cpu")


def activations_of(*values: float) -> Activations:
    found = Activations()
    for value in values:
        found.add(np.array([value], np.float32))
    return found


def test_ranges_are_of_both_signs_and_all_batches() -> None:
    found = activations_of(-3.0, 1.0, -2.0)
    assert (found.largest, found.smallest) == (3.0, -3.0)
    assert activations_of(1.0, 2.0).smallest == 0.0
    assert activations_of(0.0).threshold("max") == 1.0, "any scale codes zeros exactly, but 0 is none"


def test_the_percentile_leaves_out_its_share_and_is_within_the_range() -> None:
    """99,990 values in the first half of the range and 10 at its end: one more is beyond the percentile."""
    for beyond, threshold in ((10, 0.5), (11, 1.0)):
        found = Activations()
        values = np.full(100_000, 0.4999, np.float32)
        values[:beyond] = 1.0
        for part in np.split(values, 10):
            found.add(part)
        assert found.threshold("percentile") == pytest.approx(threshold, abs=1 / 2048)
    assert pytest.approx(0.9999) == PERCENTILE
    assert activations_of(0.5, 0.7).threshold("percentile") <= np.float32(0.7)


@pytest.mark.parametrize(("count", "calibration"), [(320, 256), (400, 256), (512, 256), (600, 300), (601, 301)])
def test_no_image_is_calibrated_on_and_judged(count: int, calibration: int) -> None:
    images = np.arange(count * 3, dtype=np.uint16).astype(np.uint8).reshape(count, 1, 1, 3)
    numbered = np.arange(count).reshape(count, 1, 1, 1)
    ranges, judged = split_images(numbered)  # type: ignore[arg-type]
    assert (len(ranges), len(judged)) == (calibration, count - calibration)
    assert sorted([*ranges.ravel(), *judged.ravel()]) == list(range(count))
    assert len(split_images(images)[0]) == calibration
    require_images(MIN_IMAGES)
    with pytest.raises(InputError, match="319 images to calibrate on"):
        require_images(MIN_IMAGES - 1)


def test_an_agreement_by_hand() -> None:
    expected = np.array([[5, 1], [1, 3], [2, 1], [7, 0]], np.float32)  # mean 2.5, not 0: the spread is not the RMS
    found = np.array([[5, 1], [3, 1], [2, 1.5], [7, 0]], np.float32)
    std = math.sqrt(sum((value - 2.5) ** 2 for value in (5, 1, 1, 3, 2, 1, 7, 0)) / 8)
    agreement = agreement_of(expected, found)
    assert (agreement.images, agreement.flips, agreement.not_finite, agreement.agreement) == (4, 1, 0, 0.75)
    assert agreement.max_error == pytest.approx(2 / std, rel=1e-6)
    assert agreement.mean_error == pytest.approx((2 + 2 + 0.5) / 8 / std, rel=1e-6)


def test_a_row_that_is_not_finite_is_a_flip_and_no_bound_holds() -> None:
    expected = np.tile(np.array([[1, 0]], np.float32), (100, 1))
    found = expected.copy()
    found[3, 0] = np.inf  # the class stays the same
    agreement = agreement_of(expected, found)
    assert (agreement.flips, agreement.not_finite, agreement.flip_rate) == (1, 1, 1.0)
    assert agreement.max_error == agreement.mean_error == math.inf
    assert not agreement.within(Bounds(math.inf, 0.0))
    assert agreement.as_json()["max_error"] == "inf"


@pytest.mark.parametrize(
    ("images", "flips", "within"), [(32, 1, True), (32, 2, False), (100, 1, True), (100, 2, False), (101, 2, True)]
)
def test_the_flips_that_are_allowed_are_rounded_up(images: int, flips: int, within: bool) -> None:
    expected = np.tile(np.array([[8, 0], [0, 8]], np.float32), (images, 1))[:images]
    found = expected.copy()
    found[:flips] = found[:flips, ::-1]
    assert agreement_of(expected, found).within(Bounds(10.0, 0.99)) is within


def test_the_largest_error_may_be_the_bound_and_no_more() -> None:
    expected = np.array([[2, 0], [0, 2]], np.float32)  # a standard deviation of 1
    agreement = agreement_of(expected, expected + np.array([[0.25, 0], [0, 0]], np.float32))
    assert agreement.within(Bounds(0.25))
    assert not agreement.within(Bounds(0.2499))


def test_the_plan_must_be_met_with_four_chances_of_five() -> None:
    """P(X ≤ 1) of a Poisson variable of mean m is (1 + m)·e^(−m): .8 at m = .824."""
    assert SamplingPlan(100, 1).acceptance_probability(0.00824) == pytest.approx(0.8, abs=1e-3)
    assert SamplingPlan(100, 1).acceptance_probability(0.02) == pytest.approx(3 * math.exp(-2), rel=1e-9)
    assert SamplingPlan(100, 2).acceptance_probability(0.02) == pytest.approx(5 * math.exp(-2), rel=1e-9)


def images_of(count: int) -> UInt8Array:
    return np.random.default_rng(1).integers(0, 256, (count, 4, 4, 3), dtype=np.uint8)


def test_accept_is_asked_within_the_bounds_alone() -> None:
    graph = graph_of([helper.make_node("MatMul", ["x", "W"], ["logits"], name="product")], W=weight(48, 48))
    other = graph_of([helper.make_node("MatMul", ["x", "W"], ["logits"], name="product")], W=-weight(48, 48))
    asked: list[onnx.ModelProto] = []

    def refuse(candidate: onnx.ModelProto) -> bool:
        asked.append(candidate)
        return False

    judge = Judge(graph, images_of(8), Bounds(0.5), refuse)
    assert not judge.passes(other, "another")
    assert asked == []
    assert not judge.passes(graph, "itself")
    assert asked == [graph]
    assert [(trial["what"], trial["within_bounds"], trial.get("accepted")) for trial in judge.trials] == [
        ("another", False, None),
        ("itself", True, False),
    ]
    assert Judge(graph, images_of(8), Bounds(0.5)).passes(graph, "itself")
    broken = graph_of([helper.make_node("MatMul", ["x", "W"], ["logits"], name="n")], W=np.full((48, 48), np.nan))
    with pytest.raises(CheckFailed, match="the float32 graph itself gives logits that are not finite"):
        Judge(broken, images_of(8), Bounds(0.5))


def test_a_scale_that_is_rounded_down_gives_no_nan() -> None:
    """Beside float16 the scale of a small channel is a subnormal, of few bits."""
    small = np.linspace(-1, 1, 48, dtype=np.float32)[:, None] * np.geomspace(1e-5, 1e-3, 48, dtype=np.float32)
    graph = graph_of([helper.make_node("MatMul", ["x", "W"], ["logits"], "H")], W=small)
    codes = QuantizedGraph(Dataflow(graph), "fp8", "tensorrt", "fp16").weight("W", 1)["codes"].astype(np.float32)
    assert np.isfinite(codes).all()
    assert np.abs(codes).max() <= 448


@pytest.mark.parametrize("between", ["Relu", "Clip"])
def test_nothing_before_signed_codes_is_rewritten(between: str) -> None:
    """ONNX Runtime takes zero point 0 for the least code, and so dropped the Relu before E4M3, and refused the Clip."""
    rng = np.random.default_rng(0)
    bounds = {} if between == "Relu" else {"low": np.float32(0), "high": np.float32(6)}
    nodes = [
        helper.make_node("MatMul", ["x", "W"], ["h"], "H"),
        helper.make_node(between, ["h", *bounds], ["r"], "R"),
        helper.make_node("MatMul", ["r", "V"], ["logits"], "LOGITS"),
    ]
    weights = {name: rng.normal(0, 0.02, (48, 48)).astype(np.float32) for name in ("W", "V")}
    graph = graph_of(nodes, **weights, **bounds)
    images = rng.integers(0, 256, (16, 4, 4, 3), dtype=np.uint8)
    ranges = {name: Activations(limit=256.0, largest=255.0, smallest=-100.0) for name in ("x", "r")}
    quantized = QuantizedGraph(Dataflow(graph), "fp8", "tensorrt", "fp32")
    found = logits_of(quantized.build(list(quantized.layers), ranges, "max"), images, fused=False)
    exact = logits_of(graph, images)
    assert np.abs(found - exact).max() < 0.3 * exact.std()
