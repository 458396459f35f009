"""The gRPC server: one port; counts and times every call, maps errors to gRPC statuses, and drains.

Every call goes through `GrpcServer._counted`, the only place that turns an exception into a RequestError. Messages are
parsed and serialized here and not by grpcio, so that malformed bytes are the client's error and not an internal one.
"""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import grpc
from google.protobuf.message import DecodeError

from vitx.core.errors import EnvironmentMissing
from vitx.serve.errors import DeadlineMissed, RequestError, unavailable
from vitx.serve.grpc.messages import check_fields, encoding_of, message_class
from vitx.serve.grpc.service import Call, grpc_calls
from vitx.serve.models.served_model import InFlight
from vitx.serve.observe.access_log import CLIENT_GONE, request_id
from vitx.serve.observe.request_record import CURRENT_RECORD, RequestRecord
from vitx.serve.protocol.inflate import inflated
from vitx.serve.security import Kind, Pem
from vitx.serve.server_core import ServerCore

Replies = asyncio.Queue["asyncio.Task[bytes] | None"]

_STREAM_WINDOW = 64  # concurrent requests of one stream; beyond, it is read no further
_CALLS = 4096  # concurrent calls
_MOST_INFLATED = 16 * 2**20  # bytes of a message that comes compressed: copying it holds up the event loop
_GRACE_SECONDS = 1.0  # for replies to reach their clients, once every call is done
_ENDED_SECONDS = 0.5  # from the end of what a client sends until gRPC would have said that the whole call has ended
_TIMER_GRAIN = 0.001  # seconds: gRPC may end a call this much before its deadline
_OF_CALL = ("x-request-id", "traceparent", "tracestate")
_TIMED = ("grpc.ModelInfer", "grpc.ModelStreamInfer")
_WITHOUT_TOKEN = ("grpc.ServerLive", "grpc.ServerReady", "grpc.Check")  # health checks, as over HTTP
_CODES = {401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND", 408: "DEADLINE_EXCEEDED"}
_CODES |= {409: "ALREADY_EXISTS", 429: "RESOURCE_EXHAUSTED", 500: "INTERNAL", 501: "UNIMPLEMENTED", 503: "UNAVAILABLE"}
_PARENTS = WeakKeyDictionary["asyncio.Task[Any]", "ref[asyncio.Task[Any]]"]()  # of a task what made it, if one did
_InferRequest = message_class("ModelInferRequest")
_StreamResponse = message_class("ModelStreamInferResponse")


class GrpcServer:
    """Serves a set of models on one port. Create it on a running event loop, which claims the port; then `start` it."""

    def __init__(self, core: ServerCore, host: str, port: int, *, shared: bool, pem: Callable[[], Pem | None]) -> None:
        """Claim the port (0: any free one) of an address, not a name; raise EnvironmentMissing if it is taken.

        shared: other workers of the same parent listen on it too. pem: what new connections get; None for no TLS.
        """
        self._core, self._models, self._metrics, self._budget = core, core.models, core.metrics, core.budget
        self._calls = grpc_calls(core)
        self._streams: set[Replies] = set()
        self._in_flight = InFlight()  # streams included
        asyncio.get_running_loop().set_task_factory(_child)
        options = [
            ("grpc.so_reuseport", int(shared)),  # on by default: two servers would silently share a port
            ("grpc.max_receive_message_length", min(core.limits.body_bytes, 2**31 - 1)),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_concurrent_streams", _CALLS),
            ("grpc.server.max_pending_requests", _CALLS),  # not yet taken: by default some of a thousand are cancelled
            ("grpc.server.max_pending_requests_hard_limit", _CALLS),
            ("grpc.per_message_decompression", 0),  # gRPC's own knows no limit
            ("grpc.keepalive_time_ms", 60_000),  # detects clients that vanished
            ("grpc.max_connection_idle_ms", int(1e3 * core.limits.idle_seconds)),  # clients connect again by themselves
            ("grpc.server_handshake_timeout_ms", min(int(1e3 * core.limits.header_seconds), 2**31 - 1)),
        ]
        self._server = grpc.aio.server(handlers=self._handlers(), options=options, maximum_concurrent_rpcs=_CALLS)
        host = f"[{host}]" if ":" in host else host
        add = self._server.add_insecure_port
        if (first := pem()) is not None:
            renew = partial(_tls, pem)
            given = grpc.dynamic_ssl_server_credentials(renew(), renew, first.client_ca is not None)
            add = partial(self._server.add_secure_port, server_credentials=given)
        try:
            port = add(f"{host}:{port}")
        except RuntimeError as error:
            text = f"cannot listen on {host} port {port} for gRPC: choose another --grpc-port (0: any); {error}"
            raise EnvironmentMissing(text) from None
        self.address, self.start = f"{host}:{port}", self._server.start
        self.stop = partial(self._server.stop, _GRACE_SECONDS)  # closes the port, and after that every connection

    async def idle(self) -> None:
        """End the streams after the requests they have accepted; return when no call is in flight."""
        for replies in self._streams:
            replies.put_nowait(None)
        await self._in_flight.ended.wait()

    def _handlers(self) -> list[grpc.GenericRpcHandler]:
        health = {"Check": self._unary("Check", *self._calls.pop("HealthCheck"))}
        unary = {name: self._unary(name, *of) for name, of in self._calls.items()}
        stream = {"ModelStreamInfer": grpc.stream_stream_rpc_method_handler(self._stream)}
        service = grpc.method_handlers_generic_handler
        return [service("inference.GRPCInferenceService", unary | stream), service("grpc.health.v1.Health", health)]

    def _unary(self, name: str, message: Any, call: Call) -> grpc.RpcMethodHandler:
        parse, route = message.FromString, f"grpc.{name}"

        async def answer(_: object, context: Any) -> None:
            size, request = 0, await self._message(context)
            if isinstance(request, bytes):
                size, request = await self._reserved(parse, request)
            self._in_flight.enter()
            try:
                reply = await self._counted(route, call, request, context)
                await self._write(reply.SerializeToString(), context)
            except RequestError as error:
                # A circle with its frames is freed late, and grpcio makes one of `abort`: they have no message.
                error.__traceback__ = request = None
                await _abort(context, error)
            finally:
                self._budget.give(size)
                self._in_flight.leave()

        # The same on the wire as a unary call, for whose message, and for who takes its reply, grpcio waits for ever.
        return grpc.stream_stream_rpc_method_handler(answer)

    async def _write(self, reply: bytes, context: Any) -> None:
        """Send a reply; a call whose client does not take it in time is reset: a status would wait behind the reply."""
        seconds = self._core.limits.write_seconds + len(reply) / self._core.limits.body_rate
        timer = asyncio.get_running_loop().call_later(seconds, self._reset, asyncio.current_task())
        try:
            await context.write(reply)
        finally:
            timer.cancel()

    def _reset(self, call: Any) -> None:
        self._metrics.reject("slow_client")
        call.cancel()
        if (parent := _PARENTS[call]()) is not None:
            parent.cancel()

    async def _message(self, context: Any) -> Any:
        """The message of a call, as bytes; else why there is none: a RequestError, or what ended the call."""
        try:
            async with asyncio.timeout(self._core.limits.message_seconds):
                data = await context.read()
            if isinstance(data, bytes):
                return data
            await asyncio.sleep(_ENDED_SECONDS)
        except TimeoutError:
            return RequestError("the call's message took too long", status=408, reason="slow_client")
        except asyncio.CancelledError as ended:
            return ended
        return RequestError("the call has no message")

    async def _reserved(self, parse: Callable[[bytes], Any], data: bytes) -> tuple[int, Any]:
        """Count a message, then parse it: the bytes to give back, and the request or the RequestError that refuses it.

        The caller keeps no `data`: parsed and unparsed it would be held twice.
        """
        size = 0

        def reserve(more: int) -> None:
            nonlocal size
            self._budget.take(more)
            size += more

        try:
            reserve(len(data))
            if (encoding := encoding_of(data)) is not None:
                data = await inflated(data, encoding, min(self._core.limits.body_bytes, _MOST_INFLATED), reserve)
            check_fields(data, compressed=encoding is not None)
            return size, parse(data)
        except RequestError as error:
            return size, error
        except DecodeError:
            return size, RequestError("the bytes are not a message of this call")
        except BaseException:
            self._budget.give(size)
            raise

    async def _counted(self, route: str, call: Call, request: Any, context: Any) -> Any:
        """Run one call and count it under its HTTP status; raise only RequestError or CancelledError."""
        generation = self._models.enter()
        status = CLIENT_GONE
        record = RequestRecord("")
        if self._core.observers:
            given, record.traceparent, record.tracestate = (_metadata(context, name) for name in _OF_CALL)
            record.id, record.client = request_id(given), context.peer() or None  # "" of a call that has ended
        CURRENT_RECORD.set(record)  # of this call, or request of a stream, alone: each has its own task
        try:
            if route not in _WITHOUT_TOKEN:
                kind: Kind = "management" if route.startswith("grpc.Repository") else "inference"
                self._core.tokens.check(kind, _metadata(context, "authorization"))
            if isinstance(request, BaseException):
                raise request
            response = await call(request, context)
            status, record.sent = 200, response.ByteSize() if self._core.observers else None
            return response
        except asyncio.CancelledError:  # by the call's deadline, or by the client
            passed = (left := context.time_remaining()) is not None and left < _TIMER_GRAIN
            self._metrics.reject("deadline" if passed else "disconnected", record.model or "")
            status = 503 if passed else CLIENT_GONE
            raise
        except Exception as failure:  # noqa: BLE001 - the edge of one request: others must not be affected
            error = self._core.failure(failure, route, record)
            status = error.status
            raise error from None
        finally:
            generation.leave()
            seconds = time.monotonic() - record.started
            if status != CLIENT_GONE:
                self._metrics.answer(route, status, seconds if route in _TIMED else None, record.model or "")
            for observer in self._core.observers:
                observer.write(record, "gRPC", route, status, seconds)

    async def _stream(self, _: object, context: Any) -> None:
        """`ModelStreamInfer`: runs requests concurrently and answers in order; a refused one gets an error message."""
        replies, window = Replies(), asyncio.Semaphore(_STREAM_WINDOW)
        try:  # also of each request; a stream without any would stay open
            self._core.tokens.check("inference", _metadata(context, "authorization"))
        except RequestError as refusal:
            try:
                await self._counted("grpc.ModelStreamInfer", self._calls["ModelInfer"][1], refusal, context)
            except RequestError as error:
                await _abort(context, error)
        reader = asyncio.create_task(self._read_stream(context, replies, window))
        self._in_flight.enter()
        self._streams.add(replies)
        if self._models.draining:
            replies.put_nowait(None)
        try:
            while (reply := await replies.get()) is not None:
                await self._write(await reply, context)
                window.release()
            if not reader.done():  # of an end without an error Triton's clients take no notice, and wait for replies
                await _abort(context, unavailable("the server is shutting down", "draining"))
        finally:
            self._streams.discard(replies)
            reader.cancel()
            while not replies.empty():
                if (left := replies.get_nowait()) is not None:
                    left.cancel()
            self._in_flight.leave()

    async def _read_stream(self, context: Any, replies: Replies, window: asyncio.Semaphore) -> None:
        try:  # grpcio's iterator would be a circle with the call, which is reset only when all have let go of it
            while isinstance(data := await context.read(), bytes):
                await window.acquire()
                size, request = await self._reserved(_InferRequest.FromString, data)
                del data
                replies.put_nowait(reply := asyncio.create_task(self._stream_reply(request, context)))
                reply.add_done_callback(partial(self._budget.give, size))  # also if it never starts
                del request, reply
        finally:
            replies.put_nowait(None)

    async def _stream_reply(self, request: Any, context: Any) -> bytes:
        try:
            answer = await self._counted("grpc.ModelStreamInfer", self._calls["ModelInfer"][1], request, context)
            response = _StreamResponse(infer_response=answer)
            # Triton marks the last response of each request; here each has only one.
            response.infer_response.parameters["triton_final_response"].bool_param = True
        except RequestError as error:
            error.__traceback__ = None
            response = _StreamResponse(error_message=str(error))
            response.infer_response.id = getattr(request, "id", "")
        return bytes(response.SerializeToString())


def _child(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> "asyncio.Task[Any]":
    """The event loop's factory of tasks. A call's own was made by one of grpcio's that waits for the client's end."""
    task = asyncio.Task(work, loop=loop, **options)
    if (parent := asyncio.current_task(loop)) is not None:
        _PARENTS[task] = ref(parent)  # each pipelined HTTP request makes the next: they would all be kept
    return task


def _tls(pem: Callable[[], Pem | None]) -> Any:
    return (now := pem()) and grpc.ssl_server_certificate_configuration([now[:2]], now.client_ca)


def _metadata(context: Any, name: str) -> str | None:
    """The first value of a call's metadata under this (lower case) name."""
    given = context.invocation_metadata() or ()
    return next((value for key, value in given if key == name and isinstance(value, str)), None)


async def _abort(context: Any, error: RequestError) -> None:
    """End a call with an error status, and with the time to wait before a retry, if there is one (gRFC A6).

    Of missed deadlines only one that has passed is DEADLINE_EXCEEDED.
    """
    code = grpc.StatusCode[_CODES.get(error.status, "INVALID_ARGUMENT")]
    if isinstance(error, DeadlineMissed):
        code = grpc.StatusCode.DEADLINE_EXCEEDED if error.passed else grpc.StatusCode.RESOURCE_EXHAUSTED
    wait = (("grpc-retry-pushback-ms", str(1000 * error.retry_after)),) if error.retry_after is not None else ()
    await context.abort(code, str(error), wait)
