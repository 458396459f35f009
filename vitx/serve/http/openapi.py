"""The OpenAPI 3.1 description at /openapi.json: the routes, and the JSON they take and return."""

import re
from functools import partial
from typing import Any

Json = dict[str, Any]

_JSON, _BYTES = "application/json", "application/octet-stream"
# The statuses with which requests of a kind are refused.
_UNAVAILABLE = (404, 503)
_RUNS = (400, 404, 405, 408, 413, 415, 429, 431, 500, 503)
_MANAGE = (400, 401, 404, 408, 413, 415, 501, 503)
_MEMORY = (400, 403, 404, 409, 413, 415, 429, 501)


def _object(required: str = "", *, closed: bool = False, **fields: Json) -> Json:
    """An object with these fields. required: the names of those that it has. closed: it has no others."""
    return {"type": "object", "required": required.split(), "properties": fields, "additionalProperties": not closed}


def _list(items: Json, **bounds: int) -> Json:
    return {"type": "array", "items": items, **bounds}


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


_TEXT: Json = {"type": "string"}
_BINARY: Json = {"type": "string", "format": "binary"}
_COUNT: Json = {"type": "integer", "minimum": 0}
_POSITIVE: Json = {"type": "integer", "minimum": 1}
_OBJECT: Json = {"type": "object"}
_ANY: Json = {}
_PREDICTIONS = _list(_ref("Prediction"), minItems=1)
_PARAMETERS = _ref("Parameters")
_STATISTICS = _object("model_stats", model_stats=_list(_OBJECT))

_SCHEMAS = {
    "Error": _object("error", closed=True, error=_TEXT),
    "Parameters": {"type": "object", "additionalProperties": {"type": ["string", "integer", "boolean"]}},
    "Prediction": _object(
        "label score index", label=_TEXT, score={"type": "number", "minimum": 0, "maximum": 1.000001}, index=_COUNT
    ),
    "Result": _object(filename=_TEXT, predictions=_PREDICTIONS, error=_TEXT),
    "Classified": _object("model", model=_TEXT, predictions=_PREDICTIONS, results=_list(_ref("Result"))),
    "Tensor": _object(
        "name shape datatype",
        name=_TEXT,
        shape=_list({"type": "integer"}),
        datatype=_TEXT,
        data={"type": "array"},
        parameters=_PARAMETERS,
    ),
    "RequestedOutput": _object("name", name=_TEXT, parameters=_PARAMETERS),
    "InferRequest": _object(
        "inputs",
        id=_TEXT,
        parameters=_PARAMETERS,
        inputs=_list(_ref("Tensor"), minItems=1, maxItems=1),
        outputs=_list(_ref("RequestedOutput")),
    ),
    "InferResponse": _object(
        "model_name model_version outputs",
        model_name=_TEXT,
        model_version=_TEXT,
        id=_TEXT,
        outputs=_list(_ref("Tensor")),
    ),
    "Region": _object("key byte_size", closed=True, key=_TEXT, offset=_COUNT, byte_size=_POSITIVE),
}
_IMAGES = {
    "image/*": _BINARY,
    _BYTES: _BINARY,
    _JSON: _list({**_TEXT, "contentEncoding": "base64"}, minItems=1),
    "multipart/form-data": {"type": "object", "additionalProperties": _BINARY},
}


def _add(
    paths: Json,
    operation: str,
    summary: str,
    *,
    reply: Json | None = None,
    body: Json | None = None,
    optional: bool = False,
    errors: tuple[int, ...] = (),
    parameters: tuple[Json, ...] = (),
) -> None:
    """operation: method and path, whose parameters are read from it. reply, body: schemas by media type."""
    method, path = operation.split()
    refused = {"description": "Refused; the text says why", "content": _content({_JSON: _ref("Error")})}
    answer = {"description": summary, **({"content": _content(reply)} if reply else {})}
    made: Json = {"summary": summary, "responses": {"200": answer, **{str(status): refused for status in errors}}}
    if body is not None:
        made["requestBody"] = {"required": not optional, "content": _content(body)}
    if parameters:
        made["parameters"] = list(parameters)
    named = [_parameter(name, "path", {**_TEXT, "minLength": 1}) for name in re.findall(r"{(\w+)}", path)]
    paths.setdefault(path, {"parameters": named} if named else {})[method] = made


