"""Each fold of a traced graph: the same values from fewer nodes, and none where it would be wrong."""

from collections import Counter
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from fold_cases import LINEAR, WEIGHTS, Array, beside, folded, graph, joint, node, one_place, values
from vitx.export.graph.linear_folds import (
    JOINED_LIMIT,
    fold_scales,
    join_added_constants,
    linears_as_gemm,
    split_joint_projections,
)
from vitx.export.graph.simplify import simplify
from vitx.export.graph.view_folds import (
    drop_empty_pads,
    fix_reshape_targets,
    fold_pads_of_maxima,
    merge_slices,
    merge_transposes,
    merge_views,
    split_constants,
    view_after_elementwise,
    view_transposes,
)


@pytest.mark.parametrize(
    ("behind", "constants"),
    [
        ([node("Mul", ["l", "c"], ["y"])], {"c": values(4)}),
        ([node("Mul", ["c", "l"], ["y"])], {"c": values(1, 1, 4)}),
        ([node("Mul", ["l", "c"], ["y"])], {"c": np.float32(0.25)}),
        ([node("Transpose", ["l"], ["t"], perm=[0, 2, 1]), node("Mul", ["t", "c"], ["y"])], {"c": values(1, 4, 1)}),
        ([node("Reshape", ["l", "s"], ["t"]), node("Mul", ["t", "c"], ["y"])], {"s": [-1, 4], "c": values(4)}),
        ([node("Reshape", ["l", "s"], ["t"]), node("Mul", ["t", "c"], ["y"])], {"s": [-1, 2], "c": values(1)}),
    ],
    ids=["channels", "first operand", "number", "transposed", "viewed", "number behind a view"],
)
def test_a_factor_goes_into_the_layer(behind: list[onnx.NodeProto], constants: dict[str, Any]) -> None:
    model = graph(["N", 5, 6], [*LINEAR, *behind], **WEIGHTS, **constants)
    assert folded(model, fold_scales, 1)["Mul"] == 0


@pytest.mark.parametrize(
    ("layer", "x", "weights"),
    [
        (node("Conv", ["x", "w", "b"], ["l"], group=2), ["N", 4, 3, 3], {"w": values(6, 2, 1, 1), "b": values(6)}),
        (node("Conv", ["x", "w"], ["l"]), ["N", 4, 3, 3], {"w": values(6, 4, 2, 2)}),
        (node("Gemm", ["x", "w", "b"], ["l"], transB=1), ["N", 4], {"w": values(6, 4), "b": values(6)}),
        (node("Gemm", ["x", "w", "b"], ["l"], alpha=0.5, beta=2.0), ["N", 4], {"w": values(4, 6), "b": values(6)}),
        (node("MatMul", ["x", "w"], ["l"]), ["N", 3, 4], {"w": values(4, 6)}),
    ],
    ids=["grouped convolution", "convolution", "rows", "columns", "product alone"],
)
def test_a_factor_goes_into_every_kind_of_layer(layer: onnx.NodeProto, x: list[Any], weights: dict[str, Any]) -> None:
    factor = values(6, 1, 1) if layer.op_type == "Conv" else values(6)
    model = graph(x, [layer, node("Mul", ["l", "c"], ["y"])], **weights, c=factor)
    assert folded(model, fold_scales, 1) == Counter([layer.op_type])


