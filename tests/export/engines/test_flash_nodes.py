"""Attention with a mix over heads as one ONNX node: same logits, no N×N map, and a reason for what is skipped."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
import timm
from flash_definitions import definition, with_definitions
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from reference import randomize_like_trained
from vitx.core.errors import InputError
from vitx.core.preprocess import Preprocessing
from vitx.export import ALL, onnx_from_model, rewrite_for_export
from vitx.export.engines.flash_kernel import Operator
from vitx.export.engines.flash_nodes import DOMAIN, FusedGraph, fuse_reattention, plugin_graph
from vitx.export.graph.dataflow import Dataflow
from vitx.export.precision.half import HalfGraph

Graphs = Callable[..., onnx.ModelProto]
# With average pooling the last block has maps of all tokens too; with a class token it computes that token alone.
NETWORKS: dict[str, dict[str, Any]] = {
    "re-attention": {"attention": "re-attention", "global_pool": "avg"},
    "re-attention, class token": {"attention": "re-attention", "reatten_scale": 0.25},
    "talking heads": {"attention": "talking-heads", "global_pool": "avg"},
    "talking heads, class token": {"attention": "talking-heads", "talking_heads_bias": True},
    "plain": {"attention": "plain"},
    "layer norm": {"attention": "re-attention", "reatten_norm": "layer"},
}


@pytest.fixture(scope="module")
def graph_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., onnx.ModelProto]:
    """The graph of a network by its name in NETWORKS: two blocks at 16 px."""
    path = tmp_path_factory.mktemp("graphs") / "m.onnx"

    @functools.cache
    def export(name: str, rewrites: tuple[str, ...] = ALL) -> onnx.ModelProto:
        network = timm.create_model("deepvit_digits", img_size=16, depth=2, **NETWORKS[name])
        preprocessing = Preprocessing(image_size=16)
        classifier = rewrite_for_export(randomize_like_trained(network).eval(), preprocessing, rewrites=rewrites)
        return onnx_from_model(classifier, preprocessing, tuple("0123456789"), path)

    return export


def logits(model: onnx.ModelProto, batch: int = 3) -> npt.NDArray[np.float32]:
    images = np.random.default_rng(batch).integers(0, 256, (batch, 16, 16, 3), dtype=np.uint8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    result: npt.NDArray[np.float32] = session.run(None, {"images": images})[0]
    return result


def require_equal(plain: onnx.ModelProto, fused: FusedGraph) -> None:
    runnable = with_definitions(fused.model)
    onnx.checker.check_model(runnable, full_check=True)
    for batch in (1, 3):
        expected = logits(plain, batch)
        assert np.abs(logits(runnable, batch) - expected).max() < 1e-5 * np.abs(expected).max()


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node if node.domain == DOMAIN]


@pytest.mark.parametrize("name", ["re-attention", "re-attention, class token", "talking heads"])
def test_the_same_logits_through_nodes(name: str, graph_of: Graphs) -> None:
    plain = graph_of(name)
    before = plain.SerializeToString()
    fused = fuse_reattention(plain)
    assert plain.SerializeToString() == before
    operator = "TalkingHeads" if "talking" in name else "Reattention"
    assert operators(fused.model) == [operator] * (1 if "class" in name else 2)
    assert fused.skipped == {}
    require_equal(plain, fused)
    # No map of all tokens is left, nor a node that only served one.
    shapes = Dataflow(with_definitions(fused.model)).shapes
    assert not [shape for shape in shapes.values() if len(shape) == 4 and shape[2] == shape[3] == 17]
    assert "ReduceSum" not in {node.op_type for node in fused.model.graph.node}


def test_blocks_that_were_not_simplified_are_fused(graph_of: Graphs) -> None:
    """With `join-tokens` alone, the scale, the biases of the mixes and the key bias are where training has them."""
    plain = graph_of("talking heads, class token", ("join-tokens",))
    fused = fuse_reattention(plain)
    assert operators(fused.model) == ["TalkingHeads"] * 2
    require_equal(plain, fused)


def test_blocks_in_the_form_of_training_are_fused_once_the_graph_is_folded(graph_of: Graphs) -> None:
    plain = graph_of("talking heads, class token", ("remove-dead-outputs",))
    fused = fuse_reattention(plain)
    assert operators(fused.model) == ["TalkingHeads"] * 2
    require_equal(plain, fused)


def test_blocks_in_the_form_of_training_are_skipped(graph_of: Graphs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the folds of the graph, which put 1/√d into the queries' weights."""
    monkeypatch.setattr("vitx.export.graph.from_model.simplify", lambda model: {})
    fused = fuse_reattention(graph_of("talking heads, class token", ()))
    assert fused.fused == ()
    assert [reason.endswith("comes from Mul, not Transpose") for reason in fused.skipped.values()] == [True, True]


