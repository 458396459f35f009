"""Which worker holds which shard, and which shards are done: a SQLite file that the processes of one machine share.

The states of a shard, by its columns:

    free    digest NULL, lease over (0: never claimed, or given back)
    held    digest NULL, lease in the future, owner set
    done    digest set: the sha256 of the output file

stored: the sha256 of the file that was put into an object store last, see `Mirror`.

A worker renews its leases while it lives. When a worker dies its leases run out, and other workers claim its shards.
A finished file is renamed into place and recorded in one transaction that first checks the owner, so a worker that
slept past its lease cannot replace what another worker finished.
"""

import json
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from vitx.core.errors import EnvironmentMissing, InputError
from vitx.core.files import sha256_file
from vitx.predict.inputs.inventory import Inventory, Shard
from vitx.predict.inputs.skipped import NONE_SKIPPED, SkippedNames

T = TypeVar("T")
Row = tuple[Any, ...]
# How long a lock is waited for: longer than any transaction takes, except the one that lists the input, which is waited
# for without limit.
BUSY_SECONDS = 60.0
# Of the tables below, as SQLite's user_version.
FORMAT = 4

# lease: when it ends, in seconds since 1970. Paths are bytes, because a file name need not be valid Unicode and TEXT
# must be. The index holds unfinished shards only, in the order in which `claim` takes them.
_SCHEMA = f"""
CREATE TABLE run (
    description TEXT NOT NULL, base BLOB NOT NULL, digest TEXT NOT NULL, extended INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE shard (
    id INTEGER PRIMARY KEY, kind TEXT NOT NULL, location BLOB NOT NULL, start INTEGER NOT NULL, count INTEGER,
    owner TEXT, lease REAL NOT NULL DEFAULT 0, attempts INTEGER NOT NULL DEFAULT 0,
    digest TEXT, images INTEGER, errors INTEGER, classes TEXT, listed INTEGER, skipped TEXT,
    kept TEXT, again TEXT, stored TEXT
);
CREATE INDEX todo ON shard (lease, id) WHERE digest IS NULL;
PRAGMA user_version = {FORMAT}
"""
_SHARD = "kind, location, start, count"
_SET_FREE = "digest = NULL, owner = NULL, lease = 0"


class ShardRecord(NamedTuple):
    """What the ledger records of a finished shard: the file's sha256 and its counts. classes: images by class index.

    listed: names that the shard was found to have, of which `skipped` are no images.
    """

    digest: str
    images: int
    errors: int
    classes: dict[int, int]
    listed: int = 0
    skipped: SkippedNames = NONE_SKIPPED


class Totals(NamedTuple):
    """Sums over the finished shards. expected: images of all shards, or None if some shard's number is not known."""

    shards: int
    done: int
    images: int
    errors: int
    expected: int | None


@dataclass(frozen=True)
class Claim:
    """A shard that this worker has claimed.

    kept: the sha256 of its file, of which rows without an error are kept, but not those in the places `again`.
    """

    id: int
    shard: Shard
    kept: str | None = None
    again: frozenset[int] = frozenset()
    # Counts the claims of the shard: who claims again what was taken away must not commit the first.
    attempt: int = field(default=0, compare=False)


