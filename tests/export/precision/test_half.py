"""Every node of a graph in float16 or bfloat16, of its float32 twin, and which operators have the types."""

import warnings
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from vitx.core.errors import CheckFailed
from vitx.export.graph.dataflow import Dataflow
from vitx.export.graph.execution import logits_of
from vitx.export.precision.half import HALVES, LARGEST, NUMPY_TYPES, SMALLEST, HalfGraph, cpu_twin

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
HALF: list[tuple[int, Any]] = [(TensorProto.FLOAT16, np.float16), (TensorProto.BFLOAT16, ml_dtypes.bfloat16)]
ROWS = np.array([-1, 48])


def node(op_type: str, inputs: str, output: str, **attributes: Any) -> onnx.NodeProto:
    """Its name is that of its first output in capitals."""
    outputs = output.split()
    return helper.make_node(op_type, inputs.split(), outputs, name=outputs[0].upper(), **attributes)


def graph_of(
    nodes: Sequence[onnx.NodeProto], outputs: str = "logits", opset: int = 20, **constants: Any
) -> onnx.ModelProto:
    """uint8 (N, 4, 4, 3) → `pixels` → `x` (N, 48) → `nodes` → each of `outputs` (N, 48)."""
    first = [node("Cast", "images", "pixels", to=FLOAT), node("Reshape", "pixels rows", "x")]
    graph = helper.make_graph(
        [*first, *nodes],
        "small",
        [helper.make_tensor_value_info("images", TensorProto.UINT8, ["N", 4, 4, 3])],
        [helper.make_tensor_value_info(name, FLOAT, ["N", None]) for name in outputs.split()],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in {"rows": ROWS, **constants}.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def checked(graph: onnx.ModelProto) -> onnx.ModelProto:
    onnx.checker.check_model(graph, full_check=True)
    return graph


def nodes_of(graph: onnx.ModelProto) -> list[tuple[str, str, str]]:
    """(operator, inputs, outputs); of a Cast also the type, and its name's."""
    found = []
    for each in graph.graph.node:
        kind = each.op_type
        if kind == "Cast":
            kind += f" {TensorProto.DataType.Name(each.attribute[0].i)}"
        found.append((kind, " ".join(each.input), " ".join(each.output)))
    return found


def held(graph: onnx.ModelProto) -> dict[str, Any]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.graph.initializer}


# The weight is read twice; `s` by two nodes.
BRANCHES = [
    *(node("Mul", "x f", "m"), node("Relu", "m", "r"), node("MatMul", "r W", "s")),
    *(node("Sigmoid", "s", "a"), node("Mul", "s a", "t"), node("MatMul", "t W", "logits")),
]


def branches(**more: Any) -> onnx.ModelProto:
    weight = np.random.default_rng(0).normal(0, 0.1, (48, 48)).astype(np.float32)
    return graph_of(BRANCHES, **{"W": weight, "f": np.float32(0.01), **more})


def test_the_types() -> None:
    assert HALVES == {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}
    for kind, dtype in HALF:
        assert NUMPY_TYPES[kind] == np.dtype(dtype)
        assert LARGEST[kind] == float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]
        assert SMALLEST[kind] == float(ml_dtypes.finfo(dtype).smallest_subnormal)  # type: ignore[no-untyped-call]
    assert LARGEST.keys() == NUMPY_TYPES.keys() == set(HALVES.values())


@pytest.mark.parametrize(("kind", "dtype"), HALF)
def test_every_node_without_islands(kind: int, dtype: Any) -> None:
    name = TensorProto.DataType.Name(kind)
    half = HalfGraph(Dataflow(branches()), kind)
    assert half.floating == ["PIXELS", "X", "M", "R", "S", "A", "T", "LOGITS"]
    assert half.without_kernel == ()
    graph = checked(half.build(()))
    assert nodes_of(graph) == [
        (f"Cast {name}", "images", "pixels"),
        ("Reshape", "pixels rows", "x"),
        ("Mul", "x f/half", "m"),
        ("Relu", "m", "r"),
        ("MatMul", "r W/half", "s"),
        ("Sigmoid", "s", "a"),
        ("Mul", "s a", "t"),
        ("MatMul", "t W/half", "logits/half"),
        ("Cast FLOAT", "logits/half", "logits"),
    ]
    assert graph.graph.node[-1].name == "logits/half to logits"
    constants, before = held(graph), held(branches())
    assert constants.keys() == {"rows", "f/half", "W/half"}
    assert constants["W/half"].dtype == dtype
    np.testing.assert_array_equal(constants["W/half"], before["W"].astype(dtype))


