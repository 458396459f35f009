"""The ASGI application. POST routes that run a model are dispatched by hand; everything else is Starlette's.

A request that runs a model passes `App._run`, which alone counts it, times it, and turns an exception into a reply.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from vitx import __version__
from vitx.serve.asgi import ClientGone, Reply, error_reply, header, read_body, send_reply, unless_gone
from vitx.serve.classify import Classifier
from vitx.serve.decode import Decoder
from vitx.serve.errors import RequestError
from vitx.serve.limits import Limits
from vitx.serve.metrics import Metrics
from vitx.serve.protocol import HEADER_LENGTH, VERSION, decode_infer_request, encode_infer_response, header_length
from vitx.serve.served_model import ModelSet, ServedModel

Handler = Callable[[Scope, Receive], Awaitable[Reply]]

# The page needs nothing but itself and this server.
_PAGE_POLICY = "default-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src blob: data:"

_log = logging.getLogger("vitx.serve")


class App:
    """The server's routes over a set of models. `active` is the number of requests that run a model right now."""

    def __init__(self, models: ModelSet, decoder: Decoder, limits: Limits, metrics: Metrics) -> None:
        self._models = models
        self._limits = limits
        self._metrics = metrics
        self._classify = Classifier(models, decoder, limits, metrics)
        self._other = _starlette(models, metrics)
        self._idle = asyncio.Event()
        self._idle.set()
        self.active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self._find(scope["path"]) if scope["type"] == "http" else None
        if found is None:
            await self._other(scope, receive, self._counted(scope, send))
        elif scope["method"] == "POST":
            await self._run(*found, scope, receive, send)
        else:
            error = RequestError(f"method {scope['method']} is not allowed: use POST", status=405)
            self._metrics.answer(found[0], error.status)
            await send_reply(send, replace(error_reply(error), headers=((b"allow", b"POST"),)))

    async def idle(self) -> None:
        """Return once no request runs a model."""
        await self._idle.wait()

    def _find(self, path: str) -> tuple[str, Handler] | None:
        """The name and handler of a route that runs a model."""
        if path == "/v1/classify":
            return "classify", self._classify
        parts = path.split("/")
        if parts[:3] != ["", "v2", "models"] or parts[-1] != "infer":
            return None
        if len(parts) == 5 or (len(parts) == 7 and parts[4] == "versions"):
            return "infer", partial(self._infer, parts[3], parts[5] if len(parts) == 7 else VERSION)
        return None

    async def _infer(self, name: str, version: str, scope: Scope, receive: Receive) -> Reply:
        model = _versioned(self._models, name, version)
        body = await read_body(scope, receive, self._limits.body_bytes)
        length = header_length(header(scope, HEADER_LENGTH.encode()), len(body))
        request = decode_infer_request(body, length, model.contract, self._limits.images)
        logits = await unless_gone(receive, model.batcher.submit(request.images))
        reply, json_length = encode_infer_response(logits, request, model.contract)
        if json_length is None:
            return Reply(reply)
        headers = ((HEADER_LENGTH.encode(), str(json_length).encode()),)
        return Reply(reply, content_type=b"application/octet-stream", headers=headers)

    async def _run(self, route: str, handler: Handler, scope: Scope, receive: Receive, send: Send) -> None:
        started = time.perf_counter()
        self.active += 1
        self._idle.clear()
        try:
            reply = await self._reply(handler, scope, receive)
            self._metrics.answer(route, reply.status, time.perf_counter() - started)
            await send_reply(send, reply, close=self._models.draining)
        except ClientGone:
            self._metrics.reject("disconnected")
        finally:
            self.active -= 1
            if not self.active:
                self._idle.set()

    async def _reply(self, handler: Handler, scope: Scope, receive: Receive) -> Reply:
        try:
            return await handler(scope, receive)
        except RequestError as error:
            self._metrics.reject(error.reason)
            return error_reply(error)
        except ClientGone:
            raise
        except Exception:  # noqa: BLE001 - the edge of one request: the others must not feel it
            _log.exception("internal error while answering %s", scope["path"])
            return error_reply(RequestError("internal error: see the server's log", status=500))

    def _counted(self, scope: Scope, send: Send) -> Send:
        """`send` that counts the reply under the name of the endpoint which gave it."""

        async def counting(message: Message) -> None:
            if message["type"] == "http.response.start":
                endpoint = scope.get("endpoint")
                self._metrics.answer(getattr(endpoint, "__name__", "other"), message["status"])
            await send(message)

        return counting


def _versioned(models: ModelSet, name: str, version: str) -> ServedModel:
    model = models.get(name)
    if version != VERSION:
        raise RequestError(
            f"request for unknown model: '{name}' version {version[:40]} is not found",
            status=404,
            reason="unknown_model",
        )
    return model


def _starlette(models: ModelSet, metrics: Metrics) -> Starlette:
    """The routes that run no model."""
    page = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")

    def named(request: Request) -> ServedModel:
        return _versioned(models, request.path_params["model"], request.path_params.get("version", VERSION))

    async def web_page(request: Request) -> Response:
        return HTMLResponse(page, headers={"content-security-policy": _PAGE_POLICY})

    async def server_metadata(request: Request) -> Response:
        return JSONResponse({"name": "vitx", "version": __version__, "extensions": ["binary_tensor_data"]})

    async def server_live(request: Request) -> Response:
        return Response()

    async def server_ready(request: Request) -> Response:
        return Response(status_code=200 if models.ready else 503)

    async def model_metadata(request: Request) -> Response:
        return JSONResponse(named(request).metadata())

    async def model_ready(request: Request) -> Response:
        named(request)
        return Response()

    async def model_config(request: Request) -> Response:
        model = named(request)
        return JSONResponse(model.contract.config(model.batcher.batching.max_batch))

    async def prometheus(request: Request) -> Response:
        return Response(metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def stats(request: Request) -> Response:
        loaded = [model.stats() for model in models.loaded.values()]
        return JSONResponse({**metrics.summary(), "ready": models.ready, "models": loaded})

    model = "/v2/models/{model}"
    version = model + "/versions/{version}"
    routes = [
        Route("/", web_page),
        Route("/v2", server_metadata),
        Route("/v2/health/live", server_live),
        Route("/v2/health/ready", server_ready),
        *(Route(root, model_metadata) for root in (model, version)),
        *(Route(root + "/ready", model_ready) for root in (model, version)),
        *(Route(root + "/config", model_config) for root in (model, version)),
        Route("/metrics", prometheus),
        Route("/v1/stats", stats),
    ]
    return Starlette(routes=routes, exception_handlers={RequestError: _refused, HTTPException: _http_error})


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    reply = error_reply(error)
    headers = {name.decode(): value.decode() for name, value in reply.headers}
    return Response(reply.body, reply.status, headers, media_type="application/json")


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": str(error.detail)}, error.status_code, error.headers)
