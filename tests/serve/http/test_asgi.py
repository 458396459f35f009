"""The answer of a request that runs a model, and a client that hangs up before it."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Scope

from vitx.serve.http.asgi import CONNECTION, OnReply, Reply, answered
from vitx.serve.observe.request_record import RequestRecord


def test_work_for_a_client_that_hangs_up_is_cancelled_and_nothing_after_it() -> None:
    async def test() -> None:
        connection: Any = SimpleNamespace(lost=False, on_lost=None, hold=None)
        scope: Scope = {CONNECTION: connection}

        cancelled: list[bool] = []
        replies: list[OnReply] = []

        def start(body: bytes, record: RequestRecord, on_reply: OnReply, hold: Any) -> Any:
            replies.append(on_reply)
            return lambda: cancelled.append(True)

        def ask() -> "asyncio.Future[Reply]":
            return asyncio.ensure_future(answered(scope, start, b"", RequestRecord("")))

        asked = ask()
        await asyncio.sleep(0)
        replies.pop()(Reply(b"7"))
        vars(connection)["on_lost"]()  # in the same moment
        assert (await asked).body == b"7"
        assert connection.on_lost is None
        asked = ask()
        await asyncio.sleep(0)
        connection.lost = True
        vars(connection)["on_lost"]()
        replies.pop()(Reply(b"too late"))
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert connection.on_lost is None
        assert cancelled == [True]
        with pytest.raises(ClientDisconnect):  # it was lost before the work began
            await ask()
        assert not replies
        connection.lost = False
        asked = ask()
        await asyncio.sleep(0)
        asked.cancel()  # by the server, not by a hang-up
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert connection.on_lost is None
        assert cancelled == [True, True]
        asked = ask()
        await asyncio.sleep(0)
        asked.cancel("Task cancelled, timeout graceful shutdown exceeded")  # as uvicorn does it
        with pytest.raises(asyncio.CancelledError, match="timeout graceful shutdown exceeded"):
            await asked
        assert cancelled == [True, True, True]

    asyncio.run(test())
