"""The ASGI application. `infer` and `classify`, which run a model, are dispatched here; Starlette has all other routes.

A request that runs a model goes through `App._run`, or through `App._run_cached` if its head is in the head cache.
Only these two count it, time it, and turn an exception into a reply.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from starlette.types import Message, Receive, Scope, Send

from vitx.runtimes.session import Float32Array
from vitx.serve.batching.batcher import record_times
from vitx.serve.errors import RequestError
from vitx.serve.http.asgi import (
    CONNECTION,
    ClientGone,
    Hold,
    OnReply,
    Reply,
    StartRequest,
    answered,
    beside,
    client_of,
    compressed,
    error_reply,
    header,
    read_body,
    send_reply,
    start_task,
)
from vitx.serve.http.classify import Classifier
from vitx.serve.http.decode import Decoder
from vitx.serve.http.encoding import WORTH_ENCODING
from vitx.serve.http.head_cache import HeadCacheProtocol, cache_head
from vitx.serve.http.routes import other_routes
from vitx.serve.limits import Limits
from vitx.serve.models.repository import Repository
from vitx.serve.models.served_model import ModelSet, ServedModel
from vitx.serve.observe.access_log import CLIENT_GONE, request_id
from vitx.serve.observe.metrics import Metrics
from vitx.serve.observe.request_record import CURRENT_RECORD, RequestObserver, RequestRecord
from vitx.serve.protocol.infer import (
    HEADER_LENGTH,
    InferRequest,
    decode_infer_request,
    encode_infer_response,
    header_length,
)
from vitx.serve.protocol.json_pixels import SMALL_BYTES
from vitx.serve.protocol.shared_memory import SharedMemory

ACCEPT_ENCODING = b"accept-encoding"
_OF_HEAD = (ACCEPT_ENCODING, b"x-request-id", b"traceparent", b"tracestate")
# What starts requests of this scope, and whether the head cache may call it for later ones; refuses others unread.
Prepare = Callable[[Scope], tuple[StartRequest, bool]]
Decoded = tuple[ServedModel, InferRequest, float | None]  # with the deadline

_log = logging.getLogger("vitx.serve")


class App:
    """The server's routes."""

    def __init__(
        self,
        models: ModelSet,
        decoder: Decoder,
        limits: Limits,
        metrics: Metrics,
        memory: SharedMemory,
        repository: Repository | None = None,
        observers: Sequence[RequestObserver] = (),
    ) -> None:
        """`repository`: lets clients load and unload models over HTTP; None refuses that with 501.

        observers: of requests whose head is known; ObserverMiddleware tells them of all others.
        """
        self.idle = models.idle  # until no request is in flight
        self._observers = observers
        self._models = models
        self._limits = limits
        self._metrics = metrics
        self._memory = memory
        self._classify = Classifier(models, decoder, limits, metrics).prepare
        self._other = other_routes(models, limits, metrics, memory, repository)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self._find(scope["path"]) if scope["type"] == "http" else None
        if found is None:
            await self._other(scope, receive, self._counted(scope, send))
        elif scope["method"] == "POST":
            await self._run(*found, scope, receive, send)
        else:
            error = RequestError(f"method {scope['method']} is not allowed: use POST", status=405)
            self._metrics.answer(found[0], error.status)
            await send_reply(send, replace(error_reply(error), headers=((b"allow", b"POST"),)))

    @property
    def active(self) -> int:
        """How many requests are in flight."""
        return self._models.active

    def _find(self, path: str) -> tuple[str, Prepare] | None:
        """The route name of a path that runs a model, and what starts its requests; else None."""
        if path == "/v1/classify":
            return "classify", self._classify
        parts = path.split("/")
        if parts[:3] != ["", "v2", "models"] or parts[-1] != "infer":
            return None
        if len(parts) == 5 or (len(parts) == 7 and parts[4] == "versions"):
            return "infer", partial(self._infer, parts[3], parts[5] if len(parts) == 7 else None)
        return None

    def _infer(self, name: str, version: str | None, scope: Scope) -> tuple[StartRequest, bool]:
        self._models.get(name, version)  # refuse an unknown model before its body is read
        length = header_length(header(scope, HEADER_LENGTH.encode()))
        return partial(self._start_infer, name, version, length), True

    def _decode(self, name: str, version: str | None, length: int | None, body: bytes, started: float) -> Decoded:
        model = self._models.get(name, version)
        request = decode_infer_request(body, length, model.contract, self._limits, self._memory)
        return model, request, None if request.timeout is None else started + request.timeout

    def _rows_reply(self, rows: Float32Array, request: InferRequest, model: ServedModel) -> Reply:
        labels = model.bundle.manifest.labels
        reply, json_length = encode_infer_response(rows, request, model.contract, labels, self._memory)
        if json_length is None:
            return Reply(reply)
        headers = ((HEADER_LENGTH.encode(), str(json_length).encode()),)
        return Reply(reply, content_type=b"application/octet-stream", headers=headers)

    def _start_infer(
        self,
        name: str,
        version: str | None,
        length: int | None,
        body: bytes,
        record: RequestRecord,
        started: float,
        on_reply: OnReply,
        hold: Hold,
    ) -> Callable[[], object]:
        """Answer an infer request; see `StartRequest`. `length`: bytes of JSON before the tensor; None: all."""
        record.model = name  # it was served, when the head was read
        decode = partial(self._decode, name, version, length, body, started)
        if len(body) > SMALL_BYTES and (length is None or length > SMALL_BYTES):  # the event loop goes on beside it
            return start_task(self._read_beside(decode, record, hold), on_reply).cancel
        model, request, deadline = decode()
        keep = None
        if model.cache is not None:
            known, keep = model.cache.find(request.images.data, request.further)
            if known is not None:
                record.images = len(known)
                reply = self._rows_reply(known, request, model)
                return asyncio.get_running_loop().call_soon(on_reply, reply).cancel

        def on_logits(rows: Float32Array | Exception) -> None:
            reply: Reply | Exception
            try:
                if isinstance(rows, Exception):
                    reply = rows
                else:
                    record_times(record, submission.parts)
                    if keep is not None:
                        keep(rows)
                    reply = self._rows_reply(rows, request, model)
            except Exception as failure:  # noqa: BLE001 - the edge of one request: others must not be affected
                reply = failure
            on_reply(reply)

        batcher = model.batcher_of(request.further)
        submission = batcher.enqueue(request.images, on_logits, priority=request.priority, deadline=deadline)
        return submission.cancel

    async def _read_beside(self, decode: Callable[[], Decoded], record: RequestRecord, hold: Hold) -> Reply:
        """The reply to a request that is read on a thread."""
        CURRENT_RECORD.set(record)  # of this task alone
        model, request, deadline = await beside(hold, decode)
        return self._rows_reply(await model.infer(request, deadline), request, model)

    def _run_cached(
        self, head: "_Head", start: StartRequest, connection: HeadCacheProtocol, body: bytes
    ) -> Callable[[], None] | None:
        """`_run` with callbacks instead of a task; return a function that cancels the request."""
        started, accepted = time.monotonic(), head.accepted
        client = connection.client[0] if connection.client else ""
        id = request_id(head.id) if self._observers else ""  # it takes a microsecond
        record = RequestRecord(id, head.traceparent, head.tracestate, client)
        generation = self._models.enter()

        def on_reply(reply: Reply | Exception) -> None:
            if isinstance(reply, Exception) or accepted is None or len(reply.body) < WORTH_ENCODING:
                finish(reply)
                return
            connection.on_lost = None  # too late to cancel
            start_task(compressed(reply, accepted), finish)

        def finish(reply: Reply | Exception) -> None:
            if isinstance(reply, Exception):
                reply = self._error_reply(reply, head.path, record)
            self._metrics.answer(head.route, reply.status, time.monotonic() - started, record.model or "")
            connection.reply(reply, close=self._models.draining or self._models.leaving, request_id=record.id)
            record.sent = len(reply.body)
            end(reply.status)

        def cancel() -> None:
            cancel_work()
            self._metrics.reject("disconnected", record.model or "")
            end(CLIENT_GONE)

        def end(status: int) -> None:
            generation.leave()
            for observer in self._observers:
                observer.write(record, "POST", head.path, status, time.monotonic() - started)

        try:
            cancel_work = start(body, record, started, on_reply, connection.hold)
        except Exception as failure:  # noqa: BLE001 - the edge of one request
            on_reply(failure)
            return None
        return cancel

    async def _run(self, route: str, prepare: Prepare, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.monotonic()
        generation = self._models.enter()
        record = CURRENT_RECORD.get() or RequestRecord("", client=client_of(scope))
        token = CURRENT_RECORD.set(record)  # in which the model is found
        try:
            try:
                start, cacheable = prepare(scope)
                body = await read_body(scope, receive, self._limits.body_bytes)
                reply = await answered(scope, start, body, record, started)
                if cacheable:
                    of_head = (header(scope, name) for name in _OF_HEAD)
                    cache_head(scope, partial(self._run_cached, _Head(route, scope["path"], *of_head), start))
            except ClientGone:
                raise
            except Exception as error:  # noqa: BLE001 - the edge of one request: others must not be affected
                reply = self._error_reply(error, scope["path"], record)
            reply = await compressed(reply, header(scope, ACCEPT_ENCODING))
            self._metrics.answer(route, reply.status, time.monotonic() - started, record.model or "")
            await send_reply(send, reply, close=self._models.draining or self._models.leaving)
        except ClientGone:
            if not scope[CONNECTION].slow:  # a request that was too slow is already counted as such
                self._metrics.reject("disconnected", record.model or "")
        finally:
            CURRENT_RECORD.reset(token)
            generation.leave()

    def _error_reply(self, error: Exception, path: str, record: RequestRecord) -> Reply:
        """The reply to a request that was refused or failed; counts a refusal, logs an internal error."""
        if not isinstance(error, RequestError):
            _log.error("internal error while answering %s", path, exc_info=error)
            error = RequestError("internal error: see the server's log", status=500)
        else:
            self._metrics.reject(error.reason, record.model or "")
            error.__traceback__ = None  # a circle with its frames, which have the body, is freed late
        return error_reply(error)

    def _counted(self, scope: Scope, send: Send) -> Send:
        """Wrap `send`: count the reply under its endpoint's name."""

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                endpoint = scope.get("endpoint")
                self._metrics.answer(getattr(endpoint, "__name__", "other"), message["status"])
            await send(message)

        return counting


class _Head(NamedTuple):
    """What is needed of a known head; texts are those of the headers, None for one that it does not have."""

    route: str
    path: str
    accepted: str | None
    id: str | None
    traceparent: str | None
    tracestate: str | None
