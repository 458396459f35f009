"""Requests over HTTP behind bearer tokens."""

from collections.abc import Callable
from dataclasses import replace

from starlette.types import ASGIApp, Receive, Scope, Send

from vitx.serve.errors import RequestError
from vitx.serve.http.asgi import error_reply, header, send_reply
from vitx.serve.security import Kind, Tokens

# Probes come from machines that hold no secrets; the pages hold none, and the one at / asks for the token.
_OPEN = ("/", "/docs", "/openapi.json", "/v2/health/live", "/v2/health/ready")
_MANAGEMENT = "/v2/repository"
_CHALLENGE = ((b"www-authenticate", b'Bearer realm="vitx"'),)


class Guarded:
    """An application behind tokens. A refused request ends its connection: its body is not read."""

    def __init__(self, app: ASGIApp, tokens: Tokens, on_refused: Callable[[str], None]) -> None:
        self._app = app
        self._tokens = tokens
        self._on_refused = on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        kind: Kind = "management" if path.startswith(_MANAGEMENT) else "inference"
        try:
            if path not in _OPEN:
                self._tokens.check(kind, header(scope, b"authorization"))
        except RequestError as error:
            self._on_refused(error.reason)
            await send_reply(send, replace(error_reply(error), headers=_CHALLENGE), close=True)
            return
        await self._app(scope, receive, send)
