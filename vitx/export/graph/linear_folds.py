"""Exact folds of arithmetic into the weights of linear layers, in place.

A linear layer is a Conv, a Gemm, or a MatMul by a constant (K, C) with or without the addition of a bias (C,). Each
fold takes an onnx_ir.Graph and returns the number of places it changed. New weights are new constants, so a weight that
another node reads too stays what it was; a result that another node reads is not folded.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from vitx.export.graph.channels import spread
from vitx.export.graph.edits import (
    Array,
    array_of,
    at_each,
    constant,
    dims_of,
    insert,
    is_free,
    is_inner,
    producer_of,
    replace,
    reshape_target,
    reshaped,
    shape_of,
    source_of,
)
from vitx.export.graph.linear import Linear, layer_behind, linear_of, map_inputs, operands, scale_outputs
from vitx.export.graph.view_folds import slice_of

# In elements. Two constants that are added one after the other, such as the position biases of heads and the masks of
# windows, are joined up to this size: their sum has the shape that both are broadcast to.
JOINED_LIMIT = 2**21


@at_each("Mul")
def fold_scales(graph: ir.Graph, node: ir.Node) -> bool:
    """A factor for each output channel, or one for all: `c⊙(Wx + b) = (c⊙W)x + c⊙b`.

    LayerScale, and 1/√d of attention. The factor may stand behind views, transposes and a split of the layer's result,
    and behind the product of queries and keys: then it is followed back to the layer's channels.
    """
    varying, factor = operands(node)
    if varying is None or factor is None:
        return False
    found = layer_behind(varying, spread(varying, factor))
    if found is not None:
        scale_outputs(graph, *found)
        replace(graph, node, varying)
        return True
    return False


@at_each("BatchNormalization")
def fold_norms_ahead(graph: ir.Graph, node: ir.Node) -> bool:
    """BatchNorm into the layer that alone reads it: `W(s⊙x + t) + b = (W s)x + (W t + b)`.

    Not into a convolution with padding: the zeros of its border stand for normalised values.
    """
    norm, output = _norm_of(node), node.outputs[0]
    if norm is None or not is_inner(output):
        return False
    (reader,) = output.consumers()
    layer = linear_of(reader.outputs[0])
    if layer is None or layer.product is not reader or layer.data is not output or not layer.is_plain:
        return False
    if reader.op_type == "Conv":
        padded = any(reader.attributes.get_ints("pads", ()))
        fits = not padded and reader.attributes.get_string("auto_pad", "NOTSET") == "NOTSET"
    else:  # of a batch of matrices the second axis, along which the norm varies, is not that of the channels
        fits = len(shape_of(output) or ()) == 2
    # Of a MatMul the shift is added behind it.
    if fits and (reader.op_type != "MatMul" or is_inner(reader.outputs[0])):
        map_inputs(graph, layer, *norm)
        replace(graph, node, source_of(node))
        return True
    return False


@at_each("Transpose")
def split_joint_projections(graph: ir.Graph, node: ir.Node) -> bool:
    """One layer whose channels are then taken apart, as of queries, keys and values, becomes a layer for each part.

    (…, K) · (K, P·C) viewed as (…, P, C₁, C₂), other axes joined or not, and transposed so that P comes first, of which
    each reader takes one: a part needs no copy out of the joint result, and its factor and transposes can be folded on
    their own.
    """
    view = producer_of(node.inputs[0], "Reshape")
    perm = node.attributes.get_ints("perm", ())
    layer = None if view is None else linear_of(view.inputs[0])
    if view is None or layer is None or not perm or not is_inner(source_of(node)) or not is_inner(source_of(view)):
        return False
    # Of a Gemm or Conv the last axis of the weight is not, or need not be, that of the channels.
    if layer.product.op_type != "MatMul" or (layer.bias is not None and layer.bias.size != layer.weight.shape[1]):
        return False
    joint, parted = shape_of(view.inputs[0]), reshape_target(view.outputs[0])
    axis = perm[0]
    if joint is None or parted is None or math.prod(parted[axis:]) != joint[-1]:
        return False
    parts = [_part_taken(usage.node) for usage in node.outputs[0].uses()]
    if not is_free(node.outputs[0]) or not parts or any(part is None for part in parts):
        return False
    for index, last in [part for part in parts if part is not None]:
        _replace_part(graph, layer, index, view.outputs[0], perm, last)
    return True


@at_each("Add")
def join_added_constants(graph: ir.Graph, node: ir.Node) -> bool:
    """`(x + a) + b = x + (a + b)` for constants a and b, also where a view lies between that splits the first axis.

    Position biases (H, N, N) and masks of windows (W, 1, N, N), where scores (B·W, H, N, N) are viewed as
    (B, W, H, N, N) for the mask.
    """
    varying, second = operands(node)
    if varying is None or second is None or not is_inner(varying):
        return False
    view = producer_of(varying, "Reshape")
    inner = varying if view is None else source_of(view)
    first_add = producer_of(inner, "Add")
    if first_add is None or (view is not None and not is_inner(inner)):
        return False
    source, first = operands(first_add)
    if source is None or first is None or shape_of(source) != shape_of(inner):
        return False
    if view is not None:
        first = _behind_view(first, shape_of(inner), shape_of(varying))
    if first is None or math.prod(np.broadcast_shapes(first.shape, second.shape)) > JOINED_LIMIT:
        return False
    if view is not None:
        source = reshaped(graph, node, source, dims_of(varying))
    both = constant(graph, node.outputs[0], first + second)
    replace(graph, node, insert(graph, node, "Add", [source, both], dims_of(node.outputs[0])))
    return True


@at_each("Add")
def linears_as_gemm(graph: ir.Graph, node: ir.Node) -> bool:
    """`x W + b` of (…, K) as one Gemm of all rows (·, K), with its bias inside, between two views."""
    output = node.outputs[0]
    layer = linear_of(output)
    if layer is None or layer.bias is None or reshape_target(output) is None:
        return False
    shape = shape_of(layer.data)
    weight = array_of(layer.product.inputs[1])
    if shape is None or len(shape) < 3 or weight is None or layer.bias.shape != weight.shape[1:]:
        return False
    rows = reshaped(graph, node, layer.data, [None, len(weight)])
    bias = constant(graph, output, layer.bias)
    product = insert(graph, node, "Gemm", [rows, source_of(layer.product, 1), bias], [None, weight.shape[1]])
    replace(graph, node, reshaped(graph, node, product, dims_of(output)))
    return True


def _norm_of(node: ir.Node) -> tuple[Array, Array] | None:
    """Scale and shift of a BatchNorm in evaluation mode, float64 (C,), if they are constants."""
    gamma, beta, mean, variance = (array_of(value) for value in node.inputs[1:])
    if gamma is None or beta is None or mean is None or variance is None or len(node.outputs) != 1:
        return None
    scale = gamma / np.sqrt(variance.astype(np.float64) + node.attributes.get_float("epsilon", 1e-5))
    return scale, beta - scale * mean


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
    graph: ir.Graph, layer: Linear, index: int, parted: ir.Value, perm: Sequence[int], last: ir.Node
) -> None:
    """`last`, which took part `index` of the joint result, becomes a layer of its own, viewed and transposed."""
    axis = perm[0]
    sizes = [*dims_of(parted)[:axis], *dims_of(parted)[axis + 1 :]]
    width = math.prod(sizes[axis:])
    channels = slice(index * width, (index + 1) * width)
    (output,) = last.outputs
    shape = [*dims_of(layer.product.outputs[0])[:-1], width]
    part = insert(graph, last, "MatMul", [layer.data, constant(graph, output, layer.weight[:, channels])], shape)
    if layer.bias is not None:
        part = insert(graph, last, "Add", [part, constant(graph, output, layer.bias[channels])], shape)
    order = [other - (other > axis) for other in perm[1:]]
    view = reshaped(graph, last, part, sizes)
    replace(graph, last, insert(graph, last, "Transpose", [view], dims_of(output), perm=order))


def _behind_view(added: Array, before: Any, after: Any) -> Array | None:
    """A constant added before a view that splits the first axis in two, as it is added behind the view."""
    if before is None or after is None or len(after) != len(before) + 1 or after[2:] != before[1:]:
        return None
    if added.ndim < len(before):
        return added
    return added[None] if added.shape[0] == 1 else None
