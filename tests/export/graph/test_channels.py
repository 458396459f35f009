"""Factors and norms that are folded into a layer from behind what moves its result, and from before it."""

from collections import Counter
from typing import Any

import numpy as np
import onnx
import pytest

from fold_cases import LINEAR, NORM, folded, graph, node, norm_of, values
from vitx.export.graph.linear_folds import fold_norms_ahead, fold_scales
from vitx.export.graph.view_folds import drop_expands


def view(source: str, result: str, shape: str) -> onnx.NodeProto:
    return node("Reshape", [source, shape], [result])


def norm(source: str, result: str, **attributes: Any) -> onnx.NodeProto:
    return node("BatchNormalization", [source, *NORM], [result], **attributes)


SPLIT = node("Split", ["v", "sizes"], ["q", "k"], axis=-1)
TURNED = node("Transpose", ["v"], ["t"], perm=[0, 2, 1, 3])
SCALED = node("Mul", ["t", "c"], ["y"])


@pytest.mark.parametrize(
    ("behind", "constants"),
    [
        ([view("l", "v", "heads"), node("Mul", ["v", "c"], ["y"])], {"c": values(2, 1)}),
        ([view("l", "v", "heads"), node("Mul", ["v", "c"], ["y"])], {"c": values(2, 3)}),
        ([view("l", "v", "heads"), TURNED, SCALED], {"c": values(2, 1, 1)}),
        ([view("l", "v", "heads"), TURNED, SCALED], {"c": values(1, 2, 1, 3)}),
        ([node("Transpose", ["l"], ["v"], perm=[0, 2, 1]), view("v", "t", "images"), SCALED], {"c": values(6, 1, 1)}),
        ([view("l", "v", "joined"), view("v", "t", "heads"), SCALED], {"c": values(3)}),
        ([view("l", "v", "joined"), view("v", "t", "tokens"), SCALED], {"c": values(6)}),
        ([node("Flatten", ["l"], ["t"], axis=2), SCALED], {"c": values(6)}),
    ],
    ids=[
        *("head", "each", "head behind a transpose", "each behind a transpose", "image", "joined tokens", "and parted"),
        "flattened",
    ],
)
def test_a_factor_is_followed_through_views(behind: list[onnx.NodeProto], constants: dict[str, Any]) -> None:
    sizes: dict[str, Any] = {"heads": [-1, 4, 2, 3], "images": [-1, 6, 2, 2], "joined": [-1, 6], "tokens": [-1, 4, 6]}
    model = graph(["N", 4, 5], [*LINEAR, *behind], w=values(5, 6), b=values(6), **sizes, **constants)
    assert folded(model, fold_scales, 1)["Mul"] == 0


def test_a_factor_of_pixels_goes_into_a_convolution() -> None:
    """XCiT: (N, C, H, W) viewed as (N, C, H·W), transposed to tokens, and LayerScale."""
    tokens = [view("l", "v", "s"), node("Transpose", ["v"], ["t"], perm=[0, 2, 1]), SCALED]
    layer = node("Conv", ["x", "w"], ["l"], pads=[1, 1, 1, 1], group=4)
    model = graph(["N", 4, 3, 2], [layer, *tokens], w=values(4, 1, 3, 3), s=[-1, 4, 6], c=values(4))
    assert folded(model, fold_scales, 1)["Mul"] == 0
    folded(graph(["N", 4, 3, 2], [layer, *tokens], w=values(4, 1, 3, 3), s=[-1, 4, 6], c=values(6, 1)), fold_scales, 0)
    folded(graph(["N", 4, 3, 2], [layer, *tokens], w=values(4, 1, 3, 3), s=[-1, 8, 3], c=values(8)), fold_scales, 0)


@pytest.mark.parametrize(
    ("target", "factor"), [([-1, 2, 2, 6], values(2, 1, 1)), ([-1, 2, 12], values(12)), ([-1, 6, 4], values(6, 1))]
)
def test_a_factor_of_tokens_or_of_channels_and_tokens_stays(target: list[int], factor: Any) -> None:
    nodes = [*LINEAR, view("l", "v", "s"), node("Mul", ["v", "c"], ["y"])]
    folded(graph(["N", 4, 5], nodes, w=values(5, 6), b=values(6), s=target, c=factor), fold_scales, 0)


