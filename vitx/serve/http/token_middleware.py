"""Checks the bearer token of every HTTP request."""

from collections.abc import Callable
from dataclasses import replace

from starlette.types import ASGIApp, Receive, Scope, Send

from vitx.serve.errors import RequestError
from vitx.serve.http.asgi import error_reply, header, send_reply
from vitx.serve.security import Kind, Tokens

# Health probes come from machines without the token; the pages show nothing secret, and / asks for the token.
_WITHOUT_TOKEN = ("/", "/docs", "/openapi.json", "/v2/health/live", "/v2/health/ready")
_MANAGEMENT = "/v2/repository"
_CHALLENGE = ((b"www-authenticate", b'Bearer realm="vitx"'),)


class TokenMiddleware:
    """Passes authorized requests to an application. A refused one ends its connection, as its body is not read."""

    def __init__(self, app: ASGIApp, tokens: Tokens, on_refused: Callable[[str], None]) -> None:
        self._app = app
        self._tokens = tokens
        self._on_refused = on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        kind: Kind = "management" if path.startswith(_MANAGEMENT) else "inference"
        try:
            if path not in _WITHOUT_TOKEN:
                self._tokens.check(kind, header(scope, b"authorization"))
        except RequestError as error:
            self._on_refused(error.reason)
            await send_reply(send, replace(error_reply(error), headers=_CHALLENGE), close=True)
            return
        await self._app(scope, receive, send)
