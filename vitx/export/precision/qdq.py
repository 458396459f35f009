"""QuantizeLinear and DequantizeLinear (Q, DQ) written into a graph: for which layers, and in which form.

Every form is the same arithmetic, `x ≈ scale · (code − zero point)`, with one scale a tensor for activations and one an
output channel for weights. The forms differ because runtimes fuse different patterns into integer kernels:

- `tensorrt`: int8 codes, zero point 0 everywhere, biases in float32.
- `cpu`: activations are the same codes shifted by 128 into uint8 (zero point 128), because ONNX Runtime's fast kernels
  multiply uint8 by int8; a tensor that is never negative has zero point 0 and all 255 codes. Biases become int32 in the
  scale of the product, and a convolution's result is quantised too: without both, ONNX Runtime computes in float32.
- fp8: E4M3 codes, zero point 0, biases in float32, matrix products only.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper

from vitx.core.errors import InputError
from vitx.export.graph.dataflow import Dataflow, attribute, copy_of, named_tensor
from vitx.export.options import Target
from vitx.export.precision.calibration import Activations, Method

EightBit = Literal["int8", "fp8"]
E4M3_MAX = 448.0
# Measured on a CPU: attention with heads of 16 channels (65 tokens) is 5 % slower in int8, with heads of 33 and 64
# channels (197 tokens) 5 % faster.
MIN_HEAD_WIDTH = 32
# Q and DQ have per-channel scales since opset 13 and E4M3 since 19.
OPSET_NEEDED = {"int8": 13, "fp8": 19}


@dataclass(frozen=True)
class Layer:
    """A node that can compute in 8 bits, and its tensors that are quantised. An attention product has no weight."""

    node: str
    op_type: str
    activations: tuple[str, ...]
    weight: str | None = None
    channel_axis: int = 0  # the axis of `weight` that is the output channel
    bias: tuple[str, str] | None = None  # the node that adds it, and the constant
    result: str | None = None  # the output, where it is quantised too

    def tensors(self) -> tuple[str, ...]:
        """The activations whose ranges are needed."""
        return (*self.activations, self.result) if self.result else self.activations


def find_layers(flow: Dataflow, kind: EightBit, target: Target) -> list[Layer]:
    """The layers that can compute in 8 bits, in the graph's order.

    Gemm, MatMul and Conv with a constant weight, and the products of attention, whose operands are both activations.
    Raises InputError when the graph has none, or its opset is too old.
    """
    if flow.opset < OPSET_NEEDED[kind]:
        raise InputError(f"{kind} takes opset {OPSET_NEEDED[kind]} or newer, the graph has {flow.opset}")
    varying, readers = flow.depends_on_input(), flow.readers()
    layers = [layer for node in flow.nodes if (layer := _layer(flow, node, varying, readers, target))]
    if kind == "fp8":  # TensorRT has FP8 kernels for matrix products, not for convolutions
        layers = [layer for layer in layers if layer.op_type != "Conv"]
    if not layers:
        raise InputError(f"nothing in the graph can be {kind}: it has no product with a constant weight")
    return layers


def _layer(
    flow: Dataflow,
    node: onnx.NodeProto,
    varying: set[str],
    readers: Mapping[str, Sequence[onnx.NodeProto]],
    target: Target,
) -> Layer | None:
    if node.op_type not in ("Gemm", "MatMul", "Conv") or not flow.is_float(node.input[0]):
        return None
    data, weight = node.input[:2]
    constant = weight in flow.constants and data in varying
    # Weights: Conv (out, in, h, w); Gemm (in, out), or (out, in) with transB; MatMul (in, out). A MatMul whose constant
    # has three axes (a matrix a head) stays in float32: ONNX Runtime's integer kernel refuses its scales when it runs.
    bias = (node.name, node.input[2]) if len(node.input) > 2 and node.input[2] in flow.constants else None
    if node.op_type == "Conv" and constant:
        result = _after_relu(node, readers) if target == "cpu" else None
        return Layer(node.name, "Conv", (data,), weight, 0, bias, result)
    if node.op_type == "Gemm" and constant and attribute(node, "transA", 0) == 0:
        plain = attribute(node, "alpha", 1.0) == attribute(node, "beta", 1.0) == 1.0
        return (
            Layer(node.name, "Gemm", (data,), weight, 0 if attribute(node, "transB", 0) else 1, bias) if plain else None
        )
    if node.op_type == "MatMul" and constant and len(flow.shapes.get(weight, ())) == 2:
        return Layer(node.name, "MatMul", (data,), weight, 1, _added_bias(flow, node, readers))
    if node.op_type == "MatMul" and {data, weight} <= varying and _gains(flow, data, weight, target):
        return Layer(node.name, "MatMul", (data, weight))
    return None


def _gains(flow: Dataflow, left: str, right: str, target: Target) -> bool:
    """Whether a product of two (B, H, N, ·) activations is faster in 8 bits: on a CPU only if no head is narrow."""
    shapes = [flow.shapes.get(name, ()) for name in (left, right)]
    if [len(shape) for shape in shapes] != [4, 4]:
        return False
    return target == "tensorrt" or all(shape[-1] is None or shape[-1] >= MIN_HEAD_WIDTH for shape in shapes)


def _after_relu(node: onnx.NodeProto, readers: Mapping[str, Sequence[onnx.NodeProto]]) -> str:
    """The output of a convolution, or of the Relu behind it, which ONNX Runtime fuses into the same kernel."""
    after = readers[node.output[0]]
    return str(after[0].output[0] if len(after) == 1 and after[0].op_type == "Relu" else node.output[0])


def _added_bias(
    flow: Dataflow, node: onnx.NodeProto, readers: Mapping[str, Sequence[onnx.NodeProto]]
) -> tuple[str, str] | None:
    """The constant row that the only reader of a product adds to it: (the Add node, the constant), or None."""
    after = readers[node.output[0]]
    if len(after) != 1 or after[0].op_type != "Add":
        return None
    rows = [name for name in after[0].input if name in flow.constants and len(flow.shapes[name]) == 1]
    return (after[0].name, rows[0]) if rows and len(flow.array(rows[0])) > 1 else None


class QuantizedGraph:
    """Writes Q/DQ around chosen layers of one graph; `build` may be called for many choices of layers."""

    def __init__(self, flow: Dataflow, kind: EightBit, target: Target) -> None:
        self.flow, self.kind, self.target = flow, kind, target
        self.layers = {layer.node: layer for layer in find_layers(flow, kind, target)}
        self._weights: dict[tuple[str, int], dict[str, npt.NDArray[Any]]] = {}

    def build(self, chosen: Sequence[str], ranges: Mapping[str, Activations], method: Method) -> onnx.ModelProto:
        """The graph with the layers named in `chosen` in 8 bits, activation ranges by `method`."""
        writer = _QdqWriter(self, ranges, method)
        layers = [self.layers[name] for name in self.layers if name in set(chosen)]
        for layer in layers:
            writer.add(layer)
        return self.flow.assemble(writer.nodes(), writer.constants)

    def weight(self, name: str, axis: int) -> dict[str, npt.NDArray[Any]]:
        """Codes and per-channel scales of a constant; computed once for each axis that is the channel of some layer."""
        key = (name, axis)
        if key not in self._weights:
            value = self.flow.array(name).astype(np.float32)
            others = tuple(i for i in range(value.ndim) if i != axis)
            scale = _scale(np.abs(value).max(axis=others), self.kind)
            shape = [-1 if i == axis else 1 for i in range(value.ndim)]
            scaled = value / scale.reshape(shape)
            # ml_dtypes' cast from float32 to E4M3 rounds to nearest even, as QuantizeLinear does.
            codes = scaled.astype(ml_dtypes.float8_e4m3fn) if self.kind == "fp8" else _int_codes(scaled, 127)
            self._weights[key] = {"codes": codes, "scale": scale}
        return self._weights[key]


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

    def __init__(self, quantized: QuantizedGraph, ranges: Mapping[str, Activations], method: Method) -> None:
        self.quantized, self.flow = quantized, quantized.flow
        self.ranges, self.method = ranges, method
        self.constants: dict[str, TensorProto] = {}
        self.renamed: dict[tuple[str, str], str] = {}  # (node, input): what it reads instead
        self.activations: dict[str, str] = {}  # tensor: the same after Q and DQ
        self.scales: dict[str, npt.NDArray[np.float32]] = {}
        self.first: list[onnx.NodeProto] = []  # DQ of constants: these depend on no other node
        self.after: dict[str, list[onnx.NodeProto]] = {}

    def add(self, layer: Layer) -> None:
        for name in layer.activations:
            self.renamed[layer.node, name] = self._activation(name)
        if layer.weight is not None:
            self.renamed[layer.node, layer.weight] = self._weight(layer.weight, layer.channel_axis)
            if layer.bias is not None and self.quantized.kind == "int8" and self.quantized.target == "cpu":
                self.renamed[layer.bias] = self._bias(layer)
        if layer.result is not None:
            replacement = self._activation(layer.result)
            for reader in self.flow.readers()[layer.result]:
                self.renamed[reader.name, layer.result] = replacement

    def nodes(self) -> Iterator[onnx.NodeProto]:
        yield from self.first
        for name in self.flow.inputs:
            yield from self.after.get(name, ())
        for node in self.flow.nodes:
            copy = copy_of(node)
            for index, name in enumerate(node.input):
                copy.input[index] = self.renamed.get((node.name, name), name)
            yield copy
            for name in node.output:
                yield from self.after.get(name, ())

    def _activation(self, name: str) -> str:
        """The tensor after Q and DQ, one pair for all its readers."""
        if name not in self.activations:
            scale, zero_point = self._range(name)
            self.scales[name] = scale
            inputs = self._parameters(name, scale, zero_point)
            codes, back = f"{name}/quantized", f"{name}/dequantized"
            self.after[name] = [
                helper.make_node("QuantizeLinear", [name, *inputs], [codes], name=f"quantize {name}"),
                helper.make_node("DequantizeLinear", [codes, *inputs], [back], name=f"dequantize {name}"),
            ]
            self.activations[name] = back
        return self.activations[name]

    def _range(self, name: str) -> tuple[npt.NDArray[np.float32], npt.NDArray[Any]]:
        """Scale and zero point of an activation. The zero point also says the type of the codes."""
        activations = self.ranges[name]
        threshold = activations.threshold(self.method)
        if self.quantized.kind == "fp8":
            return _scale(threshold, "fp8"), np.zeros((), ml_dtypes.float8_e4m3fn)
        if self.quantized.target == "tensorrt":
            return _scale(threshold, "int8"), np.zeros((), np.int8)
        if activations.smallest >= 0:  # no code for negative numbers: the scale is threshold / 255
            return _scale(threshold * 127 / 255, "int8"), np.zeros((), np.uint8)
        return _scale(threshold, "int8"), np.full((), 128, np.uint8)

    def _weight(self, name: str, axis: int) -> str:
        weight = self.quantized.weight(name, axis)
        tag = f"{name}/axis{axis}"
        return self._constant(tag, weight["codes"], weight["scale"], axis)

    def _bias(self, layer: Layer) -> str:
        """An int32 bias in the unit of the kernel's int32 sums, scale of the activation times scale of the channel."""
        assert layer.bias is not None
        assert layer.weight is not None
        scale = self.scales[layer.activations[0]] * self.quantized.weight(layer.weight, layer.channel_axis)["scale"]
        # Gemm takes a row (N,), (1, N) or one number: none differs from image to image.
        value = np.broadcast_to(self.flow.array(layer.bias[1]).reshape(-1), scale.shape)
        codes = _int_codes(value.astype(np.float64) / scale, 2**31 - 1, np.int32)
        return self._constant(f"{layer.bias[1]}/of {layer.node}", codes, scale, 0)

    def _constant(self, tag: str, codes: npt.NDArray[Any], scale: npt.NDArray[np.float32], axis: int) -> str:
        """A quantised constant after its DQ, one node for all its readers."""
        back = f"{tag}/dequantized"
        if f"{tag}/quantized" not in self.constants:
            self.constants[f"{tag}/quantized"] = named_tensor(f"{tag}/quantized", codes)
            inputs = [f"{tag}/quantized", *self._parameters(tag, scale, np.zeros(scale.shape, codes.dtype))]
            self.first.append(helper.make_node("DequantizeLinear", inputs, [back], name=f"dequantize {tag}", axis=axis))
        return back

    def _parameters(self, tag: str, scale: npt.NDArray[np.float32], zero_point: npt.NDArray[Any]) -> list[str]:
        names = [f"{tag}/scale", f"{tag}/zero_point"]
        for name, value in zip(names, (scale, zero_point), strict=True):
            self.constants[name] = named_tensor(name, value)
        return names
