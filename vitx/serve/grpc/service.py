"""The calls of `inference.GRPCInferenceService` and `grpc.health.v1.Health`, specified in Triton's docs/protocol/."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from google.protobuf.json_format import ParseDict

from vitx import __version__
from vitx.serve.errors import RequestError
from vitx.serve.grpc.messages import message_class
from vitx.serve.grpc.protocol import decode_infer_request, encode_infer_response
from vitx.serve.limits import Limits
from vitx.serve.models.repository import NOT_OFFERED, Repository, repository_parameters
from vitx.serve.models.served_model import ModelSet, ServedModel
from vitx.serve.protocol.infer import EXTENSIONS, InferRequest
from vitx.serve.protocol.shared_memory import SharedMemory

Call = Callable[[Any, Any], Awaitable[Any]]  # (request, context) → response

_MANY_NUMBERS = 1 << 14  # sent one by one: they are read beside the event loop
_SERVING, _NOT_SERVING = 1, 2  # of grpc.health.v1
_CUDA = "CUDA shared memory is not offered: use system shared memory"
_Empty = message_class("Empty")


class GrpcService:
    """The calls on a set of models. Each takes a message and the call's context, and may raise RequestError."""

    def __init__(
        self, models: ModelSet, limits: Limits, memory: SharedMemory, repository: Repository | None = None
    ) -> None:
        self._models = models
        self._limits = limits
        self._memory = memory
        self._models_on_disk = repository

    def calls(self) -> dict[str, tuple[str, Call]]:
        """Method name → name of its request message and its function, of all methods except the stream."""
        return {
            "ServerLive": ("Empty", self._server_live),
            "ServerReady": ("Empty", self._server_ready),
            "ServerMetadata": ("Empty", self._server_metadata),
            "ModelReady": ("ModelReadyRequest", self._model_ready),
            "ModelMetadata": ("ModelMetadataRequest", self._model_metadata),
            "ModelConfig": ("ModelConfigRequest", self._model_config),
            "ModelStatistics": ("ModelStatisticsRequest", self._model_statistics),
            "ModelInfer": ("ModelInferRequest", self.model_infer),
            "RepositoryIndex": ("RepositoryIndexRequest", self._repository_index),
            "RepositoryModelLoad": ("RepositoryModelLoadRequest", self._repository_load),
            "RepositoryModelUnload": ("RepositoryModelUnloadRequest", self._repository_unload),
            "SystemSharedMemoryStatus": ("SystemSharedMemoryStatusRequest", self._memory_status),
            "SystemSharedMemoryRegister": ("SystemSharedMemoryRegisterRequest", self._memory_register),
            "SystemSharedMemoryUnregister": ("SystemSharedMemoryUnregisterRequest", self._memory_unregister),
            # Clients unregister all CUDA regions when they start; there never are any.
            "CudaSharedMemoryStatus": ("Empty", _nothing),
            "CudaSharedMemoryUnregister": ("Empty", _nothing),
            "CudaSharedMemoryRegister": ("Empty", _not_offered(_CUDA)),
            "TraceSetting": ("Empty", _not_offered("trace settings are not offered")),
            "LogSettings": ("Empty", _not_offered("log settings are not offered")),
        }

    async def model_infer(self, request: Any, context: Any) -> Any:
        model = self._named(request.model_name, request.model_version)
        asked = (request, model.contract, self._limits, self._memory)
        large = any(len(tensor.contents.uint_contents) > _MANY_NUMBERS for tensor in request.inputs)
        decoded = await _in_thread(*asked) if large else decode_infer_request(*asked)
        deadline = _deadline(context.time_remaining(), decoded.timeout)
        batcher = model.batcher_of(decoded.outputs)
        rows = await batcher.submit(decoded.images, priority=decoded.priority, deadline=deadline)
        labels = model.bundle.manifest.labels
        return encode_infer_response(rows, decoded, model.contract, labels, self._memory)

    async def health(self, request: Any, context: Any) -> Any:
        """`grpc.health.v1.Health/Check` of the server ("") or of a model."""
        if request.service and request.service not in self._models.names:
            raise RequestError(f"unknown service '{request.service[:80]}'", status=404, reason="unknown_model")
        ready = self._models.is_ready(request.service) if request.service else self._models.ready
        return message_class("HealthCheckResponse")(status=_SERVING if ready else _NOT_SERVING)

    async def _server_live(self, request: Any, context: Any) -> Any:
        return message_class("ServerLiveResponse")(live=True)

    async def _server_ready(self, request: Any, context: Any) -> Any:
        return message_class("ServerReadyResponse")(ready=self._models.ready)

    async def _server_metadata(self, request: Any, context: Any) -> Any:
        extensions = [name for name in EXTENSIONS if name != "binary_tensor_data"]  # that extension is HTTP's
        if self._memory.enabled:
            extensions.append("system_shared_memory")
        if self._models_on_disk is not None:
            extensions.append("model_repository")
        response = message_class("ServerMetadataResponse")
        return response(name=self._models.server_id, version=__version__, extensions=extensions)

    async def _model_ready(self, request: Any, context: Any) -> Any:
        """False for an unknown model, as in Triton."""
        ready = self._models.is_ready(request.name, request.version or None)
        return message_class("ModelReadyResponse")(ready=ready)

    async def _model_metadata(self, request: Any, context: Any) -> Any:
        contract = self._named(request.name, request.version).contract
        return _from_json("ModelMetadataResponse", contract.metadata(self._models.versions(request.name)))

    async def _model_config(self, request: Any, context: Any) -> Any:
        config = self._named(request.name, request.version).config()
        return _from_json("ModelConfigResponse", {"config": config})

    async def _model_statistics(self, request: Any, context: Any) -> Any:
        """Statistics of one model, or of all if the request has no name."""
        models = [self._named(request.name, request.version)] if request.name else list(self._models)
        return _from_json("ModelStatisticsResponse", {"model_stats": [model.statistics() for model in models]})

    async def _repository_index(self, request: Any, context: Any) -> Any:
        return _from_json("RepositoryIndexResponse", {"models": self._repository().index(ready=request.ready)})

    async def _repository_load(self, request: Any, context: Any) -> Any:
        repository_parameters(request.parameters)
        await self._repository().load(request.model_name)
        return _Empty()

    async def _repository_unload(self, request: Any, context: Any) -> Any:
        repository_parameters(request.parameters)
        await self._repository().unload(request.model_name)
        return _Empty()

    def _repository(self) -> Repository:
        if self._models_on_disk is None:
            raise RequestError(NOT_OFFERED, status=501, reason="not_offered")
        return self._models_on_disk

    async def _memory_status(self, request: Any, context: Any) -> Any:
        regions = self._memory.status(request.name or None)
        response = message_class("SystemSharedMemoryStatusResponse")()
        for region in regions:
            response.regions[region["name"]].MergeFrom(type(response).RegionStatus(**region))
        return response

    async def _memory_register(self, request: Any, context: Any) -> Any:
        self._memory.register(request.name, request.key, request.offset, request.byte_size)
        return _Empty()

    async def _memory_unregister(self, request: Any, context: Any) -> Any:
        self._memory.unregister(request.name or None)
        return _Empty()

    def _named(self, name: str, version: str) -> ServedModel:
        return self._models.get(name, version or None)


async def _in_thread(*asked: Any) -> InferRequest:
    """`decode_infer_request` beside the event loop. A call that is cancelled ends, and its bytes count, until then."""
    decoding = asyncio.ensure_future(asyncio.to_thread(decode_infer_request, *asked))
    try:
        return await asyncio.shield(decoding)
    except asyncio.CancelledError:
        await asyncio.gather(decoding, return_exceptions=True)
        raise


def _deadline(remaining: float | None, timeout: float | None) -> float | None:
    """The earlier of the call's deadline and the request's timeout, in time.monotonic() seconds; None without both."""
    given = [seconds for seconds in (remaining, timeout) if seconds is not None]
    return time.monotonic() + min(given) if given else None


def _from_json(name: str, value: dict[str, Any]) -> Any:
    """Convert the body of an HTTP reply to a message; fields that vitx adds over HTTP are dropped."""
    return ParseDict(value, message_class(name)(), ignore_unknown_fields=True)


async def _nothing(request: Any, context: Any) -> Any:
    return _Empty()


def _not_offered(what: str) -> Call:
    async def refuse(request: Any, context: Any) -> Any:
        raise RequestError(what, status=501, reason="not_offered")

    return refuse
