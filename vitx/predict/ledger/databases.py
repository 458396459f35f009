"""Where a ledger lies: a SQLite file for the processes of one machine, PostgreSQL for those of many.

Both run the ledger's own statements (with `?` for a value). Here is what differs: connections, clocks, locks, waiting.
"""

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import urlsplit

from vitx.core.errors import EnvironmentMissing, InputError, missing_package

if TYPE_CHECKING:
    import psycopg

T = TypeVar("T")
Row = tuple[Any, ...]
# Longer than any transaction but the one that lists the input; for that one is waited without limit.
BUSY_SECONDS = 60.0
# A failover of a managed server takes one to two minutes.
LOST_SECONDS = 180.0
LONGEST_WAIT = 5.0
# A worker that sleeps in a transaction holds its shard no longer than this: then the server ends the transaction.
IDLE_SECONDS = 60
SCHEMES = ("postgresql://", "postgres://")
# Unless the URL says otherwise. A server that vanished without a word is noticed within a minute.
_DEFAULTS = {
    "connect_timeout": "10",
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    "tcp_user_timeout": "60000",
    "target_session_attrs": "read-write",
    "application_name": "vitx predict",
}
# A transaction that may be idle for hours, while the input is listed, ends when its process vanishes.
_PATIENT = (
    "SET LOCAL idle_in_transaction_session_timeout = 0; SET LOCAL tcp_keepalives_idle = 30; "
    "SET LOCAL tcp_keepalives_interval = 10; SET LOCAL tcp_keepalives_count = 3"
)


class Cursor(Protocol):
    """What a statement returned."""

    @property
    def rowcount(self) -> int: ...
    def fetchone(self) -> Any: ...
    def fetchall(self) -> list[Any]: ...


class Statements(Protocol):
    """Runs the statements of one transaction."""

    def execute(self, sql: str, values: Sequence[Any] = (), /) -> Cursor: ...
    def executemany(self, sql: str, rows: Iterable[Sequence[Any]], /) -> Cursor: ...


