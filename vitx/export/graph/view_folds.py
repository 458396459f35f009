"""Exact folds of what only moves values, in place: shapes, views, transposes, slices and pads.

Each takes an onnx_ir.Graph and returns the number of places it changed. A shape may have one dimension that is no
number: the batch, or a multiple of it. What would need a second one stays as it is.
"""

import numpy as np
import onnx_ir as ir

from vitx.export.graph.channels import VIEWS
from vitx.export.graph.edits import (
    UNKNOWN,
    array_of,
    at_each,
    constant,
    dims_of,
    insert,
    is_free,
    is_inner,
    is_named,
    producer_of,
    remove_unused,
    replace,
    reshape_target,
    reshaped,
    shape_of,
    source_of,
)

# Functions of each value alone, which do not see the shape.
ELEMENTWISE = ("Gelu", "Relu", "Sigmoid", "Tanh", "Erf", "HardSigmoid", "HardSwish", "Softplus")


@at_each("Reshape")
def fix_reshape_targets(graph: ir.Graph, node: ir.Node) -> bool:
    """A target that is computed from shapes becomes a constant where the result has one dynamic dimension."""
    target = reshape_target(node.outputs[0])
    if array_of(node.inputs[1]) is None and target is not None:
        values = constant(graph, node.outputs[0], np.array(target, np.int64))
        shapes = source_of(node, 1).producer()
        node.replace_input_with(1, values)
        if shapes is not None:
            remove_unused(graph, shapes)
        return True
    return False


@at_each("Pad")
def drop_empty_pads(graph: ir.Graph, node: ir.Node) -> bool:
    """A Pad by no element at either end of any axis is its input."""
    pads = array_of(node.inputs[1])
    if pads is not None and not pads.any() and is_free(node.outputs[0]):
        replace(graph, node, source_of(node))
        return True
    return False


@at_each("MaxPool")
def fold_pads_of_maxima(graph: ir.Graph, node: ir.Node) -> bool:
    """A Pad of rows and columns by -inf goes into the MaxPool behind it, whose own padding is no value either.

    As in NesT. No lower precision could hold the -inf.
    """
    pad, output = producer_of(node.inputs[0], "Pad"), source_of(node)
    if pad is None or not is_inner(output) or len(pad.inputs) != 3 or len(node.outputs) != 1:
        return False
    pads, fill = array_of(pad.inputs[1]), array_of(pad.inputs[2])
    known, kernel = node.attributes, node.attributes.get_ints("kernel_shape", ())
    plain = not known.get_int("ceil_mode", 0) and known.get_string("auto_pad", "NOTSET") == "NOTSET"
    if not plain or pad.attributes.get_string("mode", "constant") != "constant":
        return False
    if pads is None or fill is None or fill != -np.inf:
        return False
    both = pads.reshape(2, -1)  # of each axis before and behind
    window = both[:, 2:] + np.reshape(known.get_ints("pads", [0] * 2 * len(kernel)), (2, -1))
    if both[:, :2].any() or both.min() < 0 or (window >= kernel).any():  # a window of padding alone is an error
        return False
    known["pads"] = ir.AttrInt64s("pads", window.reshape(-1).tolist())
    replace(graph, pad, source_of(pad))
    return True


@at_each("Expand")
def drop_expands(graph: ir.Graph, node: ir.Node) -> bool:
    """An Expand to the shape that its input has, or that is read only beside values of its shape, which broadcast."""
    source, output = source_of(node), node.outputs[0]
    beside_whole = all(_broadcasts(reader, index, output) for reader, index in output.uses())
    if is_free(output) and (beside_whole or _same_shape(source, output)):
        replace(graph, node, source)
        return True
    return False


@at_each("Split")
def split_constants(graph: ir.Graph, node: ir.Node) -> bool:
    """The parts of a constant that is split are constants."""
    array = array_of(node.inputs[0])
    shapes = [shape_of(output) for output in node.outputs]
    axis = node.attributes.get_int("axis", 0)
    if array is None or not all(shape and UNKNOWN not in shape for shape in shapes):
        return False
    if any(output.is_graph_output() for output in node.outputs):  # which have to come from a node
        return False
    ends = np.cumsum([shape[axis] for shape in shapes if shape])[:-1]
    for output, part in zip(node.outputs, np.split(array, ends, axis), strict=True):
        ir.convenience.replace_all_uses_with(output, constant(graph, output, part))
    graph.remove(node, safe=True)
    return True


