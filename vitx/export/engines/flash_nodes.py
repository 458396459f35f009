"""Pattern matching in an ONNX graph: attention with a mix over heads becomes one node of our domain `vitx`.

    Reattention(query, key, value, weight, bias) → out
    TalkingHeads(query, key, value, scores_weight, scores_bias, weight, bias) → out

query, key, value and out are (B, N, H, K) of one type, the mixes (H, H) and (H,) float32; the scale is in the query.
Of each image `out_h = (Σ_g weight_hg softmax(s)_g + bias_h) value_h`, where s are the scores `query_h key_hᵀ`, in
TalkingHeads mixed by `scores_weight` and `scores_bias` in the same way. A TensorRT engine runs them by a plugin.
"""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import onnx
from onnx import NodeProto, TensorProto, helper

from vitx.core.errors import InputError
from vitx.export.engines.flash_kernel import Operator, why_not_compiled
from vitx.export.graph.dataflow import Dataflow, attribute, free_tag, named_tensor

DOMAIN = "vitx"
_SPLIT, _TRANSPOSED = [0, 2, 1, 3], [0, 2, 3, 1]  # (B, N, H, K) → (B, H, N, K), (B, H, K, N)

Mix = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]  # (H, H) and (H,)


class FusedGraph(NamedTuple):
    """A graph in which attention is fused into nodes. An attention is named by its Softmax node.

    skipped: the attention with a mix that stays as it was, and the reason.
    """

    model: onnx.ModelProto
    fused: tuple[str, ...]
    skipped: dict[str, str]


class _Attention(NamedTuple):
    """A matched pattern: its tensors by name, its mixes, and the nodes that the fused node replaces."""

    query: str
    key: str
    value: str
    out: str
    before: Mix | None
    after: Mix
    shape: tuple[int, int, int]  # heads, tokens, head width
    producer: NodeProto  # of `out`
    rank_one: "_RankOne | None"


class _RankOne(NamedTuple):
    """`joined heads + bias ⊗ Σ_j V_j` (the rewrite split-rank-one-bias): Reshape, Add, and the bias (H,)."""

    join: NodeProto
    add: NodeProto
    bias: npt.NDArray[np.float32]


class _NoMatch(Exception):
    """Why an attention does not match the pattern."""


def fuse_reattention(
    model: onnx.ModelProto, *, unsupported: Callable[[int, int, int, int], str | None] = lambda *_: None
) -> FusedGraph:
    """Replace every attention of N×N maps with a mix over heads by one equal node; `model` is not changed.

    `unsupported(element type, heads, tokens, head width)` returns why an attention is not to be fused, or None.
    """
    flow = Dataflow(model)
    matcher = _Matcher(flow)
    nodes, constants = {node.name: node for node in flow.nodes}, {}
    fused: list[str] = []
    skipped: dict[str, str] = {}
    taken = flow.names()
    for softmax in [node for node in flow.nodes if node.op_type == "Softmax"]:
        if not matcher.has_mixed_maps(softmax):
            continue
        try:
            found = matcher.attention(softmax)
        except _NoMatch as reason:
            skipped[softmax.name] = str(reason)
            continue
        reason_against = unsupported(flow.types[found.query], *found.shape)
        if reason_against is not None:
            skipped[softmax.name] = reason_against
            continue
        operator: Operator = "Reattention" if found.before is None else "TalkingHeads"
        mixes = _mix_tensors(softmax.name, found, taken)
        inputs = [found.query, found.key, found.value, *(tensor.name for tensor in mixes)]
        # In the place of the node that made the output, so that the order of the graph stays topological.
        nodes[found.producer.name] = helper.make_node(operator, inputs, [found.out], name=softmax.name, domain=DOMAIN)
        if found.rank_one is not None:  # its bias is in the fused node: the Reshape now makes what the Add made
            join, add, _ = found.rank_one
            del nodes[add.name]
            nodes[join.name].output[0] = add.output[0]
        constants.update({tensor.name: tensor for tensor in mixes})
        fused.append(softmax.name)
    result = flow.assemble(_live_nodes(nodes.values(), flow.outputs), constants)
    if fused:
        result.opset_import.append(helper.make_opsetid(DOMAIN, 1))
    return FusedGraph(result, tuple(fused), skipped)