def test_a_norm_over_heads_is_skipped(graph_of: Graphs) -> None:
    plain = graph_of("layer norm")
    fused = fuse_reattention(plain)
    assert fused.fused == ()
    (reason,) = fused.skipped.values()
    assert reason.endswith("is read by Transpose, not by one MatMul alone")
    require_equal(plain, fused)


def test_plain_attention_is_not_touched(graph_of: Graphs) -> None:
    fused = fuse_reattention(graph_of("plain"))
    assert fused.fused == ()
    assert fused.skipped == {}


MIXED = """
<ir_version: 10, opset_import: ["": 20]>
mixed (float[B,4,4,8] q, float[B,4,4,8] k, float[B,4,4,8] v) => (float[B,4,4,8] out)
<int64[3] view = {VIEW}, int64[4] maps = {-1, 4, 4, 4}> {
  query = Transpose<perm = [0, 2, 1, 3]>(q)
  key = Transpose<perm = [0, 2, 3, 1]>(k)
  value = Transpose<perm = [0, 2, 1, 3]>(v)
  scores = MatMul(query, key)
  map = Softmax(scores)
  rows = Reshape(map, view)
  product = MatMul(weight, rows)
  biased = Add(product, bias)
  after = Reshape(biased, maps)
  heads = MatMul(after, value)
  out = Transpose<perm = [0, 2, 1, 3]>(heads)
}
"""


@pytest.mark.parametrize(
    ("view", "bias", "reason"),
    [
        ("-1, 4, 16", (4, 1), None),
        ("-1, 4, 16", (1, 4, 1), None),
        ("-1, 4, 4", (4, 1), "what stands around its softmax is no mix over heads"),
        ("-1, 4, 16", (1,), "a mix of its 4 heads is (4, 4), its bias (1,)"),
        ("-1, 4, 16", (4, 16), "a mix of its 4 heads is (4, 4), its bias (4, 16)"),
    ],
)
def test_what_only_looks_like_a_mix_over_heads_stays(view: str, bias: tuple[int, ...], reason: str | None) -> None:
    """Four tokens and four heads: a view as (B·H, N, N) mixes queries, and had been taken for a mix over heads."""
    plain, random = onnx.parser.parse_model(MIXED.replace("VIEW", view)), np.random.default_rng(0)
    values = {"weight": random.standard_normal((4, 4), "f4"), "bias": random.standard_normal(bias, "f4")}
    plain.graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in values.items())
    fused = fuse_reattention(plain)
    assert ([*fused.skipped.values()], len(fused.fused)) == (([], 1) if reason is None else ([reason], 0))
    feeds = {name: random.standard_normal((2, 4, 4, 8), "f4") for name in "qkv"}
    (expected,) = ReferenceEvaluator(plain).run(None, feeds)
    (found,) = ReferenceEvaluator(with_definitions(fused.model)).run(None, feeds)
    np.testing.assert_allclose(np.asarray(found, "f4"), np.asarray(expected, "f4"), atol=1e-5)


def test_a_bias_for_each_pair_of_tokens_is_none_of_heads() -> None:
    """Four heads and two tokens: a row of four numbers had been taken for one of each head."""
    text = MIXED.replace("B,4,4,8", "B,2,4,8").replace("VIEW", "-1, 4, 4").replace("-1, 4, 4, 4", "-1, 4, 2, 2")
    plain = onnx.parser.parse_model(text)
    values = {"weight": np.eye(4, dtype="f4"), "bias": np.arange(4, dtype="f4")}
    plain.graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in values.items())
    assert [*fuse_reattention(plain).skipped.values()] == ["a mix of its 4 heads is (4, 4), its bias (4,)"]


