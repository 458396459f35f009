"""QuantizeLinear and DequantizeLinear (Q, DQ) written into a graph, and in which form; placement.py says where.

Every form is the same arithmetic, `x ≈ scale · (code − zero point)`, with one scale a tensor for activations and one an
output channel for weights. The forms differ because runtimes fuse different patterns into integer kernels:

- `tensorrt`: int8 codes, zero point 0 everywhere, biases as they are.
- `cpu`: activations are the same codes shifted by 128 into uint8 (zero point 128), because ONNX Runtime's fast kernels
  multiply uint8 by int8; a tensor that is never negative has zero point 0 and all 255 codes. Biases become int32 in the
  scale of the product, and a convolution's result is quantised too: without both, ONNX Runtime computes in float32.
- fp8: E4M3 codes, zero point 0, biases as they are, matrix products only.

What is not quantised computes in the base: float32, or a half type, which is written into the graph with Q/DQ. Scales
are of the base's type too, because Q and DQ give back the type of their scale.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from vitx.core.bundle import Base
from vitx.core.errors import InputError
from vitx.export.graph.dataflow import Dataflow, free_tag, named_tensor
from vitx.export.options import Target
from vitx.export.precision.calibration import Activations, Method
from vitx.export.precision.half import HALVES, NUMPY_TYPES, SMALLEST, HalfGraph
from vitx.export.precision.placement import EightBit, Layer, find_layers

E4M3_MAX = 448.0
SWITCHES = "quantized layers"
# What a tensor's codes, their scale and zero point, and the tensor after DQ are called behind its own name.
_PARTS = ("quantized", "scale", "zero_point", "dequantized")


class QuantizedGraph:
    """Writes Q/DQ around chosen layers of one graph; `build` may be called for many choices of layers.

    islands: nodes that stay in float32 where the base is a half type; they are no layers.
    """

    def __init__(
        self, flow: Dataflow, kind: EightBit, target: Target, base: Base = "fp32", islands: Collection[str] = ()
    ) -> None:
        self.flow, self.kind, self.target, self.base, self.islands = flow, kind, target, base, islands
        found = find_layers(flow, kind, target, base)
        self.layers = {layer.node: layer for layer in found if layer.node not in islands}
        if not self.layers:
            raise InputError(
                f"nothing in the graph can be {kind}: all that could be overflows {base}, so it stays in float32; try "
                "--base bf16 or fp32"
            )
        self._weights: dict[tuple[str, int | None], dict[str, npt.NDArray[Any]]] = {}

    def build(
        self,
        chosen: Sequence[str],
        ranges: Mapping[str, Activations],
        method: Method,
        per_tensor: Collection[str] = (),
    ) -> onnx.ModelProto:
        """The graph with the layers named in `chosen` in 8 bits, activation ranges by `method`.

        per_tensor: layers whose weights have one scale instead of one for each output channel.
        """
        writer = _QdqWriter(self, ranges, method, per_tensor)
        layers = [self.layers[name] for name in self.layers if name in set(chosen)]
        for layer in layers:
            writer.add(layer)
        graph = self.flow.assemble(writer.nodes(), writer.constants)
        return graph if self.base == "fp32" else HalfGraph(Dataflow(graph), HALVES[self.base]).build(self.islands)

    def switched(self, ranges: Mapping[str, Activations], method: Method) -> onnx.ModelProto:
        """The float32 graph with one input more, SWITCHES, bool: which layers, by their order, compute in 8 bits.

        One session measures any choice of layers with it; what is not quantised is float32, whatever the base.
        """
        writer = _QdqWriter(self, ranges, method, ())
        for layer in self.layers.values():
            writer.add(layer)
        graph = self.flow.assemble(writer.nodes(switched=list(self.layers)), writer.constants)
        graph.graph.input.append(helper.make_tensor_value_info(SWITCHES, TensorProto.BOOL, [len(self.layers)]))
        return graph

    def weight(
        self, name: str, axis: int | None, least: npt.NDArray[np.float32] | None = None
    ) -> dict[str, npt.NDArray[Any]]:
        """Codes and per-channel scales of a constant, or its one scale where no axis is the channel.

        Computed once, but where a scale has to be raised to the channel's `least`.
        """
        key = (name, axis)
        if key not in self._weights:
            value = self.flow.array(name).astype(np.float32)
            others = tuple(i for i in range(value.ndim) if i != axis)
            self._weights[key] = self._coded(value, axis, self.scale(np.abs(value).max(axis=others)))
        found = self._weights[key]
        if least is None or (least <= found["scale"]).all():
            return found
        return self._coded(self.flow.array(name).astype(np.float32), axis, np.maximum(found["scale"], least))

    def _coded(
        self, value: npt.NDArray[np.float32], axis: int | None, scale: npt.NDArray[np.float32]
    ) -> dict[str, npt.NDArray[Any]]:
        scaled = value / scale.reshape([-1 if i == axis else 1 for i in range(value.ndim)])
        if self.kind == "int8":
            return {"codes": _int_codes(scaled, 127), "scale": scale}
        # ml_dtypes' cast from float32 to E4M3 rounds to nearest even, as QuantizeLinear does, but gives NaN beyond the
        # largest code: a scale that the base's type rounds down leads there.
        return {"codes": np.clip(scaled, -E4M3_MAX, E4M3_MAX).astype(ml_dtypes.float8_e4m3fn), "scale": scale}

    def scale(self, largest: Any) -> npt.NDArray[np.float32]:
        """The scale that gives `largest` the largest code, as a float32 that the base's type holds exactly."""
        scale = _scale(largest, self.kind)
        if self.base == "fp32":
            return scale
        kind = HALVES[self.base]
        rounded: npt.NDArray[np.float32] = scale.astype(NUMPY_TYPES[kind]).astype(np.float32)
        return np.where(rounded > 0, rounded, np.float32(SMALLEST[kind]))