def plugin_graph(model: onnx.ModelProto) -> FusedGraph:
    """The graph for a builder that has the plugins: fused where the kernels can.

    Raises InputError, with the reasons, if nothing can be fused.
    """

    def unsupported(kind: int, heads: int, tokens: int, width: int) -> str | None:
        if kind not in (TensorProto.FLOAT16, TensorProto.BFLOAT16):
            return "it is not float16 or bfloat16: export with --precision fp16 or bf16"
        return why_not_compiled(heads, tokens, width)

    graph = fuse_reattention(model, unsupported=unsupported)
    if not graph.fused:
        reasons = "; ".join(f"'{name}': {reason}" for name, reason in graph.skipped.items())
        raise InputError(f"the flash plugin finds nothing to do: {reasons or 'no attention has a mix over heads'}")
    for node in graph.model.graph.node:
        if node.domain == DOMAIN:
            # The parser looks a plugin up by these two attributes and the operator's name.
            named = {"plugin_namespace": DOMAIN, "plugin_version": "1"}
            node.attribute.extend(helper.make_attribute(name, value) for name, value in named.items())
    return graph


class _Matcher:
    """Matches the dataflow around a Softmax: upwards to queries and keys, downwards to values and the output."""

    def __init__(self, flow: Dataflow) -> None:
        self.flow = flow
        self.producer, self.readers = flow.producers(), flow.readers()

    def has_mixed_maps(self, softmax: NodeProto) -> bool:
        """Whether maps (B, H, N, N), N > 1, are changed between the two products of attention, besides the softmax.

        True also for changes that are no mix: `attention` then says why.
        """
        shape = self.flow.shapes.get(softmax.output[0], ())
        if len(shape) != 4 or shape[2] != shape[3] or shape[2] == 1:
            return False
        readers = self.readers[self._below_casts(softmax.output[0])]
        scores = self.producer.get(self._above_casts(softmax.input[0]))
        return any(node.op_type != "MatMul" for node in readers) or scores is None or scores.op_type != "MatMul"

    def attention(self, softmax: NodeProto) -> _Attention:
        """Match query·keyᵀ → mix → Softmax → mix → ·value → join, or raise _NoMatch, saying where it ends."""
        axis = attribute(softmax, "axis", -1)
        if axis not in (-1, 3):
            raise _NoMatch(f"its softmax is over axis {axis}")
        scores, before = self._mix_above(self._above_casts(softmax.input[0]))
        product = self._produced(scores, "MatMul")
        query = self._transposed_from(product.input[0], _SPLIT)
        key = self._transposed_from(product.input[1], _TRANSPOSED)
        maps, after = self._mix_below(self._below_casts(softmax.output[0]))
        last = self._only_reader(self._below_casts(maps), "MatMul")
        value = self._transposed_from(last.input[1], _SPLIT)
        joined = self._only_reader(last.output[0], "Transpose")
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
        """What the rewrite split-rank-one-bias left behind `out`, or None: then it stays, and is right all the same.

        The kernel adds the bias to the mixed maps in registers, where it costs nothing.
        """
        heads, tokens, width = shape
        try:
            join = self._only_reader(out, "Reshape")
            add = self._only_reader(join.output[0], "Add")
            factor = self._produced(next(name for name in add.input if name != join.output[0]), "Mul")
            sums_name, constant = self._constant_operand(factor)
            sums = self._produced(sums_name, "ReduceSum")
            per_head = self.flow.array(constant).astype(np.float32).reshape(heads, width)
        except (_NoMatch, StopIteration, ValueError):
            return None
        joined_value = self.producer.get(value)
        # It must sum these values (B, N, C) over tokens, and the constant (C,) must repeat one number for each head.
        same_value = joined_value is not None and sums.input[0] == joined_value.input[0]
        of_values = self.flow.shapes.get(sums.input[0], ())[1:] == (tokens, heads * width)
        axes = sums.input[1] if len(sums.input) == 2 and of_values else ""
        over_tokens = axes in self.flow.constants and self.flow.array(axes).tolist() == [1]
        if not (same_value and over_tokens and attribute(sums, "keepdims", 1) and np.ptp(per_head, axis=1).max() == 0):
            return None
        return _RankOne(join, add, per_head[:, 0])

    def _mix_above(self, name: str) -> tuple[str, Mix | None]:
        """(the tensor that a mix turns into `name`, the mix), or (`name`, None) without a mix.

        A mix is `Reshape(weight · Reshape(maps, (B, H, N·N)) + bias, (B, H, N, N))`.
        """
        made = self.producer.get(name)
        if made is None or made.op_type != "Reshape":
            return name, None
        rows, bias = made.input[0], None
        if (added := self.producer.get(rows)) is not None and added.op_type == "Add":
            rows, bias = self._constant_operand(added)
        product = self._produced(rows, "MatMul")
        flat = self._produced(product.input[1], "Reshape")
        return self._above_casts(flat.input[0]), self._mix(product, bias, flat.input[0], name)

    def _mix_below(self, name: str) -> tuple[str, Mix | None]:
        """(the tensor that a mix turns `name` into, the mix), or (`name`, None) without a mix."""
        if all(node.op_type == "MatMul" for node in self.readers[name]):
            return name, None
        flat = self._only_reader(name, "Reshape")
        product = self._only_reader(flat.output[0], "MatMul")
        rows, bias = product.output[0], None
        following = self.readers[rows]
        if len(following) == 1 and following[0].op_type == "Add":
            _, bias = self._constant_operand(following[0])
            rows = following[0].output[0]
        back = self._only_reader(rows, "Reshape")
        return back.output[0], self._mix(product, bias, name, back.output[0])

    def _mix(self, product: NodeProto, bias: str | None, maps: str, mixed: str) -> Mix:
        """Weight (H, H) and bias (H,) of a matched mix of `maps` into `mixed`; both must have one shape."""
        shape, flat, after = (self.flow.shapes.get(name, ()) for name in (maps, product.input[1], mixed))
        heads, *sides = (size or 0 for size in shape[1:4] or (0,))
        # Of (B, H, N·N): where H is N too, another view of the maps would have a mix of queries.
        of_heads = len(shape) == 4 and flat[1:] == (heads, math.prod(sides)) and after == shape
        if product.input[0] not in self.flow.constants or not of_heads:
            raise _NoMatch("what stands around its softmax is no mix over heads")
        weight = self.flow.array(product.input[0]).astype(np.float32)
        column = np.zeros((heads, 1), np.float32) if bias is None else self.flow.array(bias).astype(np.float32)
        if weight.shape != (heads, heads) or column.shape not in ((heads, 1), (1, heads, 1)):
            raise _NoMatch(f"a mix of its {heads} heads is {weight.shape}, its bias {column.shape}")
        return weight, column.reshape(-1)

    def _constant_operand(self, node: NodeProto) -> tuple[str, str]:
        """(the varying operand, the constant operand) of a sum or product of two."""
        first, second = node.input
        if (first in self.flow.constants) == (second in self.flow.constants):
            raise _NoMatch(f"'{node.name}' has no constant operand")
        return (second, first) if first in self.flow.constants else (first, second)

    def _shape(self, query: str, key: str, value: str) -> tuple[int, int, int]:
        """(heads, tokens, head width), which queries, keys and values must share."""
        shapes = {self.flow.shapes.get(name, ())[1:] for name in (query, key, value)}
        shape = shapes.pop()
        if shapes or len(shape) != 3 or None in shape:
            raise _NoMatch("queries, keys and values are not all of one known shape (B, N, H, K)")
        tokens, heads, width = (int(size or 0) for size in shape)
        return heads, tokens, width

    def _transposed_from(self, name: str, order: list[int]) -> str:
        """The tensor (B, N, H, K) of which `name` is the transposition by `order`."""
        made = self.producer.get(name)
        if made is not None and made.op_type == "Cast":
            raise _NoMatch("its products are an island in another type than its queries, keys or values")
        moved = self._produced(name, "Transpose")
        if attribute(moved, "perm", []) != order:
            raise _NoMatch(f"'{moved.name}' is not the transposition of (B, N, H, K)")
        source: str = moved.input[0]
        return source

    def _produced(self, name: str, kind: str) -> NodeProto:
        """The node that produces `name`, which must be of this kind."""
        node = self.producer.get(name)
        if node is None or node.op_type != kind:
            raise _NoMatch(f"'{name}' comes from {node.op_type if node else 'no node'}, not {kind}")
        return node

    def _only_reader(self, name: str, kind: str) -> NodeProto:
        """The only reader of `name`, which must be of this kind; another reader would miss the tensor after fusion."""
        readers = self.readers[name]
        if name in self.flow.outputs or len(readers) != 1 or readers[0].op_type != kind:
            found = ", ".join(node.op_type for node in readers) or "nothing"
            raise _NoMatch(f"'{name}' is read by {found}, not by one {kind} alone")
        return readers[0]

    # Casts around the softmax and the mixes end nothing: the kernel has both in float32 anyway.
    def _above_casts(self, name: str) -> str:
        while (node := self.producer.get(name)) is not None and node.op_type == "Cast":
            name = node.input[0]
        return name

    def _below_casts(self, name: str) -> str:
        while len(readers := self.readers[name]) == 1 and readers[0].op_type == "Cast":
            name = readers[0].output[0]
        return name


def _mix_tensors(name: str, found: _Attention, taken: set[str]) -> list[TensorProto]:
    parts = {"weight": found.after[0], "bias": found.after[1]}
    if found.before is not None:
        parts = {"scores weight": found.before[0], "scores bias": found.before[1], **parts}
    tag = free_tag(name, parts, taken)
    return [named_tensor(f"{tag}/{part}", value) for part, value in parts.items()]


def _live_nodes(nodes: Iterable[NodeProto], outputs: Iterable[str]) -> list[NodeProto]:
    """The nodes on which an output depends, in order."""
    needed, kept = set(outputs), []
    for node in reversed(list(nodes)):
        if needed.intersection(node.output):
            needed.update(node.input)
            kept.append(node)
    return kept[::-1]