def attentions(*kinds: str) -> onnx.ModelProto:
    """One attention of four heads and four tokens for each kind, on the same queries, keys and values."""
    parts, outputs = [], []
    for place, kind in enumerate(kinds):
        name = f"{kind}{place}"
        key, view, maps = ("k6", "view6", "maps6") if kind == "cross" else ("k", "view", "maps")
        value = {"cross": "v6", "strange": "strange"}.get(kind, "v")
        mixed = f"""
  {name}_rows = Reshape({name}_map, {"queries" if kind == "queries" else view})
  {name}_product = MatMul(weight, {name}_rows)
  {name}_biased = Add({name}_product, bias)
  {name}_after = Reshape({name}_biased, {maps})"""
        parts.append(f"""
  {name}_query = Transpose<perm = [0, 2, 1, 3]>(q)
  {name}_key = Transpose<perm = [0, 2, 3, 1]>({key})
  {name}_value = Transpose<perm = [0, 2, 1, 3]>({value})
  {name}_scores = MatMul({name}_query, {name}_key)
  {name}_map = Softmax{"<axis = 1>" if kind == "heads" else ""}({name}_scores){"" if kind == "plain" else mixed}
  {name}_heads = MatMul({name}_{"map" if kind == "plain" else "after"}, {name}_value)
  {name} = Transpose<perm = [0, 2, 1, 3]>({name}_heads)""")
        outputs.append(f"float[B,4,4,8] {name}")
    text = f"""
<ir_version: 10, opset_import: ["": 20, "other": 1]>
mixed (float[B,4,4,8] q, float[B,4,4,8] k, float[B,4,4,8] v, float[B,6,4,8] k6, float[B,6,4,8] v6) =>
({", ".join(outputs)}, float[B,4,4,8] classes, float[B,4,4,8] unknown)
<int64[3] view = {{-1, 4, 16}}, int64[3] view6 = {{-1, 4, 24}}, int64[3] queries = {{-1, 4, 4}},
 int64[4] maps = {{-1, 4, 4, 4}}, int64[4] maps6 = {{-1, 4, 4, 6}}, int64[2] flat = {{-1, 128}}> {{
  strange = other.Make(v)
  lost = Softmax(strange)
  unknown = other.Make(lost)
  row = Reshape(q, flat)
  classes = Softmax(row){"".join(parts)}
}}
"""
    model, random = onnx.parser.parse_model(text), np.random.default_rng(0)
    values = {"weight": random.standard_normal((4, 4), "f4"), "bias": random.standard_normal((4, 1), "f4")}
    model.graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in values.items())
    for node in model.graph.node:
        node.name = node.output[0]
    return model


def test_each_attention_is_looked_at_alone() -> None:
    """Before one that is fused stand others: a Softmax of classes, and of what no shape is known of, is none."""
    kinds = ("plain", "cross", "queries", "heads", "strange", "mixed", "plain", "mixed")
    graph = fuse_reattention(attentions(*kinds))
    assert graph.fused == ("mixed5_map", "mixed7_map")
    assert graph.skipped == {
        "queries2_map": "what stands around its softmax is no mix over heads",
        "heads3_map": "its softmax is over axis 1",
        "strange4_map": "queries, keys and values are not all of one known shape (B, N, H, K)",
    }
    asked: list[Any] = []

    def unsupported(*given: int) -> str | None:
        asked.append(given)
        return "the first is refused" if len(asked) == 1 else None

    graph = fuse_reattention(attentions("mixed", "mixed"), unsupported=unsupported)
    assert asked == [(TensorProto.FLOAT, 4, 4, 8)] * 2
    assert (graph.fused, graph.skipped) == (("mixed1_map",), {"mixed0_map": "the first is refused"})
    nodes = {node.name: node for node in graph.model.graph.node}
    assert (nodes["mixed1_map"].op_type, nodes["mixed1_map"].domain) == ("Reattention", DOMAIN)
    mixes = ["mixed1_map/weight", "mixed1_map/bias"]
    assert ([*nodes["mixed1_map"].input], [*nodes["mixed1_map"].output]) == (["q", "k", "v", *mixes], ["mixed1"])
    assert not [name for name in nodes if name.startswith("mixed1_") and name != "mixed1_map"]
    assert [entry.domain for entry in graph.model.opset_import].count(DOMAIN) == 1


