"""Which nodes are layers, in which words; every node and constant of a quantised graph, and its arithmetic by hand."""

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from vitx.core.errors import InputError
from vitx.export.graph.dataflow import Dataflow
from vitx.export.graph.execution import logits_of
from vitx.export.precision import placement
from vitx.export.precision.calibration import Activations
from vitx.export.precision.half import cpu_twin
from vitx.export.precision.placement import Layer, find_layers
from vitx.export.precision.qdq import QuantizedGraph, _int_codes, _scale


def graph_of(
    nodes: Sequence[onnx.NodeProto], to: int = TensorProto.FLOAT, opset: int = 20, **constants: Any
) -> onnx.ModelProto:
    """uint8 (N, 4, 4, 3) → `pixels` (N, 4, 4, 3) → `nodes` → `logits` (N, 2)."""
    values = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    graph = helper.make_graph(
        [helper.make_node("Cast", ["images"], ["pixels"], to=to, name="cast"), *nodes],
        "small",
        [helper.make_tensor_value_info("images", TensorProto.UINT8, ["N", 4, 4, 3])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 2])],
        values,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def node(op_type: str, inputs: str, output: str, **attributes: Any) -> onnx.NodeProto:
    """Its name is that of its output in capitals."""
    return helper.make_node(op_type, inputs.split(), [output], name=output.upper(), **attributes)


FLAT = node("Reshape", "pixels rows", "x")
ROWS = np.array([-1, 48])
PLANES = node("Transpose", "pixels", "planes", perm=[0, 3, 1, 2])
W, KERNEL, BIAS = np.ones((48, 2), np.float32), np.ones((2, 3, 4, 4), np.float32), np.ones(2, np.float32)
LAST = node("Flatten", "y", "logits")


@pytest.fixture(autouse=True)
def _small_products_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "MIN_SIDE", 1)


def layers_of(nodes: Sequence[onnx.NodeProto], target: Any = "cpu", kind: Any = "int8", **constants: Any) -> Any:
    try:
        return find_layers(Dataflow(graph_of(nodes, **constants)), kind, target)
    except InputError as error:
        return str(error).partition(" of 1 rows")[0]  # TensorRT's smallest sides, and what stays in the base


NOTHING = "nothing in the graph can be int8: it has no product with a constant weight"


def test_a_gemm_and_a_product_with_a_matrix() -> None:
    gemm = [FLAT, node("Gemm", "x W b", "logits")]
    assert layers_of(gemm, rows=ROWS, W=W, b=BIAS) == [Layer("LOGITS", ("x",), "W", 1, ("LOGITS", "b"), None)]
    turned = [FLAT, node("Gemm", "x W", "logits", transB=1)]
    assert layers_of(turned, rows=ROWS, W=W.T) == [Layer("LOGITS", ("x",), "W", 0, None, None)]
    varying = [FLAT, node("Gemm", "x W", "c"), node("Gemm", "x W c", "logits")]
    assert [layer.bias for layer in layers_of(varying, rows=ROWS, W=W)] == [None, None], "C differs by image"
    product = [FLAT, node("MatMul", "x W", "y"), node("Add", "b y", "logits")]
    for target in ("cpu", "tensorrt"):
        found = layers_of(product, target, rows=ROWS, W=W, b=BIAS)
        assert found == [Layer("Y", ("x",), "W", 1, ("LOGITS", "b"), None)]
    assert layers_of([FLAT, node("MatMul", "x W", "logits")], "cpu", "fp8", rows=ROWS, W=W) == [
        Layer("LOGITS", ("x",), "W", 1, None, None)
    ]


