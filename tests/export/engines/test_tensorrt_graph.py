"""The changes of a graph that TensorRT's parser needs keep its values, whatever its tensors are called."""

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import timm
from onnx import TensorProto, helper, numpy_helper

from engines import write_half
from reference import randomize
from vitx.core.errors import InputError
from vitx.export.engines.tensorrt_engine import engine_from_onnx
from vitx.export.engines.tensorrt_graph import cast_before_moving, load_for_tensorrt, precision_of, write_attention_out

FLOAT, FLOAT16, UINT8 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.UINT8
HEADS = np.random.default_rng(0).normal(size=(3, 2, 9, 8)).astype(np.float32)
IMAGES = np.random.default_rng(1).integers(0, 256, (2, 4, 5, 3), dtype=np.uint8)

Sides = Sequence[tuple[str, int, Any]]  # name, type and shape


def model_of(
    nodes: Sequence[onnx.NodeProto], inputs: Sides, outputs: Sides, opsets: Any = (("", 23),), **more: Any
) -> onnx.ModelProto:
    """`more` are constants, and `functions`."""
    functions = more.pop("functions", ())
    constants = [numpy_helper.from_array(np.asarray(value), name) for name, value in more.items()]
    first, last = ([helper.make_tensor_value_info(*side) for side in each] for each in (inputs, outputs))
    graph = helper.make_graph(list(nodes), "g", first, last, constants)
    imports = [helper.make_opsetid(*each) for each in opsets]
    model = helper.make_model(graph, opset_imports=imports, ir_version=11, functions=functions)
    onnx.checker.check_model(model, full_check=True)
    return model


def values_of(model: onnx.ModelProto, **given: Any) -> list[Any]:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, given))


def changed(
    model: onnx.ModelProto, change: Callable[[onnx.ModelProto], int], rtol: float = 0.0, **given: Any
) -> tuple[int, onnx.ModelProto]:
    """In how many places a copy was changed, and the copy, which is valid and has the same values."""
    after = deepcopy(model)
    places = change(after)
    onnx.checker.check_model(after, full_check=True)
    for found, expected in zip(values_of(after, **given), values_of(model, **given), strict=True):
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(found, expected, rtol=rtol, atol=rtol)
    return places, after


def casts_moved(model: onnx.ModelProto) -> int:
    return cast_before_moving(model.graph)


def cast_of_pixels(
    *nodes: onnx.NodeProto, outputs: Sides = (("y", FLOAT, ["N", None, None, None]),), **more: Any
) -> Any:
    """uint8 images → Transpose → `moved` → Cast → `y`, or what `nodes` make of them."""
    first = [
        helper.make_node("Transpose", ["images"], ["moved"], perm=[0, 3, 1, 2]),
        helper.make_node("Cast", ["moved"], ["pixels" if nodes else "y"], to=FLOAT),
    ]
    return model_of([*first, *nodes], [("images", UINT8, ["N", 4, 5, 3])], outputs, **more)


def test_the_cast_goes_before_the_transposition() -> None:
    places, after = changed(cast_of_pixels(), casts_moved, images=IMAGES)
    assert places == 1
    assert [(node.op_type, *node.input, *node.output) for node in after.graph.node] == [
        ("Cast", "images", "images/as float"),
        ("Transpose", "images/as float", "y"),
    ]
    assert [node.attribute[0].ints for node in after.graph.node[1:]] == [[0, 3, 1, 2]]


def test_the_cast_goes_before_all_moves() -> None:
    """Of two moves in a row the second is one of a float tensor once the first is swapped."""
    nodes = [
        helper.make_node("Reshape", ["images", "rows"], ["a"]),
        helper.make_node("Cast", ["a"], ["b"], to=FLOAT16),
        helper.make_node("Transpose", ["images"], ["c"]),
        helper.make_node("Cast", ["c"], ["d"], to=FLOAT),
        helper.make_node("Transpose", ["d"], ["e"]),
    ]
    outputs = (("b", FLOAT16, ["N", 60]), ("e", FLOAT, ["N", 4, 5, 3]))
    model = model_of(nodes, [("images", UINT8, ["N", 4, 5, 3])], outputs, rows=np.array([-1, 60]))
    places, after = changed(model, casts_moved, images=IMAGES)
    assert places == 2
    made = {node.output[0] for node in after.graph.node}
    assert made == {"images/as float16", "images/as float", "b", "d", "e"}


def branches(reader: str) -> dict[str, onnx.GraphProto]:
    result = helper.make_tensor_value_info("r", FLOAT, None)
    cast = helper.make_node("Cast", [reader], ["r"], to=FLOAT)
    side = helper.make_graph([cast], "side", [], [result])
    return {"then_branch": side, "else_branch": side}