def test_mixes_have_names_that_the_graph_does_not() -> None:
    """A constant of the graph was replaced by the mix, and what read it gave other values."""
    plain = attentions("mixed", "mixed")
    (bias,) = (tensor for tensor in plain.graph.initializer if tensor.name == "bias")
    bias.name = "mixed0_map/weight"
    for node in plain.graph.node:
        node.input[:] = [bias.name if name == "bias" else name for name in node.input]
    last = onnx.helper.make_node("Add", ["mixed0", "mixed0_map/weight"], ["sum"], name="sum")
    plain.graph.node.append(last)
    plain.graph.output.append(onnx.helper.make_tensor_value_info("sum", TensorProto.FLOAT, None))
    fused = fuse_reattention(plain)
    assert fused.fused == ("mixed0_map", "mixed1_map")
    held = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in fused.model.graph.initializer}
    np.testing.assert_array_equal(held["mixed0_map/weight"], onnx.numpy_helper.to_array(bias))
    nodes = {node.name: list(node.input[3:]) for node in fused.model.graph.node}
    assert nodes["mixed0_map"] == ["mixed0_map/again/weight", "mixed0_map/again/bias"]
    assert nodes["mixed1_map"] == ["mixed1_map/weight", "mixed1_map/bias"]


RANK_ONE = """
<ir_version: 10, opset_import: ["": 20]>
mixed (float[B,4,4,8] q, float[B,4,4,8] k, float[B,VALUES] x) => (float[B,4,32] logits)
<int64[3] view = {-1, 4, 16}, int64[4] maps = {-1, 4, 4, 4}, int64[4] heads = {-1, 4, 4, 8},
 int64[3] rows = {-1, 4, 32}, int64[1] axes = {AXES}> {
  query = Transpose<perm = [0, 2, 1, 3]>(q)
  key = Transpose<perm = [0, 2, 3, 1]>(k)
  v = Reshape(x, heads)
  value = Transpose<perm = [0, 2, 1, 3]>(v)
  scores = MatMul(query, key)
  map = Softmax(scores)
  flat = Reshape(map, view)
  product = MatMul(weight, flat)
  after = Reshape(product, maps)
  out4 = MatMul(after, value)
  out = Transpose<perm = [0, 2, 1, 3]>(out4)
  joined = Reshape(out, rows)
  sums = ReduceSum(x, axes)
  factor = Mul(sums, each)
  logits = Add(joined, factor)
}
"""


