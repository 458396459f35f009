"""Writing an ONNX file tensor by tensor. Serialising the message as a whole holds three more copies of the weights."""

from pathlib import Path
from typing import Any

import onnx
from onnx_ir import serde


def write_onnx(model: Any, path: Path) -> None:
    """Write an onnx_ir.Model to `path` as one file, holding one of its tensors at a time.

    The bytes are an ordinary ModelProto: fields of a message may stand in any order, so the graph's initializers
    follow the rest of it. `model` has no initializers afterwards.
    """
    tensors = _detached_tensors(model.graph)
    proto = serde.serialize_model(model)
    graph = proto.graph.SerializeToString()
    proto.ClearField("graph")
    heads = [_initializer_head(tensor) for tensor in tensors]
    # A field's length stands before its bytes, so that of the graph is added up before a tensor is written.
    length = len(graph) + sum(map(len, heads)) + sum(tensor.nbytes for tensor in tensors)
    with path.open("wb") as file:
        file.write(proto.SerializeToString() + _key(onnx.ModelProto.GRAPH_FIELD_NUMBER, length) + graph)
        for head, tensor in zip(heads, tensors, strict=True):
            file.write(head)
            file.write(tensor.tobytes())


def _detached_tensors(graph: Any) -> list[Any]:
    """Take the initializers out of the graph; return their tensors, which keep the initializers' names."""
    tensors = []
    for name, value in graph.initializers.items():
        value.const_value.name = name
        tensors.append(value.const_value)
    graph.initializers.clear()
    return tensors


def _initializer_head(tensor: Any) -> bytes:
    """The field `GraphProto.initializer` up to the tensor's bytes, which end it.

    `raw_data` holds every element type as little-endian bytes (onnx.proto), so no tensor is converted.
    """
    described = onnx.TensorProto(name=tensor.name, data_type=tensor.dtype.value, dims=tensor.shape.numpy())
    head: bytes = described.SerializeToString() + _key(onnx.TensorProto.RAW_DATA_FIELD_NUMBER, tensor.nbytes)
    return _key(onnx.GraphProto.INITIALIZER_FIELD_NUMBER, len(head) + tensor.nbytes) + head


def _key(field: int, length: int) -> bytes:
    """The tag and length before the `length` bytes of a field in protobuf's wire format (wire type 2)."""
    return _varint(field << 3 | 2) + _varint(length)


def _varint(number: int) -> bytes:
    """Base-128 number of protobuf: seven bits a byte, lowest first; all bytes but the last have the eighth bit set."""
    groups = []
    while number > 0x7F:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*groups, number])
