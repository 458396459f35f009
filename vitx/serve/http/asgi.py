"""ASGI for the routes that run a model: read a bounded body, send a reply, stop when the client hangs up."""

import asyncio
import json
import zlib
from collections.abc import Callable, Coroutine
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope, Send

from vitx.serve.callbacks import awaited, read_on_thread, settle, start_kept
from vitx.serve.errors import RequestError, too_large, unsupported
from vitx.serve.limits import UNCOUNTED_BYTES
from vitx.serve.observe.request_record import RequestRecord
from vitx.serve.protocol.inflate import WINDOW, inflated

T = TypeVar("T")
Headers = tuple[tuple[bytes, bytes], ...]
JSON = b"application/json"
_CHALLENGE: Headers = ((b"www-authenticate", b'Bearer realm="vitx"'),)
CONNECTION = "vitx.connection"  # scope key of the request's connection, an HttpProtocol

WORTH_ENCODING = 1400  # bytes: a reply that fits into one network packet gains nothing from compression
_LEVEL = 1  # logits hardly compress, so the fastest level


class Reply(NamedTuple):
    body: bytes
    status: int = 200
    content_type: bytes = JSON
    headers: Headers = ()


# Called with the reply to a request, or with the exception that it ended with.
OnReply = Callable[[Reply | Exception], None]
# Told what goes on reading a request's body even when its client hangs up; `HttpProtocol.hold`.
Hold = Callable[["asyncio.Future[Any]"], None]
# (body, record to fill in, callback, hold): starts to answer a request without an asyncio task, and returns a function
# that cancels it. May raise instead of calling back.
StartRequest = Callable[[bytes, RequestRecord, OnReply, Hold], Callable[[], object]]


def error_reply(error: RequestError) -> Reply:
    """`{"error": text}` with the error's status, as Triton answers, and Retry-After if the error has one."""
    headers = _CHALLENGE if error.status == 401 else ()
    if error.retry_after is not None:
        headers += ((b"retry-after", str(error.retry_after).encode()),)
    return Reply(json.dumps({"error": str(error)}).encode(), error.status, headers=headers)


def headers_of(content_type: bytes, length: int, others: Headers, *, close: bool) -> list[tuple[bytes, bytes]]:
    """The headers of a reply; `close` ends the connection after it."""
    last = [(b"connection", b"close")] * close
    return [(b"content-type", content_type), (b"content-length", b"%d" % length), *others, *last]


@lru_cache(256)
def head_of(content_type: bytes, length: int, others: Headers, *, close: bool) -> bytes:
    """`headers_of` as they are sent, and the empty line behind them."""
    return lines_of(tuple(headers_of(content_type, length, others, close=close))) + b"\r\n"


@lru_cache(256)
def lines_of(headers: Headers) -> bytes:
    return b"".join(b"%b: %b\r\n" % header for header in headers)


async def send_reply(send: Send, reply: Reply, *, close: bool = False) -> None:
    """Send a reply; `close` ends the connection after it."""
    headers = headers_of(reply.content_type, len(reply.body), reply.headers, close=close)
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})


async def compressed(reply: Reply, accepted: str | None) -> Reply:
    """Return the reply in an encoding that Accept-Encoding names, or as it is when it is small."""
    if accepted is None or len(reply.body) < WORTH_ENCODING or (encoding := _accepted_encoding(accepted)) is None:
        return reply
    stream = zlib.compressobj(_LEVEL, wbits=WINDOW[encoding])
    body = await asyncio.to_thread(lambda: stream.compress(reply.body) + stream.flush())
    return reply._replace(body=body, headers=(*reply.headers, (b"content-encoding", encoding.encode())))


def _accepted_encoding(accepted: str) -> str | None:
    """The first of our encodings that an Accept-Encoding header names with a quality above 0."""
    entries = [entry.partition(";") for entry in reversed(accepted.lower().split(","))]
    qualities = {name.strip(): quality.strip().removeprefix("q=") or "1" for name, _, quality in entries}
    return next((name for name in WINDOW if qualities.get(name, "0").rstrip("0") not in ("", "0.")), None)


def header(scope: Scope, name: bytes) -> str | None:
    """The header of this lower-case name; of several lines their values with commas between, which mean the same."""
    found = [value for key, value in scope["headers"] if key == name]
    return b", ".join(found).decode("latin-1") if found else None


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """Return the whole body, decompressed.

    Raises ClientDisconnect, or RequestError: 413 for more than `limit` bytes, as sent or decompressed; 503 for more
    than all requests may have, 415 for an unknown encoding, 400 for a broken one.
    """
    encoding = (header(scope, b"content-encoding") or "identity").strip().lower()
    transfer = (header(scope, b"transfer-encoding") or "chunked").strip().lower()
    if transfer not in ("chunked", "identity, chunked"):
        raise unsupported(f"Transfer-Encoding '{transfer[:80]}' is not offered: expected chunked")
    if encoding not in ("identity", *WINDOW):
        raise unsupported(f"Content-Encoding '{encoding[:80]}' is not offered: expected gzip, deflate or identity")
    declared, reserve = header(scope, b"content-length"), scope[CONNECTION].reserve
    if declared is not None and int(declared) > limit:  # the HTTP parser has checked the number
        raise too_large(f"request body of more than {limit} bytes")
    if declared is not None and int(declared) > UNCOUNTED_BYTES:
        reserve(int(declared))
    chunks: list[bytes] = []
    size = 0
    async for chunk in Request(scope, receive).stream():
        size += len(chunk)
        if size > limit:
            raise too_large(f"request body of more than {limit} bytes")
        if declared is None:
            reserve(len(chunk))
        if chunk:  # the last one is empty, and one by itself is joined without a copy
            chunks.append(chunk)
    body = b"".join(chunks)
    if encoding == "identity":
        return body
    scope[CONNECTION].hold(inflating := asyncio.ensure_future(inflated(body, encoding, limit, reserve)))
    return await inflating


async def beside(hold: Hold, size: int, work: Callable[[], T]) -> T:
    """What `work`, which reads a body of this size, returns on a thread, while the event loop goes on."""
    hold(reading := read_on_thread(size, work))
    return await asyncio.shield(reading)


async def answered(scope: Scope, start: StartRequest, body: bytes, record: RequestRecord) -> Reply:
    """The reply that `start` calls back with, once the request was read; cancelled, too, when the client hangs up."""
    connection = scope[CONNECTION]
    if connection.lost:
        raise ClientDisconnect
    reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
    cancel = start(body, record, partial(settle, reply), connection.hold)
    connection.on_lost = reply.cancel
    try:
        return await awaited(reply, cancel)
    finally:
        connection.on_lost = None


def start_task(work: Coroutine[Any, Any, Reply], on_reply: OnReply) -> "asyncio.Task[Reply]":
    """Call back with the reply or the exception of `work`, unless it is cancelled."""

    def on_done(task: "asyncio.Task[Reply]") -> None:
        if not task.cancelled():
            failure = task.exception()
            on_reply(failure if isinstance(failure, Exception) else task.result())

    task = start_kept(work, _TASKS)
    task.add_done_callback(on_done)
    return task


_TASKS: set[asyncio.Task[Reply]] = set()
