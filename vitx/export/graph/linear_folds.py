"""Exact folds of arithmetic into the weights of linear layers, in place.

A linear layer is a Conv, a Gemm, or a MatMul by a constant (K, C) with or without the addition of a bias (C,). Each
fold takes an onnx_ir.Graph and returns the number of places it changed. New weights are new constants, so a weight that
another node reads too stays what it was; a result that another node reads is not folded.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from vitx.export.graph.edits import (
    UNKNOWN,
    Array,
    array_of,
    constant,
    dims_of,
    insert,
    is_free,
    is_inner,
    nodes_of,
    producer_of,
    replace,
    reshape_target,
    reshaped,
    shape_of,
    source_of,
)
from vitx.export.graph.view_folds import VIEWS, slice_of

# In elements. Two constants that are added one after the other, such as the position biases of heads and the masks of
# windows, are joined up to this size: their sum has the shape that both are broadcast to.
JOINED_LIMIT = 2**21
# A factor that is one number varies along no axis: any will do.
ANY = -1


def fold_scales(graph: ir.Graph) -> int:
    """A factor for each output channel, or one for all: `c⊙(Wx + b) = (c⊙W)x + c⊙b`.

    LayerScale, and 1/√d of attention. The factor may stand behind views and transposes of the layer's result: then the
    axis along which it varies is followed back to the layer's channels.
    """
    changed = 0
    for node in nodes_of(graph, "Mul"):
        varying, factor = _operands(node)
        if varying is None or factor is None:
            continue
        axis = _varying_axis(varying, factor)
        layer = None if axis is None else _layer_behind(varying, axis)
        if layer is not None:
            _scale(graph, layer, factor.reshape(-1))
            replace(graph, node, varying)
            changed += 1
    return changed


def split_joint_projections(graph: ir.Graph) -> int:
    """One layer whose channels are then taken apart, as of queries, keys and values, becomes a layer for each part.

    (…, K) · (K, P·C) viewed as (…, P, C₁, C₂) and transposed so that P comes first, of which each reader takes one: a
    part needs no copy out of the joint result, and its factor and transposes can be folded on their own.
    """
    changed = 0
    for node in nodes_of(graph, "Transpose"):
        view = producer_of(node.inputs[0], "Reshape")
        perm = node.attributes.get_ints("perm", ())
        layer = None if view is None else _linear(view.inputs[0])
        if view is None or layer is None or not perm or not is_inner(source_of(node)) or not is_inner(source_of(view)):
            continue
        # Of a Gemm or Conv the last axis of the weight is not, or need not be, that of the channels.
        if layer.product.op_type != "MatMul" or (layer.bias is not None and layer.bias.size != layer.weight.shape[1]):
            continue
        joint, parted = shape_of(view.inputs[0]), shape_of(view.outputs[0])
        axis = perm[0]
        if joint is None or parted is None or axis != len(joint) - 1 or joint[:-1] != parted[:axis]:
            continue
        parts = [_part_taken(usage.node) for usage in node.outputs[0].uses()]
        if not is_free(node.outputs[0]) or not parts or any(part is None for part in parts):
            continue
        for index, last in [part for part in parts if part is not None]:
            _replace_part(graph, layer, index, parted[axis:], perm, last)
        changed += 1
    return changed


def join_added_constants(graph: ir.Graph) -> int:
    """`(x + a) + b = x + (a + b)` for constants a and b, also where a view lies between that splits the first axis.

    Position biases (H, N, N) and masks of windows (W, 1, N, N), where scores (B·W, H, N, N) are viewed as
    (B, W, H, N, N) for the mask.
    """
    changed = 0
    for node in nodes_of(graph, "Add"):
        varying, second = _operands(node)
        if varying is None or second is None or not is_inner(varying):
            continue
        view = producer_of(varying, "Reshape")
        inner = varying if view is None else source_of(view)
        first_add = producer_of(inner, "Add")
        if first_add is None or (view is not None and not is_inner(inner)):
            continue
        source, first = _operands(first_add)
        if source is None or first is None or shape_of(source) != shape_of(inner):
            continue
        if view is not None:
            first = _behind_view(first, shape_of(inner), shape_of(varying))
        if first is None or math.prod(np.broadcast_shapes(first.shape, second.shape)) > JOINED_LIMIT:
            continue
        if view is not None:
            source = reshaped(graph, node, source, dims_of(varying))
        both = constant(graph, node.outputs[0], first + second)
        replace(graph, node, insert(graph, node, "Add", [source, both], dims_of(node.outputs[0])))
        changed += 1
    return changed


def linears_as_gemm(graph: ir.Graph) -> int:
    """`x W + b` of (…, K) as one Gemm of all rows (·, K), with its bias inside, between two views."""
    changed = 0
    for node in nodes_of(graph, "Add"):
        output = node.outputs[0]
        layer = _linear(output)
        if layer is None or layer.bias is None or reshape_target(output) is None:
            continue
        shape = shape_of(layer.data)
        weight = array_of(layer.product.inputs[1])
        if shape is None or len(shape) < 3 or weight is None or layer.bias.shape != weight.shape[1:]:
            continue
        rows = reshaped(graph, node, layer.data, [None, len(weight)])
        bias = constant(graph, output, layer.bias)
        product = insert(graph, node, "Gemm", [rows, source_of(layer.product, 1), bias], [None, weight.shape[1]])
        replace(graph, node, reshaped(graph, node, product, dims_of(output)))
        changed += 1
    return changed


@dataclass(frozen=True)
class _Linear:
    """A layer's nodes: `product` is a Conv, a Gemm or a MatMul; `addition` is of a MatMul's bias."""

    product: ir.Node
    addition: ir.Node | None
    weight: Array
    bias: Array | None

    @property
    def data(self) -> ir.Value:
        return source_of(self.product)


def _linear(value: ir.Value | None) -> _Linear | None:
    """The layer that makes `value`, if its weight and bias are constants."""
    addition = producer_of(value, "Add")
    if addition is not None:
        varying, bias = _operands(addition)
        product = producer_of(varying, "MatMul")
        inside = varying is not None and is_inner(varying) and shape_of(varying) == shape_of(addition.outputs[0])
        # A bias for each channel: what varies along other axes is no part of the layer.
        if product is None or bias is None or not inside or bias.size != (bias.shape[-1] if bias.ndim else 1):
            return None
        weight = array_of(product.inputs[1])
        return _Linear(product, addition, weight, bias.reshape(-1)) if weight is not None and weight.ndim == 2 else None
    product = producer_of(value, "MatMul", "Gemm", "Conv")
    if product is None:
        return None
    weight = array_of(product.inputs[1])
    given = product.inputs[2] if len(product.inputs) > 2 else None
    bias = array_of(given)
    if weight is None or (product.op_type == "MatMul" and weight.ndim != 2) or (given is not None and bias is None):
        return None
    return _Linear(product, None, weight, bias)


def _layer_behind(value: ir.Value, axis: int) -> _Linear | None:
    """The layer whose result `value` is, behind views and transposes that nothing else reads.

    axis: the one that must be the layer's channels, or ANY.
    """
    while is_inner(value):
        layer = _linear(value)
        if layer is not None:
            rank = len(shape_of(value) or ())
            return layer if axis in (ANY, 1 if layer.product.op_type == "Conv" else rank - 1) else None
        node = producer_of(value, "Transpose", *VIEWS)
        before = None if node is None else node.inputs[0]
        if node is None or before is None:
            return None
        if axis != ANY:
            moved = _axis_before(node, axis)
            if moved is None:
                return None
            axis = moved
        value = before
    return None


def _axis_before(node: ir.Node, axis: int) -> int | None:
    """Where an axis of the output of a transpose or view is in its input; of a view only the last is followed."""
    if node.op_type == "Transpose":
        perm = node.attributes.get_ints("perm", ())
        return perm[axis] if perm else None
    before, after = shape_of(node.inputs[0]), shape_of(node.outputs[0])
    if not before or not after or axis != len(after) - 1 or before[-1] != after[-1] or after[-1] == UNKNOWN:
        return None
    return len(before) - 1


def _scale(graph: ir.Graph, layer: _Linear, factor: Array) -> None:
    """Multiply the layer's outputs by a number (1,) or each channel by its own (C,), in place."""
    product = layer.product
    by_row = product.op_type == "Conv" or (product.op_type == "Gemm" and product.attributes.get_int("transB", 0) == 1)
    spread = factor.reshape(-1, *[1] * (layer.weight.ndim - 1)) if by_row else factor
    product.replace_input_with(1, constant(graph, product.outputs[0], _times(layer.weight, spread)))
    if layer.bias is not None:
        where, index = (product, 2)
        if layer.addition is not None:
            where = layer.addition
            index = next(i for i, value in enumerate(where.inputs) if array_of(value) is not None)
        where.replace_input_with(index, constant(graph, product.outputs[0], _times(layer.bias, factor)))


