"""Open Inference Protocol v2 over HTTP: an image tensor in, logits and what else is asked for out, as JSON or bytes.

The binary form is Triton's extension: the body is a JSON header of `Inference-Header-Content-Length` bytes and then the
tensors' bytes (little endian, row major). Sources: KServe's "Open Inference Protocol", Triton's
docs/protocol/extension_{binary_data,classification,schedule_policy,shared_memory}.md.
"""

import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np

from vitx.core.bundle import Manifest
from vitx.core.files import compact_json
from vitx.core.preprocess import UInt8Array
from vitx.core.probabilities import top_k
from vitx.runtimes.session import Float32Array
from vitx.serve.errors import RequestError
from vitx.serve.limits import MOST_TEXTS, TEXTS, Limits, check_most
from vitx.serve.protocol.json_pixels import CUT_OUT, cut_out_data, pixels_of
from vitx.serve.protocol.parameters import (
    REGION_PARAMETERS,
    Region,
    RequestedOutput,
    count,
    expected_bytes,
    flag,
    known_parameters,
    parse_json_object,
    quoted,
    request_parameters,
)
from vitx.serve.protocol.shared_memory import SharedMemory

FIRST_VERSION = "1"  # of a bundle that is not in a version folder

# A client sends the same JSON header with every request; only the pixels behind it change. So short ones are cached.
_CACHED_HEADERS, _CACHED_HEADER_BYTES = 256, 512
# Headers with these are not cached: shared-memory regions come and go, pixels are cut out, an escape can hide both.
_NOT_CACHED = (b"shared_memory", b'"data"', b"\\")
_NO_IMAGES = np.empty(0, np.uint8)


class Contract(NamedTuple):
    """The input and the outputs of one model. `image_shape` is (S, S, 3), without the batch dimension.

    further: what is served beside the logits, by name, with its numbers an image. A session that gives them returns
    one row for each image, the logits first and then these, in this order.
    """

    model: str
    input_name: str
    image_shape: tuple[int, ...]
    output_name: str
    classes: int
    version: str = FIRST_VERSION
    further: tuple[tuple[str, int], ...] = ()

    @classmethod
    def of(cls, manifest: Manifest, version: str = FIRST_VERSION, outputs: Sequence[str] = ()) -> "Contract":
        shape = tuple(side for side in manifest.input.shape[1:] if side != "N")
        classes = manifest.model.num_classes
        sizes = {str(spec.name): math.prod(int(side) for side in spec.shape[1:]) for spec in manifest.outputs}
        further = tuple((name, sizes[name]) for name in outputs)
        return cls(manifest.name, manifest.input.name, shape, manifest.output.name, classes, version, further)

    def widths(self) -> dict[str, int]:
        """Numbers an image of each output, the logits first."""
        return {self.output_name: self.classes, **dict(self.further)}

    def columns(self, name: str) -> slice:
        """Where an output is in the rows of a session that gives all."""
        widths = self.widths()
        start = sum(widths[before] for before in takewhile(name.__ne__, widths))
        return slice(start, start + widths[name])

    def metadata(self, versions: Sequence[str]) -> dict[str, Any]:
        """The body of `GET /v2/models/NAME`; `versions`: the loaded versions of the model."""
        inputs = [{"name": self.input_name, "datatype": "UINT8", "shape": [-1, *self.image_shape]}]
        outputs = [{"name": name, "datatype": "FP32", "shape": [-1, width]} for name, width in self.widths().items()]
        about = {"name": self.model, "versions": list(versions), "platform": "onnxruntime_onnx"}
        return {**about, "inputs": inputs, "outputs": outputs}

    def config(self, max_batch: int, preferred: Sequence[int]) -> dict[str, Any]:
        """The body of `GET /v2/models/NAME/config`, Triton's extension. preferred: present sizes of a full batch."""
        dims = list(self.image_shape)
        image = {"name": self.input_name, "data_type": "TYPE_UINT8", "format": "FORMAT_NHWC", "dims": dims}
        outputs = [{"name": name, "data_type": "TYPE_FP32", "dims": [width]} for name, width in self.widths().items()]
        about = {"name": self.model, "platform": "onnxruntime_onnx", "backend": "onnxruntime"}
        batching = {"max_batch_size": max_batch, "dynamic_batching": {"preferred_batch_size": list(preferred)}}
        return {**about, **batching, "input": [image], "output": outputs}


