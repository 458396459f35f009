"""Triton's model-repository extension over HTTP: index, load, unload. Source: its extension_model_repository.md."""

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from vitx.serve.errors import RequestError
from vitx.serve.http.asgi import read_body
from vitx.serve.limits import Limits
from vitx.serve.models.repository import NOT_OFFERED, Repository, repository_parameters
from vitx.serve.protocol.json_pixels import SMALL_BYTES
from vitx.serve.protocol.parameters import parse_json_object


def repository_routes(limits: Limits, repository: Repository | None) -> list[Route]:
    """The three routes; they answer 501 when `repository` is None."""

    async def read(request: Request) -> tuple[Repository, Mapping[str, Any]]:
        """The repository and the request's JSON."""
        if repository is None:
            raise RequestError(NOT_OFFERED, status=501, reason="not_offered")
        body = await read_body(request.scope, request.receive, min(SMALL_BYTES, limits.body_bytes))
        return repository, parse_json_object(body, limits.json_depth) if body else {}

    async def repository_index(request: Request) -> Response:
        models, body = await read(request)
        ready = body.get("ready", False)
        if body.keys() - {"ready"} or not isinstance(ready, bool):
            raise RequestError('the body of an index request is {} or {"ready": true}')
        return JSONResponse(models.index(ready=ready))

    async def model_load(request: Request) -> Response:
        models, body = await read(request)
        _check_parameters(body)
        await models.load(request.path_params["model"])
        return Response()

    async def model_unload(request: Request) -> Response:
        models, body = await read(request)
        _check_parameters(body)
        await models.unload(request.path_params["model"])
        return Response()

    root = "/v2/repository"
    return [
        Route(root + "/index", repository_index, methods=["POST"]),
        Route(root + "/models/{model}/load", model_load, methods=["POST"]),
        Route(root + "/models/{model}/unload", model_unload, methods=["POST"]),
    ]


def _check_parameters(body: Mapping[str, Any]) -> None:
    parameters = body.get("parameters", {})
    if body.keys() - {"parameters"} or not isinstance(parameters, dict):
        raise RequestError('the body is {} or {"parameters": {…}}')
    repository_parameters(parameters)