class Ledger:
    """One worker's view of a run, at `path` on a local file system: SQLite's write-ahead log uses shared memory.

    Each thread uses its own `Ledger`: see `for_thread`. worker: written as the owner of its shards; random by default.
    Raises InputError for a file that is damaged, or of another version of vitx.
    """

    # SQL expression: seconds since 1970.
    _now = "((julianday('now') - 2440587.5) * 86400.0)"

    def __init__(self, path: Path, *, worker: str | None = None, lease_seconds: float) -> None:
        self.path = path
        self.worker = worker or uuid.uuid4().hex
        self.lease_seconds = lease_seconds
        # isolation_level None: no implicit BEGIN. Each thread has its own object, but one thread makes and closes them.
        self._connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            self._open()
        except BaseException as error:
            self.close()
            if not isinstance(error, sqlite3.DatabaseError) or isinstance(error, sqlite3.OperationalError):
                raise
            again = "choose another folder, or pass --overwrite"
            raise InputError(f"the ledger {path} is damaged ({error}): {again}") from None

    def _open(self) -> None:
        self._retry_busy(lambda: self._connection.execute("PRAGMA journal_mode = WAL"))
        # Without a flush at each commit, a power cut may lose the last commits, but not the file's consistency: those
        # shards are done again.
        self._connection.execute("PRAGMA synchronous = NORMAL")
        if self._format() != FORMAT:
            self._write(self._create_tables)

    def close(self) -> None:
        self._connection.close()

    def for_thread(self) -> "Ledger":
        """The same worker's ledger for another thread."""
        return type(self)(self.path, worker=self.worker, lease_seconds=self.lease_seconds)

    def create_or_join(self, create: Callable[[], tuple[str, Inventory]]) -> tuple[str, str]:
        """Return (description, base) of the run. The first process creates it; the others wait until it has.

        create: called by the first process alone, while it holds the lock; lists the input.
        """

        def work() -> tuple[str, str]:
            row = self._connection.execute("SELECT description, base FROM run").fetchone()
            if row is not None:
                return str(row[0]), _decoded(row[1])
            description, inventory = create()
            self._insert(inventory.numbered())
            self._connection.execute(
                "INSERT INTO run (description, base, digest) VALUES (?, ?, ?)",
                (description, _encoded(inventory.base), inventory.digest),
            )
            return description, inventory.base

        return self._write(work, no_limit=True)

    def description(self) -> str:
        return str(self._one("SELECT description FROM run")[0])

    def extensions(self) -> int:
        """How often the run was extended."""
        return int(self._one("SELECT extended FROM run")[0])

    def extend(
        self,
        extended: int,
        description: str,
        *,
        again: Iterable[tuple[int, str, list[int]]] = (),
        replaced: Iterable[tuple[int, Shard]] = (),
        added: Iterable[Shard] = (),
    ) -> bool:
        """Add work to the run; return False, and change nothing, if another process has since `extended` times.

        description: of the run, from now on. again: places of images to be read again in the finished file of a shard:
        (shard, the file's sha256, places). replaced: shards that are to be done anew, by number. added: further shards.
        """

        def work() -> bool:
            if self.extensions() != extended:
                return False
            run = self._connection.execute
            for number, digest, places in again:
                # Not if it was made again meanwhile.
                run(
                    f"UPDATE shard SET kept = coalesce(digest, kept), again = ?, {_SET_FREE} "
                    "WHERE id = ? AND coalesce(digest, kept) = ?",
                    (json.dumps(places), number, digest),
                )
            for number, shard in replaced:
                run(
                    f"UPDATE shard SET kept = NULL, again = NULL, start = ?, count = ?, images = NULL, {_SET_FREE} "
                    "WHERE id = ?",
                    (shard.start, shard.count, number),
                )
            (last,) = self._one("SELECT coalesce(max(id), 0) FROM shard")
            self._insert(enumerate(added, last + 1))
            run("UPDATE run SET description = ?, extended = extended + 1", (description,))
            return True

        return self._write(work)

    def shards(self) -> Iterator[tuple[int, Shard, str | None]]:
        """Yield each shard, and the sha256 of its last finished file, or None."""
        for row in self._pages(f"id, coalesce(digest, kept), {_SHARD}", "TRUE"):
            yield row[0], _shard(row[2:]), row[1]

    def lists(self) -> list[str]:
        """The files beside the first one that hold names of single images."""
        return [_decoded(row[0]) for row in self._rows("SELECT DISTINCT location FROM shard WHERE kind = 'images'")]

    def claim(self) -> Claim | None:
        """Claim a free shard: those whose lease is 0 in order, then the one whose lease ended longest ago.

        Returns None when every unfinished shard is held by some worker.
        """
        found = self._write(
            lambda: self._connection.execute(
                f"UPDATE shard SET owner = ?, lease = {self._now} + ?, attempts = attempts + 1 WHERE id = (SELECT id "
                f"FROM shard WHERE digest IS NULL AND lease < {self._now} ORDER BY lease, id LIMIT 1) "
                f"RETURNING id, kept, again, attempts, {_SHARD}",
                (self.worker, self.lease_seconds),
            ).fetchall()
        )
        return next(
            (
                Claim(number, _shard(shard), kept, frozenset(json.loads(again or "[]")), attempt)
                for number, kept, again, attempt, *shard in found
            ),
            None,
        )

    def renew(self) -> None:
        """Extend the leases of all shards that this worker holds."""
        # lease > 0 changes no result: by it the index finds the few held shards without reading all that wait.
        self._change(
            f"SET lease = {self._now} + ? WHERE owner = ? AND digest IS NULL AND lease > 0",
            (self.lease_seconds, self.worker),
        )

    def release(self, claim: Claim | None = None) -> None:
        """Give back one shard, or all that this worker holds: another worker may claim them at once."""
        which, values = ("", ()) if claim is None else (" AND id = ?", (claim.id,))
        self._change(
            f"SET owner = NULL, lease = 0 WHERE owner = ? AND digest IS NULL AND lease > 0{which}",
            (self.worker, *values),
        )

    def commit(self, claim: Claim, record: ShardRecord, publish: Callable[[], None]) -> bool:
        """Publish the output and record the shard as done; return False, without either, if it is no longer held.

        publish: renames the finished file into place.
        """

        def work() -> bool:
            # The file is locked until the end: nobody can claim or commit the shard between this check and the record.
            # The owner counts, not the lease: a worker that is late may still commit if nobody has taken its shard.
            held = "SELECT 1 FROM shard WHERE id = ? AND owner = ? AND attempts = ? AND digest IS NULL"
            if not self._rows(held, claim.id, self.worker, claim.attempt):
                return False
            # The file first, then the record: a crash between the two leaves a file that is not recorded, which is
            # made again and replaced. The other order would leave a record without a file.
            publish()
            self._connection.execute(
                "UPDATE shard SET digest = ?, images = ?, errors = ?, classes = ?, listed = ?, skipped = ?, "
                "kept = NULL, again = NULL WHERE id = ?",
                (
                    *(record.digest, record.images, record.errors, json.dumps(record.classes), record.listed),
                    *(json.dumps(asdict(record.skipped)), claim.id),
                ),
            )
            return True

        return self._write(work)

    def verify(self, output: Callable[[int], Path]) -> list[int]:
        """Compare every finished file with its digest; return the shards whose file differs or is gone, now free again.

        output: the path of a shard's file.
        """
        wrong = []
        for number, digest in self._pages("id, digest", "digest IS NOT NULL"):
            path = output(number)
            if path.is_file() and sha256_file(path) == digest:
                continue
            # Only while the digest is the one compared: another process may have finished the shard again meanwhile.
            wrong += [number] * self._change(f"SET {_SET_FREE} WHERE id = ? AND digest = ?", (number, digest))
        return wrong

    def retry_errors(self) -> int:
        """Set the finished shards free that have an unreadable image; return how many. Their other rows are kept."""
        return self._change(f"SET kept = digest, {_SET_FREE} WHERE digest IS NOT NULL AND errors > 0", ())

    def unstored(self) -> list[tuple[int, str]]:
        """Finished shards whose file has not been put into the store: number, and the sha256 of the file."""
        found = self._rows("SELECT id, digest FROM shard WHERE digest IS NOT NULL AND stored IS NOT digest ORDER BY id")
        return [(row[0], row[1]) for row in found]

    def stored(self) -> list[int]:
        """Finished shards whose file has been put into the store."""
        return [row[0] for row in self._rows("SELECT id FROM shard WHERE digest IS NOT NULL AND stored IS digest")]

    def set_stored(self, shard: int, digest: str | None) -> None:
        self._change("SET stored = ? WHERE id = ?", (digest, shard))

    def totals(self) -> Totals:
        shards, done, images, errors, expected, unknown = self._one(
            # A shard that was set free still has the numbers of its last file.
            "SELECT count(*), count(digest), "
            "coalesce(sum(CASE WHEN digest IS NOT NULL THEN images END), 0), "
            "coalesce(sum(CASE WHEN digest IS NOT NULL THEN errors END), 0), "
            "coalesce(sum(coalesce(images, count)), 0), count(*) - count(coalesce(images, count)) FROM shard"
        )
        return Totals(shards, done, images, errors, None if unknown else expected)

    def remaining(self) -> int:
        """The number of shards that are not done."""
        return int(self._one("SELECT count(*) FROM shard WHERE digest IS NULL")[0])

    def listing_digest(self) -> str:
        """The digest of the listing that the run was created from."""
        return str(self._one("SELECT digest FROM run")[0])

    def records(self) -> Iterator[tuple[int, str, ShardRecord]]:
        """Yield number, kind and record of each finished shard."""
        columns = "id, kind, classes, skipped, digest, images, errors, listed"
        for number, kind, classes, skipped, digest, *counts in self._pages(columns, "digest IS NOT NULL"):
            by_class = {int(index): count for index, count in json.loads(classes).items()}
            images, errors, listed = counts
            names = SkippedNames(**json.loads(skipped))
            yield number, kind, ShardRecord(digest, images, errors, by_class, listed, names)

    def first_shard_with_errors(self) -> int | None:
        """The first finished shard that has an unreadable image."""
        first = self._one("SELECT min(id) FROM shard WHERE digest IS NOT NULL AND errors > 0")[0]
        return None if first is None else int(first)

    def _pages(self, columns: str, which: str) -> Iterator[Row]:
        """Yield columns, of which `id` is the first.

        Page by page: memory stays flat, and no SELECT is open when the caller writes between two rows.
        """
        last = 0
        while page := self._rows(f"SELECT {columns} FROM shard WHERE {which} AND id > ? ORDER BY id LIMIT 1000", last):
            yield from page
            last = page[-1][0]

    def _insert(self, shards: Iterable[tuple[int, Shard]]) -> None:
        self._connection.executemany(
            f"INSERT INTO shard (id, {_SHARD}) VALUES (?, ?, ?, ?, ?)",
            ((number, one.kind, _encoded(one.location), one.start, one.count) for number, one in shards),
        )

    def _rows(self, query: str, *values: object) -> list[Row]:
        return self._connection.execute(query, values).fetchall()

    def _one(self, query: str) -> Row:
        return self._rows(query)[0]

    def _change(self, change: str, values: tuple[object, ...]) -> int:
        """Run an UPDATE of the shards; return how many rows it changed."""
        return self._write(lambda: self._connection.execute(f"UPDATE shard {change}", values).rowcount)

    def _format(self) -> int:
        return int(self._one("PRAGMA user_version")[0])

    def _create_tables(self) -> None:
        if self._format() == FORMAT:  # another process was first
            return
        if self._format() or self._rows("SELECT 1 FROM sqlite_master"):
            raise InputError(
                f"the ledger {self.path} was written by another version of vitx: finish the run with that one, choose "
                "another folder, or pass --overwrite"
            )
        for statement in _SCHEMA.split(";"):
            self._connection.execute(statement)

    def _write(self, work: Callable[[], T], *, no_limit: bool = False) -> T:
        """Run `work` in a transaction, which is rolled back when it raises."""
        # IMMEDIATE takes the write lock here, where waiting is possible: a transaction that has read first and then
        # writes fails at once if another has written in between.
        self._retry_busy(lambda: self._connection.execute("BEGIN IMMEDIATE"), no_limit=no_limit)
        try:
            result = work()
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:  # SQLite has rolled back by itself if the disk is full
                self._connection.execute("ROLLBACK")
            raise
        return result

    def _retry_busy(self, statement: Callable[[], object], *, no_limit: bool = False) -> None:
        """Run a statement that needs a lock, again while the file is busy.

        SQLite waits for BUSY_SECONDS itself, except when two processes change the journal mode of a new file.
        """
        deadline = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                statement()
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                    raise
                if not no_limit and time.monotonic() > deadline:
                    raise EnvironmentMissing(
                        f"the ledger {self.path} was locked for {BUSY_SECONDS:.0f} s: is it on a network file system? "
                        "SQLite needs a local one; for several machines see --shard"
                    ) from None
                time.sleep(0.01)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _shard(row: Sequence[Any]) -> Shard:
    return Shard(row[0], _decoded(row[1]), row[2], row[3])


def _decoded(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")
