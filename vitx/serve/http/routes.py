"""The routes that do not run a model: health, metadata, statistics, shared memory, repository, metrics, and the pages.

Sources: Triton's docs/protocol/extension_{model_configuration,model_repository,shared_memory,statistics}.md.
"""

from collections.abc import Callable, Mapping
from functools import partial
from inspect import isawaitable
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route, Router

from vitx import __version__
from vitx.serve.errors import NO_CUDA, RequestError, not_offered
from vitx.serve.http import openapi as api
from vitx.serve.http.asgi import read_body
from vitx.serve.limits import Limits
from vitx.serve.models.repository import managed
from vitx.serve.protocol.json_pixels import SMALL_BYTES
from vitx.serve.protocol.parameters import parse_json_object, quoted
from vitx.serve.server_core import ServerCore

# What a route answers, or what is awaited for it: a response, None for an empty one, whether it is ready, or JSON.
Answer = Callable[[Request], Any]
Add = Callable[..., None]

# The pages load nothing from other servers, and stand in no page of theirs.
_PAGE_POLICY = (
    "default-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src blob: data:; "
    "frame-ancestors 'none'"
)
_PAGE_PARTS = ("page.css", "page.js")


def other_routes(core: ServerCore) -> Router:
    """Every route except `infer` and `classify`. They raise RequestError and ClientDisconnect, it HTTPException."""
    routes: list[Route] = []
    paths = api.run_paths()

    def add(name: str, summary: str, answer: Answer, *places: str, method: str = "GET", **described: Any) -> None:
        """Add a route; `name`: its label in the metrics. described: see `api.add_path`."""

        async def endpoint(request: Request) -> Response:
            found = answer(request)
            found = await found if isawaitable(found) else found
            if isinstance(found, Response):
                return found
            if isinstance(found, bool):  # Triton's clients read the status, KServe's the body
                return JSONResponse({"ready": found}, 200 if found else 503)
            return Response() if found is None else JSONResponse(found)

        endpoint.__name__ = name
        for path in places:
            routes.append(Route(path, endpoint, methods=[method]))
            api.add_path(paths, method, path, summary, **described)

    add("openapi", "This description", lambda _: api.document(paths, __version__), "/openapi.json", reply=api.OBJECT)
    for add_routes in (_page_routes, _model_routes, _memory_routes, _repository_routes):
        add_routes(core, add)
    return Router(routes, redirect_slashes=False)


def _page_routes(core: ServerCore, add: Add) -> None:
    metrics, models = core.metrics, core.models
    public = core.options.metrics != "off" and core.tokens.of["metrics"] is None  # a link brings no token

    async def prometheus(request: Request) -> Response:
        body = metrics.exposition() if metrics.gather is None else await metrics.gather()
        return Response(body, media_type="text/plain; version=0.0.4; charset=utf-8")

    def stats(request: Request) -> dict[str, Any]:
        of_each = [model.stats() for model in models]
        return {**metrics.summary(), "ready": models.ready, "models": of_each, "metrics_open": public}

    add("web_page", "The page: drop images, watch the server", _page("page.html"), "/", reply=api.HTML)
    add("web_page", "This description, to read and to try", _page("docs.html"), "/docs", reply=api.HTML)
    add("prometheus", "Prometheus metrics", prometheus, "/metrics", errors=(404,), reply=api.TEXT)
    add("stats", "Counters and recent percentiles", stats, "/v1/stats", reply=api.OBJECT)


def _page(name: str) -> Answer:
    """A page of this folder, with its style and script in it: one answer, which a browser may keep or not."""
    folder = Path(__file__).parent
    page = (folder / name).read_text(encoding="utf-8")
    for part in _PAGE_PARTS:
        page = page.replace(f"/* {part} */\n", (folder / part).read_text(encoding="utf-8"))
    return lambda request: HTMLResponse(page, headers={"content-security-policy": _PAGE_POLICY})