def test_a_cast_stands_only_between_the_types() -> None:
    half = HalfGraph(Dataflow(branches()), TensorProto.FLOAT16)
    graph = checked(half.build(["S", "LOGITS"]))
    assert nodes_of(graph)[3:] == [
        ("Relu", "m", "r"),
        ("Cast FLOAT", "r", "r/as float"),
        ("MatMul", "r/as float W", "s"),
        ("Cast FLOAT16", "s", "s/as half"),
        ("Sigmoid", "s/as half", "a"),
        ("Mul", "s/as half a", "t"),
        ("Cast FLOAT", "t", "t/as float"),
        ("MatMul", "t/as float W", "logits"),
    ]
    assert held(graph).keys() == {"rows", "f/half", "W"}
    whole = checked(half.build(half.floating))
    assert nodes_of(whole) == nodes_of(branches())
    (weighed,) = (each for each in nodes_of(checked(half.build(["S"]))) if each[2] == "logits/half")
    assert weighed == ("MatMul", "t W/half", "logits/half"), "the weight is held in both types"
    assert held(half.build(["S"])).keys() == {"rows", "f/half", "W", "W/half"}


def test_an_output_that_the_graph_itself_reads() -> None:
    """Its name is that of the float32 form, which a float32 node reads without a Cast of its own."""
    nodes = [node("Relu", "x", "logits"), node("Neg", "logits", "n"), node("Abs", "n", "embedding")]
    half = HalfGraph(Dataflow(graph_of(nodes, "logits embedding")), TensorProto.FLOAT16)
    assert nodes_of(checked(half.build(())))[2:] == [
        ("Relu", "x", "logits/half"),
        ("Cast FLOAT", "logits/half", "logits"),
        ("Neg", "logits/half", "n"),
        ("Abs", "n", "embedding/half"),
        ("Cast FLOAT", "embedding/half", "embedding"),
    ]
    assert nodes_of(checked(half.build(["N", "EMBEDDING"])))[2:] == [
        ("Relu", "x", "logits/half"),
        ("Cast FLOAT", "logits/half", "logits"),
        ("Neg", "logits", "n"),
        ("Abs", "n", "embedding"),
    ]
    assert nodes_of(checked(half.build(["LOGITS"])))[2:] == [
        ("Cast FLOAT", "x", "x/as float"),
        ("Relu", "x/as float", "logits"),
        ("Cast FLOAT16", "logits", "logits/as half"),
        ("Neg", "logits/as half", "n"),
        ("Abs", "n", "embedding/half"),
        ("Cast FLOAT", "embedding/half", "embedding"),
    ]


def test_a_node_of_two_outputs_and_an_input_left_out() -> None:
    """TopK gives values of the type and int64 indices; Clip has no lower bound."""
    nodes = [
        *(node("Clip", "x", "c"), node("TopK", "c k", "values indices")),
        node("Cast", "indices", "i", to=FLOAT),
        node("Add", "values i", "logits"),
    ]
    nodes[0].input.extend(["", "high"])
    model = graph_of(nodes, k=np.array([3]), high=np.float32(100))
    graph = checked(HalfGraph(Dataflow(model), TensorProto.FLOAT16).build(()))
    assert nodes_of(graph)[2:] == [
        ("Clip", "x  high/half", "c"),
        ("TopK", "c k", "values indices"),
        ("Cast FLOAT16", "indices", "i"),
        ("Add", "values i", "logits/half"),
        ("Cast FLOAT", "logits/half", "logits"),
    ]
    assert nodes_of(checked(cpu_twin(graph)))[6:12] == [
        ("Clip", "x  high/half", "c/exact"),
        ("Cast FLOAT16", "c/exact", "c/rounded"),
        ("Cast FLOAT", "c/rounded", "c"),
        ("TopK", "c k", "values/exact indices"),
        ("Cast FLOAT16", "values/exact", "values/rounded"),
        ("Cast FLOAT", "values/rounded", "values"),
    ]


