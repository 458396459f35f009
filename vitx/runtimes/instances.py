"""Several sessions of one bundle that look like one: a batch goes to a free session."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue
from typing import Any

from vitx.core.bundle import Bundle
from vitx.core.latency import Setting
from vitx.core.preprocess import UInt8Array
from vitx.runtimes.session import Float32Array, Session


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


def tuned_setting(bundle: Bundle) -> Setting | None:
    """The best setting that `vitx bench --tune` found for this machine; None if it has not run here."""
    latency = bundle.latency()
    return latency.tuning.best if latency and latency.tuning else None
