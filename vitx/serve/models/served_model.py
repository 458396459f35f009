"""A model in service (bundle, session, certificate, batcher), and the set of models of one server."""

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import PureWindowsPath
from typing import Any

from vitx.runtimes.session import Float32Array
from vitx.serve.batching.batcher import Batcher, OnLogits, record_times
from vitx.serve.callbacks import awaited, settle, start_kept
from vitx.serve.errors import RequestError, unavailable
from vitx.serve.models.loading import ModelKey, WarmModel, infer_rows
from vitx.serve.models.response_cache import ModelCache, ResponseCache
from vitx.serve.observe.metrics import Metrics
from vitx.serve.observe.request_record import CURRENT_RECORD, RequestRecord
from vitx.serve.protocol.infer import Contract, InferRequest

# Keys of a certificate and of provenance whose value may be a path that is not absolute, or an address.
_PATHS = {"source", "data", "reference", "candidate"}


class ServedModel:
    """One model that answers requests. Create it on a running event loop. `fault`: what its canary found, or None."""

    def __init__(self, warm: WarmModel, metrics: Metrics) -> None:
        self._warm, self.canary = warm, warm.canary
        self.bundle, self.certificate = warm.offer.bundle, warm.offer.certificate
        self.fault: str | None = None
        self.cache: ModelCache | None = None  # set by a ModelSet that has a cache
        self.key = self.name, self.version = warm.offer.key
        self.contract = Contract.of(self.bundle.manifest, self.version, warm.outputs.names if warm.outputs else ())
        self.runtime = warm.session.describe()
        verdict = self.certificate.verdict if self.certificate else "uncertified"
        precision = self.runtime.get("precision", self.bundle.manifest.precision)
        self.metrics = metrics.add_model(
            self.key,
            (verdict, str(self.runtime["runtime"]), str(self.runtime["provider"]), str(precision)),
            lambda: self.stats()["queued"],
            lambda: self.stats()["running"],
            lambda: sum(batcher.replaced_instances for batcher in self._batchers),
        )
        make = partial(Batcher, batching=warm.batching, on_batch=self.metrics.batch)
        loaded = [(infer_rows(each), infer_rows(each.under_load), curve) for each, curve in warm.loaded]
        self._batchers = [make(alone, curve=curve, under_load=beside) for alone, beside, curve in loaded]
        self.batcher = self._batchers[0]
        self._batchers[-1].statistics = self.batcher.statistics  # of the model, whichever ran

    async def close(self) -> None:
        """Finish what the batcher accepted, then free the model."""
        for batcher in self._batchers:
            await batcher.close()
        await asyncio.to_thread(self._warm.close)

    def batcher_of(self, further: object) -> Batcher:
        """The batcher of requests for the logits alone, or of those that ask for `further` outputs too.

        They are grouped apart: a batch with an image of which an output is asked would compute it of every other.
        """
        return self._batchers[-1] if further else self.batcher

    def deadline(self, started: float, seconds: float | None) -> float | None:
        """When a request that came at `started` (time.monotonic()) is to be answered; seconds: what it gives itself."""
        seconds = self.batcher.batching.timeout if seconds is None else seconds
        return None if seconds is None else started + seconds

    def start(
        self, request: InferRequest, deadline: float | None, record: RequestRecord, on_rows: OnLogits
    ) -> Callable[[], object]:
        """Call back with the rows (see `Contract`), from the cache or the batcher; return what cancels that.

        Raises what `Batcher.enqueue` does.
        """
        known, keep = (None, None) if self.cache is None else self.cache.find(request.images.data, request.further)
        if known is not None:
            record.images = len(known)
            return asyncio.get_running_loop().call_soon(on_rows, known).cancel

        def on_logits(rows: Float32Array | Exception) -> None:
            if not isinstance(rows, Exception):
                record_times(record, submission.parts)
                if keep is not None:
                    keep(rows)
            on_rows(rows)

        batcher = self.batcher_of(request.further)
        submission = batcher.enqueue(request.images, on_logits, priority=request.priority, deadline=deadline)
        return submission.cancel

    async def infer(self, request: InferRequest, deadline: float | None) -> Float32Array:
        """`start`, for the request of the present task."""
        reply: asyncio.Future[Float32Array] = asyncio.get_running_loop().create_future()
        record = CURRENT_RECORD.get() or RequestRecord("")
        return await awaited(reply, self.start(request, deadline, record, partial(settle, reply)))

    def metadata(self, versions: Sequence[str]) -> dict[str, Any]:
        """`GET /v2/models/NAME`: the protocol's fields, and vitx's own under `vitx`. `versions`: those loaded.

        Of the paths of the machines where the model was trained, exported and certified only the last part is shown.
        """
        manifest, warm, certificate = self.bundle.manifest, self._warm, self.certificate
        verdicts = warm.verdict, warm.outputs and warm.outputs.verdict
        flips, apart = len(certificate.flips) if certificate else 0, {"subject", "flips", "executables"}
        executables = [verdict and verdict.model_dump(mode="json") for verdict in verdicts]
        made = {
            "certificate": certificate and {**certificate.model_dump(mode="json", exclude=apart), "flips": flips},
            "executable": executables[0],
            "runtime": self.runtime,
            "outputs_executable": executables[1],
            "data": manifest.data,
            "provenance": manifest.provenance.model_dump(mode="json"),
        }
        further = dict(self.contract.further)
        own = {
            "certified": self.certificate is not None,
            **_without_folders(made),
            "runtimes": warm.runtimes,
            "fault": self.fault,
            "outputs": [spec.model_dump(mode="json") for spec in manifest.outputs if spec.name in further],
            "precision": manifest.precision,
            "labels": manifest.labels,
            "preprocessing": manifest.preprocessing.model_dump(mode="json"),
            "training_metrics": manifest.training_metrics,
        }
        return {**self.contract.metadata(versions), "certified": self.certificate is not None, "vitx": own}

    def config(self) -> dict[str, Any]:
        """`GET /v2/models/NAME/config`."""
        batching = self.batcher.batching
        return self.contract.config(batching.max_batch, batching.preferred or (self.batcher.full_batch,))

    def stats(self) -> dict[str, Any]:
        """The model's entry in `/v1/stats`, from which the page draws its charts; counters since the start."""
        queued = sum(batcher.queued for batcher in self._batchers)
        running = sum(batcher.running for batcher in self._batchers)
        counters = {"images": self.metrics.images, "batches": self.metrics.batches}
        return {"name": self.name, "version": self.version, **counters, "queued": queued, "running": running}