@pytest.mark.parametrize(
    ("nodes", "outputs", "constants"),
    [
        ([*LINEAR, node("Mul", ["l", "c"], ["y"]), node("Neg", ["l"], ["z"])], ["y", "z"], {"c": values(4)}),
        ([*LINEAR, node("Mul", ["l", "c"], ["y"])], ["y", "l"], {"c": values(4)}),
        ([*LINEAR, node("Mul", ["l", "c"], ["y"]), node("Neg", ["p"], ["z"])], ["y", "z"], {"c": values(4)}),
        ([*LINEAR, node("Mul", ["l", "c"], ["y"])], ["y"], {"c": values(5, 1)}),
        ([*LINEAR, node("Mul", ["l", "c"], ["y"])], ["y"], {"c": values(5, 4)}),
        ([*LINEAR, node("Mul", ["l", "c"], ["y"])], ["y"], {"c": values(2, 1, 1, 1)}),
        ([*LINEAR, node("Mul", ["l", "l"], ["y"])], ["y"], {}),
        (
            [*LINEAR, node("Reshape", ["l", "s"], ["t"]), node("Mul", ["t", "c"], ["y"])],
            ["y"],
            {"s": [-1, 2], "c": values(2)},
        ),
        ([*LINEAR, node("Relu", ["l"], ["t"]), node("Mul", ["t", "c"], ["y"])], ["y"], {"c": values(4)}),
    ],
    ids=[
        "other reader",
        "output",
        "sum's other reader",
        "tokens",
        "both",
        "wider",
        "square",
        "split view",
        "not linear",
    ],
)
def test_a_factor_stays_where_folding_it_would_be_wrong(
    nodes: list[onnx.NodeProto], outputs: list[str], constants: dict[str, Any]
) -> None:
    folded(graph(["N", 5, 6], nodes, outputs, **WEIGHTS, **constants), fold_scales, 0)


def test_a_factor_stays_behind_another_kind_of_sum_and_where_it_widens() -> None:
    scaled = [*LINEAR, node("Mul", ["l", "c"], ["y"])]
    # Position embeddings are added to tokens, not to channels.
    folded(graph(["N", 5, 6], scaled, w=values(6, 4), b=values(5, 4), c=values(4)), fold_scales, 0)
    folded(graph(["N", 5, 6], scaled, w=values(6, 1), b=values(1), c=values(4)), fold_scales, 0)
    assert folded(graph(["N", 5, 6], scaled, w=values(6, 4), b=np.float32(0.5), c=values(4)), fold_scales, 1)
    pixels = [node("Conv", ["x", "w"], ["l"]), node("Mul", ["l", "c"], ["y"])]
    folded(graph(["N", 4, 3, 3], pixels, w=values(6, 4, 1, 1), c=values(6, 1, 3)), fold_scales, 0)


def test_a_weight_that_two_layers_share_is_scaled_in_one() -> None:
    nodes = [*LINEAR, node("Mul", ["l", "c"], ["y"]), node("MatMul", ["x", "w"], ["z"])]
    model = graph(["N", 5, 6], nodes, ["y", "z"], **WEIGHTS, c=values(4))
    assert folded(model, fold_scales, 1)["MatMul"] == 2


def test_a_joint_projection_is_taken_apart() -> None:
    gathers = [node("Gather", ["t", "zero"], ["q"]), node("Gather", ["t", "one"], ["k"])]
    operators = folded(joint(gathers), split_joint_projections, 1)
    assert operators == Counter(MatMul=2, Add=2, Reshape=2, Transpose=2)
    slices = [
        node("Slice", ["t", "at0", "at1", "at0"], ["s0"]),
        node("Squeeze", ["s0", "at0"], ["q"]),
        node("Slice", ["t", "at1", "at2", "at0"], ["s1"]),
        node("Squeeze", ["s1", "at0"], ["k"]),
    ]
    assert folded(joint(slices), split_joint_projections, 1) == operators


def test_a_joint_projection_of_windows_is_taken_apart() -> None:
    """Twins: tokens (N, 2, 2, 6) of windows of two rows and columns, which the view joins."""
    nodes = [*LINEAR, node("Reshape", ["l", "s"], ["v"]), node("Transpose", ["v"], ["t"], perm=[2, 0, 3, 1, 4])]
    takers = [node("Gather", ["t", "zero"], ["q"]), node("Gather", ["t", "one"], ["k"])]
    sizes: dict[str, Any] = {"zero": np.int64(0), "one": np.int64(1)}
    weights = {"w": values(6, 12), "b": values(12)}
    model = graph(["N", 2, 2, 6], [*nodes, *takers], ["q", "k"], **weights, s=[-1, 4, 2, 2, 3], **sizes)
    assert folded(model, split_joint_projections, 1) == Counter(MatMul=2, Add=2, Reshape=2, Transpose=2)
    # Here the view mixes channels and tokens.
    mixed = graph(["N", 2, 2, 6], [*nodes, *takers], ["q", "k"], **weights, s=[-1, 2, 4, 2, 3], **sizes)
    folded(mixed, split_joint_projections, 0)


