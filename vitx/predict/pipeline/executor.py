"""Who does a job's shards: this process, or whatever else works on a ledger; and what is told meanwhile."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

from vitx.core.console import Progress
from vitx.predict.ledger.ledger import Ledger
from vitx.predict.outputs.parts import warm_up
from vitx.predict.pipeline.disk import Patience
from vitx.predict.pipeline.leases import LeasedShards
from vitx.predict.pipeline.stages import busiest
from vitx.predict.pipeline.worker import Job, Worker
from vitx.runtimes.session import Session


class Performance(NamedTuple):
    """images committed, the seconds that it took, the part of them that each stage was busy, the runtime."""

    images: int
    seconds: float
    stages: dict[str, float]
    runtime: dict[str, Any]


@runtime_checkable
class Executor(Protocol):
    """Works on a ledger until every shard is done, by it or another."""

    def execute(self, job: Job, ledger: Ledger, patience: Patience, bar: Progress) -> Performance:
        """Raise what a Worker raises; whatever ends the work, the shards that were begun are given back."""
        ...


class Local:
    """One worker, in this process."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def execute(self, job: Job, ledger: Ledger, patience: Patience, bar: Progress) -> Performance:
        warm_up()
        told = Told(ledger, bar)
        worker = Worker(job, self._session, LeasedShards(ledger, patience), patience)
        worker.on_progress = lambda: told.update(worker.images - worker.committed, worker.clock.shares)
        worker.run()
        seconds = told.seconds()
        return Performance(worker.committed, seconds, worker.clock.shares(seconds), self._session.describe())


class Told:
    """What the bar says, at most twice a second: images per second of all processes, time left, the binding stage."""

    def __init__(self, ledger: Ledger, bar: Progress) -> None:
        self._ledger, self._bar = ledger, bar
        self._before = ledger.totals().images
        self._started = self._next = time.perf_counter()

    def seconds(self) -> float:
        return time.perf_counter() - self._started

    def update(self, uncommitted: int, shares: Callable[[float], dict[str, float]]) -> None:
        """uncommitted: images that are done, of shards that are not; shares: see `Clock.shares`."""
        now = time.perf_counter()
        if now < self._next:
            return
        totals, seconds = self._ledger.totals(), now - self._started
        # Sums over all shards: cheap, unless there are a million of them and a thousand workers ask.
        self._next = now + max(0.5, 50 * (time.perf_counter() - now))
        images = totals.images + uncommitted
        rate = (images - self._before) / seconds
        left = "" if totals.expected is None or not rate else f", {(totals.expected - images) / rate:.0f} s left"
        note = f"{rate:.0f} images/s{left}, bound by {busiest(shares(seconds))}"
        self._bar.update(totals.done if totals.expected is None else images, note)