def _scale(largest: Any, kind: EightBit) -> npt.NDArray[np.float32]:
    """The scale that gives `largest` the largest code; 1 where all is zero."""
    largest = np.asarray(largest, dtype=np.float32)
    codes = E4M3_MAX if kind == "fp8" else 127
    # Never a denormal float32: its reciprocal would be infinite.
    return np.where(largest > 0, np.maximum(largest / codes, 1e-30), 1).astype(np.float32)


def _int_codes(scaled: npt.NDArray[Any], limit: int, dtype: Any = np.int8) -> npt.NDArray[Any]:
    """Rounded codes from -limit to limit: the least number of the type is left out, for it has no opposite."""
    codes: npt.NDArray[Any] = np.clip(np.rint(scaled), -limit, limit).astype(dtype)
    return codes


class _QdqWriter:
    """Writes one graph: new nodes by the tensor they follow, new constants, inputs that read another tensor."""

    def __init__(
        self, quantized: QuantizedGraph, ranges: Mapping[str, Activations], method: Method, per_tensor: Collection[str]
    ) -> None:
        self.quantized, self.flow = quantized, quantized.flow
        self.ranges, self.method, self.per_tensor = ranges, method, per_tensor
        self.constants: dict[str, TensorProto] = {}
        self.renamed: dict[tuple[str, str], str] = {}  # (node, input): what it reads instead
        self.activations: dict[str, str] = {}  # tensor: the same after Q and DQ
        self.scales: dict[str, npt.NDArray[np.float32]] = {}
        self.taken = self.flow.names()
        self.first: list[onnx.NodeProto] = []  # DQ of constants: these depend on no other node
        self.after: dict[str, list[onnx.NodeProto]] = {}

    def add(self, layer: Layer) -> None:
        for name in layer.activations:
            self.renamed[layer.node, name] = self._activation(name)
        if layer.weight is not None:
            axis = None if layer.node in self.per_tensor else layer.channel_axis
            if layer.bias is None or not self._integer_biases():
                self.renamed[layer.node, layer.weight] = self._weight(layer.weight, axis)
            else:
                self.renamed[layer.node, layer.weight], self.renamed[layer.bias] = self._with_bias(layer)
        if layer.result is not None:
            replacement = self._activation(layer.result)
            for reader in self.flow.readers()[layer.result]:
                self.renamed[reader.name, layer.result] = replacement

    def nodes(self, switched: Sequence[str] | None = None) -> Iterator[onnx.NodeProto]:
        """switched: layers that get both their operands and a switch; see `QuantizedGraph.switched`."""
        yield from self.first
        for name in self.flow.inputs:
            yield from self.after.get(name, ())
        for node in self.flow.nodes:
            yield from (self._renamed(node),) if switched is None else self._switched(node, switched)
            for name in node.output:
                yield from self.after.get(name, ())

    def _switched(self, node: onnx.NodeProto, layers: Sequence[str]) -> Iterator[onnx.NodeProto]:
        """A layer with its operands twice, as they were and quantised, and a Where that takes one; others alone."""
        if node.name not in layers:
            yield node
            return
        copy = self._renamed(node)
        index, switch = f"{node.name}/index", f"{node.name}/switch"
        self.constants[index] = named_tensor(index, np.array(layers.index(node.name)))
        yield helper.make_node("Gather", [SWITCHES, index], [switch])
        for place, (name, quantized) in enumerate(zip(node.input, copy.input, strict=True)):
            if name != quantized:
                copy.input[place] = f"{node.name}/operand {place}"
                yield helper.make_node("Where", [switch, quantized, name], [copy.input[place]])
        yield copy

    def _renamed(self, node: onnx.NodeProto) -> onnx.NodeProto:
        copy = deepcopy(node)
        for index, name in enumerate(node.input):
            copy.input[index] = self.renamed.get((node.name, name), name)
        return copy

    def _integer_biases(self) -> bool:
        """ONNX Runtime's integer kernels add them; in a half type their scale, a product of two, would round to 0."""
        return (self.quantized.kind, self.quantized.target, self.quantized.base) == ("int8", "cpu", "fp32")

    def _activation(self, name: str) -> str:
        """The tensor after Q and DQ, one pair for all its readers."""
        if name not in self.activations:
            scale, zero_point = self._range(name)
            self.scales[name] = scale
            tag = free_tag(name, _PARTS, self.taken)
            inputs = self._parameters(tag, scale, zero_point)
            codes, back = f"{tag}/quantized", f"{tag}/dequantized"
            self.after[name] = [
                helper.make_node("QuantizeLinear", [name, *inputs], [codes], name=f"quantize {tag}"),
                helper.make_node("DequantizeLinear", [codes, *inputs], [back], name=f"dequantize {tag}"),
            ]
            self.activations[name] = back
        return self.activations[name]

    def _range(self, name: str) -> tuple[npt.NDArray[np.float32], npt.NDArray[Any]]:
        """Scale and zero point of an activation. The zero point also says the type of the codes."""
        activations = self.ranges[name]
        threshold, scale = activations.threshold(self.method), self.quantized.scale
        if self.quantized.kind == "fp8":
            return scale(threshold), np.zeros((), ml_dtypes.float8_e4m3fn)
        if self.quantized.target == "tensorrt":
            return scale(threshold), np.zeros((), np.int8)
        if activations.smallest >= 0:  # no code for negative numbers: the scale is threshold / 255
            return scale(threshold * 127 / 255), np.zeros((), np.uint8)
        return scale(threshold), np.full((), 128, np.uint8)

    def _weight(self, name: str, axis: int | None) -> str:
        weight = self.quantized.weight(name, axis)
        tag = f"{name}/per tensor" if axis is None else f"{name}/axis{axis}"
        return self._constant(tag, weight["codes"], weight["scale"], axis)

    def _with_bias(self, layer: Layer) -> tuple[str, str]:
        """The weight, and an int32 bias in the unit of the kernel's int32 sums: the activation's scale times its own.

        Beside a channel of tiny weights, or of none, the bias would not fit: such a channel gets a scale for which it
        does, with one bit left for the sum.
        """
        assert layer.bias is not None
        assert layer.weight is not None
        unit = self.scales[layer.activations[0]]
        channels = self.flow.array(layer.weight).shape[layer.channel_axis]
        # Gemm takes a row (N,), (1, N) or one number: none differs from image to image.
        value = np.broadcast_to(self.flow.array(layer.bias[1]).reshape(-1), channels).astype(np.float64)
        least = (np.abs(value) / (unit * 2.0**30)).astype(np.float32)
        weight = self.quantized.weight(layer.weight, layer.channel_axis, least)
        tag = f"{layer.weight}/axis{layer.channel_axis}"
        codes = _int_codes(value / (unit * weight["scale"]), 2**31 - 1, np.int32)
        return (
            self._constant(tag, weight["codes"], weight["scale"], layer.channel_axis),
            self._constant(f"{layer.bias[1]}/of {layer.node}", codes, unit * weight["scale"], 0),
        )

    def _constant(self, tag: str, codes: npt.NDArray[Any], scale: npt.NDArray[np.float32], axis: int | None) -> str:
        """A quantised constant after its DQ, for one reader.

        Each layer that reads a weight has codes of its own: ONNX Runtime makes uint8 of them for each, by their name,
        where the processor has no VNNI, and refuses the second of one name.
        """
        tag = free_tag(tag, _PARTS, self.taken)
        self.constants[f"{tag}/quantized"] = named_tensor(f"{tag}/quantized", codes)
        inputs = [f"{tag}/quantized", *self._parameters(tag, scale, np.zeros(scale.shape, codes.dtype))]
        back = f"{tag}/dequantized"
        self.first.append(helper.make_node("DequantizeLinear", inputs, [back], name=f"dequantize {tag}", axis=axis))
        return back

    def _parameters(self, tag: str, scale: npt.NDArray[np.float32], zero_point: npt.NDArray[Any]) -> list[str]:
        names = [f"{tag}/scale", f"{tag}/zero_point"]
        for name, value in zip(names, (scale, zero_point), strict=True):
            self.constants[name] = named_tensor(name, value)
        return names
