"""The head cache: a request whose head (request line and headers) was seen before is answered without parsing it.

Clients send the same head with every request, but for the number in Content-Length. After a request was validated,
`cache_head` stores a handler under its head; it answers later ones with callbacks, which costs no asyncio task. Heads
that change how the body or the connection is read (encoding, Expect, upgrade, chunks, close) are never cached.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from vitx.serve.callbacks import write_with_batch
from vitx.serve.http.asgi import CONNECTION, Reply, head_of, lines_of
from vitx.serve.http.connection import END_OF_HEAD, HttpProtocol
from vitx.serve.limits import UNCOUNTED_BYTES

# Begins a request: returns what answers it, once its body is there, by calling `HeadCacheProtocol.reply`, now or later;
# and what cancels it, called if the connection ends before the reply, or the server, for which it has a last one.
Answer = Callable[[bytes], object]
CachedHandler = Callable[["HeadCacheProtocol"], tuple[Answer, Callable[[], object]]]

_HEAD = "vitx.head"  # scope key of the request's head, as received
_MAX_HEAD_BYTES, _MAX_HEADS = 2048, 1024
_LENGTH = re.compile(rb"\r\ncontent-length: ?(\d{1,12})\r\n", re.IGNORECASE)
# A request with one of these headers is not cached.
_UNCACHEABLE = {b"content-encoding", b"transfer-encoding", b"expect", b"upgrade"}


class HeadCacheProtocol(HttpProtocol):
    """One connection. A cached head's request is `_incoming`, (length, answer), until complete, then `_replying`."""

    def __init__(self, handlers: dict[bytes, CachedHandler], *args: Any, **options: Any) -> None:
        """`handlers`: those of the server, by the head without its length."""
        super().__init__(*args, **options)
        self.handlers = handlers
        self._head: bytes | None = None  # of the request that is being parsed
        self._pieces: list[bytes] = []
        self._replying = False

    def data_received(self, data: bytes) -> None:
        if self._replying or self.transport.is_closing():
            self._wait_with(data)
        elif self._incoming is not None:
            self._collect_body(*self._incoming, data)
        elif (found := self._find(data)) is None:
            super().data_received(data)
        else:
            self._stop_timer()
            length, handler, rest = found
            answer, self.on_lost = handler(self)
            self._collect_body(length, answer, rest)

    def _find(self, data: bytes) -> tuple[int, CachedHandler, bytes] | None:
        """Of the cached head that `data` begins with the length of the body, its handler, and the data behind it."""
        self._head = None
        if self._in_head and not self._surplus and self.is_idle() and not self.flow.write_paused:
            end = data.find(END_OF_HEAD, 0, _MAX_HEAD_BYTES) + len(END_OF_HEAD)
            if end >= len(END_OF_HEAD):
                head = data[:end]
                key, size = _split(head) or (b"", 0)
                counted = 0 if size <= UNCOUNTED_BYTES else size
                # A body that is too large, or does not fit, is refused by the application.
                if (handler := self.handlers.get(key)) and size <= self.limits.body_bytes and self.memory.fits(counted):
                    self.reserve(counted)
                    return size, handler, data[end:]
                self._head = head
        return None

    def _collect_body(self, length: int, answer: Answer, data: bytes) -> None:
        """Collect the body; once it is complete, answer the request."""
        missing = length - self._received
        if len(data) < missing:
            self._incoming = length, answer
            self._pieces.append(data)
            self._in_head = False
            self._received += len(data)
            if self._timer is None:
                self._start_timer(self.limits.body_seconds)
            return
        self._stop_timer()
        self._incoming = None
        self._in_head, self._received = True, 0
        if len(data) > missing:
            self._wait_with(data[missing:])
            data = data[:missing]
        if self._pieces:
            data, self._pieces = b"".join((*self._pieces, data)), []
        self._replying = True
        answer(data)

    def on_headers_complete(self) -> None:
        scope: Any = self.scope  # its type knows no key of ours
        scope[_HEAD], self._head = self._head, None
        super().on_headers_complete()

    def reply(self, reply: Reply, *, close: bool, request_id: str = "") -> None:
        """Send the reply to the request that is being answered, with its id unless that is ""."""
        self.on_lost = None
        if self.transport.is_closing():
            return
        default = lines_of(tuple(self.server_state.default_headers))
        if request_id:
            default += b"x-request-id: %b\r\n" % request_id.encode()
        ours = head_of(reply.content_type, len(reply.body), reply.headers, close=close)
        data = b"".join((STATUS_LINE[reply.status], default, ours, reply.body))
        write_with_batch(partial(self._write_reply, data, close=close))

    def _write_reply(self, data: bytes, *, close: bool) -> None:
        self.write(data)
        self._replying = False
        if close:
            self._close()
        else:
            self.on_response_complete()

    def is_idle(self) -> bool:
        return not self._replying and self._incoming is None and super().is_idle()

    def shutdown(self) -> None:
        """Called by uvicorn when the server shuts down: a request that is in flight still has had its time."""
        if not self._replying and self._incoming is None:
            super().shutdown()
        elif self.on_lost is not None:
            self.on_lost()


def cache_head(scope: Scope, handler: CachedHandler) -> None:
    """Let `handler` answer later requests with the same head, if the head can be cached."""
    connection, head = scope.get(CONNECTION), scope.get(_HEAD)
    if head is None or not isinstance(connection, HeadCacheProtocol) or scope["http_version"] != "1.1":
        return
    headers, split = scope["headers"], _split(head)
    names = [name for name, _ in headers]
    # The parser joined or dropped a line, or there is not one length.
    if split is None or head.count(b"\n") != len(headers) + 2 or names.count(b"content-length") != 1:
        return
    connections = {value.lower() for name, value in headers if name == b"connection"}
    if _UNCACHEABLE & {*names} or connections - {b"keep-alive"}:
        return
    handlers = connection.handlers
    if len(handlers) >= _MAX_HEADS:
        del handlers[next(iter(handlers))]  # the oldest
    handlers[split[0]] = handler


def _split(head: bytes) -> tuple[bytes, int] | None:
    """A head without the number in Content-Length, and that number."""
    found = _LENGTH.search(head)
    return None if found is None else (head[: found.start(1)] + head[found.end(1) :], int(found[1]))
