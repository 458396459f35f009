"""The routes that do not run a model: health, metadata, statistics, shared memory, repository, metrics, and the pages.

Sources: Triton's docs/protocol/extension_{model_configuration,model_repository,shared_memory,statistics}.md.
"""

from collections.abc import Callable, Mapping
from inspect import isawaitable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from vitx import __version__
from vitx.serve.errors import NO_CUDA, RequestError, not_offered
from vitx.serve.http.asgi import ClientGone, error_reply, read_body
from vitx.serve.http.openapi import describe_api
from vitx.serve.limits import Limits
from vitx.serve.models.repository import Repository, managed
from vitx.serve.models.served_model import ModelSet, ServedModel
from vitx.serve.observe.metrics import Metrics
from vitx.serve.protocol.infer import extensions
from vitx.serve.protocol.json_pixels import SMALL_BYTES
from vitx.serve.protocol.parameters import parse_json_object
from vitx.serve.protocol.shared_memory import SharedMemory

# What a route answers, or what is awaited for it: a response, None for an empty one, whether it is ready, or JSON.
Answer = Callable[[Request], Any]

# The pages load nothing from other servers, and stand in no page of theirs.
_PAGE_POLICY = (
    "default-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src blob: data:; "
    "frame-ancestors 'none'"
)
_PAGE_PARTS = ("page.css", "page.js")
_MODEL = "/v2/models/{model}"
_REPOSITORY = "/v2/repository"


def other_routes(
    models: ModelSet, limits: Limits, metrics: Metrics, memory: SharedMemory, repository: Repository | None
) -> Starlette:
    """The Starlette application with every route except `infer` and `classify`."""
    routes = [
        *_page_routes(models, metrics),
        *_model_routes(models, extensions(memory=memory.enabled, repository=repository is not None)),
        *_memory_routes(limits, memory),
        *_repository_routes(limits, repository),
    ]
    handlers: dict[Any, Any] = {RequestError: _refused, HTTPException: _http_error, ClientGone: _client_gone}
    application = Starlette(routes=routes, exception_handlers=handlers)
    application.router.redirect_slashes = False
    return application


def _routes(name: str, answer: Answer, *paths: str, method: str = "GET") -> list[Route]:
    """The routes of some paths; `name`: their label in the metrics."""

    async def endpoint(request: Request) -> Response:
        found = answer(request)
        found = await found if isawaitable(found) else found
        if isinstance(found, Response):
            return found
        if found is None or isinstance(found, bool):
            return Response(status_code=503 if found is False else 200)
        return JSONResponse(found)

    endpoint.__name__ = name
    return [Route(path, endpoint, methods=[method]) for path in paths]


def _page_routes(models: ModelSet, metrics: Metrics) -> list[Route]:
    async def prometheus(request: Request) -> Response:
        body = metrics.exposition() if metrics.gather is None else await metrics.gather()
        return Response(body, media_type="text/plain; version=0.0.4; charset=utf-8")

    def stats(request: Request) -> dict[str, Any]:
        return {**metrics.summary(), "ready": models.ready, "models": [model.stats() for model in models]}

    return [
        *_routes("web_page", _page("page.html"), "/"),
        *_routes("web_page", _page("docs.html"), "/docs"),
        *_routes("openapi", lambda request: describe_api(__version__), "/openapi.json"),
        *_routes("prometheus", prometheus, "/metrics"),
        *_routes("stats", stats, "/v1/stats"),
    ]


def _page(name: str) -> Answer:
    """A page of this folder, with its style and script in it: one answer, which a browser may keep or not."""
    folder = Path(__file__).parent
    page = (folder / name).read_text(encoding="utf-8")
    for part in _PAGE_PARTS:
        page = page.replace(f"/* {part} */\n", (folder / part).read_text(encoding="utf-8"))
    return lambda request: HTMLResponse(page, headers={"content-security-policy": _PAGE_POLICY})


