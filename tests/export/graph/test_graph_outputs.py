"""Parts of a graph, computed by ONNX Runtime of maps and features that are given, against their formulas."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from vitx.core.errors import InputError
from vitx.export.graph.execution import open_session
from vitx.export.graph.outputs import attention_part, classifier_inputs, embedding_part, rollout_part

FLOAT, FLOAT16 = TensorProto.FLOAT, TensorProto.FLOAT16
IMAGES, HEADS, PREFIX, PATCHES = 2, 3, 2, 4
KEYS = PREFIX + PATCHES
RNG = np.random.default_rng(0)
Array = npt.NDArray[Any]


def run_part(part: bytes, given: Mapping[str, Array]) -> tuple[onnx.ModelProto, Array]:
    """model.onnx, which gives what it is given, with the part behind it; and what the part gives."""
    kinds = {name: helper.np_dtype_to_tensor_dtype(value.dtype) for name, value in given.items()}
    graph = helper.make_graph(
        [helper.make_node("Identity", [f"{name} given"], [name]) for name in given],
        "given",
        [helper.make_tensor_value_info(f"{name} given", kinds[name], ["N", *given[name].shape[1:]]) for name in given],
        [],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    whole = onnx.ModelProto.FromString(model.SerializeToString() + part)
    (found,) = open_session(whole).run(None, {f"{name} given": value for name, value in given.items()})
    return whole, found


def declared(model: onnx.ModelProto) -> tuple[str, int, list[Any] | None]:
    (output,) = model.graph.output
    kind = output.type.tensor_type
    shape = [dim.dim_param or dim.dim_value for dim in kind.shape.dim] if kind.HasField("shape") else None
    return output.name, kind.elem_type, shape


def features(dtype: Any = np.float32) -> Array:
    return RNG.normal(size=(IMAGES, 5)).astype(dtype)


def maps(blocks: int, dtype: Any = np.float32) -> dict[str, Array]:
    """Attention maps (N, H, K, K), rows of sum 1."""
    found = {}
    for block in range(blocks):
        values = np.exp(RNG.normal(size=(IMAGES, HEADS, KEYS, KEYS)))
        found[f"blocks.{block}.softmax"] = (values / values.sum(-1, keepdims=True)).astype(dtype)
    return found


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_an_embedding_is_the_mean_of_the_features(count: int, dtype: Any) -> None:
    given = {f"features {index}": features(dtype) for index in range(count)}
    model, found = run_part(embedding_part(list(given), 5), given)
    assert declared(model) == ("outputs/embedding", FLOAT, ["N", 5])
    np.testing.assert_allclose(found, np.mean([value.astype(np.float32) for value in given.values()], 0), rtol=1e-6)
    own = model.graph.node[count:]
    made = [*(node.name for node in own), *(name for node in own for name in node.output)]
    assert all(name.startswith("outputs/embedding") for name in made)
    assert all(tensor.name.startswith("outputs/embedding/") for tensor in model.graph.initializer)


@pytest.mark.parametrize("keys", [(), ("weight",), ("bias",), ("weight", "bias")])
def test_the_affine_of_the_last_norm_is_put_back(keys: Sequence[str]) -> None:
    affine = {key: RNG.normal(size=5) for key in keys}
    given = {"a": features(), "b": features()}
    model, found = run_part(embedding_part(["a", "b"], None, affine), given)
    assert declared(model) == ("outputs/embedding", FLOAT, None)
    expected = (given["a"] + given["b"]) / 2 * affine.get("weight", 1) + affine.get("bias", 0)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert {tensor.data_type for tensor in model.graph.initializer} == {FLOAT}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(("start", "stop"), [(0, 1), (1, 2), (PREFIX, KEYS)])
def test_attention_is_the_mean_over_heads_and_queries(start: int, stop: int, dtype: Any) -> None:
    given = maps(1, dtype)
    ((name, value),) = given.items()
    model, found = run_part(attention_part(name, start, stop, PREFIX, PATCHES), given)
    assert declared(model) == ("outputs/attention", FLOAT, ["N", PATCHES])
    expected = value[:, :, start:stop, PREFIX:].astype(np.float32).mean((1, 2))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize(("start", "stop"), [(0, 1), (1, 2), (PREFIX, KEYS)])
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_a_rollout_is_the_product_over_blocks(blocks: int, start: int, stop: int, dtype: Any, short: bool) -> None:
    """`short`: the last block has the queries that are pooled alone, as with the class token only."""
    given = maps(blocks, dtype)
    product = np.eye(KEYS)
    for value in given.values():
        product = (value.astype(np.float64).mean(1) + np.eye(KEYS)) / 2 @ product
    expected = product[:, start:stop, PREFIX:].mean(1)
    last = list(given)[-1]
    if short:
        given[last] = given[last][:, :, :stop]
    model, found = run_part(rollout_part(list(given), start, stop, PREFIX, PATCHES), given)
    assert declared(model) == ("outputs/rollout", FLOAT, ["N", PATCHES])
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def node(op_type: str, inputs: str, output: str) -> onnx.NodeProto:
    return helper.make_node(op_type, inputs.split(), [output])


def classifier(*nodes: onnx.NodeProto) -> onnx.ModelProto:
    """`nodes` with the constants W, b and s, the last of which a node makes of another one."""
    one = numpy_helper.from_array(np.ones(1, np.float32), "one")
    constants = [numpy_helper.from_array(np.ones((5, 3), np.float32), "W"), numpy_helper.from_array(features(), "b")]
    images = helper.make_tensor_value_info("x", FLOAT, ["N", 5])
    made = [node("Constant", "", "s"), node("Neg", "s", "t")]
    made[0].attribute.append(helper.make_attribute("value", one))
    return helper.make_model(helper.make_graph([*made, *nodes], "g", [images], [], constants))


HEADS_OF: dict[str, tuple[list[onnx.NodeProto], tuple[str, ...]]] = {
    "Gemm": ([node("Relu", "x", "f"), node("Gemm", "f W b", "logits")], ("f",)),
    "images themselves": ([node("MatMul", "x W", "logits")], ("x",)),
    "a weight that nodes make": ([node("Mul", "W t", "V"), node("MatMul", "x V", "logits")], ("x",)),
    "an optional input that is left out": (
        [helper.make_node("Gemm", ["x", "W", ""], ["p"]), helper.make_node("Add", ["b", "p"], ["logits"])],
        ("x",),
    ),
    "what follows the product": (
        [
            *(node("MatMul", "x W", "p"), node("Add", "p b", "q"), node("Mul", "t q", "r"), node("Div", "r s", "u")),
            *(node("Cast", "u", "v"), node("Identity", "v", "w"), node("QuantizeLinear", "w s", "y")),
            node("DequantizeLinear", "y s", "logits"),
        ],
        ("x",),
    ),
    "two products": (
        [
            *(node("Relu", "x", "f"), node("MatMul", "x W", "p"), node("Gemm", "f W b", "q")),
            *(node("Add", "p q", "r"), node("Mul", "r t", "logits")),
        ],
        ("x", "f"),
    ),
    "a product before the last": (
        [node("MatMul", "x W", "p"), node("Relu", "p", "f"), node("Gemm", "f W", "logits")],
        ("f",),
    ),
}


@pytest.mark.parametrize(("nodes", "expected"), HEADS_OF.values(), ids=HEADS_OF)
def test_the_features_of_a_classifier(nodes: list[onnx.NodeProto], expected: tuple[str, ...]) -> None:
    assert classifier_inputs(classifier(*nodes), "logits") == expected


OTHERS: dict[str, list[onnx.NodeProto]] = {
    "nothing makes them": [node("MatMul", "x W", "others")],
    "a constant": [node("Add", "s t", "logits")],
    "a product of two tensors": [node("Relu", "x", "f"), node("MatMul", "x f", "logits")],
    "a product of the images and themselves": [node("MatMul", "x x", "logits")],
    "a product of tensors element by element": [
        *(node("MatMul", "x W", "p"), node("MatMul", "x W", "q"), node("Mul", "p q", "logits")),
    ],
    "another operator": [node("MatMul", "x W", "p"), node("Tanh", "p", "logits")],
    "one of two": [node("MatMul", "x W", "p"), node("Tanh", "x", "q"), node("Add", "p q", "logits")],
}


@pytest.mark.parametrize("nodes", OTHERS.values(), ids=OTHERS)
def test_logits_that_come_from_elsewhere_have_no_embeddings(nodes: list[onnx.NodeProto]) -> None:
    with pytest.raises(InputError) as refused:
        classifier_inputs(classifier(*nodes), "logits")
    assert str(refused.value) == (
        "the graph's logits are not matrix products of features (N, D): there are no embeddings of this network"
    )
