"""A model in service: its bundle, session, certificate and batcher. And the set of them that one server holds."""

import asyncio
import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from vitx.core.bundle import Bundle
from vitx.core.certificate import Certificate
from vitx.core.errors import InputError
from vitx.runtimes import load_session
from vitx.runtimes.session import Device, Session
from vitx.serve.batching.batcher import Batcher
from vitx.serve.errors import RequestError, unavailable
from vitx.serve.limits import Batching
from vitx.serve.models.instances import load_instances
from vitx.serve.models.offer import ModelKey
from vitx.serve.observe.metrics import Metrics
from vitx.serve.observe.request_record import CURRENT
from vitx.serve.protocol.infer import Contract

if TYPE_CHECKING:
    from vitx.serve.models.offer import WarmModel

_YOUNG_OBJECTS = 10_000  # that the collector waits for: the objects of some hundred requests


class ServedModel:
    """One model that answers requests. Create it on a running event loop. `fault` is what its canary found, if any."""

    def __init__(self, warm: "WarmModel", metrics: Metrics) -> None:
        self.bundle = warm.offer.bundle
        self.certificate = warm.offer.certificate
        self.canary = warm.canary
        self.fault: str | None = None
        self.contract = Contract.of(self.bundle.manifest, warm.offer.version)
        self.runtime = warm.session.describe()
        self.batcher = Batcher(
            warm.session.infer, warm.batching, curve=warm.curve, on_batch=lambda times: self.metrics.batch(times)
        )
        self.metrics = metrics.add_model(
            self.key,
            self._info(),
            lambda: self.batcher.queued,
            lambda: self.batcher.running,
            lambda: self.batcher.replaced_instances,
        )

    @property
    def name(self) -> str:
        return self.bundle.manifest.name

    @property
    def version(self) -> str:
        return self.contract.version

    @property
    def key(self) -> ModelKey:
        return self.name, self.version

    def metadata(self, versions: Sequence[str]) -> dict[str, Any]:
        """`GET /v2/models/NAME`: the protocol's fields, and vitx's own under `vitx`; `versions` are all that serve."""
        manifest = self.bundle.manifest
        own = {
            "certified": self.certificate is not None,
            "certificate": self.certificate and _summary(self.certificate),
            "runtime": self.runtime,
            "fault": self.fault,
            "precision": manifest.precision,
            "labels": manifest.labels,
            "preprocessing": manifest.preprocessing.model_dump(mode="json"),
            "data": manifest.data,
            "training_metrics": manifest.training_metrics,
            "provenance": manifest.provenance.model_dump(mode="json"),
        }
        return {**self.contract.metadata(versions), "certified": self.certificate is not None, "vitx": own}

    def config(self) -> dict[str, Any]:
        """`GET /v2/models/NAME/config`."""
        batching = self.batcher.batching
        return self.contract.config(batching.max_batch, batching.preferred or (self.batcher.full_batch,))

    def statistics(self) -> dict[str, Any]:
        """One entry of Triton's `model_stats`."""
        return self.batcher.statistics.as_json(*self.key)

    def stats(self) -> dict[str, Any]:
        """What the page's charts are drawn from; counters since the start."""
        return {
            "name": self.name,
            "version": self.version,
            "images": self.metrics.images,
            "batches": self.metrics.batches,
            "queued": self.batcher.queued,
            "running": self.batcher.running,
        }

    def _info(self) -> dict[str, str]:
        return {
            "certificate": self.certificate.verdict if self.certificate else "uncertified",
            "runtime": str(self.runtime["runtime"]),
            "provider": str(self.runtime["provider"]),
            "precision": self.bundle.manifest.precision,
        }


def load_warm(
    bundle: Bundle, batching: Batching, *, device: Device, threads: int | None, runtime: str = "onnxruntime"
) -> Session:
    """Load a bundle and run real batches of one and of two images; raise InputError if the model cannot do them.

    Larger ones run in the warm-up, up to the size that the batcher will aim at.
    """
    session = load_instances(
        lambda: load_session(bundle, runtime, device=device, threads=threads), batching.instances, threads
    )
    contract = Contract.of(bundle.manifest)
    for rows in {1, min(2, batching.max_batch)}:
        logits = session.infer(np.zeros((rows, *contract.image_shape), dtype=np.uint8))
        if logits.shape != (rows, contract.classes):
            raise InputError(
                f"{bundle.path} returns {logits.shape} for {rows} images: "
                f"its manifest says ({rows}, {contract.classes})"
            )
    return session


class Generation:
    """The requests that began between two switches of a model: what they hold may not be closed."""

    def __init__(self) -> None:
        self._requests = 0
        self._ended = asyncio.Event()
        self._ended.set()

    def enter(self) -> None:
        self._requests += 1
        self._ended.clear()

    def leave(self) -> None:
        self._requests -= 1
        if not self._requests:
            self._ended.set()

    async def end(self) -> None:
        await self._ended.wait()


