"""What works on a job's shards, such as a worker in this process, and the progress that it reports."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

from vitx.core.console import Progress
from vitx.predict.ledger import Ledger
from vitx.predict.outputs.parts import remove_leftovers, warm_up
from vitx.predict.pipeline.disk import DiskFullBackoff
from vitx.predict.pipeline.leases import LeasedShards
from vitx.predict.pipeline.stages import busiest
from vitx.predict.pipeline.worker import Job, Worker
from vitx.runtimes.session import Session


class Performance(NamedTuple):
    """images: committed; seconds: taken; stages: the part of that time that each was busy; runtime: `describe()`."""

    images: int
    seconds: float
    stages: dict[str, float]
    runtime: dict[str, Any]


@runtime_checkable
class Executor(Protocol):
    """Works on a ledger until every shard is done, by this process or others."""

    def execute(self, job: Job, ledger: Ledger, backoff: DiskFullBackoff, bar: Progress) -> Performance:
        """Raises what `Worker.run` raises. However it ends, shards that are not done are given back."""
        ...


class LocalExecutor:
    """One worker, in this process."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def execute(self, job: Job, ledger: Ledger, backoff: DiskFullBackoff, bar: Progress) -> Performance:
        warm_up()
        reporter = ProgressReporter(ledger, bar)
        worker = Worker(job, self._session, LeasedShards(ledger, backoff), backoff)
        worker.on_progress = lambda: reporter.update(worker.images - worker.committed, worker.timer.shares)
        try:
            worker.run()
        except BaseException:
            remove_leftovers(job.out, f"{ledger.worker}*")  # an interrupt may come while a file is made
            raise
        seconds = reporter.seconds()
        return Performance(worker.committed, seconds, worker.timer.shares(seconds), self._session.describe())


class ProgressReporter:
    """Updates the bar at most twice a second: images/s of all processes together, time left, the binding stage."""

    def __init__(self, ledger: Ledger, bar: Progress) -> None:
        self._ledger, self._bar = ledger, bar
        self._images_before = ledger.totals().images
        self._started = self._next_update = time.perf_counter()

    def seconds(self) -> float:
        return time.perf_counter() - self._started

    def update(self, uncommitted: int, shares: Callable[[float], dict[str, float]]) -> None:
        """uncommitted: predicted images of unfinished shards. shares: busy shares by stage, see `StageTimer.shares`."""
        now = time.perf_counter()
        if now < self._next_update:
            return
        totals, seconds = self._ledger.totals(), now - self._started
        # totals() reads all shards. With a million of them it is slow, so it takes at most a fiftieth of the time.
        self._next_update = now + max(0.5, 50 * (time.perf_counter() - now))
        images = totals.images + uncommitted
        rate = (images - self._images_before) / seconds
        left = "" if totals.expected is None or not rate else f", {(totals.expected - images) / rate:.0f} s left"
        note = f"{rate:.0f} images/s{left}, bound by {busiest(shares(seconds))}"
        self._bar.update(totals.done if totals.expected is None else images, note)
