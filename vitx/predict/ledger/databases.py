"""The databases of a ledger: a SQLite file for the processes of one machine, PostgreSQL for several machines.

The SQL of the ledger is the same for both, with `?` for a value. This file has what differs: connections, clocks, locks
and what happens when a database is busy or lost.
"""

import copy
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
# How long a SQLite lock is waited for: longer than any transaction takes, except the one that lists the input, which is
# waited for without limit.
BUSY_SECONDS = 60.0
# How long a lost server is tried again: a failover of a managed server takes one to two minutes.
RECONNECT_SECONDS = 180.0
MAX_WAIT_SECONDS = 5.0
# A worker that is stopped in a transaction holds its row's lock no longer than this: the server then ends the
# transaction.
IDLE_TRANSACTION_SECONDS = 60
SCHEMES = ("postgresql://", "postgres://")
# Where the URL does not set them. Keepalives notice a server that vanished without closing the connection in a minute.
_CONNECTION_DEFAULTS = {
    "connect_timeout": "10",
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    "tcp_user_timeout": "60000",
    "target_session_attrs": "read-write",
    "application_name": "vitx predict",
}
# For the transaction that lists the input, which may be idle for hours. The server's keepalives end it when its process
# vanishes, so that another process can list.
_LONG_TRANSACTION = (
    "SET LOCAL idle_in_transaction_session_timeout = 0; SET LOCAL tcp_keepalives_idle = 30; "
    "SET LOCAL tcp_keepalives_interval = 10; SET LOCAL tcp_keepalives_count = 3"
)


class Cursor(Protocol):
    """The result of a statement."""

    @property
    def rowcount(self) -> int: ...
    def fetchone(self) -> Any: ...
    def fetchall(self) -> list[Any]: ...


class Transaction(Protocol):
    """Runs statements; all of them take effect or none does."""

    def execute(self, sql: str, values: Sequence[Any] = (), /) -> Cursor: ...
    def executemany(self, sql: str, rows: Iterable[Sequence[Any]], /) -> Cursor: ...


