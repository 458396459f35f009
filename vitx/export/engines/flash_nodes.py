"""Attention with a mix over heads in an ONNX graph as one node, `vitx::Reattention` or `vitx::TalkingHeads`.

    Reattention(query, key, value, weight, bias) → out
    TalkingHeads(query, key, value, scores_weight, scores_bias, weight, bias) → out

query, key, value and out are (B, N, H, K) of one type, the mixes (H, H) and (H,) float32; the scale is in the query.
The definition of each comes along as an ONNX function, so that every runtime can run it; an engine takes a plugin.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import onnx
from onnx import NodeProto, TensorProto, helper

from vitx.core.errors import InputError
from vitx.export.engines.flash_kernel import Operator, why_not_compiled
from vitx.export.graph.dataflow import Dataflow, attribute, named_tensor

DOMAIN = "vitx"
_SPLIT, _TRANSPOSED = [0, 2, 1, 3], [0, 2, 3, 1]  # (B, N, H, K) → (B, H, N, K), (B, H, K, N)

_MIX = """
    {to}_weight = CastLike({weight}, {of})
    {to}_shape = Shape({of})
    {to}_rows = Reshape({of}, rows)
    {to}_mixed = MatMul({to}_weight, {to}_rows)
"""
_DEFINITION = """
<domain: "{domain}", opset_import: ["": {opset}]>
{operator} ({inputs}) => (out) {{
    rows = Constant <value_ints = [0, 0, -1]> ()
    q = Transpose <perm = [0, 2, 1, 3]> (query)
    k = Transpose <perm = [0, 2, 3, 1]> (key)
    v = Transpose <perm = [0, 2, 1, 3]> (value)
    raw = MatMul(q, k)
    {before}
    maps = Softmax <axis = -1> ({scores})
    {after}
    mixed = Reshape(after_mixed, after_shape)
    attended = MatMul(mixed, v)
    tokens = Constant <value_ints = [2]> ()
    sums = ReduceSum <keepdims = 1> (v, tokens)
    ends = Constant <value_ints = [1, 2]> ()
    bias_like = CastLike(bias, v)
    bias_H11 = Unsqueeze(bias_like, ends)
    constant = Mul(bias_H11, sums)
    heads = Add(attended, constant)
    out = Transpose <perm = [0, 2, 1, 3]> (heads)
}}
"""
_BIAS_BEFORE = """
    column = Constant <value_ints = [1]> ()
    scores_bias_like = CastLike(scores_bias, raw)
    scores_bias_H1 = Unsqueeze(scores_bias_like, column)
    scores_rows = Add(before_mixed, scores_bias_H1)
    scores = Reshape(scores_rows, before_shape)
