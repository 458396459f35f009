"""What works on a job's shards, such as a worker in this process, and the progress that it reports."""

import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol, runtime_checkable

from vitx.core.console import Progress
from vitx.predict.ledger import Claim, Ledger, Totals
from vitx.predict.outputs.parts import Part, warm_up
from vitx.predict.pipeline.disk import DiskFullBackoff
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
    """Works on a ledger until every shard is done."""

    def execute(self, job: Job, ledger: Ledger, backoff: DiskFullBackoff, bar: Progress) -> Performance:
        """Raises what `Worker.run` raises."""


class LedgerShards:
    """The unfinished shards of a ledger in order, and at the end those again whose rows were lost."""

    def __init__(self, ledger: Ledger, backoff: DiskFullBackoff) -> None:
        self._ledger, self._backoff, self._stopped = ledger, backoff, backoff.stopped
        # What became of each claim: None if it is done, the claim itself if it is to come again.
        self._ended: SimpleQueue[Claim | None] = SimpleQueue()

    def claims(self) -> Iterator[Claim]:
        left = 0
        for claim in self._ledger.unfinished():
            if self._stopped.is_set():
                return
            left += 1
            yield claim
        while left:
            lost = self._ended.get()
            if self._stopped.is_set():
                return
            if lost is None:
                left -= 1
            else:
                yield lost

    def commit(self, claim: Claim, part: Part) -> None:
        self._backoff.retry(lambda: self._ledger.commit(claim, part.record, part.publish))
        self._ended.put(None)

    def release(self, claim: Claim) -> None:
        self._ended.put(claim)

    def stop(self) -> None:
        self._stopped.set()
        self._ended.put(None)


class LocalExecutor:
    """One worker, in this process."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def execute(self, job: Job, ledger: Ledger, backoff: DiskFullBackoff, bar: Progress) -> Performance:
        warm_up()
        reporter = ProgressReporter(ledger.totals(), bar)
        worker = Worker(job, self._session, LedgerShards(ledger, backoff), backoff)
        worker.on_progress = lambda: reporter.update(worker.images, worker.shards_done, worker.timer.shares)
        worker.run()
        seconds = reporter.seconds()
        return Performance(worker.committed, seconds, worker.timer.shares(seconds), self._session.describe())


class ProgressReporter:
    """Updates the bar at most twice a second: images/s, time left, the binding stage."""

    def __init__(self, before: Totals, bar: Progress) -> None:
        self._before, self._bar = before, bar
        self._started = self._next_update = time.perf_counter()

    def seconds(self) -> float:
        return time.perf_counter() - self._started

    def update(self, images: int, shards: int, shares: Callable[[float], dict[str, float]]) -> None:
        """images, shards: done since the start. shares: busy shares by stage, see `StageTimer.shares`."""
        now = time.perf_counter()
        if now < self._next_update:
            return
        self._next_update = now + 0.5
        before, seconds = self._before, now - self._started
        done, rate = before.images + images, images / seconds
        left = "" if before.expected is None or not rate else f", {(before.expected - done) / rate:.0f} s left"
        note = f"{rate:.0f} images/s{left}, bound by {busiest(shares(seconds))}"
        self._bar.update(before.done + shards if before.expected is None else done, note)