class Database(Protocol):
    """One thread's access to the tables of a ledger."""

    # Shown to the user, without the password.
    name: str
    # SQL expression: seconds since 1970, by the one clock that all leases of this database are measured with.
    now: str
    # SQL suffix of a SELECT: lock the row until the end of the transaction.
    for_update: str
    # SQL suffix of a SELECT: the same, leaving out rows that another transaction has locked.
    skip_locked: str
    # SQL query: returns a row if the ledger's tables exist.
    has_tables: str

    def read(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        """Run one SELECT."""
        ...

    def write(self, work: Callable[[Transaction], T], *, advisory_lock: str | None = None) -> T:
        """Run `work` in a transaction, which is rolled back when it raises.

        `work` runs again after a lost connection, and then the first attempt may have been committed. advisory_lock: a
        name of which one transaction at a time may be open; the others wait for it without limit.
        """
        ...

    def for_thread(self, stopped: threading.Event) -> "Database":
        """The same database for another thread; once `stopped` is set, a lost server is not waited for."""
        ...

    def close(self) -> None: ...


class SqliteDatabase:
    """A file on a local file system: the index of its write-ahead log is shared memory, which network ones lack."""

    now = "((julianday('now') - 2440587.5) * 86400.0)"
    # Nothing to lock: SQLite lets one transaction write at a time.
    for_update = skip_locked = ""
    has_tables = "SELECT 1 FROM sqlite_master WHERE name = 'vitx_shard'"

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, str(path)
        # isolation_level None: no implicit BEGIN. Each thread has its own object, but one thread makes and closes them.
        self._connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        self._retry_busy(lambda: self._connection.execute("PRAGMA journal_mode = WAL"))
        # Without a flush at each commit, a power cut may lose the last commits, but not the file's consistency: those
        # shards are done again.
        self._connection.execute("PRAGMA synchronous = NORMAL")

    def close(self) -> None:
        self._connection.close()

    def for_thread(self, stopped: threading.Event) -> "SqliteDatabase":
        return SqliteDatabase(self.path)

    def read(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        return self._connection.execute(sql, values).fetchall()

    def write(self, work: Callable[[Transaction], T], *, advisory_lock: str | None = None) -> T:
        # IMMEDIATE takes the write lock here, where waiting is possible: a transaction that has read first and then
        # writes fails at once if another has written in between.
        self._retry_busy(lambda: self._connection.execute("BEGIN IMMEDIATE"), no_limit=advisory_lock is not None)
        try:
            result = work(self._connection)
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
                        "SQLite needs a local one; --ledger takes a PostgreSQL database instead"
                    ) from None
                time.sleep(0.01)


class PostgresDatabase:
    """Tables in a PostgreSQL database (13 or newer), shared by any number of runs.

    A process has one connection, which its threads share. No session state outlives a transaction, so a pooler such as
    PgBouncer may pool transactions. A lost connection is tried again for RECONNECT_SECONDS, then EnvironmentMissing is
    raised; a server that cannot be reached at the start raises it at once.
    """

    # The server's clock, because the clocks of the machines differ.
    now = "CAST(extract(epoch FROM statement_timestamp()) AS DOUBLE PRECISION)"
    for_update = " FOR UPDATE"
    skip_locked = " FOR UPDATE SKIP LOCKED"
    has_tables = "SELECT 1 WHERE to_regclass('vitx_shard') IS NOT NULL"

    def __init__(self, url: str) -> None:
        """Raise InputError for a wrong URL, EnvironmentMissing without psycopg or without a server that answers."""
        self._shared = _SharedConnection(url)
        self._stopped: threading.Event | None = None
        self.name = self._shared.name
        import psycopg

        logging.getLogger("psycopg").setLevel(logging.ERROR)  # it warns of lost connections, which are handled here
        try:
            self._shared.connection()
        except psycopg.Error as error:
            raise EnvironmentMissing(f"cannot open the ledger {self.name}: {self._shared.reason(error)}") from None

    def close(self) -> None:
        if self._stopped is None:  # made by `for_thread` otherwise: the connection belongs to the first object
            self._shared.drop()

    def for_thread(self, stopped: threading.Event) -> "PostgresDatabase":
        copied = copy.copy(self)
        copied._stopped = stopped
        return copied

    def read(self, sql: str, values: Sequence[Any] = ()) -> list[Row]:
        return self._retry_lost(lambda connection: _PostgresTransaction(connection).execute(sql, values).fetchall())

    def write(self, work: Callable[[Transaction], T], *, advisory_lock: str | None = None) -> T:
        return self._retry_lost(lambda connection: _run_transaction(connection, work, advisory_lock))

    def _retry_lost(self, attempt: Callable[["psycopg.Connection"], T]) -> T:
        """Return the result of `attempt`. After a lost connection it runs again: at once, then after growing waits."""
        import psycopg

        wait = 0.0
        while True:
            try:
                with self._shared.lock:
                    result = attempt(self._shared.connection())
                    self._shared.lost_since = None
                    return result
            except psycopg.Error as error:
                self._shared.drop()
                self._give_up_or_wait(error, wait)
            wait = min(2 * wait, MAX_WAIT_SECONDS) or 0.1

    def _give_up_or_wait(self, error: "psycopg.Error", wait: float) -> None:
        import psycopg

        # Read-only: the connection went to a standby during a failover.
        transient = (psycopg.OperationalError, psycopg.InterfaceError, psycopg.errors.ReadOnlySqlTransaction)
        idle = psycopg.errors.IdleInTransactionSessionTimeout
        if not isinstance(error, (*transient, idle)):
            raise EnvironmentMissing(f"the ledger {self.name} refused: {self._shared.reason(error)}") from None
        now = time.monotonic()
        since = self._shared.lost_since = now if self._shared.lost_since is None else self._shared.lost_since
        if wait and (now - since >= RECONNECT_SECONDS or (self._stopped or threading.Event()).wait(wait)):
            raise EnvironmentMissing(
                f"the ledger {self.name} could not be reached for {now - since:.0f} s ({self._shared.reason(error)}): "
                "run the same command again when it is back; finished shards are kept"
            ) from None


class _SharedConnection:
    """The connection of a process to its server; a thread holds `lock` while it uses it.

    lost_since: the time.monotonic() of the first failure since the last success, for all threads together.
    """

    def __init__(self, url: str) -> None:
        self._parameters, self.name = _parse_url(url)
        self.lock = threading.RLock()
        self.lost_since: float | None = None
        self._connection: psycopg.Connection | None = None

    def connection(self) -> "psycopg.Connection":
        import psycopg

        if self._connection is None or self._connection.closed:
            # No prepared statements: they belong to one server connection, and a pooler may change that.
            self._connection = psycopg.connect(**self._parameters, autocommit=True, prepare_threshold=None)
        return self._connection

    def drop(self) -> None:
        with self.lock:
            if self._connection is not None:
                self._connection.close()
            self._connection = None

    def reason(self, error: Exception) -> str:
        """The error's text as one line, without the password."""
        text = " ".join(str(error).split())
        password = self._parameters.get("password")
        return text.replace(str(password), "…") if password else text


class _PostgresTransaction:
    """A Transaction whose placeholders `?` are PostgreSQL's `%s`."""

    def __init__(self, connection: "psycopg.Connection") -> None:
        self._connection = connection

    def execute(self, sql: str, values: Sequence[Any] = (), /) -> Cursor:
        return self._connection.execute(_with_percent_s(sql), values)

    def executemany(self, sql: str, rows: Iterable[Sequence[Any]], /) -> Cursor:
        cursor = self._connection.cursor()
        cursor.executemany(_with_percent_s(sql), rows)
        return cursor


def _with_percent_s(sql: str) -> bytes:
    return sql.replace("?", "%s").encode()


def _run_transaction(
    connection: "psycopg.Connection", work: Callable[[Transaction], T], advisory_lock: str | None
) -> T:
    import psycopg

    idle = f"SET LOCAL idle_in_transaction_session_timeout = '{IDLE_TRANSACTION_SECONDS}s'"
    try:
        # SET LOCAL and the advisory lock end with the transaction: nothing is left on a connection that is pooled.
        connection.execute(f"BEGIN; {_LONG_TRANSACTION if advisory_lock else idle}".encode())
        if advisory_lock:
            connection.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (advisory_lock,))
        result = work(_PostgresTransaction(connection))
        connection.execute("COMMIT")
    except BaseException:
        with suppress(psycopg.Error):
            connection.execute("ROLLBACK")
        raise
    return result


def _parse_url(url: str) -> tuple[dict[str, Any], str]:
    """Return (arguments of psycopg.connect, name to show). No message quotes the URL: it may hold a password."""
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
    unreadable = InputError(f"--ledger: cannot read the URL: {expected}; write @ / : and spaces of a password as %40 …")
    try:
        given = conninfo_to_dict(url)
    except ProgrammingError:
        raise unreadable from None
    # A password with an unescaped @ or / is still parsed, with a part of it as the host, the port or the database.
    places = (str(given.get("host", "")), str(given.get("dbname", "")))
    ports = str(given.get("port", "")).replace(",", "")
    if any("@" in place for place in places) or (ports and not ports.isdigit()):
        raise unreadable
    service = given.get("service")
    host, database = (place or default for place, default in zip(places, ("PGHOST", "PGDATABASE"), strict=True))
    port = f":{given['port']}" if given.get("port") else ""
    return _CONNECTION_DEFAULTS | given, f"service {service}" if service else f"{host}{port}/{database}"