@pytest.mark.parametrize("factor", [np.float32(0.25), values(1), values(2)], ids=["number", "number (1,)", "each"])
@pytest.mark.parametrize("read", [["y", "k"], ["y"]], ids=["both parts", "one part"])
def test_a_factor_of_one_part_of_the_channels(read: list[str], factor: Any) -> None:
    """Queries (…, 2) and keys (…, 1) of two heads, whose channels are (2, 3): only those of queries are scaled."""
    nodes = [*LINEAR, view("l", "v", "s"), SPLIT, node("Mul", ["q", "c"], ["y"])]
    sizes: dict[str, Any] = {"s": [-1, 4, 2, 3], "sizes": [2, 1]}
    model = graph(["N", 4, 5], nodes, read, w=values(5, 6), b=values(6), **sizes, c=factor)
    assert folded(model, fold_scales, 1)["Mul"] == 0


def test_a_factor_stays_behind_a_part_that_is_read_elsewhere_and_a_split_of_the_batch() -> None:
    nodes = [*LINEAR, view("l", "v", "s"), SPLIT, node("Mul", ["q", "c"], ["y"])]
    constants: dict[str, Any] = {"w": values(5, 6), "b": values(6), "s": [-1, 4, 2, 3], "c": np.float32(0.5)}
    folded(graph(["N", 4, 5], nodes, ["y", "q"], **constants, sizes=[2, 1]), fold_scales, 0)
    folded(graph(["N", 4, 5], nodes, ["y", "v"], **constants, sizes=[2, 1]), fold_scales, 0)
    nodes[3] = node("Split", ["v"], ["q", "k"], axis=0, num_outputs=2)
    model = graph([2, 4, 5], nodes, ["y", "k"], **constants | {"c": values(1, 1, 1, 1)})
    folded(model, fold_scales, 0)  # the parts are images


@pytest.mark.parametrize(
    ("factor", "places"), [(np.float32(0.5), 1), (values(2, 1, 1), 1), (values(4), 0), (values(4, 1), 0)]
)
def test_a_factor_of_scores_goes_into_the_queries(factor: Any, places: int) -> None:
    """Scores of two heads (N, 2, 4, 4): 1/√d, and a temperature for each head; not what varies within a matrix."""
    nodes = [
        *LINEAR,
        view("l", "v", "s"),
        TURNED,
        node("MatMul", ["x", "u"], ["r"]),
        view("r", "k0", "s"),
        node("Transpose", ["k0"], ["k"], perm=[0, 2, 3, 1]),
        node("MatMul", ["t", "k"], ["m"]),
        node("Mul", ["m", "c"], ["y"]),
    ]
    weights: dict[str, Any] = {"w": values(5, 6), "b": values(6), "u": values(5, 6)}
    folded(graph(["N", 4, 5], nodes, **weights, s=[-1, 4, 2, 3], c=factor), fold_scales, places)


def test_a_factor_of_each_product_stays_where_the_first_operand_is_the_same_for_all() -> None:
    nodes = [*LINEAR, node("MatMul", ["l", "k"], ["m"]), node("Mul", ["m", "c"], ["y"])]
    keys = [node("MatMul", ["x", "u"], ["k0"]), view("k0", "k", "s"), *nodes]
    weights: dict[str, Any] = {"w": values(5, 3), "b": values(3), "u": values(5, 6), "s": [2, 3, 4]}
    folded(graph([1, 4, 5], keys, **weights, c=values(2, 1, 1)), fold_scales, 0)


@pytest.mark.parametrize(
    ("layer", "x", "weights"),
    [
        (node("Conv", ["n", "w", "b"], ["y"]), ["N", 4, 3, 3], {"w": values(6, 4, 2, 2), "b": values(6)}),
        (node("Conv", ["n", "w"], ["y"], group=2, strides=[2, 2]), ["N", 4, 3, 3], {"w": values(6, 2, 1, 1)}),
        (node("Gemm", ["n", "w", "b"], ["y"], transB=1), ["N", 4], {"w": values(6, 4), "b": values(6)}),
        (node("Gemm", ["n", "w"], ["y"]), ["N", 4], {"w": values(4, 6)}),
    ],
    ids=["convolution", "grouped convolution", "rows", "no bias"],
)
def test_a_norm_goes_into_the_layer_behind_it(layer: onnx.NodeProto, x: list[Any], weights: dict[str, Any]) -> None:
    model = graph(x, [norm("x", "n", epsilon=0.1), layer], **weights, **norm_of(4))
    assert folded(model, fold_norms_ahead, 1) == Counter([layer.op_type])


