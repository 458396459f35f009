"""Which worker holds which shard, and which shards are done: two tables that the processes of a run share.

The states of a shard, by its columns:

    free    digest NULL, lease over (0: never claimed, or given back)
    held    digest NULL, lease in the future, owner set
    done    digest set: the sha256 of the output file

A worker renews its leases while it lives. When a worker dies its leases run out, and other workers claim its shards.
A finished file is renamed into place and recorded in one transaction that first checks the owner, so a worker that
slept past its lease cannot replace what another worker finished.
"""

import json
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from vitx.core.errors import EnvironmentMissing
from vitx.core.files import sha256_file
from vitx.predict.inputs.inventory import Inventory, Shard
from vitx.predict.ledger.databases import Database, Row, SqliteDatabase, Transaction

# For both kinds of database. lease: when it ends, in seconds since 1970. ticket: identifies one call of `claim`.
# Paths are bytes, because a file name need not be valid Unicode and TEXT must be.
# The index holds unfinished shards only, in the order in which `claim` takes them.
_SCHEMA = """
CREATE TABLE IF NOT EXISTS vitx_plan (
    run TEXT PRIMARY KEY, description TEXT NOT NULL, base BYTEA NOT NULL, digest TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS vitx_shard (
    run TEXT NOT NULL, id BIGINT NOT NULL, kind TEXT NOT NULL, location BYTEA NOT NULL, start BIGINT NOT NULL,
    count BIGINT, owner TEXT, ticket TEXT, lease DOUBLE PRECISION NOT NULL DEFAULT 0,
    attempts INTEGER NOT NULL DEFAULT 0, digest TEXT, images BIGINT, errors BIGINT, classes TEXT, PRIMARY KEY (run, id)
);
CREATE INDEX IF NOT EXISTS vitx_todo ON vitx_shard (run, lease, id) WHERE digest IS NULL;
"""
_CLAIMED = "id, kind, location, start, count"
_SET_FREE = "SET digest = NULL, owner = NULL, lease = 0"


class ShardRecord(NamedTuple):
    """What the ledger records of a finished shard: the file's sha256 and its counts. classes: images by class index."""

    digest: str
    images: int
    errors: int
    classes: dict[int, int]


class Totals(NamedTuple):
    """Sums over the finished shards. expected: images of all shards, or None if some shard's number is not known."""

    shards: int
    done: int
    images: int
    errors: int
    expected: int | None


@dataclass(frozen=True)
class Claim:
    """A shard that this worker has claimed."""

    id: int
    shard: Shard


