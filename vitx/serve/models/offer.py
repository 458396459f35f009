"""A bundle on its way into service: verified, then warm."""

from dataclasses import dataclass

from vitx.core.bundle import Bundle
from vitx.core.certificate import Certificate
from vitx.runtimes.session import Session
from vitx.serve.batching.latency_curve import LatencyCurve
from vitx.serve.limits import Batching
from vitx.serve.models.canary import Canary
from vitx.serve.protocol.infer import FIRST_VERSION

ModelKey = tuple[str, str]  # name and version: a whole number, written without leading zeros


def key_text(key: ModelKey) -> str:
    """How messages name a model: the first version by its name alone."""
    name, version = key
    return f"'{name[:80]}'" if version == FIRST_VERSION else f"'{name[:80]}' version {version[:40]}"


@dataclass(frozen=True)
class Offer:
    """A verified bundle that may be served; without a certificate only because the user allowed it."""

    bundle: Bundle
    certificate: Certificate | None
    version: str = FIRST_VERSION

    @property
    def key(self) -> ModelKey:
        return self.bundle.manifest.name, self.version


@dataclass(frozen=True)
class WarmModel:
    """An offer whose session has answered real batches."""

    offer: Offer
    session: Session
    batching: Batching
    curve: LatencyCurve
    canary: Canary