class ModelSet:
    """The models of one server by name and version, and whether it takes work. Create it on a running event loop.

    A request that names no version is answered by the highest one that is loaded.
    """

    def __init__(self, expected: Iterable[ModelKey]) -> None:
        self._expected = dict.fromkeys(expected)  # in order
        self.draining = False
        self.leaving = False  # requests are still answered, and their connections closed
        self._models: dict[ModelKey, ServedModel] = {}
        self._newest: dict[str, ServedModel] = {}
        self._generation = Generation()
        self._retiring: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[ServedModel]:
        """Every version of every model that is loaded."""
        return iter([*self._models.values()])

    def __contains__(self, key: ModelKey) -> bool:
        return key in self._models

    @property
    def names(self) -> tuple[str, ...]:
        """The models that are served, or will be."""
        return tuple(dict.fromkeys(name for name, _ in self._expected))

    @property
    def ready(self) -> bool:
        """Whether every model that was asked for is warm and itself, and the server does not drain."""
        return all(self.is_ready(*key) for key in self._expected) and not self.draining

    def versions(self, name: str) -> list[str]:
        """The versions of a model that are loaded, ascending."""
        return sorted((version for of, version in self._models if of == name), key=int)

    def loaded(self, key: ModelKey) -> ServedModel | None:
        return self._models.get(key)

    def is_ready(self, name: str, version: str | None = None) -> bool:
        """Whether a model takes requests and its canary found nothing wrong."""
        model = self._newest.get(name) if version is None else self._models.get((name, version))
        return model is not None and model.fault is None and not self.draining

    def enter(self) -> Generation:
        """Begin a request, before it asks for its model; it calls `leave` of what this returns when it ends."""
        self._generation.enter()
        return self._generation

    def switch(self, model: ServedModel, retire_seconds: float) -> None:
        """Serve this model from now on; one of the same name and version ends with the last request that holds it."""
        old = self._models.get(model.key)
        self._expected[model.key] = None
        self._models[model.key] = model
        self._find_newest(model.name)
        if old is not None:
            self._retire(old, retire_seconds)
        else:
            _set_apart()

    def remove(self, key: ModelKey, retire_seconds: float) -> None:
        """Serve a model no longer."""
        self._expected.pop(key, None)
        model = self._models.pop(key)
        self._find_newest(model.name)
        self._retire(model, retire_seconds)

    def get(self, name: str | None, version: str | None = None) -> ServedModel:
        """Return a model: of None the only one, without a version the newest.

        Raises RequestError 404, or 503 while it loads or the server drains.
        """
        if self.draining:
            raise unavailable("the server is shutting down", "draining")
        if name is None:
            name = self._only_name()
        model = self._newest.get(name) if version is None else self._models.get((name, version))
        if model is None:
            raise self._missing(name, version)
        if (record := CURRENT.get()) is not None:
            record.model = name
        return model

    def _only_name(self) -> str:
        names = self.names
        if not names:
            raise RequestError("no model is loaded", status=404, reason="unknown_model")
        if len(names) > 1:
            raise RequestError(f"several models are served, choose one with ?model=: {', '.join(names)}")
        return names[0]

    def _missing(self, name: str, version: str | None) -> RequestError:
        if (name, version) in self._expected or (version is None and name in self.names):
            return unavailable(f"model '{name}' is loading", "not_ready")
        which = f"'{name[:80]}'" if version is None else f"'{name[:80]}' version {version[:40]}"
        text = f"Request for unknown model: {which} is not found"
        return RequestError(text, status=404, reason="unknown_model")

    def _find_newest(self, name: str) -> None:
        self._newest.pop(name, None)
        if versions := self.versions(name):
            self._newest[name] = self._models[name, versions[-1]]

    async def close(self) -> None:
        """Finish what every model accepted."""
        await asyncio.gather(*(model.batcher.close() for model in self._models.values()), *self._retiring)

    def _retire(self, model: ServedModel, seconds: float) -> None:
        ended, self._generation = self._generation, Generation()
        task = asyncio.create_task(_close_after(ended, model, seconds))
        self._retiring.add(task)
        task.add_done_callback(self._retiring.discard)


async def _close_after(requests: Generation, model: ServedModel, seconds: float) -> None:
    """Close a model when the requests that may hold it have ended; a client slower than `seconds` gets 503."""
    with suppress(TimeoutError):
        await asyncio.wait_for(requests.end(), seconds)
    await model.batcher.close()
    del model
    await asyncio.to_thread(_set_apart)  # batcher and threads refer to one another, and hold the old weights


def _set_apart() -> None:
    """Collect garbage, and keep what is left out of later collections, which would visit it again and again.

    Modules and models stay for as long as the server does; looking at them cost a quarter of a small request's time.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS)


def _summary(certificate: Certificate) -> dict[str, Any]:
    """A certificate without its long lists."""
    whole = certificate.model_dump(mode="json", exclude={"subject", "flips"})
    return {**whole, "flips": len(certificate.flips)}
