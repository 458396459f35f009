"""The OpenAPI 3.1 description at /openapi.json: the routes, and the JSON they take and return."""

from typing import Any

Json = dict[str, Any]

_TEXT: Json = {"type": "string"}
_COUNT: Json = {"type": "integer", "minimum": 0}
_OBJECT: Json = {"type": "object"}
_ERROR: Json = {"type": "object", "required": ["error"], "properties": {"error": _TEXT}, "additionalProperties": False}
_PARAMETERS: Json = {"type": "object", "additionalProperties": {"type": ["string", "integer", "boolean"]}}
_PREDICTION: Json = {
    "type": "object",
    "required": ["label", "score", "index"],
    "properties": {"label": _TEXT, "score": {"type": "number", "minimum": 0, "maximum": 1.000001}, "index": _COUNT},
}
_PREDICTIONS: Json = {"type": "array", "items": {"$ref": "#/components/schemas/Prediction"}, "minItems": 1}
_RESULT: Json = {
    "type": "object",
    "properties": {"filename": _TEXT, "predictions": _PREDICTIONS, "error": _TEXT},
}
_CLASSIFIED: Json = {
    "type": "object",
    "required": ["model"],
    "properties": {
        "model": _TEXT,
        "predictions": _PREDICTIONS,
        "results": {"type": "array", "items": {"$ref": "#/components/schemas/Result"}},
    },
}
_TENSOR: Json = {
    "type": "object",
    "required": ["name", "shape", "datatype"],
    "properties": {
        "name": _TEXT,
        "shape": {"type": "array", "items": {"type": "integer"}},
        "datatype": _TEXT,
        "data": {"type": "array"},
        "parameters": {"$ref": "#/components/schemas/Parameters"},
    },
}
_OUTPUT_WANTED: Json = {
    "type": "object",
    "required": ["name"],
    "properties": {"name": _TEXT, "parameters": {"$ref": "#/components/schemas/Parameters"}},
}
_INFER: Json = {
    "type": "object",
    "required": ["inputs"],
    "properties": {
        "id": _TEXT,
        "parameters": {"$ref": "#/components/schemas/Parameters"},
        "inputs": {"type": "array", "items": {"$ref": "#/components/schemas/Tensor"}, "minItems": 1, "maxItems": 1},
        "outputs": {"type": "array", "items": {"$ref": "#/components/schemas/RequestedOutput"}},
    },
}
_INFERRED: Json = {
    "type": "object",
    "required": ["model_name", "model_version", "outputs"],
    "properties": {
        "model_name": _TEXT,
        "model_version": _TEXT,
        "id": _TEXT,
        "outputs": {"type": "array", "items": {"$ref": "#/components/schemas/Tensor"}},
    },
}
_REGION: Json = {
    "type": "object",
    "required": ["key", "byte_size"],
    "properties": {"key": _TEXT, "offset": _COUNT, "byte_size": {"type": "integer", "minimum": 1}},
    "additionalProperties": False,
}
_REGIONS: Json = {"type": "array", "items": _OBJECT}
_STATISTICS: Json = {
    "type": "object",
    "required": ["model_stats"],
    "properties": {"model_stats": {"type": "array", "items": _OBJECT}},
}

_SCHEMAS = {
    "Error": _ERROR,
    "Parameters": _PARAMETERS,
    "Prediction": _PREDICTION,
    "Result": _RESULT,
    "Classified": _CLASSIFIED,
    "Tensor": _TENSOR,
    "RequestedOutput": _OUTPUT_WANTED,
    "InferRequest": _INFER,
    "InferResponse": _INFERRED,
    "Region": _REGION,
}
_BINARY: Json = {"type": "string", "format": "binary"}
_IMAGE_BODY: Json = {
    "image/*": {"schema": _BINARY},
    "application/octet-stream": {"schema": _BINARY},
    "application/json": {"schema": {"type": "array", "items": {**_TEXT, "contentEncoding": "base64"}, "minItems": 1}},
    "multipart/form-data": {"schema": {"type": "object", "additionalProperties": _BINARY}},
}

_UNKNOWN = (404,)
_UNAVAILABLE = (404, 503)
_RUNS = (400, 404, 405, 408, 413, 415, 429, 431, 500, 503)
_MANAGE = (400, 401, 404, 408, 413, 415, 501, 503)
_MEMORY = (400, 403, 404, 409, 413, 415, 429, 501)


