"""Connections of one server without sockets: what they write, when they close, and what the application was given."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from vitx.serve.http.asgi import Reply, read_body, send_reply
from vitx.serve.http.head_cache import HeadCacheProtocol, cache_head
from vitx.serve.limits import MemoryBudget
from vitx.serve.options import ServeOptions
from vitx.serve.process.server import _uvicorn_config

BODY = b"a" * 40


def request(body: bytes = BODY, *headers: bytes, version: bytes = b"1.1", length: int | None = None) -> bytes:
    length = len(body) if length is None else length
    lines = [b"POST /echo HTTP/" + version, b"Host: here", *headers, b"Content-Length: %d" % length]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


class Transport(asyncio.Transport):
    """Records what the server writes."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False
        self.reading = True

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name in ("peername", "sockname") else default


class Echo:
    """Answers with the body, and records it as `parsed` or `cached`. A cached body that starts with b"h" is held."""

    def __init__(self) -> None:
        self.parsed: list[bytes] = []
        self.cached: list[bytes] = []
        self.held: list[Callable[[], None]] = []
        self.cancelled: list[bytes] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(scope, receive, 10**6)
        self.parsed.append(body)
        cache_head(scope, self.begin)
        await send_reply(send, Reply(body, content_type=b"text/plain"))

    def begin(self, connection: HeadCacheProtocol) -> tuple[Callable[[bytes], None], Callable[[], None]]:
        bodies: list[bytes] = []

        def start(body: bytes) -> None:
            bodies.append(body)
            self.start(connection, body)

        return start, lambda: self.cancelled.append(b"".join(bodies))

    def start(self, connection: HeadCacheProtocol, body: bytes) -> None:
        self.cached.append(body)

        def answer() -> None:
            connection.reply(Reply(body, content_type=b"text/plain"), close=False)

        if body.startswith(b"h"):
            self.held.append(answer)
        else:
            answer()


class Server:
    """Connections of one server, without sockets."""

    def __init__(self, **limits: Any) -> None:
        self.app = Echo()
        self.refused: list[str] = []
        allowed = replace(ServeOptions().limits, **limits)
        self._class = partial(HeadCacheProtocol, {}, allowed, MemoryBudget(allowed.memory_bytes), self.refused.append)
        self._config, self._state = _uvicorn_config(self.app), ServerState()
        self._state.default_headers = [(b"date", b"today")]
        self._config.load()

    def connect(self) -> tuple[Transport, HeadCacheProtocol]:
        transport = Transport()
        loop = asyncio.get_running_loop()
        protocol = self._class(config=self._config, server_state=self._state, app_state={}, _loop=loop)
        protocol.connection_made(transport)
        return transport, protocol

    async def ask(self, pieces: Iterable[bytes]) -> bytes:
        """Send the pieces on a new connection; return what it writes."""
        transport, protocol = self.connect()
        for piece in pieces:
            protocol.data_received(piece)
        await settled()
        protocol.connection_lost(None)
        return transport.written


def bodies_of(replies: bytes) -> list[bytes]:
    found = []
    while replies:
        head, _, rest = replies.partition(b"\r\n\r\n")
        length = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
        found.append(rest[:length])
        replies = rest[length:]
    return found


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)