def test_what_is_no_layer() -> None:
    square = np.ones((48, 48), np.float32)
    left = [FLAT, node("Transpose", "x", "t"), node("MatMul", "W t", "h"), node("Transpose", "h", "logits")]
    assert layers_of(left, rows=ROWS, W=W.T) == NOTHING, "the weight is the left operand"
    folded = [FLAT, node("MatMul", "V W", "u"), node("MatMul", "x u", "logits")]
    assert layers_of(folded, rows=ROWS, V=square, W=W) == NOTHING, "a product of constants; the other has no constant"
    double = [FLAT, node("MatMul", "x W", "y"), node("Cast", "y", "logits", to=TensorProto.FLOAT)]
    graph = graph_of(double, TensorProto.DOUBLE, rows=ROWS, W=W.astype(np.float64))
    with pytest.raises(InputError, match=NOTHING):
        find_layers(Dataflow(graph), "int8", "cpu")
    convolution = [PLANES, node("Conv", "planes K", "y"), LAST]
    assert layers_of(convolution, "tensorrt", "fp8", K=KERNEL) == NOTHING.replace("int8", "fp8")
    made = [PLANES, node("Identity", "planes", "K"), node("Conv", "planes K", "y"), LAST]
    assert layers_of(made) == NOTHING, "a kernel that differs by image"
    only = [FLAT, node("Mul", "x f", "y"), node("MatMul", "y W", "logits")]
    assert [layer.node for layer in layers_of(only, rows=ROWS, f=np.float32(2), W=W)] == ["LOGITS"]


def test_a_convolution_and_the_relu_behind_it() -> None:
    plain = [PLANES, node("Conv", "planes K b", "y"), LAST]
    expected = Layer("Y", ("planes",), "K", 0, ("Y", "b"), "y")
    assert layers_of(plain, K=KERNEL, b=BIAS) == [expected]
    assert expected.tensors() == ("planes", "y")
    assert len({expected, expected}) == 1, "a layer does not change and can be a key"
    (on_gpu,) = layers_of(plain, "tensorrt", K=KERNEL, b=BIAS)
    assert on_gpu == Layer("Y", ("planes",), "K", 0, ("Y", "b"), None)
    assert on_gpu.tensors() == ("planes",)
    fused = [PLANES, node("Conv", "planes K", "c"), node("Relu", "c", "y"), LAST]
    assert layers_of(fused, K=KERNEL) == [Layer("C", ("planes",), "K", 0, None, "y")]
    read_twice = [
        *(PLANES, node("Conv", "planes K", "c"), node("Relu", "c", "r")),
        *(node("Add", "r c", "y"), LAST),
    ]
    assert layers_of(read_twice, K=KERNEL) == [Layer("C", ("planes",), "K", 0, None, "c")]


@pytest.mark.parametrize(
    ("left", "right", "target", "found"),
    [
        ([0, 2, 3, 32], [0, 2, 32, 32], "cpu", True),
        ([0, 2, 3, 31], [0, 2, 31, 32], "cpu", False),  # Q·Kᵀ of narrow heads
        ([0, 2, 3, 32], [0, 2, 32, 31], "cpu", False),  # the attention map times narrow V
        ([0, 2, 3, 32], [0, 2, 32, 32], "tensorrt", False),  # no Softmax to fuse it with: test_placement.py
        ([0, 3, 32], [0, 32, 32], "cpu", False),  # no heads
        ([0, 3, 32], [0, 32, 32], "tensorrt", False),
        ([0, 2, 3, 32], [0, 32, 32], "tensorrt", False),
    ],
)
def test_products_of_attention_are_layers_where_heads_are_wide(
    left: list[int], right: list[int], target: Any, found: bool
) -> None:
    """Each operand is the pixels times a constant, (N, 1, 1, 1) broadcast to the shape."""
    shapes = [tuple(shape[1:]) for shape in (left, right)]
    one = node("ReduceMean", "pixels axes", "m", keepdims=1)
    operands = [
        helper.make_node("Reshape", ["m", f"form {name}"], [f"m{name}"], name=f"M{name}") for name in ("q", "k")
    ]
    nodes = [
        *(one, *operands, node("Mul", "mq a", "q"), node("Mul", "mk b", "k"), node("MatMul", "q k", "p")),
        *(node("Flatten", "p", "f"), node("ReduceMean", "f axis", "g", keepdims=1), node("Mul", "g two", "logits")),
    ]
    constants: dict[str, Any] = {
        "axes": np.array([1, 2, 3]),
        "axis": np.array([1]),
        "two": BIAS,
        **{f"form {name}": np.array([-1, *[1] * len(shape)]) for name, shape in zip("qk", shapes, strict=True)},
        **{name: np.ones((1, *shape), np.float32) for name, shape in zip("ab", shapes, strict=True)},
    }
    expected = [Layer("P", ("q", "k"), None, 0, None, None)]
    assert layers_of(nodes, target, **constants) == (expected if found else NOTHING)