def describe_api(version: str) -> Json:
    """The OpenAPI document."""
    paths: Json = {
        "/": {"get": _get("The page: drop an image, watch the server", "text/html")},
        "/docs": {"get": _get("This description to read", "text/html")},
        "/openapi.json": {"get": _get("This description", "application/json", _OBJECT)},
        "/metrics": {"get": _get("Prometheus metrics", "text/plain")},
        "/v1/stats": {"get": _get("Counters and recent percentiles", "application/json", _OBJECT)},
        "/v1/classify": {"post": _classify()},
        "/v2": {"get": _get("The server's name, version and extensions", "application/json", _OBJECT)},
        "/v2/health/live": {"get": _get("Whether the process answers")},
        "/v2/health/ready": {"get": _get("Whether every model is warm", errors=(503,))},
        "/v2/models/stats": {"get": _get("Statistics of every model", "application/json", _STATISTICS)},
    }
    for root, names in (("", ("model",)), ("/versions/{version}", ("model", "version"))):
        paths |= _model_paths("/v2/models/{model}" + root, [_in_path(name) for name in names])
    for kind in ("system", "cuda"):
        paths |= _memory_paths(f"/v2/{kind}sharedmemory")
    paths |= _repository_paths()
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "vitx",
            "version": version,
            "description": "Image classification: the Open Inference Protocol v2 with Triton's extensions, and image "
            "bytes in, labels out. Tensors may follow the JSON as bytes: see Inference-Header-Content-Length.",
        },
        "paths": paths,
        "components": {"schemas": _SCHEMAS},
    }


def _model_paths(root: str, parameters: list[Json]) -> Json:
    def get(summary: str, schema: Json | None) -> Json:
        media = "application/json" if schema else None
        return {"parameters": parameters, "get": _get(summary, media, schema, errors=_UNAVAILABLE)}

    infer = {
        "summary": "Tensors in, logits, classes and further outputs out",
        "parameters": [_option("Inference-Header-Content-Length", "header", _COUNT)],
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _ref("InferRequest")}, "application/octet-stream": {}},
        },
        "responses": {
            "200": {
                "description": "The answer",
                "content": {"application/json": {"schema": _ref("InferResponse")}, "application/octet-stream": {}},
            },
            **_errors(_RUNS),
        },
    }
    return {
        root: get("A model's tensors, certificate and provenance", _OBJECT),
        root + "/ready": get("Whether a model takes requests", None),
        root + "/config": get("A model's configuration", _OBJECT),
        root + "/stats": get("A model's statistics", _STATISTICS),
        root + "/infer": {"parameters": parameters, "post": infer},
    }


def _memory_paths(root: str) -> Json:
    paths: Json = {}
    for path, parameters in ((root, []), (root + "/region/{region}", [_in_path("region")])):
        status = _get("Registered regions", "application/json", _REGIONS, errors=_MEMORY)
        paths[path + "/status"] = {"parameters": parameters, "get": status}
        paths[path + "/unregister"] = {"parameters": parameters, "post": _post("Forget a region, or all of them")}
    body = {"required": True, "content": {"application/json": {"schema": _ref("Region")}}}
    register = {**_post("Name a region of shared memory"), "requestBody": body}
    paths[root + "/region/{region}/register"] = {"parameters": [_in_path("region")], "post": register}
    return paths


def _repository_paths() -> Json:
    asked = {"type": "object", "properties": {"ready": {"type": "boolean"}}, "additionalProperties": False}
    parameters = {"type": "object", "properties": {"parameters": _OBJECT}, "additionalProperties": False}
    paths: Json = {"/v2/repository/index": {"post": _manage("Every model there is, and its state", asked)}}
    for what, summary in (("load", "Load a model, or load it again"), ("unload", "Serve a model no longer")):
        path = {"parameters": [_in_path("model")], "post": _manage(summary, parameters)}
        paths[f"/v2/repository/models/{{model}}/{what}"] = path
    return paths


def _manage(summary: str, body: Json) -> Json:
    content = {"required": False, "content": {"application/json": {"schema": body}}}
    return {**_post(summary), "requestBody": content, "responses": {"200": {"description": "Done"}, **_errors(_MANAGE)}}


def _classify() -> Json:
    count = {"type": "integer", "minimum": 1}
    return {
        "summary": "Image bytes in, labels out",
        "parameters": [
            _option("model", "query", _TEXT),
            _option("version", "query", _TEXT),
            _option("top_k", "query", count),
            _option("priority", "query", {"type": "integer", "minimum": 0, "maximum": 3}),
            _option("timeout_ms", "query", count),
            _option("outputs", "query", _TEXT),
            _option("Timeout-Ms", "header", count),
        ],
        "requestBody": {"required": True, "content": _IMAGE_BODY},
        "responses": {
            "200": {"description": "Labels", "content": {"application/json": {"schema": _ref("Classified")}}},
            **_errors(_RUNS),
        },
    }


def _get(summary: str, media: str | None = None, schema: Json | None = None, errors: tuple[int, ...] = ()) -> Json:
    content = {"content": {media: {"schema": schema} if schema else {}}} if media else {}
    return {"summary": summary, "responses": {"200": {"description": summary, **content}, **_errors(errors)}}


def _post(summary: str) -> Json:
    return {"summary": summary, "responses": {"200": {"description": "Done"}, **_errors(_MEMORY)}}


def _errors(statuses: tuple[int, ...]) -> Json:
    body = {"application/json": {"schema": _ref("Error")}}
    # The body is optional in practice: a health probe's 503 has none.
    return {str(status): {"description": "Refused; the text says why", "content": body} for status in statuses}


def _ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _in_path(name: str) -> Json:
    return {"name": name, "in": "path", "required": True, "schema": {**_TEXT, "minLength": 1}}


def _option(name: str, where: str, schema: Json) -> Json:
    return {"name": name, "in": where, "required": False, "schema": schema}
