"""The two stages of a bundle before it serves: verified (Offer), then loaded and warmed up (WarmModel)."""

from dataclasses import dataclass

from vitx.core.bundle import Bundle
from vitx.core.certificate import Certificate, Verdict
from vitx.runtimes.session import Session
from vitx.serve.batching.latency_curve import LatencyCurve
from vitx.serve.limits import Batching
from vitx.serve.models.canary import Canary
from vitx.serve.protocol.infer import FIRST_VERSION

ModelKey = tuple[str, str]  # name and version, a whole number without leading zeros


def key_text(key: ModelKey) -> str:
    """A model's name in messages; the version is left out if it is the first."""
    name, version = key
    return f"'{name[:80]}'" if version == FIRST_VERSION else f"'{name[:80]}' version {version[:40]}"


@dataclass(frozen=True)
class Offer:
    """A verified bundle that may be served. `certificate` is None only with --allow-uncertified."""

    bundle: Bundle
    certificate: Certificate | None
    version: str = FIRST_VERSION

    @property
    def key(self) -> ModelKey:
        return self.bundle.manifest.name, self.version


@dataclass(frozen=True)
class WarmOutputs:
    """A second session of a model, which gives its further outputs too; `names`, in the order of its rows."""

    session: Session
    names: tuple[str, ...]
    curve: LatencyCurve
    verdict: Verdict | None


@dataclass(frozen=True)
class WarmModel:
    """A loaded model whose session has run batches. verdict: on exactly this executable; None if it is uncertified.

    runtimes: the one that was chosen, and after it the others that could run, fastest first. outputs: for requests that
    ask for more than logits; None where the bundle or the runtime gives no more.
    """

    offer: Offer
    session: Session
    batching: Batching
    curve: LatencyCurve
    canary: Canary
    verdict: Verdict | None = None
    runtimes: tuple[str, ...] = ()
    outputs: WarmOutputs | None = None
