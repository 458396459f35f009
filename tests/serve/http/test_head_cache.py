"""The head cache: same answers as from the parser, in any pieces, in order; and which heads are not cached."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from socketless_server import BODY, Server, bodies_of, request, settled
from virtual_time import run_virtually
from vitx.serve.http.asgi import Reply


def run(test: Callable[[], Awaitable[None]]) -> None:
    run_virtually(test, "vitx.serve.http.connection")


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
        assert (len(server.app.parsed), server.app.cached) == (1, [BODY, other])
        assert server.app.cancelled == []  # although each client left after its reply

    run(test)


def test_only_the_length_of_a_cached_head_may_differ() -> None:
    async def test() -> None:
        server = Server(body_bytes=1000)
        await server.ask([request()])
        bodies = [b"", b"b", b"c" * 1000]
        replies = await server.ask([b"".join(map(request, bodies))])
        assert (bodies_of(replies), server.app.cached) == (bodies, bodies)
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


def test_body_after_a_cached_head_is_awaited() -> None:
    async def test() -> None:
        server = Server()
        whole = await server.ask([request()])
        head = len(request()) - len(BODY)
        assert await server.ask([request()[:head], BODY[:10], BODY[10:]]) == whole
        assert await server.ask([request()[:head], BODY[:10], BODY[10:12], BODY[12:20], BODY[20:]]) == whole
        assert server.app.cached == [BODY, BODY]

    run(test)


@pytest.mark.parametrize(("size", "counted"), [(2**16, 0), (2**16 + 1, 2**16 + 1)])
def test_a_large_body_counts_from_its_head_to_its_reply(size: int, counted: int) -> None:
    async def test() -> None:
        server, body = Server(), b"h" * size
        await server.ask([request()])
        _, protocol = server.connect()
        protocol.data_received(request(body)[:-1])
        assert protocol.memory.used == counted
        protocol.data_received(b"h")
        assert protocol.memory.used == counted
        server.app.held.pop()()
        assert protocol.memory.used == 0
        protocol.connection_lost(None)

    run(test)


def test_a_whole_request_behind_one_that_is_computed_waits_for_its_reply() -> None:
    async def test() -> None:
        server, held = Server(), b"h" * len(BODY)
        await server.ask([request()])
        transport, protocol = server.connect()
        protocol.data_received(request(held))
        protocol.data_received(request(b"b", b"X: 1"))  # of another head
        await settled()
        assert transport.written == b""
        server.app.held.pop()()
        await settled()
        assert bodies_of(transport.written) == [held, b"b"]
        protocol.connection_lost(None)

    run(test)


def test_a_client_may_say_that_it_keeps_the_connection() -> None:
    async def test() -> None:
        server = Server()
        for _ in range(2):
            await server.ask([request(BODY, b"Connection: Keep-Alive")])
        assert server.app.cached == [BODY]

    run(test)


def test_the_reply_has_the_requests_id() -> None:
    async def test() -> None:
        transport, protocol = Server().connect()
        protocol.reply(Reply(b"{}"), close=False, request_id="abc-1")
        assert b"\r\nx-request-id: abc-1\r\n" in transport.written
        protocol.connection_lost(None)

    run(test)


def test_pipelined_requests_are_answered_in_order() -> None:
    async def test() -> None:
        server = Server()
        await server.ask([request()])
        bodies = [bytes([97 + number]) * len(BODY) for number in range(3)]
        unknown = request(b"unknown", b"X-Other: 1")
        sent = b"".join(map(request, bodies)) + unknown + request(bodies[0])
        for pieces in ([sent], [sent[:150], sent[150:]], [bytes([byte]) for byte in sent]):
            replies = await server.ask(pieces)
            assert bodies_of(replies) == [*bodies, b"unknown", bodies[0]]

    run(test)


@pytest.mark.parametrize("known", [False, True])
def test_what_is_no_request_behind_one_that_waits_is_not_answered_before_it(known: bool) -> None:
    async def test() -> None:
        server = Server()
        if known:
            await server.ask([request()])
        transport, protocol = server.connect()
        protocol.data_received(request() + b"no request\r\n\r\n")
        await settled()
        first, _, rest = transport.written.partition(BODY)
        assert first.startswith(b"HTTP/1.1 200 ")
        assert rest == b"" or rest.startswith(b"HTTP/1.1 400 ")
        assert transport.closed
        assert server.refused == ["bad_request"]
        protocol.connection_lost(None)

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


def test_data_received_while_replying_waits() -> None:
    async def test() -> None:
        server = Server()
        await server.ask([request()])
        transport, protocol = server.connect()
        held = b"h" * len(BODY)
        protocol.data_received(request(held))
        protocol.data_received(request()[:20])
        # It is still read, else nobody would notice that the client hangs up.
        assert (transport.written, transport.reading) == (b"", True)
        assert not protocol.is_idle()
        server.app.held.pop()()
        protocol.data_received(request()[20:30])  # before what waited is taken
        await settled()
        protocol.data_received(request()[30:])
        await settled()
        assert transport.written.count(b"200 OK") == 2
        assert transport.written.endswith(BODY)
        assert transport.reading
        assert protocol.is_idle()
        protocol.connection_lost(None)

    run(test)


def test_request_of_a_client_that_hangs_up_is_cancelled() -> None:
    async def test() -> None:
        server = Server()
        await server.ask([request()])
        held = b"h" * len(BODY)
        transport, protocol = server.connect()
        protocol.data_received(request(held))
        transport.close()
        protocol.connection_lost(ConnectionResetError())
        assert server.app.cancelled == [held]
        server.app.held.pop()()  # the late answer
        assert transport.written == b""
        _, protocol = server.connect()
        protocol.data_received(request()[:-1])  # in the middle of its body
        protocol.connection_lost(ConnectionResetError())
        assert len(server.app.cached) == 1

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


def test_pieces_of_a_body_give_no_time_but_that_of_their_bytes() -> None:
    async def test() -> None:
        server = Server(body_seconds=1.0, body_rate=10**9)
        await server.ask([request()])
        transport, protocol = server.connect()
        head = len(request()) - len(BODY)
        protocol.data_received(request()[:head])
        for place in range(10):
            await asyncio.sleep(0.4)
            protocol.data_received(BODY[place : place + 1])
            assert transport.closed is (place >= 2)
        assert server.refused == ["slow_client"]
        protocol.connection_lost(None)

    run(test)


def test_shutdown_ends_idle_connections_and_what_is_in_flight() -> None:
    async def test() -> None:
        server = Server()
        await server.ask([request()])
        idle, waits = server.connect(), server.connect()
        waits[1].data_received(request(b"h" * len(BODY)))
        for _, protocol in (idle, waits):
            protocol.shutdown()
        assert (idle[0].closed, waits[0].closed) == (True, False)
        assert server.app.cancelled == [b"h" * len(BODY)]  # an application answers then
        waits[1].reply(Reply(b"too late", 503), close=True)
        assert b"connection: close\r\n" in waits[0].written
        assert waits[0].closed
        waits[1].data_received(request())  # as TLS may give it still
        assert len(server.app.cached) == 1
        for transport, protocol in (idle, waits):
            protocol.connection_lost(None)
            assert transport.closed

    run(test)


@pytest.mark.parametrize(
    "sent",
    [
        request(BODY, b"Content-Encoding: Identity"),
        request(BODY, b"Expect: 100-continue"),
        request(BODY, b"Connection: close"),
        request(BODY, version=b"1.0"),
        b"\r\n" + request(),  # an empty line in front, which the parser skips
        request(BODY, b"Long: " + b"x" * 3000),
        b"POST /echo HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n",
    ],
)
def test_requests_that_are_not_cacheable_are_parsed_every_time(sent: bytes) -> None:
    async def test() -> None:
        server = Server()
        first, second = [await server.ask([sent]) for _ in range(2)]
        assert first == second
        assert b"200 OK" in first
        assert (len(server.app.parsed), server.app.cached) == (2, [])

    run(test)


def test_head_of_the_second_pipelined_request_is_not_cached_for_the_first() -> None:
    async def test() -> None:
        server = Server()
        first, second = request(b"one"), request(b"three")
        await server.ask([first + second])
        assert bodies_of(await server.ask([first])) == [b"one"]
        assert server.app.cached == [b"one"]

    run(test)


def test_number_of_cached_heads_is_bounded() -> None:
    async def test() -> None:
        server = Server()
        _, protocol = server.connect()
        for number in range(1100):
            protocol.data_received(request(BODY, b"X-Request-Id: %d" % number))
            await settled()
        assert len(protocol.handlers) == 1024
        protocol.connection_lost(None)

    run(test)
