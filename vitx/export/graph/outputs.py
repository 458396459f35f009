"""Parts of a graph that compute what a bundle gives beside logits, from tensors of model.onnx (docs/bundle.md).

A part is the rest of a protobuf message: its bytes behind those of model.onnx are one ModelProto with one more output.
It has no input and no operator sets of its own, and all names that it makes begin with that of its result. This file
needs the package onnx and no other, so that what only runs bundles may use it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from vitx.core.bundle import output_tensor
from vitx.core.errors import InputError

# Operators between the classifier's product and the logits: its bias, a scale, the casts of lower precisions.
_AFTER_PRODUCT = {"Add", "Cast", "DequantizeLinear", "Div", "Identity", "Mul", "QuantizeLinear"}
_TO_THE_END = np.iinfo(np.int64).max
Array = npt.NDArray[Any]


def classifier_inputs(model: onnx.ModelProto, logits: str) -> tuple[str, ...]:
    """The tensors that the last matrix products before `logits` multiply with constant weights.

    One in most networks; two in distilled DeiT, whose logits are the mean of two products. Raises InputError when the
    logits come from elsewhere.
    """
    producers = {name: node for node in model.graph.node for name in node.output}
    constants = _constants(model)
    found: list[str] = []
    todo = [logits]
    while todo:
        node = producers.get(todo.pop())
        varying = [] if node is None else [name for name in node.input if name and name not in constants]
        if node is not None and node.op_type in ("Gemm", "MatMul") and len(varying) == 1:
            found += varying
        elif node is not None and node.op_type in _AFTER_PRODUCT and len(varying) == 1:
            todo += varying
        elif node is not None and node.op_type == "Add" and varying:
            todo += reversed(varying)
        else:
            raise InputError(
                "the graph's logits are not matrix products of features (N, D): there are no embeddings of this network"
            )
    return tuple(found)


def embedding_part(features: Sequence[str], width: int | None, affine: Mapping[str, Array] | None = None) -> bytes:
    """The mean of `features` (N, D), times `affine["weight"]` plus `affine["bias"]`, each (D,) and where given.

    width: D, None where it is not known. affine: what the rewrite fold-layer-norm-affine took out of the last norm; it
    commutes with the mean.
    """
    part = _Part("embedding")
    result = part.node("Cast", features[0], to=TensorProto.FLOAT)
    for name in features[1:]:
        result = part.node("Add", result, part.node("Cast", name, to=TensorProto.FLOAT))
    if len(features) > 1:
        result = part.node("Mul", result, part.constant(np.float32(1 / len(features))))
    for key, operator in (("weight", "Mul"), ("bias", "Add")):
        if affine is not None and key in affine:
            result = part.node(operator, result, part.constant(affine[key].astype(np.float32)))
    return part.written(result, width)


def attention_part(maps: str, start: int, stop: int, prefix: int, patches: int) -> bytes:
    """Of `maps` (N, H, M, K) the mean over heads and the queries `start` to `stop`, to the keys from `prefix` on."""
    part = _Part("attention")
    rows = part.cut(maps, {2: (start, stop), 3: (prefix, _TO_THE_END)})
    mean = part.node("ReduceMean", part.node("Cast", rows, to=TensorProto.FLOAT), part.constant([1, 2]), keepdims=0)
    return part.written(mean, patches)


def rollout_part(maps: Sequence[str], start: int, stop: int, prefix: int, patches: int) -> bytes:
    """The pooled row of the product of ½(A + I) over all blocks, A the mean of `maps` (N, H, K, K) over heads.

    The last of `maps` may have the queries up to `stop` alone.
    """
    part = _Part("rollout")
    pooled = np.zeros((1, 1, 1, prefix + patches), np.float32)
    pooled[..., start:stop] = 1 / (stop - start)
    half = part.constant(np.float32(0.5))

    def halved(row: str, seen: str) -> str:
        return part.node("Mul", part.node("Add", seen, row), half)

    last = part.node("Cast", part.cut(maps[-1], {2: (start, stop)}), to=TensorProto.FLOAT)
    row = halved(part.constant(pooled), part.node("ReduceMean", last, part.constant([1, 2]), keepdims=1))
    for name in reversed(maps[:-1]):
        seen = part.node("MatMul", row, part.node("Cast", name, to=TensorProto.FLOAT))  # (N, H, 1, K)
        row = halved(row, part.node("ReduceMean", seen, part.constant([1]), keepdims=1))
    patches_only = part.cut(row, {3: (prefix, _TO_THE_END)})
    return part.written(part.node("Squeeze", patches_only, part.constant([1, 2])), patches)


class _Part:
    """Nodes and constants of one output, under names that model.onnx does not have."""

    def __init__(self, name: str) -> None:
        self._result = output_tensor(name)
        self._nodes: list[onnx.NodeProto] = []
        self._constants: list[TensorProto] = []

    def node(self, operator: str, *inputs: str, **attributes: Any) -> str:
        name = f"{self._result}/{len(self._nodes)}"
        self._nodes.append(helper.make_node(operator, inputs, [name], name=name, **attributes))
        return name

    def constant(self, value: Any) -> str:
        """A constant; a list is one of int64."""
        array = np.array(value, np.int64) if isinstance(value, list) else np.asarray(value)
        name = f"{self._result}/constant {len(self._constants)}"
        self._constants.append(numpy_helper.from_array(array, name))
        return name

    def cut(self, tensor: str, axes: Mapping[int, tuple[int, int]]) -> str:
        """The part of `tensor` from a start to an end along each of the axes."""
        starts, ends = ([bounds[side] for bounds in axes.values()] for side in (0, 1))
        return self.node("Slice", tensor, *map(self.constant, (starts, ends, [*axes])))

    def written(self, last: str, width: int | None) -> bytes:
        """The part with the node that makes `last` as its result: float32 (N, width)."""
        (node,) = (node for node in self._nodes if last in node.output)
        node.output[0] = self._result
        graph = onnx.GraphProto(node=self._nodes, initializer=self._constants)
        shape: list[str | int | None] | None = None if width is None else ["N", width]
        graph.output.append(helper.make_tensor_value_info(self._result, TensorProto.FLOAT, shape))
        content: bytes = onnx.ModelProto(graph=graph).SerializeToString()
        return content


def _constants(model: onnx.ModelProto) -> set[str]:
    """The names of the tensors that do not depend on an input of the graph."""
    found = {tensor.name for tensor in model.graph.initializer}
    for node in model.graph.node:  # ONNX keeps them in topological order
        if all(name in found or not name for name in node.input):
            found |= set(node.output)
    return found
