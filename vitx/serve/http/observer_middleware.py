"""Reports every HTTP request to the access log and the traces."""

import time
from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vitx.serve.http.asgi import client_of, header
from vitx.serve.observe.access_log import CLIENT_GONE, request_id
from vitx.serve.observe.request_record import CURRENT_RECORD, RequestObserver, RequestRecord

_HEADER = "x-request-id"


class ObserverMiddleware:
    """Passes requests to an application, adds X-Request-Id to each reply, and tells the observers when it ended."""

    def __init__(self, app: ASGIApp, observers: Sequence[RequestObserver]) -> None:
        self._app = app
        self._observers = observers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.perf_counter()
        parent, state = header(scope, b"traceparent"), header(scope, b"tracestate")
        record = RequestRecord(request_id(header(scope, _HEADER.encode())), parent, state, client_of(scope), 0)
        status = CLIENT_GONE

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (_HEADER.encode(), record.id.encode())]
            else:
                record.sent = (record.sent or 0) + len(message.get("body", b""))
            await send(message)

        token = CURRENT_RECORD.set(record)
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            CURRENT_RECORD.reset(token)
            for observer in self._observers:
                observer.write(record, scope["method"], scope["path"], status, time.perf_counter() - started)