# Nodes that name the type of their result, and one that names another type.
NAMED_TYPES = [
    node("Cast", "x", "whole", to=INT64),
    node("EyeLike", "whole", "eye", dtype=FLOAT),
    node("Shape", "x", "size"),
    node("ConstantOfShape", "size", "filled", value=numpy_helper.from_array(np.array([0.1], np.float32), "v")),
    node("ConstantOfShape", "size", "counts", value=numpy_helper.from_array(np.array([7]), "v")),
    node("Constant", "", "third", value=numpy_helper.from_array(np.array(1 / 3, np.float32), "v")),
    node("Cast", "counts", "seven", to=FLOAT),
    node("Sum", "x eye filled seven third", "logits"),
]


def types_given(graph: onnx.ModelProto) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in graph.graph.node:
        for given in each.attribute:
            if given.name == "value":
                value = numpy_helper.to_array(given.t)
                found[each.output[0]] = (given.t.name, value.dtype, value.ravel().astype(np.float64).tolist())
            else:
                found[each.output[0]] = given.i
    return found


@pytest.mark.parametrize(("kind", "dtype"), HALF)
def test_the_type_of_a_result_is_named_where_a_node_names_one(kind: int, dtype: Any) -> None:
    flow = Dataflow(graph_of(NAMED_TYPES, opset=22))  # EyeLike has bfloat16 since opset 22
    half = checked(HalfGraph(flow, kind).build(()))
    found = types_given(half)
    tenth, third = (float(np.float32(value).astype(dtype)) for value in (0.1, 1 / 3))
    assert found == {
        "pixels": kind,
        "whole": INT64,
        "eye": kind,
        "seven": kind,
        "logits": FLOAT,
        "filled": ("v", np.dtype(dtype), [tenth]),
        "third": ("v", np.dtype(dtype), [third]),
        "counts": ("v", np.dtype(np.int64), [7]),
    }
    islands = types_given(HalfGraph(flow, kind).build(["EYE", "FILLED", "THIRD", "SEVEN"]))
    assert (islands["eye"], islands["seven"], islands["pixels"]) == (FLOAT, FLOAT, kind)
    assert islands["filled"] == ("v", np.dtype(np.float32), [float(np.float32(0.1))])
    twin = types_given(cpu_twin(half))
    assert twin == {
        "pixels/exact": FLOAT,
        "whole": INT64,
        "eye/exact": FLOAT,
        "seven/exact": FLOAT,
        "logits": FLOAT,
        "filled/exact": ("v", np.dtype(np.float32), [tenth]),
        "third/exact": ("v", np.dtype(np.float32), [third]),
        "counts": ("v", np.dtype(np.int64), [7]),
        **{f"{name}/rounded": kind for name in ("pixels", "x", "eye", "filled", "third", "seven", "logits/half")},
        **dict.fromkeys(("pixels", "x", "eye", "filled", "third", "seven", "logits/half"), FLOAT),
    }


@pytest.mark.parametrize(("kind", "dtype"), HALF)
def test_constants_that_name_no_type_get_the_half_type(kind: int, dtype: Any) -> None:
    """A number, numbers and the zeros of a shape are float32 unless a node says more: the graph could not be loaded."""
    made = [
        *(node("Constant", "", "two", value_float=2.0), node("Constant", "", "three", value_floats=[3.0] * 48)),
        *(node("Shape", "x", "shape"), node("ConstantOfShape", "shape", "zeros")),
        *(node("Mul", "x two", "a"), node("Mul", "a three", "b"), node("Add", "b zeros", "logits")),
    ]
    half = checked(HalfGraph(Dataflow(graph_of(made)), kind).build(()))
    found = {name: value for name, value in types_given(half).items() if name in ("two", "three", "zeros")}
    expected = {"two": [2.0], "three": [3.0] * 48, "zeros": [0.0]}
    assert found == {name: ("", np.dtype(dtype), values) for name, values in expected.items()}
    images = np.ones((2, 4, 4, 3), np.uint8)
    assert logits_of(checked(cpu_twin(half)), images).tolist() == [[6.0] * 48] * 2