def _model_routes(models: ModelSet, offered: list[str]) -> list[Route]:
    def of_model(name: str, path: str, answer: Callable[[ServedModel], Any]) -> list[Route]:
        def of_one(request: Request) -> Any:
            return answer(models.get(request.path_params["model"], request.path_params.get("version")))

        return _routes(name, of_one, _MODEL + path, _MODEL + "/versions/{version}" + path)

    def every_statistics(request: Request) -> dict[str, Any]:
        return {"model_stats": [model.statistics() for model in models]}

    about = {"name": models.server_id, "version": __version__, "extensions": offered}
    return [
        *_routes("server_metadata", lambda request: about, "/v2"),
        *_routes("server_live", lambda request: None, "/v2/health/live"),
        *_routes("server_ready", lambda request: models.ready, "/v2/health/ready"),
        *_routes("every_statistics", every_statistics, "/v2/models/stats"),
        *of_model("model_metadata", "", lambda model: model.metadata(models.versions(model.name))),
        *of_model("model_ready", "/ready", lambda model: model.fault is None),
        *of_model("model_config", "/config", ServedModel.config),
        *of_model("model_statistics", "/stats", lambda model: {"model_stats": [model.statistics()]}),
    ]


def _memory_routes(limits: Limits, memory: SharedMemory) -> list[Route]:
    async def memory_register(request: Request) -> None:
        given = await _json_body(request, limits)
        if unknown := sorted(given.keys() - {"key", "offset", "byte_size"}):
            raise RequestError(f"unknown field '{unknown[0][:80]}': expected key, offset and byte_size")
        for name in ("key", "byte_size"):
            if name not in given:
                raise RequestError(f"'{name}' is missing: expected key, offset and byte_size")
        memory.register(request.path_params["region"], given["key"], given.get("offset", 0), given["byte_size"])

    def region(request: Request) -> str | None:
        return request.path_params.get("region")

    def places(kind: str, what: str) -> list[str]:
        return [f"/v2/{kind}sharedmemory{path}/{what}" for path in ("", "/region/{region}")]

    def unregister(request: Request) -> None:
        memory.unregister(region(request))

    return [
        *_routes("memory_status", lambda request: memory.status(region(request)), *places("system", "status")),
        *_routes("memory_unregister", unregister, *places("system", "unregister"), method="POST"),
        *_routes("memory_register", memory_register, places("system", "register")[1], method="POST"),
        # Clients unregister all CUDA regions when they start.
        *_routes("no_regions", lambda request: [], *places("cuda", "status")),
        *_routes("nothing", lambda request: None, *places("cuda", "unregister"), method="POST"),
        *_routes("cuda_register", lambda request: not_offered(NO_CUDA), places("cuda", "register")[1], method="POST"),
    ]


def _repository_routes(limits: Limits, repository: Repository | None) -> list[Route]:
    async def repository_index(request: Request) -> list[dict[str, str]]:
        models, body = managed(repository), await _json_body(request, limits, optional=True)
        ready = body.get("ready", False)
        if body.keys() - {"ready"} or not isinstance(ready, bool):
            raise RequestError('the body of an index request is {} or {"ready": true}')
        return models.index(ready=ready)

    async def asked(request: Request) -> tuple[Repository, str]:
        """For a load or unload: the repository, and the name of the model."""
        managed(repository)
        body = await _json_body(request, limits, optional=True)
        parameters = body.get("parameters", {})
        if body.keys() - {"parameters"} or not isinstance(parameters, dict):
            raise RequestError('the body is {} or {"parameters": {…}}')
        return managed(repository, parameters), request.path_params["model"]

    async def model_load(request: Request) -> None:
        models, name = await asked(request)
        await models.load(name)

    async def model_unload(request: Request) -> None:
        models, name = await asked(request)
        await models.unload(name)

    return [
        *_routes("repository_index", repository_index, _REPOSITORY + "/index", method="POST"),
        *_routes("model_load", model_load, _REPOSITORY + "/models/{model}/load", method="POST"),
        *_routes("model_unload", model_unload, _REPOSITORY + "/models/{model}/unload", method="POST"),
    ]


async def _json_body(request: Request, limits: Limits, *, optional: bool = False) -> Mapping[str, Any]:
    """The JSON object that a request brings; {} where there may be none."""
    body = await read_body(request.scope, request.receive, min(SMALL_BYTES, limits.body_bytes))
    return {} if optional and not body else parse_json_object(body, limits.json_depth)


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
