"""One connection in virtual time: when a slow or refused client is answered, what it is told, and when it is closed."""

import asyncio
import gc
import json
import weakref
from collections.abc import Awaitable, Callable

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from socketless_server import BODY, Server, Transport, request, settled
from virtual_time import run_virtually


def run(test: Callable[[], Awaitable[None]]) -> None:
    run_virtually(test, "vitx.serve.http.connection")


def refused(transport: Transport) -> tuple[int, str]:
    """Status and error of the only reply; its bytes must be exact, and the connection closed."""
    head, _, body = transport.written.partition(b"\r\n\r\n")
    status, *lines = head.split(b"\r\n")
    assert sorted(line for line in lines if not line.startswith((b"retry-after", b"date"))) == [
        b"connection: close",
        b"content-length: %d" % len(body),
        b"content-type: application/json",
    ]
    assert status.startswith(b"HTTP/1.1 ")
    assert transport.closed
    return int(status.split()[1]), json.loads(body)["error"]


def test_a_connection_without_a_request_is_closed_in_time_and_without_an_answer() -> None:
    async def test() -> None:
        server = Server(header_seconds=5)
        transport, _ = server.connect()
        await asyncio.sleep(4.99)
        assert not transport.closed
        await asyncio.sleep(0.02)
        assert (transport.written, transport.closed, server.refused) == (b"", True, [])

    run(test)


def test_a_head_has_its_time_from_the_connection_or_from_its_first_byte() -> None:
    async def test() -> None:
        server = Server(header_seconds=5)
        transport, protocol = server.connect()
        await asyncio.sleep(2)
        protocol.data_received(request()[:20])
        await asyncio.sleep(2.99)
        assert not transport.closed
        await asyncio.sleep(0.02)
        assert refused(transport) == (408, "the request's headers took too long")
        transport, protocol = server.connect()
        protocol.data_received(request())
        await asyncio.sleep(4)
        protocol.data_received(request()[:20])  # of the second request
        await asyncio.sleep(3)
        protocol.data_received(request()[20:30])  # a piece now and then does not help
        await asyncio.sleep(1.99)
        assert not transport.closed
        transport.written = b""
        await asyncio.sleep(0.02)
        assert refused(transport) == (408, "the request's headers took too long")
        assert server.refused == ["slow_client", "slow_client"]

    run(test)


@pytest.mark.parametrize("cached", [False, True])
def test_a_body_has_its_time_and_a_second_for_every_so_many_bytes(cached: bool) -> None:
    async def test() -> None:
        server = Server(body_seconds=2, body_rate=10)
        if cached:
            await server.ask([request()])
        transport, protocol = server.connect()
        protocol.data_received(request()[:-20])
        await asyncio.sleep(1)
        protocol.data_received(request()[-20:-10])  # 30 of 40 bytes: 2 + 3 s in all
        await asyncio.sleep(3.9)
        assert not transport.closed
        await asyncio.sleep(0.25)  # it may be looked at a tenth of a second late
        assert refused(transport) == (408, "the request's body took too long")
        assert server.refused == ["slow_client"]
        assert protocol.slow

    run(test)


def test_a_body_that_the_server_does_not_read_is_not_slow() -> None:
    async def test() -> None:
        server = Server(body_seconds=2, body_rate=10**9)

        async def busy(scope: Scope, receive: Receive, send: Send) -> None:
            await asyncio.sleep(60)

        transport, protocol = server.connect()
        protocol.app = busy
        protocol.data_received(request()[:-1])
        protocol.flow.pause_reading()
        await asyncio.sleep(30)
        assert (transport.closed, server.refused) == (False, [])
        protocol.flow.resume_reading()
        await asyncio.sleep(0.2)
        assert refused(transport)[0] == 408

    run(test)


def test_a_head_may_have_exactly_its_limit() -> None:
    async def test() -> None:
        server = Server(header_bytes=100)
        transport, protocol = server.connect()
        protocol.data_received(b"GET / HTTP/1.1\r\nLong: ".ljust(100, b"x"))
        assert not transport.closed
        protocol.data_received(b"x")
        assert refused(transport) == (431, "request headers of more than 100 bytes")
        assert server.refused == ["too_large"]

    run(test)