def _content(schemas: Json) -> Json:
    return {media: {"schema": schema} if schema else {} for media, schema in schemas.items()}


def _parameter(name: str, where: str, schema: Json) -> Json:
    return {"name": name, "in": where, "required": where == "path", "schema": schema}


def describe_api(version: str) -> Json:
    """The OpenAPI document."""
    paths: Json = {}
    add = partial(_add, paths)
    add("get /", "The page: drop images, watch the server", reply={"text/html": _ANY})
    add("get /docs", "This description, to read and to try", reply={"text/html": _ANY})
    add("get /openapi.json", "This description", reply={_JSON: _OBJECT})
    add("get /metrics", "Prometheus metrics", reply={"text/plain": _ANY})
    add("get /v1/stats", "Counters and recent percentiles", reply={_JSON: _OBJECT})
    asked = {"model": _TEXT, "version": _TEXT, "top_k": _POSITIVE, "priority": {**_COUNT, "maximum": 3}}
    asked |= {"timeout_ms": _POSITIVE, "outputs": _TEXT}
    query = [_parameter(name, "query", schema) for name, schema in asked.items()]
    add(
        "post /v1/classify",
        "Image bytes in, labels out",
        parameters=(*query, _parameter("Timeout-Ms", "header", _POSITIVE)),
        body=_IMAGES,
        reply={_JSON: _ref("Classified")},
        errors=_RUNS,
    )
    add("get /v2", "The server's name, version and extensions", reply={_JSON: _OBJECT})
    add("get /v2/health/live", "Whether the process answers")
    add("get /v2/health/ready", "Whether every model is warm", errors=(503,))
    add("get /v2/models/stats", "Statistics of every model", reply={_JSON: _STATISTICS})
    for root in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):
        add(f"get {root}", "Its tensors, certificate and provenance", reply={_JSON: _OBJECT}, errors=_UNAVAILABLE)
        add(f"get {root}/ready", "Whether a model takes requests", errors=_UNAVAILABLE)
        add(f"get {root}/config", "A model's configuration", reply={_JSON: _OBJECT}, errors=_UNAVAILABLE)
        add(f"get {root}/stats", "A model's statistics", reply={_JSON: _STATISTICS}, errors=_UNAVAILABLE)
        add(
            f"post {root}/infer",
            "Tensors in, logits, classes and further outputs out",
            parameters=(_parameter("Inference-Header-Content-Length", "header", _COUNT),),
            body={_JSON: _ref("InferRequest"), _BYTES: _ANY},
            reply={_JSON: _ref("InferResponse"), _BYTES: _ANY},
            errors=_RUNS,
        )
    for root in ("/v2/systemsharedmemory", "/v2/cudasharedmemory"):
        region = root + "/region/{region}"
        for path in (root, region):
            add(f"get {path}/status", "Registered regions", reply={_JSON: _list(_OBJECT)}, errors=_MEMORY)
            add(f"post {path}/unregister", "Forget a region, or all of them", errors=_MEMORY)
        add(f"post {region}/register", "Name shared memory", body={_JSON: _ref("Region")}, errors=_MEMORY)
    managed: Json = {"optional": True, "errors": _MANAGE, "body": {_JSON: _object(closed=True, parameters=_OBJECT)}}
    index = {**managed, "body": {_JSON: _object(closed=True, ready={"type": "boolean"})}}
    add("post /v2/repository/index", "Every model there is, and its state", **index)
    add("post /v2/repository/models/{model}/load", "Load a model, or load it again", **managed)
    add("post /v2/repository/models/{model}/unload", "Serve a model no longer", **managed)
    about = (
        "Image classification: the Open Inference Protocol v2 with Triton's extensions, and image bytes in, labels "
        "out. Tensors may follow the JSON as bytes: see Inference-Header-Content-Length."
    )
    return {
        "openapi": "3.1.0",
        "info": {"title": "vitx", "version": version, "description": about},
        "paths": paths,
        "components": {"schemas": _SCHEMAS},
    }