def test_nodes_of_one_name_get_names_of_their_own() -> None:
    """Also where the name with the node's place behind it is another node's."""
    chain = [("x", "r", "relu_4"), ("r", "s", "relu"), ("s", "logits", "relu")]
    made = [helper.make_node("Relu", [source], [target], name=name) for source, target, name in chain]
    names = [each.name for each in Dataflow(graph_of(made)).nodes]
    assert names[2:] == ["relu_4", "relu", "relu_4_4"]


def test_a_graph_with_a_branch_is_refused() -> None:
    """What its branches read of this graph is in no list of inputs: constants of theirs would be left out."""
    sides = [helper.make_tensor_value_info("y", FLOAT, ["N", 48])]
    branch = helper.make_graph([helper.make_node("MatMul", ["x", "W"], ["y"])], "branch", [], sides)
    chosen = node("If", "flag", "logits", then_branch=branch, else_branch=branch)
    graph = graph_of([chosen], flag=np.array(True), W=np.eye(48, dtype=np.float32))
    with pytest.raises(CheckFailed) as refused:
        Dataflow(checked(graph))
    assert str(refused.value) == (
        "the node 'LOGITS' is a branch or a loop (If), which no lower precision is written into: export in fp32, or "
        "take a network without one"
    )


def test_every_node_of_the_twin() -> None:
    half = HalfGraph(Dataflow(branches()), TensorProto.BFLOAT16).build(["M", "R", "A"])
    twin = checked(cpu_twin(half))

    def rounded(name: str) -> list[tuple[str, str, str]]:
        return [("Cast BFLOAT16", f"{name}/exact", f"{name}/rounded"), ("Cast FLOAT", f"{name}/rounded", name)]

    assert nodes_of(twin) == [
        *(("Cast FLOAT", "images", "pixels/exact"), *rounded("pixels")),
        *(("Reshape", "pixels rows", "x/exact"), *rounded("x")),
        ("Cast FLOAT", "x", "x/as float"),
        ("Mul", "x/as float f", "m"),
        ("Relu", "m", "r"),
        *(("Cast FLOAT", "r", "r/as half/exact"), *rounded("r/as half")),
        *(("MatMul", "r/as half W/half", "s/exact"), *rounded("s")),
        ("Cast FLOAT", "s", "s/as float"),
        ("Sigmoid", "s/as float", "a"),
        *(("Cast FLOAT", "a", "a/as half/exact"), *rounded("a/as half")),
        *(("Mul", "s a/as half", "t/exact"), *rounded("t")),
        *(("MatMul", "t W/half", "logits/half/exact"), *rounded("logits/half")),
        ("Cast FLOAT", "logits/half", "logits"),
    ]
    constants, before = held(twin), held(half)
    assert constants["W/half"].dtype == np.float32
    np.testing.assert_array_equal(constants["W/half"], before["W/half"].astype(np.float32))
    assert constants["rows"].dtype == np.int64


def test_codes_are_not_rounded_in_the_twin() -> None:
    """A kernel multiplies the codes: of 127 times the scale no half number is made."""
    scale = np.float16(0.1)
    nodes = [
        node("DequantizeLinear", "codes scale zero", "w"),
        node("Cast", "x", "h", to=TensorProto.FLOAT16),
        node("Mul", "h w", "m"),
        node("Cast", "m", "logits", to=FLOAT),
    ]
    codes = np.arange(80, 128, dtype=np.int8)
    half = checked(graph_of(nodes, codes=codes, scale=scale, zero=np.int8(0)))
    images = np.full((2, 4, 4, 3), 64, np.uint8)  # a power of two: the product alone is rounded
    products = 64 * codes.astype(np.float32) * np.float32(scale)
    found = logits_of(checked(cpu_twin(half)), images)
    np.testing.assert_array_equal(found, np.tile(products.astype(np.float16).astype(np.float32), (2, 1)))
    made = [each.output[0] for each in cpu_twin(half).graph.node]
    assert "w" in made
    assert "w/exact" not in made