def test_a_joint_projection_stays_where_its_whole_is_read() -> None:
    folded(joint([node("Gather", ["t", "zero"], ["q"]), node("Neg", ["t"], ["k"])]), split_joint_projections, 0)
    folded(joint([node("Gather", ["t", "zero"], ["q"])], ["q", "t"]), split_joint_projections, 0)
    folded(joint([node("Gather", ["t", "zero"], ["q"])], ["q", "l"]), split_joint_projections, 0)
    both = [node("Slice", ["t", "at0", "at2", "at0"], ["q"]), node("Gather", ["t", "one"], ["k"])]
    folded(joint(both), split_joint_projections, 0)


@pytest.mark.parametrize("transposed", [0, 1])
def test_a_joint_gemm_stays_whole(transposed: int) -> None:
    """Its weight may lie transposed, and it may have factors of its own."""
    rows = [node("Gemm", ["x", "w", "b"], ["l"], transB=transposed), node("Reshape", ["l", "s"], ["v"])]
    takers = [node("Transpose", ["v"], ["t"], perm=[1, 0, 2, 3]), node("Gather", ["t", "one"], ["y"])]
    weight = values(12, 12)
    model = graph(["N", 12], [*rows, *takers], w=weight, b=values(12), s=[-1, 2, 2, 3], one=np.int64(1))
    folded(model, split_joint_projections, 0)


def test_a_joint_projection_with_one_number_as_bias_stays_whole() -> None:
    nodes = [*LINEAR, node("Reshape", ["l", "s"], ["v"]), node("Transpose", ["v"], ["t"], perm=[2, 0, 3, 1, 4])]
    taken = node("Gather", ["t", "one"], ["y"])
    sizes: dict[str, Any] = {"s": [-1, 5, 2, 2, 3], "one": np.int64(1)}
    folded(graph(["N", 5, 6], [*nodes, taken], w=values(6, 12), b=values(1), **sizes), split_joint_projections, 0)


def test_a_convolution_s_last_axis_is_not_its_channels() -> None:
    nodes = [node("Conv", ["x", "w"], ["l"]), node("Reshape", ["l", "s"], ["v"])]
    takers = [node("Transpose", ["v"], ["t"], perm=[3, 0, 1, 2, 4]), node("Gather", ["t", "one"], ["y"])]
    sizes: dict[str, Any] = {"s": [-1, 6, 6, 2, 3], "one": np.int64(1)}
    model = graph(["N", 4, 6, 6], [*nodes, *takers], w=values(6, 4, 1, 1), **sizes)
    folded(model, split_joint_projections, 0)


def test_position_biases_and_window_masks_are_added_at_once() -> None:
    """Scores (N·4, 2, 3, 3), a bias for each head, a mask for each of four windows."""
    nodes = [
        node("Reshape", ["x", "s1"], ["w"]),
        node("Add", ["w", "bias"], ["a"]),
        node("Reshape", ["a", "s2"], ["v"]),
        node("Add", ["v", "mask"], ["y"]),
    ]
    constants: dict[str, Any] = {"s1": [-1, 2, 3, 3], "s2": [-1, 4, 2, 3, 3], "mask": values(1, 4, 1, 3, 3)}
    model = graph(["N", 72], nodes, **constants, bias=values(1, 2, 3, 3))
    assert folded(model, join_added_constants, 1)["Add"] == 1
    # A bias that differs from window to window of the joint axis cannot move behind the view.
    nodes[0] = node("Reshape", ["x", "s0"], ["w"])
    fixed = graph([1, 72], nodes, **constants | {"s0": [4, 2, 3, 3]}, bias=values(4, 2, 3, 3))
    folded(fixed, join_added_constants, 0)


