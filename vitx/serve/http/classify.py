"""`POST /v1/classify`: image bytes in, labels with scores out."""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import parse_qs

import numpy as np
from starlette.types import Scope

from vitx.core.preprocess import ImageError, TooManyPixels
from vitx.core.probabilities import top_predictions
from vitx.runtimes.session import Float32Array
from vitx.serve.batching.request_queue import PRIORITY_LEVELS
from vitx.serve.errors import RequestError, unsupported
from vitx.serve.http.asgi import Hold, Reply, StartRequest, beside, header, start_task
from vitx.serve.http.multipart import parse_multipart
from vitx.serve.limits import MANY_TEXTS, MOST_TEXTS, TEXTS, check_most
from vitx.serve.models.served_model import ServedModel
from vitx.serve.observe.request_record import CURRENT_RECORD, RequestRecord
from vitx.serve.protocol.base64_images import base64_images
from vitx.serve.protocol.infer import to_json
from vitx.serve.protocol.json_pixels import SMALL_BYTES
from vitx.serve.protocol.parameters import quoted
from vitx.serve.server_core import ServerCore

_TOP_K = 5
_PARAMETERS = ("model", "version", "top_k", "priority", "timeout_ms", "outputs")
_LONGEST_TIMEOUT_MS = 3_600_000
# `curl --data-binary @image.png` sends the second one, whatever the bytes are.
_IMAGE_TYPES = ("application/octet-stream", "application/x-www-form-urlencoded")
Encoded = Sequence[bytes | RequestError]  # images, or what is wrong with one
# Reads a body of several images: their file names, if they have some, and the images.
ReadImages = Callable[[bytes], tuple[list[str] | None, Encoded]]
Row = Float32Array | Exception


class _Options(NamedTuple):
    """The options of a request. `deadline` in seconds of time.monotonic(). outputs: what to give beside the classes."""

    model: ServedModel
    top_k: int
    priority: int
    deadline: float | None
    outputs: tuple[str, ...] = ()

    def answer(self, row: Row) -> dict[str, Any]:
        """What is said of one image; `row`: see `Contract`. Raises what is wrong with it."""
        if isinstance(row, Exception):
            raise row
        contract, labels = self.model.contract, self.model.bundle.manifest.labels
        values = {name: row[contract.columns(name)] for name in (contract.output_name, *self.outputs)}
        if name := next((name for name, found in values.items() if not np.isfinite(found).all()), None):
            raise RequestError(f"the output '{name}' is not all finite", status=500, reason="not_finite")
        predictions = top_predictions(values.pop(contract.output_name), labels, self.top_k)
        further = {name: found.tolist() for name, found in values.items()}
        return {"predictions": predictions, **({"outputs": further} if further else {})}