def test_a_width_that_is_not_known_is_taken_for_a_wide_one() -> None:
    """Q·Kᵀ of (N, 3, 4, ?) and its transpose: the shape comes from the data."""
    nodes = [
        node("Transpose", "pixels", "planes", perm=[0, 3, 1, 2]),
        node("Reshape", "planes shape", "q"),
        node("Transpose", "q", "k", perm=[0, 1, 3, 2]),
        node("MatMul", "q k", "p"),
        *(node("Flatten", "p", "f"), node("ReduceMean", "f axis", "g", keepdims=1), node("Mul", "g two", "logits")),
    ]
    graph = graph_of(nodes, axis=np.array([1]), two=BIAS)
    graph.graph.node.insert(0, node("Mul", "four ones", "shape"))
    graph.graph.initializer.extend(
        [
            numpy_helper.from_array(np.array([0, 3, 4, -1]), "four"),
            numpy_helper.from_array(np.array([1, 1, 1, 1]), "ones"),
        ]
    )
    flow = Dataflow(graph)
    flow.shapes["q"] = flow.shapes["k"] = (None, 3, 4, None)
    (layer,) = find_layers(flow, "int8", "cpu")
    assert layer.activations == ("q", "k")
    flow.shapes["k"] = (None, 3, None, 4)
    with pytest.raises(InputError, match=NOTHING):
        find_layers(flow, "int8", "cpu")
    del flow.shapes["q"]  # nothing was inferred
    with pytest.raises(InputError, match=NOTHING):
        find_layers(flow, "int8", "tensorrt")


@pytest.mark.parametrize(
    ("largest", "kind", "scale"),
    [
        (254.0, "int8", 2.0),
        (896.0, "fp8", 2.0),
        (0.0, "int8", 1.0),
        (0.0, "fp8", 1.0),
        (0.5, "int8", 0.5 / 127),
        (1e-35, "int8", 1e-30),  # a float32 whose reciprocal is finite
        (1e-26, "fp8", 1e-26 / 448),
    ],
)
def test_the_largest_value_is_given_the_largest_code(largest: float, kind: Any, scale: float) -> None:
    found: Any = _scale(largest, kind)
    assert (found.dtype, found.shape) == (np.float32, ())
    assert float(found) == pytest.approx(scale, rel=1e-6)
    assert _scale(np.array([largest, 127.0]), "int8").tolist()[1] == 1.0


def test_codes_are_rounded_to_even_and_saturate_on_both_sides() -> None:
    values = np.array([0.5, 1.5, 2.5, -0.5, -1.5, 126.6, 127.6, 300.0, -127.4, -128.0, -300.0])
    found = _int_codes(values, 127)
    assert found.dtype == np.int8
    assert found.tolist() == [0, 2, 2, 0, -2, 127, 127, 127, -127, -127, -127]
    wide: Any = _int_codes(np.array([3e9, -3e9, 2147483646.4]), 2**31 - 1, np.int32)
    assert (wide.dtype, wide.tolist()) == (np.int32, [2**31 - 1, 1 - 2**31, 2**31 - 2])


def test_a_weights_codes_are_computed_once_for_each_axis() -> None:
    w = np.array([[1.0, -8.0], [4.0, 2.0]], np.float32).repeat(24, axis=0)
    quantized = QuantizedGraph(
        Dataflow(graph_of([FLAT, node("MatMul", "x W", "logits")], rows=ROWS, W=w)), "fp8", "cpu"
    )
    first = quantized.weight("W", 1)
    assert quantized.weight("W", 1) is first
    assert quantized.weight("W", 0) is not first
    np.testing.assert_array_equal(first["scale"], np.array([4, 8], np.float32) / np.float32(448))
    assert first["codes"].dtype == ml_dtypes.float8_e4m3fn
    np.testing.assert_array_equal(first["codes"][[0, 24]].astype(np.float64), [[112, -448], [448, 112]])
    by_row = quantized.weight("W", 0)["codes"][[0, 24]].astype(np.float64)
    np.testing.assert_array_equal(by_row, [[56, -448], [448, 224]])  # 1/8 and 2/4 of 448


