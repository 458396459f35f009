"""Names of tensors between blocks, in graphs whose nodes say of which module they are."""

from collections.abc import Sequence
from typing import Any

import onnx
import onnx_ir
import pytest
from onnx import TensorProto, helper

from vitx.export.graph.block_names import block_name, name_block_outputs, softmax_name

FLOAT = TensorProto.FLOAT


def node(op_type: str, inputs: str, output: str, scope: str = "", **attributes: Any) -> onnx.NodeProto:
    """A node of the module `scope`, and of those above it, as the exporter says it."""
    made = helper.make_node(op_type, inputs.split(), [output], name=output.upper(), **attributes)
    parts = scope.split(".") if scope else []
    scopes = ["", *(".".join(parts[: count + 1]) for count in range(len(parts)))]
    made.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=repr(scopes))
    return made


def graph_of(nodes: Sequence[onnx.NodeProto]) -> Any:
    graph = helper.make_graph(
        nodes,
        "traced",
        [helper.make_tensor_value_info("x", FLOAT, ["N", 4])],
        [helper.make_tensor_value_info("logits", FLOAT, ["N", 4])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return onnx_ir.from_proto(onnx.shape_inference.infer_shapes(model))


def named(*nodes: onnx.NodeProto) -> dict[str, str]:
    """The new names of the tensors that have one, by the old name."""
    model = graph_of(nodes)
    values = {value.name: value for made in model.graph for value in made.outputs}
    name_block_outputs(model)
    return {old: value.name for old, value in values.items() if value.name != old}


STEM = node("Relu", "x", "stem", "model.patch_embed")
HEAD = node("Neg", "second", "logits", "model.head")


def blocks(under: str = "model.") -> list[onnx.NodeProto]:
    """Two blocks of two nodes each."""
    return [
        *(node("Relu", "stem", "a", f"{under}blocks.0.mlp"), node("Add", "a stem", "first", f"{under}blocks.0")),
        *(node("Relu", "first", "b", f"{under}blocks.1.mlp"), node("Add", "b first", "second", f"{under}blocks.1")),
    ]


@pytest.mark.parametrize("under", ["model.", ""])
def test_blocks_of_a_network_and_of_a_wrapped_one(under: str) -> None:
    assert named(STEM, *blocks(under), HEAD) == {"stem": "embedding", "first": "blocks.0", "second": "blocks.1"}


@pytest.mark.parametrize("under", ["model.stages.0.", "stages.", "other."])
def test_nested_lists_have_no_names(under: str) -> None:
    assert named(STEM, *blocks(under), HEAD) == {}


def test_a_block_with_a_list_of_blocks_in_it() -> None:
    """A scope of a block within a block is of neither: the numbers would be ambiguous."""
    inner = blocks()
    for made in inner[2:]:
        made.metadata_props[0].value = "['', 'model.blocks.0', 'model.blocks.1']"
    assert named(STEM, *inner, HEAD) == {"stem": "embedding", "first": "blocks.0"}


def test_a_gap_leaves_all_names() -> None:
    assert named(STEM, node("Relu", "stem", "a", "model.blocks.1"), node("Neg", "a", "logits", "model.head")) == {}


def test_an_output_of_the_graph_keeps_its_name() -> None:
    """The last block gives the logits, and what reads them otherwise is no block."""
    last = node("Add", "first stem", "logits", "model.blocks.1")
    after = node("Neg", "logits", "unread", "model.head")
    assert named(STEM, *blocks()[:2], last, after) == {"stem": "embedding", "first": "blocks.0"}


def test_the_last_tensor_that_leaves_a_block_is_its_output() -> None:
    """As NeuTRENO's values, which all later blocks read, before and after the block's own output."""
    first = [
        node("Relu", "stem", "values", "model.blocks.0.attn"),
        node("Add", "values stem", "first", "model.blocks.0"),
    ]
    for inputs in ("first values", "values first"):
        second = node("Add", inputs, "second", "model.blocks.1")
        found = named(STEM, *first, second, HEAD)
        assert found == {"stem": "embedding", "first": "blocks.0", "second": "blocks.1"}


def test_the_first_tensor_that_block_0_reads_is_the_embedding() -> None:
    """Others are positions, and nodes within the block that the exporter left without their module."""
    positions = node("Neg", "x", "positions")
    inner = [node("Relu", "stem", "a", "model.blocks.0"), node("Add", "a positions", "first", "model.blocks.0")]
    found = named(STEM, positions, *inner, node("Neg", "first", "logits", "model.head"))
    assert found == {"stem": "embedding", "first": "blocks.0"}


def test_what_later_blocks_read_of_outside_is_no_embedding() -> None:
    late = node("Add", "first positions", "second", "model.blocks.1")
    positions = node("Neg", "x", "positions")
    whole = [node("Relu", "x", "a", "model.blocks.0"), node("Neg", "a", "first", "model.blocks.0")]
    assert named(positions, *whole, late, HEAD) == {"first": "blocks.0", "second": "blocks.1"}


def test_shapes_that_leave_a_block_are_no_output() -> None:
    """And those that block 0 reads are no embedding."""
    outside = node("Shape", "x", "size")
    reshape = node("Reshape", "stem size", "a", "model.blocks.0")
    shape = node("Shape", "a", "inner", "model.blocks.0.attn")
    output = node("Relu", "a", "first", "model.blocks.0")
    second = node("Reshape", "first inner", "second", "model.blocks.1")
    found = named(outside, STEM, reshape, output, shape, second, HEAD)
    assert found == {"stem": "embedding", "first": "blocks.0", "second": "blocks.1"}


def test_an_input_that_is_left_out() -> None:
    clip = helper.make_node("Clip", ["stem", "", "stem"], ["first"], name="CLIP")
    clip.metadata_props.add(key="pkg.torch.onnx.name_scopes", value="['', 'model.blocks.0']")
    assert named(STEM, clip, node("Neg", "first", "logits")) == {"stem": "embedding", "first": "blocks.0"}


def with_softmaxes(*of: tuple[str, str]) -> dict[str, str]:
    """The names where there are Softmaxes of these tensors' names and scopes, each of what the one before made."""
    made, last = [], "stem"
    for name, scope in of:
        made.append(node("Softmax", last, name, scope))
        last = name
    after = node("Add", f"{last} stem", "first", "model.blocks.0")
    return named(STEM, *made, after, node("Neg", "first", "logits", "model.head"))


def test_the_one_softmax_of_a_block_makes_its_maps() -> None:
    plain = {"stem": "embedding", "first": "blocks.0"}
    attention = ("maps", "model.blocks.0.attn")
    assert with_softmaxes(attention) == {**plain, "maps": "blocks.0.softmax"}
    assert with_softmaxes(attention, ("others", "model.blocks.0.mlp")) == plain


@pytest.mark.parametrize("name", ["contrast", "contrast1", "contrast2"])
def test_contranorm_s_softmax_makes_no_maps(name: str) -> None:
    plain = {"stem": "embedding", "first": "blocks.0", "maps": "blocks.0.softmax"}
    assert with_softmaxes(("maps", "model.blocks.0.attn"), ("c", f"model.blocks.0.{name}")) == plain
    assert with_softmaxes((f"c{name}", f"model.blocks.0.{name}"), ("maps", "model.blocks.0.attn")) == plain


def test_a_module_that_is_called_alike_is_no_contranorm() -> None:
    assert with_softmaxes(("maps", "model.blocks.0.contrast3"))["maps"] == "blocks.0.softmax"


def test_a_softmax_outside_of_the_blocks_has_no_name() -> None:
    pooled = node("Softmax", "first", "pooled", "model.attn_pool")
    whole = [node("Relu", "stem", "a", "model.blocks.0"), node("Neg", "a", "first", "model.blocks.0")]
    found = named(STEM, *whole, pooled, node("Neg", "pooled", "logits"))
    assert found == {"stem": "embedding", "first": "blocks.0"}


def test_the_names() -> None:
    assert (block_name(11), softmax_name(0)) == ("blocks.11", "blocks.0.softmax")