class Classifier:
    """Classifies one image (the body), or several (multipart/form-data, or a JSON list of base64 texts)."""

    def __init__(self, core: ServerCore) -> None:
        self._core = core

    def prepare(self, scope: Scope) -> tuple[StartRequest, bool]:
        """What starts the requests of this head, and whether others may have the same. Raises RequestError."""
        options = partial(self._options, _query(scope), header(scope, b"timeout-ms"))
        options(time.monotonic())
        content_type = header(scope, b"content-type") or "application/octet-stream"
        kind = content_type.partition(";")[0].strip().lower()
        several: ReadImages | None = None
        if kind == "multipart/form-data":
            several = partial(parse_multipart, content_type, max_parts=self._core.limits.images)
        elif kind == "application/json":
            several = partial(base64_images, limits=self._core.limits)
        elif not kind.startswith("image/") and kind not in _IMAGE_TYPES:
            expected = "image/*, application/octet-stream, multipart/form-data or application/json"
            raise unsupported(f"Content-Type '{kind[:80]}' is not offered: expected {expected}")
        answer = partial(self._reply, options, several)
        return (lambda body, record, reply, hold: start_task(answer(body, record, hold), reply).cancel), several is None

    async def _reply(
        self, ask: Callable[[float], _Options], many: ReadImages | None, body: bytes, record: RequestRecord, hold: Hold
    ) -> Reply:
        """`many`: reads a body of several images."""
        CURRENT_RECORD.set(record)  # of this task alone; in it the model is found
        options = ask(record.started)
        read = partial(many or (lambda one: (None, [one])), body)
        names, images = await beside(hold, len(body), read) if many and len(body) > SMALL_BYTES else read()
        widths = options.model.contract.widths()
        texts = len(images) * (options.top_k + sum(widths[name] for name in options.outputs))
        check_most(texts, MOST_TEXTS, TEXTS)
        rows = await self._known_rows(options, images, record)
        write = partial(self._written, options, rows, names, several=many is not None)
        return await asyncio.to_thread(write) if texts > MANY_TEXTS else write()

    def _written(self, options: _Options, rows: list[Row], names: list[str] | None, *, several: bool) -> Reply:
        results: list[bytes] = []  # not dicts: a garbage collection of a hundred thousand holds all threads up
        for number, row in enumerate(rows):
            try:
                result = options.answer(row)
            except RequestError as error:
                if not several:
                    raise
                self._core.metrics.reject(error.reason, options.model.name)
                result = {"error": str(error)}
            results.append(to_json(result if names is None else {"filename": names[number], **result}))
        model = to_json({"model": options.model.name})[:-1]
        return Reply(b"%b,%b" % (model, b'"results":[%b]}' % b",".join(results) if several else results[0][1:]))

    def _options(self, query: Mapping[str, str], timeout: str | None, started: float) -> _Options:
        model = self._core.models.get(query.get("model"), query.get("version"), started)
        classes = len(model.bundle.manifest.labels)
        top_k = _number("top_k", query.get("top_k", str(min(_TOP_K, classes))), 1, classes, ", the number of classes")
        priority = _number("priority", query.get("priority", "0"), 0, PRIORITY_LEVELS)
        given = query.get("timeout_ms", timeout)
        if timeout is not None and "timeout_ms" in query:
            raise RequestError("the timeout is given twice: as query parameter timeout_ms and as header Timeout-Ms")
        seconds = None if given is None else _number("timeout_ms", given, 1, _LONGEST_TIMEOUT_MS) / 1e3
        outputs = _outputs(query.get("outputs"), model)
        return _Options(model, top_k, priority, model.deadline(started, seconds), outputs)

    async def _known_rows(self, options: _Options, images: Encoded, record: RequestRecord) -> list[Row]:
        """As `_rows`, which has to find those alone that are not in the cache."""
        if (cache := options.model.cache) is None:
            return await self._rows(options, images, record)
        looked = []
        for image in images:
            looked.append(cache.find(image, options.outputs) if isinstance(image, bytes) else (None, None))
            await asyncio.sleep(0)  # the digests of a whole form would hold up the event loop
        asked = [image for image, (known, _) in zip(images, looked, strict=True) if known is None]
        found = iter(await self._rows(options, asked, record) if asked else ())
        record.images += len(images) - len(asked)
        rows: list[Row] = []
        for known, keep in looked:
            rows.append(row := next(found) if known is None else known[0])
            if keep is not None and not isinstance(row, Exception):
                keep(row[None])
        return rows

    async def _rows(self, options: _Options, images: Encoded, record: RequestRecord) -> list[Row]:
        """Return for each image its row (see `Contract`), or what is wrong with it."""
        decoder, steps = self._core.decoder, options.model.bundle.manifest.preprocessing
        batcher = options.model.batcher_of(options.outputs)
        encoded = [image for image in images if isinstance(image, bytes)]
        submit = partial(batcher.submit, priority=options.priority, deadline=options.deadline)
        if len(images) == len(encoded) == 1 and (here := decoder.here(encoded[0], steps, batcher, record)):
            try:
                return [*await submit([here])]
            except ImageError as error:
                error.__traceback__ = None  # a circle with its frames, which have the image, is freed late
                if not isinstance(error, TooManyPixels):
                    return [RequestError(str(error), reason="bad_image")]
        started, client = time.monotonic(), record.client or ""
        decoded = iter(await decoder.decode(encoded, steps, client=client, deadline=options.deadline))
        record.phases["decode"] = started, time.monotonic()
        pixels = [next(decoded) if isinstance(image, bytes) else image for image in images]
        for place, image in enumerate(pixels):
            if isinstance(image, ImageError):
                pixels[place] = RequestError(str(image), reason="bad_image")
            elif isinstance(image, Exception) and not isinstance(image, RequestError):
                raise image
        # Each by itself: to copy hundreds into one array here would hold up the event loop.
        readable = tuple(image[None] for image in pixels if not isinstance(image, Exception))
        answers: Iterator[Float32Array] = iter(await submit(readable) if readable else ())
        return [image if isinstance(image, Exception) else next(answers) for image in pixels]


def _query(scope: Scope) -> dict[str, str]:
    """The query's parameters; raise RequestError for one that is unknown or given twice."""
    given = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True, max_num_fields=None)
    for name, values in given.items():
        if name not in _PARAMETERS:
            raise RequestError(f"unknown query parameter '{name[:80]}': known: {', '.join(_PARAMETERS)}")
        if len(values) > 1:
            raise RequestError(f"query parameter '{name}' is given {len(values)} times")
    return {name: values[0] for name, values in given.items()}


def _outputs(given: str | None, model: ServedModel) -> tuple[str, ...]:
    """`?outputs=attention,embedding`; raise RequestError for a name that this model does not serve."""
    names = () if given is None else tuple(dict.fromkeys(given.split(",")))
    served = dict(model.contract.further)
    for name in names:
        if name not in served:
            has = ", ".join(served) or "predictions alone"
            raise RequestError(f"model '{model.name}' has no output {quoted(name)}: it has {has}")
    return names


def _number(name: str, given: str, least: int, most: int, why: str = "") -> int:
    if not (given.isascii() and given.isdigit() and len(given) < 10 and least <= int(given) <= most):
        raise RequestError(f"{name} is '{given[:40]}': expected {least} to {most}{why}")
    return int(given)
