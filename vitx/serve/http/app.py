"""The ASGI application. `infer` and `classify`, which run a model, are dispatched here; Starlette has all other routes.

A request goes through `App.__call__`, or through `App._run_cached` if its head is in the head cache. Only these two
count it, time it, and turn an exception into a reply.
"""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from functools import partial

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from vitx.runtimes.session import Float32Array
from vitx.serve.errors import RequestError, unavailable
from vitx.serve.http import asgi
from vitx.serve.http.asgi import CONNECTION, Hold, OnReply, Reply, StartRequest
from vitx.serve.http.classify import Classifier
from vitx.serve.http.gate import check_allowed
from vitx.serve.http.head_cache import HeadCacheProtocol, cache_head
from vitx.serve.http.routes import other_routes
from vitx.serve.limits import MANY_TEXTS
from vitx.serve.models.served_model import ServedModel
from vitx.serve.observe.access_log import CLIENT_GONE, request_id
from vitx.serve.observe.request_record import CURRENT_RECORD, RequestRecord
from vitx.serve.protocol.infer import InferRequest, decode_infer_request, encode_infer_response, header_length
from vitx.serve.protocol.json_pixels import SMALL_BYTES
from vitx.serve.security import AllowedHosts
from vitx.serve.server_core import ServerCore

_INFER = re.compile("/v2/models/([^/]*)(?:/versions/([^/]*))?/infer")  # of a model, or of its version
_HEADER_LENGTH = b"inference-header-content-length"
_OF_HEAD = (b"accept-encoding", b"x-request-id", b"traceparent", b"tracestate")
OfHead = list[str | None]  # the values of these headers
# What starts requests of this scope, and whether the head cache may call it for later ones; refuses others unread.
Prepare = Callable[[Scope], tuple[StartRequest, bool]]
Asked = tuple[str, str | None, int | None]  # model, version, bytes of JSON before the tensor; None: all
Decoded = tuple[ServedModel, InferRequest, float | None]  # with the deadline


