"""Requests behind requests: in order, bounded however many they are, and each with its own body."""

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from threading import Thread
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from server_process import running_server
from socketless_server import Server, Transport, bodies_of, request, settled
from virtual_time import run_virtually
from vitx.core.bundle import Bundle
from vitx.core.sandbox import resident_gib
from vitx.serve.http.asgi import Reply, read_body, send_reply
from vitx.serve.http.head_cache import HeadCacheProtocol
from vitx.serve.limits import UNCOUNTED_BYTES


def run(test: Callable[[], Awaitable[None]]) -> None:
    run_virtually(test, "vitx.serve.http.connection")


def holding(server: Server) -> tuple[Callable[[Scope, Receive, Send], Awaitable[None]], asyncio.Event]:
    """The server's application, which waits for the event."""
    waiting = asyncio.Event()

    async def held(scope: Scope, receive: Receive, send: Send) -> None:
        await waiting.wait()
        await server.app(scope, receive, send)

    return held, waiting


def test_pipelined_requests_that_are_parsed_are_answered_in_order_and_reading_waits() -> None:
    async def test() -> None:
        server = Server()
        transport, protocol = server.connect()
        requests = [request(b"%d" % number, b"X-%d: 1" % number) for number in range(3)]
        protocol.data_received(b"".join(requests))
        assert transport.reading  # a client that hangs up must be noticed
        await settled()
        assert bodies_of(transport.written) == [b"0", b"1", b"2"]
        assert transport.reading
        protocol.connection_lost(None)

    run(test)


CHUNKED = b"POST /echo HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n%b\r\n0\r\n\r\n"


@pytest.mark.parametrize("chunked", [False, True])
def test_of_many_small_requests_in_one_segment_few_are_parsed_before_their_turn(chunked: bool) -> None:
    """All 7,000 were parsed before anybody else was answered, for a tenth of a second and more; each takes 5 KB."""

    async def test() -> None:
        server = Server(header_seconds=5)
        transport, protocol = server.connect()
        bodies = [b"%04d" % number for number in range(3000)]
        protocol.data_received(
            b"".join(CHUNKED % body if chunked else request(body, b"X-%b: 1" % body) for body in bodies)
        )
        for _ in range(20 * len(bodies)):
            assert len(protocol.pipeline) <= 3  # of 70 bytes each
            assert not (transport.reading and len(protocol._unparsed) > UNCOUNTED_BYTES)  # whatever asks for more
            await asyncio.sleep(0)
        assert bodies_of(transport.written) == bodies
        assert (transport.reading, protocol.is_idle()) == (True, True)
        assert server.refused == []

    run(test)


def test_what_waits_is_read_up_to_a_limit_and_in_order() -> None:
    async def test() -> None:
        server = Server()
        transport, protocol = server.connect()
        protocol.app, waiting = holding(server)
        data = b"".join(request(b"%05d" % number) for number in range(2000))
        sent = 0
        while transport.reading:  # as long as a socket would be read
            protocol.data_received(data[sent : sent + 1000])
            sent += 1000
        assert UNCOUNTED_BYTES < sent < UNCOUNTED_BYTES + 3000
        waiting.set()
        while sent < len(data):
            await asyncio.sleep(0)
            if transport.reading:
                protocol.data_received(data[sent : sent + 777])
                sent += 777
        for _ in range(20_000):
            await asyncio.sleep(0)
        assert bodies_of(transport.written) == [b"%05d" % number for number in range(2000)]
        assert protocol.is_idle()
        protocol.connection_lost(None)

    run(test)


def test_a_request_that_runs_ends_with_its_connection_also_before_one_that_was_parsed() -> None:
    async def test() -> None:
        server = Server()
        _, protocol = server.connect()
        gone: list[str] = []

        async def held(scope: Scope, receive: Receive, send: Send) -> None:
            await receive()
            gone.append((await receive())["type"])

        protocol.app = held
        protocol.data_received(request() + b"GET / HTTP/1.1\r\nHost: here\r\n\r\n")
        await settled()
        assert protocol.pipeline
        protocol.connection_lost(None)
        await settled()
        assert gone == ["http.disconnect"]

    run(test)