def test_a_whole_head_may_have_exactly_its_limit_without_its_punctuation() -> None:
    async def test() -> None:
        plain = len(b"/echo" + b"host" + b"here" + b"content-length" + b"40" + b"x")
        for limit, status in ((plain + 5, 200), (plain + 4, 431)):
            server = Server(header_bytes=limit)
            transport, protocol = server.connect()
            protocol.data_received(request(BODY, b"X: " + b"y" * 5))
            await settled()
            assert transport.written.startswith(b"HTTP/1.1 %d" % status)
            assert transport.closed == (status == 431)
            assert server.refused == ["too_large"] * (status == 431)
            assert len(server.app.parsed) == (status == 200)

    run(test)


def test_what_is_no_http_is_refused_and_closed() -> None:
    async def test() -> None:
        server = Server()
        transport, protocol = server.connect()
        protocol.data_received(b"hello\r\n\r\n")
        assert refused(transport) == (400, "the request is not valid HTTP/1.1")
        assert server.refused == ["bad_request"]

    run(test)


@pytest.mark.parametrize("line", [b"GET http://[::1", b"GET http://host:99999/", b"CONNECT host:80"])
@pytest.mark.parametrize("answered", [0, 1])
def test_a_target_that_is_no_url_is_refused(line: bytes, answered: int) -> None:
    """The head was taken as read before its target was: a traceback without, or silence after an earlier reply."""

    async def test() -> None:
        server = Server()
        transport, protocol = server.connect()
        protocol.data_received(request() * answered)
        await settled()
        transport.written = b""
        protocol.data_received(line + b" HTTP/1.1\r\nHost: here\r\n\r\n")
        assert refused(transport) == (400, "the request is not valid HTTP/1.1")
        assert server.refused == ["bad_request"]

    run(test)


def test_a_connection_beyond_the_limit_is_refused_or_closed_after_a_second() -> None:
    async def test() -> None:
        server = Server(connections=2, header_seconds=60)
        kept = [server.connect() for _ in range(2)]
        asks, silent = server.connect(), server.connect()
        asks[1].data_received(request())
        await settled()
        assert refused(asks[0]) == (503, "2 connections are open")
        assert b"retry-after: 1\r\n" in asks[0].written
        assert server.refused == ["connections"]
        await asyncio.sleep(0.99)
        assert not silent[0].closed
        await asyncio.sleep(0.02)
        assert (silent[0].closed, silent[0].written) == (True, b"")
        kept[1][1].data_received(request())
        await settled()
        assert kept[1][0].written.startswith(b"HTTP/1.1 200")
        asks[1].connection_lost(None)
        silent[1].connection_lost(None)
        kept[0][1].connection_lost(None)
        again, protocol = server.connect()
        protocol.data_received(request())
        await settled()
        assert again.written.startswith(b"HTTP/1.1 200")

    run(test)


def test_a_slow_body_after_the_reply_has_started_gets_no_second_reply() -> None:
    async def test() -> None:
        server = Server(body_seconds=2, body_rate=10**9)

        async def answers_early(scope: Scope, receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"5")]})
            await send({"type": "http.response.body", "body": b"wh", "more_body": True})
            while (await receive())["type"] != "http.disconnect":
                pass

        transport, protocol = server.connect()
        protocol.app = answers_early
        protocol.data_received(request()[:-1])
        await asyncio.sleep(3)
        assert transport.written.endswith(b"\r\n\r\nwh")
        assert (transport.closed, server.refused) == (True, ["slow_client"])
        protocol.connection_lost(None)
        await settled()

    run(test)