class InFlight:
    """Counts requests in flight. ended: set while there is none."""

    def __init__(self) -> None:
        self.count = 0
        self.ended = asyncio.Event()
        self.ended.set()

    def enter(self) -> None:
        self.count += 1
        self.ended.clear()

    def leave(self) -> None:
        self.count -= 1
        if not self.count:
            self.ended.set()


class ModelSet:
    """The models of one server by name and version, and its state. Create it on a running event loop.

    A request without a version is answered by the highest loaded one. draining: new requests are refused. leaving:
    requests are answered, and their connections closed after the reply. loaded, expected (to be): by name and version.
    """

    def __init__(
        self,
        expected: Iterable[ModelKey],
        on_change: Callable[[], object] = lambda: None,
        cache: ResponseCache | None = None,
    ) -> None:
        """`on_change` is called when a model was added, and on another thread when one was closed. cache: of all."""
        self.expected = dict.fromkeys(expected)  # an ordered set
        self._on_change, self._cache = on_change, cache
        self.draining = 0.0  # since when, time.monotonic()
        self.leaving = False
        self.loaded: dict[ModelKey, ServedModel] = {}
        self._newest: dict[str, ServedModel] = {}
        # Requests that began before the first switch, before the second, …: a model they may use is closed after them.
        self._generations = [InFlight()]
        self._retiring: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[ServedModel]:
        """Every loaded version of every model."""
        return iter([*self.loaded.values()])

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the models that are loaded or are to be."""
        return tuple(dict.fromkeys(name for name, _ in self.expected))

    @property
    def ready(self) -> bool:
        """Whether every expected model is loaded and passes its canary, and the server does not drain."""
        return all(self.is_ready(*key) for key in self.expected) and not self.draining

    def versions(self, name: str) -> list[str]:
        """The loaded versions of a model, ascending."""
        return sorted((version for of, version in self.loaded if of == name), key=int)

    def statistics(self, of: ServedModel | None = None, version: str | None = None) -> dict[str, Any]:
        """Triton's, of every version of a model, or of that one if it was named; of every model without one."""
        named = [each for each in self if of in (None, each) or (not version and each.name == of.name)]
        return {"model_stats": [each.batcher.statistics.as_json(*each.key) for each in named]}

    def is_ready(self, name: str, version: str | None = None) -> bool:
        """Whether a model takes requests and passes its canary."""
        model = self._newest.get(name) if version is None else self.loaded.get((name, version))
        return model is not None and model.fault is None and not self.draining

    @property
    def active(self) -> int:
        """How many requests are in flight."""
        return sum(requests.count for requests in self._generations)

    async def idle(self) -> None:
        """Return when none is; call when no more begin."""
        for requests in self._generations:
            await requests.ended.wait()

    def enter(self) -> InFlight:
        """Call when a request starts, before `get`; call `leave` of the result when it ends."""
        generation = self._generations[-1]
        generation.enter()
        return generation

    def switch(self, model: ServedModel, retire_seconds: float) -> None:
        """Serve this model; one of the same name and version is closed after the last request that may use it."""
        old = self.loaded.get(model.key)
        if self._cache is not None:
            model.cache = ModelCache(self._cache, model.batcher.statistics, model.metrics.lookups)
        self.expected[model.key] = None
        self.loaded[model.key] = model
        self._find_newest(model.name)
        if old is not None:
            self._retire(old, retire_seconds)
        else:
            self._on_change()

    def remove(self, key: ModelKey, retire_seconds: float) -> None:
        """Stop serving a model; it is closed after the last request that may use it."""
        self.expected.pop(key, None)
        model = self.loaded.pop(key)
        self._find_newest(model.name)
        self._retire(model, retire_seconds)

    def get(self, name: str | None, version: str | None = None, started: float = math.inf) -> ServedModel:
        """Return a model: the only one if `name` is None, the highest version if `version` is None.

        Raises RequestError: 404 for an unknown model, 503 while it loads, or if the server drained when it `started`.
        """
        if self.draining and not started < self.draining:
            raise unavailable("the server is shutting down", "draining")
        name = self._only_name() if name is None else name
        if (model := self._newest.get(name) if version is None else self.loaded.get((name, version))) is None:
            raise self._missing(name, version)
        if (record := CURRENT_RECORD.get()) is not None:
            record.model = name
        return model

    def _only_name(self) -> str:
        if len(names := self.names) > 1:
            raise RequestError(f"several models are served, choose one with ?model=: {', '.join(names)}")
        if not names:
            raise RequestError("no model is loaded", status=404, reason="unknown_model")
        return names[0]

    def _missing(self, name: str, version: str | None) -> RequestError:
        if (name, version) in self.expected or (version is None and name in self.names):
            return unavailable(f"model '{name}' is loading", "not_ready")
        which = f"'{name[:80]}'" if version is None else f"'{name[:80]}' version {version[:40]}"
        return RequestError(f"Request for unknown model: {which} is not found", status=404, reason="unknown_model")

    def _find_newest(self, name: str) -> None:
        self._newest.pop(name, None)
        if versions := self.versions(name):
            self._newest[name] = self.loaded[name, versions[-1]]

    async def close(self) -> None:
        """Close every model after the requests it has accepted."""
        await asyncio.gather(*(model.close() for model in self.loaded.values()), *self._retiring)

    def _retire(self, model: ServedModel, seconds: float) -> None:
        before = self._generations
        self._generations = [*(requests for requests in self._generations if requests.count), InFlight()]
        start_kept(self._close_after(before, model, seconds), self._retiring)

    async def _close_after(self, before: Sequence[InFlight], model: ServedModel, seconds: float) -> None:
        """Close a model when the requests that may use it have ended; a client slower than `seconds` gets 503."""
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(requests.ended.wait() for requests in before)), seconds)
        await model.close()
        if model.cache is not None:
            await model.cache.forget()
        del model  # batcher and threads refer to each other: a collection of garbage frees the old weights
        await asyncio.to_thread(self._on_change)


def _without_folders(value: Any, *, is_path: bool = False) -> Any:
    """A JSON value in which every text that is an absolute path, or a path of any kind by its key, is its last part."""
    if isinstance(value, dict):
        return {name: _without_folders(entry, is_path=name in _PATHS) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_without_folders(entry) for entry in value]
    if isinstance(value, str) and (is_path or PureWindowsPath(value).root):  # which knows either kind of slashes
        return PureWindowsPath(value).name or value
    return value
