"""The OpenAPI 3.1 description at /openapi.json: the JSON that routes take and return. The routes add themselves."""

import re
from typing import Any

from vitx.serve.http.gate import WITHOUT_TOKEN

Json = dict[str, Any]

MODEL_PATHS = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")
_JSON, _BYTES = "application/json", "application/octet-stream"
# The statuses with which requests of a kind are refused.
UNAVAILABLE = (404, 503)
_RUNS = (404, 405, 408, 413, 415, 429, 431, 500, 503)
_MANAGES = (404, 408, 413, 415, 501, 503)
MEMORY = (404, 409, 413, 415, 429, 501)


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
_PARAMETERS, _TENSOR = _ref("Parameters"), _ref("Tensor")
_NAMED: Json = {"name": _TEXT, "parameters": _PARAMETERS}
_INTEGERS, _OUTPUTS = _list({"type": "integer"}), _list(_ref("RequestedOutput"))

# What routes take and return, by media type.
HTML, TEXT, OBJECT, OBJECTS = {"text/html": _ANY}, {"text/plain": _ANY}, {_JSON: _OBJECT}, {_JSON: _list(_OBJECT)}
STATISTICS = {_JSON: _object("model_stats", model_stats=_list(_OBJECT))}
REGION = {_JSON: _ref("Region")}
MANAGE: Json = {"optional": True, "errors": _MANAGES, "body": {_JSON: _object(closed=True, parameters=_OBJECT)}}
INDEX: Json = {**MANAGE, "body": {_JSON: _object(closed=True, ready={"type": "boolean"})}, "reply": OBJECTS}

_SCHEMAS = {
    "Error": _object(closed=True, error=_TEXT, ready={"type": "boolean"}),  # `ready`: false, of what is not ready
    "Parameters": {"type": "object", "additionalProperties": {"type": ["string", "integer", "boolean"]}},
    "Prediction": _object(
        "label score index", label=_TEXT, score={"type": "number", "minimum": 0, "maximum": 1.000001}, index=_COUNT
    ),
    "Result": _object(filename=_TEXT, predictions=_PREDICTIONS, error=_TEXT),
    "Classified": _object("model", model=_TEXT, predictions=_PREDICTIONS, results=_list(_ref("Result"))),
    "Tensor": _object("name shape datatype", **_NAMED, shape=_INTEGERS, datatype=_TEXT, data={"type": "array"}),
    "RequestedOutput": _object("name", **_NAMED),
    "InferRequest": _object(
        "inputs", id=_TEXT, parameters=_PARAMETERS, inputs=_list(_TENSOR, minItems=1, maxItems=1), outputs=_OUTPUTS
    ),
    "InferResponse": _object(
        "model_name model_version outputs", model_name=_TEXT, model_version=_TEXT, id=_TEXT, outputs=_list(_TENSOR)
    ),
    "Region": _object("key byte_size", closed=True, key=_TEXT, offset=_COUNT, byte_size=_POSITIVE),
}
_IMAGES = {
    "image/*": _BINARY,
    _BYTES: _BINARY,
    _JSON: _list({**_TEXT, "contentEncoding": "base64"}, minItems=1),
    "multipart/form-data": {"type": "object", "additionalProperties": _BINARY},
}


def add_path(
    paths: Json,
    method: str,
    path: str,
    summary: str,
    *,
    reply: Json | None = None,
    body: Json | None = None,
    optional: bool = False,
    errors: tuple[int, ...] = (),
    parameters: tuple[Json, ...] = (),
) -> None:
    """reply, body: schemas by media type. optional: whether the body is. Parameters in the path are read from it."""
    refused = {"description": "Refused; the text says why", "content": _content({_JSON: _ref("Error")})}
    always = (400, 403) if path in WITHOUT_TOKEN else (400, 401, 403)
    answer = {"description": summary, **({"content": _content(reply)} if reply else {})}
    refusals = dict.fromkeys(map(str, (*always, *errors)), refused)
    made: Json = {"summary": summary, "responses": {"200": answer, **refusals}}
    if body is not None:
        made["requestBody"] = {"required": not optional, "content": _content(body)}
    if parameters:
        made["parameters"] = list(parameters)
    named = [_parameter(name, "path", {**_TEXT, "minLength": 1}) for name in re.findall(r"{(\w+)}", path)]
    paths.setdefault(path, {"parameters": named} if named else {})[method.lower()] = made


def _content(schemas: Json) -> Json:
    return {media: {"schema": schema} if schema else {} for media, schema in schemas.items()}


def _parameter(name: str, where: str, schema: Json) -> Json:
    return {"name": name, "in": where, "required": where == "path", "schema": schema}


def run_paths() -> Json:
    """The paths that run a model."""
    paths: Json = {}
    asked = {"model": _TEXT, "version": _TEXT, "top_k": _POSITIVE, "priority": {**_COUNT, "maximum": 3}}
    asked |= {"timeout_ms": _POSITIVE, "outputs": _TEXT}
    given = [_parameter(name, "query", schema) for name, schema in asked.items()]
    given.append(_parameter("Timeout-Ms", "header", _POSITIVE))
    kinds: Json = {"body": _IMAGES, "reply": {_JSON: _ref("Classified")}, "errors": _RUNS}
    add_path(paths, "POST", "/v1/classify", "Image bytes in, labels out", parameters=tuple(given), **kinds)
    length = _parameter("Inference-Header-Content-Length", "header", _COUNT)
    kinds = {"body": {_JSON: _ref("InferRequest"), _BYTES: _ANY}, "reply": {_JSON: _ref("InferResponse"), _BYTES: _ANY}}
    for path in MODEL_PATHS:
        summary = "Tensors in, logits, classes and further outputs out"
        add_path(paths, "POST", f"{path}/infer", summary, parameters=(length,), errors=_RUNS, **kinds)
    return paths


def document(paths: Json, version: str) -> Json:
    """The OpenAPI document."""
    about = (
        "Image classification: the Open Inference Protocol v2 with Triton's extensions, and image bytes in, labels "
        "out. Tensors may follow the JSON as bytes: see Inference-Header-Content-Length."
    )
    info = {"title": "vitx", "version": version, "description": about}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": _SCHEMAS}}
