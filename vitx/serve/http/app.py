"""The ASGI application. `infer` and `classify`, which run a model, are dispatched here; Starlette has all other routes.

A request that runs a model goes through `App._run`, or through `App._run_cached` if its head is in the head cache.
Only these two count it, time it, and turn an exception into a reply.
"""

import logging
import time
from collections.abc import Callable, Iterator
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
from vitx.serve.http.encoding import WORTH_ENCODING
from vitx.serve.http.gate import Gate
from vitx.serve.http.head_cache import HeadCacheProtocol, cache_head
from vitx.serve.http.routes import other_routes
from vitx.serve.models.served_model import ServedModel
from vitx.serve.observe.access_log import CLIENT_GONE, request_id
from vitx.serve.observe.request_record import CURRENT_RECORD, RequestRecord
from vitx.serve.protocol.infer import (
    HEADER_LENGTH,
    InferRequest,
    decode_infer_request,
    encode_infer_response,
    header_length,
)
from vitx.serve.protocol.json_pixels import SMALL_BYTES
from vitx.serve.server_core import ServerCore

ACCEPT_ENCODING = b"accept-encoding"
_OF_HEAD = (ACCEPT_ENCODING, b"x-request-id", b"traceparent", b"tracestate")
# What starts requests of this scope, and whether the head cache may call it for later ones; refuses others unread.
Prepare = Callable[[Scope], tuple[StartRequest, bool]]
Decoded = tuple[ServedModel, InferRequest, float | None]  # with the deadline

_log = logging.getLogger("vitx.serve")


class App:
    """The server's routes, behind the checks of who asks."""

    def __init__(self, core: ServerCore, bound: str | None) -> None:
        """`bound`: see `Gate`."""
        self._models, self._limits, self._metrics, self._memory = core.models, core.limits, core.metrics, core.memory
        self._gate, self._observers = Gate(core, bound), core.observers
        self._classify = Classifier(core).prepare
        self._other = other_routes(core)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, and tell the observers when it ended; for them each reply has an X-Request-Id."""
        status, (_, id, parent, state) = CLIENT_GONE, _of_head(scope)
        record = RequestRecord(request_id(id) if self._observers else "", parent, state, client_of(scope), 0)

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if record.id:
                    message["headers"] = [*message["headers"], (b"x-request-id", record.id.encode())]
            else:
                record.sent = (record.sent or 0) + len(message.get("body", b""))
            await send(message)

        token = CURRENT_RECORD.set(record)  # in which the model is found
        try:
            self._gate.check(scope)
            if (found := self._find(scope["path"])) is not None:
                await self._run(*found, scope, receive, observed, record)
            else:
                await self._other(scope, receive, self._counted(scope, observed))
        except RequestError as error:  # of the gate: the connection ends, as the body is not read
            await send_reply(observed, self._error_reply(error, scope["path"], record), close=True)
        finally:
            CURRENT_RECORD.reset(token)
            for observer in self._observers:
                observer.write(record, scope["method"], scope["path"], status, time.monotonic() - record.started)

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
        on_reply: OnReply,
        hold: Hold,
    ) -> Callable[[], object]:
        """Answer an infer request; see `StartRequest`. `length`: bytes of JSON before the tensor; None: all."""
        record.model = name  # it was served, when the head was read
        decode = partial(self._decode, name, version, length, body, record.started)
        if len(body) > SMALL_BYTES and (length is None or length > SMALL_BYTES):  # the event loop goes on beside it
            return start_task(self._read_beside(decode, record, hold), on_reply).cancel
        model, request, deadline = decode()

        def on_logits(rows: Float32Array | Exception) -> None:
            reply: Reply | Exception
            try:
                if isinstance(rows, Exception):
                    reply = rows
                else:
                    record_times(record, submission.parts)
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
        batcher = model.batcher_of(request.further)
        rows = await batcher.submit(request.images, priority=request.priority, deadline=deadline)
        return self._rows_reply(rows, request, model)

    def _run_cached(
        self, head: "_Head", start: StartRequest, connection: HeadCacheProtocol, body: bytes
    ) -> Callable[[], None] | None:
        """`_run` with callbacks instead of a task; return a function that cancels the request."""
        client, accepted = connection.client[0] if connection.client else "", head.accepted
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
            self._metrics.answer(head.route, reply.status, time.monotonic() - record.started, record.model or "")
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
                observer.write(record, "POST", head.path, status, time.monotonic() - record.started)

        try:
            cancel_work = start(body, record, on_reply, connection.hold)
        except Exception as failure:  # noqa: BLE001 - the edge of one request
            on_reply(failure)
            return None
        return cancel

    async def _run(
        self, route: str, prepare: Prepare, scope: Scope, receive: Receive, send: Send, record: RequestRecord
    ) -> None:
        generation = self._models.enter()
        try:
            try:
                if scope["method"] != "POST":
                    raise RequestError(f"method {scope['method']} is not allowed: use POST", status=405)
                start, cacheable = prepare(scope)
                body = await read_body(scope, receive, self._limits.body_bytes)
                reply = await answered(scope, start, body, record)
                if cacheable:
                    cache_head(scope, partial(self._run_cached, _Head(route, scope["path"], *_of_head(scope)), start))
            except ClientGone:
                raise
            except Exception as error:  # noqa: BLE001 - the edge of one request: others must not be affected
                reply = self._error_reply(error, scope["path"], record)
            reply = await compressed(reply, header(scope, ACCEPT_ENCODING))
            self._metrics.answer(route, reply.status, time.monotonic() - record.started, record.model or "")
            await send_reply(send, reply, close=self._models.draining or self._models.leaving)
        except ClientGone:
            if not scope[CONNECTION].slow:  # a request that was too slow is already counted as such
                self._metrics.reject("disconnected", record.model or "")
        finally:
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


def _of_head(scope: Scope) -> Iterator[str | None]:
    return (header(scope, name) for name in _OF_HEAD)
