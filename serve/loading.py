"""From a folder to a model that may be switched to: hashes, certificate, contract, warm-up, canary, latency curve."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from vitx.core.bundle import Bundle
from vitx.core.certificate import Certificate
from vitx.core.console import log
from vitx.core.errors import CheckFailed, InputError
from vitx.core.machine import local_gpus
from vitx.serve.bench.autotune import tuned_setting
from vitx.serve.canary import Canary
from vitx.serve.latency_curve import LatencyCurve
from vitx.serve.limits import Batching
from vitx.serve.runtimes import Device, Session
from vitx.serve.served_model import load_warm
from vitx.serve.warm_up import starting_curve


@dataclass(frozen=True)
class Offer:
    """A verified bundle that may be served; without a certificate only because the user allowed it."""

    bundle: Bundle
    certificate: Certificate | None


@dataclass(frozen=True)
class WarmModel:
    """An offer whose session has answered real batches."""

    offer: Offer
    session: Session
    batching: Batching
    curve: LatencyCurve
    canary: Canary


@dataclass(frozen=True)
class Loader:
    """How bundles are loaded. Instances and threads that are None come from `vitx bench --tune`, if it ran here."""

    batching: Batching
    device: Device = "auto"
    runtime: str = "onnxruntime"
    instances: int | None = None
    threads: int | None = None
    allow_uncertified: bool = False

    def verify(self, path: Path) -> Offer:
        """Verify every file and the certificate; raise InputError or CheckFailed."""
        bundle = Bundle.open(path)
        bundle.latency_file()  # carries its own digest
        return Offer(bundle, _certificate(bundle, allow_uncertified=self.allow_uncertified))

    def warm(self, offer: Offer) -> WarmModel:
        """Load a model and run it: this computes. Raises InputError or CheckFailed for one that breaks its promises."""
        instances, threads = self._setting(offer.bundle)
        batching = replace(self.batching, instances=instances)
        session = load_warm(offer.bundle, batching, device=self.device, threads=threads, runtime=self.runtime)
        canary = Canary(offer.bundle, offer.certificate, session, batching.max_batch)
        return WarmModel(offer, session, batching, starting_curve(offer.bundle, session, batching), canary)

    def _setting(self, bundle: Bundle) -> tuple[int, int | None]:
        """(instances, threads): what was asked for; where nothing was, what was found best on this machine."""
        on_cpu = self.device == "cpu" or (self.device == "auto" and not local_gpus())
        if not on_cpu or self.instances is not None or self.threads is not None:
            return self.instances or 1, self.threads
        tuned = tuned_setting(bundle)
        return (tuned.instances, tuned.threads) if tuned else (1, None)


def open_offers(paths: Sequence[Path], *, allow_uncertified: bool) -> list[Offer]:
    """Open and verify bundles and their certificates; raise InputError or CheckFailed."""
    if not paths:
        raise InputError("no bundle to serve: give one, or a --repository that has some")
    loader = Loader(Batching(), allow_uncertified=allow_uncertified)
    offers: dict[str, Offer] = {}
    for path in paths:
        offer = loader.verify(path)
        name = offer.bundle.manifest.name
        if name in offers:
            raise InputError(f"two bundles are named '{name}': {offers[name].bundle.path} and {path}")
        offers[name] = offer
    return list(offers.values())


def _certificate(bundle: Bundle, *, allow_uncertified: bool) -> Certificate | None:
    try:
        return bundle.require_certificate()
    except CheckFailed as refusal:
        if not allow_uncertified:
            raise
        log(f"warning: {refusal}; served nevertheless: --allow-uncertified was given")
        return None
