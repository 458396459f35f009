"""float16 and bfloat16 written into a graph, with float32 islands, and the twin of it that a CPU runs faithfully."""

from collections.abc import Collection, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto

from vitx.export.graph.dataflow import STANDARD, Dataflow, cast, named_tensor

HALVES: dict[str, int] = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}
NUMPY_TYPES: dict[int, np.dtype[Any]] = {
    TensorProto.FLOAT16: np.dtype(np.float16),
    TensorProto.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
}
LARGEST: dict[int, float] = {TensorProto.FLOAT16: 65504.0, TensorProto.BFLOAT16: 255 * 2.0**120}
_NAMES: dict[int, str] = {TensorProto.FLOAT16: "tensor(float16)", TensorProto.BFLOAT16: "tensor(bfloat16)"}


class HalfGraph:
    """Writes a half type into one float32 graph; `build` may be called for many choices of islands.

    A tensor has the type of the node that makes it; a Cast stands only where a node of one type reads a tensor of the
    other, once for all such readers.
    """

    def __init__(self, flow: Dataflow, half: int) -> None:
        self.flow, self.half = flow, half
        self.floating = [
            node.name for node in flow.nodes if any(flow.is_float(name) for name in (*node.input, *node.output))
        ]
        self.without_kernel = tuple(
            node.name for node in flow.nodes if node.name in self.floating and not self._has_half(node)
        )

    def _has_half(self, node: onnx.NodeProto) -> bool:
        """Whether the operator's definition in this opset knows the type: a Conv in bfloat16 came with opset 22."""
        if node.domain not in STANDARD:
            return False
        schema = onnx.defs.get_schema(node.op_type, self.flow.opset, "")
        used = {item.type_str for item in (*schema.inputs, *schema.outputs)}
        allowed = [c.allowed_type_strs for c in schema.type_constraints if c.type_param_str in used]
        floats = [types for types in allowed if "tensor(float)" in types]
        return bool(floats) and any(_NAMES[self.half] in types for types in floats)

    def build(self, islands: Collection[str]) -> onnx.ModelProto:
        """The graph in half precision but for `islands` (and operators that have no such type)."""
        in_float = set(islands) | set(self.without_kernel)
        writer = _HalfWriter(self.flow, self.half, {name for name in self.floating if name not in in_float})
        return self.flow.assemble(writer.nodes(), writer.constants)


class _HalfWriter:
    def __init__(self, flow: Dataflow, half: int, in_half: set[str]) -> None:
        self.flow, self.half, self.in_half = flow, half, in_half
        self.made_in_half = {
            name for node in flow.nodes if node.name in in_half for name in node.output if flow.is_float(name)
        }
        self.constants: dict[str, TensorProto] = {}
        self.casts: set[str] = set()

    def nodes(self) -> Iterator[onnx.NodeProto]:
        for node in self.flow.nodes:
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            for index, name in enumerate(node.input):
                if name and self.flow.is_float(name):
                    copy.input[index], extra = self._as_read(name, node.name in self.in_half)
                    yield from extra
            if node.name in self.in_half:
                self._retype(copy)
                outputs = [name for name in node.output if name in self.flow.outputs]
                for index, name in enumerate(node.output):
                    copy.output[index] = self._made(name)
                yield copy
                yield from (cast(self._made(name), name, TensorProto.FLOAT) for name in outputs)
            else:
                yield copy

    def _made(self, name: str) -> str:
        """The name under which a half tensor is made: an output of the graph keeps its own for the float32 one."""
        return f"{name}/half" if name in self.flow.outputs and name in self.made_in_half else name

    def _as_read(self, name: str, by_half: bool) -> tuple[str, list[onnx.NodeProto]]:
        if name in self.flow.constants:
            return (self._constant(name) if by_half else name), []
        if (name in self.made_in_half) == by_half:
            return self._made(name), []
        if name in self.flow.outputs and name in self.made_in_half:
            return name, []  # its float32 form is made anyway
        target = f"{name}/as half" if by_half else f"{name}/as float"
        if target in self.casts:
            return target, []
        self.casts.add(target)
        return target, [cast(name, target, self.half if by_half else TensorProto.FLOAT)]

    def _constant(self, name: str) -> str:
        target = f"{name}/half"
        if target not in self.constants:
            with np.errstate(over="ignore"):  # an overflow is found by what comes of it
                self.constants[target] = named_tensor(target, self.flow.array(name).astype(NUMPY_TYPES[self.half]))
        return target

    def _retype(self, node: onnx.NodeProto) -> None:
        """A node that names its result's type names the half."""
        for given in node.attribute:
            if given.name in ("to", "dtype") and given.i == TensorProto.FLOAT:
                given.i = self.half
            if given.name == "value" and given.t.data_type == TensorProto.FLOAT:
                value = onnx.numpy_helper.to_array(given.t).astype(NUMPY_TYPES[self.half])
                given.t.CopyFrom(named_tensor(given.t.name, value))


def cpu_twin(model: onnx.ModelProto) -> onnx.ModelProto:
    """A float32 graph that computes what a half graph says: every half tensor is rounded where it is made.

    ONNX Runtime's CPU runs float16 nodes in float32 and leaves the rounding between them out, so that 75,000 passes
    through a "float16" tensor unharmed; and it has no bfloat16 products at all. Here the rounding is written down,
    after products that accumulate in float32 as tensor cores do, and an overflow is infinite.
    """
    flow = Dataflow(model)
    halves = {name for name, kind in flow.types.items() if kind in NUMPY_TYPES}
    constants = {
        name: named_tensor(name, flow.array(name).astype(np.float32)) for name in flow.constants if name in halves
    }
    return flow.assemble(_rounded_nodes(flow, halves), constants)


def _rounded_nodes(flow: Dataflow, halves: set[str]) -> Iterator[onnx.NodeProto]:
    for node in flow.nodes:
        copy = onnx.NodeProto()
        copy.CopyFrom(node)
        made = [name for name in node.output if name in halves]
        for given in copy.attribute:
            if given.name == "value" and given.t.data_type in NUMPY_TYPES:
                value = onnx.numpy_helper.to_array(given.t).astype(np.float32)
                given.t.CopyFrom(named_tensor(given.t.name, value))
            if made and given.name in ("to", "dtype"):
                given.i = TensorProto.FLOAT
        for index, name in enumerate(node.output):
            if name in halves:
                copy.output[index] = f"{name}/exact"
        yield copy
        for name in made:
            yield cast(f"{name}/exact", f"{name}/rounded", flow.types[name])
            yield cast(f"{name}/rounded", name, TensorProto.FLOAT)