def nodes_of(graph: onnx.ModelProto) -> list[tuple[str, list[str], str]]:
    return [(each.op_type, list(each.input), each.output[0]) for each in graph.graph.node]


def qdq(name: str) -> list[tuple[str, list[str], str]]:
    parameters = [f"{name}/scale", f"{name}/zero_point"]
    return [
        ("QuantizeLinear", [name, *parameters], f"{name}/quantized"),
        ("DequantizeLinear", [f"{name}/quantized", *parameters], f"{name}/dequantized"),
    ]


def of_constant(tag: str) -> tuple[str, list[str], str]:
    return ("DequantizeLinear", [f"{tag}/quantized", f"{tag}/scale", f"{tag}/zero_point"], f"{tag}/dequantized")


# Two layers that read `x`, one weight read along both axes, a convolution with its Relu, read twice.
TWO_PRODUCTS = [
    *(FLAT, node("MatMul", "x V", "h"), node("Add", "h c", "s"), node("Gemm", "x V", "g")),
    *(node("Sub", "s g", "d"), node("Gemm", "d W b", "logits", transB=1)),
]


def two_products() -> tuple[onnx.ModelProto, dict[str, Any], dict[str, Activations]]:
    rng = np.random.default_rng(0)
    constants: dict[str, Any] = {
        "V": rng.normal(size=(48, 48)).astype(np.float32),
        "W": rng.normal(size=(2, 48)).astype(np.float32),
        "b": np.array([300, -700], np.float32),
        "c": rng.normal(0, 90, 48).astype(np.float32),
    }
    ranges = {"x": Activations(255.0, 255.0, 0.0), "d": Activations(1000.0, 900.0, -900.0)}
    return graph_of(TWO_PRODUCTS, rows=ROWS, **constants), constants, ranges


@pytest.mark.parametrize("target", ["cpu", "tensorrt"])
def test_every_node_of_a_quantised_graph(target: Any) -> None:
    graph, _, ranges = two_products()
    built = QuantizedGraph(Dataflow(graph), "int8", target).build(["G", "LOGITS", "H"], ranges, "max")
    onnx.checker.check_model(built, full_check=True)
    biases = target == "cpu"
    first = [of_constant(tag) for tag in ("V/axis1", "V/axis1/again", "W/axis0")]
    if biases:
        first = [of_constant(tag) for tag in ("V/axis1", "c/of H", "V/axis1/again", "W/axis0", "b/of LOGITS")]
    assert nodes_of(built) == [
        *first,
        ("Cast", ["images"], "pixels"),
        ("Reshape", ["pixels", "rows"], "x"),
        *qdq("x"),
        ("MatMul", ["x/dequantized", "V/axis1/dequantized"], "h"),
        ("Add", ["h", "c/of H/dequantized" if biases else "c"], "s"),
        ("Gemm", ["x/dequantized", "V/axis1/again/dequantized"], "g"),
        ("Sub", ["s", "g"], "d"),
        *qdq("d"),
        ("Gemm", ["d/dequantized", "W/axis0/dequantized", "b/of LOGITS/dequantized" if biases else "b"], "logits"),
    ]
    names = {each.output[0]: each.name for each in built.graph.node}
    assert names["x/quantized"] == "quantize x"
    assert names["x/dequantized"] == "dequantize x"
    assert names["V/axis1/dequantized"] == "dequantize V/axis1"
    axes = {each.output[0]: [a.i for a in each.attribute] for each in built.graph.node if "/deq" in each.output[0]}
    of_biases = {"c/of H/dequantized": [0], "b/of LOGITS/dequantized": [0]} if biases else {}
    activations: dict[str, list[int]] = {"x/dequantized": [], "d/dequantized": []}
    of_weights = {"V/axis1/dequantized": [1], "V/axis1/again/dequantized": [1], "W/axis0/dequantized": [0]}
    assert axes == {**of_weights, **activations, **of_biases}
    held = {tensor.name: numpy_helper.to_array(tensor) for tensor in built.graph.initializer}
    tags = [tag.partition("/deq")[0] for _, _, tag in first]
    assert held.keys() == {
        *{"rows", *(() if biases else ("b", "c"))},
        *(f"{tag}/{part}" for tag in tags for part in ("quantized", "scale", "zero_point")),
        *(f"{tag}/{part}" for tag in ("x", "d") for part in ("scale", "zero_point")),
    }
    for tag in tags:
        codes, scale, zero_point = (held[f"{tag}/{part}"] for part in ("quantized", "scale", "zero_point"))
        assert (zero_point.dtype, zero_point.shape, zero_point.any()) == (codes.dtype, scale.shape, np.False_)


