"""Who does which shard, and which are done: tables that the processes of a run share.

A shard is claimed with a lease, which its worker renews while it lives; the lease of a worker that died runs out, and
another takes the shard. A finished shard is put in its place and recorded in one transaction, by the holder of its
lease alone: a worker that slept past its lease cannot replace what another finished.
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
from vitx.predict.ledger.databases import Database, Row, SqliteDatabase, Statements

LEASE_SECONDS = 60.0
# For both kinds of database. `lease` ends then, in seconds since 1970; 0 is nobody's. `ticket`: of one call of `claim`.
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
_UNDONE = "SET digest = NULL, owner = NULL, lease = 0"


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
    """One worker's view of a run in the ledger; each thread uses its own.

    where: a SQLite file, which holds one run, or a database that may hold many, told apart by the name `run`. A run
    that another process has removed in the meantime is EnvironmentMissing.
    """

    def __init__(
        self,
        where: Path | Database,
        *,
        run: str = "",
        worker: str | None = None,
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        self.run = run
        self.worker = worker or uuid.uuid4().hex
        self.lease_seconds = lease_seconds
        self._database = SqliteDatabase(where) if isinstance(where, Path) else where
        if not self._database.read(self._database.has_tables):
            self._database.write(_create_tables, alone="vitx: tables")

    def close(self) -> None:
        self._database.close()

    def same_worker(self, stopped: threading.Event | None = None) -> "Ledger":
        """The same for another thread; once `stopped` is set, a database that was lost is not waited for."""
        database = self._database.another(stopped or threading.Event())
        return Ledger(database, run=self.run, worker=self.worker, lease_seconds=self.lease_seconds)

    def plan(self, make: Callable[[], tuple[str, Inventory]]) -> tuple[str, str]:
        """Return (description, base) of the plan; the first process makes it while the others wait."""
        made: tuple[str, Inventory] | None = None

        def work(statements: Statements) -> tuple[str, str]:
            nonlocal made
            row = statements.execute("SELECT description, base FROM vitx_plan WHERE run = ?", (self.run,)).fetchone()
            if row is not None:
                return str(row[0]), _decoded(row[1])
            description, inventory = made = made or make()
            statements.executemany(
                "INSERT INTO vitx_shard (run, id, kind, location, start, count) VALUES (?, ?, ?, ?, ?, ?)",
                (
                    (self.run, number, one.kind, _encoded(one.location), one.start, one.count)
                    for number, one in enumerate(inventory.shards, 1)
                ),
            )
            statements.execute(
                "INSERT INTO vitx_plan VALUES (?, ?, ?, ?)",
                (self.run, description, _encoded(inventory.base), inventory.digest),
            )
            return description, inventory.base

        return self._database.write(work, alone=f"vitx: {self.run}")

    def forget(self) -> None:
        """Remove the run. Its workers, if it has any, find no more work and say so."""

        def work(statements: Statements) -> None:
            for table in ("vitx_plan", "vitx_shard"):
                statements.execute(f"DELETE FROM {table} WHERE run = ?", (self.run,))

        self._database.write(work, alone=f"vitx: {self.run}")

    def claim(self) -> Claim | None:
        """Take the shard whose lease ran out longest ago, the unclaimed ones first in order; None when all are held."""
        ticket, tries, now = uuid.uuid4().hex, 0, self._database.now

        def work(statements: Statements) -> Row | None:
            nonlocal tries
            tries += 1
            if tries > 1:  # else the shard of a claim whose answer was lost would be this worker's for ever
                query = f"SELECT {_CLAIMED} FROM vitx_shard WHERE run = ? AND ticket = ? AND digest IS NULL"
                if row := statements.execute(query, (self.run, ticket)).fetchone():
                    return tuple(row)
            found = statements.execute(
                f"UPDATE vitx_shard SET owner = ?, ticket = ?, lease = {now} + ?, attempts = attempts + 1 "
                "WHERE run = ? AND id = (SELECT id FROM vitx_shard WHERE run = ? AND digest IS NULL "
                f"AND lease < {now} ORDER BY lease, id LIMIT 1{self._database.unlocked_only}) RETURNING {_CLAIMED}",
                (self.worker, ticket, self.lease_seconds, self.run, self.run),
            ).fetchall()
            return tuple(found[0]) if found else None

        row = self._database.write(work)
        return None if row is None else Claim(row[0], Shard(row[1], _decoded(row[2]), *row[3:]))

    def renew(self) -> None:
        """Prolong the leases of all that this worker holds."""
        self._change(
            f"SET lease = {self._database.now} + ? WHERE run = ? AND owner = ? AND digest IS NULL AND lease > 0",
            (self.lease_seconds, self.run, self.worker),
        )

    def release(self, claim: Claim | None = None) -> None:
        """Give one shard back, or all that this worker holds."""
        which, values = ("", ()) if claim is None else (" AND id = ?", (claim.id,))
        self._change(
            f"SET owner = NULL, lease = 0 WHERE run = ? AND owner = ? AND digest IS NULL AND lease > 0{which}",
            (self.run, self.worker, *values),
        )

    def commit(self, claim: Claim, done: Done, publish: Callable[[], None]) -> bool:
        """Publish the output and record the shard as done; return False, without either, if it is no longer held.

        publish: may be called twice. When the connection was lost after it, the shard may be another's by then, whose
        file this one has replaced; unless they are the same, it is done once more.
        """
        published = False
        this = (self.run, claim.id)

        def work(statements: Statements) -> bool:
            nonlocal published
            row = statements.execute(
                f"SELECT owner, digest FROM vitx_shard WHERE run = ? AND id = ?{self._database.locked}", this
            ).fetchone()
            owner, digest = row or (None, None)
            if owner == self.worker and digest is None:
                publish()
                published = True
                statements.execute(
                    "UPDATE vitx_shard SET digest = ?, images = ?, errors = ?, classes = ? WHERE run = ? AND id = ?",
                    (done.digest, done.images, done.errors, json.dumps(done.classes), *this),
                )
                return True
            if published and digest not in (None, done.digest):
                statements.execute(f"UPDATE vitx_shard {_UNDONE} WHERE run = ? AND id = ?", this)
            return published and owner == self.worker and digest == done.digest

        return self._database.write(work)

    def verify(self, output: Callable[[int], Path]) -> list[int]:
        """Compare every finished output with its digest; shards that differ or are gone become work again."""
        wrong = []
        for number, digest in self._finished("digest"):
            path = output(number)
            if path.is_file() and sha256_file(path) == digest:
                continue
            changed = self._change(f"{_UNDONE} WHERE run = ? AND id = ? AND digest = ?", (self.run, number, digest))
            wrong += [number] * changed
        return wrong

    def totals(self) -> Totals:
        shards, done, images, errors, expected, unknown = self._one(
            "SELECT count(*), count(digest), CAST(coalesce(sum(images), 0) AS BIGINT), "
            "CAST(coalesce(sum(errors), 0) AS BIGINT), CAST(sum(coalesce(images, count)) AS BIGINT), "
            "count(*) - count(coalesce(images, count)) FROM vitx_shard WHERE run = ?"
        )
        return Totals(shards, done, images, errors, None if unknown else expected)

    def remaining(self) -> int:
        """Shards that are not done."""
        count = int(self._one("SELECT count(*) FROM vitx_shard WHERE run = ? AND digest IS NULL")[0])
        if not count and not self.is_planned():
            raise EnvironmentMissing(
                f"the run '{self.run}' is no longer in the ledger {self._database.name}: it was removed, or the "
                "database was set back"
            )
        return count

    def digest(self) -> str:
        """Of the listing that the plan was made from."""
        return str(self._one("SELECT digest FROM vitx_plan WHERE run = ?")[0])

    def has_lists(self) -> bool:
        """Whether some shard is a range of single files."""
        return bool(self._rows("SELECT 1 FROM vitx_shard WHERE run = ? AND kind = 'images' LIMIT 1"))

    def is_planned(self) -> bool:
        return bool(self._rows("SELECT 1 FROM vitx_plan WHERE run = ?"))

    def classes(self) -> Iterator[dict[int, int]]:
        """Yield the classes of each finished shard."""
        for _, text in self._finished("classes"):
            yield {int(index): count for index, count in json.loads(text).items()}

    def first_with_errors(self) -> int | None:
        """The first finished shard that holds an unreadable image."""
        first = self._one("SELECT min(id) FROM vitx_shard WHERE run = ? AND digest IS NOT NULL AND errors > 0")[0]
        return None if first is None else int(first)

    def _finished(self, column: str) -> Iterator[tuple[int, str]]:
        """Yield (id, column) of the finished shards; page by page, as no read may be open when a write begins."""
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
        """The number of shards that were changed."""
        return self._database.write(
            lambda statements: statements.execute(f"UPDATE vitx_shard {change}", values).rowcount
        )


def _create_tables(statements: Statements) -> None:
    for statement in filter(str.strip, _SCHEMA.split(";")):
        statements.execute(statement)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _decoded(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")