@pytest.mark.parametrize(("kind", "dtype"), HALF)
def test_the_arithmetic_of_the_twin(kind: int, dtype: Any) -> None:
    """Each tensor is rounded where it is made; products are summed in float32."""
    images = np.random.default_rng(1).integers(0, 256, (16, 4, 4, 3), dtype=np.uint8)
    graph = branches()
    constants = held(graph)

    def rounded(value: Any) -> Any:
        return np.asarray(value, np.float32).astype(dtype).astype(np.float32)

    w, f = rounded(constants["W"]), rounded(constants["f"])
    r = np.maximum(rounded(images.reshape(-1, 48) * f), 0)
    s = rounded(r @ w)
    t = rounded(s * rounded(1 / (1 + np.exp(-s))))
    found = logits_of(cpu_twin(HalfGraph(Dataflow(graph), kind).build(())), images)
    expected = rounded(t @ w)
    step = float(ml_dtypes.finfo(dtype).eps)  # type: ignore[no-untyped-call]
    np.testing.assert_allclose(found, expected, rtol=step, atol=step * np.abs(expected).max())
    assert (found == expected).mean() > 0.9, "sums in another order rarely round to a neighbour"


def test_a_constant_beyond_the_type_becomes_infinite_and_says_nothing() -> None:
    graph = branches(f=np.float32(1e5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.isposinf(held(HalfGraph(Dataflow(graph), TensorProto.FLOAT16).build(()))["f/half"])


@pytest.mark.parametrize(
    ("op_type", "opset", "kinds"),
    [
        ("Conv", 21, {"fp16"}),
        ("Conv", 22, {"fp16", "bf16"}),
        ("Relu", 12, {"fp16"}),
        ("Relu", 13, {"fp16", "bf16"}),
        ("TopK", 20, {"fp16"}),
        ("MatMul", 20, {"fp16", "bf16"}),
        ("LayerNormalization", 20, {"fp16", "bf16"}),
        ("Cast", 20, {"fp16", "bf16"}),
        ("Where", 20, {"fp16", "bf16"}),
        ("NonMaxSuppression", 20, set()),  # float32, whatever the input: no variable stands for it
        ("BitShift", 20, set()),
    ],
)
def test_an_operator_has_the_types_of_its_definition(op_type: str, opset: int, kinds: set[str]) -> None:
    graph = graph_of([node("Relu", "x", "logits")], opset=opset)
    made = helper.make_node(op_type, ["x"], ["y"])
    found = {name for name, kind in HALVES.items() if HalfGraph(Dataflow(graph), kind)._has_half(made)}
    assert found == kinds
    made.domain = "ai.onnx"
    assert {name for name, kind in HALVES.items() if HalfGraph(Dataflow(graph), kind)._has_half(made)} == kinds
    made.domain = "com.microsoft"
    assert not HalfGraph(Dataflow(graph), TensorProto.FLOAT16)._has_half(made)


def test_an_operator_without_the_type_stays_in_float32() -> None:
    model = graph_of([node("Mul", "x f", "m"), node("Selu", "m", "logits")], f=np.float32(2))
    half = HalfGraph(Dataflow(model), TensorProto.BFLOAT16)
    assert half.without_kernel == ("LOGITS",)
    assert nodes_of(half.build(()))[2:] == [
        ("Mul", "x f/half", "m"),
        ("Cast FLOAT", "m", "m/as float"),
        ("Selu", "m/as float", "logits"),
    ]


@pytest.mark.parametrize(("kind", "dtype"), HALF)
def test_what_is_float32_whatever_the_others_are_stays(kind: int, dtype: Any) -> None:
    """The scales of a Resize: the checker refused the graph, after the whole export."""
    nodes = [
        node("Add", "x c", "a"),
        node("Reshape", "a square", "s"),
        helper.make_node("Resize", ["s", "", "scales"], ["r"], "R", mode="nearest"),
        node("Reshape", "r flat", "logits"),
    ]
    shapes = {"square": np.array([-1, 3, 4, 4]), "flat": np.array([-1, 192])}
    constants: dict[str, Any] = {"c": np.float32(0.5), "scales": np.array([1, 1, 2, 2], np.float32), **shapes}
    graph = graph_of(nodes, **constants)
    half = checked(HalfGraph(Dataflow(graph), kind).build(()))
    assert held(half)["scales"].dtype == np.float32


def relu(output: str) -> onnx.NodeProto:
    return helper.make_node("Relu", ["m"], [output], name="RELU")


def add(name: str) -> onnx.NodeProto:
    return helper.make_node("Add", [name, "m"], ["logits"], name="LOGITS")


# Graphs with a tensor, or a constant, of a name that the writer would take; the nodes left in float32.
TAKEN: dict[str, tuple[list[onnx.NodeProto], dict[str, Any], list[str]]] = {
    "a weight's half form is a tensor": ([node("Relu", "x", "W/half"), node("MatMul", "W/half W", "logits")], {}, []),
    "a weight's half form is a constant": (
        [node("MatMul", "x W", "m"), node("Add", "m W/half", "logits")],
        {"W/half": np.full(48, 7, np.float32)},
        ["LOGITS"],
    ),
    "an output's half form": ([node("MatMul", "x W", "logits/half"), node("Relu", "logits/half", "logits")], {}, []),
    "a float32 form": (
        [node("MatMul", "x W", "m"), relu("m/as float"), add("m/as float")],
        {},
        ["LOGITS"],
    ),
    "a half form": (
        [node("MatMul", "x W", "m"), relu("m/as half"), add("m/as half")],
        {},
        ["M", "RELU"],
    ),
    "the twin's": (
        [node("MatMul", "x W", "m"), relu("m/exact"), add("m/exact")],
        {"m/rounded": np.float32(1)},
        [],
    ),
}


@pytest.mark.parametrize(("nodes", "more", "islands"), TAKEN.values(), ids=TAKEN)
def test_a_graph_with_names_like_those_that_are_written(
    nodes: list[onnx.NodeProto], more: dict[str, Any], islands: list[str]
) -> None:
    """A tensor was made twice, or a constant replaced by another one."""
    weight = np.random.default_rng(0).normal(0, 0.1, (48, 48)).astype(np.float32)
    exact = graph_of(nodes, W=weight, **more)
    lowered = checked(HalfGraph(Dataflow(exact), TensorProto.FLOAT16).build(islands))
    images = np.random.default_rng(1).integers(0, 256, (4, 4, 4, 3), dtype=np.uint8)
    found, expected = (logits_of(graph, images) for graph in (checked(cpu_twin(lowered)), checked(exact)))
    np.testing.assert_allclose(found, expected, atol=2e-3 * np.abs(expected).max(), rtol=0)


@pytest.mark.parametrize(("kind", "dtype"), HALF)
def test_a_norm_s_mean_and_deviation_stay_float32(kind: int, dtype: Any) -> None:
    """As its stash_type says, also where they are read, by name, or given."""
    norm = node("LayerNormalization", "x scale", "n mean deviation", epsilon=1e-3)
    nodes = [norm, node("Mul", "n deviation", "m"), node("Add", "m mean", "logits")]
    graph = graph_of(nodes, "logits mean", scale=np.linspace(0.5, 2, 48).astype(np.float32))
    built = checked(HalfGraph(Dataflow(graph), kind).build(()))
    types = Dataflow(built).types
    assert [types[name] for name in ("n", "mean", "deviation", "m")] == [kind, FLOAT, FLOAT, kind]
    twin = checked(cpu_twin(built))
    assert [value.name for value in twin.graph.output] == ["logits", "mean"]
    images = np.random.default_rng(1).integers(0, 256, (4, 4, 4, 3), dtype=np.uint8)
    found, expected = logits_of(twin, images), logits_of(graph, images)
    step = float(ml_dtypes.finfo(dtype).eps)  # type: ignore[no-untyped-call]
    np.testing.assert_allclose(found, expected, rtol=4 * step)


def test_an_operator_that_the_opset_does_not_have_stays_in_float32() -> None:
    """The runtime then says what is wrong with the graph; it was onnx's traceback."""
    half = HalfGraph(
        Dataflow(graph_of([node("Gelu", "x", "g"), node("Relu", "x", "logits")], opset=19)), HALVES["fp16"]
    )
    assert half.without_kernel == ("G",)
