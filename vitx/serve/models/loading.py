"""Loads a bundle from disk to a warm model: hashes, certificate, session, warm-up, canary, latency curve."""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from vitx.core.bundle import LATENCY, Bundle, files_folder, local_bundle
from vitx.core.certificate import Certificate, Verdict
from vitx.core.console import log
from vitx.core.errors import CheckFailed, InputError
from vitx.core.preprocess import UInt8Array
from vitx.parity.executables.choice import runtimes_by_speed
from vitx.parity.executables.first_load import require_verdict
from vitx.parity.signature import require_signature
from vitx.runtimes import load_session
from vitx.runtimes.instances import load_for_callers, runs_on_cpu, serving_setting
from vitx.runtimes.requirements import RUNTIMES
from vitx.runtimes.session import LOGITS, Device, Session, image_shape
from vitx.serve.batching.latency_curve import LatencyCurve
from vitx.serve.batching.request_queue import Infer
from vitx.serve.limits import Batching
from vitx.serve.models.canary import Canary
from vitx.serve.options import ServeOptions
from vitx.serve.protocol.infer import FIRST_VERSION, Contract

ModelKey = tuple[str, str]  # name and version, a whole number without leading zeros
FileStates = tuple[tuple[str, int, int, int, int], ...]
Judgement = TypeVar("Judgement", Certificate, Verdict)

_SECONDS = 0.5  # for the whole measurement; a size that no longer fits is not measured, or less often
_CALLS = 12  # of each size at most
_LONE_CALLS = 2  # of one image on all cores


def key_text(key: ModelKey) -> str:
    """A model's name in messages; the version is left out if it is the first."""
    name, version = key
    return f"'{name[:80]}'" if version == FIRST_VERSION else f"'{name[:80]}' version {version[:40]}"


def file_states(path: Path) -> FileStates:
    """(name, inode, mode, mtime, size) of a bundle's files: changes when one of them does. (): no bundle."""
    with suppress(OSError):  # one of them went meanwhile
        path = files_folder(path)
        files = [file for file in sorted(path.rglob("[!.]*")) if file.name != LATENCY and file.is_file()]
        stats = [(str(file.relative_to(path)), file.stat()) for file in files]
        return tuple((name, stat.st_ino, stat.st_mode, stat.st_mtime_ns, stat.st_size) for name, stat in stats)
    return ()


@dataclass(frozen=True)
class Offer:
    """A verified bundle that may be served. `certificate` is None only with --allow-uncertified.

    given: its path or URL, as it was given. states: of its files when they were verified.
    """

    bundle: Bundle
    certificate: Certificate | None
    version: str = FIRST_VERSION
    given: Path | None = None
    states: FileStates = ()

    @property
    def key(self) -> ModelKey:
        return self.bundle.manifest.name, self.version


class WarmOutputs(NamedTuple):
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

    @property
    def loaded(self) -> list[tuple[Session, LatencyCurve]]:
        """That of the logits alone, and the one that gives `outputs` too."""
        return [(each.session, each.curve) for each in (self, self.outputs) if each is not None]

    def close(self) -> None:
        for session, _ in self.loaded:
            session.close()


@dataclass(frozen=True)
class Loader:
    """Loads bundles as the options of the server ask for."""

    options: ServeOptions

    def verify(self, path: Path, key: ModelKey | None = None) -> Offer:
        """Verify every file, the certificate and, where a `key` is given, the name.

        Raises InputError or CheckFailed, for a URL EnvironmentMissing too.
        """
        place = Path(os.path.realpath(local_bundle(path)))  # to the end the same, even if a link is moved meanwhile
        states, bundle = file_states(place), Bundle.open(place)
        if self.options.require_signature is not None:
            require_signature(bundle.path, self.options.require_signature)
        bundle.latency_file()  # not in the manifest: it has its own digest
        name = bundle.manifest.name
        if key is not None and key[0] != name:
            raise InputError(f"{path} is the model '{name}': to be loaded as '{key[0]}' it must be named so")
        certificate = self._passing(bundle.require_certificate)
        return Offer(bundle, certificate, FIRST_VERSION if key is None else key[1], path, states)

    def warm(self, offer: Offer, known: Canary | None = None) -> WarmModel:
        """Load a model and run batches; known: see `Canary`. Raises InputError or CheckFailed where it is refused."""
        given, device = self.options, self.options.device
        runtimes = runtimes_by_speed(offer.bundle, given.runtime, device=device, threads=given.threads)
        instances, threads = serving_setting(offer.bundle, runtimes[0], device, given.instances, given.threads)
        batching = replace(given.batching, instances=instances)
        with ExitStack() as opened:  # closes the sessions of a model that is refused
            session = load_warm(offer.bundle, batching, opened, device=device, threads=threads, runtime=runtimes[0])
            offer, verdict = self._judged(offer, session)
            batching = fitted(batching, session)
            canary = Canary(offer.bundle, verdict or offer.certificate, session, batching.max_batch, known)
            curve = measure_curve(session, image_shape(offer.bundle), batching)
            offer, outputs = self._with_outputs(offer, batching, threads, opened)
            if file_states(offer.bundle.path) != offer.states:
                raise CheckFailed(f"{offer.bundle.path} was replaced while it was loaded: load it again")
            opened.pop_all()
        return WarmModel(offer, session, batching, curve, canary, verdict, runtimes, outputs)

    def _with_outputs(
        self, offer: Offer, batching: Batching, threads: int | None, opened: ExitStack
    ) -> tuple[Offer, WarmOutputs | None]:
        """Load and judge what gives the bundle's further outputs, another executable than that of the logits alone."""
        bundle, names = offer.bundle, tuple(str(spec.name) for spec in offer.bundle.manifest.outputs)
        if not names:
            return offer, None
        setting: dict[str, Any] = {"device": self.options.device, "threads": threads, "outputs": names}
        runtime = runtimes_by_speed(bundle, self.options.runtime, **setting)[0]
        if not RUNTIMES[runtime].outputs:
            log(f"vitx: '{bundle.manifest.name}' is served without {', '.join(names)}: {runtime} gives logits alone")
            return offer, None
        session = load_warm(bundle, batching, opened, runtime=runtime, **setting)
        offer, verdict = self._judged(offer, session)
        return offer, WarmOutputs(session, names, measure_curve(session, image_shape(bundle), batching), verdict)

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


