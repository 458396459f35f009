"""A complete reply is one write, all others are left to uvicorn; and idle connections are closed."""

import asyncio
import logging
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.server import ServerState

from vitx.serve.http.connection import HttpProtocol
from vitx.serve.http.cycle import SingleWriteCycle

Headers = list[tuple[bytes, bytes]]
OK: Headers = [(b"content-type", b"text/plain"), (b"content-length", b"5")]


class Transport(asyncio.Transport):
    """Remembers what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: Any) -> None:
        self.writes.append(bytes(data))

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed


def reply(
    headers: Headers, *bodies: bytes, method: str = "POST", keep_alive: bool = True
) -> tuple[Transport, SingleWriteCycle]:
    """What is written for a reply of these headers, its body sent in so many pieces."""
    transport = Transport()

    async def send() -> SingleWriteCycle:
        logger = logging.getLogger("test")
        cycle = SingleWriteCycle(
            scope={"type": "http", "method": method},  # type: ignore[typeddict-item]  # of it only the method is read
            transport=transport,
            flow=FlowControl(transport),
            logger=logger,
            access_logger=logger,
            access_log=False,
            default_headers=[(b"date", b"today")],
            message_event=asyncio.Event(),
            expect_100_continue=False,
            keep_alive=keep_alive,
            on_response=lambda: None,
        )
        await cycle.send({"type": "http.response.start", "status": 200, "headers": headers})
        for number, body in enumerate(bodies):
            more = number + 1 < len(bodies)
            await cycle.send({"type": "http.response.body", "body": body, "more_body": more})
        return cycle

    return transport, asyncio.run(send())


CHUNKED = (
    b"HTTP/1.1 200 OK\r\ndate: today\r\ncontent-type: text/plain\r\ntransfer-encoding: chunked\r\n\r\n"
    b"5\r\nwhole\r\n0\r\n\r\n"
)
HEAD = b"HTTP/1.1 200 OK\r\ndate: today\r\ncontent-type: text/plain\r\ncontent-length: 5\r\n"


def test_a_whole_reply_is_one_write() -> None:
    transport, cycle = reply(OK, b"whole")
    assert transport.writes == [HEAD + b"\r\nwhole"]
    assert (cycle.response_complete, transport.closed) == (True, False)


@pytest.mark.parametrize(
    ("headers", "bodies", "options", "written"),
    [
        (OK, [b"who", b"le"], {}, HEAD + b"\r\nwhole"),
        (OK, [b"whole"], {"method": "HEAD"}, HEAD + b"\r\n"),
        (OK, [b"whole"], {"keep_alive": False}, HEAD + b"connection: close\r\n\r\nwhole"),
        ([*OK, (b"connection", b"close")], [b"whole"], {}, HEAD + b"connection: close\r\n\r\nwhole"),
        (OK[:1], [b"whole"], {}, CHUNKED),
    ],
)
def test_every_other_reply_is_uvicorns(
    headers: Headers, bodies: list[bytes], options: dict[str, Any], written: bytes
) -> None:
    transport, cycle = reply(headers, *bodies, **options)
    assert b"".join(transport.writes) == written
    assert cycle.response_complete
    assert transport.closed == (b"connection: close" in written)


@pytest.mark.parametrize("headers", [[*OK, (b"x-bad", b"a\r\nb: c")], [(b"content-length", b"4")]])
def test_a_reply_that_would_break_the_connection_is_not_written(headers: Headers) -> None:
    with pytest.raises(RuntimeError):
        reply(headers, b"whole")


def test_an_idle_connection_is_closed_and_a_busy_one_is_not() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": OK})
        await send({"type": "http.response.body", "body": b"whole"})

    async def test() -> None:
        config = uvicorn.Config(app, lifespan="off", ws="none", log_config=None, timeout_keep_alive=1)
        config.load()
        loop, state = asyncio.get_running_loop(), ServerState()
        server = await loop.create_server(lambda: HttpProtocol(config, state, {}), "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        for _ in range(3):  # for longer than an idle connection is kept
            writer.write(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n")
            assert (await reader.readuntil(b"whole")).startswith(b"HTTP/1.1 200 OK\r\n")
            await asyncio.sleep(0.5)
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()
        server.close()
        await server.wait_closed()
        assert not state.connections

    asyncio.run(test())
