"""A factor behind views, transposes and splits of a layer's result, followed back to the layer's channels."""

import math

import numpy as np
import onnx_ir as ir

from vitx.export.graph.edits import UNKNOWN, Array, shape_of

VIEWS = ("Reshape", "Squeeze", "Unsqueeze", "Flatten")
Shape = tuple[int, ...]


def spread(value: ir.Value, array: Array) -> Array | None:
    """`array` with as many axes as `value`; None where a product with it would be of another shape than `value`."""
    shape = shape_of(value)
    if shape is None or array.ndim > len(shape):
        return None
    full = array.reshape(*[1] * (len(shape) - array.ndim), *array.shape)
    return full if all(size in (1, known) for size, known in zip(full.shape, shape, strict=True)) else None


def before(value: ir.Value, array: Array) -> Array | None:
    """`array`, which multiplies `value`, as it stands before the node of `value`, where it belongs to its first input.

    array: as many axes as `value` has, each as long as the value's or 1. None where there is no such array.
    """
    node = value.producer()
    source, target = shape_of(None if node is None else node.inputs[0]), shape_of(value)
    if node is None or node.domain != "" or source is None or target is None:
        return None
    if node.op_type == "Transpose":
        perm = node.attributes.get_ints("perm", tuple(range(len(source)))[::-1])
        return array.transpose(np.argsort(perm))
    if node.op_type in VIEWS:
        return _behind_view(array, source, target)
    if node.op_type == "Split":
        return _of_all_parts(node, value, array)
    if node.op_type == "MatMul" and array.shape[-2:] == (1, 1) and len(source) == len(target):
        # (s·Q)Kᵀ = s·(QKᵀ), for each matrix its own s.
        return array if all(size in (1, known) for size, known in zip(array.shape, source, strict=True)) else None
    return None


def _of_all_parts(node: ir.Node, value: ir.Value, array: Array) -> Array | None:
    """The array of what is split: 1 for the other parts."""
    axis = node.attributes.get_int("axis", 0) % array.ndim
    parts = []
    for output in node.outputs:
        shape = shape_of(output)
        if shape is None or shape[axis] == UNKNOWN:
            return None
        part = np.ones((*array.shape[:axis], shape[axis], *array.shape[axis + 1 :]), array.dtype)
        parts.append(np.broadcast_to(array, part.shape) if output is value else part)
    return np.concatenate(parts, axis)


def _behind_view(array: Array, source: Shape, target: Shape) -> Array | None:
    """`array` (as `target`, or 1 along an axis) as it is before a view from `source` to `target`.

    From the last axes on, the fewest of both that have as many elements belong together. What is left of them, with the
    batch in it, may not vary.
    """
    if array.size == 1:
        return array.reshape([1] * len(source))
    i, j = len(source), len(target)
    sizes: list[int] = []
    wanted: list[int] = []
    while i and j and UNKNOWN not in (source[i - 1], target[j - 1]):
        end_i, end_j = i, j
        i, j = i - 1, j - 1
        while (left := math.prod(source[i:end_i])) != (right := math.prod(target[j:end_j])):
            if left < right and i:
                i -= 1
            elif right < left and j:
                j -= 1
            else:  # also where the batch would belong to it: UNKNOWN is negative
                return None
        varies = math.prod(array.shape[j:end_j]) > 1
        sizes[:0] = target[j:end_j] if varies else [1] * (end_j - j)
        wanted[:0] = source[i:end_i] if varies else [1] * (end_i - i)
    if math.prod(array.shape[:j]) > 1:
        return None
    return np.broadcast_to(array, (*[1] * j, *sizes)).reshape(*[1] * i, *wanted)


def one_axis(array: Array, axis: int) -> Array | None:
    """`array` as (C,) or (1,) where it varies along `axis` alone."""
    return array.reshape(-1) if array.size == array.shape[axis] else None
