"""The routes that do not run a model: health, metadata, statistics, shared memory, metrics, and the pages."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from vitx import __version__
from vitx.serve.errors import RequestError
from vitx.serve.http.asgi import ClientGone, error_reply, read_body
from vitx.serve.http.openapi import describe_api
from vitx.serve.http.repository_routes import repository_routes
from vitx.serve.limits import Limits
from vitx.serve.models.repository import Repository
from vitx.serve.models.served_model import ModelSet, ServedModel
from vitx.serve.observe.metrics import Metrics
from vitx.serve.protocol.infer import EXTENSIONS
from vitx.serve.protocol.json_pixels import SMALL_BYTES
from vitx.serve.protocol.parameters import parse_json_object
from vitx.serve.protocol.shared_memory import SharedMemory

Endpoint = Callable[[Request], Awaitable[Response]]

# The pages load nothing from other servers, and stand in no page of theirs.
_PAGE_POLICY = (
    "default-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src blob: data:; "
    "frame-ancestors 'none'"
)
_PAGE_PARTS = ("page.css", "page.js")
_CUDA = "CUDA shared memory is not offered: use system shared memory"


def other_routes(
    models: ModelSet, limits: Limits, metrics: Metrics, memory: SharedMemory, repository: Repository | None
) -> Starlette:
    """The Starlette application with every route except `infer` and `classify`."""
    routes = [
        *_page_routes(models, metrics),
        *_server_routes(models, memory, repository),
        *_model_routes(models),
        *_memory_routes(limits, memory),
        *repository_routes(limits, repository),
    ]
    handlers: dict[Any, Any] = {RequestError: _refused, HTTPException: _http_error, ClientGone: _client_gone}
    application = Starlette(routes=routes, exception_handlers=handlers)
    application.router.redirect_slashes = False
    return application


def _page_routes(models: ModelSet, metrics: Metrics) -> list[Route]:
    async def prometheus(request: Request) -> Response:
        body = metrics.exposition() if metrics.gather is None else await metrics.gather()
        return Response(body, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def stats(request: Request) -> Response:
        loaded = [model.stats() for model in models]
        return JSONResponse({**metrics.summary(), "ready": models.ready, "models": loaded})

    async def openapi(request: Request) -> Response:
        return JSONResponse(describe_api(__version__))

    return [
        Route("/", _page("page.html")),
        Route("/docs", _page("docs.html")),
        Route("/openapi.json", openapi),
        Route("/metrics", prometheus),
        Route("/v1/stats", stats),
    ]


def _page(name: str) -> Endpoint:
    """A page of this folder, with its style and script in it: one answer, which a browser may keep or not."""
    folder = Path(__file__).parent
    page = (folder / name).read_text(encoding="utf-8")
    for part in _PAGE_PARTS:
        page = page.replace(f"/* {part} */\n", (folder / part).read_text(encoding="utf-8"))

    async def web_page(request: Request) -> Response:
        return HTMLResponse(page, headers={"content-security-policy": _PAGE_POLICY})

    return web_page


def _server_routes(models: ModelSet, memory: SharedMemory, repository: Repository | None) -> list[Route]:
    extensions = [*EXTENSIONS, *(["system_shared_memory"] if memory.enabled else [])]
    if repository is not None:
        extensions.append("model_repository")

    async def server_metadata(request: Request) -> Response:
        return JSONResponse({"name": models.server_id, "version": __version__, "extensions": extensions})

    async def server_live(request: Request) -> Response:
        return Response()

    async def server_ready(request: Request) -> Response:
        return Response(status_code=200 if models.ready else 503)

    return [
        Route("/v2", server_metadata),
        Route("/v2/health/live", server_live),
        Route("/v2/health/ready", server_ready),
    ]


def _model_routes(models: ModelSet) -> list[Route]:
    def named(request: Request) -> ServedModel:
        return models.get(request.path_params["model"], request.path_params.get("version"))

    async def model_metadata(request: Request) -> Response:
        model = named(request)
        return JSONResponse(model.metadata(models.versions(model.name)))

    async def model_ready(request: Request) -> Response:
        return Response(status_code=200 if named(request).fault is None else 503)

    async def model_config(request: Request) -> Response:
        model = named(request)
        return JSONResponse(model.config())

    async def model_statistics(request: Request) -> Response:
        return JSONResponse({"model_stats": [named(request).statistics()]})

    async def every_statistics(request: Request) -> Response:
        return JSONResponse({"model_stats": [model.statistics() for model in models]})

    model = "/v2/models/{model}"
    endpoints = {"": model_metadata, "/ready": model_ready, "/config": model_config, "/stats": model_statistics}
    return [
        Route("/v2/models/stats", every_statistics),
        *(
            Route(root + path, endpoint)
            for root in (model, model + "/versions/{version}")
            for path, endpoint in endpoints.items()
        ),
    ]


def _memory_routes(limits: Limits, memory: SharedMemory) -> list[Route]:
    async def memory_status(request: Request) -> Response:
        return JSONResponse(memory.status(request.path_params.get("region")))

    async def memory_register(request: Request) -> Response:
        body = await read_body(request.scope, request.receive, min(SMALL_BYTES, limits.body_bytes))
        given = parse_json_object(body, limits.json_depth)
        if unknown := sorted(given.keys() - {"key", "offset", "byte_size"}):
            raise RequestError(f"unknown field '{unknown[0][:80]}': expected key, offset and byte_size")
        for name in ("key", "byte_size"):
            if name not in given:
                raise RequestError(f"'{name}' is missing: expected key, offset and byte_size")
        region = request.path_params["region"]
        memory.register(region, given["key"], given.get("offset", 0), given["byte_size"])
        return Response()

    async def memory_unregister(request: Request) -> Response:
        memory.unregister(request.path_params.get("region"))
        return Response()

    async def no_regions(request: Request) -> Response:
        return JSONResponse([])

    async def nothing(request: Request) -> Response:
        return Response()

    async def cuda_register(request: Request) -> Response:
        raise RequestError(_CUDA, status=501, reason="not_offered")

    routes = []
    for kind, status, register, unregister in (
        ("system", memory_status, memory_register, memory_unregister),
        ("cuda", no_regions, cuda_register, nothing),  # clients unregister all CUDA regions when they start
    ):
        root = f"/v2/{kind}sharedmemory"
        region = root + "/region/{region}"
        routes += [Route(path + "/status", status) for path in (root, region)]
        routes += [Route(path + "/unregister", unregister, methods=["POST"]) for path in (root, region)]
        routes.append(Route(region + "/register", register, methods=["POST"]))
    return routes


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    reply = error_reply(error)
    headers = {name.decode(): value.decode() for name, value in reply.headers}
    return Response(reply.body, reply.status, headers, media_type="application/json")


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": str(error.detail)}, error.status_code, error.headers)


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=400)  # nobody reads it
