"""`POST /v1/classify`: image bytes in, labels with scores out."""

from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qs

import numpy as np
from starlette.types import Receive, Scope

from vitx.core.preprocess import ImageError, UInt8Array
from vitx.serve.asgi import Reply, header, json_reply, read_body, unless_gone
from vitx.serve.decode import Decoder
from vitx.serve.errors import RequestError
from vitx.serve.limits import Limits
from vitx.serve.metrics import Metrics
from vitx.serve.multipart import parse_multipart
from vitx.serve.runtimes import Float32Array
from vitx.serve.served_model import ModelSet, ServedModel

_TOP_K = 5
# The last is what `curl --data-binary @image.png` says of any bytes.
_BYTES = ("application/octet-stream", "application/x-www-form-urlencoded")


class Classifier:
    """Decodes, batches and labels; one image as the body, or several as multipart/form-data."""

    def __init__(self, models: ModelSet, decoder: Decoder, limits: Limits, metrics: Metrics) -> None:
        self._models = models
        self._decoder = decoder
        self._limits = limits
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive) -> Reply:
        """Answer a request; raise RequestError. An unreadable image among several is an entry of its own."""
        query = _query(scope)
        model = self._models.get(query.get("model"))
        top_k = _top_k(query.get("top_k"), len(model.bundle.manifest.labels))
        content_type = header(scope, b"content-type") or "application/octet-stream"
        body = await read_body(scope, receive, self._limits.body_bytes)
        if _is_image(content_type):
            (result,) = await unless_gone(receive, self._classify(model, [body], top_k))
            if "error" in result:
                raise RequestError(result["error"], reason="bad_image")
            return json_reply({"model": model.name, **result})
        names, images = self._form_images(content_type, body)
        results = await unless_gone(receive, self._classify(model, images, top_k))
        for result in results:
            if "error" in result:
                self._metrics.reject("bad_image")
        named = [{"filename": name, **result} for name, result in zip(names, results, strict=True)]
        return json_reply({"model": model.name, "results": named})

    def _form_images(self, content_type: str, body: bytes) -> tuple[list[str], list[bytes]]:
        parts = parse_multipart(content_type, body, self._limits.images)
        for part in parts:
            if part.filename is None:
                raise RequestError(f"form field '{part.name[:80]}' is not a file: expected images only")
        if not parts:
            raise RequestError("the form has no image")
        return [part.filename or "" for part in parts], [part.data for part in parts]

    async def _classify(self, model: ServedModel, images: list[bytes], top_k: int) -> list[dict[str, Any]]:
        """Return for each image its `predictions`, or its `error`."""
        decoded = await self._decoder.decode(images, model.bundle.manifest.preprocessing)
        readable = [image for image in decoded if not isinstance(image, Exception)]
        logits = await model.batcher.submit(np.stack(readable)) if readable else np.empty((0, 0), np.float32)
        rows = iter(logits)
        return [
            {"error": _reason(image)}
            if isinstance(image, Exception)
            else {"predictions": top_predictions(next(rows), model.bundle.manifest.labels, top_k)}
            for image in decoded
        ]


def top_predictions(logits: Float32Array, labels: Sequence[str], top_k: int) -> list[dict[str, Any]]:
    """The `top_k` classes of one row of logits (C), best first; `score` is the softmax."""
    if not np.isfinite(logits).all():
        raise RequestError("the logits are not all finite", status=500, reason="not_finite")
    exponentials = np.exp(logits.astype(np.float64) - logits.max())
    scores = exponentials / exponentials.sum()
    best = np.argsort(-scores, kind="stable")[:top_k]
    return [{"label": labels[index], "score": float(scores[index]), "index": int(index)} for index in best]


def _reason(failure: UInt8Array | Exception) -> str:
    if isinstance(failure, ImageError):
        return str(failure)
    assert isinstance(failure, Exception)
    raise failure


def _query(scope: Scope) -> dict[str, str]:
    """The query's parameters; RequestError for one that is unknown or given twice."""
    given = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True, max_num_fields=None)
    for name, values in given.items():
        if name not in ("model", "top_k"):
            raise RequestError(f"unknown query parameter '{name[:80]}': known: model, top_k")
        if len(values) > 1:
            raise RequestError(f"query parameter '{name}' is given {len(values)} times")
    return {name: values[0] for name, values in given.items()}


def _top_k(given: str | None, classes: int) -> int:
    if given is None:
        return min(_TOP_K, classes)
    if not (given.isascii() and given.isdigit() and len(given) < 10 and 1 <= int(given) <= classes):
        raise RequestError(f"top_k is '{given[:40]}': expected 1 to {classes}, the number of classes")
    return int(given)


def _is_image(content_type: str) -> bool:
    """True for one image, False for a form; RequestError 415 for anything else."""
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "multipart/form-data":
        return False
    if kind.startswith("image/") or kind in _BYTES:
        return True
    raise RequestError(
        f"Content-Type '{kind[:80]}' is not offered: expected image/*, application/octet-stream or multipart/form-data",
        status=415,
        reason="unsupported_media",
    )
