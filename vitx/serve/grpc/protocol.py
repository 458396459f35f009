"""Open Inference Protocol v2 over gRPC: reads the message of an infer request, and writes its response.

A message is converted to the form of an HTTP request, a header and the tensor's bytes, and read by the same code. So
parameters mean the same in both protocols, and the same requests are refused. Each look at the bytes copies them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from vitx.runtimes.session import Float32Array
from vitx.serve.errors import RequestError
from vitx.serve.grpc.messages import message_class
from vitx.serve.limits import Limits
from vitx.serve.protocol.infer import Contract, InferRequest, ParsedHeader, output_tensors, tensor_bytes
from vitx.serve.protocol.parameters import REGION_PARAMETERS, expected_bytes
from vitx.serve.protocol.shared_memory import SharedMemory

_InferResponse = message_class("ModelInferResponse")

_PIECE = 1 << 16  # numbers that become Python's integers at once
_SIDES = 9  # of a shape, of which four are right
# Asks for an empty response after the last one of a request. Here each has one response, which is marked as the last.
_FINAL_RESPONSE = "triton_enable_empty_final_response"


def decode_infer_request(request: Any, contract: Contract, limits: Limits, memory: SharedMemory) -> InferRequest:
    """Read a ModelInferRequest; raise RequestError as `vitx.serve.protocol.infer.decode_infer_request` does."""
    raw, numbers, size = [*request.raw_input_contents], (), {}
    if len(request.inputs) == 1:
        in_memory = any(name in request.inputs[0].parameters for name in REGION_PARAMETERS)
        if len(raw) + request.inputs[0].HasField("contents") + in_memory != 1:
            places = "raw_input_contents, contents or shared memory"
            raise RequestError(f"input '{contract.input_name}' needs its data in one place: {places}")
        if not in_memory:
            numbers = request.inputs[0].contents.uint_contents
            size["binary_data_size"] = len(raw[0]) if raw else len(numbers)
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
    parsed = ParsedHeader.of(header, contract, limits.images, memory)
    if numbers:  # 50 million that are refused take seconds to read
        expected_bytes(contract.input_name, len(numbers), parsed.shape)
    return parsed.request(memoryview(raw[0] if raw else _pixels(numbers, contract)), contract, memory)


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


def _pixels(numbers: Sequence[int], contract: Contract) -> bytes:
    """The bytes that `contents.uint_contents` are, a piece at a time; raise RequestError for a value above 255."""
    try:
        return b"".join([bytes(numbers[start : start + _PIECE]) for start in range(0, len(numbers), _PIECE)])
    except ValueError:
        raise RequestError(f"the data of input '{contract.input_name}' is not all integers from 0 to 255") from None


def _parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    chosen = {name: parameter.WhichOneof("parameter_choice") for name, parameter in parameters.items()}
    chosen.pop(_FINAL_RESPONSE, None)
    return {name: getattr(parameters[name], kind) if kind else None for name, kind in chosen.items()}
