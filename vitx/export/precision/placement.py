"""Which nodes of a graph compute in 8 bits: what a target has fast kernels for, and what gains by them.

For TensorRT the rules are read from NVIDIA's Model-Optimizer (modelopt/onnx/quantization/graph_utils.py, commit
a2fbac7b) and checked against the layer tables of plans that TensorRT for RTX 1.7 built (docs/precision.md).
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import onnx

from vitx.core.bundle import Base
from vitx.core.errors import InputError
from vitx.export.graph.dataflow import Dataflow, attribute
from vitx.export.options import Target

EightBit = Literal["int8", "fp8"]
# Measured on a CPU: attention with heads of 16 channels (65 tokens) is 5 % slower in int8, with heads of 33 and 64
# channels (197 tokens) 5 % faster.
MIN_HEAD_WIDTH = 32
# TensorRT: a product with fewer rows or columns in its matrix does not fill the tensor cores' tiles of 8-bit numbers.
MIN_SIDE = 16
# TensorRT: the heads for which it fuses attention, in int8 up to so many tokens, in fp8 from so many on.
INT8_HEAD_WIDTHS, MAX_INT8_TOKENS = (16, 32, 64), 512
FP8_HEAD_WIDTHS, MIN_FP8_TOKENS = range(MIN_SIDE, 257), 32
# What may stand between the products of a fused attention: views, the scale and a mask or bias before the Softmax.
VIEWS = ("Reshape", "Transpose", "Cast", "Identity")
# Q and DQ have per-channel scales since opset 13, E4M3 and half scales since 19.
OPSET_NEEDED = {"int8": 13, "fp8": 19}
HALF_BASE_OPSET = 19


@dataclass(frozen=True)
class Layer:
    """A node that can compute in 8 bits, and its tensors that are quantised. An attention product has no weight."""

    node: str
    activations: tuple[str, ...]
    weight: str | None = None
    channel_axis: int = 0  # the axis of `weight` that is the output channel
    bias: tuple[str, str] | None = None  # the node that adds it, and the constant
    result: str | None = None  # the output, where it is quantised too
    one_scale: bool = False  # whether a kernel gains by one scale for the whole weight

    def tensors(self) -> tuple[str, ...]:
        """The activations whose ranges are needed."""
        return (*self.activations, self.result) if self.result else self.activations


def find_layers(flow: Dataflow, kind: EightBit, target: Target, base: Base = "fp32") -> list[Layer]:
    """The layers that can compute in 8 bits, in the graph's order.

    Gemm, MatMul and Conv with a constant weight, and the products of attention, whose operands are both activations.
    base: what the rest of the graph computes in. Raises InputError when the graph has none, or its opset is too old.
    """
    needed = OPSET_NEEDED[kind] if base == "fp32" else max(OPSET_NEEDED[kind], HALF_BASE_OPSET)
    if flow.opset < needed:
        raise InputError(f"{kind} takes opset {needed} or newer, the graph has {flow.opset}")
    finder = _Finder(flow, kind, target, base)
    layers = [layer for node in flow.nodes if (layer := finder.layer(node))]
    if not layers:
        raise InputError(f"nothing in the graph can be {kind}: {finder.reason()}")
    return layers


class _Finder:
    """Decides of each node of one graph whether it is a layer."""

    def __init__(self, flow: Dataflow, kind: EightBit, target: Target, base: Base) -> None:
        self.flow, self.kind, self.target, self.base = flow, kind, target, base
        self.varying, self.readers, self.makers = flow.depends_on_input(), flow.readers(), flow.producers()
        # TensorRT has FP8 kernels for matrix products, not for convolutions, and gives an int8 convolution float32
        # results whatever the base is: beside a half type that is slower than the convolution in that type.
        self.convolutions = kind == "int8" and (target == "cpu" or base == "fp32")
        self.fused_attention = _fused_attention(self) if target == "tensorrt" else frozenset()
        # With one scale for the weight, the builder rounds the result for attention in the product's own kernel; with
        # one for each channel, in a kernel after it. It does so in int8 alone, and for no other product.
        self.operands = self._operands_of(self.fused_attention) if kind == "int8" else frozenset()

    def _operands_of(self, attention: Collection[str]) -> frozenset[str]:
        """The nodes whose results become operands of these products by views, a bias or a scale."""
        found: set[str] = set()
        left = [name for node in self.flow.nodes if node.name in attention for name in node.input]
        while left:
            node = self.makers.get(left.pop())
            if node is None or node.name in found:
                continue
            found.add(node.name)
            left += [name for name in node.input if node.op_type in (*VIEWS, "Add", "Mul", "Div")]
        return frozenset(found)

    def layer(self, node: onnx.NodeProto) -> Layer | None:
        if node.op_type not in ("Gemm", "MatMul", "Conv") or not self.flow.is_float(node.input[0]):
            return None
        data, weight = node.input[:2]
        if weight in self.flow.constants and data in self.varying:
            return self._convolution(node) if node.op_type == "Conv" else self._product(node)
        if node.op_type == "MatMul" and {data, weight} <= self.varying and self._attention_gains(node):
            return Layer(node.name, (data, weight))
        return None

    def reason(self) -> str:
        """Why no node is a layer, as far as rules for all nodes of a type say it."""
        sides = f" of {MIN_SIDE} rows and columns or more" if self.target == "tensorrt" else ""
        convolutions = ""
        if not self.convolutions and any(node.op_type == "Conv" for node in self.flow.nodes):
            remedy = " (--base fp32 quantises them)" if self.kind == "int8" else ""
            convolutions = f", and convolutions stay in {self.base}{remedy}"
        return f"it has no product with a constant weight{sides}{convolutions}"

    def _convolution(self, node: onnx.NodeProto) -> Layer | None:
        """Weights are (out, in, h, w)."""
        result = _after_relu(node, self.readers) if self.target == "cpu" else None
        layer = Layer(node.name, (node.input[0],), node.input[1], 0, self._own_bias(node), result)
        return layer if self.convolutions else None

    def _product(self, node: onnx.NodeProto) -> Layer | None:
        """Weights of a Gemm are (in, out), or (out, in) with transB; of a MatMul (in, out).

        A MatMul whose constant has three axes (a matrix a head) is no layer: ONNX Runtime's integer kernel refuses its
        scales when it runs.
        """
        data, weight = node.input[:2]
        sides = self.flow.shapes.get(weight, ())
        if len(sides) != 2 or (self.target == "tensorrt" and min(side or MIN_SIDE for side in sides) < MIN_SIDE):
            return None
        one_scale = node.name in self.operands
        if node.op_type == "MatMul":
            bias = _added_bias(self.flow, node, self.readers)
            return Layer(node.name, (data,), weight, 1, bias, one_scale=one_scale)
        plain = attribute(node, "alpha", 1.0) == attribute(node, "beta", 1.0) == 1.0
        axis = 0 if attribute(node, "transB", 0) else 1
        layer = Layer(node.name, (data,), weight, axis, self._own_bias(node), one_scale=one_scale)
        return layer if plain and attribute(node, "transA", 0) == 0 else None

    def _own_bias(self, node: onnx.NodeProto) -> tuple[str, str] | None:
        constant = len(node.input) > 2 and node.input[2] in self.flow.constants
        return (node.name, node.input[2]) if constant else None

    def _attention_gains(self, node: onnx.NodeProto) -> bool:
        """Whether a product of two (B, H, N, ·) activations is faster in 8 bits.

        On a CPU if no head is narrow; in TensorRT if it is fused with the Softmax and the other product, for alone it
        costs kernels that round and pad its operands.
        """
        shapes = [self.flow.shapes.get(name, ()) for name in node.input[:2]]
        if [len(shape) for shape in shapes] != [4, 4]:
            return False
        if self.target == "tensorrt":
            return node.name in self.fused_attention
        return all(shape[-1] is None or shape[-1] >= MIN_HEAD_WIDTH for shape in shapes)


def _fused_attention(finder: _Finder) -> frozenset[str]:
    """The products of attention that TensorRT fuses in 8 bits: MatMul → (scale) → (bias) → Softmax → MatMul.

    A mix over heads between Softmax and values breaks the pattern, and so do heads of another width. In int8 beside
    bfloat16 a bias breaks it too.
    """
    biases = 0 if (finder.kind, finder.base) == ("int8", "bf16") else 1
    found: set[str] = set()
    for node in finder.flow.nodes:
        if node.op_type == "Softmax":
            scores = _before(node.input[0], finder.makers, biases)
            values = _after(node.output[0], finder.readers)
            if scores is not None and values is not None and _fits(finder.flow, scores, finder.kind):
                found |= {scores.name, values.name}
    return frozenset(found)


def _before(name: str, makers: Mapping[str, onnx.NodeProto], biases: int) -> onnx.NodeProto | None:
    """The product whose result becomes this tensor by views, at most one scale and at most so many additions."""
    left = {"Add": biases, "Mul": 1, "Div": 1}
    while (node := makers.get(name)) is not None and node.op_type != "MatMul":
        if node.op_type not in VIEWS and not left.pop(node.op_type, 0):
            return None
        # Of the operands of an addition or a scale, the one that comes from a product; a constant has no maker.
        name = next((each for each in node.input if each in makers), "")
    return node


def _after(name: str, readers: Mapping[str, Sequence[onnx.NodeProto]]) -> onnx.NodeProto | None:
    """The product that alone reads this tensor, as its left operand and perhaps through views."""
    while len(after := readers.get(name, ())) == 1:
        if after[0].op_type == "MatMul":
            return after[0] if after[0].input[0] == name else None
        if after[0].op_type not in VIEWS:
            return None
        name = after[0].output[0]
    return None


def _fits(flow: Dataflow, scores: onnx.NodeProto, kind: EightBit) -> bool:
    """Whether the heads are of a width, and the tokens of a number, that the fused kernel takes."""
    query, key = (flow.shapes.get(name, ()) for name in scores.input[:2])
    if len(query) != 4 or len(key) != 4:
        return False
    width, tokens = query[-1], key[-1]
    if width is None or tokens is None:
        return False
    if kind == "fp8":
        return width in FP8_HEAD_WIDTHS and tokens >= MIN_FP8_TOKENS
    return width in INT8_HEAD_WIDTHS and tokens <= MAX_INT8_TOKENS


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
    channels = flow.shapes[node.input[1]][1]  # a row of another length is added to a product of one channel, many times
    rows = [name for name in after[0].input if name in flow.constants and flow.shapes[name] == (channels,)]
    return (after[0].name, rows[0]) if rows and channels != 1 else None