@pytest.mark.parametrize(
    ("nodes", "outputs", "more"),
    [
        ([], [("moved", UINT8, ["N", 3, 4, 5]), ("y", FLOAT, ["N", 3, 4, 5])], {}),
        (
            [helper.make_node("Cast", ["moved"], ["z"], to=FLOAT), helper.make_node("Add", ["pixels", "z"], ["y"])],
            [("y", FLOAT, ["N", 3, 4, 5])],
            {},
        ),
        (
            [
                helper.make_node("If", ["flag"], ["z"], **branches("moved")),
                helper.make_node("Add", ["pixels", "z"], ["y"]),
            ],
            [("y", FLOAT, ["N", 3, 4, 5])],
            {"flag": True},
        ),
    ],
    ids=["an output", "two readers", "a branch"],
)
def test_pixels_that_are_needed_in_another_order_stay(nodes: Any, outputs: Sides, more: dict[str, Any]) -> None:
    """The result of the move is an output of the graph, or what a branch reads: it would be gone."""
    assert changed(cast_of_pixels(*nodes, outputs=outputs, **more), casts_moved, images=IMAGES)[0] == 0


def test_the_cast_s_name_is_free() -> None:
    nodes = [
        helper.make_node("Relu", ["pixels"], ["images/as float"]),
        helper.make_node("Sqrt", ["images/as float"], ["y"]),
    ]
    places, after = changed(cast_of_pixels(*nodes), casts_moved, images=IMAGES)
    assert (places, after.graph.node[0].output[0]) == (1, "images/again/as float")


def test_a_traced_graph_of_a_network(tmp_path: Path) -> None:
    network = timm.create_model("deepvit_digits", depth=2, attention=["plain", "re-attention"])
    write_half(randomize(network).eval(), 32, tmp_path / "model.onnx")
    images = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    places, after = changed(onnx.load(str(tmp_path / "model.onnx")), casts_moved, rtol=1e-2, images=images)
    assert places <= 1  # none if the exporter writes it so
    assert precision_of(after) == "fp16"
    assert load_for_tensorrt(tmp_path / "model.onnx") == after