"""

Mix = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]  # (H, H) and (H,)


class FusedGraph(NamedTuple):
    """A graph with nodes for the attention of `fused` (names of Softmax nodes), and why each of `left` has none."""

    model: onnx.ModelProto
    fused: tuple[str, ...]
    left: dict[str, str]


class _Attention(NamedTuple):
    query: str
    key: str
    value: str
    out: str
    before: Mix | None
    after: Mix
    shape: tuple[int, int, int]  # heads, tokens, head width
    maker: NodeProto  # of `out`
    rank_one: "_RankOne | None"


class _RankOne(NamedTuple):
    """`joined heads + bias ⊗ Σ_j V_j`: the nodes that join the heads and that add, and the bias (H,)."""

    join: NodeProto
    add: NodeProto
    bias: npt.NDArray[np.float32]


class _NoMatch(Exception):
    """Why an attention is no pattern of ours."""


def fuse_reattention(
    model: onnx.ModelProto, *, against: Callable[[int, int, int, int], str | None] = lambda *_: None
) -> FusedGraph:
    """Replace every attention of N×N maps with a mix over heads by one node, the same function; `model` is not changed.

    `against(element type, heads, tokens, head width)` says why one is to be left, or None.
    """
    flow = Dataflow(model)
    reader = _Reader(flow)
    nodes, constants = {node.name: node for node in flow.nodes}, {}
    fused: list[str] = []
    left: dict[str, str] = {}
    operators: set[Operator] = set()
    for softmax in [node for node in flow.nodes if node.op_type == "Softmax"]:
        if not reader.has_mixed_maps(softmax):
            continue
        try:
            found = reader.attention(softmax)
        except _NoMatch as reason:
            left[softmax.name] = str(reason)
            continue
        refused = against(flow.types[found.query], *found.shape)
        if refused is not None:
            left[softmax.name] = refused
            continue
        operator: Operator = "Reattention" if found.before is None else "TalkingHeads"
        mixes = _mix_tensors(softmax.name, found)
        inputs = [found.query, found.key, found.value, *(tensor.name for tensor in mixes)]
        nodes[found.maker.name] = helper.make_node(operator, inputs, [found.out], name=softmax.name, domain=DOMAIN)
        if found.rank_one is not None:
            join, add, _ = found.rank_one
            del nodes[add.name]
            nodes[join.name].output[0] = add.output[0]
        constants.update({tensor.name: tensor for tensor in mixes})
        fused.append(softmax.name)
        operators.add(operator)
    result = flow.assemble(_used(nodes.values(), flow.outputs), constants)
    if operators:
        result.opset_import.append(helper.make_opsetid(DOMAIN, 1))
        result.functions.extend(definition(operator, flow.opset) for operator in sorted(operators))
    return FusedGraph(result, tuple(fused), left)


def definition(operator: Operator, opset: int) -> onnx.FunctionProto:
    """The plain form of an operator: maps written out, and the bias after softmax as rank one (docs/maths.md §4)."""
    talking = operator == "TalkingHeads"
    before = _MIX.format(of="raw", to="before", weight="scores_weight") + _BIAS_BEFORE
    text = _DEFINITION.format(
        domain=DOMAIN,
        opset=opset,
        operator=operator,
        inputs=f"query, key, value, {'scores_weight, scores_bias, ' if talking else ''}weight, bias",
        before=before if talking else "",
        scores="scores" if talking else "raw",
        after=_MIX.format(of="maps", to="after", weight="weight"),
    )
    function: onnx.FunctionProto = onnx.parser.parse_function(text)
    return function


def plugin_graph(model: onnx.ModelProto) -> FusedGraph:
    """The graph for a builder that has the plugins: what the kernels can do fused, and no definition to fall back on.

    Raises InputError if nothing can be fused, with the reasons.
    """

    def against(kind: int, heads: int, tokens: int, width: int) -> str | None:
        if kind not in (TensorProto.FLOAT16, TensorProto.BFLOAT16):
            return "it is not float16 or bfloat16: export with --precision fp16 or bf16"
        return why_not_compiled(heads, tokens, width)

    graph = fuse_reattention(model, against=against)
    if not graph.fused:
        reasons = "; ".join(f"'{name}': {reason}" for name, reason in graph.left.items())
        raise InputError(f"the flash plugin finds nothing to do: {reasons or 'no attention has a mix over heads'}")
    del graph.model.functions[:]
    for node in graph.model.graph.node:
        if node.domain == DOMAIN:
            named = {"plugin_namespace": DOMAIN, "plugin_version": "1"}
            node.attribute.extend(helper.make_attribute(name, value) for name, value in named.items())
    return graph


class _Reader:
    """Reads the dataflow around a Softmax: upwards to queries and keys, downwards to values and the output."""

    def __init__(self, flow: Dataflow) -> None:
        self.flow = flow
        self.maker = {name: node for node in flow.nodes for name in node.output}
        self.readers = flow.readers()

    def has_mixed_maps(self, softmax: NodeProto) -> bool:
        """Maps (B, H, N, N), N > 1, that something reads before they meet the values, or that something mixed."""
        shape = self.flow.shapes.get(softmax.output[0], ())
        if len(shape) != 4 or shape[2] != shape[3] or shape[2] == 1:
            return False
        readers = self.readers[self._below_casts(softmax.output[0])]
        scores = self.maker.get(self._above_casts(softmax.input[0]))
        return any(node.op_type != "MatMul" for node in readers) or scores is None or scores.op_type != "MatMul"

    def attention(self, softmax: NodeProto) -> _Attention:
        """Raise _NoMatch, saying where the pattern ends, unless the Softmax is part of one."""
        axis = attribute(softmax, "axis", -1)
        if axis not in (-1, 3):
            raise _NoMatch(f"its softmax is over axis {axis}")
        scores, before = self._mix_above(self._above_casts(softmax.input[0]))
        product = self._made(scores, "MatMul")
        query = self._moved_from(product.input[0], _SPLIT)
        key = self._moved_from(product.input[1], _TRANSPOSED)
        maps, after = self._mix_below(self._below_casts(softmax.output[0]))
        last = self._reader(self._below_casts(maps), "MatMul")
        value = self._moved_from(last.input[1], _SPLIT)
        joined = self._reader(last.output[0], "Transpose")
        if attribute(joined, "perm", []) != _SPLIT:
            raise _NoMatch("its heads are not joined as (B, N, H, K)")
        shape = self._shape(query, key, value)
        kinds = {self.flow.types.get(name) for name in (query, key, value, joined.output[0])}
        if len(kinds) != 1:
            raise _NoMatch("queries, keys, values and output are of several types")
        weight, bias = after if after is not None else (np.eye(shape[0], dtype=np.float32), np.zeros(shape[0], "f4"))
        rank_one = self._rank_one(joined.output[0], value, shape)
        if rank_one is not None:
            bias = bias + rank_one.bias
        return _Attention(query, key, value, joined.output[0], before, (weight, bias), shape, joined, rank_one)

    def _rank_one(self, out: str, value: str, shape: tuple[int, int, int]) -> _RankOne | None:
        """The rewrite of the same name, which the kernel undoes at no cost; None leaves it where it is."""
        heads, _, width = shape
        try:
            join = self._reader(out, "Reshape")
            add = self._reader(join.output[0], "Add")
            factor = self._made(next(name for name in add.input if name != join.output[0]), "Mul")
            sums_name, constant = self._constant_operand(factor)
            sums = self._made(sums_name, "ReduceSum")
            per_head = self.flow.array(constant).astype(np.float32).reshape(heads, width)
        except (_NoMatch, StopIteration, ValueError):
            return None
        joined_value = self.maker.get(value)
        same_value = joined_value is not None and sums.input[0] == joined_value.input[0]
        over_tokens = len(sums.input) == 2 and self.flow.array(sums.input[1]).tolist() == [1]
        if not (same_value and over_tokens and attribute(sums, "keepdims", 1) and np.ptp(per_head, axis=1).max() == 0):
            return None
        return _RankOne(join, add, per_head[:, 0])

    def _mix_above(self, name: str) -> tuple[str, Mix | None]:
        """The scores that a mix makes `name` from, and the mix; `name` itself without one."""
        made = self.maker.get(name)
        if made is None or made.op_type != "Reshape":
            return name, None
        rows = self._made(name, "Reshape").input[0]
        bias = None
        if (added := self.maker.get(rows)) is not None and added.op_type == "Add":
            rows, bias = self._constant_operand(added)
        product = self._made(rows, "MatMul")
        flat = self._made(product.input[1], "Reshape")
        return self._above_casts(flat.input[0]), self._mix(product, bias, flat.input[0], name)

    def _mix_below(self, name: str) -> tuple[str, Mix | None]:
        """The tensor that a mix makes of `name`, and the mix; `name` itself without one."""
        if all(node.op_type == "MatMul" for node in self.readers[name]):
            return name, None
        flat = self._reader(name, "Reshape")
        product = self._reader(flat.output[0], "MatMul")
        rows, bias = product.output[0], None
        following = self.readers[rows]
        if len(following) == 1 and following[0].op_type == "Add":
            _, bias = self._constant_operand(following[0])
            rows = following[0].output[0]
        back = self._reader(rows, "Reshape")
        return back.output[0], self._mix(product, bias, name, back.output[0])

    def _mix(self, product: NodeProto, bias: str | None, maps: str, mixed: str) -> Mix:
        shape = self.flow.shapes.get(maps, ())
        if product.input[0] not in self.flow.constants or len(shape) != 4 or self.flow.shapes.get(mixed) != shape:
            raise _NoMatch("what stands around its softmax is no mix over heads")
        heads = shape[1]
        weight = self.flow.array(product.input[0]).astype(np.float32)
        column = np.zeros(weight.shape[0], np.float32) if bias is None else self.flow.array(bias).astype(np.float32)
        if weight.shape != (heads, heads) or column.size != heads:
            raise _NoMatch(f"a mix of its {heads} heads is {weight.shape}, its bias {column.shape}")
        return weight, column.reshape(-1)

    def _constant_operand(self, node: NodeProto) -> tuple[str, str]:
        """The varying and the constant operand of a sum or product of two."""
        first, second = node.input
        if (first in self.flow.constants) == (second in self.flow.constants):
            raise _NoMatch(f"'{node.name}' has no constant operand")
        return (second, first) if first in self.flow.constants else (first, second)

    def _shape(self, query: str, key: str, value: str) -> tuple[int, int, int]:
        shapes = {self.flow.shapes.get(name, ())[1:] for name in (query, key, value)}
        shape = shapes.pop()
        if shapes or len(shape) != 3 or None in shape:
            raise _NoMatch("queries, keys and values are not all of one known shape (B, N, H, K)")
        tokens, heads, width = (int(size or 0) for size in shape)
        return heads, tokens, width

    def _moved_from(self, name: str, order: list[int]) -> str:
        made = self.maker.get(name)
        if made is not None and made.op_type == "Cast":
            raise _NoMatch("its products are an island in another type than its queries, keys or values")
        moved = self._made(name, "Transpose")
        if attribute(moved, "perm", []) != order:
            raise _NoMatch(f"'{moved.name}' is not the transposition of (B, N, H, K)")
        source: str = moved.input[0]
        return source

    def _made(self, name: str, kind: str) -> NodeProto:
        """The node that makes `name` for one reader, of this kind."""
        node = self.maker.get(name)
        if node is None or node.op_type != kind:
            raise _NoMatch(f"'{name}' comes from {node.op_type if node else 'no node'}, not {kind}")
        return node

    def _reader(self, name: str, kind: str) -> NodeProto:
        readers = self.readers[name]
        if name in self.flow.outputs or len(readers) != 1 or readers[0].op_type != kind:
            found = ", ".join(node.op_type for node in readers) or "nothing"
            raise _NoMatch(f"'{name}' is read by {found}, not by one {kind} alone")
        return readers[0]

    def _above_casts(self, name: str) -> str:
        while (node := self.maker.get(name)) is not None and node.op_type == "Cast":
            name = node.input[0]
        return name

    def _below_casts(self, name: str) -> str:
        while len(readers := self.readers[name]) == 1 and readers[0].op_type == "Cast":
            name = readers[0].output[0]
        return name


def _mix_tensors(name: str, found: _Attention) -> list[TensorProto]:
    parts = {"weight": found.after[0], "bias": found.after[1]}
    if found.before is not None:
        parts = {"scores weight": found.before[0], "scores bias": found.before[1], **parts}
    return [named_tensor(f"{name}/{part}", value) for part, value in parts.items()]


def _used(nodes: Iterable[NodeProto], outputs: Iterable[str]) -> list[NodeProto]:
    """The nodes that an output depends on, in order."""
    needed, kept = set(outputs), []
    for node in reversed(list(nodes)):
        if needed.intersection(node.output):
            needed.update(node.input)
            kept.append(node)
    return kept[::-1]
