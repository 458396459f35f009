"""Which shards of a run are done: a SQLite file of the one process that holds the run's lock.

A shard is done when its digest is set: the sha256 of the output file. Nothing says which ones are being worked on, so
nothing of that is left when the process is killed.

made: the sha256 of the file that was, or is about to be, renamed into place; NULL once the shard is to be done again.
"""

import json
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from vitx.core.errors import EnvironmentMissing, InputError
from vitx.core.files import sha256_file
from vitx.predict.inputs.inventory import Shard
from vitx.predict.inputs.skipped import NONE_SKIPPED, SkippedNames

T = TypeVar("T")
Row = tuple[Any, ...]
# How long another program, such as one that copies the file, may lock it.
BUSY_SECONDS = 60.0
# Of the tables below, as SQLite's user_version.
FORMAT = 6

# Paths are bytes, because a file name need not be valid Unicode and TEXT must be.
_SCHEMA = f"""
CREATE TABLE run (description TEXT NOT NULL);
CREATE TABLE shard (
    id INTEGER PRIMARY KEY, kind TEXT NOT NULL, location BLOB NOT NULL, start INTEGER NOT NULL, count INTEGER,
    digest TEXT, images INTEGER, errors INTEGER, classes TEXT, listed INTEGER, skipped TEXT,
    kept TEXT, again TEXT, made TEXT
);
PRAGMA user_version = {FORMAT}
"""
_SHARD = "kind, location, start, count"
_SET_FREE, _SET_DONE = "digest = NULL, made = NULL", "digest = made, kept = NULL, again = NULL"


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
    """A shard to work on.

    kept: the sha256 of its file, of which rows without an error are kept, but not those in the places `again`.
    """

    id: int
    shard: Shard
    kept: str | None = None
    again: frozenset[int] = frozenset()