def attention(query: str, key: str, value: str, result: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node("Attention", [query, key, value], [result], name="attn", **attributes)


SIDES: tuple[Sides, Sides] = ((("x", FLOAT, ["N", 2, 9, 8]),), (("y", FLOAT, ["N", 2, 9, 8]),))


def softmax(scores: Any) -> Any:
    maps = np.exp(scores - scores.max(-1, keepdims=True))
    return maps / maps.sum(-1, keepdims=True)


def test_attention_is_written_out(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT for RTX is not installed")
    # As PyTorch writes it, with every default; ONNX, unlike its runtime, does not require that names of nodes differ.
    defaults: dict[str, Any] = {"is_causal": 0, "softcap": 0.0, "qk_matmul_output_mode": 0}
    nodes = [attention("x", "x", "x", "h", **defaults), attention("h", "h", "h", "y", scale=0.7)]
    model = model_of(nodes, *SIDES)
    after = deepcopy(model)
    assert write_attention_out(after) == 2
    onnx.checker.check_model(after, full_check=True)
    first = softmax(HEADS @ HEADS.swapaxes(-1, -2) / math.sqrt(8)) @ HEADS
    expected = softmax(first @ first.swapaxes(-1, -2) * 0.7) @ first
    np.testing.assert_allclose(values_of(after, x=HEADS)[0], expected, atol=1e-6)
    kinds = ["Mul", "Transpose", "MatMul", "Softmax", "MatMul"]
    assert [node.op_type for node in after.graph.node] == 2 * kinds
    names = ("scale_query", "transpose_key", "scores", "softmax", "values")  # told by the parser, and in a plan's table
    assert [node.name for node in after.graph.node] == [f"{made}_{name}" for made in "hy" for name in names]
    onnx.save(model, tmp_path / "a.onnx")
    assert load_for_tensorrt(tmp_path / "a.onnx") == after
    plan = {"flavor": "tensorrt-rtx", "architectures": ("sm89",), "quiet": True}
    engine_from_onnx(tmp_path / "a.onnx", tmp_path / "a.plan", **plan)  # type: ignore[arg-type]


@pytest.mark.parametrize("taken", ["query", "key", "scores", "maps", "scale"])
def test_attention_is_written_out_beside_tensors_of_any_name(taken: str) -> None:
    """A tensor y_q beside an attention y was made twice, and the plan refused."""
    name = f"y/{taken}"
    if taken == "scale":
        nodes = [helper.make_node("Mul", ["x", name], ["h"])]
        more: dict[str, Any] = {name: np.float32(3)}
    else:
        nodes, more = [helper.make_node("Neg", ["x"], [name]), helper.make_node("Add", ["x", name], ["h"])], {}
    places, after = changed(
        model_of([*nodes, attention("h", "x", "x", "y")], *SIDES, **more), write_attention_out, rtol=1e-6, x=HEADS
    )
    assert places == 1
    assert "y/again/scale" in {tensor.name for tensor in after.graph.initializer}


def test_another_operator_called_attention_is_none() -> None:
    """A function of the file's own, or com.microsoft's: it was replaced by softmax(q·kᵀ)·v, whatever it computes."""
    nodes = [helper.make_node("Add", ["a", "b"], ["t"]), helper.make_node("Sub", ["t", "c"], ["o"])]
    function = helper.make_function("mine", "Attention", ["a", "b", "c"], ["o"], nodes, [helper.make_opsetid("", 23)])
    call = helper.make_node("Attention", ["x", "x", "x"], ["y"], domain="mine")
    model = model_of([call], *SIDES, opsets=(("", 23), ("mine", 1)), functions=[function])
    places, after = changed(model, write_attention_out, x=HEADS)
    assert (places, after) == (0, model)


def test_keys_of_one_head_are_all_queries_keys() -> None:
    """Of two heads for four they would be repeated: the products would not fit."""
    inputs: Sides = (("q", FLOAT, ["N", 4, 5, 8]), ("k", FLOAT, ["N", 1, 9, 8]), ("v", FLOAT, ["N", 1, 9, 6]))
    outputs = (("y", FLOAT, ["N", 4, 5, 6]),)
    random = np.random.default_rng(2)
    given = {name: random.normal(size=(3, *shape[1:])).astype(np.float32) for name, _, shape in inputs}
    places, _ = changed(model_of([attention("q", "k", "v", "y")], inputs, outputs), write_attention_out, 1e-6, **given)
    assert places == 1
    grouped = (inputs[0], *((name, kind, ["N", 2, *shape[2:]]) for name, kind, shape in inputs[1:]))
    with pytest.raises(
        InputError, match=r"^node 'attn' is an Attention that vitx cannot write out: .* and one H, no m"
    ):
        write_attention_out(model_of([attention("q", "k", "v", "y")], grouped, outputs))


@pytest.mark.parametrize(
    "node",
    [
        attention("x", "x", "x", "y", is_causal=1),
        attention("x", "x", "x", "y", softcap=2.0),
        helper.make_node("Attention", ["x", "x", "x", "mask"], ["y"], name="attn"),
        helper.make_node("Attention", ["x", "x", "x"], ["y", "", "", "scores"], name="attn"),
    ],
    ids=["causal", "soft cap", "mask", "scores"],
)
def test_attention_that_cannot_be_written_out_is_named(node: onnx.NodeProto) -> None:
    mask: dict[str, Any] = {"mask": np.zeros((9, 9), np.float32)} if len(node.input) == 4 else {}
    with pytest.raises(InputError) as refused:
        write_attention_out(model_of([node], *SIDES, **mask))
    assert str(refused.value) == (
        "node 'attn' is an Attention that vitx cannot write out: expected (B, H, N, d) tensors with a known d and one "
        "H, no mask, no cache; export with attention as MatMul and Softmax"
    )


@pytest.mark.parametrize("shape", [["N", 9, 16], ["N", 2, 9, "d"]])
def test_attention_of_another_shape_is_named(shape: list[Any]) -> None:
    attributes = {"q_num_heads": 2, "kv_num_heads": 2} if len(shape) == 3 else {}
    model = model_of([attention("x", "x", "x", "y", **attributes)], (("x", FLOAT, shape),), (("y", FLOAT, shape),))
    with pytest.raises(InputError, match=r"expected \(B, H, N, d\) tensors with a known d"):
        write_attention_out(model)


def weights(*tensors: onnx.TensorProto) -> onnx.ModelProto:
    return helper.make_model(helper.make_graph([], "g", [], [], tensors))


def test_precision_is_that_of_the_weights() -> None:
    """Most bytes first, also where a tensor's numbers are a list and not bytes."""
    half = numpy_helper.from_array(np.ones((4, 5), np.float16), "a")
    bias = numpy_helper.from_array(np.ones(100, np.float32), "bias")
    small = numpy_helper.from_array(np.ones((3, 3), np.float32), "b")
    assert precision_of(weights(half, small, bias)) == "fp16, fp32"
    listed = helper.make_tensor("b", FLOAT, [3, 4], [1.0] * 12)
    assert precision_of(weights(half, listed, bias)) == "fp32, fp16"
    codes = [helper.make_tensor(f"c{kind}", kind, [7, 9], [0] * 63) for kind in (TensorProto.INT8, TensorProto.UINT8)]
    assert precision_of(weights(half, *codes)) == "int8, fp16"
    lower = helper.make_tensor("d", TensorProto.FLOAT8E4M3FN, [6, 7], [0.0] * 42)
    more = helper.make_tensor("e", TensorProto.BFLOAT16, [3, 7], [0.0] * 21)
    assert precision_of(weights(half, lower, more, more)) == "bf16, fp8, fp16"
    assert precision_of(weights(bias)) == precision_of(weights()) == "none"