class Database(Protocol):
    """One thread's way to the tables of a ledger."""

    # As shown to the user: no password.
    name: str
    # SQL: seconds since 1970, by the clock that leases are measured with.
    now: str
    # SQL, at the end of a SELECT: the row is this transaction's until it ends.
    locked: str
    # The same, passing over rows that are another's.
    unlocked_only: str
    # SQL: a row if the ledger's tables are there.
    has_tables: str

    def read(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        """Run one SELECT."""
        ...

    def write(self, work: Callable[[Statements], T], *, alone: str | None = None) -> T:
        """Run `work` in a transaction: all of it is done, or nothing when it raises.

        It may run a second time, when it cannot be known whether the first was done. alone: wait, however long, until
        no other such transaction of this name is open.
        """
        ...

    def another(self, stopped: threading.Event) -> "Database":
        """The same for another thread; once `stopped` is set, nothing is waited for."""
        ...

    def close(self) -> None: ...


class SqliteDatabase:
    """A file. Needs a local file system: its write-ahead log is shared memory, which network file systems lack."""

    now = "((julianday('now') - 2440587.5) * 86400.0)"
    # A transaction that writes is alone.
    locked = unlocked_only = ""
    has_tables = "SELECT 1 FROM sqlite_master WHERE name = 'vitx_shard'"

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, str(path)
        self._connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        self._start(lambda: self._connection.execute("PRAGMA journal_mode = WAL"))
        # A lost commit after a power cut is a shard done again; the log stays consistent.
        self._connection.execute("PRAGMA synchronous = NORMAL")

    def close(self) -> None:
        self._connection.close()

    def another(self, stopped: threading.Event) -> "SqliteDatabase":
        return SqliteDatabase(self.path)

    def read(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        return self._connection.execute(sql, values).fetchall()

    def write(self, work: Callable[[Statements], T], *, alone: str | None = None) -> T:
        self._start(lambda: self._connection.execute("BEGIN IMMEDIATE"), patient=alone is not None)
        try:
            result = work(self._connection)
            self._connection.execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:  # SQLite itself rolls back when the disk is full
                self._connection.execute("ROLLBACK")
            raise
        return result

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
                        "SQLite needs a local one; --ledger takes a PostgreSQL database instead"
                    ) from None
                time.sleep(0.01)


class PostgresDatabase:
    """Tables in a PostgreSQL database (13 or newer), shared by any number of runs.

    A process has one connection, whatever its threads; none of its state outlives a transaction, so a pooler may pool
    transactions. A lost connection is made again for `LOST_SECONDS`; then EnvironmentMissing. A server that cannot be
    reached at the beginning is an error at once.
    """

    # The server's: the clocks of machines differ.
    now = "CAST(extract(epoch FROM statement_timestamp()) AS DOUBLE PRECISION)"
    locked = " FOR UPDATE"
    unlocked_only = " FOR UPDATE SKIP LOCKED"
    has_tables = "SELECT 1 WHERE to_regclass('vitx_shard') IS NOT NULL"

    def __init__(self, url: str) -> None:
        """Raise InputError for what is no such URL, EnvironmentMissing without psycopg or when nobody answers."""
        self._link = _Link(url)
        self._stopped: threading.Event | None = None
        self.name = self._link.name
        import psycopg

        logging.getLogger("psycopg").setLevel(logging.ERROR)  # a lost connection, of which it warns, is handled here
        try:
            self._link.connection()
        except psycopg.Error as error:
            raise EnvironmentMissing(f"cannot open the ledger {self.name}: {self._link.reason(error)}") from None

    def close(self) -> None:
        if self._stopped is None:  # else the connection is another's
            self._link.drop()

    def another(self, stopped: threading.Event) -> "PostgresDatabase":
        made = object.__new__(PostgresDatabase)
        made._link, made._stopped, made.name = self._link, stopped, self.name
        return made

    def read(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        return self._retried(lambda connection: _Translated(connection).execute(sql, values).fetchall())

    def write(self, work: Callable[[Statements], T], *, alone: str | None = None) -> T:
        return self._retried(lambda connection: _transaction(connection, work, alone))

    def _retried(self, attempt: Callable[["psycopg.Connection"], T]) -> T:
        """The result of `attempt`; after a lost connection of another one, first at once, then with growing waits."""
        import psycopg

        wait = 0.0
        while True:
            try:
                with self._link.turn:
                    result = attempt(self._link.connection())
                    self._link.lost_since = None
                    return result
            except psycopg.Error as error:
                self._link.drop()
                self._give_up_or_wait(error, wait)
            wait = min(2 * wait, LONGEST_WAIT) or 0.1

    def _give_up_or_wait(self, error: "psycopg.Error", wait: float) -> None:
        import psycopg

        passing = (psycopg.OperationalError, psycopg.InterfaceError, psycopg.errors.ReadOnlySqlTransaction)
        idle = psycopg.errors.IdleInTransactionSessionTimeout
        if not isinstance(error, (*passing, idle)):
            raise EnvironmentMissing(f"the ledger {self.name} refused: {self._link.reason(error)}") from None
        now = time.monotonic()
        since = self._link.lost_since = now if self._link.lost_since is None else self._link.lost_since
        if wait and (now - since >= LOST_SECONDS or (self._stopped or threading.Event()).wait(wait)):
            raise EnvironmentMissing(
                f"the ledger {self.name} was lost for {now - since:.0f} s ({self._link.reason(error)}): run the same "
                "command again when it is back; what is finished stays"
            ) from None


class _Link:
    """The connection of a process to its server, made again when it was lost; `turn` is the thread's that uses it."""

    def __init__(self, url: str) -> None:
        self._parameters, self.name = _parsed(url)
        self.turn = threading.RLock()
        self.lost_since: float | None = None
        self._connection: psycopg.Connection | None = None

    def connection(self) -> "psycopg.Connection":
        import psycopg

        if self._connection is None or self._connection.closed:
            # Prepared statements belong to one server connection, which a pooler may change.
            self._connection = psycopg.connect(**self._parameters, autocommit=True, prepare_threshold=None)
        return self._connection

    def drop(self) -> None:
        with self.turn:
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    def reason(self, error: Exception) -> str:
        """One line, without the password."""
        text = " ".join(str(error).split())
        password = self._parameters.get("password")
        return text.replace(str(password), "…") if password else text


class _Translated:
    """PostgreSQL's placeholders for SQLite's."""

    def __init__(self, connection: "psycopg.Connection") -> None:
        self._connection = connection

    def execute(self, sql: str, values: Sequence[Any] = (), /) -> Cursor:
        return self._connection.execute(_translated(sql), values)

    def executemany(self, sql: str, rows: Iterable[Sequence[Any]], /) -> Cursor:
        cursor = self._connection.cursor()
        cursor.executemany(_translated(sql), rows)
        return cursor


def _translated(sql: str) -> bytes:
    return sql.replace("?", "%s").encode()


def _transaction(connection: "psycopg.Connection", work: Callable[[Statements], T], alone: str | None) -> T:
    import psycopg

    settings = _PATIENT if alone else f"SET LOCAL idle_in_transaction_session_timeout = '{IDLE_SECONDS}s'"
    try:
        connection.execute(f"BEGIN; {settings}".encode())
        if alone:
            connection.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (alone,))
        result = work(_Translated(connection))
        connection.execute("COMMIT")
    except BaseException:
        with suppress(psycopg.Error):
            connection.execute("ROLLBACK")
        raise
    return result


def _parsed(url: str) -> tuple[dict[str, Any], str]:
    """(what to connect with, a name without the password) of a URL, which is never shown: it may hold a password."""
    try:
        from psycopg import ProgrammingError
        from psycopg.conninfo import conninfo_to_dict
    except ModuleNotFoundError:
        raise missing_package("psycopg", "postgres") from None
    expected = "expected postgresql://USER@HOST:PORT/DATABASE"
    if not url.startswith(SCHEMES):
        scheme = urlsplit(url).scheme
        raise InputError(
            f"--ledger: {expected}, not {f'{scheme}://…' if '://' in url and scheme else 'what was given'}"
        )
    try:
        given = conninfo_to_dict(url)
    except ProgrammingError:
        given = {"host": "@"}
    places = (str(given.get("host", "")), str(given.get("dbname", "")))
    ports = str(given.get("port", "")).replace(",", "")
    if any("@" in place for place in places) or (ports and not ports.isdigit()):
        raise InputError(f"--ledger: cannot read the URL: {expected}; write @ / : and spaces of a password as %40 …")
    service = given.get("service")
    host, database = (place or default for place, default in zip(places, ("PGHOST", "PGDATABASE"), strict=True))
    port = f":{given['port']}" if given.get("port") else ""
    return _DEFAULTS | given, f"service {service}" if service else f"{host}{port}/{database}"
