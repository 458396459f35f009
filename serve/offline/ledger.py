"""Who does which shard, and which are done: a SQLite file that the processes of one machine share.

A shard is claimed with a lease, which its worker renews while it lives; the lease of a worker that died runs out, and
another takes the shard. A finished shard is put in its place and recorded in one transaction, by the holder of its
lease alone: a worker that slept past its lease cannot replace what another finished.

Needs a local file system: SQLite's write-ahead log is shared memory, which network file systems do not have.
"""

import json
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from vitx.core.errors import EnvironmentMissing
from vitx.core.files import sha256_file
from vitx.serve.offline.inputs import Inventory, Shard

LEASE_SECONDS = 60.0
# Longer than any transaction but the first, which lists the input; for that one is waited without limit.
BUSY_SECONDS = 60.0
_SCHEMA = """
CREATE TABLE plan (description TEXT NOT NULL, base TEXT NOT NULL, digest TEXT NOT NULL);
CREATE TABLE shard (
    id INTEGER PRIMARY KEY, kind TEXT NOT NULL, location BLOB NOT NULL, start INTEGER NOT NULL, count INTEGER,
    owner TEXT, lease REAL NOT NULL DEFAULT 0, attempts INTEGER NOT NULL DEFAULT 0,
    digest TEXT, images INTEGER, errors INTEGER, classes TEXT
);
CREATE INDEX todo ON shard (lease, id) WHERE digest IS NULL;
"""


class Done(NamedTuple):
    """What is recorded of a finished shard. classes: images by class index."""

    digest: str
    images: int
    errors: int
    classes: dict[int, int]


class Totals(NamedTuple):
    """Sums over the finished shards; `expected` images of all, or None where some shard does not know."""

    shards: int
    done: int
    images: int
    errors: int
    expected: int | None


@dataclass(frozen=True)
class Claim:
    """A shard that this worker holds."""

    id: int
    shard: Shard