def test_a_client_that_stops_reading_near_the_end_of_the_last_reply_is_cut_off() -> None:
    """What was left was below the mark where the transport asks for more, and the connection stayed for ever."""

    async def test() -> None:
        server = Server(write_seconds=2, body_rate=10)
        transport, protocol = server.connect()
        unread = vars(transport)
        unread["get_write_buffer_size"] = lambda: 30
        protocol.data_received(request(BODY, b"Connection: close"))
        await settled()
        protocol.pause_writing()
        assert transport.closed
        await asyncio.sleep(4)
        unread["get_write_buffer_size"] = lambda: 10  # the client has read a part, and reads no more
        protocol.resume_writing()
        await asyncio.sleep(2.9)
        assert server.refused == []
        await asyncio.sleep(0.2)
        assert (server.refused, protocol.slow) == (["slow_client"], True)
        protocol.pause_writing()
        protocol.connection_lost(None)
        await asyncio.sleep(10)
        assert server.refused == ["slow_client"]  # no timer is left

    run(test)


@pytest.mark.parametrize("close", [b"", b"Connection: close"])
def test_a_large_reply_has_its_whole_time_and_is_written_in_pieces(close: bytes) -> None:
    """uvloop's TLS counts nothing of what is written at once: it was cut after `write_seconds`, or never."""

    async def test() -> None:
        server = Server(write_seconds=2, body_rate=10**5)
        transport, protocol = server.connect()
        sizes: list[int] = []

        def write(data: bytes) -> None:
            sizes.append(len(data))
            if sum(sizes[:-1]) < 2**16 <= sum(sizes):
                protocol.pause_writing()

        vars(transport).update(write=write, get_write_buffer_size=lambda: sum(sizes))
        protocol.data_received(request(b"a" * 500_000, *([close] if close else [])))
        await settled()
        assert max(sizes) <= 2**16
        await asyncio.sleep(6.9)
        assert server.refused == []
        await asyncio.sleep(0.2)
        assert server.refused == ["slow_client"]

    run(test)


def test_a_client_that_took_its_last_reply_and_does_not_close_is_not_called_slow() -> None:
    """Over TLS it is waited for."""

    async def test() -> None:
        server = Server(write_seconds=2)
        transport, protocol = server.connect()
        aborted: list[bool] = []
        vars(transport)["abort"] = lambda: aborted.append(True)
        protocol.data_received(request(BODY, b"Connection: close"))
        await asyncio.sleep(1.9)
        assert (transport.closed, aborted) == (True, [])
        await asyncio.sleep(0.2)
        assert (aborted, server.refused, protocol.slow) == ([True], [], False)

    run(test)


def test_a_body_counts_until_nobody_reads_it_and_is_given_back_once() -> None:
    async def test() -> None:
        server = Server(memory_bytes=1000)
        for outcome in (None, ValueError("bad")):
            _, protocol = server.connect()
            memory = protocol.memory
            reading: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            protocol.reserve(600)
            protocol.hold(reading)
            protocol.connection_lost(None)
            with pytest.raises(ClientDisconnect):  # nobody would give it back
                protocol.reserve(100)
            assert memory.used == 600
            reading.cancel() if outcome is None else reading.set_exception(outcome)
            await settled()
            assert memory.used == 0
            kept = weakref.ref(reading)
            protocol.hold(reading)
            del reading
            protocol._release()  # also where nothing was counted, what was read is forgotten
            assert kept() is None

    run(test)


def test_an_idle_connection_is_closed_its_time_after_the_last_reply() -> None:
    async def test() -> None:
        server = Server()
        transport, protocol = server.connect()
        kept = protocol.limits.idle_seconds
        protocol.data_received(request())
        await asyncio.sleep(kept / 2)
        protocol.data_received(request())
        await settled()
        assert transport.written.count(b"200 OK") == 2
        await asyncio.sleep(kept - 0.01)
        assert not transport.closed
        await asyncio.sleep(0.02)
        assert transport.closed
        assert server.refused == []

    run(test)


