"""Several sessions of one bundle that look like one: a batch goes to a free session."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue
from typing import Any

from vitx.core.bundle import Bundle
from vitx.core.console import log
from vitx.core.latency import Setting
from vitx.core.machine import usable_cores
from vitx.core.preprocess import UInt8Array
from vitx.runtimes.requirements import find, reported_name
from vitx.runtimes.session import Device, Float32Array, Session, is_cpu

MAX_SESSIONS = 8  # each may have a copy of the weights


class SessionPool(Session):
    """Owns its sessions. `infer` may be called from as many threads at once as there are sessions; one more waits."""

    def __init__(self, sessions: Sequence[Session]) -> None:
        super().__init__()
        first = sessions[0]
        self._sessions, self.profiles, self.callers = sessions, first.profiles, len(sessions)
        self.artefacts, self.outputs = first.artefacts, first.outputs
        self._free: SimpleQueue[Session] = SimpleQueue()
        for session in sessions:
            self._free.put(session)

    def _infer(self, images: UInt8Array) -> Float32Array:
        with self._borrowed() as session:
            return session.infer(images)

    def _infer_outputs(self, images: UInt8Array) -> dict[str, Float32Array]:
        with self._borrowed() as session:
            return session.infer_outputs(images)

    @contextmanager
    def _borrowed(self) -> Iterator[Session]:
        session = self._free.get()
        try:
            yield session
        finally:
            self._free.put(session)

    def _close(self) -> None:
        for session in self._sessions:
            session.close()

    def describe(self) -> dict[str, Any]:
        return {**self._sessions[0].describe(), "sessions": len(self._sessions)}


class ElasticSession(Session):
    """A batch that is computed alone takes every core, of several at once each takes its share of them.

    Owns both sessions, `alone` and `beside`, so the weights are in memory twice. `callers` is that of `beside`.
    """

    def __init__(self, alone: Session, beside: Session) -> None:
        super().__init__()
        self._alone, self._beside = alone, beside
        self.artefacts, self.outputs, self.callers = alone.artefacts, alone.outputs, beside.callers

    @property
    def under_load(self) -> Session:
        return self._beside

    def _chosen(self) -> Session:
        return self._alone if self._calls == 1 else self._beside

    def _infer(self, images: UInt8Array) -> Float32Array:
        return self._chosen().infer(images)

    def _infer_outputs(self, images: UInt8Array) -> dict[str, Float32Array]:
        return self._chosen().infer_outputs(images)

    def _close(self) -> None:
        self._alone.close()
        self._beside.close()

    def describe(self) -> dict[str, Any]:
        """That of a batch alone, and the threads that several have each."""
        beside = {"batches": self.callers, "threads": self._beside.describe().get("threads")}
        return {**self._alone.describe(), "side_by_side": beside}


def load_elastic(load: Callable[[int | None], Session], instances: int, cores: int) -> Session:
    """Return a session for so many callers at once. `load(threads)` loads one, of every core for None."""
    threads = max(1, cores // instances)
    with ExitStack() as opened:
        alone = opened.enter_context(load(None))
        session = ElasticSession(alone, load_instances(lambda: load(threads), instances, threads))
        opened.pop_all()
    return session


def runs_on_cpu(runtime: str, device: Device) -> bool:
    """Whether a runtime computes on the CPU here: by its own device if it has one, else by `device`.

    Raises InputError for an unknown one.
    """
    own = find(runtime).device
    return is_cpu(device if own == "auto" else own)


def serving_setting(
    bundle: Bundle, runtime: str, device: Device, instances: int | None, threads: int | None
) -> tuple[int, int | None]:
    """(instances, threads): as given; on a CPU with neither given, the best that was found here, or one a core."""
    if instances is not None or threads is not None or not runs_on_cpu(runtime, device):
        return instances or 1, threads
    tuned = tuned_setting(bundle, runtime)
    return (tuned.instances, tuned.threads) if tuned else (sessions_on(usable_cores()), None)


def load_for_callers(
    load: Callable[[int | None], Session], instances: int, threads: int | None, *, on_cpu: bool
) -> Session:
    """Return a session for so many callers at once, each with `threads` threads for its batch.

    Several callers on a CPU without a number of threads share its cores (`load_elastic`).
    """
    if threads is None and instances > 1 and on_cpu:
        return load_elastic(load, instances, usable_cores())
    return load_instances(lambda: load(threads), instances, threads)


def sessions_on(cores: int) -> int:
    """As many sessions of equal threads as leave no more than a tenth of the cores idle, up to MAX_SESSIONS."""
    return next(n for n in range(min(cores, MAX_SESSIONS), 0, -1) if cores // n * n >= 0.9 * cores)


def load_instances(load: Callable[[], Session], instances: int, threads: int | None) -> Session:
    """Return a session that `instances` callers may use at once, each with `threads` threads for its batch.

    A session of one thread may be concurrent: it computes on its callers' threads, and serves all of them with one copy
    of the weights. Callers of any other would share its thread pool, or queue for its one stream (OpenVINO), so each
    gets a session, and a copy of the weights, of its own.
    """
    first = load()
    if instances == 1 or (threads == 1 and first.concurrent):
        first.callers = instances
        return first
    with ExitStack() as opened:  # closes those that were loaded when the next one cannot be
        sessions = [opened.enter_context(first)]
        sessions += [opened.enter_context(load()) for _ in range(instances - 1)]
        opened.pop_all()
    return SessionPool(sessions)


def tuned_setting(bundle: Bundle, runtime: str) -> Setting | None:
    """The best setting that `vitx bench --tune` found for this machine; None if it has not run here on this runtime.

    Where it ran on another one, which is the only one that is kept, the log says so.
    """
    latency = bundle.latency()
    tuning = latency.tuning if latency else None
    if tuning is None:
        return None
    tuned = tuning.runtime.get("runtime")
    if tuned == reported_name(runtime):
        return tuning.best
    name, again = bundle.manifest.name, f"`vitx bench BUNDLE --tune --runtime {runtime}`"
    log(f"vitx: '{name}' was tuned in {tuned} and not in {runtime}, for which {again} finds the setting")
    return None