class Ledger:
    """One worker's view of a run. Each thread uses its own `Ledger`: see `for_thread`.

    where: a SQLite file, which holds one run, or a database that may hold several; `run` is the name of this one.
    worker: written as the owner of its shards; random by default.
    """

    def __init__(
        self,
        where: Path | Database,
        *,
        run: str = "",
        worker: str | None = None,
        lease_seconds: float,
    ) -> None:
        self.run = run
        self.worker = worker or uuid.uuid4().hex
        self.lease_seconds = lease_seconds
        self._database = SqliteDatabase(where) if isinstance(where, Path) else where
        if not self._database.read(self._database.has_tables):
            self._database.write(_create_tables, advisory_lock="vitx: tables")

    def close(self) -> None:
        self._database.close()

    def for_thread(self, stopped: threading.Event | None = None) -> "Ledger":
        """The same worker's ledger for another thread. Once `stopped` is set, a lost database is not waited for."""
        database = self._database.for_thread(stopped or threading.Event())
        return Ledger(database, run=self.run, worker=self.worker, lease_seconds=self.lease_seconds)

    def create_or_join(self, create: Callable[[], tuple[str, Inventory]]) -> tuple[str, str]:
        """Return (description, base) of the run. The first process creates it; the others wait until it has.

        create: called by the first process alone, while it holds the lock; lists the input.
        """
        created: tuple[str, Inventory] | None = None

        def work(transaction: Transaction) -> tuple[str, str]:
            nonlocal created
            row = transaction.execute("SELECT description, base FROM vitx_plan WHERE run = ?", (self.run,)).fetchone()
            if row is not None:
                return str(row[0]), _decoded(row[1])
            # Kept for a second attempt after a lost connection: listing the input may take an hour.
            description, inventory = created = created or create()
            transaction.executemany(
                "INSERT INTO vitx_shard (run, id, kind, location, start, count) VALUES (?, ?, ?, ?, ?, ?)",
                (
                    (self.run, number, shard.kind, _encoded(shard.location), shard.start, shard.count)
                    for number, shard in enumerate(inventory.shards, 1)
                ),
            )
            transaction.execute(
                "INSERT INTO vitx_plan VALUES (?, ?, ?, ?)",
                (self.run, description, _encoded(inventory.base), inventory.digest),
            )
            return description, inventory.base

        return self._database.write(work, advisory_lock=f"vitx: {self.run}")

    def remove_run(self) -> None:
        """Remove the run. Workers that are still on it find no more shards and raise: see `remaining`."""

        def work(transaction: Transaction) -> None:
            for table in ("vitx_plan", "vitx_shard"):
                transaction.execute(f"DELETE FROM {table} WHERE run = ?", (self.run,))

        self._database.write(work, advisory_lock=f"vitx: {self.run}")

    def claim(self) -> Claim | None:
        """Claim a free shard: those whose lease is 0 in order, then the one whose lease ended longest ago.

        Returns None when every unfinished shard is held by some worker.
        """
        ticket, tries, now = uuid.uuid4().hex, 0, self._database.now

        def work(transaction: Transaction) -> Row | None:
            nonlocal tries
            tries += 1
            # The connection was lost and the first attempt may have been committed. Its shard would then stay this
            # worker's for ever: renewed with the others, and known to nobody. The ticket finds it.
            if tries > 1:
                query = f"SELECT {_CLAIMED} FROM vitx_shard WHERE run = ? AND ticket = ? AND digest IS NULL"
                if row := transaction.execute(query, (self.run, ticket)).fetchone():
                    return tuple(row)
            # One statement chooses and claims, so two workers cannot choose the same shard. On PostgreSQL the inner
            # SELECT locks its row and skips those that others are claiming, so claims do not wait for each other.
            found = transaction.execute(
                f"UPDATE vitx_shard SET owner = ?, ticket = ?, lease = {now} + ?, attempts = attempts + 1 "
                "WHERE run = ? AND id = (SELECT id FROM vitx_shard WHERE run = ? AND digest IS NULL "
                f"AND lease < {now} ORDER BY lease, id LIMIT 1{self._database.skip_locked}) RETURNING {_CLAIMED}",
                (self.worker, ticket, self.lease_seconds, self.run, self.run),
            ).fetchall()
            return tuple(found[0]) if found else None

        row = self._database.write(work)
        return None if row is None else Claim(row[0], Shard(row[1], _decoded(row[2]), *row[3:]))

    def renew(self) -> None:
        """Extend the leases of all shards that this worker holds."""
        # lease > 0 changes no result: by it the index finds the few held shards without reading all that wait.
        self._change(
            f"SET lease = {self._database.now} + ? WHERE run = ? AND owner = ? AND digest IS NULL AND lease > 0",
            (self.lease_seconds, self.run, self.worker),
        )

    def release(self, claim: Claim | None = None) -> None:
        """Give back one shard, or all that this worker holds: another worker may claim them at once."""
        which, values = ("", ()) if claim is None else (" AND id = ?", (claim.id,))
        self._change(
            f"SET owner = NULL, lease = 0 WHERE run = ? AND owner = ? AND digest IS NULL AND lease > 0{which}",
            (self.run, self.worker, *values),
        )

    def commit(self, claim: Claim, record: ShardRecord, publish: Callable[[], None]) -> bool:
        """Publish the output and record the shard as done; return False, without either, if it is no longer held.

        publish: renames the finished file into place. It may be called twice, when the connection was lost.
        """
        published = False
        key = (self.run, claim.id)

        def work(transaction: Transaction) -> bool:
            nonlocal published
            # The row is locked until the end: nobody can claim or commit the shard between this check and the record.
            # The owner counts, not the lease: a worker that is late may still commit if nobody has taken its shard.
            row = transaction.execute(
                f"SELECT owner, digest FROM vitx_shard WHERE run = ? AND id = ?{self._database.for_update}", key
            ).fetchone()
            owner, digest = row or (None, None)
            if owner == self.worker and digest is None:
                # The file first, then the record: a crash between the two leaves a file that is not recorded, which is
                # made again and replaced. The other order would leave a record without a file.
                publish()
                published = True
                transaction.execute(
                    "UPDATE vitx_shard SET digest = ?, images = ?, errors = ?, classes = ? WHERE run = ? AND id = ?",
                    (record.digest, record.images, record.errors, json.dumps(record.classes), *key),
                )
                return True
            # A first attempt renamed the file and lost its connection; since then the lease ran out and another worker
            # finished the shard. Whose file lies there now is unknown, so unless both are equal it is made again.
            if published and digest not in (None, record.digest):
                transaction.execute(f"UPDATE vitx_shard {_SET_FREE} WHERE run = ? AND id = ?", key)
            # Or the first attempt was committed after all, and only the server's reply was lost.
            return published and owner == self.worker and digest == record.digest

        return self._database.write(work)

    def verify(self, output: Callable[[int], Path]) -> list[int]:
        """Compare every finished file with its digest; return the shards whose file differs or is gone, now free again.

        output: the path of a shard's file.
        """
        wrong = []
        for number, digest in self._finished("digest"):
            path = output(number)
            if path.is_file() and sha256_file(path) == digest:
                continue
            # Only while the digest is the one compared: another process may have finished the shard again meanwhile.
            changed = self._change(f"{_SET_FREE} WHERE run = ? AND id = ? AND digest = ?", (self.run, number, digest))
            wrong += [number] * changed
        return wrong

    def totals(self) -> Totals:
        shards, done, images, errors, expected, unknown = self._one(
            # A shard that was set free still has the numbers of its last file.
            "SELECT count(*), count(digest), "
            "CAST(coalesce(sum(CASE WHEN digest IS NOT NULL THEN images END), 0) AS BIGINT), "
            "CAST(coalesce(sum(CASE WHEN digest IS NOT NULL THEN errors END), 0) AS BIGINT), "
            "CAST(sum(coalesce(images, count)) AS BIGINT), "
            "count(*) - count(coalesce(images, count)) FROM vitx_shard WHERE run = ?"
        )
        return Totals(shards, done, images, errors, None if unknown else expected)

    def remaining(self) -> int:
        """The number of shards that are not done. Raises EnvironmentMissing if the run was removed meanwhile."""
        count = int(self._one("SELECT count(*) FROM vitx_shard WHERE run = ? AND digest IS NULL")[0])
        if not count and not self.has_run():
            raise EnvironmentMissing(
                f"the run '{self.run}' is no longer in the ledger {self._database.name}: it was removed, or the "
                "database was restored to an earlier state"
            )
        return count

    def listing_digest(self) -> str:
        """The digest of the listing that the run was created from."""
        return str(self._one("SELECT digest FROM vitx_plan WHERE run = ?")[0])

    def has_single_files(self) -> bool:
        """Whether some shard is a range of single image files, not a tar or Parquet file."""
        return bool(self._rows("SELECT 1 FROM vitx_shard WHERE run = ? AND kind = 'images' LIMIT 1"))

    def has_run(self) -> bool:
        return bool(self._rows("SELECT 1 FROM vitx_plan WHERE run = ?"))

    def class_counts(self) -> Iterator[dict[int, int]]:
        """Yield images by class index, for each finished shard."""
        for _, text in self._finished("classes"):
            yield {int(index): count for index, count in json.loads(text).items()}

    def first_shard_with_errors(self) -> int | None:
        """The first finished shard that has an unreadable image."""
        first = self._one("SELECT min(id) FROM vitx_shard WHERE run = ? AND digest IS NOT NULL AND errors > 0")[0]
        return None if first is None else int(first)

    def _finished(self, column: str) -> Iterator[tuple[int, str]]:
        """Yield (id, column) of the finished shards.

        Page by page: memory stays flat, and no SELECT is open when the caller writes between two rows.
        """
        last = 0
        while page := self._rows(
            f"SELECT id, {column} FROM vitx_shard WHERE run = ? AND digest IS NOT NULL AND id > ? "
            "ORDER BY id LIMIT 1000",
            last,
        ):
            yield from ((row[0], row[1]) for row in page)
            last = page[-1][0]

    def _rows(self, query: str, *values: object) -> list[Row]:
        return self._database.read(query, (self.run, *values))

    def _one(self, query: str) -> Row:
        return self._rows(query)[0]

    def _change(self, change: str, values: tuple[object, ...]) -> int:
        """Run an UPDATE of the shards; return how many rows it changed."""
        return self._database.write(
            lambda transaction: transaction.execute(f"UPDATE vitx_shard {change}", values).rowcount
        )


def _create_tables(transaction: Transaction) -> None:
    for statement in filter(str.strip, _SCHEMA.split(";")):
        transaction.execute(statement)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _decoded(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")
