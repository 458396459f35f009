"""Requests whose head is known: answered as if parsed, in any pieces, in order; and what is not remembered."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from vitx.serve.http.asgi import Reply, read_body, send_reply
from vitx.serve.http.head_cache import DirectProtocol, direct_protocol, remember
from vitx.serve.limits import Limits
from vitx.serve.process.server import _uvicorn_config
from vitx.serve.security import Security

BODY = b"a" * 40


def request(body: bytes = BODY, *headers: bytes, version: bytes = b"1.1", length: int | None = None) -> bytes:
    length = len(body) if length is None else length
    lines = [b"POST /echo HTTP/" + version, b"Host: here", *headers, b"Content-Length: %d" % length]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


class Transport(asyncio.Transport):
    """A client that keeps what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False
        self.reading = True

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name in ("peername", "sockname") else default


class Echo:
    """Answers with the body, `parsed` or `direct`; a direct request with a b"h" in front is held."""

    def __init__(self) -> None:
        self.parsed: list[bytes] = []
        self.direct: list[bytes] = []
        self.held: list[Callable[[], None]] = []
        self.gone: list[bytes] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await read_body(scope, receive, 10**6)
        self.parsed.append(body)
        remember(scope, self.begin)
        await send_reply(send, Reply(body, content_type=b"text/plain"))

    def begin(self, connection: DirectProtocol, body: bytes) -> Callable[[], None] | None:
        self.direct.append(body)

        def answer() -> None:
            connection.reply(Reply(body, content_type=b"text/plain"), close=False)

        if body.startswith(b"h"):
            self.held.append(answer)
            return lambda: self.gone.append(body)
        answer()
        return None


class Server:
    """Connections of one server, without sockets."""

    def __init__(self, **limits: Any) -> None:
        self.app = Echo()
        self.refused: list[str] = []
        self._class = direct_protocol(Limits(**limits), self.refused.append)
        self._config, self._state = _uvicorn_config(self.app, self._class, Security()), ServerState()
        self._state.default_headers = [(b"date", b"today")]
        self._config.load()

    def connect(self) -> tuple[Transport, DirectProtocol]:
        transport = Transport()
        loop = asyncio.get_running_loop()
        protocol = self._class(config=self._config, server_state=self._state, app_state={}, _loop=loop)
        protocol.connection_made(transport)
        return transport, protocol

    async def ask(self, pieces: Iterable[bytes]) -> bytes:
        """The reply, or replies, on a connection of their own."""
        transport, protocol = self.connect()
        for piece in pieces:
            protocol.data_received(piece)
        await settled()
        protocol.connection_lost(None)
        return transport.written


def bodies_of(told: bytes) -> list[bytes]:
    found = []
    while told:
        head, _, rest = told.partition(b"\r\n\r\n")
        length = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
        found.append(rest[:length])
        told = rest[length:]
    return found


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test(), 20)

    asyncio.run(bounded())


def test_second_request_is_answered_alike_without_being_parsed() -> None:
    async def test() -> None:
        server = Server()
        first = await server.ask([request()])
        assert server.app.parsed == [BODY]
        assert await server.ask([request()]) == first
        assert first.startswith(b"HTTP/1.1 200 OK\r\ndate: today\r\n")
        assert first.endswith(BODY)
        other = b"b" * len(BODY)
        assert await server.ask([request(other)]) == first[: -len(BODY)] + other
        assert (len(server.app.parsed), server.app.direct) == (1, [BODY, other])

    run(test)


def test_only_the_length_of_a_known_head_may_be_another() -> None:
    async def test() -> None:
        server = Server(body_bytes=1000)
        await server.ask([request()])
        bodies = [b"", b"b", b"c" * 1000]
        told = await server.ask([b"".join(map(request, bodies))])
        assert (bodies_of(told), server.app.direct) == (bodies, bodies)
        for other in (request(b"d" * 1001), request(b"e", b"X: 1"), request(b"f").replace(b"Length: ", b"Length:  ")):
            await server.ask([other])
        assert [body[:1] for body in server.app.parsed] == [b"a", b"d", b"e", b"f"]

    run(test)


@pytest.mark.parametrize("size", [1, 7, 60, len(request()) - 1])
def test_pieces_of_any_size_give_the_same_answer(size: int) -> None:
    async def test() -> None:
        server = Server()
        whole = await server.ask([request()])
        data = request()
        assert await server.ask(data[start : start + size] for start in range(0, len(data), size)) == whole

    run(test)


def test_body_after_a_known_head_is_awaited() -> None:
    async def test() -> None:
        server = Server()
        whole = await server.ask([request()])
        head = len(request()) - len(BODY)
        assert await server.ask([request()[:head], BODY[:10], BODY[10:]]) == whole
        assert server.app.direct == [BODY]

    run(test)