def test_what_waits_unparsed_is_not_slow_and_goes_with_its_connection() -> None:
    async def test() -> None:
        server = Server(header_seconds=1, body_seconds=1)
        transport, protocol = server.connect()
        protocol.app, waiting = holding(server)
        requests = [request(b"%05d" % number) for number in range(400)]
        protocol.data_received(b"".join(requests))  # the piece ends within a head or a body
        await asyncio.sleep(60)
        assert (transport.closed, server.refused) == (False, [])
        waiting.set()
        for _ in range(4000):
            await asyncio.sleep(0)
        assert len(bodies_of(transport.written)) == 400
        waiting.clear()
        protocol.data_received(b"".join(request(b"%05d" % number, b"X-Other: 1") for number in range(400)))
        assert protocol._unparsed
        protocol.connection_lost(ConnectionResetError())
        assert not protocol._unparsed
        waiting.set()
        await asyncio.sleep(60)
        assert server.refused == []

    run(test)


@pytest.mark.parametrize("sent", [b"", CHUNKED[: CHUNKED.index(b"4")] + b"fffff\r\n"], ids=["head", "chunks"])
def test_empty_lines_are_not_parsed_one_by_one(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        server, pieces = Server(), list[bytes]()
        _, protocol = server.connect()
        parse = protocol._parse

        def counted(data: bytes) -> None:
            pieces.append(data)
            parse(data)

        monkeypatch.setattr(protocol, "_parse", counted)
        protocol.data_received(sent + b"\r\n" * 2**17)
        assert len(pieces) <= 2**18 / 128
        protocol.connection_lost(None)
        await settled()

    run(test)


H2C = (b"Connection: Upgrade, HTTP2-Settings", b"HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA", b"upgrade: h2c")


@pytest.mark.parametrize(
    "sent", [request(b"one", *H2C), CHUNKED.replace(b"Host", b"\r\n".join((*H2C, b"Host"))) % b"four"]
)
@pytest.mark.parametrize("pieces", [1, 2, 4, 1000])
def test_a_request_that_asks_for_http_2_keeps_its_body(sent: bytes, pieces: int) -> None:
    """So do Java's HttpClient and `curl --http2`: the body was left out, or taken for another request."""

    async def test() -> None:
        server = Server()
        sent_twice = sent + request(b"upgrade: h2c\r\n\r\n\r\nupgrade: h2c")
        size = -(-len(sent_twice) // pieces)
        written = await server.ask(sent_twice[start : start + size] for start in range(0, len(sent_twice), size))
        first = b"one" if sent.endswith(b"one") else b"four"
        assert bodies_of(written) == server.app.parsed == [first, b"upgrade: h2c\r\n\r\n\r\nupgrade: h2c"]
        assert server.refused == []

    run(test)


def test_connect_offers_no_other_protocol() -> None:
    async def test() -> None:
        server = Server()
        written = await server.ask([b"CONNECT / HTTP/1.1\r\nHost: here\r\nUpgrade: h2c\r\n\r\n" + request(b"two")])
        assert (server.app.parsed, server.refused) == ([b""], ["bad_request"])
        assert written.endswith(b"connection: close\r\n\r\n")

    run(test)


@pytest.mark.parametrize("end", [b"", b"\r\n\r\n"])
def test_a_head_that_is_too_large_behind_a_request_is_refused_once_and_not_kept(end: bytes) -> None:
    async def test() -> None:
        server = Server(header_seconds=1)
        transport, protocol = server.connect()
        protocol.app, waiting = holding(server)
        protocol.data_received(request(b"first"))
        protocol.data_received(b"GET /echo HTTP/1.1\r\nHost: here\r\nX-Long: ")
        for _ in range(100):
            protocol.data_received(bytes(2**14).replace(b"\0", b"x"))
        assert (server.refused, protocol._bare) == (["too_large"], 2**15 + 40)
        protocol.data_received(end + request(b"second"))
        await asyncio.sleep(60)
        assert (transport.closed, server.refused) == (False, ["too_large"])
        waiting.set()
        await settled()
        assert bodies_of(transport.written) == [b"first"]
        assert b"connection: close\r\n" in transport.written
        assert transport.closed

    run(test)


GET = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /v2/models/tiny/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}"


@pytest.mark.parametrize("one", [GET, POST], ids=["get", "post"])
def test_a_client_that_sends_requests_without_end_is_read_no_faster_than_it_is_answered(
    tiny_bundle: Bundle, one: bytes
) -> None:
    """Each reply let in 64 KiB more: 27 MB in a second, and 7 MB every further one."""

    def read(client: socket.socket) -> None:
        with suppress(ConnectionResetError):
            while client.recv(2**16):
                pass

    with (
        running_server(tiny_bundle.path, "--allow-uncertified") as server,
        socket.create_connection((server.host, server.port)) as client,
    ):
        client.sendall(one)
        client.recv(2**16)
        before = resident_gib(server.process.pid)
        reader = Thread(target=read, args=(client,), daemon=True)
        reader.start()
        end = time.monotonic() + 3
        while time.monotonic() < end:
            client.send(one * 1000)
        assert resident_gib(server.process.pid) - before < 8 / 2**10
        client.shutdown(socket.SHUT_RDWR)
        reader.join()


class Full(Transport):
    """The socket of a client that takes nothing of a reply."""

    protocol: HeadCacheProtocol
    late = False

    def write(self, data: Any) -> None:
        self.late |= self.closed
        super().write(data)
        if len(self.written) > UNCOUNTED_BYTES and not self.protocol.flow.write_paused:
            self.protocol.pause_writing()

    def get_write_buffer_size(self) -> int:
        return 0 if self.closed else len(self.written)

    def take(self) -> None:
        self.written = b""
        self.protocol.resume_writing()

    def abort(self) -> None:
        super().abort()
        asyncio.get_running_loop().call_soon(self.protocol.connection_lost, None)


REPLY = bytes(3 * 2**16)
HEAD = 100  # bytes of a reply beside its body, at most


async def answer_much(scope: Scope, receive: Receive, send: Send) -> None:
    await read_body(scope, receive, 10**6)
    await send_reply(send, Reply(REPLY))


def full_connection(server: Server) -> tuple[Full, HeadCacheProtocol]:
    transport, protocol = server.connect()
    assert isinstance(transport, Full)
    transport.protocol, protocol.app = protocol, answer_much
    return transport, protocol


def test_replies_that_are_not_taken_count_and_one_too_many_ends_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """300 clients kept 10 MiB each, with --max-memory-mib 100."""
    monkeypatch.setattr("socketless_server.Transport", Full)

    async def test() -> None:
        server = Server(memory_bytes=2 * len(REPLY) + 3 * HEAD)
        (leaves, left), (takes, taken), (cut, third) = (full_connection(server) for _ in range(3))
        memory = third.memory
        for count, protocol in enumerate((left, taken), 1):
            protocol.data_received(request(bytes(90_000)))  # whose bytes no longer count
            await settled()
            assert count * len(REPLY) < memory.used < count * (len(REPLY) + HEAD)
        assert not server.refused
        third.data_received(request())
        await settled()
        assert (third.lost, server.refused, cut.late) == (True, ["memory"], False)
        assert 2 * len(REPLY) < memory.used < 2 * (len(REPLY) + HEAD)
        leaves.abort()
        await settled()
        assert len(REPLY) < memory.used < len(REPLY) + HEAD
        takes.take()
        assert memory.used == 0
        assert not takes.closed

    run(test)


def test_a_reply_that_has_all_the_memory_for_itself_is_never_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socketless_server.Transport", Full)

    async def test() -> None:
        server = Server(memory_bytes=len(REPLY) // 2)
        (transport, protocol), (_, other) = (full_connection(server) for _ in range(2))
        protocol.data_received(request(bytes(90_000)))
        await settled()
        assert (protocol.lost, server.refused) == (False, [])
        other.data_received(request())
        await settled()
        assert (other.lost, server.refused) == (True, ["memory"])
        transport.take()
        assert protocol.memory.used == 0

    run(test)


@pytest.mark.parametrize("at_once", [True, False])
def test_no_request_begins_behind_a_reply_that_is_not_taken(monkeypatch: pytest.MonkeyPatch, at_once: bool) -> None:
    monkeypatch.setattr("socketless_server.Transport", Full)

    async def test() -> None:
        server = Server()
        transport, protocol = full_connection(server)
        begun = 0

        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            nonlocal begun
            begun += 1
            await answer_much(scope, receive, send)

        protocol.app = counted
        protocol.data_received(3 * request() if at_once else request())
        for count in (1, 2, 3):
            await settled()
            if not at_once and count < 3:
                protocol.data_received(request())  # of one who waits for nothing
                await settled()
            assert begun == count
            assert len(REPLY) < len(transport.written) < len(REPLY) + HEAD
            transport.take()
        await settled()
        assert (begun, protocol.is_idle(), protocol.memory.used, server.refused) == (3, True, 0, [])

    run(test)