def test_the_arithmetic_of_a_quantised_graph() -> None:
    """ONNX Runtime runs Q and DQ as they stand; here the same in float64."""
    graph, constants, ranges = two_products()
    images = np.random.default_rng(1).integers(0, 256, (16, 4, 4, 3), dtype=np.uint8)
    built = QuantizedGraph(Dataflow(graph), "int8", "tensorrt").build(["H", "G", "LOGITS"], ranges, "max")

    def rounded(values: Any, largest: Any) -> Any:
        scale = np.float32(largest) / np.float32(127)
        return np.clip(np.rint(values / scale), -128, 127) * scale.astype(np.float64)

    x = rounded(images.reshape(-1, 48), 255.0)
    v, w = constants["V"], constants["W"]
    v, w = rounded(v, np.abs(v).max(axis=0)), rounded(w, np.abs(w).max(axis=1, keepdims=True))
    d = rounded(x @ v + constants["c"] - x @ v, 900.0)
    expected = d @ w.T + constants["b"]
    np.testing.assert_allclose(logits_of(built, images, fused=False), expected, rtol=1e-5, atol=1e-2)


def test_only_the_chosen_layers_are_quantised() -> None:
    graph, _, ranges = two_products()
    quantized = QuantizedGraph(Dataflow(graph), "int8", "cpu")
    found = nodes_of(quantized.build(["LOGITS"], ranges, "max"))
    assert [name for kind, _, name in found if kind == "QuantizeLinear"] == ["d/quantized"]
    assert ("MatMul", ["x", "V"], "h") in found
    assert nodes_of(quantized.build([], ranges, "max")) == nodes_of(graph)
    with pytest.raises(KeyError, match="x"):
        quantized.build(["H"], {}, "max")


def test_all_readers_of_a_convolutions_result_read_its_codes() -> None:
    nodes = [
        *(PLANES, node("Conv", "planes K b", "c"), node("Relu", "c", "r")),
        *(node("Mul", "r r", "m"), node("Add", "m r", "y"), LAST),
    ]
    graph = graph_of(nodes, K=KERNEL, b=BIAS)
    ranges = {"planes": Activations(255.0, 255.0, 0.0), "r": Activations(9.0, 9.0, 0.0)}
    built = QuantizedGraph(Dataflow(graph), "int8", "cpu").build(["C"], ranges, "max")
    assert nodes_of(built) == [
        *(of_constant("K/axis0"), of_constant("b/of C")),
        ("Cast", ["images"], "pixels"),
        ("Transpose", ["pixels"], "planes"),
        *qdq("planes"),
        ("Conv", ["planes/dequantized", "K/axis0/dequantized", "b/of C/dequantized"], "c"),
        ("Relu", ["c"], "r"),
        *qdq("r"),
        ("Mul", ["r/dequantized", "r/dequantized"], "m"),
        ("Add", ["m", "r/dequantized"], "y"),
        ("Flatten", ["y"], "logits"),
    ]


