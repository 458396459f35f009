"""Open Inference Protocol v2 over gRPC: reads the message of an infer request, and writes its response.

A message is converted to the form of an HTTP request, a header and the tensor's bytes, and read by the same code. So
parameters mean the same in both protocols, and the same requests are refused. The bytes are not copied.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vitx.core.preprocess import UInt8Array
from vitx.runtimes.session import Float32Array
from vitx.serve.errors import RequestError
from vitx.serve.grpc.messages import message_class
from vitx.serve.limits import Limits
from vitx.serve.protocol.infer import Contract, InferRequest, ParsedHeader, output_tensors, tensor_bytes
from vitx.serve.protocol.parameters import REGION_PARAMETERS
from vitx.serve.protocol.shared_memory import SharedMemory

_InferResponse = message_class("ModelInferResponse")

_PIECE = 1 << 16  # numbers that become Python's integers at once
_SIDES = 9  # of a shape, of which four are right
# Asks for an empty response after the last one of a request. Here each has one response, which is marked as the last.
_FINAL_RESPONSE = "triton_enable_empty_final_response"


def decode_infer_request(request: Any, contract: Contract, limits: Limits, memory: SharedMemory) -> InferRequest:
    """Read a ModelInferRequest; raise RequestError as `vitx.serve.protocol.infer.decode_infer_request` does."""
    raw, rest, size = request.raw_input_contents, memoryview(b""), {}
    if len(request.inputs) == 1:
        in_memory = any(name in request.inputs[0].parameters for name in REGION_PARAMETERS)
        if len(raw) + request.inputs[0].HasField("contents") + in_memory != 1:
            places = "raw_input_contents, contents or shared memory"
            raise RequestError(f"input '{contract.input_name}' needs its data in one place: {places}")
        if not in_memory:
            rest = memoryview(raw[0]) if raw else _typed_pixels(request.inputs[0], contract, limits).data
            size["binary_data_size"] = len(rest)
    header: dict[str, Any] = {
        "id": request.id,
        "inputs": [
            {
                "name": tensor.name,
                "datatype": tensor.datatype,
                "shape": list(tensor.shape[:_SIDES]),  # a longer one is refused as well
                "parameters": {**size, **_parameters(tensor.parameters)},
            }
            for tensor in request.inputs
        ],
        "outputs": [{"name": output.name, "parameters": _parameters(output.parameters)} for output in request.outputs],
        "parameters": {"binary_data_output": True, **_parameters(request.parameters)},  # there is no other form here
    }
    return ParsedHeader.of(header, contract, limits.images, memory).request(rest, contract, memory)


def encode_infer_response(rows: Float32Array, request: InferRequest, contract: Contract, labels: Sequence[str]) -> Any:
    """Return the ModelInferResponse; raise RequestError if an output's shared memory cannot be written.

    `rows`: see `Contract`.
    """
    response = _InferResponse(model_name=contract.model, model_version=contract.version, id=request.id or "")
    for wanted, datatype, shape, values in output_tensors(rows, request, contract, labels):
        output = response.outputs.add(name=wanted.name, datatype=datatype, shape=shape)
        data, placed = tensor_bytes(values), {}
        if wanted.region is not None:
            placed, data = wanted.region.write(data, wanted.name), b""
        response.raw_output_contents.append(data)  # Triton's C++ client takes the entry of each output, unasked
        for name, value in placed.items():
            setattr(output.parameters[name], "string_param" if isinstance(value, str) else "int64_param", value)
    return response


def _typed_pixels(tensor: Any, contract: Contract, limits: Limits) -> UInt8Array:
    """The pixels of `contents.uint_contents`, a piece at a time; none for a shape that is refused anyway.

    Raises RequestError for another number of them than the shape needs, and for a value above 255.
    """
    shape, given = tuple(tensor.shape[:_SIDES]), tensor.contents.uint_contents
    if shape[1:] != contract.image_shape or not 1 <= shape[0] <= limits.images:
        return np.empty(0, np.uint8)
    if len(given) != math.prod(shape):
        text = f"the data of input '{contract.input_name}' has shape [{len(given)}]: expected {list(shape)} or flat"
        raise RequestError(text)
    pixels = np.empty(len(given), np.uint8)
    for start in range(0, len(given), _PIECE):
        piece = np.array(given[start : start + _PIECE], np.uint32)
        if piece.max() > 255:
            raise RequestError(f"the data of input '{contract.input_name}' is not all integers from 0 to 255")
        pixels[start : start + _PIECE] = piece
    return pixels


def _parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    chosen = {name: parameter.WhichOneof("parameter_choice") for name, parameter in parameters.items()}
    chosen.pop(_FINAL_RESPONSE, None)
    return {name: getattr(parameters[name], kind) if kind else None for name, kind in chosen.items()}