class Ledger:
    """A run's ledger at `path`, on a local file system: SQLite's write-ahead log uses shared memory.

    For all threads: one uses it at a time. Raises InputError for a file that is damaged, or of another version of vitx;
    what writes raises EnvironmentMissing if another program has locked the file for BUSY_SECONDS.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.RLock()
        # isolation_level None: no implicit BEGIN.
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
        self._connection.execute("PRAGMA journal_mode = WAL")
        # Without a flush at each commit, a power cut may lose the last commits, but not the file's consistency: those
        # shards are done again.
        self._connection.execute("PRAGMA synchronous = NORMAL")
        if self._one("PRAGMA user_version") != (FORMAT,):
            self._write(self._create_tables)

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def description(self) -> str:
        """Of the run; empty before `create`."""
        return next((str(text) for (text,) in self._rows("SELECT description FROM run")), "")

    def create(self, description: str, shards: Iterable[tuple[int, Shard]]) -> None:
        def work() -> None:
            self._insert(shards)
            self._connection.execute("INSERT INTO run (description) VALUES (?)", (description,))

        self._write(work)

    def extend(
        self,
        description: str,
        *,
        again: Iterable[tuple[int, list[int]]] = (),
        replaced: Iterable[tuple[int, Shard]] = (),
        added: Iterable[Shard] = (),
    ) -> None:
        """Add work to the run.

        description: of the run, from now on. again: places of images to be read again in the finished file of a shard:
        (shard, places). replaced: shards that are to be done anew, by number. added: further shards.
        """

        def work() -> None:
            run = self._connection.execute
            for number, places in again:
                run(
                    f"UPDATE shard SET kept = coalesce(digest, kept), again = ?, {_SET_FREE} WHERE id = ?",
                    (json.dumps(places), number),
                )
            for number, shard in replaced:
                run(
                    f"UPDATE shard SET kept = NULL, again = NULL, start = ?, count = ?, images = NULL, {_SET_FREE} "
                    "WHERE id = ?",
                    (shard.start, shard.count, number),
                )
            (last,) = self._one("SELECT coalesce(max(id), 0) FROM shard")
            self._insert(enumerate(added, last + 1))
            run("UPDATE run SET description = ?", (description,))

        self._write(work)

    def shards(self) -> Iterator[tuple[int, Shard, str | None]]:
        """Yield each shard, and the sha256 of its last finished file, or None."""
        for row in self._pages(f"id, coalesce(digest, kept), {_SHARD}", "TRUE"):
            yield row[0], _shard(row[2:]), row[1]

    def lists(self) -> list[str]:
        """The files beside the first one that hold names of single images."""
        return [_decoded(row[0]) for row in self._rows("SELECT DISTINCT location FROM shard WHERE kind = 'images'")]

    def unfinished(self) -> Iterator[Claim]:
        """Yield the shards that are not done, in order; what is finished or set free meanwhile does not matter."""
        for number, kept, again, *shard in self._pages(f"id, kept, again, {_SHARD}", "digest IS NULL"):
            yield Claim(number, _shard(shard), kept, frozenset(json.loads(again or "[]")))

    def commit(self, claim: Claim, record: ShardRecord, publish: Callable[[], None]) -> None:
        """Publish the output and record the shard as done. publish: renames the finished file into place."""
        # A crash before the last step leaves the old file, or one that `verify` knows. To make that again would not do:
        # its kept rows were of the old file, and their images may be gone.
        self._change(
            "SET made = ?, images = ?, errors = ?, classes = ?, listed = ?, skipped = ? WHERE id = ?",
            *(record.digest, record.images, record.errors, json.dumps(record.classes), record.listed),
            *(json.dumps(asdict(record.skipped)), claim.id),
        )
        publish()
        self._change(f"SET {_SET_DONE} WHERE id = ?", claim.id)

    def verify(self, output: Callable[[int], Path]) -> list[int]:
        """Compare every finished file with its digest; return the shards whose file differs or is gone, now free again.

        A file that was published and not recorded before the last process ended is recorded now. output: the path of a
        shard's file.
        """
        wrong = []
        for number, digest, made in self._pages("id, digest, made", "made IS NOT NULL"):
            path = output(number)
            if path.is_file() and sha256_file(path) == made:
                self._change(f"SET {_SET_DONE} WHERE id = ? AND digest IS NULL", number)
            elif digest is not None:
                self._change(f"SET {_SET_FREE} WHERE id = ?", number)
                wrong.append(number)
        return wrong

    def retry_errors(self) -> int:
        """Set the finished shards free that have an unreadable image; return how many. Their other rows are kept."""
        return self._change(f"SET kept = digest, {_SET_FREE} WHERE digest IS NOT NULL AND errors > 0")

    def totals(self) -> Totals:
        shards, done, images, errors, expected, unknown = self._one(
            # A shard that was set free still has the numbers of its last file.
            "SELECT count(*), count(digest), "
            "coalesce(sum(CASE WHEN digest IS NOT NULL THEN images END), 0), "
            "coalesce(sum(CASE WHEN digest IS NOT NULL THEN errors END), 0), "
            "coalesce(sum(coalesce(images, count)), 0), count(*) - count(coalesce(images, count)) FROM shard"
        )
        return Totals(shards, done, images, errors, None if unknown else expected)

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
            (
                (number, one.kind, one.location.encode("utf-8", "surrogateescape"), one.start, one.count)
                for number, one in shards
            ),
        )

    def _rows(self, query: str, *values: object) -> list[Row]:
        with self._lock:
            return self._connection.execute(query, values).fetchall()

    def _one(self, query: str) -> Row:
        return self._rows(query)[0]

    def _change(self, change: str, *values: object) -> int:
        """Run an UPDATE of the shards; return how many rows it changed."""
        return self._write(lambda: self._connection.execute(f"UPDATE shard {change}", values).rowcount)

    def _create_tables(self) -> None:
        if self._rows("SELECT 1 FROM sqlite_master"):
            raise InputError(
                f"the ledger {self.path} was written by another version of vitx: finish the run with that one, choose "
                "another folder, or pass --overwrite"
            )
        for statement in _SCHEMA.split(";"):
            self._connection.execute(statement)

    def _write(self, work: Callable[[], T]) -> T:
        """Run `work` in a transaction, which is rolled back when it raises."""
        try:
            with self._lock, self._connection:
                self._connection.execute("BEGIN IMMEDIATE")
                return work()
        except sqlite3.OperationalError as error:
            if getattr(error, "sqlite_errorcode", None) != sqlite3.SQLITE_BUSY:
                raise
            raise EnvironmentMissing(
                f"the ledger {self.path} was locked by another program for {BUSY_SECONDS:.0f} s: end that one; if "
                "there is none, choose a local folder, for SQLite's locks fail on some network file systems"
            ) from None


def _shard(row: Sequence[Any]) -> Shard:
    return Shard(row[0], _decoded(row[1]), row[2], row[3])


def _decoded(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")
