"""Open Inference Protocol v2 over HTTP: one image tensor in, one logits tensor out, as JSON or as raw bytes.

The binary form is Triton's extension: the body is a JSON header of `Inference-Header-Content-Length` bytes and then the
tensors' bytes (little endian, row major). Sources: KServe's "Open Inference Protocol", Triton's
docs/protocol/extension_binary_data.md.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitx.core.bundle import Manifest
from vitx.core.preprocess import UInt8Array
from vitx.serve.errors import RequestError, too_large
from vitx.serve.runtimes import Float32Array

HEADER_LENGTH = "inference-header-content-length"
VERSION = "1"  # of every model: a bundle holds one

# Parameters of Triton's extensions that this server does not offer: it says so instead of ignoring them.
_NOT_OFFERED = frozenset({"classification", "shared_memory_region", "sequence_id", "priority", "timeout"})


@dataclass(frozen=True, slots=True)
class Contract:
    """The tensors of one model. `image_shape` is (S, S, 3), without the batch."""

    model: str
    input_name: str
    image_shape: tuple[int, ...]
    output_name: str
    classes: int

    @classmethod
    def of(cls, manifest: Manifest) -> "Contract":
        image_shape = tuple(side for side in manifest.input.shape[1:] if side != "N")
        return cls(manifest.name, manifest.input.name, image_shape, manifest.output.name, manifest.model.num_classes)

    def metadata(self) -> dict[str, Any]:
        """The body of `GET /v2/models/NAME`."""
        return {
            "name": self.model,
            "versions": [VERSION],
            "platform": "onnxruntime_onnx",
            "inputs": [{"name": self.input_name, "datatype": "UINT8", "shape": [-1, *self.image_shape]}],
            "outputs": [{"name": self.output_name, "datatype": "FP32", "shape": [-1, self.classes]}],
        }

    def config(self, max_batch: int) -> dict[str, Any]:
        """The body of `GET /v2/models/NAME/config`, of Triton's model configuration extension."""
        return {
            "name": self.model,
            "platform": "onnxruntime_onnx",
            "backend": "onnxruntime",
            "max_batch_size": max_batch,
            "input": [{"name": self.input_name, "data_type": "TYPE_UINT8", "dims": list(self.image_shape)}],
            "output": [{"name": self.output_name, "data_type": "TYPE_FP32", "dims": [self.classes]}],
            "dynamic_batching": {"preferred_batch_size": [max_batch]},
        }


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A request that keeps the contract; `images` is uint8 (N, S, S, 3), N ≥ 1."""

    images: UInt8Array
    id: str | None = None
    binary_output: bool = False


def header_length(value: str | None, body_length: int) -> int | None:
    """Return the length of the JSON header; None means that the whole body is JSON."""
    if value is None:
        return None
    length = int(value) if value.isascii() and value.isdigit() and len(value) < 20 else -1
    if not 0 <= length <= body_length:
        raise RequestError(
            f"Inference-Header-Content-Length is '{value[:40]}': expected 0 to {body_length}, the body's length"
        )
    return length


def decode_infer_request(body: bytes, length: int | None, contract: Contract, max_images: int) -> InferRequest:
    """Read the body of an infer request; `length` is that of its JSON header, as `header_length` returns it.

    Raises RequestError: 400 for what breaks the protocol or the contract, 413 for more than `max_images` rows.
    """
    if length == 0:  # Triton's raw binary request: nothing but the tensor
        row = math.prod(contract.image_shape)
        shape = (max(1, len(body) // row), *contract.image_shape)
        return InferRequest(_from_bytes(memoryview(body), shape, contract, max_images), binary_output=True)
    header = _parse_header(body if length is None else body[:length])
    tensor = _only_input(header, contract)
    shape = _image_shape(tensor, contract)
    size = _parameters(tensor, "input").get("binary_data_size")
    rest = memoryview(body)[length:] if length is not None else memoryview(b"")
    if size is None:
        if rest:
            raise RequestError(f"{len(rest)} bytes follow the JSON header, but no input has 'binary_data_size'")
        images = _from_json(tensor, shape, contract, max_images)
    else:
        _check_binary(tensor, size, rest)
        images = _from_bytes(rest, shape, contract, max_images)
    return InferRequest(images, _request_id(header), _binary_output(header, contract))


def encode_infer_response(logits: Float32Array, request: InferRequest, contract: Contract) -> tuple[bytes, int | None]:
    """Return the body, and the length of its JSON header when the logits follow as bytes."""
    output: dict[str, Any] = {"name": contract.output_name, "datatype": "FP32", "shape": logits.shape}
    reply: dict[str, Any] = {"model_name": contract.model, "model_version": VERSION, "outputs": [output]}
    if request.id is not None:
        reply["id"] = request.id
    if not request.binary_output:
        output["data"] = logits.ravel().tolist()
        return _to_json(reply), None
    output["parameters"] = {"binary_data_size": logits.nbytes}
    header = _to_json(reply)
    return header + logits.astype("<f4", copy=False).tobytes(), len(header)


def _to_json(value: Any) -> bytes:
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    except ValueError:
        raise RequestError(
            "the logits are not all finite, and JSON has no word for that: ask for binary output",
            status=500,
            reason="not_finite",
        ) from None


def _parse_header(text: bytes) -> Mapping[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
        raise RequestError(f"failed to parse the request's JSON: {str(error)[:200]}") from None
    if not isinstance(header, dict):
        raise RequestError("the request's JSON is not an object")
    return header


def _only_input(header: Mapping[str, Any], contract: Contract) -> Mapping[str, Any]:
    tensors = header.get("inputs")
    if not isinstance(tensors, list) or not all(isinstance(tensor, dict) for tensor in tensors):
        raise RequestError("'inputs' is missing, or not a list of objects")
    if len(tensors) != 1:
        raise RequestError(f"expected 1 input but got {len(tensors)} inputs for model '{contract.model}'")
    tensor: Mapping[str, Any] = tensors[0]
    if tensor.get("name") != contract.input_name:
        raise RequestError(
            f"unexpected inference input {_quoted(tensor.get('name'))} for model '{contract.model}': "
            f"its input is '{contract.input_name}'"
        )
    if tensor.get("datatype") != "UINT8":
        raise RequestError(
            f"inference input '{contract.input_name}' is {_quoted(tensor.get('datatype'))}: expected 'UINT8'"
        )
    return tensor


def _image_shape(tensor: Mapping[str, Any], contract: Contract) -> tuple[int, ...]:
    shape = tensor.get("shape")
    expected = f"[N,{','.join(map(str, contract.image_shape))}] with N ≥ 1"
    if not isinstance(shape, list) or not all(type(side) is int for side in shape):
        raise RequestError(f"the shape of input '{contract.input_name}' is not a list of integers: expected {expected}")
    if len(shape) != 1 + len(contract.image_shape) or tuple(shape[1:]) != contract.image_shape or shape[0] < 1:
        raise RequestError(f"unexpected shape {_quoted(shape)} of input '{contract.input_name}': expected {expected}")
    return tuple(shape)


def _parameters(owner: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    parameters = owner.get("parameters", {})
    if not isinstance(parameters, dict):
        raise RequestError(f"the 'parameters' of the {kind} are not an object")
    refused = sorted(_NOT_OFFERED & parameters.keys())
    if refused:
        raise RequestError(f"this server does not offer the {kind} parameter '{refused[0]}'")
    return parameters


def _check_binary(tensor: Mapping[str, Any], size: object, rest: memoryview) -> None:
    if type(size) is not int or size < 0:
        raise RequestError(f"'binary_data_size' is {_quoted(size)}: expected a number of bytes")
    if "data" in tensor:
        raise RequestError("the input has both 'data' and 'binary_data_size'")
    if size != len(rest):
        raise RequestError(f"'binary_data_size' is {size}, but {len(rest)} bytes follow the JSON header")


def _from_bytes(data: memoryview, shape: tuple[int, ...], contract: Contract, max_images: int) -> UInt8Array:
    _check_count(shape[0], max_images)
    expected = math.prod(shape)
    if len(data) != expected:
        raise RequestError(
            f"input '{contract.input_name}' got unexpected byte size {len(data)}, "
            f"expected {expected} for shape {list(shape)}"
        )
    return np.frombuffer(data, dtype=np.uint8).reshape(shape)


def _from_json(tensor: Mapping[str, Any], shape: tuple[int, ...], contract: Contract, max_images: int) -> UInt8Array:
    _check_count(shape[0], max_images)
    data = tensor.get("data")
    if not isinstance(data, list):
        raise RequestError(f"input '{contract.input_name}' has neither 'data' nor 'binary_data_size'")
    try:
        values = np.array(data, dtype=object)  # as numbers, a list of strings would become one huge text array
        if values.shape != shape and values.shape != (math.prod(shape),):
            raise RequestError(
                f"the data of input '{contract.input_name}' has shape {list(values.shape)}: "
                f"expected {list(shape)} or flat"
            )
        if set(map(type, values.flat)) != {int} or min(values.flat) < 0 or max(values.flat) > 255:
            raise RequestError(f"the data of input '{contract.input_name}' is not all integers from 0 to 255")
    except ValueError:
        raise RequestError(f"the data of input '{contract.input_name}' is ragged") from None
    return values.astype(np.uint8).reshape(shape)


def _check_count(images: int, max_images: int) -> None:
    if images > max_images:
        raise too_large(f"{images} images in one request: at most {max_images}")


def _request_id(header: Mapping[str, Any]) -> str | None:
    request_id = header.get("id")
    if request_id is not None and not isinstance(request_id, str):
        raise RequestError("'id' is not a string")
    return request_id


def _binary_output(header: Mapping[str, Any], contract: Contract) -> bool:
    """Whether the logits are to follow as bytes: an output's `binary_data`, else the request's `binary_data_output`."""
    binary = _flag(_parameters(header, "request"), "binary_data_output", False)
    outputs = header.get("outputs", [])
    if not isinstance(outputs, list) or not all(isinstance(output, dict) for output in outputs):
        raise RequestError("'outputs' is not a list of objects")
    for output in outputs:
        if output.get("name") != contract.output_name:
            raise RequestError(
                f"unexpected inference output {_quoted(output.get('name'))} for model '{contract.model}': "
                f"its output is '{contract.output_name}'"
            )
        binary = _flag(_parameters(output, "output"), "binary_data", binary)
    return binary


def _flag(parameters: Mapping[str, Any], name: str, default: bool) -> bool:
    value = parameters.get(name, default)
    if not isinstance(value, bool):
        raise RequestError(f"'{name}' is {_quoted(value)}: expected true or false")
    return value


def _quoted(value: object) -> str:
    """A client's value, shortened: an error text is no place for a megabyte."""
    if isinstance(value, dict):
        return "an object"
    text = f"'{value[:80]}'" if isinstance(value, str) else str(value[:10] if isinstance(value, list) else value)
    return text if len(text) <= 82 else f"{text[:80]}…"
