"""A model in service: its bundle, session, certificate and batcher. And the set of them that one server holds."""

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np

from vitx.core.bundle import Bundle, Certificate
from vitx.core.errors import InputError
from vitx.serve.batcher import Batcher
from vitx.serve.errors import RequestError, unavailable
from vitx.serve.limits import Batching
from vitx.serve.metrics import Metrics
from vitx.serve.protocol import VERSION, Contract
from vitx.serve.runtimes import Device, Session, load_session


class ServedModel:
    """One model that answers requests. Create it on a running event loop, after `load_warm`."""

    def __init__(
        self, bundle: Bundle, certificate: Certificate | None, session: Session, batching: Batching, metrics: Metrics
    ) -> None:
        self.bundle = bundle
        self.certificate = certificate
        self.contract = Contract.of(bundle.manifest)
        self.runtime = session.describe()
        self.batcher = Batcher(session.infer, batching, on_batch=lambda times: self.metrics.batch(times))
        self.metrics = metrics.add_model(
            self.name, self._info(), lambda: self.batcher.queued, lambda: self.batcher.running
        )

    @property
    def name(self) -> str:
        return self.bundle.manifest.name

    def metadata(self) -> dict[str, Any]:
        """`GET /v2/models/NAME`: the protocol's fields, and vitx's own under `vitx`."""
        manifest = self.bundle.manifest
        own = {
            "certified": self.certificate is not None,
            "certificate": self.certificate and _summary(self.certificate),
            "runtime": self.runtime,
            "precision": manifest.precision,
            "labels": manifest.labels,
            "preprocessing": manifest.preprocessing.model_dump(mode="json"),
            "data": manifest.data,
            "training_metrics": manifest.training_metrics,
            "provenance": manifest.provenance.model_dump(mode="json"),
        }
        return {**self.contract.metadata(), "certified": self.certificate is not None, "vitx": own}

    def stats(self) -> dict[str, Any]:
        """What the page's charts are drawn from; counters since the start."""
        return {
            "name": self.name,
            "images": self.metrics.images,
            "batches": self.metrics.batches,
            "queued": self.batcher.queued,
            "running": self.batcher.running,
        }

    def _info(self) -> dict[str, str]:
        return {
            "version": VERSION,
            "certificate": self.certificate.verdict if self.certificate else "uncertified",
            "runtime": str(self.runtime["runtime"]),
            "provider": str(self.runtime["provider"]),
            "precision": self.bundle.manifest.precision,
        }


def _summary(certificate: Certificate) -> dict[str, Any]:
    """A certificate without its long lists."""
    whole = certificate.model_dump(mode="json", exclude={"subject", "flips"})
    return {**whole, "flips": len(certificate.flips)}


def load_warm(bundle: Bundle, batching: Batching, *, device: Device, threads: int | None) -> Session:
    """Load a bundle and run real batches of one and of `max_batch`; raise InputError if the model cannot do them."""
    session = load_session(bundle, device=device, threads=threads)
    contract = Contract.of(bundle.manifest)
    for rows in {1, batching.max_batch}:
        logits = session.infer(np.zeros((rows, *contract.image_shape), dtype=np.uint8))
        if logits.shape != (rows, contract.classes):
            raise InputError(
                f"{bundle.path} returns {logits.shape} for {rows} images: "
                f"its manifest says ({rows}, {contract.classes})"
            )
    return session


class ModelSet:
    """The models of one server by name, and whether the server takes work."""

    def __init__(self, expected: tuple[str, ...]) -> None:
        self.expected = expected
        self.draining = False
        self._models: dict[str, ServedModel] = {}

    @property
    def ready(self) -> bool:
        """Whether every model that was asked for is warm, and the server does not drain."""
        return not self.draining and all(name in self._models for name in self.expected)

    @property
    def loaded(self) -> Mapping[str, ServedModel]:
        return self._models

    def add(self, model: ServedModel) -> None:
        self._models[model.name] = model

    def get(self, name: str | None) -> ServedModel:
        """Return a model, for None the only one; raise RequestError 404, or 503 while it loads or the server drains."""
        if self.draining:
            raise unavailable("the server is shutting down", "draining")
        if name is None:
            if len(self.expected) > 1:
                raise RequestError(f"several models are served, choose one with ?model=: {', '.join(self.expected)}")
            name = self.expected[0]
        model = self._models.get(name)
        if model is not None:
            return model
        if name in self.expected:
            raise unavailable(f"model '{name}' is loading", "not_ready")
        raise RequestError(f"request for unknown model: '{name[:80]}' is not found", status=404, reason="unknown_model")

    async def close(self) -> None:
        await asyncio.gather(*(model.batcher.close() for model in self._models.values()))
