"""What works on a job's shards, such as a worker in this process, and where their files go."""

import time
from collections.abc import Callable
from contextlib import closing
from typing import Any, NamedTuple

from vitx.core.console import Progress
from vitx.predict.ledger import Claim, Ledger
from vitx.predict.outputs.mirror import Mirror
from vitx.predict.outputs.parts import PREDICTIONS, Part
from vitx.predict.pipeline.disk import lost_disk_explained
from vitx.predict.pipeline.stages import busiest
from vitx.predict.pipeline.worker import Job, Worker
from vitx.runtimes.session import Session


class Performance(NamedTuple):
    """images_here: committed; seconds: taken; stages: the part of it that each was busy; runtime: `describe()`."""

    images_here: int
    seconds: float
    stages: dict[str, float]
    runtime: dict[str, Any]


class Output:
    """Takes finished parts into the folder, the store if there is one, and the ledger; moves the bar."""

    def __init__(self, ledger: Ledger, mirror: Mirror | None, bar: Progress) -> None:
        self._ledger, self._mirror, self._bar = ledger, mirror, bar
        self._before = ledger.totals()
        self._started = self._next_update = time.perf_counter()
        # Since the start: images that were predicted, those of committed shards, and shards.
        self._predicted = self._images = self._shards = 0

    def commit(self, claim: Claim, part: Part) -> None:
        """Raises EnvironmentMissing if the store does not take the file, or the folder."""

        def publish() -> None:
            if self._mirror is not None:  # first: what has its name in the folder is in the store
                self._mirror.put(part.temporary, f"{PREDICTIONS}/{part.path.name}")
            part.publish()

        with lost_disk_explained(part.path.parents[1]):
            self._ledger.commit(claim, part.record, publish)
        self._images += part.record.images
        self._shards += 1

    def report(self, images: int, shares: Callable[[float], dict[str, float]]) -> None:
        """So many images more were predicted: update the bar, twice a second. shares: see `StageTimer.shares`."""
        self._predicted += images
        now = time.perf_counter()
        if now <= self._next_update:
            return
        self._next_update = now + 0.5
        before, seconds = self._before, now - self._started
        done = before.done + self._shards if before.expected is None else before.images + self._predicted
        self._bar.update(done, f"{self._predicted / seconds:.0f} images/s, bound by {busiest(shares(seconds))}")

    def performance(self, shares: Callable[[float], dict[str, float]], runtime: dict[str, Any]) -> Performance:
        seconds = time.perf_counter() - self._started
        return Performance(self._images, seconds, shares(seconds), runtime)


# Works on the shards of a ledger until every one is done. Raises what `Worker.run` and `Output.commit` raise.
Executor = Callable[[Job, Ledger, Output], Performance]


def execute_here(session: Session, job: Job, ledger: Ledger, output: Output) -> Performance:
    """An Executor, but for the session: one worker, in this process."""
    with closing(Worker(job, session)) as worker:
        shares = worker.timer.shares
        worker.run(ledger.unfinished(), output.commit, lambda images: output.report(images, shares))
    return output.performance(shares, session.describe())