class App:
    """The server's routes, behind the checks of who asks."""

    def __init__(self, core: ServerCore, bound: str | None) -> None:
        """`bound`: see `AllowedHosts`."""
        self._models, self._limits, self._metrics, self._memory = core.models, core.limits, core.metrics, core.memory
        self._core, self._hosts, self._observers = core, AllowedHosts(bound, core.options.allow_host), core.observers
        self._classify = Classifier(core).prepare
        self._other = other_routes(core)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, and tell the observers when it ended; for them each reply has an X-Request-Id."""
        status = CLIENT_GONE
        _, id, parent, state = of_head = [asgi.header(scope, name) for name in _OF_HEAD]
        client = scope.get("client") or ("",)
        record = RequestRecord(request_id(id) if self._observers else "", parent, state, client[0], 0)

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if record.id:
                    message["headers"] = [*message["headers"], (b"x-request-id", record.id.encode())]
            else:
                record.sent = (record.sent or 0) + len(message.get("body", b"")) * (scope["method"] != "HEAD")
            await send(message)

        found, reply, may_ask = self._find(scope["path"]), None, False
        generation = self._models.enter() if found else None
        CURRENT_RECORD.set(record)  # of this task alone; in it the model is found
        try:
            try:
                check_allowed(scope, self._core, self._hosts)
                may_ask = True
                if found is not None:
                    reply = await self._run(*found, scope, receive, record, of_head)
                else:
                    scope["app"] = self  # else the router would answer itself what it does not find
                    await self._other(scope, receive, observed)
            except (ClientDisconnect, asyncio.CancelledError) as ended:
                connection = scope[CONNECTION]
                if not ended.args or connection.lost:
                    if not connection.slow:  # a request that was too slow is already counted as such
                        self._metrics.reject("disconnected", record.model or "")
                    if isinstance(ended, asyncio.CancelledError) and not connection.lost:  # by Ray: its client hung up
                        raise
                    return
                over = unavailable("the server is shutting down", "draining")  # uvicorn says why: the drain is over
                reply = self._error_reply(over, scope["path"], record)
            except Exception as error:  # noqa: BLE001 - the edge of one request: others must not be affected
                reply = self._error_reply(error, scope["path"], record)
            if reply is not None:  # the connection drops what it has not read of the body
                await asgi.send_reply(observed, reply, close=self._models.leaving)
        finally:
            if status != CLIENT_GONE:
                route = found[0] if found else getattr(scope.get("endpoint"), "__name__", "other")
                seconds = time.monotonic() - record.started if found and may_ask else None
                self._metrics.answer(route, status, seconds, record.model or "")
            if status != CLIENT_GONE or not scope[CONNECTION].slow:
                self._observe(record, scope["method"], scope["path"], status)
            if generation is not None:
                generation.leave()

    def _find(self, path: str) -> tuple[str, Prepare] | None:
        """The route name of a path that runs a model, and what starts its requests; else None."""
        if path == "/v1/classify":
            return "classify", self._classify
        found = _INFER.fullmatch(path)
        return found and ("infer", partial(self._infer, found[1], found[2]))

    def _infer(self, name: str, version: str | None, scope: Scope) -> tuple[StartRequest, bool]:
        self._models.get(name, version)  # refuse an unknown model before its body is read
        return partial(self._start_infer, (name, version, header_length(asgi.header(scope, _HEADER_LENGTH)))), True

    def _decode(self, asked: Asked, body: bytes, record: RequestRecord) -> Decoded:
        name, version, length = asked
        model = self._models.get(name, version, record.started)
        record.model = name
        request = decode_infer_request(body, length, model.contract, self._limits, self._memory)
        return model, request, model.deadline(record.started, request.timeout)

    def _rows_reply(self, rows: Float32Array, request: InferRequest, model: ServedModel) -> Reply:
        reply, json_length = encode_infer_response(rows, request, model.contract, model.bundle.manifest.labels)
        if json_length is None:
            return Reply(reply)
        headers = ((_HEADER_LENGTH, str(json_length).encode()),)
        return Reply(reply, content_type=b"application/octet-stream", headers=headers)

    def _start_infer(
        self, asked: Asked, body: bytes, record: RequestRecord, on_reply: OnReply, hold: Hold
    ) -> Callable[[], object]:
        """Answer an infer request; see `StartRequest`."""
        length, decode = asked[2], partial(self._decode, asked, body, record)
        if len(body) > SMALL_BYTES and (length is None or length > SMALL_BYTES):  # the event loop goes on beside it
            return asgi.start_task(self._in_task(lambda: asgi.beside(hold, len(body), decode), record), on_reply).cancel
        done = model, request, deadline = decode()
        if request.texts > MANY_TEXTS:
            return asgi.start_task(self._in_task(lambda: asyncio.sleep(0, done), record), on_reply).cancel

        def on_rows(rows: Float32Array | Exception) -> None:
            try:
                reply = rows if isinstance(rows, Exception) else self._rows_reply(rows, request, model)
            except Exception as failure:  # noqa: BLE001 - the edge of one request: others must not be affected
                reply = failure
            on_reply(reply)

        return model.start(request, deadline, record, on_rows)

    async def _in_task(self, decode: Callable[[], Awaitable[Decoded]], record: RequestRecord) -> Reply:
        """The reply to a request, which is made on a thread if it has much text."""
        CURRENT_RECORD.set(record)  # of this task alone
        model, request, deadline = await decode()
        reply = partial(self._rows_reply, await model.infer(request, deadline), request, model)
        return await asyncio.to_thread(reply) if request.texts > MANY_TEXTS else reply()

    def _run_cached(
        self, route: str, path: str, of_head: OfHead, start: StartRequest, connection: HeadCacheProtocol
    ) -> tuple[Callable[[bytes], None], Callable[[], None]]:
        """`_run` with callbacks instead of a task; see `CachedHandler`."""
        accepted, id, parent, state = of_head
        id = request_id(id) if self._observers else ""  # it takes a microsecond
        record = RequestRecord(id, parent, state, connection.client[0] if connection.client else "")
        generation = self._models.enter()
        cancel_work: Callable[[], object] = list  # nothing to cancel yet

        def answer(body: bytes) -> None:
            nonlocal cancel_work
            try:
                cancel_work = start(body, record, on_reply, connection.hold)
            except Exception as failure:  # noqa: BLE001 - the edge of one request
                on_reply(failure)

        def on_reply(reply: Reply | Exception) -> None:
            if connection.lost:
                return  # `cancel` has ended it
            if isinstance(reply, Exception) or accepted is None or len(reply.body) < asgi.WORTH_ENCODING:
                finish(reply)
                return
            connection.on_lost = None  # too late to cancel
            asgi.start_task(asgi.compressed(reply, accepted), finish)

        def finish(reply: Reply | Exception) -> None:
            if isinstance(reply, Exception):
                reply = self._error_reply(reply, path, record)
            self._metrics.answer(route, reply.status, time.monotonic() - record.started, record.model or "")
            connection.reply(reply, close=self._models.leaving, request_id=record.id)
            record.sent = len(reply.body)
            generation.leave()
            self._observe(record, "POST", path, reply.status)

        def cancel() -> None:
            cancel_work()
            if not connection.lost:
                finish(unavailable("the server is shutting down", "draining"))
                return
            generation.leave()
            if not connection.slow:
                self._metrics.reject("disconnected", record.model or "")
                self._observe(record, "POST", path, CLIENT_GONE)

        return answer, cancel

    def _observe(self, record: RequestRecord, method: str, path: str, status: int) -> None:
        for observer in self._observers:
            observer.write(record, method, path, status, time.monotonic() - record.started)

    async def _run(
        self, route: str, prepare: Prepare, scope: Scope, receive: Receive, record: RequestRecord, of_head: OfHead
    ) -> Reply:
        if scope["method"] != "POST":
            raise HTTPException(405, f"method {scope['method']} is not allowed: use POST", {"allow": "POST"})
        start, cacheable = prepare(scope)
        reply = await asgi.answered(scope, start, await asgi.read_body(scope, receive, self._limits.body_bytes), record)
        if cacheable:
            cache_head(scope, partial(self._run_cached, route, scope["path"], of_head, start))
        return await asgi.compressed(reply, of_head[0])

    def _error_reply(self, error: Exception, path: str, record: RequestRecord) -> Reply:
        """The reply to a request that was refused or failed."""
        if isinstance(error, HTTPException):  # no such path, or not with this method
            headers = tuple((name.encode(), value.encode()) for name, value in (error.headers or {}).items())
            return asgi.error_reply(RequestError(error.detail))._replace(status=error.status_code, headers=headers)
        return asgi.error_reply(self._core.failure(error, path, record))
