"""Which products compute in 8 bits in TensorRT: by the sides of the matrix, and by what attention it fuses."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from vitx.core.errors import InputError
from vitx.export.graph.dataflow import Dataflow
from vitx.export.precision.placement import Layer, find_layers


def graph_of(nodes: Sequence[onnx.NodeProto], shape: Sequence[int], **constants: Any) -> onnx.ModelProto:
    """uint8 (N, *shape) → `x` → `nodes` → `y`, whatever its shape."""
    first = helper.make_node("Cast", ["images"], ["x"], to=TensorProto.FLOAT, name="x")
    graph = helper.make_graph(
        [first, *nodes],
        "small",
        [helper.make_tensor_value_info("images", TensorProto.UINT8, ["N", *shape])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", *[None] * len(shape)])],
        [numpy_helper.from_array(np.asarray(value, np.float32), name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def names(graph: onnx.ModelProto, kind: Any, target: Any = "tensorrt", base: Any = "fp16") -> list[str]:
    try:
        return [layer.node for layer in find_layers(Dataflow(graph), kind, target, base)]
    except InputError:
        return []


def node(op_type: str, inputs: str, output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op_type, inputs.split(), [output], name=output, **attributes)


@pytest.mark.parametrize(("rows", "columns", "found"), [(16, 16, True), (15, 16, False), (16, 15, False)])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_matrix_has_sixteen_rows_and_columns(rows: int, columns: int, found: bool, kind: str) -> None:
    product = graph_of([node("MatMul", "x W", "y")], [4, rows], W=np.ones((rows, columns)))
    assert names(product, kind) == (["y"] if found else [])
    assert names(product, kind, "cpu", "fp32") == ["y"], "ONNX Runtime has kernels for all"


@pytest.mark.parametrize(
    ("kind", "base", "stay"),
    [("int8", "fp16", "fp16 (--base fp32 quantises them)"), ("fp8", "fp16", "fp16"), ("fp8", "fp32", "fp32")],
)
def test_convolutions_that_stay_in_the_base_are_a_reason(kind: Any, base: Any, stay: str) -> None:
    graph = graph_of([node("Conv", "x W", "y")], [3, 8, 8], W=np.ones((16, 3, 3, 3)))
    with pytest.raises(InputError) as error:
        find_layers(Dataflow(graph), kind, "tensorrt", base)
    assert str(error.value) == (
        f"nothing in the graph can be {kind}: it has no product with a constant weight of 16 rows and columns or more, "
        f"and convolutions stay in {stay}"
    )
    assert names(graph, "int8", base="fp32") == ["y"]


def attention(heads: int, tokens: int, width: int, *between: onnx.NodeProto, **constants: Any) -> onnx.ModelProto:
    """Q·Kᵀ of one tensor with itself, `between` (from `scores` to `before`, from `maps` to `mixed`), and the values."""
    nodes = [node("Transpose", "x", "k", perm=[0, 1, 3, 2]), node("MatMul", "x k", "scores"), *between]
    return graph_of([*nodes, node("MatMul", "mixed x", "y")], [heads, tokens, width], **constants)


PLAIN = [node("Softmax", "scores", "mixed", axis=-1)]


@pytest.mark.parametrize(
    ("tokens", "width", "int8", "fp8"),
    [
        (512, 64, True, True),
        (513, 64, False, True),
        (32, 64, True, True),
        (31, 64, True, False),
        *((65, width, True, True) for width in (16, 32, 64)),
        *((65, width, False, True) for width in (24, 33, 48, 128, 256)),
        (65, 8, False, False),
        (65, 257, False, False),
    ],
)
def test_attention_is_quantised_where_it_is_fused(tokens: int, width: int, int8: bool, fp8: bool) -> None:
    graph = attention(3, tokens, width, *PLAIN)
    assert names(graph, "int8") == (["scores", "y"] if int8 else [])
    assert names(graph, "fp8") == (["scores", "y"] if fp8 else [])


SCALE = np.float32(0.125)
MIX = np.eye(3)


@pytest.mark.parametrize(
    ("between", "found"),
    [
        ([node("Mul", "scores f", "s"), node("Add", "s b", "t"), node("Softmax", "t", "mixed", axis=-1)], True),
        ([node("Div", "scores f", "s"), node("Softmax", "s", "mixed", axis=-1)], True),
        ([node("Mul", "f scores", "s"), node("Softmax", "s", "mixed", axis=-1)], True),
        # Talking heads: the maps of all heads are mixed after the Softmax, or scores before it, scaled twice by a mix.
        ([node("Softmax", "scores", "maps", axis=-1), node("Mul", "maps f", "mixed")], False),
        ([node("Sub", "scores f", "s"), node("Softmax", "s", "mixed", axis=-1)], False),
        ([node("Mul", "scores f", "s"), node("Mul", "s f", "t"), node("Softmax", "t", "mixed", axis=-1)], False),
        ([node("Relu", "scores", "mixed")], False),
    ],
)
def test_what_may_stand_between_the_products(between: list[onnx.NodeProto], found: bool) -> None:
    graph = attention(3, 65, 32, *between, f=SCALE, b=np.zeros((1, 1, 65, 65)))
    for kind in ("int8", "fp8"):
        assert names(graph, kind) == (["scores", "y"] if found else [])
    assert names(graph, "int8", "cpu", "fp32") == ["scores", "y"], "a CPU fuses nothing"


def test_a_bias_breaks_int8_attention_beside_bfloat16() -> None:
    """As BEiT and Swin have: in such plans TensorRT runs each product alone (test_fused_layers.py)."""
    between = [node("Add", "scores b", "s"), node("Softmax", "s", "mixed", axis=-1)]
    graph = attention(3, 65, 32, *between, b=np.zeros((1, 3, 65, 65)))
    assert names(graph, "int8", base="bf16") == []
    assert names(graph, "int8", base="fp32") == names(graph, "fp8", base="bf16") == ["scores", "y"]
    assert names(attention(3, 65, 32, *PLAIN), "int8", base="bf16") == ["scores", "y"]


def test_maps_that_another_node_reads_are_not_fused() -> None:
    nodes = [*PLAIN, node("Relu", "mixed", "other")]
    graph = attention(3, 65, 32, *nodes)
    graph.graph.output.append(helper.make_tensor_value_info("other", TensorProto.FLOAT, ["N", 3, 65, 65]))
    assert names(graph, "int8") == []


def test_maps_are_the_left_operand() -> None:
    nodes = [node("Transpose", "x", "k", perm=[0, 1, 3, 2]), node("MatMul", "x k", "scores"), *PLAIN]
    turned = graph_of([*nodes, node("MatMul", "k mixed", "y")], [3, 65, 32])
    assert names(turned, "int8") == []


@pytest.mark.parametrize(("target", "base", "found"), [("cpu", "fp16", True), ("tensorrt", "fp32", True)])
def test_a_convolution_is_quantised_but_beside_a_half_type_in_tensorrt(target: str, base: str, found: bool) -> None:
    graph = graph_of([node("Conv", "x K", "y")], [16, 4, 4], K=np.ones((16, 16, 1, 1)))
    assert names(graph, "int8", target, base) == (["y"] if found else [])
    assert names(graph, "int8", "tensorrt", "fp16") == names(graph, "fp8", target, base) == []


@pytest.mark.parametrize(
    ("product", "layer"),
    [
        (node("Gemm", "x W B", "y"), Layer("y", ("x",), "W", 1, ("y", "B"))),
        (node("Gemm", "x W", "y"), Layer("y", ("x",), "W", 1)),
        (node("Gemm", "x W x", "y"), Layer("y", ("x",), "W", 1)),  # what is added is no constant
        (node("Gemm", "x W B", "y", transB=1), Layer("y", ("x",), "W", 0, ("y", "B"))),
        (node("Gemm", "x W B", "y", alpha=0.5), None),
        (node("Gemm", "x W B", "y", beta=0.5), None),
        (node("Gemm", "x W B", "y", alpha=0.5, beta=0.5), None),
        (node("Gemm", "x W B", "y", transA=1), None),
        (node("MatMul", "x W", "y"), Layer("y", ("x",), "W", 1)),
    ],
)
def test_a_product_with_a_matrix(product: onnx.NodeProto, layer: Layer | None) -> None:
    graph = Dataflow(graph_of([product], [16], W=np.ones((16, 16)), B=np.ones(16)))
    if layer is None:
        with pytest.raises(InputError, match="it has no product with a constant weight"):
            find_layers(graph, "int8", "tensorrt")
    else:
        assert find_layers(graph, "int8", "tensorrt") == [layer]


@pytest.mark.parametrize(
    ("added", "shape", "found"),
    [
        ("product B", (16,), True),
        ("B product", (16,), True),
        ("product B", (2,), True),
        ("product B", (1,), False),  # one number for all channels is no bias
        ("product B", (1, 16), False),
        ("product x", (16,), False),
    ],
)
def test_a_bias_is_a_constant_row(added: str, shape: tuple[int, ...], found: bool) -> None:
    columns = shape[-1] if len(shape) == 1 and shape != (1,) else 16
    nodes = [node("MatMul", "x W", "product"), node("Add", added, "y")]
    graph = Dataflow(graph_of(nodes, [16], W=np.ones((16, columns)), B=np.ones(shape)))
    (layer,) = find_layers(graph, "int8", "cpu")
    assert layer == Layer("product", ("x",), "W", 1, ("y", "B") if found else None)


def test_a_row_that_widens_a_product_of_one_channel_is_no_bias() -> None:
    nodes = [node("MatMul", "x W", "product"), node("Add", "product B", "y")]
    graph = Dataflow(graph_of(nodes, [16], W=np.ones((16, 1)), B=np.ones(5)))
    (layer,) = find_layers(graph, "int8", "cpu")
    assert layer.bias is None


@pytest.mark.parametrize(("kind", "target"), [("int8", "cpu"), ("int8", "tensorrt"), ("fp8", "tensorrt")])
@pytest.mark.parametrize(("tokens", "width"), [(65, None), (None, 32), (65, 32)])
def test_attention_of_sides_that_are_not_known(tokens: int | None, width: int | None, kind: Any, target: Any) -> None:
    graph = attention(3, 65, 32, *PLAIN)
    for at, side in ((2, tokens), (3, width)):
        if side is None:
            graph.graph.input[0].type.tensor_type.shape.dim[at].Clear()
    known = None not in (tokens, width)
    assert names(graph, kind, target, "fp32") == (["scores", "y"] if known or target == "cpu" else [])


def test_half_scales_need_their_opset() -> None:
    graph = graph_of([node("MatMul", "x W", "y")], [4, 16], W=np.ones((16, 16)))
    graph.opset_import[0].version = 18
    assert names(graph, "int8", base="fp32") == ["y"]
    with pytest.raises(InputError, match="int8 takes opset 19 or newer, the graph has 18"):
        find_layers(Dataflow(graph), "int8", "tensorrt", "fp16")


def test_what_fused_attention_reads_gains_by_one_scale() -> None:
    nodes = [
        *(node("MatMul", "x Q", "q0"), node("Add", "q0 b", "q1"), node("Mul", "q1 f", "q")),
        *(node("MatMul", "x K", "k0"), node("Transpose", "k0", "k", perm=[0, 1, 3, 2]), node("MatMul", "x V", "v")),
        *(
            node("MatMul", "q k", "scores"),
            *PLAIN,
            node("MatMul", "mixed v", "values"),
            node("MatMul", "values P", "y"),
        ),
    ]
    square = np.ones((32, 32))
    graph = graph_of(nodes, [3, 65, 32], Q=square, K=square, V=square, P=square, b=np.ones(32), f=SCALE)

    def gaining(kind: Any, target: Any) -> list[str]:
        return [layer.node for layer in find_layers(Dataflow(graph), kind, target) if layer.one_scale]

    assert gaining("int8", "tensorrt") == ["q0", "k0", "v"]
    assert gaining("fp8", "tensorrt") == gaining("int8", "cpu") == []