def infer_rows(session: Session) -> Infer:
    """What computes one row an image: the logits, and then each further output of the session (see `Contract`)."""
    if not session.outputs:
        return session.infer
    return lambda images: np.concatenate([*session.infer_outputs(images).values()], axis=1)


def load_warm(
    bundle: Bundle,
    batching: Batching,
    opened: ExitStack,
    *,
    device: Device,
    threads: int | None,
    runtime: str = "onnxruntime",
    outputs: Sequence[str] = (),
) -> Session:
    """Load a bundle and run batches of one and of two images; raise InputError if a result has another shape.

    The warm-up runs larger batches, up to the size that the batcher will aim at. threads: of an instance; where several
    are on a CPU, None lets a batch that is alone take every core, and each of several its share. `opened` closes it.
    """

    def load(threads: int | None) -> Session:
        return load_session(bundle, runtime, device=device, threads=threads, outputs=outputs)

    session = load_for_callers(load, batching.instances, threads, on_cpu=runs_on_cpu(runtime, device))
    opened.enter_context(session)
    contract = Contract.of(bundle.manifest, outputs=outputs)
    for rows in {1, min(2, batching.max_batch)}:
        found = session.infer_outputs(np.zeros((rows, *contract.image_shape), dtype=np.uint8))
        for width, (name, values) in zip(contract.widths().values(), found.items(), strict=True):
            if values.shape != (rows, width):
                what = "" if name == LOGITS else f" as {name}"
                text = f"{bundle.path} returns {values.shape}{what} for {rows} images"
                raise InputError(f"{text}: its manifest says ({rows}, {width})")
    return session


def fitted(batching: Batching, session: Session) -> Batching:
    """Of a session with profiles the batches are of their best sizes."""
    return replace(batching, preferred=tuple(sorted({profile.optimum for profile in session.profiles})))


def measure_curve(session: Session, shape: Sequence[int], batching: Batching) -> LatencyCurve:
    """Time batches of 1, 2, 4, … images alternately, on all instances at once, for about `_SECONDS`.

    shape: of one image. For half of the time sizes are added from the smallest up, so that of a slow model at least the
    small ones are measured. Then each gets as much time as the others, the smaller ones in more calls. The first call
    of a size allocates, compiles or chooses algorithms, and may take a hundred times as long as the next: it counts
    only where there was no time for another. Several instances run once before that, most of them for the first time.
    """
    images, several = np.zeros((batching.max_batch, *shape), dtype=np.uint8), session.under_load
    taken: dict[int, list[float]] = {}
    with ThreadPoolExecutor(batching.instances) as callers:

        def measured(rows: int) -> list[float]:
            """Seconds of one batch on each instance."""
            return list(callers.map(_seconds_of, [several] * batching.instances, repeat(images[:rows])))

        if batching.instances > 1:
            measured(1)
        start = time.perf_counter()
        sizes = {2**exponent for exponent in range(batching.max_batch.bit_length())} | {*batching.preferred}
        for rows in sorted({min(size, batching.max_batch) for size in (*sizes, batching.max_batch)}):
            each = min((min(times) / size for size, times in taken.items()), default=0.0)
            if taken and time.perf_counter() + rows * each > start + _SECONDS / 2:
                break
            taken[rows] = measured(rows)
        few = [*taken]
        while few := [rows for rows in few if len(taken[rows]) <= _CALLS * batching.instances]:
            rows = min(few, key=lambda rows: sum(taken[rows][batching.instances :]))
            if time.perf_counter() + min(taken[rows]) > start + _SECONDS:
                few.remove(rows)  # and a smaller one may fit
            else:
                taken[rows] += measured(rows)
    counted = {rows: times[batching.instances :] or times for rows, times in taken.items()}
    medians = {rows: float(np.median(times)) for rows, times in counted.items()}
    if several is not session:  # one image is mostly alone, and planned so; sizes are chosen by the least times
        medians[1] = min(medians[1], *(_seconds_of(session, images[:1]) for _ in range(_LONE_CALLS)))
    return LatencyCurve(medians, {rows: min(times) for rows, times in counted.items()})


def _seconds_of(session: Session, images: UInt8Array) -> float:
    infer = infer_rows(session)
    start = time.perf_counter()
    infer(images)
    return time.perf_counter() - start