@at_each("Transpose")
def merge_transposes(graph: ir.Graph, node: ir.Node) -> bool:
    """Two transposes in a row are one, or none where the second undoes the first."""
    before = producer_of(node.inputs[0], "Transpose")
    if before is None or is_named(before.outputs[0]):
        return False
    first, second = _permutation(before), _permutation(node)
    if first is None or second is None:
        return False
    both = [first[axis] for axis in second]
    if both == sorted(both):
        if not is_free(node.outputs[0]):
            return False
        replace(graph, node, source_of(before))
    else:
        node.replace_input_with(0, before.inputs[0])
        node.attributes["perm"] = ir.AttrInt64s("perm", both)
        remove_unused(graph, before)
    return True


@at_each("Transpose")
def view_transposes(graph: ir.Graph, node: ir.Node) -> bool:
    """A transpose that moves only axes of length one is a view."""
    shape, order = shape_of(node.inputs[0]), _permutation(node)
    if shape is None or order is None or reshape_target(node.outputs[0]) is None:
        return False
    moved = [axis for axis in order if shape[axis] != 1]
    if moved == sorted(moved):
        replace(graph, node, reshaped(graph, node, source_of(node), dims_of(node.outputs[0])))
        return True
    return False


@at_each(*VIEWS)
def merge_views(graph: ir.Graph, node: ir.Node) -> bool:
    """A view of a view is one view, or none where it has the shape of the value that it began with."""
    source, output = source_of(node), node.outputs[0]
    before = producer_of(source, *VIEWS)
    origin = source_of(before) if before is not None and is_inner(source) else source
    if reshape_target(output) is None:
        return False
    if _same_shape(origin, output) and is_free(output):
        replace(graph, node, origin)
    elif origin is not source:
        replace(graph, node, reshaped(graph, node, origin, dims_of(output)))
    else:
        return False
    return True


@at_each(*ELEMENTWISE)
def view_after_elementwise(graph: ir.Graph, node: ir.Node) -> bool:
    """A function of each value alone between two views: `view(f(view(x))) = view(f(x))`."""
    before = producer_of(node.inputs[0], *VIEWS)
    after = [usage.node for usage in node.outputs[0].uses()]
    if before is None or not is_inner(source_of(node)) or not is_inner(node.outputs[0]):
        return False
    if after[0].op_type in VIEWS and reshape_target(after[0].outputs[0]) is not None:
        last = after[0]
        (output,) = last.outputs
        source = source_of(before)
        node.replace_input_with(0, source)
        node.outputs[0].shape = source.shape
        graph.remove(before, safe=True)
        replace(graph, last, reshaped(graph, last, node.outputs[0], dims_of(output)))
        return True
    return False


@at_each("Slice")
def merge_slices(graph: ir.Graph, node: ir.Node) -> bool:
    """Two slices in a row along different axes are one."""
    before = producer_of(node.inputs[0], "Slice")
    if before is None or not is_inner(source_of(node)):
        return False
    first, second = slice_of(before), slice_of(node)
    if first is None or second is None or set(first[2].tolist()) & set(second[2].tolist()):
        return False
    parts = [constant(graph, node.outputs[0], np.concatenate(pair)) for pair in zip(first, second, strict=True)]
    replace(graph, node, insert(graph, node, "Slice", [source_of(before), *parts], dims_of(node.outputs[0])))
    return True


def _broadcasts(reader: ir.Node, index: int, value: ir.Value) -> bool:
    """Whether the reader's other operand has the shape of `value`, its operand `index`: then the result has it too."""
    if reader.domain != "" or reader.op_type not in ("Add", "Sub", "Mul", "Div"):
        return False
    other = source_of(reader, 1 - index)
    return other is not value and _same_shape(other, value)


def _permutation(node: ir.Node) -> list[int] | None:
    attribute = node.attributes.get("perm")
    if attribute is not None:
        return list(attribute.as_ints())
    shape = shape_of(node.inputs[0])
    return None if shape is None else list(range(len(shape)))[::-1]


def slice_of(node: ir.Node) -> tuple[np.ndarray, ...] | None:
    """Starts, ends, axes (not negative) and steps, if all are constants and given."""
    shape = shape_of(node.inputs[0])
    arrays = [array_of(value) for value in node.inputs[1:]]
    if shape is None or len(arrays) < 3 or any(array is None for array in arrays):
        return None
    starts, ends, axes = (array.astype(np.int64) for array in arrays[:3] if array is not None)
    steps = arrays[3].astype(np.int64) if len(arrays) > 3 and arrays[3] is not None else np.ones_like(starts)
    return starts, ends, axes % len(shape), steps


def _same_shape(first: ir.Value, second: ir.Value) -> bool:
    return reshape_target(first) is not None and reshape_target(first) == reshape_target(second)