def _model_routes(core: ServerCore, add: Add) -> None:
    models = core.models

    def of_model(name: str, summary: str, path: str, answer: Callable[..., Any], **described: Any) -> None:
        def of_one(request: Request) -> Any:
            version = request.path_params.get("version")
            return answer(models.get(request.path_params["model"], version), version)

        add(name, summary, of_one, *(root + path for root in api.MODEL_PATHS), errors=api.UNAVAILABLE, **described)

    add("server_metadata", "The server's name, version and extensions", lambda _: core.about(), "/v2", reply=api.OBJECT)
    add("server_live", "Whether the process answers", lambda _: {"live": True}, "/v2/health/live", reply=api.OBJECT)
    warm = "Whether every model is warm"
    add("server_ready", warm, lambda _: models.ready, "/v2/health/ready", errors=(503,), reply=api.OBJECT)
    add("every_statistics", "All statistics", lambda _: models.statistics(), "/v2/models/stats", reply=api.STATISTICS)
    tensors = "Its tensors, certificate and provenance"
    of_model("model_metadata", tensors, "", lambda of, _: of.metadata(models.versions(of.name)), reply=api.OBJECT)
    of_model("model_ready", "Whether it takes requests", "/ready", lambda of, _: of.fault is None, reply=api.OBJECT)
    of_model("model_config", "A model's configuration", "/config", lambda of, _: of.config(), reply=api.OBJECT)
    of_model("model_statistics", "A model's statistics", "/stats", models.statistics, reply=api.STATISTICS)


def _memory_routes(core: ServerCore, add: Add) -> None:
    memory = core.memory

    def of_region(act: Callable[[str | None], Any]) -> Answer:
        return lambda request: act(request.path_params.get("region"))

    async def register(request: Request) -> None:
        memory.check_enabled()
        given = await _json_body(request, core.limits)
        if given.keys() - {"offset"} != {"key", "byte_size"}:
            names = ", ".join(sorted(given))
            raise RequestError(f"the body has {quoted(names)}: expected key, byte_size and, where it is not 0, offset")
        memory.register(request.path_params["region"], given["key"], given.get("offset", 0), given["byte_size"])

    # Clients unregister all CUDA regions when they start; there never are any.
    cuda: tuple[Answer, ...] = (lambda request: [], lambda request: None, lambda request: not_offered(NO_CUDA))
    system: tuple[Answer, ...] = (of_region(memory.status), of_region(memory.unregister), register)
    for kind, name, answers in (("system", "memory", system), ("cuda", "cuda_memory", cuda)):
        root, add_memory = f"/v2/{kind}sharedmemory", partial(add, errors=api.MEMORY)
        region = root + "/region/{region}"
        shown, forget = ((root + what, region + what) for what in ("/status", "/unregister"))
        add_memory(f"{name}_status", "Registered regions", answers[0], *shown, reply=api.OBJECTS)
        add_memory(f"{name}_unregister", "Forget a region, or all of them", answers[1], *forget, method="POST")
        path = region + "/register"
        add_memory(f"{name}_register", "Name shared memory", answers[2], path, method="POST", body=api.REGION)


def _repository_routes(core: ServerCore, add: Add) -> None:
    async def index(request: Request) -> list[dict[str, str]]:
        models, body = managed(core.repository), await _json_body(request, core.limits, optional=True)
        ready = body.get("ready", False)
        if body.keys() - {"ready"} or not isinstance(ready, bool):
            raise RequestError('the body of an index request is {} or {"ready": true}')
        return await models.index(ready=ready)

    async def change(what: str, request: Request) -> None:
        """Load or unload a model."""
        managed(core.repository)
        body = await _json_body(request, core.limits, optional=True)
        parameters = body.get("parameters", {})
        if body.keys() - {"parameters"} or not isinstance(parameters, dict):
            raise RequestError('the body is {} or {"parameters": {…}}')
        await getattr(managed(core.repository, parameters), what)(request.path_params["model"])

    root, add = "/v2/repository", partial(add, method="POST")
    add("repository_index", "Every model there is, and its state", index, root + "/index", **api.INDEX)
    for what, summary in (("load", "Load a model, or load it again"), ("unload", "Serve a model no longer")):
        add(f"model_{what}", summary, partial(change, what), f"{root}/models/{{model}}/{what}", **api.MANAGE)


async def _json_body(request: Request, limits: Limits, *, optional: bool = False) -> Mapping[str, Any]:
    """The JSON object that a request brings; {} where there may be none."""
    body = await read_body(request.scope, request.receive, min(SMALL_BYTES, limits.body_bytes))
    return {} if optional and not body else parse_json_object(body, limits.json_depth)
