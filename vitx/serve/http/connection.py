"""HTTP/1.1 on one connection: uvicorn's httptools protocol with what it lacks, limits on slow, large and many clients.

A request that arrives whole in one piece sets no timer, and the one that ends an idle connection is not set anew with
each reply: it looks at the clock when it fires. A request that comes in pieces has `header_seconds` for its head, and
for its body `body_seconds` and a second more for every `body_rate` bytes, as Apache's mod_reqtimeout counts: slow
networks are served, and a client that trickles holds its place for a limited time.
"""

import asyncio
import json
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import httptools
from starlette.types import Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from vitx.serve.errors import RequestError, unavailable
from vitx.serve.http.asgi import CONNECTION, error_reply, send_reply
from vitx.serve.http.cycle import Cycle
from vitx.serve.limits import Limits

# What a connection beyond the limit has to send its request in, to be told that it is one too many.
_REFUSED_SECONDS = 1.0
_LOOK_AGAIN_SECONDS = 0.1  # at a body that is slow, but not too slow yet


class HttpProtocol(HttpToolsProtocol):
    """One connection. It is in the scope of its requests, for those who wait while the client may hang up."""

    limits = Limits()
    on_refused: Callable[[str], None] = staticmethod(lambda reason: None)

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.lost = False
        self.slow = False
        self.on_lost: Callable[[], object] | None = None
        self._surplus = False
        self._in_head = True  # between two requests too
        self._in_body = False
        self._received = 0  # bytes of the head, then of the body
        self._since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._replied = 0.0  # when the last reply was written

    # asyncio's protocols are called with transports of any kind, which its stubs say; TCP's is the only one here.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._surplus = len(self.connections) > self.limits.connections
        self._start_timer(_REFUSED_SECONDS if self._surplus else self.limits.header_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
        self.lost = True
        super().connection_lost(exc)
        if self.on_lost is not None:
            self.on_lost()

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._received += len(data)
        super().data_received(data)
        if self._in_head:
            if self._received > self.limits.header_bytes:
                self._refuse(_head_too_large(self.limits))
            elif self._received and self._timer is None:
                self._start_timer(self.limits.header_seconds)
        elif self._in_body and self._timer is None:
            self._start_timer(self.limits.body_seconds)

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls when the parser gives up; it would answer in plain text."""
        self._refuse(RequestError("the request is not valid HTTP/1.1"))

    def on_headers_complete(self) -> None:
        """Begin to answer, behind what the connection has asked before. No WebSockets: an upgrade is not made."""
        self._stop_timer()
        self._in_head, self._in_body, self._received = False, True, 0
        version = self._describe()
        previous = self.cycle
        self.cycle = Cycle(
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            keep_alive=version != "1.0" and self.parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        if previous is None or previous.response_complete:
            self._start_asgi_task(self.cycle, self._answering())
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self._answering()))

    def _describe(self) -> str:
        """Write into the scope what the request line says; return the version of HTTP."""
        scope: Any = self.scope  # its type knows no key of ours
        version: str = self.parser.get_http_version()
        url = httptools.parse_url(self.url)
        path = url.path.decode("ascii")
        scope["method"] = self.parser.get_method().decode("ascii")
        scope["http_version"] = version
        scope["path"] = unquote(path) if "%" in path else path
        scope["raw_path"] = url.path
        scope["query_string"] = url.query or b""
        scope[CONNECTION] = self
        return version

    def _answering(self) -> Any:
        """The application for this request, or what refuses it."""
        if self._surplus:
            return _refusing(unavailable(f"{self.limits.connections} connections are open", "connections"), self)
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > self.limits.header_bytes:
            return _refusing(_head_too_large(self.limits), self)
        return self.app

    def on_response_complete(self) -> None:
        """Begin with the next request of the connection if one waits, else with its idle time."""
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self._replied = time.monotonic()
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self.timeout_keep_alive_task is None:
            self._wait_for_request(self.timeout_keep_alive)

    def _unset_keepalive_if_required(self) -> None:
        """Called by uvicorn when data comes: `timeout_keep_alive_handler` finds that out by itself."""

    def timeout_keep_alive_handler(self) -> None:
        """End a connection on which nothing was asked for so long, else look again when that could be."""
        if self.transport.is_closing():
            return
        left = float(self.timeout_keep_alive)
        if self.is_idle():
            left += self._replied - time.monotonic()
        if left > 0:
            self._wait_for_request(left)
        else:
            self.transport.close()

    def is_idle(self) -> bool:
        """Whether nothing was asked that is not answered, nor begun to be asked."""
        return (self.cycle is None or self.cycle.response_complete) and not self._received

    def may_answer(self) -> bool:
        """Whether what is being read has had no answer yet."""
        return self._in_head or not self.cycle.response_started

    def _wait_for_request(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

    def on_body(self, body: bytes) -> None:
        self._received += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._stop_timer()
        self._in_head, self._in_body, self._received = True, False, 0
        super().on_message_complete()
        if not self.pipeline:  # a large body paused it: now there is nothing to wait for but the client's end
            self.flow.resume_reading()

    def _start_timer(self, seconds: float) -> None:
        self._since = time.monotonic()
        self._timer = self.loop.call_later(seconds, self._on_timer)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        """The head or the body takes too long, unless enough of the body came meanwhile or it is we who do not read."""
        self._timer = None
        if self.transport.is_closing():
            return
        if self._in_body:
            allowed = self.limits.body_seconds + self._received / self.limits.body_rate
            left = self._since + allowed - time.monotonic()
            if self.flow.read_paused or left > 0:
                self._timer = self.loop.call_later(max(left, _LOOK_AGAIN_SECONDS), self._on_timer)
                return
        if self._in_head and not self._received:
            self.transport.close()  # nothing was asked for, so nothing is answered
            return
        what = "body" if self._in_body else "headers"
        self._refuse(RequestError(f"the request's {what} took too long", status=408, reason="slow_client"))

    def _refuse(self, error: RequestError) -> None:
        """Answer from here, unless a reply is under way already, and end the connection."""
        if self.transport.is_closing():
            return
        self.slow = True
        self.on_refused(error.reason)
        if self.may_answer():
            self.transport.write(_plain_reply(error))
        self.transport.close()


def _refusing(error: RequestError, connection: HttpProtocol) -> Any:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        connection.on_refused(error.reason)
        await send_reply(send, error_reply(error), close=True)

    return app


def _head_too_large(limits: Limits) -> RequestError:
    return RequestError(f"request headers of more than {limits.header_bytes} bytes", status=431, reason="too_large")


def _plain_reply(error: RequestError) -> bytes:
    body = json.dumps({"error": str(error)}).encode()
    head = (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body
