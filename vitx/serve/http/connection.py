"""HTTP/1.1 on one connection: uvicorn's httptools protocol plus limits on slow clients, large heads and connections.

For speed, a request that arrives in one piece sets no timer, and the keep-alive timer compares the clock when it fires.
"""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from vitx.serve.errors import RequestError, unavailable
from vitx.serve.http.asgi import CONNECTION, error_reply, head_of, header, send_reply
from vitx.serve.limits import UNCOUNTED_BYTES, Limits, MemoryBudget

_SURPLUS_SECONDS = 1.0  # a connection beyond the limit has this long to send a request and get its 503
_LAST_SECONDS = 1.0  # that a client has to take what is left of its last reply when the server ends
_RECHECK_SECONDS = 0.1  # for a body that is slow, but not yet too slow, and for what the server does not read
_LEAST_BYTES, _PIECE_BYTES = 128, 16 * 2**10  # parsed at once
_WRITTEN_BYTES = 2**16  # written at once
END_OF_HEAD = b"\r\n\r\n"


class _Flow(FlowControl):
    """`held`: something waits unparsed, and nothing is read behind it, whoever asks for more."""

    held = False

    def resume_reading(self) -> None:
        if not self.held:
            super().resume_reading()


class HttpProtocol(HttpToolsProtocol):
    """One connection. It is in the scope of its requests (CONNECTION).

    lost: the client hung up. slow: this class has refused the request and counted it. on_lost: called then.
    """

    flow: _Flow

    def __init__(
        self, limits: Limits, memory: MemoryBudget, on_refused: Callable[[str], None], *args: Any, **options: Any
    ) -> None:
        """`memory`: other protocols may share it. `on_refused` is called with the reason when it refuses a request."""
        super().__init__(*args, **options)
        self.limits, self.memory, self.on_refused = limits, memory, on_refused
        self.lost = self.slow = False
        self.on_lost: Callable[[], object] | None = None
        self._surplus = False  # a connection beyond the limit
        self._in_head = True  # else in a body; also between two requests
        self._begun = False  # whether the parser has seen a part of the head
        self._refused = False  # what is behind the requests that get their replies: it is dropped
        self._ending = False  # the body of a request that is answered comes to its end
        self._unparsed = b""  # behind a request that waits for another's reply
        self._received = self._bare = 0  # bytes of the body; and of what is none: of a head, around chunks, of trailers
        self._length: int | None = None  # of the body, if it says so
        self._incoming: tuple[int, Any] | None = None  # of a request with a cached head, see `HeadCacheProtocol`
        self._since = 0.0  # when the timer was set, time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._replied = 0.0  # when the last reply was written, time.monotonic()
        self._unread: asyncio.TimerHandle | None = None  # runs while the client does not take what was written
        self._reserved = self._untaken = 0  # bytes of the budget: for the body, and of replies that nobody takes
        self._reading: asyncio.Future[Any] | None = None  # has the body until it is done
        self._answered: Any = None  # uvicorn's cycle of the request that runs; `cycle` may be one behind it

    # The stubs allow any kind of transport; here it is always TCP's.
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport)
        if self.scheme == "https":
            transport.set_write_buffer_limits(_WRITTEN_BYTES, 0)  # as without TLS
        self._surplus = len(self.connections) > self.limits.connections
        self._start_timer(_SURPLUS_SECONDS if self._surplus else self.limits.header_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_unread()
        self._release()
        super()._unset_keepalive_if_required()
        self.lost, self._unparsed, self.cycle = True, b"", self._answered or self.cycle
        super().connection_lost(exc)
        if self.on_lost is not None:
            self.on_lost()
        # Circles of thirty objects, which would wait for the garbage collector by the hundred.
        self.on_lost = self.parser = self.cycle = self.scope = self._answered = None  # type: ignore[assignment]

    def reserve(self, size: int) -> None:
        """Count bytes of the request's body until it is answered.

        Raises RequestError 503 if there are too many, ClientDisconnect after the client hung up: none are given back.
        """
        if self.lost:
            raise ClientDisconnect
        self.memory.take(size)
        self._reserved += size

    def hold(self, reading: "asyncio.Future[Any]") -> None:
        """Count the request's body until `reading` is done, even if the client hangs up: a thread cannot be stopped."""
        self._reading = reading

    def _release(self) -> None:
        """Give back what was reserved, at once or when the body is no longer read."""
        size, reading = self._reserved, self._reading
        self._reserved, self._reading = 0, None
        if reading is None or reading.done():
            self.memory.give(size)
        else:
            reading.add_done_callback(partial(self._give_back, size))

    def _give_back(self, size: int, reading: "asyncio.Future[Any]") -> None:
        if not reading.cancelled() and (failure := reading.exception()) is not None:
            failure.__traceback__ = None  # a circle with its frames, which have the body, is freed late
        self.memory.give(size)

    def pause_writing(self) -> None:
        """Called by the transport when the client takes too little: give it its time, then cut the connection."""
        super().pause_writing()
        self._limit_writing()

    def resume_writing(self) -> None:
        """Called by the transport when little is left to write; one that is closing waits until all of it is taken."""
        super().resume_writing()
        self._stop_unread()
        if self._answered is None or self._answered.response_complete or self.transport.is_closing():
            self.on_response_complete()  # again: it starts nothing before

    def _stop_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
            self.memory.give(self._untaken)

    def _limit_writing(self) -> None:
        unread = self.transport.get_write_buffer_size()
        if self._unread is None and (unread or self.transport.is_closing()):  # TLS waits for the client to close too
            seconds = self.limits.write_seconds + unread / self.limits.body_rate
            self._unread = self.loop.call_later(seconds, self._cut_unread)
            self._untaken, self.memory.used = unread, self.memory.used + unread

    def _cut_unread(self, reason: str = "slow_client") -> None:
        if self.transport.get_write_buffer_size():
            self.slow = True
            self.on_refused(reason)
        self.transport.abort()

    def write(self, data: bytes) -> None:
        """In pieces: of one, however large, uvloop's TLS says at once that it is taken."""
        begun = self._unread
        for start in range(0, len(data), _WRITTEN_BYTES):
            self.transport.write(memoryview(data)[start : start + _WRITTEN_BYTES])
        if self._unread is not begun:  # with the first pieces, whose time is shorter
            self._stop_unread()
            others = self.memory.used - self._reserved  # the body of what is answered is no longer needed
            self._limit_writing()
            if others and not self.memory.fits(-self._reserved):  # alone no reply is too large
                self._cut_unread("memory")

    def shutdown(self) -> None:
        """Called by uvicorn when the server ends, which would wait 2 s for TLS clients that do not close too."""
        super().shutdown()
        if self.transport.is_closing():
            self.loop.call_later(_LAST_SECONDS, self.transport.abort)

    def _close(self) -> None:
        """Close when everything is written, or when the time for that is over."""
        self.transport.close()
        self._limit_writing()

    def _end(self) -> None:
        """Close behind the reply. What the client still sends of the body is dropped: else it might lose the reply."""
        self._ending = not (self._in_head or self.pipeline or self.expect_100_continue)
        if not self._ending:
            self._close()
        elif self._surplus:  # it has a second for that
            self.loop.call_later(_SURPLUS_SECONDS, self._close)

    def data_received(self, data: bytes) -> None:
        """Parse what came, a piece at a time, until a request waits for another's reply; 14,000 fit in a segment."""
        data, self._unparsed = self._unparsed + data, b""
        place = 0
        while place < len(data) and not (self.pipeline or self._refused or self.transport.is_closing()):
            start, place = place, self._end_of_piece(data, place)
            self._parse(data[start:place])
        self._wait_with(data[place:])

    def _end_of_piece(self, data: bytes, start: int) -> int:
        """Where the head or body ends, or near it; one in chunks at an empty line: so few requests more begin."""
        end = start + _PIECE_BYTES
        if self._in_head or self._length is None:
            found = data.find(END_OF_HEAD, start + _LEAST_BYTES, end)
            return end if found < 0 else found + len(END_OF_HEAD)
        return min(end, start + max(1, self._length - self._received))

    def _wait_with(self, data: bytes) -> None:
        """Keep what came until the next reply. Behind much nothing is read, and then no client is seen to hang up."""
        if data and not (self._refused or self.transport.is_closing()):
            self._unparsed += data
            if len(self._unparsed) > UNCOUNTED_BYTES:
                self.flow.pause_reading()
                self.flow.held = True

    def _go_on(self) -> None:
        """Take what waited. Not at once with the reply: hundreds of pipelined requests would recurse as deep."""
        data, self._unparsed = self._unparsed, b""
        self.flow.held = False
        if not self.transport.is_closing():
            self.flow.resume_reading()
            self.data_received(data)

    def _parse(self, data: bytes) -> None:
        self._bare += len(data)
        self._feed(data)
        if self._bare > self.limits.header_bytes:
            self._refuse(_head_too_large(self.limits))
        elif self._timer is None and (self._begun or self._bare or not self._in_head):
            self._start_timer(self.limits.header_seconds if self._in_head else self.limits.body_seconds)

    def _feed(self, data: bytes) -> None:
        """Parse. Java's HttpClient and `curl --http2` ask for HTTP/2 first: httptools leaves out the bodies then."""
        try:
            self.parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            method, version = self.parser.get_method(), self.parser.get_http_version().encode()
            if not isinstance(error, HttpParserUpgrade) or method == b"CONNECT":
                self._refuse(RequestError("the request is not valid HTTP/1.1"))
                return
            lines = [b"%b: %b" % (name, value) for name, value in self.headers if name != b"upgrade"]
            head = b"\r\n".join([b"%b %b HTTP/%b" % (method, self.url, version), *lines]) + END_OF_HEAD
            self.parser = HttpRequestParser(self)
            self._feed(head + data[error.args[0] :])

    def on_message_begin(self) -> None:
        """Also for a head that began in one piece with the request before it, of which nothing is counted."""
        self._begun = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Start the application, or queue it behind earlier requests."""
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            return  # `_feed` parses it again, without that
        self._stop_timer()
        scope: Any = self.scope  # its type does not allow our key
        scope[CONNECTION] = self
        if self._surplus:
            error = unavailable(f"{self.limits.connections} connections are open", "connections")
            self.app = _refusing(error, self)  # for good: the reply ends the connection
        elif len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > self.limits.header_bytes:
            self.app = _refusing(_head_too_large(self.limits), self)
        length = header(scope, b"content-length")
        self._length = None if length is None else int(length)  # the parser has checked it
        self.expect_100_continue &= self.parser.get_http_version() != "1.0"
        super().on_headers_complete()  # raises for a URL that is none, in the head still
        self.headers = []  # for trailers, which are no headers: whatever checks those has not seen them
        self._in_head, self._begun, self._received, self._bare = False, False, 0, 0
        self.flow.resume_reading()  # uvicorn would not notice that a client hangs up with a request behind another

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        if self.flow.write_paused:  # its reply would wait uncounted behind the one before
            self.pipeline.append((cycle, app))
            return
        self._answered = cycle
        cycle.transport = SimpleNamespace(write=self.write, is_closing=self.transport.is_closing, close=self._end)
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """Start the next pipelined request, or the keep-alive timer."""
        self._release()
        if self.transport.is_closing():
            self._limit_writing()
            return
        self._replied = time.monotonic()
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif not self._unparsed and self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_handler()
        if self._unparsed and not self.pipeline:
            self.loop.call_soon(self._go_on)

    def _unset_keepalive_if_required(self) -> None:
        """Called by uvicorn when data comes. Nothing to do: `timeout_keep_alive_handler` checks for activity itself."""

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection that was idle for the whole time, else set the timer again."""
        if self.transport.is_closing():
            return
        left = self.limits.idle_seconds
        if self.is_idle():
            left += self._replied - time.monotonic()
        if left > 0:
            self.timeout_keep_alive_task = self.loop.call_later(left, self.timeout_keep_alive_handler)
        else:
            self._close()

    def is_idle(self) -> bool:
        """Whether every request is answered and no part of another has arrived."""
        answered = self.cycle is None or self.cycle.response_complete
        return answered and not (self._received or self._bare or self._begun or self._unparsed)

    def on_body(self, body: bytes) -> None:
        self._received, self._bare = self._received + len(body), 0
        super().on_body(body)
        if self.cycle.response_complete and self._received > 2 * self.limits.body_bytes:
            self._close()  # it was answered, and might never end

    def on_message_complete(self) -> None:
        if self._in_head:
            return
        self._stop_timer()
        self._in_head, self._received, self._bare = True, 0, 0
        super().on_message_complete()
        if {b"connection", b"proxy-connection"} & dict(self.headers).keys():  # trailers: the parser stops if they close
            self.cycle.keep_alive = False
        if self._ending or (self.cycle.response_complete and not self.cycle.keep_alive):
            self._close()
        elif not self.pipeline:  # a large body had paused it; read on, to notice when the client hangs up
            self.flow.resume_reading()

    def _start_timer(self, seconds: float) -> None:
        self._since = time.monotonic()
        self._timer = self.loop.call_later(seconds, self._on_timer)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        """Refuse a head or body that takes too long; a body gets more with its size, and while reading is paused."""
        self._timer = None
        if self.transport.is_closing():
            return
        left, waits = 0.0, bool(self._unparsed or self.pipeline)
        if not self._in_head:
            received = min(self._received, self.limits.body_bytes)
            left = self._since + self.limits.body_seconds + received / self.limits.body_rate - time.monotonic()
            waits = waits or self.flow.read_paused
        if waits or left > 0:
            self._timer = self.loop.call_later(max(left, _RECHECK_SECONDS), self._on_timer)
        elif self._in_head and not (self._bare or self._begun):
            self.transport.close()  # no request, so no answer
        else:
            what = "headers" if self._in_head else "body"
            self._refuse(RequestError(f"the request's {what} took too long", status=408, reason="slow_client"))

    def _refuse(self, error: RequestError) -> None:
        """Answer with the error, unless a reply has started or is due, and close the connection."""
        if self.transport.is_closing():
            return
        self.on_refused(error.reason)
        if self._in_head and self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()
            self._refused, self.cycle.keep_alive = True, False  # the reply that is due ends the connection
            return
        self.slow = True
        if self._in_head or self._incoming is not None or not self.cycle.response_started:
            reply = error_reply(error)
            head = head_of(reply.content_type, len(reply.body), reply.headers, close=True)
            self.transport.write(STATUS_LINE[reply.status] + head + reply.body)
        self._close()


def _refusing(error: RequestError, connection: HttpProtocol) -> Any:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        connection.on_refused(error.reason)
        await send_reply(send, error_reply(error), close=True)

    return app


def _head_too_large(limits: Limits) -> RequestError:
    return RequestError(f"request headers of more than {limits.header_bytes} bytes", status=431, reason="too_large")