class InferRequest(NamedTuple):
    """A valid request; `images` is uint8 (N, S, S, 3), N ≥ 1.

    outputs: how each is wanted, in the order of the reply. further: whether not the logits alone are. priority:
    Triton's, 1 (highest) to 3, 0 for the default. timeout: seconds. texts: numbers and classes of the reply in JSON.
    """

    images: UInt8Array
    outputs: tuple[RequestedOutput, ...]
    id: str | None = None
    further: bool = False
    priority: int = 0
    timeout: float | None = None
    texts: int = 0


def header_length(value: str | None) -> int | None:
    """Parse the header's value: the length of the JSON before the tensors. None: the whole body is JSON."""
    if value is None:
        return None
    if not (value.isascii() and value.isdigit() and len(value) < 20):
        raise RequestError(f"Inference-Header-Content-Length is '{value[:40]}': expected a number of bytes")
    return int(value)


def decode_infer_request(
    body: bytes, length: int | None, contract: Contract, limits: Limits, memory: SharedMemory
) -> InferRequest:
    """Read the body of an infer request; `length`: what `header_length` returned.

    Raises RequestError: 400 for a request that breaks the protocol or the contract, 413 for more than `limits.images`
    images, and what `SharedMemory` raises.
    """
    if length is not None and length > len(body):
        expected = f"0 to {len(body)}, the body's length"
        raise RequestError(f"Inference-Header-Content-Length is '{length}': expected {expected}")
    if length == 0:  # Triton's raw binary request: the body is the tensor, without JSON
        shape = (max(1, len(body) // math.prod(contract.image_shape)), *contract.image_shape)
        check_most(shape[0], limits.images)
        output = RequestedOutput(contract.output_name, binary=True)
        return InferRequest(_from_bytes(memoryview(body), shape, contract), (output,))
    text, rest, data = body[:length], memoryview(body)[length or len(body) :], memoryview(b"")
    small = length is not None and length <= _CACHED_HEADER_BYTES
    parsed = _cached_header(text, contract, limits.images, limits.json_depth) if small else None
    if parsed is None:
        text, data = cut_out_data(text)
        parsed = ParsedHeader.of(parse_json_object(text, limits.json_depth), contract, limits.images, memory)
    return parsed.request(rest, contract, memory, data)


class ParsedHeader(NamedTuple):
    """The checked JSON of a request, without pixels."""

    tensor: Mapping[str, Any]
    shape: tuple[int, ...]
    size: object  # the input's binary_data_size, unchecked
    region: Region | None
    asked: InferRequest  # what is asked for, without images

    @classmethod
    def of(cls, header: Mapping[str, Any], contract: Contract, max_images: int, memory: SharedMemory) -> "ParsedHeader":
        tensor = _only_input(header, contract)
        shape = _image_shape(tensor, contract)
        check_most(shape[0], max_images)
        places = known_parameters(tensor, "input", ("binary_data_size", *REGION_PARAMETERS))
        binary, priority, timeout = request_parameters(header)
        outputs = _requested_outputs(header, contract, binary, shape[0], memory)
        further = any(output.name != contract.output_name for output in outputs)
        size, region, request_id = places.get("binary_data_size"), Region.of(places), header.get("id")
        if not isinstance(request_id, str | None):
            raise RequestError("'id' is not a string")
        widths = contract.widths()
        texts = sum(each.top_k or widths[each.name] * (not (each.binary or each.region)) for each in outputs) * shape[0]
        check_most(texts, MOST_TEXTS, TEXTS)
        asked = InferRequest(_NO_IMAGES, outputs, request_id, further, priority, timeout, texts)
        return cls(tensor, shape, size, region, asked)

    def request(
        self, rest: memoryview, contract: Contract, memory: SharedMemory, data: bytes | memoryview = b""
    ) -> InferRequest:
        """The request whose JSON is followed by the bytes `rest`; `data` was cut out of it.

        Its pixels are in shared memory, in these bytes, or in the JSON.
        """
        if (region := self.region) is not None:
            if self.size is not None or "data" in self.tensor:
                raise RequestError("the input is in shared memory, and has 'data' or 'binary_data_size' as well")
            expected_bytes(contract.input_name, region.byte_size, self.shape)
            pixels = _from_bytes(memory.read(region.name, region.offset, region.byte_size), self.shape, contract)
        elif self.size is not None:
            if type(self.size) is not int or self.size < 0:
                raise RequestError(f"'binary_data_size' is {quoted(self.size)}: expected a number of bytes")
            if "data" in self.tensor:
                raise RequestError("the input has both 'data' and 'binary_data_size'")
            if self.size != len(rest):
                raise RequestError(f"'binary_data_size' is {self.size}, but {len(rest)} bytes follow the JSON header")
            pixels = _from_bytes(rest, self.shape, contract)
        elif rest:
            raise RequestError(f"{len(rest)} bytes follow the JSON header, but no input has 'binary_data_size'")
        elif "data" not in self.tensor:
            raise RequestError(f"input '{contract.input_name}' has neither 'data' nor 'binary_data_size'")
        else:
            cut_out = self.tensor["data"] == CUT_OUT  # else another's was, or it is no array
            pixels = pixels_of(data if cut_out else b"", self.shape, contract.input_name)
        return self.asked._replace(images=pixels)


def _requested_outputs(
    header: Mapping[str, Any], contract: Contract, binary: bool, rows: int, memory: SharedMemory
) -> tuple[RequestedOutput, ...]:
    """How the client wants which outputs: without a list the logits alone. `binary`: the request's default."""
    outputs = header.get("outputs", [])
    if not isinstance(outputs, list) or not all(isinstance(output, dict) for output in outputs):
        raise RequestError("'outputs' is not a list of objects")
    if not outputs:
        return (RequestedOutput(contract.output_name, binary),)
    widths = contract.widths()
    names = [output.get("name") for output in outputs]
    for name in names:
        if not isinstance(name, str) or name not in widths:
            present = f"its output is '{contract.output_name}'"
            if len(widths) > 1:
                present = f"its outputs are {', '.join(repr(known) for known in widths)}"
            raise RequestError(f"unexpected inference output {quoted(name)} for model '{contract.model}': {present}")
        if names.count(name) > 1:
            raise RequestError(f"output '{name}' already exists in request")
    return tuple(_requested_output(output, contract, binary, rows, memory) for output in outputs)


def _requested_output(
    output: Mapping[str, Any], contract: Contract, binary: bool, rows: int, memory: SharedMemory
) -> RequestedOutput:
    name = output["name"]
    parameters = known_parameters(output, "output", ("binary_data", "classification", *REGION_PARAMETERS))
    top_k = min(count(parameters, "classification"), contract.classes)
    if top_k and name != contract.output_name:
        raise RequestError(f"output '{name}' has no classes: 'classification' goes with '{contract.output_name}'")
    region = Region.of(parameters)
    if region is not None:  # refuse before the model runs, not after; the size of class texts is not known yet
        region = replace(region, held=memory.check(region.name, region.offset, region.byte_size))
        region.check(0 if top_k else 4 * rows * contract.widths()[name], name)
    return RequestedOutput(name, flag(parameters, "binary_data", binary), top_k, region)


_NO_MEMORY = SharedMemory(enabled=False)


@lru_cache(_CACHED_HEADERS)
def _cached_header(text: bytes, contract: Contract, max_images: int, max_depth: int) -> ParsedHeader | None:
    """Parse a JSON header; None for one that may name shared memory."""
    if any(word in text for word in _NOT_CACHED):
        return None
    return ParsedHeader.of(parse_json_object(text, max_depth), contract, max_images, _NO_MEMORY)


def output_tensors(
    rows: Float32Array, request: InferRequest, contract: Contract, labels: Sequence[str]
) -> Iterator[tuple[RequestedOutput, str, tuple[int, ...], Float32Array | list[str]]]:
    """Each output that was asked for, its datatype, shape and values, from `rows` (see `Contract`)."""
    for wanted in request.outputs:
        values = rows[:, contract.columns(wanted.name)]
        if wanted.top_k:  # of each row after the other, the best first
            if not np.isfinite(values).all():
                raise _not_finite("its classes have no order")
            best = zip(values, top_k(values, wanted.top_k), strict=True)
            texts = [f"{row[index]:f}:{index}:{labels[index]}" for row, classes in best for index in classes]
            yield wanted, "BYTES", (len(rows), wanted.top_k), texts
        else:
            yield wanted, "FP32", values.shape, values


def tensor_bytes(values: Float32Array | list[str]) -> bytes:
    """An output in the binary form: little endian, row major, before each text its length."""
    if isinstance(values, list):
        return b"".join(struct.pack("<I", len(text)) + text for text in map(str.encode, values))
    return values.astype("<f4", copy=False).tobytes()


def encode_infer_response(
    rows: Float32Array, request: InferRequest, contract: Contract, labels: Sequence[str]
) -> tuple[bytes, int | None]:
    """Return the body and the length of its JSON header; None when the whole body is JSON. `rows`: see `Contract`."""
    output = request.outputs[0]
    if output.binary and request.id is None and not (output.top_k or output.region or request.further):
        header = _binary_header(contract, len(rows))
        return header + rows.astype("<f4", copy=False).tobytes(), len(header)
    reply: dict[str, Any] = {"model_name": contract.model, "model_version": contract.version, "outputs": []}
    if request.id is not None:
        reply["id"] = request.id
    behind: list[bytes] = []
    for wanted, datatype, shape, values in output_tensors(rows, request, contract, labels):
        tensor: dict[str, Any] = {"name": wanted.name, "datatype": datatype, "shape": shape}
        reply["outputs"].append(tensor)
        if wanted.region is not None:
            # Triton's C++ client refuses an output with parameters that do not say how much of it is behind the JSON.
            tensor["parameters"] = {**wanted.region.write(tensor_bytes(values), wanted.name), "binary_data_size": 0}
        elif wanted.binary:
            behind.append(tensor_bytes(values))
            tensor["parameters"] = {"binary_data_size": len(behind[-1])}
        else:
            tensor["data"] = values if isinstance(values, list) else values.ravel().tolist()
    header = to_json(reply)
    return header + b"".join(behind), len(header) if behind else None


@lru_cache(_CACHED_HEADERS)
def _binary_header(contract: Contract, rows: int) -> bytes:
    """The JSON before `rows` rows of logits, for a request without an id."""
    size = {"binary_data_size": 4 * rows * contract.classes}
    output = {"name": contract.output_name, "datatype": "FP32", "shape": (rows, contract.classes), "parameters": size}
    return to_json({"model_name": contract.model, "model_version": contract.version, "outputs": [output]})


def to_json(value: Any) -> bytes:
    try:
        return compact_json(value)
    except ValueError:
        raise _not_finite("JSON has no word for that") from None


def _not_finite(why: str) -> RequestError:
    text = f"an output is not all finite, and {why}: ask for binary output of the numbers"
    return RequestError(text, status=500, reason="not_finite")


def _only_input(header: Mapping[str, Any], contract: Contract) -> Mapping[str, Any]:
    tensors = header.get("inputs")
    if not isinstance(tensors, list) or not all(isinstance(tensor, dict) for tensor in tensors):
        raise RequestError("'inputs' is missing, or not a list of objects")
    if len(tensors) != 1:
        raise RequestError(f"expected 1 input but got {len(tensors)} inputs for model '{contract.model}'")
    tensor: Mapping[str, Any] = tensors[0]
    if tensor.get("name") != contract.input_name:
        text = f"unexpected inference input {quoted(tensor.get('name'))} for model '{contract.model}'"
        raise RequestError(f"{text}: its input is '{contract.input_name}'")
    if tensor.get("datatype") != "UINT8":
        given = quoted(tensor.get("datatype"))
        raise RequestError(f"inference input '{contract.input_name}' is {given}: expected 'UINT8'")
    return tensor


def _image_shape(tensor: Mapping[str, Any], contract: Contract) -> tuple[int, ...]:
    shape = tensor.get("shape")
    expected = f"[N,{','.join(map(str, contract.image_shape))}] with N ≥ 1"
    if not isinstance(shape, list) or not all(type(side) is int for side in shape):
        raise RequestError(f"the shape of input '{contract.input_name}' is not a list of integers: expected {expected}")
    if len(shape) != 1 + len(contract.image_shape) or tuple(shape[1:]) != contract.image_shape or shape[0] < 1:
        raise RequestError(f"unexpected shape {quoted(shape)} of input '{contract.input_name}': expected {expected}")
    return tuple(shape)


def _from_bytes(data: bytes | memoryview, shape: tuple[int, ...], contract: Contract) -> UInt8Array:
    expected_bytes(contract.input_name, len(data), shape)
    return np.ndarray(shape, np.uint8, data)