def _times(values: Array, factor: Array) -> Array:
    """The product, rounded once."""
    scaled: Array = (values.astype(np.float64) * factor.astype(np.float64)).astype(values.dtype)
    return scaled


def _operands(node: ir.Node) -> tuple[ir.Value | None, Array | None]:
    """The varying and the constant operand of a sum or product in floating point; None for what it has not."""
    first, second = node.inputs
    arrays = array_of(first), array_of(second)
    varying, array = (first, arrays[1]) if arrays[0] is None else (second, arrays[0])
    both = arrays[0] is not None and arrays[1] is not None
    if array is None or both or not np.issubdtype(array.dtype, np.floating):
        return None, None
    return varying, array


def _varying_axis(value: ir.Value, factor: Array) -> int | None:
    """The only axis of `value` along which `factor` varies, ANY for a number; None where there are more of them.

    Also None where the product would be of another shape than `value`.
    """
    shape = shape_of(value)
    if shape is None or factor.ndim > len(shape):
        return None
    if factor.size == 1:
        return ANY
    sizes = (*[1] * (len(shape) - factor.ndim), *factor.shape)
    axes = [axis for axis, size in enumerate(sizes) if size != 1]
    return axes[0] if len(axes) == 1 and shape[axes[0]] == factor.size else None


