"""Several sessions of one bundle behind one: a batch goes to whichever is free."""

from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

from vitx.core.bundle import Bundle
from vitx.core.latency import Setting
from vitx.core.preprocess import UInt8Array
from vitx.runtimes.session import Float32Array, Session


class SessionPool:
    """`infer` may be called from as many threads at once as there are sessions; one more waits."""

    def __init__(self, sessions: Sequence[Session]) -> None:
        self._first, self._count = sessions[0], len(sessions)
        self.profiles = getattr(sessions[0], "profiles", ())  # TensorRT's
        self._free: SimpleQueue[Session] = SimpleQueue()
        for session in sessions:
            self._free.put(session)

    def infer(self, images: UInt8Array) -> Float32Array:
        session = self._free.get()
        try:
            return session.infer(images)
        finally:
            self._free.put(session)

    def describe(self) -> dict[str, Any]:
        return {**self._first.describe(), "sessions": self._count}


def load_instances(load: Callable[[], Session], instances: int, threads: int | None) -> Session:
    """Return a session that `instances` threads may call at once, each with `threads` threads of its own.

    One-thread sessions compute on their caller's thread, so one serves them all with one copy of the weights; sessions
    of more threads share a pool when they share a session, so each instance gets its own, and its own weights.
    """
    return load() if instances == 1 or threads == 1 else SessionPool([load() for _ in range(instances)])


def tuned_setting(bundle: Bundle) -> Setting | None:
    """What `vitx bench --tune` found for this machine, if it ran here."""
    latency = bundle.latency()
    return latency.tuning.best if latency and latency.tuning else None
