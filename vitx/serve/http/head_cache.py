"""Requests whose head is known are answered without parsing it, and without a task.

A client sends the same request line and headers again and again, but for the number in Content-Length. Once a request
has gone the whole way (parsed, let through, understood), its handler may `remember` how such a request begins: the same
bytes then mean the same, and only the body and its length are new. What a remembered head cannot say (an encoding, an
expectation, an upgrade, chunks, a connection that ends) is not remembered.
"""

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from vitx.serve.http.asgi import CONNECTION, Headers, Reply, headers_of
from vitx.serve.http.connection import HttpProtocol
from vitx.serve.limits import Limits

# Answers a request with this body by `DirectProtocol.reply`; what it returns is called if the client hangs up before.
Begin = Callable[["DirectProtocol", bytes], Callable[[], object] | None]

_HEAD = "vitx.head"  # the key of a request's head as it came, in its scope
_LONGEST, _MOST = 2048, 1024  # bytes of a head, and heads
_END = b"\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: ?(\d{1,12})\r\n", re.IGNORECASE)
# Headers that ask for more than an answer, besides those whose value is looked at.
_ASKING = {b"content-encoding", b"transfer-encoding", b"expect", b"upgrade"}


class Known(NamedTuple):
    """What follows a head that is known, and how it is answered."""

    body_length: int
    begin: Begin


class DirectProtocol(HttpProtocol):
    """One connection. A request is under way here while its body is `_awaited`, and then while it is `_busy`."""

    known: ClassVar[dict[bytes, Begin]] = {}  # by heads without the length; of one server: its own class has its own

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head: bytes | None = None  # of the request that is being parsed
        self._awaited: Known | None = None
        self._pieces: list[bytes] = []
        self._busy = False
        self._early: list[bytes] = []  # what came while it was busy
        self._ending = False

    def data_received(self, data: bytes) -> None:
        if self._busy:
            self._early.append(data)
            self.flow.pause_reading()
        elif self._awaited is not None:
            self._take(self._awaited, data)
        elif (known := self._find(data)) is None:
            super().data_received(data)
        else:
            self._stop_timer()
            self._take(known[0], known[1])

    def _find(self, data: bytes) -> tuple[Known, bytes] | None:
        """The known head that `data` begins with, and what follows it."""
        self._head = None
        if self._in_head and not self._surplus and self.is_idle() and not self.flow.write_paused:
            end = data.find(_END, 0, _LONGEST) + len(_END)
            if end >= len(_END):
                head = data[:end]
                if (split := _split(head)) is not None and split[1] <= self.limits.body_bytes:
                    begin = self.known.get(split[0])
                    if begin is not None:
                        return Known(split[1], begin), data[end:]
                self._head = head
        return None

    def _take(self, known: Known, data: bytes) -> None:
        """Collect the body, and begin with its last byte."""
        missing = known.body_length - self._received
        if len(data) < missing:
            self._awaited = known
            self._pieces.append(data)
            self._in_head, self._in_body = False, True
            self._received += len(data)
            if self._timer is None:
                self._start_timer(self.limits.body_seconds)
            return
        self._stop_timer()
        self._awaited = None
        self._in_head, self._in_body, self._received = True, False, 0
        if len(data) > missing:
            self._early.append(data[missing:])
            self.flow.pause_reading()
            data = data[:missing]
        if self._pieces:
            data, self._pieces = b"".join((*self._pieces, data)), []
        self._busy = True
        take_back = known.begin(self, data)
        if self._busy:  # else it is answered already
            self.on_lost = take_back

    def on_headers_complete(self) -> None:
        scope: Any = self.scope  # its type knows no key of ours
        scope[_HEAD], self._head = self._head, None
        super().on_headers_complete()

    def reply(self, reply: Reply, *, close: bool) -> None:
        """Answer the request that was begun."""
        self.on_lost = None
        if self.transport.is_closing():
            return
        close = close or self._ending
        default = b"".join(b"%b: %b\r\n" % header for header in self.server_state.default_headers)
        ours = _head_of(reply.content_type, len(reply.body), reply.headers, close=close)
        self.transport.write(b"".join((STATUS_LINE[reply.status], default, ours, reply.body)))
        if close:
            self.transport.close()
            return
        self.on_response_complete()
        if self._early:  # later: many of them here would be so many calls in one another
            self.flow.pause_reading()
            self.loop.call_soon(self._take_early)
        else:
            self._busy = False

    def _take_early(self) -> None:
        self._busy = False
        data, self._early = b"".join(self._early), []
        if not self.transport.is_closing():
            self.flow.resume_reading()
            self.data_received(data)

    def is_idle(self) -> bool:
        return not self._busy and self._awaited is None and super().is_idle()

    def may_answer(self) -> bool:
        return self._awaited is not None or super().may_answer()

    def shutdown(self) -> None:
        """Called by uvicorn at the server's end."""
        if self._busy or self._awaited is not None:
            self._ending = True
        else:
            super().shutdown()


def remember(scope: Scope, begin: Begin) -> None:
    """Answer what comes with the head of this request by `begin` from now on, if that is all that it takes."""
    connection, head = scope.get(CONNECTION), scope.get(_HEAD)
    if head is None or not isinstance(connection, DirectProtocol) or scope["http_version"] != "1.1":
        return
    headers = scope["headers"]
    if head.count(b"\n") != len(headers) + 2:  # lines that the parser took otherwise
        return
    lengths = [name for name, _ in headers if name == b"content-length"]
    asks = any(name in _ASKING or (name == b"connection" and value.lower() != b"keep-alive") for name, value in headers)
    split = _split(head)
    if asks or len(lengths) != 1 or split is None:
        return
    known = connection.known
    if len(known) >= _MOST:
        del known[next(iter(known))]
    known[split[0]] = begin


def _split(head: bytes) -> tuple[bytes, int] | None:
    """A head without the number in Content-Length, and that number."""
    found = _LENGTH.search(head)
    return None if found is None else (head[: found.start(1)] + head[found.end(1) :], int(found[1]))


def direct_protocol(limits: Limits, on_refused: Callable[[str], None]) -> type[DirectProtocol]:
    """The protocol class of one server; `on_refused` gets the reason of each refusal that no route sees."""
    members = {"limits": limits, "on_refused": staticmethod(on_refused), "known": {}}
    return type("ServerProtocol", (DirectProtocol,), members)


@lru_cache(256)
def _head_of(content_type: bytes, length: int, others: Headers, *, close: bool) -> bytes:
    """The headers of a reply, but for the default ones, and the empty line."""
    lines = headers_of(content_type, length, others, close=close)
    return b"".join(b"%b: %b\r\n" % line for line in lines) + b"\r\n"
