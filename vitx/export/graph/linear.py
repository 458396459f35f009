"""A linear layer of a traced graph: finding it, also behind what only moves its result, and changing its weights.

It is a Conv, a Gemm, or a MatMul by a constant (K, C) with or without the addition of a bias (C,). New weights are new
constants, so a weight that another node reads too stays what it was.
"""

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from vitx.export.graph.channels import before, one_axis
from vitx.export.graph.edits import (
    Array,
    array_of,
    constant,
    dims_of,
    insert,
    is_inner,
    producer_of,
    replace,
    shape_of,
    source_of,
)


@dataclass(frozen=True)
class Linear:
    """A layer's nodes: `product` is a Conv, a Gemm or a MatMul; `addition` is of a MatMul's bias."""

    product: ir.Node
    addition: ir.Node | None
    weight: Array
    bias: Array | None

    @property
    def data(self) -> ir.Value:
        return source_of(self.product)

    @property
    def has_rows(self) -> bool:
        """Whether the first axis of the weight is that of the outputs, not the last."""
        return self.product.op_type == "Conv" or self.product.attributes.get_int("transB", 0) == 1

    @property
    def is_plain(self) -> bool:
        """Whether it is `W x + b` of exactly these constants: a Gemm may have factors, and transpose its input."""
        known = self.product.attributes
        return not known.get_int("transA", 0) and known.get_float("alpha", 1.0) == known.get_float("beta", 1.0) == 1.0


def linear_of(value: ir.Value | None) -> Linear | None:
    """The layer that makes `value`, if its weight and bias are constants."""
    addition = producer_of(value, "Add")
    if addition is not None:
        varying, bias = operands(addition)
        product = producer_of(varying, "MatMul")
        inside = varying is not None and is_inner(varying) and shape_of(varying) == shape_of(addition.outputs[0])
        # A bias for each channel: what varies along other axes is no part of the layer.
        if product is None or bias is None or not inside or bias.size != (bias.shape[-1] if bias.ndim else 1):
            return None
        weight = array_of(product.inputs[1])
        return Linear(product, addition, weight, bias.reshape(-1)) if weight is not None and weight.ndim == 2 else None
    product = producer_of(value, "MatMul", "Gemm", "Conv")
    if product is None:
        return None
    weight = array_of(product.inputs[1])
    given = product.inputs[2] if len(product.inputs) > 2 else None
    bias = array_of(given)
    if weight is None or (product.op_type == "MatMul" and weight.ndim != 2) or (given is not None and bias is None):
        return None
    return Linear(product, None, weight, bias)


def layer_behind(value: ir.Value, factor: Array | None) -> tuple[Linear, Array] | None:
    """The layer whose result `value` is, behind what only moves values and what nothing else reads.

    factor: what `value` is multiplied by, with as many axes; returned for the layer's channels, (C,) or (1,). None
    where there is no layer or factor, or where it varies along another axis than the channels.
    """
    while factor is not None and is_inner(value):
        layer = linear_of(value)
        if layer is not None:
            channels = one_axis(factor, 1 if layer.product.op_type == "Conv" else -1)
            return None if channels is None else (layer, channels)
        factor = before(value, factor)
        node = value.producer()
        if node is None or not node.inputs:
            return None
        value = source_of(node)
    return None


def scale_outputs(graph: ir.Graph, layer: Linear, scale: Array) -> None:
    """`s⊙(Wx + b)` as the layer itself, in place: s for each output channel (C,) or one for all (1,)."""
    rows = scale.reshape(-1, *[1] * (layer.weight.ndim - 1)) if layer.has_rows else scale
    bias = None if layer.bias is None else layer.bias.astype(np.float64) * scale
    _set_parameters(graph, layer, layer.weight.astype(np.float64) * rows, bias)


def map_inputs(graph: ir.Graph, layer: Linear, scale: Array, shift: Array) -> None:
    """`W(s⊙x + t) + b` as the layer itself, in place: s and t for each input channel (K,)."""
    weight, columns = layer.weight.astype(np.float64), [scale, shift]
    if layer.product.op_type == "Conv":  # (C, K / groups, …): each group of outputs has its own inputs
        groups = layer.product.attributes.get_int("group", 1)
        columns = [each.reshape(groups, -1).repeat(len(weight) // groups, axis=0) for each in columns]
        columns = [each.reshape(*each.shape, *[1] * (weight.ndim - 2)) for each in columns]
    elif not layer.has_rows:
        columns = [each[:, None] for each in columns]
    bias = (weight * columns[1]).sum(axis=tuple(range(1, weight.ndim)) if layer.has_rows else 0)
    _set_parameters(graph, layer, weight * columns[0], bias + (0.0 if layer.bias is None else layer.bias))


def _set_parameters(graph: ir.Graph, layer: Linear, weight: Array, bias: Array | None) -> None:
    """New constants, rounded once. A bias that the layer had not is an input of its node, or a sum behind a MatMul."""
    product, result = layer.product, layer.product.outputs[0]
    product.replace_input_with(1, constant(graph, result, weight.astype(layer.weight.dtype)))
    if bias is None:
        return
    value = constant(graph, result, bias.astype(layer.weight.dtype))
    if layer.addition is not None:
        index = next(i for i, each in enumerate(layer.addition.inputs) if array_of(each) is not None)
        layer.addition.replace_input_with(index, value)
    elif layer.bias is not None:
        product.replace_input_with(2, value)
    elif product.op_type != "MatMul":
        inputs = [layer.data, source_of(product, 1), value]
        replace(graph, product, insert(graph, product, product.op_type, inputs, dims_of(result), **product.attributes))
    else:
        (usage,) = result.uses()
        usage.node.replace_input_with(usage.idx, insert(graph, usage.node, "Add", [result, value], dims_of(result)))


def operands(node: ir.Node) -> tuple[ir.Value | None, Array | None]:
    """The varying and the constant operand of a sum or product in floating point; None for what it has not."""
    first, second = node.inputs
    arrays = array_of(first), array_of(second)
    varying, array = (first, arrays[1]) if arrays[0] is None else (second, arrays[0])
    both = arrays[0] is not None and arrays[1] is not None
    if array is None or both or not np.issubdtype(array.dtype, np.floating):
        return None, None
    return varying, array