def test_constants_are_not_joined_where_a_sum_is_read_or_would_be_large() -> None:
    sums = [node("Add", ["x", "a"], ["t"]), node("Add", ["t", "b"], ["y"])]
    assert folded(graph(["N", 3], sums, a=values(3), b=values(1)), join_added_constants, 1) == Counter(["Add"])
    folded(graph(["N", 3], sums, ["y", "t"], a=values(3), b=values(3)), join_added_constants, 0)
    folded(graph(["N", 3], [node("Add", ["x", "a"], ["y"])], a=values(3)), join_added_constants, 0)
    assert JOINED_LIMIT == 2048 * 1024
    assert folded(graph([1, 2048, 1], sums, a=values(2048, 1), b=values(1, 1024)), join_added_constants, 1)["Add"] == 1
    folded(graph([1, 2049, 1], sums, a=values(2049, 1), b=values(1, 1024)), join_added_constants, 0)


def test_a_layer_of_tokens_is_one_gemm() -> None:
    operators = folded(graph(["N", 5, 6], [*LINEAR[:1], node("Add", ["p", "b"], ["y"])], **WEIGHTS), linears_as_gemm, 1)
    assert operators == Counter(Reshape=2, Gemm=1)


@pytest.mark.parametrize(
    ("x", "nodes", "outputs", "bias"),
    [
        (["N", 6], LINEAR, ["l"], values(4)),
        (["N", 5, 6], LINEAR, ["l"], values(5, 1)),
        (["N", 5, 6], LINEAR, ["l", "p"], values(4)),
        (["N", "M", 6], LINEAR, ["l"], values(4)),
        (["N", 5, 6], [node("MatMul", ["x", "w"], ["l"])], ["l"], values(4)),
    ],
    ids=["rows already", "bias of tokens", "product is read", "two dynamic sizes", "no bias"],
)
def test_a_layer_stays_a_product_elsewhere(
    x: list[Any], nodes: list[onnx.NodeProto], outputs: list[str], bias: Array
) -> None:
    model = graph(x, nodes, outputs, w=WEIGHTS["w"], b=bias)
    assert linears_as_gemm(ir.serde.deserialize_model(model).graph) == 0
    assert linears_as_gemm(ir.serde.deserialize_model(beside(model, one_place(linears_as_gemm))).graph) == 1


def test_a_computed_target_of_one_dynamic_size_is_a_constant() -> None:
    nodes = [
        node("Shape", ["x"], ["d"], start=0, end=1),
        node("Concat", ["d", "rest"], ["s"], axis=0),
        node("Reshape", ["x", "s"], ["y"]),
    ]
    model = graph(["N", 4, 6], nodes, rest=[24])
    assert folded(model, fix_reshape_targets, 1) == Counter(["Reshape"])
    two = graph(["N", "M", 6], [node("Shape", ["x"], ["s"]), node("Reshape", ["x", "s"], ["y"])])
    assert fix_reshape_targets(ir.serde.deserialize_model(two).graph) == 0


NEGATED, PRODUCT = node("Neg", ["x"], ["w"]), node("MatMul", ["x", "w"], ["p"])
SQUARE, PIXELS = [2, 4, 4], [4, 4, 4, 4]


