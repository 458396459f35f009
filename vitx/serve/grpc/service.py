"""The calls of `inference.GRPCInferenceService` and `grpc.health.v1.Health`, specified in Triton's docs/protocol/."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from inspect import isawaitable
from typing import Any

from google.protobuf.json_format import ParseDict

from vitx.serve.callbacks import read_on_thread
from vitx.serve.errors import NO_CUDA, RequestError, not_offered
from vitx.serve.grpc.messages import message_class
from vitx.serve.grpc.protocol import decode_infer_request, encode_infer_response
from vitx.serve.limits import MANY_TEXTS
from vitx.serve.models.repository import managed
from vitx.serve.models.served_model import ServedModel
from vitx.serve.observe.request_record import CURRENT_RECORD
from vitx.serve.protocol.infer import InferRequest
from vitx.serve.server_core import ServerCore

Call = Callable[[Any, Any], Awaitable[Any]]  # (request, context) → response
Answer = Callable[[Any], Any]  # request → the response as JSON, or what is awaited for it

_MANY_NUMBERS = 1 << 14  # sent one by one: they are read beside the event loop
_SERVING, _NOT_SERVING = 1, 2  # of grpc.health.v1


def grpc_calls(core: ServerCore) -> dict[str, tuple[Any, Call]]:
    """Method name → class of its request message and its function, of all methods except the stream.

    A function takes a message and the call's context, and may raise RequestError. "HealthCheck" is
    `grpc.health.v1.Health/Check`. Answers are JSON, mostly that of HTTP; None: an empty message.
    """
    models, memory, repository = core.models, core.memory, core.repository
    about = core.about()
    about["extensions"].remove("binary_tensor_data")  # it is HTTP's

    def named(request: Any) -> ServedModel:
        return models.get(request.name, request.version or None)

    def health(request: Any) -> dict[str, Any]:
        """Of the server, by no name or by its service's, or of a model."""
        if request.service not in ("", "inference.GRPCInferenceService", *models.names):
            raise RequestError(f"unknown service '{request.service[:80]}'", status=404, reason="unknown_model")
        ready = models.is_ready(request.service) if request.service in models.names else models.ready
        return {"status": _SERVING if ready else _NOT_SERVING}

    async def index(request: Any) -> dict[str, Any]:
        return {"models": await managed(repository).index(ready=request.ready)}

    async def model_infer(request: Any, context: Any) -> Any:
        model, record = models.get(request.model_name, request.model_version or None), CURRENT_RECORD.get()
        assert record is not None
        decode = partial(decode_infer_request, request, model.contract, core.limits, core.memory)
        many = max((len(tensor.contents.uint_contents) for tensor in request.inputs), default=0)
        decoded = await _on_thread(many, decode) if many > _MANY_NUMBERS else decode()
        started, left = record.started, context.time_remaining()
        of_call = None if left is None else time.monotonic() + left - started
        given = [seconds for seconds in (of_call, decoded.timeout) if seconds is not None]
        rows = await model.infer(decoded, model.deadline(started, min(given, default=None)))
        respond = partial(encode_infer_response, rows, decoded, model.contract, model.bundle.manifest.labels)
        return await asyncio.to_thread(respond) if decoded.texts > MANY_TEXTS else respond()

    answers: dict[str, Answer] = {
        "ServerLive": lambda asked: {"live": True},
        "ServerReady": lambda asked: {"ready": models.ready},
        "ServerMetadata": lambda asked: about,
        # False for an unknown model, as in Triton.
        "ModelReady": lambda asked: {"ready": models.is_ready(asked.name, asked.version or None)},
        "ModelMetadata": lambda asked: named(asked).contract.metadata(models.versions(asked.name)),
        "ModelConfig": lambda asked: {"config": named(asked).config()},
        "ModelStatistics": lambda asked: models.statistics(named(asked) if asked.name else None, asked.version),
        "RepositoryIndex": index,
        "RepositoryModelLoad": lambda asked: managed(repository, asked.parameters).load(asked.model_name),
        "RepositoryModelUnload": lambda asked: managed(repository, asked.parameters).unload(asked.model_name),
        "SystemSharedMemoryStatus": lambda of: {"regions": {it["name"]: it for it in memory.status(of.name or None)}},
        "SystemSharedMemoryRegister": lambda of: memory.register(of.name, of.key, of.offset, of.byte_size),
        "SystemSharedMemoryUnregister": lambda asked: memory.unregister(asked.name or None),
        # Clients unregister all CUDA regions when they start; there never are any.
        "CudaSharedMemoryStatus": lambda asked: None,
        "CudaSharedMemoryUnregister": lambda asked: None,
        "CudaSharedMemoryRegister": lambda asked: not_offered(NO_CUDA),
        "TraceSetting": lambda asked: not_offered("trace settings are not offered"),
        "LogSettings": lambda asked: not_offered("log settings are not offered"),
        "HealthCheck": health,
    }
    calls = {name: (_message(f"{name}Request"), _answered(name, answer)) for name, answer in answers.items()}
    return {**calls, "ModelInfer": (message_class("ModelInferRequest"), model_infer)}


def _message(name: str) -> Any:
    """The class of a message; the empty one where `inference.proto` has none of that name."""
    try:
        return message_class(name)
    except KeyError:
        return message_class("Empty")


def _answered(name: str, answer: Answer) -> Call:
    """The call that responds with an answer; of JSON made for HTTP, fields that vitx adds there are dropped."""
    response = _message(f"{name}Response")

    async def call(request: Any, context: Any) -> Any:
        found = answer(request)
        if isawaitable(found):  # a load goes on to its end without its client
            (found,) = await asyncio.shield(asyncio.gather(found, return_exceptions=True))
            if isinstance(found, Exception):
                raise found
        return ParseDict(found or {}, response(), ignore_unknown_fields=True)

    return call


async def _on_thread(numbers: int, decode: Callable[[], InferRequest]) -> InferRequest:
    """What `decode` returns, beside the event loop. A call that is cancelled ends, and its bytes count, until then."""
    decoding = read_on_thread(numbers, decode)
    try:
        return await asyncio.shield(decoding)
    finally:
        await asyncio.gather(decoding, return_exceptions=True)
