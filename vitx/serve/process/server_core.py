"""What a server has whoever takes its connections: verified bundles, loaded models, metrics and routes."""

import asyncio
from collections.abc import Sequence

from starlette.types import ASGIApp

from vitx.core.errors import InputError
from vitx.serve.http.app import App
from vitx.serve.http.decode import Decoder
from vitx.serve.http.gate import Gate
from vitx.serve.http.observer_middleware import ObserverMiddleware
from vitx.serve.models.canary import replay_once
from vitx.serve.models.loading import Loader, open_offers
from vitx.serve.models.offer import Offer
from vitx.serve.models.repository import Repository, bundles_in
from vitx.serve.models.response_cache import ResponseCache
from vitx.serve.models.served_model import ModelSet, ServedModel
from vitx.serve.observe.metrics import Metrics
from vitx.serve.observe.request_record import RequestObserver
from vitx.serve.options import ServeOptions
from vitx.serve.process.process_settings import freeze_heap
from vitx.serve.protocol.shared_memory import SharedMemory
from vitx.serve.security import AllowedHosts, Tokens


def verified(options: ServeOptions) -> list[Offer]:
    """The bundles that the options name. Raises InputError or CheckFailed for one that may not be served."""
    found = {} if options.repository is None else bundles_in(options.repository, options.versions)
    for text in options.versions:
        name = text.rpartition("=")[0]
        if options.repository is None or (name and not any(key[0] == name for key in found)):
            raise InputError(f"--versions {text}: there is no such version in a --repository")
    key, uncertified = options.require_signature, options.allow_uncertified
    return open_offers(options.bundles, found, allow_uncertified=uncertified, required_signature=key)


class ServerCore:
    """Of one process: a Ray replica has one, and so has a `Server`."""

    def __init__(self, options: ServeOptions, offers: Sequence[Offer]) -> None:
        self._options = options
        self._offers = offers
        self.metrics = Metrics()
        cache = ResponseCache(options.cache) if options.cache else None
        self.models = ModelSet((offer.key for offer in offers), freeze_heap, options.server_id, cache)
        self.memory = SharedMemory(enabled=options.shared_memory)
        self.tokens = Tokens.read(options)
        self.loader = Loader(
            batching=options.batching,
            device=options.device,
            runtime=options.runtime,
            instances=options.instances,
            threads=options.threads,
            allow_uncertified=options.allow_uncertified,
            require_signature=options.require_signature,
        )
        observe = self.metrics.decode_seconds.observe
        self.decoder = Decoder(
            max_pixels=options.max_pixels,
            capacity=options.queue,
            processes=options.decode == "processes",
            on_decode=observe,
        )

    def routes(
        self, bound: str | None, repository: Repository | None = None, observers: Sequence[RequestObserver] = ()
    ) -> tuple[App, ASGIApp]:
        """The application, and what calls it: checks of who asks and the observers.

        bound: the address that the server listens on, None if others take the connections.
        """
        options = self._options
        app = App(self.models, self.decoder, options.limits, self.metrics, self.memory, repository, observers)
        hosts = AllowedHosts(bound, options.allow_host)
        gate = Gate(app, self.tokens, hosts, self.metrics.reject, metrics=options.metrics != "off")
        return app, ObserverMiddleware(gate, observers) if observers else gate

    async def load(self) -> None:
        for offer in self._offers:
            warm = await asyncio.to_thread(self.loader.warm, offer)
            self.models.switch(ServedModel(warm, self.metrics), 0)

    async def replay_canaries(self) -> None:
        """Until cancelled; at once if it is never to be done."""
        while self._options.canary_seconds:
            await asyncio.sleep(self._options.canary_seconds)
            await replay_once(self.models, self.metrics)
