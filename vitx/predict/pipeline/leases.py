"""The shards of a ledger for one worker: claimed under leases, which a thread renews while the worker lives."""

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice

from vitx.core.errors import VitxError
from vitx.predict.ledger import Claim, Ledger
from vitx.predict.outputs.parts import Part
from vitx.predict.pipeline.disk import DiskFullBackoff

# Seconds between two looks for a free shard while other workers hold the rest; doubled each time, because with many
# workers every look costs the one database.
POLL_SECONDS, MAX_POLL_SECONDS = 0.5, 4.0


class LeasedShards:
    """Shards to work on, until all of the ledger are done by this worker or others."""

    def __init__(self, ledger: Ledger, backoff: DiskFullBackoff) -> None:
        self._worker, self._backoff = ledger.worker, backoff
        # One for each thread: claims are made by the reader, commits by the writer, renewals by the thread below.
        self._claiming, self._committing, self._renewing = (ledger.for_thread() for _ in range(3))
        self._changed, self._stopped = threading.Event(), backoff.stopped
        self._renewal_thread = threading.Thread(target=self._keep_renewing, name="leases", daemon=True)
        self._renewal_thread.start()

    def temporary_suffix(self) -> str:
        return self._worker

    def claims(self) -> Iterator[Claim]:
        """Yield shards until all are done. While others hold the rest, wait: their leases may run out."""
        backoff, wait = self._backoff.for_thread(), POLL_SECONDS
        while not self._stopped.is_set():
            self._changed.clear()
            claim = backoff.retry(self._claiming.claim)
            if claim is not None:
                wait = POLL_SECONDS
                yield claim
            elif self._claiming.remaining():
                # Woken by this worker's own commit or release: look again soon, a released shard is free at once.
                wait = POLL_SECONDS if self._changed.wait(wait) else min(2 * wait, MAX_POLL_SECONDS)
            else:
                return

    def claim_free(self, limit: int) -> list[Claim]:
        """Claim all free shards, at most `limit`. Waits for the first one; none means that all shards are done."""
        claimed = list(islice(self.claims(), 1))
        while claimed and len(claimed) < limit and (claim := self._backoff.retry(self._claiming.claim)) is not None:
            claimed.append(claim)
        return claimed

    def commit(self, claim: Claim, part: Part) -> bool:
        held = self._backoff.retry(lambda: self._committing.commit(claim, part.record, part.publish))
        if not held:
            part.abandon()
        self._changed.set()
        return held

    def release(self, claim: Claim) -> None:
        self._backoff.for_thread().retry(lambda: self._committing.release(claim))
        self._changed.set()

    def stop(self) -> None:
        self._stopped.set()
        self._changed.set()

    def close(self) -> None:
        self.stop()
        self._renewal_thread.join()
        with suppress(sqlite3.Error, VitxError):  # if this fails, the leases run out by themselves
            self._committing.release()
        for ledger in (self._claiming, self._committing, self._renewing):
            ledger.close()

    def _keep_renewing(self) -> None:
        # Four times in a lease, so that two renewals in a row may fail. If a lease does run out, a shard is done twice
        # and recorded once.
        while not self._stopped.wait(self._renewing.lease_seconds / 4):
            with suppress(sqlite3.Error, VitxError):
                self._renewing.renew()
