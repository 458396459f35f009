"""What a run has to do and what is done: a SQLite file of the one process that holds the run's lock.

image: the names of single images in their order; a shard of them is a range of `id`. A name is bytes, because a file
name need not be valid Unicode, with NUL for "/": in this order "a/b" comes before "a-b", as the part "a" before "a-b".

shard: done when its digest is set, the sha256 of its record, see `ShardRecord`, where that of the output file is. made:
the sha256 of the record of the file that was, or is about to be, renamed into place; NULL once the shard is to be done
again. kept: the sha256 of its last file, while that has rows which stay; again: the places of rows that do not, unless
their images are gone.

seal: of the run, see `Ledger._seal`. SQLite has no checksums, and one bit may take a thousand images out of a shard.
"""

import hashlib
import json
import os
import sqlite3
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from itertools import chain, count, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from vitx.core.errors import EnvironmentMissing, InputError
from vitx.core.files import escape_invalid_utf8, rename, sha256_bytes, sha256_file
from vitx.predict.inputs.skipped import NONE_SKIPPED, SkippedNames
from vitx.predict.options import WHOLE, Share

Row = tuple[Any, ...]
# How long another program, such as one that copies the file, may lock it.
BUSY_SECONDS = 60.0
# Of the tables below, as SQLite's user_version.
FORMAT = 9
# Rows that are read at once.
PAGE = 4096
# The place that stands for all.
EVERY_ROW = -1
# Begins the names of its copies, see `Ledger.copied`.
COPY = "images-"

_SCHEMA = f"""
CREATE TABLE run (description TEXT NOT NULL, seal TEXT NOT NULL);
CREATE TABLE image (id INTEGER PRIMARY KEY, name BLOB NOT NULL);
CREATE TABLE shard (
    id INTEGER PRIMARY KEY, kind TEXT NOT NULL, location BLOB NOT NULL, start INTEGER NOT NULL, count INTEGER,
    digest TEXT, record TEXT, kept TEXT, again TEXT, made TEXT
);
PRAGMA user_version = {FORMAT}
"""
_CODEC = ("utf-8", "surrogateescape")
_SHARD = "kind, location, start, count"
_NEW = "name NOT IN (SELECT name FROM image)"
# A line of a list, as a rule, whose image is gone.
_UNKNOWN = "(found.version ISNULL AND read.version NOTNULL)"
_SET_FREE, _SET_DONE = "digest = NULL, made = NULL", "digest = made, kept = NULL, again = NULL"
# Of a record, as JSON. kept: the file that a shard has, or whose rows it keeps.
_FILE, _IMAGES, _ERRORS = (f"json_extract(record, '$[{place}]')" for place in range(3))
_KEPT = f"CASE WHEN digest NOTNULL THEN {_FILE} ELSE kept END"

ShardKind = Literal["images", "tar", "parquet"]


@dataclass(frozen=True)
class Shard:
    """The unit of work, by kind. count: the number of images, None if only reading the shard can tell.

    images: `count` single images behind the first `start`. tar: the file at `location`. parquet: the row group of the
    file at `location` that begins with row `start`, or all of a file without a `count`.
    """

    kind: ShardKind
    location: str
    start: int = 0
    count: int | None = None


class ShardRecord(NamedTuple):
    """Of a finished shard. digest: the file's sha256. classes: images by index. listed: names, with the `skipped`.

    uncounted: files and folders that were not read to their end.
    """

    digest: str
    images: int
    errors: int
    classes: dict[int, int]
    listed: int = 0
    skipped: SkippedNames = NONE_SKIPPED
    uncounted: int = 0


class Totals(NamedTuple):
    """Sums over the finished shards. expected: images of all shards, or None if some shard's number is not known."""

    shards: int
    done: int
    images: int
    errors: int
    expected: int | None


@dataclass(frozen=True)
class Claim:
    """A shard, and the sha256 of its last file: rows of that are `kept`, but not those in the places `again`."""

    id: int
    shard: Shard
    kept: str | None = None
    again: frozenset[int] = frozenset()


