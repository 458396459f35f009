"""Reading and changing an onnx_ir graph: the helpers of the folds."""

import re
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from vitx.export.graph.block_names import EMBEDDING

Array = npt.NDArray[Any]
# The number of elements of a dimension that depends on the batch.
UNKNOWN = -1
_NAMED = re.compile(rf"{EMBEDDING}|blocks\.\d+")


def array_of(value: ir.Value | None) -> Array | None:
    """The value of a constant; None for everything else."""
    if value is None or value.const_value is None or value.is_graph_input():
        return None
    return value.const_value.numpy()


def shape_of(value: ir.Value | None) -> tuple[int, ...] | None:
    """The shape, UNKNOWN where a dimension is no number; None where even the rank is not known."""
    if value is None or value.shape is None:
        return None
    return tuple(dim if isinstance(dim, int) else UNKNOWN for dim in value.shape)


def reshape_target(value: ir.Value) -> tuple[int, ...] | None:
    """The shape as Reshape takes it: at most one dimension is UNKNOWN, none is empty; None for any other shape."""
    shape = shape_of(value)
    return shape if shape is not None and shape.count(UNKNOWN) <= 1 and 0 not in shape else None


def source_of(node: ir.Node, index: int = 0) -> ir.Value:
    """An input that the operator must have."""
    value = node.inputs[index]
    assert value is not None
    return value


def dims_of(value: ir.Value) -> list[Any]:
    """The dimensions as the graph has them, of a value whose shape is known."""
    assert value.shape is not None
    return list(value.shape)


def producer_of(value: ir.Value | None, *operators: str) -> ir.Node | None:
    """The node that makes `value`, if it is of one of these standard operators."""
    node = None if value is None else value.producer()
    return node if node is not None and node.domain == "" and node.op_type in operators else None


def is_inner(value: ir.Value) -> bool:
    """Whether exactly one node reads it and nothing else needs it: it is no output and has no name that others use."""
    return len(value.uses()) == 1 and is_free(value)


def is_named(value: ir.Value) -> bool:
    """The residual stream between blocks, which parity looks for by its name."""
    return _NAMED.fullmatch(value.name or "") is not None


def at_each(*operators: str) -> Callable[[Callable[[ir.Graph, ir.Node], bool]], Callable[[ir.Graph], int]]:
    """A fold of one node, which tells whether it applied, becomes one of a graph, which returns in how many places.

    It is called with each node of these standard operators, in order, and may change the graph meanwhile.
    """

    def of_graph(fold: Callable[[ir.Graph, ir.Node], bool]) -> Callable[[ir.Graph], int]:
        @wraps(fold)
        def everywhere(graph: ir.Graph) -> int:
            nodes = [node for node in graph if node.domain == "" and node.op_type in operators]
            return sum(fold(graph, node) for node in nodes)

        return everywhere

    return of_graph


def constant(graph: ir.Graph, like: ir.Value, array: Array) -> ir.Value:
    """A new constant of the graph, named after the value that it belongs to."""
    name, number = f"{like.name}/constant", 0
    while name in graph.initializers:
        name, number = f"{like.name}/constant_{number}", number + 1
    tensor = ir.tensor(np.ascontiguousarray(array).reshape(array.shape), name=name)
    value = ir.Value(name=name, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
    graph.register_initializer(value)
    return value


def insert(
    graph: ir.Graph, before: ir.Node, operator: str, inputs: Sequence[ir.Value], shape: Sequence[Any], **attributes: Any
) -> ir.Value:
    """Put a new node before another one and return its output, which is of the first input's element type."""
    node = ir.node(operator, inputs, attributes)
    node.outputs[0].shape, node.outputs[0].type = ir.Shape(shape), inputs[0].type
    graph.insert_before(before, node)
    return node.outputs[0]


def reshaped(graph: ir.Graph, before: ir.Node, value: ir.Value, shape: Sequence[Any]) -> ir.Value:
    """`value` in a shape of which at most one dimension is no number."""
    target = np.array([dim if isinstance(dim, int) else UNKNOWN for dim in shape], np.int64)
    return insert(graph, before, "Reshape", [value, constant(graph, value, target)], shape)


def replace(graph: ir.Graph, node: ir.Node, value: ir.Value) -> None:
    """Every reader of `node`'s only output reads `value` instead, which takes over a name that others look for.

    The node is removed, and so is every node that only it needed.
    """
    (output,) = node.outputs
    if output.is_graph_output() or is_named(output):
        # Two values must never have one name, not even for a moment.
        value.name, output.name = output.name, None
    ir.convenience.replace_all_uses_with(output, value, replace_graph_outputs=True)
    remove_unused(graph, node)


def remove_unused(graph: ir.Graph, node: ir.Node) -> None:
    """Remove a node that nothing reads, and every node that only it needed."""
    unused = [node]
    while unused:
        node = unused.pop()
        if node.graph is None or any(output.uses() or output.is_graph_output() for output in node.outputs):
            continue
        makers = [value.producer() for value in node.inputs if value is not None]
        graph.remove(node, safe=True)
        unused.extend(maker for maker in makers if maker is not None)


def is_free(value: ir.Value) -> bool:
    """Whether another value, which has its own name, may stand for it."""
    return not value.is_graph_output() and not is_named(value)
