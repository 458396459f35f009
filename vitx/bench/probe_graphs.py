"""The ONNX graphs that the probes run, encoded by hand: `vitx bench` runs without the `onnx` package.

Field numbers are those of onnx.proto; a test reads each graph back with `onnx` and checks it.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vitx.core.bundle import TensorSpec

_FLOAT, _UINT8, _INT64, _FLOAT16, _BFLOAT16 = 1, 2, 7, 10, 16
_IR_VERSION, _OPSET = 10, 20
ELEMENT_TYPES = {"float32": _FLOAT, "uint8": _UINT8, "fp32": _FLOAT, "fp16": _FLOAT16, "bf16": _BFLOAT16}
_INT_ATTRIBUTE = 2


def product_graph(side: int, dtype: str) -> bytes:
    """`a` (side, side) times a constant of the same shape → `product`, in fp32, fp16 or bf16."""
    element = ELEMENT_TYPES[dtype]
    # A constant, as weights are, so that the runtime may prepack it; multiples of 1/8 are exact in every dtype.
    values = (np.random.default_rng(0).integers(-8, 9, (side, side)) / 8).astype(np.float32)
    weight = _tensor("b", element, (side, side), raw_elements(values, dtype))
    return _model(
        nodes=[_node("MatMul", ["a", "b"], "product")],
        inputs=[_value("a", element, (side, side))],
        outputs=[_value("product", element, (side, side))],
        constants=[weight],
    )


def copy_graph() -> bytes:
    """`a` float32 (N,) → `copy`, negated: every element read once and written once."""
    return _model(
        nodes=[_node("Neg", ["a"], "copy")],
        inputs=[_value("a", _FLOAT, ("N",))],
        outputs=[_value("copy", _FLOAT, ("N",))],
    )


def empty_graph(images: TensorSpec, logits: TensorSpec) -> bytes:
    """A bundle's input and output with nothing between: zeros (N, C), whatever the pixels."""
    classes = np.array([logits.shape[1]], dtype=np.int64)
    nodes = [
        _node("Shape", [images.name], "rows", end=1),
        _node("Concat", ["rows", "classes"], "shape", axis=0),
        _node("ConstantOfShape", ["shape"], logits.name),
    ]
    return _model(
        nodes=nodes,
        inputs=[_value(images.name, ELEMENT_TYPES[images.dtype], images.shape)],
        outputs=[_value(logits.name, ELEMENT_TYPES[logits.dtype], logits.shape)],
        constants=[_tensor("classes", _INT64, (1,), classes.tobytes())],
    )


def raw_elements(values: npt.NDArray[np.float32], dtype: str) -> bytes:
    """Float32 values as the bytes of an ONNX tensor in fp32, fp16 or bf16 (cut off, not rounded)."""
    if dtype == "bf16":  # the upper half of a float32
        return (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return values.astype("<f2" if dtype == "fp16" else "<f4").tobytes()


def _model(
    nodes: Sequence[bytes], inputs: Sequence[bytes], outputs: Sequence[bytes], constants: Sequence[bytes] = ()
) -> bytes:
    parts = [(1, nodes), (2, [b"probe"]), (5, constants), (11, inputs), (12, outputs)]
    graph = b"".join(_field(number, item) for number, items in parts for item in items)
    return _field(1, _IR_VERSION) + _field(7, graph) + _field(8, _field(1, b"") + _field(2, _OPSET))


def _node(kind: str, inputs: Sequence[str], output: str, **attributes: int) -> bytes:
    encoded = [
        _field(1, name.encode()) + _field(3, value) + _field(20, _INT_ATTRIBUTE) for name, value in attributes.items()
    ]
    named = b"".join(_field(1, name.encode()) for name in inputs) + _field(2, output.encode())
    return named + _field(4, kind.encode()) + b"".join(_field(5, attribute) for attribute in encoded)


def _tensor(name: str, element: int, shape: Sequence[int], raw: bytes) -> bytes:
    dims = b"".join(_field(1, extent) for extent in shape)
    return dims + _field(2, element) + _field(8, name.encode()) + _field(9, raw)


def _value(name: str, element: int, shape: Sequence[int | str]) -> bytes:
    """ValueInfoProto of a tensor; a word in the shape is a dynamic dimension."""
    dims = b"".join(_field(1, _field(2, dim.encode()) if isinstance(dim, str) else _field(1, dim)) for dim in shape)
    return _field(1, name.encode()) + _field(2, _field(1, _field(1, element) + _field(2, dims)))


def _field(number: int, value: int | bytes) -> bytes:
    """One protobuf field: a varint, or bytes with their length before them."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
