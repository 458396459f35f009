"""Malformed gRPC calls, each made from a seed and its number, and the statuses that a server ends them with.

Most are bytes for a method, sent by a real client. Those of kind "frames" are HTTP/2 that no client would send, written
by hand on a connection of their own.
"""

import random
import re
import socket
import struct
from collections.abc import Callable
from types import TracebackType
from typing import Any

import grpc

from vitx.serve.grpc.messages import message_class

PATIENCE_SECONDS = 10.0
_FOR_THE_REST_SECONDS = 0.1
SERVICE = "/inference.GRPCInferenceService/"
_SIDE = 16
_OF_THE_LIBRARY = frozenset(("INTERNAL", "UNAVAILABLE"))  # of frames that break HTTP/2
METHODS = (
    *("ServerLive", "ServerReady", "ServerMetadata", "ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics"),
    *("ModelInfer", "RepositoryIndex", "RepositoryModelLoad", "RepositoryModelUnload", "SystemSharedMemoryStatus"),
    *("SystemSharedMemoryRegister", "SystemSharedMemoryUnregister", "CudaSharedMemoryStatus", "TraceSetting"),
)
# How a malformed call may end. UNAUTHENTICATED: management without its token.
REFUSALS = frozenset(
    (
        *("INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED", "RESOURCE_EXHAUSTED"),
        *("PERMISSION_DENIED", "ALREADY_EXISTS", "UNAUTHENTICATED"),
    )
)
# What may be a good message all the same: bytes of unknown fields, a message cut between two fields, a flipped pixel.
MAY_PASS = ("noise", "cut", "flipped", "stream")

Maker = Callable[[random.Random, str], tuple[str, bytes]]  # → method, message


def good_request(model: str, **tensor: Any) -> Any:
    """A ModelInferRequest of one image; `tensor` changes its input."""
    request = message_class("ModelInferRequest")(model_name=model, id="1")
    given = {"name": "images", "datatype": "UINT8", "shape": [1, _SIDE, _SIDE, 3], **tensor}
    request.inputs.add(**given)
    request.raw_input_contents.append(bytes(3 * _SIDE * _SIDE))
    return request


def noise(chance: random.Random, model: str) -> tuple[str, bytes]:
    return SERVICE + chance.choice(METHODS), chance.randbytes(chance.randrange(400))


def cut(chance: random.Random, model: str) -> tuple[str, bytes]:
    whole = good_request(model).SerializeToString()
    return SERVICE + "ModelInfer", whole[: chance.randrange(len(whole) - 1)]


def flipped(chance: random.Random, model: str) -> tuple[str, bytes]:
    data = bytearray(good_request(model).SerializeToString())
    for _ in range(chance.randrange(1, 6)):
        data[chance.randrange(80)] = chance.randrange(256)  # most of what is behind are pixels
    return SERVICE + "ModelInfer", bytes(data)


def lengths(chance: random.Random, model: str) -> tuple[str, bytes]:
    """Fields whose length is beyond the end of the message, and nested groups."""
    huge = chance.choice((2**14, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1))
    tag = bytes([8 * chance.choice((1, 4, 5, 6, 7)) + 2])
    nested = chance.choice((b"\x0b", b"\x2a\x80\x01", b"\x22\x40")) * chance.choice((10, 3000))
    data = chance.choice((tag + varint(huge), tag + varint(huge) + b"x" * 20, tag + b"\xff" * 12, nested))
    return SERVICE + "ModelInfer", data


def tensors(chance: random.Random, model: str) -> tuple[str, bytes]:
    """Well-formed requests with wrong shapes, types, names, sizes or parameters."""
    shapes: list[list[int]] = [
        [],
        [0, 16, 16, 3],
        [-1, 16, 16, 3],
        [2**62, 16, 16, 3],
        [1, 16, 16],
        [9, 16, 16, 3],
        [1] * 3000,
    ]
    request = good_request(model)
    tensor = request.inputs[0]
    match chance.randrange(9):
        case 0:
            tensor.shape[:] = chance.choice(shapes)
        case 1:
            tensor.datatype = chance.choice(("", "FP32", "BYTES", "uint8", "UINT8\0"))
        case 2:
            tensor.name = chance.choice(("", "image", "a" * 5000, "\u202e"))
        case 3:
            request.model_name = chance.choice(("", "../../etc/passwd", "a" * 5000, "\0", model + "/1"))
        case 4:
            request.model_version = chance.choice(("2", "0", "-1", "latest", "9" * 400, "\0", "1.0"))
        case 5:
            request.raw_input_contents[:] = chance.choice(([b""], [bytes(767)], [bytes(769)], [bytes(768)] * 2))
        case 6:
            tensor.contents.uint_contents.extend([7] * chance.choice((1, 768)))  # and the raw bytes
        case 7:
            del request.raw_input_contents[:]
            tensor.contents.uint_contents.extend([chance.choice((256, 2**32 - 1))] * 768)
        case _:
            _odd_parameter(chance, chance.choice((request, tensor, request.outputs.add(name="logits"))))
    return SERVICE + "ModelInfer", request.SerializeToString()