class Ledger:
    """A run's ledger at `path`, on a local file system: SQLite's write-ahead log uses shared memory.

    For all threads. share: whose the run is. Raises InputError for a file of another version of vitx; what writes
    raises EnvironmentMissing if another program has locked the file for BUSY_SECONDS. A damaged one: see `open_ledger`.
    """

    def __init__(self, path: Path, share: Share = WHOLE) -> None:
        self._lock, self.share = threading.RLock(), share
        self._connect(path)

    def _connect(self, path: Path) -> None:
        self.path = path
        with suppress(PermissionError, FileNotFoundError):  # then SQLite says it
            path.touch()  # SQLite would make it 0644 whatever the umask, and the others of a group could not go on
        # isolation_level None: no implicit BEGIN.
        self._connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            self._open()
        except BaseException as error:
            self.close()
            if isinstance(error, UnicodeDecodeError):  # in what SQLite says of a damaged definition of a table
                raise sqlite3.DatabaseError(str(error)) from None
            raise

    def _open(self) -> None:
        self._connection.execute("PRAGMA journal_mode = WAL")
        # Without a flush at each commit, a power cut may lose the last commits, but not the file's consistency: those
        # shards are done again.
        self._connection.execute("PRAGMA synchronous = NORMAL")
        if self._rows("PRAGMA user_version") == [(FORMAT,)]:
            self._check()
            return
        with self._writing() as run:
            if self._rows("SELECT 1 FROM sqlite_master"):
                raise InputError(
                    f"the ledger {self.path} was written by another version of vitx: finish the run with that one, "
                    f"choose another folder, or {self.share.anew}"
                )
            for statement in _SCHEMA.split(";"):
                run(statement)

    def _check(self) -> None:
        """Raise sqlite3.DatabaseError for a file that is damaged."""
        ((found,),) = self._rows("PRAGMA quick_check(1)")  # a search through pages out of order may have no end
        if found != "ok":
            raise sqlite3.DatabaseError(str(found).splitlines()[-1])
        sealed = all(self._seal(description) == seal for description, seal in self._rows("SELECT * FROM run"))
        if not sealed or self._rows("SELECT 1 FROM shard WHERE again NOTNULL AND NOT json_valid(again) LIMIT 1"):
            raise sqlite3.DatabaseError("it was changed by another program, or by the disk")

    def _seal(self, description: Any) -> str:
        """The sha256 of all that a run has to do: its description, names and shards."""
        hasher = hashlib.sha256(repr(description).encode())
        shards, ids = f"SELECT id, {_SHARD} FROM shard ORDER BY id", "SELECT count(*), min(id), max(id) FROM image"
        for query in (shards, ids, "SELECT name FROM image ORDER BY id"):
            rows = self._connection.execute(query)
            while page := rows.fetchmany(PAGE):
                hasher.update(repr(page).encode())
        return hasher.hexdigest()

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    def move(self, path: Path) -> None:
        """Rename its file, which no other connection may have open."""
        with self._lock:
            self.close()  # which writes the log into the file
            rename(self.path, path)
            self._connect(path)

    def description(self) -> dict[str, Any]:
        """Of the run; empty before `create`."""
        return next((dict(json.loads(text)) for (text,) in self._rows("SELECT description FROM run")), {})

    def find(self, images: Iterable[tuple[str, str | None]], *, in_order: bool = False, once: bool = False) -> int:
        """Put names and versions of images in the table `found`, which ends with the process; return their number.

        in_order: theirs is that of the run, else they are to be sorted. once: one that comes again is left out.
        """
        self._order = "rowid" if in_order else "name"
        unique = "UNIQUE" if once else ""
        with self._writing() as run:
            run("DROP TABLE IF EXISTS temp.found")
            run(f"CREATE TEMP TABLE found (name BLOB NOT NULL {unique}, version TEXT)")
            rows = ((name.replace("/", "\0").encode(*_CODEC), version) for name, version in images)
            while some := list(islice(rows, 50)):  # which halves the time
                values = ", ".join(["(?, ?)"] * len(some))
                run(f"INSERT OR IGNORE INTO found VALUES {values}", list(chain.from_iterable(some)))
        return int(self._rows("SELECT count(*) FROM found")[0][0])

    def unlisted(self, *, created: bool) -> frozenset[str]:
        """The keys of folders that could not be listed by this process, which has created the run or found it."""
        table = "image" if created else "found"
        names = self._rows(f"SELECT name FROM {table} WHERE substr(name, -1) = x'00'")
        return frozenset(escape_invalid_utf8(name.decode(*_CODEC).replace("\0", "/")) for (name,) in names)

    def number(self, share: Share | None) -> tuple[int, str]:
        """Make the names that were found last the images of the run, those of `share`: every Nth of N jobs.

        Return how many the run has, and the sha256 of all that were found; without a share only that.
        """
        hasher, table = hashlib.sha256(), "found" if self._order == "rowid" else "listed"
        with self._writing() as run:
            if table == "listed":
                run("DROP TABLE IF EXISTS temp.listed")
                run("CREATE TEMP TABLE listed AS SELECT name FROM found ORDER BY name")
            names = run(f"SELECT name FROM {table} ORDER BY rowid")
            while page := names.fetchmany(PAGE):
                hasher.update(b"/".join(name for (name,) in page) + b"/")
            if share is None:
                return 0, hasher.hexdigest()
            run("DELETE FROM image")  # of a creation that did not come to its end
            own = f"SELECT name FROM {table} WHERE rowid % ? = ? ORDER BY rowid"
            images = run(f"INSERT INTO image (name) {own}", (share.jobs, share.number % share.jobs)).rowcount
        return images, hasher.hexdigest()

    @contextmanager
    def copied(self) -> Iterator[Path]:
        """Yield a copy that other machines may read too, as `names_of` does; it is removed at the end."""
        path = self.path.with_name(f"{COPY}{uuid.uuid4().hex}")
        try:
            with self._lock:
                self._connection.execute("VACUUM INTO CAST(? AS TEXT)", (os.fsencode(path),))
            yield path
        finally:
            path.unlink(missing_ok=True)

    def create(self, description: dict[str, Any], shards: Iterable[Shard]) -> None:
        """The shards of each share have numbers of their own."""
        with self._writing() as run:
            self._insert(shards, self.share.number, self.share.jobs)
            text = json.dumps(description)
            run("INSERT INTO run VALUES (?, ?)", (text, self._seal(text)))

    def compare(self, read: Iterable[tuple[int, str | None, int, int]]) -> tuple[int, ...]:
        """Compare the images of the run with those that were found last, each once.

        read: of each image in a finished file its id, the version that was read, the shard and the place in the file.
        Returns how many are not in the run; and of those in it how many are not finished, of another version than was
        read, the same, and gone.
        """
        with self._writing() as run:
            run("DROP TABLE IF EXISTS temp.read")
            run("CREATE TEMP TABLE read (id INTEGER PRIMARY KEY, version TEXT, shard INTEGER, place INTEGER)")
            self._connection.executemany("INSERT INTO read VALUES (?, ?, ?, ?)", read)
        (counts,) = self._rows(
            f"SELECT (SELECT count(*) FROM found WHERE {_NEW}), count(*) FILTER (WHERE here AND NOT done), "
            "count(*) FILTER (WHERE here AND differs), count(*) FILTER (WHERE here AND NOT differs), "
            f"count(*) FILTER (WHERE NOT here) FROM (SELECT found.name NOTNULL AND NOT {_UNKNOWN} AS here, "
            "read.id NOTNULL AS done, "
            "CASE WHEN read.id NOTNULL THEN read.version IS NOT found.version END AS differs "
            "FROM image LEFT JOIN read USING (id) LEFT JOIN found USING (name))"
        )
        return counts

    def extend(
        self,
        description: dict[str, Any],
        shard_size: int,
        *,
        replaced: Iterable[tuple[int, Shard, bool]] = (),
        added: Iterable[Shard] = (),
    ) -> None:
        """Add to the run what the last comparison found: new images, and those to be read again in a finished file.

        description: of the run, from now on. replaced: shards that are to be done anew, by number, and whether the rows
        of their last file stay if theirs is gone. added: others.
        """
        changed = (
            "SELECT json_group_array(place), shard FROM (SELECT place, shard FROM read JOIN image USING (id) "
            f"JOIN found USING (name) WHERE read.version IS NOT found.version AND NOT {_UNKNOWN} ORDER BY id) "
            "GROUP BY shard"
        )
        with self._writing() as run:
            self._connection.executemany(
                f"UPDATE shard SET again = ?, kept = {_KEPT}, {_SET_FREE} WHERE id = ?",
                run(changed).fetchall(),
            )
            kept = f"kept = CASE WHEN ? THEN {_KEPT} END, again = '[{EVERY_ROW}]'"
            anew = f"{kept}, start = ?, count = ?, record = NULL, {_SET_FREE}"
            for number, shard, stays in replaced:
                run(f"UPDATE shard SET {anew} WHERE id = ?", (stays, shard.start, shard.count, number))
            ((last, before),) = self._rows("SELECT max(id), (SELECT count(*) FROM image) FROM shard")
            new = f"SELECT name FROM found WHERE {_NEW} ORDER BY {self._order}"
            after = before + run(f"INSERT INTO image (name) {new}").rowcount
            self._insert([*image_shards(before, after, shard_size), *added], last + 1)
            text = json.dumps(description)
            run("UPDATE run SET description = ?, seal = ?", (text, self._seal(text)))

    def shards(self, which: str = "TRUE") -> Iterator[Claim]:
        """Yield the shards in order, of which the SQL condition is true; what is changed meanwhile does not matter."""
        for number, kept, again, *shard in self._pages(f"id, {_KEPT}, again, {_SHARD}", which):
            kind, location, start, images = shard
            places = frozenset(json.loads(again or "[]"))
            yield Claim(number, Shard(kind, location.decode(*_CODEC), start, images), kept, places)

    def unfinished(self) -> Iterator[Claim]:
        return self.shards("digest IS NULL")

    def commit(self, claim: Claim, record: ShardRecord, publish: Callable[[], None]) -> None:
        """Publish the output and record the shard as done. publish: renames the finished file into place."""
        # A crash before the last step leaves the old file, or one that `verify` knows. To make that again would not do:
        # its kept rows were of the old file, and their images may be gone.
        text = json.dumps(record, default=asdict)
        self._change("SET made = ?, record = ? WHERE id = ?", sha256_bytes(text.encode()), text, claim.id)
        publish()
        self._change(f"SET {_SET_DONE} WHERE id = ?", claim.id)

    def verify(self, output: Callable[[int], Path]) -> list[int]:
        """Compare every file, at `output`, with its digest; return the shards whose file is not what was recorded.

        Those are to be done, and keep no rows. A file that was published and not recorded before the last process ended
        is recorded now.
        """
        wrong = []
        known = "coalesce(made, digest, kept) NOTNULL"
        for number, digest, made, record, kept in self._pages("id, digest, made, record, kept", known):
            path = output(number)
            found = sha256_file(path) if path.is_file() else None
            if sha256_bytes(str(record).encode()) == made and found == json.loads(record)[0]:
                self._change(f"SET {_SET_DONE} WHERE id = ? AND digest IS NOT made", number)
            elif digest is not None or kept not in (None, found):
                self._change(f"SET kept = NULL, {_SET_FREE} WHERE id = ?", number)
                wrong.append(number)
        return wrong

    def retry_errors(self) -> int:
        """Set the finished shards free that have an unreadable image; return how many. Their other rows are kept."""
        return self._change(f"SET kept = {_FILE}, {_SET_FREE} WHERE digest NOTNULL AND {_ERRORS} > 0")

    def totals(self) -> Totals:
        # A shard that was set free still has the record of its last file.
        finished = "coalesce(sum({}) FILTER (WHERE digest NOTNULL), 0)"
        expected = "CASE WHEN count(*) = count(known) THEN coalesce(sum(known), 0) END"
        (totals,) = self._rows(
            f"SELECT count(*), count(digest), {finished.format(_IMAGES)}, {finished.format(_ERRORS)}, {expected} "
            f"FROM (SELECT *, coalesce({_IMAGES}, count) AS known FROM shard)"
        )
        return Totals(*totals)

    def records(self) -> Iterator[tuple[int, str, ShardRecord]]:
        """Yield number, kind and record of each finished shard."""
        for number, kind, record in self._pages("id, kind, record", "digest NOTNULL"):
            digest, images, errors, classes, listed, skipped, uncounted = json.loads(record)
            by_class = {int(index): count for index, count in classes.items()}
            counts = (images, errors, by_class, listed, SkippedNames(**skipped), uncounted)
            yield number, kind, ShardRecord(digest, *counts)

    def _pages(self, columns: str, which: str) -> Iterator[Row]:
        """Yield columns, of which `id` is the first, a page at a time: no SELECT is open while the caller writes."""
        last = 0
        while page := self._rows(f"SELECT {columns} FROM shard WHERE {which} AND id > ? ORDER BY id LIMIT 1000", last):
            yield from page
            last = page[-1][0]

    def _insert(self, shards: Iterable[Shard], start: int, step: int = 1) -> None:
        insert = f"INSERT INTO shard (id, {_SHARD}) VALUES (?, ?, ?, ?, ?)"
        numbered = zip(count(start, step), shards)
        rows = ((number, one.kind, one.location.encode(*_CODEC), one.start, one.count) for number, one in numbered)
        self._connection.executemany(insert, rows)

    def _rows(self, query: str, *values: object) -> list[Row]:
        with self._lock:
            return self._connection.execute(query, values).fetchall()

    def _change(self, change: str, *values: object) -> int:
        """Run an UPDATE of the shards; return how many rows it changed."""
        with self._writing() as run:
            return run(f"UPDATE shard {change}", values).rowcount

    @contextmanager
    def _writing(self) -> Iterator[Callable[..., sqlite3.Cursor]]:
        """Yield `execute` for a transaction, which is rolled back when the block raises."""
        try:
            with self._lock, self._connection:
                self._connection.execute("BEGIN IMMEDIATE")
                yield self._connection.execute
        except sqlite3.OperationalError as error:
            if getattr(error, "sqlite_errorcode", None) != sqlite3.SQLITE_BUSY:
                raise
            raise EnvironmentMissing(
                f"the ledger {self.path} was locked by another program for {BUSY_SECONDS:.0f} s: end that one; if "
                "there is none, choose a local folder, for SQLite's locks fail on some network file systems"
            ) from None


def image_shards(start: int, end: int, size: int) -> list[Shard]:
    """Of the images behind the first `start` up to `end`."""
    return [Shard("images", "", first, min(size, end - first)) for first in range(start, end, size)]


def names_of(shard: Shard, listing: Path) -> Iterator[str]:
    """The names of a shard of single images. listing: the ledger's file, or a copy of it, see `Ledger.copied`."""
    # A copy does not change, and where it lies no lock may work. Closed by whichever thread drops the iterator.
    mode = "immutable=1" if listing.name.startswith(COPY) else "mode=ro"
    location = f"{listing.absolute().as_uri()}?{mode}"
    with closing(sqlite3.connect(location, timeout=BUSY_SECONDS, uri=True, check_same_thread=False)) as database:
        end = shard.start + (shard.count or 0)
        for first in range(shard.start, end, PAGE):
            within = (first, min(first + PAGE, end))
            names = database.execute("SELECT name FROM image WHERE id > ? AND id <= ? ORDER BY id", within).fetchall()
            yield from (name.decode(*_CODEC).replace("\0", "/") for (name,) in names)