def test_an_input_of_the_graph_may_be_an_activation() -> None:
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "W"], ["logits"], name="product")],
        "direct",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 48])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["N", 2])],
        [numpy_helper.from_array(W, "W")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    built = QuantizedGraph(Dataflow(model), "int8", "cpu").build(["product"], {"x": Activations(1.0, 1.0)}, "max")
    assert nodes_of(built) == [
        of_constant("W/axis1"),
        *qdq("x"),
        ("MatMul", ["x/dequantized", "W/axis1/dequantized"], "logits"),
    ]


@pytest.mark.parametrize("bias", [[300.0], [[300.0, -700.0]], 300.0])
def test_a_bias_may_be_broadcast(bias: Any) -> None:
    """Gemm adds a C of one row or one number, whatever its axes."""
    given = np.asarray(bias, np.float32)
    graph = graph_of([FLAT, node("Gemm", "x W b", "logits")], rows=ROWS, W=W, b=given)
    built = QuantizedGraph(Dataflow(graph), "int8", "cpu").build(
        ["LOGITS"], {"x": Activations(127.0, 127.0, -127.0)}, "max"
    )
    onnx.checker.check_model(built, full_check=True)
    held = {tensor.name: numpy_helper.to_array(tensor) for tensor in built.graph.initializer}
    found = held["b/of LOGITS/quantized"] * held["b/of LOGITS/scale"]
    np.testing.assert_allclose(found, np.broadcast_to(given.reshape(-1), 2), atol=1 / 127)


def test_both_operands_of_an_attention_product_are_quantised(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [
        *(PLANES, node("Transpose", "planes", "turned", perm=[0, 1, 3, 2]), node("MatMul", "planes turned", "y")),
        *(LAST, node("MatMul", "turned turned", "z"), node("Flatten", "z", "other")),
    ]
    graph = graph_of(nodes)
    graph.graph.output.append(helper.make_tensor_value_info("other", TensorProto.FLOAT, ["N", 48]))
    graph.graph.output[0].type.tensor_type.shape.dim[1].dim_value = 48
    ranges = {"planes": Activations(255.0, 255.0, 0.0), "turned": Activations(254.0, 254.0, 0.0)}
    monkeypatch.setattr(placement, "MIN_HEAD_WIDTH", 1)
    built = QuantizedGraph(Dataflow(graph), "int8", "cpu").build(["Y", "Z"], ranges, "max")
    assert nodes_of(built) == [
        *(("Cast", ["images"], "pixels"), ("Transpose", ["pixels"], "planes"), *qdq("planes")),
        *(("Transpose", ["planes"], "turned"), *qdq("turned")),
        ("MatMul", ["planes/dequantized", "turned/dequantized"], "y"),
        ("Flatten", ["y"], "logits"),
        ("MatMul", ["turned/dequantized", "turned/dequantized"], "z"),
        ("Flatten", ["z"], "other"),
    ]


def test_fp8_activations_have_all_of_e4m3_and_biases_stay() -> None:
    graph, _, ranges = two_products()
    built = QuantizedGraph(Dataflow(graph), "fp8", "cpu").build(["H", "LOGITS"], ranges, "max")
    held = {tensor.name: tensor for tensor in built.graph.initializer}
    assert numpy_helper.to_array(held["x/scale"]) == np.float32(255) / np.float32(448)
    assert numpy_helper.to_array(held["d/scale"]) == np.float32(900) / np.float32(448)
    for tag in ("x/zero_point", "V/axis1/quantized", "V/axis1/zero_point"):
        assert held[tag].data_type == TensorProto.FLOAT8E4M3FN, tag
    assert list(held["x/zero_point"].dims) == []
    assert {"b", "c"} <= held.keys()


def test_the_method_chooses_the_range() -> None:
    graph, _, _ = two_products()
    counts = np.zeros(2048, np.int64)
    counts[[100, 2047]] = 99_999, 1
    found = {"x": Activations(255.0, 255.0, 0.0, 0, counts)}
    quantized = QuantizedGraph(Dataflow(graph), "int8", "tensorrt")
    for method, threshold in (("max", 255.0), ("percentile", 101 * 255 / 2048)):
        built = quantized.build(["H"], found, method)  # type: ignore[arg-type]
        held = {tensor.name: numpy_helper.to_array(tensor) for tensor in built.graph.initializer}
        assert float(held["x/scale"]) == pytest.approx(threshold / 127, rel=1e-6)


@pytest.mark.parametrize(("base", "dtype"), [("fp16", np.float16), ("bf16", ml_dtypes.bfloat16)])
def test_beside_eight_bits_is_a_half_type(base: Any, dtype: Any) -> None:
    graph, constants, ranges = two_products()
    quantized = QuantizedGraph(Dataflow(graph), "int8", "tensorrt", base)
    built = quantized.build(["H", "LOGITS"], ranges, "max")
    onnx.checker.check_model(built, full_check=True)
    flow = Dataflow(built)
    floats = {name for node in flow.nodes for name in node.output if flow.types[name] == TensorProto.FLOAT}
    assert floats == {"logits"}, "the contract's type, after a cast"
    held = {tensor.name: numpy_helper.to_array(tensor) for tensor in built.graph.initializer}
    scale = held["V/axis1/scale/half"]
    exact = np.abs(constants["V"]).max(axis=0) / 127
    np.testing.assert_array_equal(scale, exact.astype(np.float32).astype(dtype))
    # Codes are of the scale that is in the graph, not of the one before it was rounded.
    codes = np.clip(np.rint(constants["V"] / scale.astype(np.float32)), -127, 127)
    np.testing.assert_array_equal(held["V/axis1/quantized"], codes)
    assert not any(name.startswith("b/of") for name in held), "biases are of the base"


def test_the_twin_of_eight_bits_beside_a_half_type() -> None:
    """Codes are multiplied as they are; what a product writes, and every sum, is rounded to float16."""
    graph, constants, ranges = two_products()
    images = np.random.default_rng(1).integers(0, 256, (16, 4, 4, 3), dtype=np.uint8)
    built = QuantizedGraph(Dataflow(graph), "int8", "tensorrt", "fp16").build(["H", "LOGITS"], ranges, "max")

    def half(values: Any) -> Any:
        return np.asarray(values, np.float32).astype(np.float16).astype(np.float32)

    def rounded(values: Any, largest: Any) -> Any:
        scale = half(np.float32(largest) / np.float32(127))
        return np.clip(np.rint(values / scale), -128, 127) * scale

    pixels = images.reshape(-1, 48).astype(np.float32)
    v, w = constants["V"], constants["W"]
    v8, w8 = rounded(v, np.abs(v).max(axis=0)), rounded(w, np.abs(w).max(axis=1, keepdims=True))
    h = half(rounded(pixels, 255.0) @ v8)
    d = half(half(h + half(constants["c"])) - half(pixels @ half(v)))
    expected = half(rounded(d, 900.0) @ w8.T + half(constants["b"]))
    found = logits_of(cpu_twin(built), images, fused=False)
    # A sum in another order may round to the next float16, and a code to the next.
    assert np.median(np.abs(found - expected)) <= np.spacing(np.float16(np.abs(expected).max()))
    assert np.abs(found - expected).max() < 0.01 * np.abs(expected).max()


def test_a_tiny_range_keeps_a_scale_in_a_half_type() -> None:
    w = np.full((48, 2), 1e-9, np.float32)
    graph = graph_of([FLAT, node("MatMul", "x W", "logits")], rows=ROWS, W=w)
    for base, least in (("fp16", 2.0**-24), ("bf16", 1e-9 / 127)):
        quantized = QuantizedGraph(Dataflow(graph), "int8", "cpu", base)  # type: ignore[arg-type]
        np.testing.assert_allclose(quantized.weight("W", 1)["scale"], least, rtol=0.01)


def test_an_island_of_the_base_is_no_layer() -> None:
    graph, _, ranges = two_products()
    quantized = QuantizedGraph(Dataflow(graph), "int8", "tensorrt", "fp16", ["H"])
    assert list(quantized.layers) == ["G", "LOGITS"]
    built = quantized.build(["G", "LOGITS"], ranges, "max")
    (product,) = [each for each in built.graph.node if each.output[0] == "h"]
    assert list(product.input) == ["x/as float", "V"]