@pytest.mark.parametrize(
    ("values", "axes", "each", "within"),
    [
        ("4,32", 1, [1.0, 2.0, 3.0, 4.0], True),
        ("4,32", 2, [1.0, 2.0, 3.0, 4.0], False),  # over the channels
        ("128,1", 1, [1.0, 2.0, 3.0, 4.0], False),  # over both
        ("4,32", 1, [*range(32)], False),  # another factor for each channel
    ],
)
def test_only_a_bias_for_each_head_goes_into_the_node(values: str, axes: int, each: list[float], within: bool) -> None:
    """`bias ⊗ Σ_j V_j` is in the mix of the node; another sum of the values stays, and is right all the same."""
    plain = onnx.parser.parse_model(RANK_ONE.replace("VALUES", values, 1).replace("{AXES}", f"{{{axes}}}"))
    random = np.random.default_rng(0)
    constants = {
        "weight": random.standard_normal((4, 4), "f4"),
        "each": np.repeat(np.array(each, "f4"), 32 // len(each)),
    }
    plain.graph.initializer.extend(onnx.numpy_helper.from_array(value, name) for name, value in constants.items())
    fused = fuse_reattention(plain)
    assert len(fused.fused) == 1
    assert ("Add" not in [node.op_type for node in fused.model.graph.node]) == within
    shapes = {"q": (2, 4, 4, 8), "k": (2, 4, 4, 8), "x": (2, *map(int, values.split(",")))}
    feeds = {name: random.standard_normal(shape, "f4") for name, shape in shapes.items()}
    (expected,) = ReferenceEvaluator(plain).run(None, feeds)
    (found,) = ReferenceEvaluator(with_definitions(fused.model)).run(None, feeds)
    np.testing.assert_allclose(np.asarray(found, "f4"), np.asarray(expected, "f4"), atol=1e-4)


@pytest.mark.parametrize("operator", ["Reattention", "TalkingHeads"])
def test_definitions_against_float64(operator: Operator) -> None:
    """ONNX's reference evaluator runs the function; the formula is computed term by term."""
    B, N, H, K = 2, 5, 3, 4
    generator = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"query": (B, N, H, K), "key": (B, N, H, K), "value": (B, N, H, K)}
    if operator == "TalkingHeads":
        shapes |= {"scores_weight": (H, H), "scores_bias": (H,)}
    shapes |= {"weight": (H, H), "bias": (H,)}
    given = {name: generator.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    node = helper.make_node(operator, list(given), ["out"], domain=DOMAIN)
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    out = helper.make_tensor_value_info("out", TensorProto.FLOAT, (B, N, H, K))
    model = helper.make_model(
        helper.make_graph([node], "g", inputs, [out]),
        functions=[definition(operator, 20)],
        opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, 1)],
    )
    (found,) = ReferenceEvaluator(model).run(None, given)
    exact = {name: value.astype(np.float64) for name, value in given.items()}
    scores = np.einsum("bnhk,bmhk->bhnm", exact["query"], exact["key"])
    if operator == "TalkingHeads":
        scores = np.einsum("hg,bgnm->bhnm", exact["scores_weight"], scores) + exact["scores_bias"][:, None, None]
    maps = np.exp(scores) / np.exp(scores).sum(axis=-1, keepdims=True)
    mixed = np.einsum("hg,bgnm->bhnm", exact["weight"], maps) + exact["bias"][:, None, None]
    expected = np.einsum("bhnm,bmhk->bnhk", mixed, exact["value"])
    assert np.abs(found - expected).max() < 1e-5


@pytest.mark.parametrize("kind", [TensorProto.FLOAT16, TensorProto.BFLOAT16], ids=["fp16", "bf16"])
def test_the_graph_for_a_builder(kind: int, graph_of: Graphs) -> None:
    """The attention whose products are float32 islands stays; the other is a plugin node."""
    flow = Dataflow(graph_of("re-attention"))
    first, second = [node for node in flow.nodes if node.op_type == "Softmax"]
    products = flow.producers()[second.input[0]].name
    graph = plugin_graph(HalfGraph(flow, kind).build({products}))
    assert graph.fused == (first.name,)
    reason = "its products are an island in another type than its queries, keys or values"
    assert graph.skipped == {second.name: reason}
    (node,) = [node for node in graph.model.graph.node if node.domain == DOMAIN]
    assert {entry.name: helper.get_attribute_value(entry) for entry in node.attribute} == {
        "plugin_namespace": b"vitx",
        "plugin_version": b"1",
    }
    types = {tensor.name: tensor.data_type for tensor in graph.model.graph.initializer}
    assert [types[name] for name in node.input[3:]] == [TensorProto.FLOAT] * 2


def test_softmax_in_float32_is_fused_away(graph_of: Graphs) -> None:
    """The kernel computes its softmax in float32 anyway, so Casts around it do not end the pattern."""
    flow = Dataflow(graph_of("talking heads"))
    softmaxes = {node.name for node in flow.nodes if node.op_type == "Softmax"}
    graph = plugin_graph(HalfGraph(flow, TensorProto.FLOAT16).build(softmaxes))
    assert len(graph.fused) == 2
    assert graph.skipped == {}


def test_a_graph_without_anything_to_fuse_is_refused(graph_of: Graphs) -> None:
    with pytest.raises(InputError, match=r"finds nothing to do: 'node_.*': it is not float16 or bfloat16: export with"):
        plugin_graph(graph_of("re-attention"))
    with pytest.raises(InputError, match="finds nothing to do: no attention has a mix over heads"):
        plugin_graph(graph_of("plain"))