def test_a_connection_with_a_request_in_it_is_not_idle() -> None:
    async def test() -> None:
        server = Server()
        transport, protocol = server.connect()
        kept = protocol.limits.idle_seconds
        protocol.data_received(request())
        await settled()
        await asyncio.sleep(kept - 1)
        protocol.data_received(request(b"h" * 40))  # its reply is held
        await settled()
        assert not protocol.is_idle()
        await asyncio.sleep(2 * kept)
        assert not transport.closed
        server.app.held.pop()()
        assert protocol.is_idle()
        await asyncio.sleep(2 * kept + 0.01)
        assert transport.closed

    run(test)


def test_a_lost_connection_leaves_no_timer() -> None:
    async def test() -> None:
        server = Server(header_seconds=5)
        for sent in (b"", request()[:20], request()[:-1], request()):
            transport, protocol = server.connect()
            protocol.data_received(sent)
            await settled()
            protocol.connection_lost(ConnectionResetError())
            assert protocol.lost
            transport.written = b""
            timers = (protocol._timer, protocol.timeout_keep_alive_task)
            assert all(timer is None or timer.cancelled() for timer in timers)
            await asyncio.sleep(100)
            assert (transport.written, transport.closed) == (b"", False)
        assert server.refused == []

    run(test)


def test_a_request_that_was_answered_is_not_cancelled_when_its_client_hangs_up() -> None:
    async def test() -> None:
        server = Server()
        await server.ask([request()])
        _, protocol = server.connect()
        protocol.data_received(request(b"held".ljust(40)))
        assert protocol.on_lost is not None
        server.app.held.pop()()
        assert protocol.on_lost is None
        protocol.data_received(request())  # answered at once
        assert protocol.on_lost is None
        protocol.connection_lost(None)
        assert server.app.cancelled == []

    run(test)


def test_each_hang_up_cancels_only_the_request_that_runs() -> None:
    async def test() -> None:
        server = Server()
        await server.ask([request()])
        _, protocol = server.connect()
        protocol.data_received(request(b"h1".ljust(40)))
        server.app.held.pop()()
        protocol.data_received(request(b"h2".ljust(40)))
        protocol.connection_lost(None)
        assert server.app.cancelled == [b"h2".ljust(40)]

    run(test)


def test_a_head_that_begins_behind_a_whole_request_has_its_time() -> None:
    async def test() -> None:
        server = Server(header_seconds=5)
        transport, protocol = server.connect()
        protocol.data_received(request() + request()[:20])
        await asyncio.sleep(4.99)
        assert not transport.closed
        transport.written = b""
        await asyncio.sleep(0.02)
        assert refused(transport) == (408, "the request's headers took too long")

    run(test)


def test_a_body_that_goes_on_after_its_answer_ends_with_twice_its_limit() -> None:
    async def test() -> None:
        server = Server(body_bytes=100)

        async def answers_at_once(scope: Scope, receive: Receive, send: Send) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            await send({"type": "http.response.body", "body": b"ok"})

        transport, protocol = server.connect()
        whole, protocol.app = protocol.app, answers_at_once
        head, _, body = request(bytes(100)).partition(b"\r\n\r\n")
        protocol.data_received(head + b"\r\n\r\n")
        await settled()
        protocol.data_received(body)
        assert not transport.closed
        protocol.app = whole
        protocol.data_received(request())
        await settled()
        assert transport.written.count(b"200 OK") == 2
        protocol.app = answers_at_once
        protocol.data_received(head.replace(b"100", b"900") + b"\r\n\r\n")
        await settled()
        protocol.data_received(2 * body)
        assert not transport.closed
        protocol.data_received(b"x")
        assert transport.closed

    run(test)


@pytest.mark.parametrize("pieces", [[], [request()], [request()[:20]], [request(), request()], [b"x\r\n"]])
def test_a_connection_that_ends_waits_for_no_garbage_collector(pieces: list[bytes]) -> None:
    async def test() -> None:
        server = Server()
        transport, protocol = server.connect()
        for piece in pieces:
            protocol.data_received(piece)
        await settled()
        protocol.connection_lost(None)
        await settled()
        left = weakref.ref(protocol)
        del protocol, transport
        assert left() is None

    gc.disable()
    try:
        asyncio.run(test())
    finally:
        gc.enable()
