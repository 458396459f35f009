"""float16 and bfloat16 written into a graph, with float32 islands, and the float32 twin that a CPU judges it by."""

from collections.abc import Collection, Iterator
from copy import deepcopy
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper

from vitx.export.graph.dataflow import AS_FLOAT, STANDARD, Dataflow, cast, free_tag, named_tensor

HALVES: dict[str, int] = {"fp16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}
NUMPY_TYPES: dict[int, np.dtype[Any]] = {
    TensorProto.FLOAT16: np.dtype(np.float16),
    TensorProto.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
}
# The largest finite number: (2 - 2⁻¹⁰)·2¹⁵ and (2 - 2⁻⁷)·2¹²⁷.
LARGEST: dict[int, float] = {TensorProto.FLOAT16: 65504.0, TensorProto.BFLOAT16: 255 * 2.0**120}
# The smallest number above 0.
SMALLEST: dict[int, float] = {TensorProto.FLOAT16: 2.0**-24, TensorProto.BFLOAT16: 2.0**-133}


class HalfGraph:
    """Writes a half type into one float32 graph; `build` may be called for many choices of islands.

    A tensor has the type of the node that produces it. A Cast stands only where a node of one type reads a tensor of
    the other, once for all such readers. `element_type` is the half type's number in TensorProto.
    """

    def __init__(self, flow: Dataflow, element_type: int) -> None:
        self.flow, self.element_type = flow, element_type
        self.floating = [
            node.name for node in flow.nodes if any(flow.is_float(name) for name in (*node.input, *node.output))
        ]
        self.without_kernel = tuple(
            node.name for node in flow.nodes if node.name in self.floating and not self._has_half(node)
        )

    def _has_half(self, node: onnx.NodeProto) -> bool:
        """Whether the operator's definition in this opset allows the type: a Conv takes bfloat16 since opset 22."""
        if node.domain not in STANDARD or not onnx.defs.has(node.op_type, self.flow.opset):
            return False
        # Of the type variables of the definition, those that stand for an input or output and may be float32 (an
        # index may not) decide.
        schema = onnx.defs.get_schema(node.op_type, self.flow.opset, "")
        used = {item.type_str for item in (*schema.inputs, *schema.outputs)}
        allowed = [c.allowed_type_strs for c in schema.type_constraints if c.type_param_str in used]
        floats = [types for types in allowed if "tensor(float)" in types]
        half = f"tensor({NUMPY_TYPES[self.element_type].name})"
        return any(half in types for types in floats)

    def build(self, islands: Collection[str]) -> onnx.ModelProto:
        """The graph in half precision except for `islands` and for operators that do not have the type."""
        in_float = set(islands) | set(self.without_kernel)
        writer = _HalfWriter(self.flow, self.element_type, {name for name in self.floating if name not in in_float})
        return self.flow.assemble(writer.nodes(), writer.constants)


class _HalfWriter:
    """Writes one graph: the nodes named in `in_half` compute in the half type, the others as they are."""

    def __init__(self, flow: Dataflow, element_type: int, in_half: set[str]) -> None:
        self.flow, self.element_type, self.in_half = flow, element_type, in_half
        self.made_in_half = {
            name for node in flow.nodes if node.name in in_half for name in _results(node) if flow.is_float(name)
        }
        self.kept = self.made_in_half & set(flow.outputs)  # what needs its float32 form under its name
        self.constants: dict[str, TensorProto] = {}
        self.taken = flow.names()
        self.names: dict[tuple[str, str], str] = {}  # of a tensor in another form

    def nodes(self) -> Iterator[onnx.NodeProto]:
        for node in self.flow.nodes:
            copy = deepcopy(node)
            for index, name in enumerate(node.input):
                if name and self.flow.is_float(name):
                    by_half = node.name in self.in_half and not self._is_float32_only(node, index)
                    copy.input[index], casts = self._input(name, by_half=by_half)
                    yield from casts
            if node.name in self.in_half:
                self._retype(copy)
                kept = [name for name in node.output if name in self.kept]
                for index, name in enumerate(node.output):
                    copy.output[index] = self._output(name)
                yield copy
                # The graph's outputs stay float32, whatever makes them: the logits' type is part of the contract.
                yield from (cast(self._output(name), name, TensorProto.FLOAT) for name in kept)
            else:
                yield copy

    def _output(self, name: str) -> str:
        """The name of a node's output; what is kept has its own name for the float32 form."""
        return self._form(name, "half") if name in self.kept else name

    def _form(self, name: str, form: str) -> str:
        if (name, form) not in self.names:
            self.names[name, form] = f"{free_tag(name, (form,), self.taken)}/{form}"
        return self.names[name, form]

    def _input(self, name: str, *, by_half: bool) -> tuple[str, list[onnx.NodeProto]]:
        """The name under which a node of the half type, or of float32, reads a tensor, and the Cast this needs."""
        if name in self.flow.constants:
            return (self._constant(name) if by_half else name), []
        if (name in self.made_in_half) == by_half:
            return self._output(name), []
        if name in self.kept:
            return name, []  # its float32 form exists already
        form, element_type = ("as half", self.element_type) if by_half else (AS_FLOAT, TensorProto.FLOAT)
        there = (name, form) in self.names
        target = self._form(name, form)
        return target, [] if there else [cast(name, target, element_type)]

    def _constant(self, name: str) -> str:
        target = self._form(name, "half")
        if target not in self.constants:
            with np.errstate(over="ignore"):  # a constant that overflows is found by the logits it leads to
                value = self.flow.array(name).astype(NUMPY_TYPES[self.element_type])
            self.constants[target] = named_tensor(target, value)
        return target

    def _is_float32_only(self, node: onnx.NodeProto, index: int) -> bool:
        """Whether this input is float32 whatever the others are, as the scales of a Resize."""
        inputs = onnx.defs.get_schema(node.op_type, self.flow.opset, "").inputs
        return bool(inputs[min(index, len(inputs) - 1)].type_str == "tensor(float)")

    def _retype(self, node: onnx.NodeProto) -> None:
        """Where a node names the type of its result (Cast, ConstantOfShape, …), name the half type."""
        # Two forms of constants are float32 without a word: plain numbers, and the zeros of a ConstantOfShape.
        numbers = [given for given in node.attribute if given.name in ("value_float", "value_floats")]
        if numbers or (node.op_type == "ConstantOfShape" and not node.attribute):
            value = helper.get_attribute_value(numbers[0]) if numbers else [0.0]
            del node.attribute[:]
            node.attribute.append(helper.make_attribute("value", named_tensor("", np.asarray(value, np.float32))))
        for given in node.attribute:
            if given.name in ("to", "dtype") and given.i == TensorProto.FLOAT:
                given.i = self.element_type
            if given.name == "value" and given.t.data_type == TensorProto.FLOAT:
                _convert(given.t, NUMPY_TYPES[self.element_type])


def _results(node: onnx.NodeProto) -> list[str]:
    """The outputs that have the type of the inputs: a norm's mean and deviation are float32, as its stash_type says."""
    return list(node.output[:1] if node.op_type == "LayerNormalization" else node.output)


def _convert(tensor: TensorProto, dtype: np.dtype[Any]) -> None:
    with np.errstate(over="ignore"):  # as for constants that are no nodes
        tensor.CopyFrom(named_tensor(tensor.name, onnx.numpy_helper.to_array(tensor).astype(dtype)))


def cpu_twin(model: onnx.ModelProto) -> onnx.ModelProto:
    """A float32 graph with the arithmetic of a half graph: every half tensor is rounded where it is produced.

    ONNX Runtime's CPU runs float16 nodes in float32 and leaves out the rounding between them, so that 75,000 passes
    through a "float16" tensor unharmed; and it has no bfloat16 products at all. Here each rounding is a pair of Casts,
    half and back, after a product that accumulates in float32 as tensor cores do; an overflow becomes infinite.
    8-bit codes that DequantizeLinear gives back are not rounded: a kernel multiplies the codes themselves.
    """
    flow = Dataflow(model)
    halves = {name for name, kind in flow.types.items() if kind in NUMPY_TYPES}
    constants = {
        name: named_tensor(name, flow.array(name).astype(np.float32)) for name in flow.constants if name in halves
    }
    return flow.assemble(_rounded_nodes(flow, halves), constants)


def _rounded_nodes(flow: Dataflow, halves: set[str]) -> Iterator[onnx.NodeProto]:
    taken = flow.names()
    for node in flow.nodes:
        copy = deepcopy(node)
        made = [name for name in node.output if name in halves and node.op_type != "DequantizeLinear"]
        tags = {name: free_tag(name, ("exact", "rounded"), taken) for name in made}
        for given in copy.attribute:
            if given.name == "value" and given.t.data_type in NUMPY_TYPES:
                _convert(given.t, np.dtype(np.float32))
            if made and given.name in ("to", "dtype"):
                given.i = TensorProto.FLOAT
        for index, name in enumerate(node.output):
            if name in made:
                copy.output[index] = f"{tags[name]}/exact"
        yield copy
        for name, tag in tags.items():
            yield cast(f"{tag}/exact", f"{tag}/rounded", flow.types[name])
            yield cast(f"{tag}/rounded", name, TensorProto.FLOAT)