def methods(chance: random.Random, model: str) -> tuple[str, bytes]:
    odd = ("", "/", "//", "/x", SERVICE, SERVICE + "Nothing", SERVICE + "ModelInfer/", SERVICE + "modelinfer")
    near = ("/inference.Other/ModelInfer", "/grpc.health.v1.Health/Watch", "/" + "a" * 3000, "/%2e%2e/ModelInfer")
    return chance.choice((*odd, *near)), good_request(model).SerializeToString()


def others(chance: random.Random, model: str) -> tuple[str, bytes]:
    """The other methods, with names of models and regions that do not exist or must not be reached."""
    name = chance.choice(("nothing", "../" + model, "a" * 3000, "\0", "/etc/passwd"))
    key = chance.choice(("/../../etc/passwd", "..", "", "/", "nobody\0", "a" * 300))
    method, request = chance.choice(
        (
            ("ModelMetadata", message_class("ModelMetadataRequest")(name=name)),
            ("ModelConfig", message_class("ModelConfigRequest")(name=name)),
            ("ModelStatistics", message_class("ModelStatisticsRequest")(name=name)),
            ("RepositoryModelLoad", message_class("RepositoryModelLoadRequest")(model_name=name)),
            ("RepositoryModelUnload", message_class("RepositoryModelUnloadRequest")(model_name=model)),
            ("SystemSharedMemoryStatus", message_class("SystemSharedMemoryStatusRequest")(name=name)),
            ("SystemSharedMemoryRegister", message_class("SystemSharedMemoryRegisterRequest")(name=name, key=key)),
        )
    )
    return SERVICE + method, request.SerializeToString()


def stream(chance: random.Random, model: str) -> tuple[str, bytes]:
    _, data = chance.choice((noise, cut, flipped, lengths, tensors))(chance, model)
    return SERVICE + "ModelStreamInfer", data


def frames(chance: random.Random, model: str) -> tuple[str, bytes]:
    """A connection's bytes: HTTP/2 whose gRPC messages, headers or frames are broken."""
    good = good_request(model).SerializeToString()
    head = _frame(1, 4, 1, _headers(SERVICE + "ModelInfer"))
    declared = chance.choice((2**20 + 1, 2**31 - 1, 2**31, 2**32 - 1, len(good) + 1, len(good) - 1))
    length = struct.pack(">I", declared)
    body = chance.choice(
        (
            _frame(0, 1, 1, b"\0" + length + good),  # another length than that of the message
            _frame(0, 0, 1, b"\0" + length + good),  # the same, and nothing more ever comes
            _frame(0, 1, 1, b"\1" + struct.pack(">I", len(good)) + good),  # said to be compressed
            _frame(0, 1, 1, bytes([chance.randrange(2, 256)]) + struct.pack(">I", len(good)) + good),
            _frame(0, 1, 1, b"\0" + struct.pack(">I", len(good))[: chance.randrange(4)]),
            _frame(0, 1, 1, b""),
            _frame(0, 1, 3, b"\0\0\0\0\0"),  # a stream that was not opened
            _frame(chance.randrange(256), chance.randrange(256), chance.randrange(4), chance.randbytes(40)),
            struct.pack(">I", 2**24 - 1)[1:] + b"\0\1\0\0\0\1" + good,  # a frame beyond SETTINGS_MAX_FRAME_SIZE
        )
    )
    start = chance.choice((_PREFACE, _PREFACE, _PREFACE, _PREFACE[: chance.randrange(len(_PREFACE))], b""))
    if chance.randrange(4) == 0:
        head = _frame(1, 4, 1, chance.randbytes(30))  # headers that are none
    return "frames", start + _frame(4, 0, 0, b"") + head + body