@pytest.mark.parametrize(
    ("x", "nodes", "constants"),
    [
        ([2, 4, 6], [node("MatMul", ["x", "w"], ["l"])], {"w": values(2, 6, 4)}),
        ([2, 4, 6], LINEAR, {"w": values(2, 6, 4), "b": values(4)}),
        (SQUARE, [NEGATED, node("MatMul", ["x", "w"], ["l"])], {}),
        (SQUARE, [NEGATED, *LINEAR], {"b": values(4)}),
        (SQUARE, [node("MatMul", ["v", "x"], ["l"])], {"v": values(6, 4)}),
        (SQUARE, [PRODUCT, node("Add", ["p", "x"], ["l"])], {"w": values(4, 4)}),
        (PIXELS, [NEGATED, node("Conv", ["x", "w"], ["l"])], {}),
        (
            PIXELS,
            [node("ReduceSum", ["x", "at"], ["b"], keepdims=0), node("Conv", ["x", "w", "b"], ["l"])],
            {"w": values(4, 4, 1, 1), "at": [0, 2, 3]},
        ),
    ],
    ids=[
        *("a matrix an image", "a matrix an image and a bias", "no constant", "no constant and a bias"),
        *("from the left", "a sum of two", "a filter that varies", "a bias that varies"),
    ],
)
def test_what_is_no_layer_keeps_its_factor(
    x: list[Any], nodes: list[onnx.NodeProto], constants: dict[str, Any]
) -> None:
    model = graph(x, [*nodes, node("Mul", ["l", "c"], ["y"])], **constants, c=np.float32(0.5))
    folded(model, fold_scales, 0)
    assert linears_as_gemm(ir.serde.deserialize_model(model).graph) == 0


@pytest.mark.parametrize(
    "takers",
    [
        [node("Gather", ["t", "at1"], ["q"])],
        [node("Gather", ["t", "minus"], ["q"])],
        [node("Gather", ["t", "one"], ["q"], axis=2)],
        [node("Slice", ["t", "at0", "at1", "at0"], ["cut"]), node("Neg", ["cut"], ["q"])],
        [node("Slice", ["t", "at0", "at1", "at0"], ["cut"]), node("Squeeze", ["cut"], ["q"])],
        [node("Slice", ["t", "at0", "at1", "at2"], ["cut"]), node("Squeeze", ["cut", "at2"], ["q"])],
        [node("Slice", ["t", "before", "at2", "at0"], ["cut"]), node("Squeeze", ["cut", "at0"], ["q"])],
        [node("Slice", ["t", "at0", "at2", "at0"], ["q"])],
    ],
    ids=[
        *("an index of one", "from the end", "another axis", "no squeeze", "all squeezed", "another slice"),
        *("slice from the end", "both"),
    ],
)
def test_a_part_is_one_along_the_first_axis(takers: list[onnx.NodeProto]) -> None:
    whole = joint(takers, ["q"], minus=np.int64(-1), before=[-1])
    before = ir.serde.deserialize_model(whole)
    assert split_joint_projections(before.graph) == 0


def test_a_pad_by_nothing_is_dropped() -> None:
    nodes = [node("Pad", ["x", "p"], ["t"]), node("Neg", ["t"], ["y"])]
    assert folded(graph(["N", 3], nodes, p=[0, 0, 0, 0]), drop_empty_pads, 1) == Counter(["Neg"])
    folded(graph(["N", 3], nodes, p=[0, 0, 0, 1]), drop_empty_pads, 0)


@pytest.mark.parametrize(
    ("pads", "fill", "pool", "places"),
    [
        ([0, 0, 0, 0, 0, 0, 1, 1], -np.inf, {}, 1),
        ([0, 0, 1, 0, 0, 0, 1, 2], -np.inf, {"pads": [0, 1, 1, 0]}, 1),
        ([0, 0, 0, 0, 0, 0, 1, 1], 0.0, {}, 0),
        ([0, 1, 0, 0, 0, 0, 1, 1], -np.inf, {}, 0),
        ([0, 0, -1, 0, 0, 0, 1, 1], -np.inf, {}, 0),
        ([0, 0, 3, 0, 0, 0, 0, 0], -np.inf, {}, 0),
        ([0, 0, 0, 0, 0, 0, 1, 1], -np.inf, {"ceil_mode": 1}, 0),
        ([0, 0, 0, 0, 0, 0, 1, 1], -np.inf, {"auto_pad": "SAME_UPPER"}, 0),
    ],
    ids=["same", "beside its own", "zeros", "channels", "a cut", "a window of it alone", "rounded up", "by name"],
)
def test_padding_of_maxima_is_the_pooling_s_own(
    pads: list[int], fill: float, pool: dict[str, Any], places: int
) -> None:
    """NesT: three rows and columns, every second one, of an even number of them."""
    maxima = node("MaxPool", ["t"], ["y"], kernel_shape=[3, 3], strides=[2, 2], **pool)
    nodes, constants = [node("Pad", ["x", "p", "f"], ["t"]), maxima], {"p": pads, "f": np.float32(fill)}
    model, read = (graph(["N", 2, 6, 8], nodes, outputs, **constants) for outputs in (["y"], ["y", "t"]))
    if places:
        assert folded(model, fold_pads_of_maxima, 1) == Counter(["MaxPool"])
    else:  # some of these are -inf
        assert fold_pads_of_maxima(ir.serde.deserialize_model(model).graph) == 0
    assert fold_pads_of_maxima(ir.serde.deserialize_model(read).graph) == 0


