"""Loads a bundle from disk to a warm model: hashes, certificate, session, warm-up, canary, latency curve."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from vitx.core.bundle import Bundle
from vitx.core.certificate import Certificate, Verdict
from vitx.core.console import log
from vitx.core.errors import CheckFailed, InputError
from vitx.core.machine import usable_cores
from vitx.parity.executables.choice import runtimes_by_speed
from vitx.parity.executables.first_load import require_verdict
from vitx.parity.signature import require_signature
from vitx.runtimes.instances import sessions_on, tuned_setting
from vitx.runtimes.requirements import RUNTIMES
from vitx.runtimes.session import Session, image_shape, is_cpu
from vitx.serve.limits import Batching
from vitx.serve.models.canary import Canary
from vitx.serve.models.offer import ModelKey, Offer, WarmModel, WarmOutputs
from vitx.serve.models.served_model import RowsSession, load_warm
from vitx.serve.models.warm_up import measure_curve, starting_curve
from vitx.serve.options import ServeOptions
from vitx.serve.protocol.infer import FIRST_VERSION

Judgement = TypeVar("Judgement", Certificate, Verdict)


@dataclass(frozen=True)
class Loader:
    """Loads bundles as the options of the server ask for."""

    options: ServeOptions

    def verify(self, path: Path, key: ModelKey | None = None) -> Offer:
        """Verify every file, the certificate and, where a `key` is given, the name; raise InputError or CheckFailed."""
        if self.options.require_signature is not None:
            require_signature(path, self.options.require_signature)
        bundle = Bundle.open(path)
        bundle.latency_file()  # not in the manifest: it has its own digest
        name = bundle.manifest.name
        if key is not None and key[0] != name:
            raise InputError(f"{path} is the model '{name}': to be loaded as '{key[0]}' it must be named so")
        certificate = self._passing(bundle.require_certificate)
        return Offer(bundle, certificate, FIRST_VERSION if key is None else key[1])

    def warm(self, offer: Offer) -> WarmModel:
        """Load a model and run batches. Raises InputError or CheckFailed if it does not do what its bundle says."""
        device, (instances, threads) = self.options.device, self._setting(offer.bundle)
        batching = replace(self.options.batching, instances=instances)
        runtimes = runtimes_by_speed(offer.bundle, self.options.runtime, device=device, threads=threads)
        session = load_warm(offer.bundle, batching, device=device, threads=threads, runtime=runtimes[0])
        with ExitStack() as opened:  # closes the session of a model that is refused
            opened.enter_context(session)
            offer, verdict = self._judged(offer, session)
            batching = replace(batching, preferred=tuple(sorted({profile.optimum for profile in session.profiles})))
            canary = Canary(offer.bundle, verdict or offer.certificate, session, batching.max_batch)
            curve = starting_curve(offer.bundle, session, batching)
            offer, outputs = self._with_outputs(offer, batching, threads)
            opened.pop_all()
        return WarmModel(offer, session, batching, curve, canary, verdict, runtimes, outputs)

    def _with_outputs(self, offer: Offer, batching: Batching, threads: int | None) -> tuple[Offer, WarmOutputs | None]:
        """Load and judge what gives the bundle's further outputs, another executable than that of the logits alone."""
        bundle, names = offer.bundle, tuple(str(spec.name) for spec in offer.bundle.manifest.outputs)
        if not names:
            return offer, None
        setting: dict[str, Any] = {"device": self.options.device, "threads": threads, "outputs": names}
        runtime = runtimes_by_speed(bundle, self.options.runtime, **setting)[0]
        if not RUNTIMES[runtime].outputs:
            log(f"vitx: '{bundle.manifest.name}' is served without {', '.join(names)}: {runtime} gives logits alone")
            return offer, None
        session = load_warm(bundle, batching, runtime=runtime, **setting)
        with ExitStack() as opened:
            opened.enter_context(session)
            offer, verdict = self._judged(offer, session)
            rows = RowsSession(session)
            curve = measure_curve(rows, image_shape(bundle), batching)
            opened.pop_all()
        return offer, WarmOutputs(rows, names, curve, verdict)

    def _judged(self, offer: Offer, session: Session) -> tuple[Offer, Verdict | None]:
        """The verdict on what was loaded; with --allow-uncertified a model without a passing one is shown as such."""
        if offer.certificate is None:
            return offer, None
        verdict: Verdict | None = self._passing(partial(require_verdict, offer.bundle, session))
        return offer if verdict else replace(offer, certificate=None), verdict

    def _passing(self, judge: Callable[[], Judgement]) -> Judgement | None:
        """What `judge` finds, None for what it refuses where --allow-uncertified was given."""
        try:
            return judge()
        except CheckFailed as refusal:
            if not self.options.allow_uncertified:
                raise
            log(f"warning: {refusal}; served nevertheless: --allow-uncertified was given")
            return None

    def _setting(self, bundle: Bundle) -> tuple[int, int | None]:
        """(instances, threads): as given; on a CPU with neither given, the best that was found here, or one a core."""
        given = self.options
        if not is_cpu(given.device) or given.instances is not None or given.threads is not None:
            return given.instances or 1, given.threads
        tuned = tuned_setting(bundle)
        return (tuned.instances, tuned.threads) if tuned else (sessions_on(usable_cores()), None)
