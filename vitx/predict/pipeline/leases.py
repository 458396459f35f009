"""The shards of a ledger as a worker meets them: claimed under leases that are renewed while it works."""

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice

from vitx.core.errors import VitxError
from vitx.predict.ledger.ledger import Claim, Ledger
from vitx.predict.outputs.parts import Part
from vitx.predict.pipeline.disk import Patience

# Seconds between two looks at shards that other workers hold: twice as long each time, as there may be many who look.
LOOK_AGAIN, LONGEST_LOOK = 0.5, 4.0


class LeasedShards:
    """Shards until every one of the ledger is done, by this worker or another."""

    def __init__(self, ledger: Ledger, patience: Patience) -> None:
        self._worker, self._patience = ledger.worker, patience
        # One connection for each thread that uses the ledger.
        self._claims, self._commits, self._renewals = (ledger.same_worker(patience.stopped) for _ in range(3))
        self._changed, self._stopped = threading.Event(), patience.stopped
        self._renewing = threading.Thread(target=self._keep_renewing, name="leases", daemon=True)
        self._renewing.start()

    def suffix(self) -> str:
        return self._worker

    def claimed(self) -> Iterator[Claim]:
        """Yield shards until all are done; wait while others hold the rest, whose leases may run out."""
        patience, wait = self._patience.another(), LOOK_AGAIN
        while not self._stopped.is_set():
            self._changed.clear()
            claim = patience.retry(self._claims.claim)
            if claim is not None:
                wait = LOOK_AGAIN
                yield claim
            elif self._claims.remaining():
                # What this worker did itself is no sign that the others need long.
                wait = LOOK_AGAIN if self._changed.wait(wait) else min(2 * wait, LONGEST_LOOK)
            else:
                return

    def take(self, limit: int) -> list[Claim]:
        """All shards that are free, at most `limit`; none when all are done. Waits while others hold the rest."""
        taken = list(islice(self.claimed(), 1))
        while taken and len(taken) < limit and (claim := self._patience.retry(self._claims.claim)) is not None:
            taken.append(claim)
        return taken

    def commit(self, claim: Claim, part: Part) -> bool:
        held = self._patience.retry(lambda: self._commits.commit(claim, part.done, part.publish))
        if not held:
            part.abandon()
        self._changed.set()
        return held

    def release(self, claim: Claim) -> None:
        self._patience.another().retry(lambda: self._commits.release(claim))
        self._changed.set()

    def stop(self) -> None:
        self._stopped.set()
        self._changed.set()

    def close(self) -> None:
        self.stop()
        self._renewing.join()
        with suppress(sqlite3.Error, VitxError):  # else the leases run out by themselves
            self._commits.release()
        for connection in (self._claims, self._commits, self._renewals):
            connection.close()

    def _keep_renewing(self) -> None:
        while not self._stopped.wait(self._renewals.lease_seconds / 4):
            # A renewal that failed is made up for by the next; a lease that ran out costs a shard done twice.
            with suppress(sqlite3.Error, VitxError):
                self._renewals.renew()
