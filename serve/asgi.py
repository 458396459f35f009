"""The little of ASGI that the hot routes need: a bounded body, a reply, and a client that may hang up."""

import asyncio
import json
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from vitx.serve.errors import RequestError, too_large

T = TypeVar("T")
JSON = b"application/json"


class ClientGone(Exception):
    """The client hung up: nobody waits for the reply."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole response."""

    body: bytes
    status: int = 200
    content_type: bytes = JSON
    headers: tuple[tuple[bytes, bytes], ...] = ()


def json_reply(value: Any, status: int = 200) -> Reply:
    return Reply(json.dumps(value, separators=(",", ":"), allow_nan=False).encode(), status)


def error_reply(error: RequestError) -> Reply:
    """`{"error": text}` with the refusal's status, as Triton answers, and Retry-After where there is a time."""
    headers = ((b"retry-after", str(error.retry_after).encode()),) if error.retry_after is not None else ()
    return Reply(json.dumps({"error": str(error)}).encode(), error.status, headers=headers)


async def send_reply(send: Send, reply: Reply, *, close: bool = False) -> None:
    """Send a reply; with `close` the connection ends after it."""
    headers = [
        (b"content-type", reply.content_type),
        (b"content-length", str(len(reply.body)).encode()),
        *reply.headers,
    ]
    if close:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})


def header(scope: Scope, name: bytes) -> str | None:
    """The first header of this (lower case) name."""
    headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
    for key, value in headers:
        if key == name:
            return value.decode("latin-1")
    return None


async def read_body(scope: Scope, receive: Receive, limit: int) -> bytes:
    """Return the whole body; raise RequestError 413 beyond `limit` bytes, 415 when compressed, or ClientGone."""
    encoding = header(scope, b"content-encoding")
    if encoding not in (None, "identity"):
        raise RequestError(
            f"Content-Encoding '{encoding}' is not offered: send it plain", status=415, reason="unsupported_media"
        )
    declared = header(scope, b"content-length")
    if declared is not None and int(declared) > limit:  # the HTTP parser has checked that it is a number
        raise _body_too_large(limit)
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk: bytes = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise _body_too_large(limit)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _body_too_large(limit: int) -> RequestError:
    return too_large(f"request body of more than {limit} bytes")


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """Await `work`, whose request was read to its end; when the client hangs up, cancel it and raise ClientGone."""
    task = asyncio.current_task()
    assert task is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if not gone:
            raise
        task.uncancel()
        raise ClientGone from None
    finally:
        watcher.cancel()