class Ledger:
    """One worker's view of the ledger; each thread uses its own."""

    def __init__(self, path: Path, *, worker: str | None = None, lease_seconds: float = LEASE_SECONDS) -> None:
        self.path = path
        self.worker = worker or uuid.uuid4().hex
        self.lease_seconds = lease_seconds
        self._database = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        self._start(lambda: self._database.execute("PRAGMA journal_mode = WAL"))
        # A lost commit after a power cut is a shard done again; the log stays consistent.
        self._database.execute("PRAGMA synchronous = NORMAL")

    def close(self) -> None:
        self._database.close()

    def same_worker(self) -> "Ledger":
        """Another connection for another thread."""
        return Ledger(self.path, worker=self.worker, lease_seconds=self.lease_seconds)

    def plan(self, make: Callable[[], tuple[str, Inventory]]) -> tuple[str, str]:
        """Return (description, base) of the plan; the first process makes it while the others wait."""
        with self._transaction(patient=True):
            if not self.is_planned():
                description, inventory = make()
                for statement in filter(str.strip, _SCHEMA.split(";")):
                    self._database.execute(statement)
                self._database.executemany(
                    "INSERT INTO shard (kind, location, start, count) VALUES (?, ?, ?, ?)",
                    ((one.kind, _encoded(one.location), one.start, one.count) for one in inventory.shards),
                )
                self._database.execute(
                    "INSERT INTO plan VALUES (?, ?, ?)",
                    (description, _encoded(inventory.base), inventory.digest),
                )
            description, base = self._database.execute("SELECT description, base FROM plan").fetchone()
        return str(description), _decoded(base)

    def claim(self) -> Claim | None:
        """Take the shard whose lease ran out longest ago, the unclaimed ones first in order; None when all are held."""
        now = time.time()
        with self._transaction():
            row = self._database.execute(
                "SELECT id, kind, location, start, count FROM shard WHERE digest IS NULL AND lease < ? "
                "ORDER BY lease, id LIMIT 1",
                (now,),
            ).fetchone()
            if row is None:
                return None
            self._database.execute(
                "UPDATE shard SET owner = ?, lease = ?, attempts = attempts + 1 WHERE id = ?",
                (self.worker, now + self.lease_seconds, row[0]),
            )
        return Claim(row[0], Shard(row[1], _decoded(row[2]), *row[3:]))

    def renew(self) -> None:
        """Prolong the leases of all that this worker holds."""
        with self._transaction():
            self._database.execute(
                "UPDATE shard SET lease = ? WHERE owner = ? AND digest IS NULL AND lease > 0",
                (time.time() + self.lease_seconds, self.worker),
            )

    def release(self, claim: Claim | None = None) -> None:
        """Give one shard back, or all that this worker holds."""
        which, values = ("", ()) if claim is None else (" AND id = ?", (claim.id,))
        with self._transaction():
            self._database.execute(
                f"UPDATE shard SET owner = NULL, lease = 0 WHERE owner = ? AND digest IS NULL AND lease > 0{which}",
                (self.worker, *values),
            )

    def commit(self, claim: Claim, done: Done, publish: Callable[[], None]) -> bool:
        """Publish the output and record the shard as done; return False, without either, if it is no longer held."""
        with self._transaction():
            held = self._database.execute(
                "SELECT 1 FROM shard WHERE id = ? AND owner = ? AND digest IS NULL", (claim.id, self.worker)
            ).fetchone()
            if held is None:
                return False
            publish()
            self._database.execute(
                "UPDATE shard SET digest = ?, images = ?, errors = ?, classes = ?, owner = NULL WHERE id = ?",
                (done.digest, done.images, done.errors, json.dumps(done.classes), claim.id),
            )
        return True

    def verify(self, output: Callable[[int], Path]) -> list[int]:
        """Compare every finished output with its digest; shards that differ or are gone become work again."""
        wrong = []
        for number, digest in self._finished("digest"):
            path = output(number)
            if path.is_file() and sha256_file(path) == digest:
                continue
            with self._transaction():
                changed = self._database.execute(
                    "UPDATE shard SET digest = NULL, lease = 0 WHERE id = ? AND digest = ?", (number, digest)
                )
                wrong += [number] * changed.rowcount
        return wrong

    def totals(self) -> Totals:
        shards, done, images, errors, expected, unknown = self._database.execute(
            "SELECT count(*), count(digest), coalesce(sum(images), 0), coalesce(sum(errors), 0), "
            "sum(coalesce(images, count)), count(*) - count(coalesce(images, count)) FROM shard"
        ).fetchone()
        return Totals(shards, done, images, errors, None if unknown else expected)

    def remaining(self) -> int:
        return int(self._database.execute("SELECT count(*) FROM shard WHERE digest IS NULL").fetchone()[0])

    def digest(self) -> str:
        """Of the listing that the plan was made from."""
        return str(self._database.execute("SELECT digest FROM plan").fetchone()[0])

    def has_lists(self) -> bool:
        """Whether some shard is a range of single files."""
        return self._database.execute("SELECT 1 FROM shard WHERE kind = 'images' LIMIT 1").fetchone() is not None

    def is_planned(self) -> bool:
        return self._database.execute("SELECT 1 FROM sqlite_master WHERE name = 'plan'").fetchone() is not None

    def classes(self) -> Iterator[dict[int, int]]:
        """Yield the classes of each finished shard."""
        for _, text in self._finished("classes"):
            yield {int(index): count for index, count in json.loads(text).items()}

    def first_with_errors(self) -> int | None:
        """The first finished shard that holds an unreadable image."""
        row = self._database.execute("SELECT min(id) FROM shard WHERE digest IS NOT NULL AND errors > 0").fetchone()
        return None if row[0] is None else int(row[0])

    def _finished(self, column: str) -> Iterator[tuple[int, str]]:
        """Yield (id, column) of the finished shards; page by page, as no read may be open when a write begins."""
        last = 0
        while page := self._database.execute(
            f"SELECT id, {column} FROM shard WHERE digest IS NOT NULL AND id > ? ORDER BY id LIMIT 1000", (last,)
        ).fetchall():
            yield from page
            last = page[-1][0]

    @contextmanager
    def _transaction(self, *, patient: bool = False) -> Iterator[None]:
        """The only writer, from the start of the block on; what the block did is undone when it raises."""
        self._start(lambda: self._database.execute("BEGIN IMMEDIATE"), patient=patient)
        try:
            yield
            self._database.execute("COMMIT")
        except BaseException:
            if self._database.in_transaction:  # SQLite itself rolls back when the disk is full
                self._database.execute("ROLLBACK")
            raise

    def _start(self, statement: Callable[[], object], *, patient: bool = False) -> None:
        """Run what needs a lock. SQLite waits for it by itself, but not where two processes open a new file."""
        deadline = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                statement()
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                    raise
                if not patient and time.monotonic() > deadline:
                    raise EnvironmentMissing(
                        f"the ledger {self.path} was locked for {BUSY_SECONDS:.0f} s: is it on a network file system? "
                        "SQLite needs a local one"
                    ) from None
                time.sleep(0.01)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _decoded(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")