def test_a_norm_before_a_product_leaves_a_sum_behind_it() -> None:
    nodes = [norm("x", "n"), node("MatMul", ["n", "w"], ["p"]), node("Relu", ["p"], ["y"])]
    operators = folded(graph(["N", 6], nodes, w=values(6, 4), **norm_of(6)), fold_norms_ahead, 1)
    assert operators == Counter(MatMul=1, Add=1, Relu=1)


@pytest.mark.parametrize(
    ("layer", "x", "weights", "outputs"),
    [
        (node("Conv", ["n", "w"], ["y"], pads=[0, 0, 1, 1]), ["N", 4, 3, 3], {"w": values(6, 4, 2, 2)}, ["y"]),
        (node("Conv", ["n", "w"], ["y"], auto_pad="SAME_UPPER"), ["N", 4, 3, 3], {"w": values(6, 4, 2, 2)}, ["y"]),
        (node("Conv", ["n", "w"], ["y"]), ["N", 4, 3, 3], {"w": values(6, 4, 2, 2)}, ["y", "n"]),
        (node("Gemm", ["n", "w"], ["y"], alpha=2.0), ["N", 4], {"w": values(4, 6)}, ["y"]),
        (node("Gemm", ["n", "w"], ["y"], transA=1), [4, 4], {"w": values(4, 6)}, ["y"]),
        (node("MatMul", ["n", "w"], ["y"]), ["N", 4, 4], {"w": values(4, 6)}, ["y"]),
        (node("MatMul", ["n", "w"], ["y"]), ["N", 4], {"w": values(4, 6)}, ["y"]),
        (node("MatMul", ["w", "n"], ["y"]), [4, 4], {"w": values(4, 4)}, ["y"]),
    ],
    ids=[
        *("padded", "padded by name", "read elsewhere", "factor", "transposed", "tokens", "product is an output"),
        "from the right",
    ],
)
def test_a_norm_stays_before_a_layer_where_folding_it_would_be_wrong(
    layer: onnx.NodeProto, x: list[Any], weights: dict[str, Any], outputs: list[str]
) -> None:
    folded(graph(x, [norm("x", "n"), layer], outputs, **weights, **norm_of(4)), fold_norms_ahead, 0)


@pytest.mark.parametrize("operator", ["Add", "Sub", "Mul", "Div"])
def test_an_expand_beside_a_whole_value_is_dropped(operator: str) -> None:
    """As `torch.nn.functional.normalize` is traced, in SwinV2 and XCiT."""
    nodes = [node("ReduceL2", ["x", "o"], ["m"]), node("Expand", ["m", "s"], ["e"])]
    both = [node(operator, ["x", "e"], ["y"]), node(operator, ["e", "x"], ["z"])]
    constants = {"o": [-1], "s": [1, 5, 6]}
    operators = folded(graph(["N", 5, 6], [*nodes, *both], ["y", "z"], **constants), drop_expands, 1)
    assert operators == Counter({"ReduceL2": 1, operator: 2})


def test_an_expand_to_the_shape_of_its_input_is_dropped() -> None:
    """As GCViT repeats its global queries for each window, in stages of one window."""
    nodes = [node("Expand", ["x", "s"], ["e"]), node("Reshape", ["e", "r"], ["y"])]
    operators = folded(graph(["N", 5, 6], nodes, s=[1, 1, 1], r=[-1, 30]), drop_expands, 1)
    assert operators == Counter({"Reshape": 1})


def test_an_expand_stays_where_its_shape_is_needed() -> None:
    expanded = [node("ReduceL2", ["x", "o"], ["m"]), node("Expand", ["m", "s"], ["e"])]
    constants = {"o": [-1], "s": [1, 5, 6]}
    readers = [
        [node("Add", ["e", "e"], ["y"])],
        [node("Add", ["e", "m"], ["y"])],
        [node("Concat", ["x", "e"], ["y"], axis=1)],
        [node("Add", ["x", "e"], ["y"]), node("Neg", ["e"], ["z"])],
    ]
    for nodes in readers:
        outputs = [each.output[0] for each in nodes]
        folded(graph(["N", 5, 6], [*expanded, *nodes], outputs, **constants), drop_expands, 0)
    folded(graph(["N", 5, 6], [*expanded, node("Add", ["x", "e"], ["y"])], ["y", "e"], **constants), drop_expands, 0)