def _part_taken(node: ir.Node) -> tuple[int, ir.Node] | None:
    """Which part along the first axis a node takes, and the node whose result is that part without the axis."""
    if node.op_type == "Gather" and node.attributes.get_int("axis", 0) == 0:
        index = array_of(node.inputs[1])
        return (int(index), node) if index is not None and index.ndim == 0 and index >= 0 else None
    taken = slice_of(node) if node.op_type == "Slice" else None
    if taken is None or not is_inner(node.outputs[0]):
        return None
    starts, ends, axes, _ = (values.tolist() for values in taken)
    (after,) = node.outputs[0].consumers()
    removed = array_of(after.inputs[1]) if after.op_type == "Squeeze" and len(after.inputs) > 1 else None
    one = axes == [0] and starts[0] >= 0 and ends[0] == starts[0] + 1
    return (starts[0], after) if one and removed is not None and removed.tolist() == [0] else None


def _replace_part(
    graph: ir.Graph, layer: _Linear, index: int, sizes: tuple[int, ...], perm: Sequence[int], last: ir.Node
) -> None:
    """`last`, which took part `index` of the joint result, becomes a layer of its own, viewed and transposed."""
    axis, width = perm[0], math.prod(sizes[1:])
    channels = slice(index * width, (index + 1) * width)
    (output,) = last.outputs
    lead = dims_of(layer.product.outputs[0])[:-1]
    part = insert(
        *(graph, last, "MatMul", [layer.data, constant(graph, output, layer.weight[:, channels])], [*lead, width])
    )
    if layer.bias is not None:
        part = insert(graph, last, "Add", [part, constant(graph, output, layer.bias[channels])], [*lead, width])
    view = reshaped(graph, last, part, [*lead, *sizes[1:]])
    order = [other - (other > axis) for other in perm[1:]]
    replace(graph, last, insert(graph, last, "Transpose", [view], dims_of(output), perm=order))


def _behind_view(added: Array, before: Any, after: Any) -> Array | None:
    """A constant added before a view that splits the first axis in two, as it is added behind the view."""
    if before is None or after is None or len(after) != len(before) + 1 or after[2:] != before[1:]:
        return None
    if added.ndim < len(before):
        return added
    return added[None] if added.shape[0] == 1 else None
