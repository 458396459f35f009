"""What the protocols of one server process share: models, metrics, limits, tokens; whoever takes the connections."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from vitx import __version__
from vitx.core.console import log
from vitx.core.errors import InputError
from vitx.serve.errors import RequestError
from vitx.serve.http.decode import Decoder
from vitx.serve.limits import MemoryBudget
from vitx.serve.models.canary import replay_once
from vitx.serve.models.loading import Loader, ModelKey, Offer, key_text
from vitx.serve.models.repository import Repository, bundles_in
from vitx.serve.models.response_cache import ResponseCache
from vitx.serve.models.served_model import ModelSet, ServedModel
from vitx.serve.observe.metrics import Metrics
from vitx.serve.observe.request_record import RequestObserver, RequestRecord
from vitx.serve.options import ServeOptions
from vitx.serve.process.process_settings import freeze_heap, return_freed_memory
from vitx.serve.protocol.shared_memory import SharedMemory
from vitx.serve.security import Tokens

_log = logging.getLogger("vitx.serve")


def verified(options: ServeOptions) -> list[Offer]:
    """Open and verify the bundles that the options name: files, signatures if there is a key for them, certificates.

    Raises InputError or CheckFailed for one that may not be served.
    """
    found = {} if options.repository is None else bundles_in(options.repository, options.versions)
    for text in options.versions:
        name, _, policy = text.rpartition("=")
        if options.repository is None or (name and not any(key[0] == name for key in found)):
            raise InputError(f"--versions {text}: there is no such version in a --repository")
        for version in policy.split(",") if name and policy[0].isdigit() else ():
            if (name, version) not in found:  # it may come later
                log(f"warning: --versions {text}: there is no version {version} of '{name}' yet")
    if not options.bundles and not found:
        raise InputError("no bundle to serve: give one, or a --repository that has some")
    offers: dict[ModelKey, Offer] = {}
    for key, path in [*((None, path) for path in options.bundles), *found.items()]:
        offer = Loader(options).verify(path, key)
        if offer.key in offers:
            raise InputError(f"two bundles are named {key_text(offer.key)}: {offers[offer.key].bundle.path} and {path}")
        offers[offer.key] = offer
    return list(offers.values())


class ServerCore:
    """Of one process: a Ray replica has one, and so has a `Server`. Create it on a running event loop.

    repository: set where clients may load and unload models. observers: of every request.
    """

    def __init__(
        self, options: ServeOptions, offers: Sequence[Offer], observers: Sequence[RequestObserver] = ()
    ) -> None:
        self.options, self.limits, self.offers, self.observers = options, options.limits, offers, observers
        self.metrics = Metrics()
        cache = ResponseCache(options.cache) if options.cache else None
        self.models = ModelSet((offer.key for offer in offers), freeze_heap, cache)
        self.memory = SharedMemory(enabled=options.shared_memory)
        self.tokens = Tokens(options)
        self.loader = Loader(options)
        self.budget = MemoryBudget(self.limits.memory_bytes)
        self.repository: Repository | None = None
        apart, timed = options.decode == "processes", self.metrics.decode_seconds.observe
        self.decoder = Decoder(max_pixels=options.max_pixels, capacity=options.queue, processes=apart, on_decode=timed)

    def about(self) -> dict[str, Any]:
        """The server's metadata, with the protocol's extensions that it offers."""
        offered = ["binary_tensor_data", "classification", "model_configuration", "schedule_policy", "statistics"]
        offered += ["system_shared_memory"] * self.memory.enabled + ["model_repository"] * (self.repository is not None)
        return {"name": self.options.server_id, "version": __version__, "extensions": offered}

    def failure(self, error: Exception, asked: str, record: RequestRecord) -> RequestError:
        """What the client of a request that failed is told; counts a refusal, logs an internal error."""
        if isinstance(error, RequestError):
            self.metrics.reject(error.reason, record.model or "")
            error.__traceback__ = None  # a circle with its frames, which have the body, is freed late
            return error
        _log.error("internal error while answering %s", asked, exc_info=error)
        return RequestError("internal error: see the server's log", status=500)

    async def load(self) -> None:
        self._upkeep = asyncio.create_task(return_freed_memory(lambda: self.models.active))
        for offer in self.offers:
            self.models.switch(ServedModel(await asyncio.to_thread(self.loader.warm, offer), self.metrics), 0)

    async def replay_canaries(self) -> None:
        """Until cancelled; at once if it is never to be done."""
        while self.options.canary_seconds:
            await asyncio.sleep(self.options.canary_seconds)
            await replay_once(self.models, self.metrics)