MAKERS: dict[str, Maker] = {
    maker.__name__: maker for maker in (noise, cut, flipped, lengths, tensors, methods, others, stream, frames)
}


def make_call(seed: int, number: int, model: str) -> tuple[str, str, bytes]:
    """The kind, the method and the message of one call."""
    chance = random.Random(f"{seed}/{number}")
    kind = chance.choice(tuple(MAKERS))
    return kind, *MAKERS[kind](chance, model)


def is_refused(kind: str, answer: str) -> bool:
    """Whether a call of this kind may end so. Of broken frames gRPC's own library decides the status."""
    if kind == "frames":
        return answer == "closed" or answer in REFUSALS | _OF_THE_LIBRARY
    return answer in REFUSALS or (answer == "OK" and kind in MAY_PASS)


class Client:
    """Sends the calls over a few channels."""

    def __init__(self, address: str, seed: int, model: str) -> None:
        self._address, self._seed, self._model = address, seed, model
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
        self._channels = [grpc.insecure_channel(address, options=options) for _ in range(4)]

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for channel in self._channels:
            channel.close()

    def ask(self, number: int) -> tuple[str, str]:
        """The kind of the call and the name of its status; "closed" for a connection that ended without one."""
        kind, method, data = make_call(self._seed, number, self._model)
        channel = self._channels[number % len(self._channels)]
        if kind == "frames":
            return kind, self._ask_by_hand(data)
        try:
            if kind == "stream":
                replies = list(channel.stream_stream(method)(iter([data, data]), timeout=PATIENCE_SECONDS))
                return kind, _stream_outcome(replies)
            channel.unary_unary(method)(data, timeout=PATIENCE_SECONDS)
        except grpc.RpcError as error:
            return kind, str(error.code().name)
        return kind, "OK"

    def _ask_by_hand(self, data: bytes) -> str:
        """A server may wait for the rest of a message; when nothing more can come it must end the connection."""
        host, _, port = self._address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=_FOR_THE_REST_SECONDS) as connection:
            try:
                connection.sendall(data)
                try:
                    return _status_in(connection)
                except TimeoutError:
                    connection.settimeout(PATIENCE_SECONDS)
                    connection.shutdown(socket.SHUT_WR)
                    return _status_in(connection)
            except TimeoutError:
                return "hang"
            except OSError:
                return "closed"


def _stream_outcome(replies: list[bytes]) -> str:
    """Each of the two requests has one answer; "internal error" is what the server says of its own mistakes."""
    answers = [message_class("ModelStreamInferResponse").FromString(reply) for reply in replies]
    if len(answers) != 2 or any("internal error" in answer.error_message for answer in answers):
        return f"{len(answers)} answers: {[answer.error_message for answer in answers]}"
    return "INVALID_ARGUMENT" if answers[0].error_message else "OK"


def _status_in(connection: socket.socket) -> str:
    """The grpc-status in what comes; its header is written out the first time, as HPACK literals are."""
    data = b""
    while more := connection.recv(2**16):
        data += more
        if found := re.search(rb"grpc-status[\x01\x02](\d+)", data):
            number = int(found[1])
            return next(str(code.name) for code in grpc.StatusCode if code.value[0] == number)
    return "closed"


_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def _frame(kind: int, flags: int, number: int, payload: bytes) -> bytes:
    """RFC 9113, 4.1: length, type, flags, stream."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", number) + payload


def _headers(path: str) -> bytes:
    """RFC 7541, 6.2.2: literal fields that are not put into the table."""
    fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "vitx")]
    fields += [("content-type", "application/grpc"), ("te", "trailers")]
    return b"".join(b"\0" + bytes([len(name)]) + name.encode() + bytes([len(of)]) + of.encode() for name, of in fields)


def varint(value: int) -> bytes:
    data = bytearray()
    while value > 127:
        data.append(value & 127 | 128)
        value >>= 7
    return bytes([*data, value])


def _odd_parameter(chance: random.Random, message: Any) -> None:
    parameters = ("timeout", "priority", "classification", "sequence_id", "shared_memory_region", "binary_data", "x")
    parameter = message.parameters[chance.choice(parameters)]
    match chance.randrange(4):
        case 0:
            parameter.int64_param = chance.choice((-1, -(2**63)))
        case 1:
            parameter.string_param = chance.choice(("", "x", "a" * 5000))
        case 2:
            parameter.double_param = chance.choice((float("nan"), 1e308, -1.0))
        case _:
            pass  # a parameter without a value