def test_the_parts_of_a_constant_are_constants() -> None:
    nodes = [node("Split", ["c"], ["a", "b"], axis=1, num_outputs=2), node("Mul", ["x", "a"], ["t"])]
    model = graph(["N", 2], [*nodes, node("Add", ["t", "b"], ["y"])], c=values(1, 4))
    assert folded(model, split_constants, 1) == Counter(Mul=1, Add=1)
    folded(graph(["N", 2], nodes, ["t", "b"], c=values(1, 4)), split_constants, 0)
    folded(graph(["N", 4], [node("Split", ["x"], ["y", "z"], axis=1, num_outputs=2)], ["y", "z"]), split_constants, 0)


def test_transposes_in_a_row_are_one_or_none() -> None:
    def two(second: list[int], *outputs: str) -> onnx.ModelProto:
        nodes = [node("Transpose", ["x"], ["t"], perm=[0, 2, 1, 3]), node("Transpose", ["t"], ["u"], perm=second)]
        return graph(["N", 2, 3, 4], [*nodes, node("Neg", ["u"], ["y"])], ["y", *outputs])

    assert folded(two([0, 1, 3, 2]), merge_transposes, 1) == Counter(Transpose=1, Neg=1)
    assert folded(two([0, 2, 1, 3]), merge_transposes, 1) == Counter(["Neg"])
    assert folded(two([0, 1, 3, 2], "t"), merge_transposes, 1) == Counter(Transpose=2, Neg=1)


def test_a_transpose_of_axes_of_one_is_a_view() -> None:
    def moved(size: int) -> onnx.ModelProto:
        return graph(["N", 4, 1, size], [node("Transpose", ["x"], ["y"], perm=[0, 2, 3, 1])])

    assert folded(moved(1), view_transposes, 1) == Counter(["Reshape"])
    folded(moved(2), view_transposes, 0)


def test_views_in_a_row_are_one_or_none() -> None:
    def two(target: list[int], *outputs: str) -> onnx.ModelProto:
        nodes = [node("Reshape", ["x", "s1"], ["t"]), node("Reshape", ["t", "s2"], ["u"]), node("Neg", ["u"], ["y"])]
        return graph(["N", 2, 3], nodes, ["y", *outputs], s1=[-1, 6], s2=target)

    assert folded(two([-1, 3, 2]), merge_views, 1) == Counter(Reshape=1, Neg=1)
    assert folded(two([-1, 2, 3]), merge_views, 1) == Counter(["Neg"])
    folded(two([-1, 3, 2], "t"), merge_views, 0)