def test_pipelined_requests_are_answered_in_order() -> None:
    async def test() -> None:
        server = Server()
        await server.ask([request()])
        bodies = [bytes([97 + number]) * len(BODY) for number in range(3)]
        unknown = request(b"unknown", b"X-Other: 1")
        sent = b"".join(map(request, bodies)) + unknown + request(bodies[0])
        for pieces in ([sent], [sent[:150], sent[150:]], [bytes([byte]) for byte in sent]):
            told = await server.ask(pieces)
            assert bodies_of(told) == [*bodies, b"unknown", bodies[0]]

    run(test)


def test_hundreds_of_pipelined_requests_do_not_nest() -> None:
    async def test() -> None:
        server = Server()
        await server.ask([request()])
        transport, protocol = server.connect()
        protocol.data_received(request() * 3000)
        for _ in range(200):
            await settled()
        assert transport.written.count(b"HTTP/1.1 200 OK") == 3000
        protocol.connection_lost(None)

    run(test)


def test_what_comes_meanwhile_waits() -> None:
    async def test() -> None:
        server = Server()
        await server.ask([request()])
        transport, protocol = server.connect()
        held = b"h" * len(BODY)
        protocol.data_received(request(held))
        protocol.data_received(request()[:20])
        assert (transport.written, transport.reading) == (b"", False)
        assert not protocol.is_idle()
        server.app.held.pop()()
        protocol.data_received(request()[20:])
        await settled()
        assert transport.written.count(b"200 OK") == 2
        assert transport.written.endswith(BODY)
        assert transport.reading
        assert protocol.is_idle()
        protocol.connection_lost(None)

    run(test)


def test_client_that_hangs_up_is_noticed() -> None:
    async def test() -> None:
        server = Server()
        await server.ask([request()])
        held = b"h" * len(BODY)
        transport, protocol = server.connect()
        protocol.data_received(request(held))
        transport.close()
        protocol.connection_lost(ConnectionResetError())
        assert server.app.gone == [held]
        server.app.held.pop()()  # the answer that comes after all
        assert transport.written == b""
        _, protocol = server.connect()
        protocol.data_received(request()[:-1])  # in the middle of its body
        protocol.connection_lost(ConnectionResetError())
        assert len(server.app.direct) == 1

    run(test)


def test_slow_body_is_refused_once() -> None:
    async def test() -> None:
        server = Server(body_seconds=0.02, body_rate=10**9)
        await server.ask([request()])
        transport, protocol = server.connect()
        protocol.data_received(request()[:-1])
        await asyncio.sleep(0.2)
        assert transport.written.startswith(b"HTTP/1.1 408")
        assert transport.closed
        assert server.refused == ["slow_client"]
        protocol.connection_lost(None)

    run(test)


def test_end_of_the_server_waits_for_the_answer() -> None:
    async def test() -> None:
        server = Server()
        await server.ask([request()])
        idle, waits = server.connect(), server.connect()
        waits[1].data_received(request(b"h" * len(BODY)))
        for _, protocol in (idle, waits):
            protocol.shutdown()
        assert (idle[0].closed, waits[0].closed) == (True, False)
        server.app.held.pop()()
        assert b"connection: close\r\n" in waits[0].written
        assert waits[0].closed
        for transport, protocol in (idle, waits):
            protocol.connection_lost(None)
            assert transport.closed

    run(test)


@pytest.mark.parametrize(
    "sent",
    [
        request(BODY, b"Content-Encoding: identity"),
        request(BODY, b"Expect: 100-continue"),
        request(BODY, b"Connection: close"),
        request(BODY, version=b"1.0"),
        b"\r\n" + request(),  # an empty line in front, which the parser lets pass
        request(BODY, b"Long: " + b"x" * 3000),
        b"POST /echo HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n",
    ],
)
def test_what_asks_for_more_is_parsed_every_time(sent: bytes) -> None:
    async def test() -> None:
        server = Server()
        told = [await server.ask([sent]) for _ in range(2)]
        assert told[0] == told[1]
        assert b"200 OK" in told[0]
        assert (len(server.app.parsed), server.app.direct) == (2, [])

    run(test)


def test_second_request_of_a_pipeline_does_not_lend_its_head_to_the_first() -> None:
    async def test() -> None:
        server = Server()
        first, second = request(b"one"), request(b"three")
        await server.ask([first + second])
        assert bodies_of(await server.ask([first])) == [b"one"]
        assert server.app.direct == [b"one"]

    run(test)


def test_heads_that_are_remembered_are_bounded() -> None:
    async def test() -> None:
        server = Server()
        _, protocol = server.connect()
        for number in range(1100):
            protocol.data_received(request(BODY, b"X-Request-Id: %d" % number))
            await settled()
        assert len(protocol.known) == 1024
        protocol.connection_lost(None)

    run(test)