def test_the_name_between_blocks_is_kept() -> None:
    """Parity compares the residual stream by name, so the view that carries it stays."""
    nodes = [node("Reshape", ["x", "s1"], ["blocks.0"]), node("Reshape", ["blocks.0", "s2"], ["y"])]
    folded(graph(["N", 2, 3], nodes, s1=[-1, 6], s2=[-1, 3, 2]), merge_views, 0)
    linear = [LINEAR[0], node("Add", ["p", "b"], ["blocks.0"]), node("Neg", ["blocks.0"], ["y"])]
    model = ir.serde.deserialize_model(graph(["N", 5, 6], linear, **WEIGHTS))
    assert linears_as_gemm(model.graph) == 1
    assert "blocks.0" in {each.name for made in model.graph for each in made.outputs}
    turned = [node("Transpose", ["x"], ["blocks.0"], perm=[0, 2, 1]), node("Transpose", ["blocks.0"], ["y"])]
    folded(graph(["N", 2, 3], turned), merge_transposes, 0)
    parts = joint([node("Gather", ["t", "zero"], ["q"]), node("Gather", ["t", "one"], ["k"])])
    for each in parts.graph.node:
        for names in (each.input, each.output):
            names[:] = ["blocks.0" if name == "t" else name for name in names]
    folded(parts, split_joint_projections, 0)


def test_a_function_of_each_value_needs_no_view_around_it() -> None:
    def between(*outputs: str, operator: str = "Relu") -> onnx.ModelProto:
        nodes = [node("Reshape", ["x", "s1"], ["t"]), node(operator, ["t"], ["u"]), node("Reshape", ["u", "s2"], ["v"])]
        return graph(["N", 2, 3], [*nodes, node("Neg", ["v"], ["y"])], ["y", *outputs], s1=[-1, 6], s2=[-1, 3, 2])

    assert folded(between(), view_after_elementwise, 1) == Counter(Relu=1, Reshape=1, Neg=1)
    folded(between("u"), view_after_elementwise, 0)
    folded(between(operator="Softmax"), view_after_elementwise, 0)


def test_slices_along_two_axes_are_one() -> None:
    def two(axis: str, *outputs: str) -> onnx.ModelProto:
        nodes = [node("Slice", ["x", "o", "t", "o"], ["s"]), node("Slice", ["s", "z", "o", axis], ["y"])]
        return graph(["N", 5, 6], nodes, ["y", *outputs], z=[0], o=[1], t=[4], last=[-1])

    assert folded(two("last"), merge_slices, 1) == Counter(["Slice"])
    folded(two("o"), merge_slices, 0)
    folded(two("last", "s"), merge_slices, 0)


def test_two_dynamic_sizes_and_computed_bounds_are_left_alone() -> None:
    turned = graph(["N", "M", 1], [node("Transpose", ["x"], ["t"], perm=[0, 2, 1]), node("Neg", ["t"], ["y"])])
    folded(turned, view_transposes, 0)
    wrapped = [node("Unsqueeze", ["x", "z"], ["t"]), node("Unsqueeze", ["t", "z"], ["u"]), node("Neg", ["u"], ["y"])]
    folded(graph(["N", "M", 6], wrapped, z=[0]), merge_views, 0)
    last = node("Slice", ["s", "z", "o", "o"], ["y"])
    computed = [node("Shape", ["x"], ["n"], end=1), node("Slice", ["x", "z", "n", "z"], ["s"]), last]
    folded(graph(["N", 5, 6], computed, z=[0], o=[1]), merge_slices, 0)
    without_axes = [node("Slice", ["x", "z", "o"], ["s"]), last]
    folded(graph(["N", 5, 6], without_axes, z=[0], o=[1]), merge_slices, 0)


def test_folds_are_repeated_until_none_applies() -> None:
    """LayerScale behind a transpose, which another transpose undoes: a Gemm between two views is left."""
    nodes = [
        *LINEAR,
        node("Transpose", ["l"], ["t"], perm=[0, 2, 1]),
        node("Mul", ["t", "c"], ["m"]),
        node("Transpose", ["m"], ["u"], perm=[0, 2, 1]),
        node("Neg", ["u"], ["y"]),
    ]
    model = ir.serde.deserialize_model(graph(["N", 5, 6], nodes, **WEIGHTS, c=values(4, 1)))
    places = simplify(model)
    assert {name: count for name, count in places.items() if count} == {
        "fold_scales": 1,
        "merge_transposes": 1,
        "linears_as_gemm": 1,
    }
    assert [each.op_type for each in model.graph] == ["Reshape", "Gemm", "Reshape", "Neg"]
