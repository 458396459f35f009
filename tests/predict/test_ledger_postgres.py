"""A PostgreSQL ledger that loses connections, replies or its server: no shard is lost or recorded twice."""

import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from vitx.core.errors import EnvironmentMissing, InputError
from vitx.core.files import sha256_bytes
from vitx.predict.inputs.inventory import Inventory, Shard
from vitx.predict.ledger import databases
from vitx.predict.ledger.databases import PostgresDatabase
from vitx.predict.ledger.ledger import Claim, Ledger, ShardRecord

if TYPE_CHECKING:
    from postgres_server import PostgresServer

SHARDS = tuple(Shard("images", "", 100 * index, 4) for index in range(3))
DONE = ShardRecord(sha256_bytes(b"rows"), 4, 1, {0: 2, 3: 1})
OTHER = ShardRecord(sha256_bytes(b"the rows of another GPU"), 4, 1, {0: 2, 3: 1})
PASSWORD = "not/to be@shown"


@pytest.fixture
def run() -> str:
    return f"test {uuid.uuid4().hex}"


def open_ledger(url: str, run: str) -> Ledger:
    return Ledger(PostgresDatabase(url), run=run, lease_seconds=10)


@pytest.fixture
def ledger(postgres: "PostgresServer", run: str) -> Iterator[Ledger]:
    with closing(open_ledger(postgres.url, run)) as opened:
        opened.create_or_join(lambda: ("plan", Inventory("/images", SHARDS, "digest")))
        yield opened


@pytest.fixture
def second(postgres: "PostgresServer", run: str, ledger: Ledger) -> Iterator[Ledger]:
    with closing(open_ledger(postgres.url, run)) as opened:
        yield opened


def claimed(ledger: Ledger) -> Claim:
    claim = ledger.claim()
    assert claim is not None
    return claim


def let_leases_run_out(postgres: "PostgresServer", run: str) -> None:
    postgres.run("UPDATE vitx_shard SET lease = 1 WHERE run = %s AND lease > 0", run)


@contextmanager
def proxy_that_drops_the_reply_to(statement: bytes, port: int) -> Iterator[tuple[int, list[int]]]:
    """Yield (port, cuts) of a proxy that drops the first reply to `statement` and cuts that connection.

    cuts: grows by one when that has happened.
    """
    cuts: list[int] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with suppress(OSError):  # closed at the end of the test
            while True:
                client = listener.accept()[0]
                server = socket.create_connection(("127.0.0.1", port))
                sent = threading.Event()
                threading.Thread(target=forward, args=(client, server, sent), daemon=True).start()
                threading.Thread(target=backward, args=(server, client, sent), daemon=True).start()

    def forward(client: socket.socket, server: socket.socket, sent: threading.Event) -> None:
        with suppress(OSError):
            while data := client.recv(65536):
                if statement in data and not cuts:
                    sent.set()
                server.sendall(data)
        server.close()

    def backward(server: socket.socket, client: socket.socket, sent: threading.Event) -> None:
        with suppress(OSError):
            while data := server.recv(65536):
                if sent.is_set():
                    cuts.append(1)
                    client.shutdown(socket.SHUT_RDWR)
                    server.shutdown(socket.SHUT_RDWR)
                    break
                client.sendall(data)
        client.close()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield listener.getsockname()[1], cuts
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def test_a_connection_that_was_cut_is_made_again(postgres: "PostgresServer", ledger: Ledger) -> None:
    for done in range(3):
        assert postgres.terminate_connections() == 1
        claim = claimed(ledger)
        assert postgres.terminate_connections() == 1
        ledger.renew()
        assert postgres.terminate_connections() == 1
        assert ledger.commit(claim, DONE, lambda: None)
        assert postgres.terminate_connections() == 1
        assert ledger.totals().done == done + 1
    assert postgres.terminate_connections() == 1
    assert list(ledger.class_counts()) == [DONE.classes] * 3


def test_a_cut_before_the_record_publishes_again(postgres: "PostgresServer", ledger: Ledger) -> None:
    published: list[int] = []

    def publish() -> None:
        published.append(1)
        if len(published) == 1:
            assert postgres.terminate_connections() == 1

    assert ledger.commit(claimed(ledger), DONE, publish)
    assert len(published) == 2
    assert ledger.totals().done == 1


def test_a_commit_whose_reply_was_lost_is_recognised(postgres: "PostgresServer", ledger: Ledger, run: str) -> None:
    with proxy_that_drops_the_reply_to(b"COMMIT", postgres.port) as (port, cuts):
        published: list[int] = []
        with closing(open_ledger(postgres.url.replace(str(postgres.port), str(port)), run)) as worker:
            claim = claimed(ledger)
            worker.worker = ledger.worker
            assert worker.commit(claim, DONE, lambda: published.append(1))
        assert cuts == [1]
        assert published == [1]
    assert ledger.totals().done == 1


def test_a_claim_whose_reply_was_lost_is_the_same_claim(postgres: "PostgresServer", ledger: Ledger, run: str) -> None:
    """Otherwise its lease would be renewed for ever by a worker that does not know of it."""
    with proxy_that_drops_the_reply_to(b"COMMIT", postgres.port) as (port, cuts):
        with closing(open_ledger(postgres.url.replace(str(postgres.port), str(port)), run)) as worker:
            claims = [worker.claim() for _ in range(4)]
        assert cuts == [1]
    assert [claim and claim.id for claim in claims] == [1, 2, 3, None]
    assert postgres.run("SELECT sum(attempts) FROM vitx_shard WHERE run = %s", run) == [(3,)]


def test_a_run_whose_reply_was_lost_is_created_once(postgres: "PostgresServer", run: str) -> None:
    made: list[int] = []

    def make() -> tuple[str, Inventory]:
        made.append(1)
        return "plan", Inventory("", SHARDS, "")

    with proxy_that_drops_the_reply_to(b"COMMIT", postgres.port) as (port, cuts):
        with closing(open_ledger(postgres.url.replace(str(postgres.port), str(port)), run)) as worker:
            assert worker.create_or_join(make) == ("plan", "")
            assert worker.totals().shards == 3
        assert (cuts, made) == ([1], [1])


def test_the_input_is_not_listed_again_after_a_cut_connection(postgres: "PostgresServer", run: str) -> None:
    made: list[int] = []

    def make() -> tuple[str, Inventory]:
        made.append(1)
        postgres.terminate_connections()
        return "plan", Inventory("", SHARDS, "")

    with closing(open_ledger(postgres.url, run)) as worker:
        assert worker.create_or_join(make) == ("plan", "")
        assert worker.totals().shards == 3
    assert made == [1]


@pytest.mark.parametrize(("theirs", "remaining"), [(DONE, 2), (OTHER, 3)])
def test_a_file_that_replaced_a_different_one_is_made_again(
    postgres: "PostgresServer", ledger: Ledger, second: Ledger, run: str, theirs: ShardRecord, remaining: int
) -> None:
    """A worker loses its connection, sleeps until another has finished its shard, and then renames its own file."""
    claim = claimed(ledger)
    let_leases_run_out(postgres, run)
    published: list[str] = []

    def publish() -> None:
        postgres.terminate_connections()
        assert [second.claim() for _ in range(3)][2] == claim
        assert second.commit(claim, theirs, lambda: published.append("theirs"))
        published.append("ours")

    assert not ledger.commit(claim, DONE, publish)
    assert published == ["theirs", "ours"]
    assert ledger.remaining() == remaining
    assert ledger.claim() == (claim if theirs is OTHER else None)


def test_a_worker_that_sleeps_in_a_transaction_holds_one_shard_only_for_a_while(
    postgres: "PostgresServer", ledger: Ledger, second: Ledger, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(databases, "IDLE_TRANSACTION_SECONDS", 1)
    claim = claimed(ledger)
    let_leases_run_out(postgres, run)
    published: list[str] = []

    def sleep() -> None:
        published.append("asleep")
        others = [second.claim() for _ in range(3)]
        assert [other and other.id for other in others] == [2, 3, None]
        deadline = time.monotonic() + 20
        while (mine := second.claim()) is None:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert mine == claim
        assert second.commit(mine, DONE, lambda: published.append("second"))

    assert not ledger.commit(claim, DONE, sleep)
    assert published == ["asleep", "second"]
    assert second.totals().done == 1


def test_a_server_that_restarts_is_waited_for(postgres: "PostgresServer", ledger: Ledger) -> None:
    claim = claimed(ledger)
    for at_once in (False, True):
        postgres.stop(at_once=at_once)
        back = threading.Timer(0.3, postgres.start)
        back.start()
        ledger.renew()
        back.join()
    assert ledger.commit(claim, DONE, lambda: None)
    assert ledger.totals().done == 1


def test_a_server_that_stays_away_is_one_error_and_nothing_is_lost(
    postgres: "PostgresServer", ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = claimed(ledger)
    monkeypatch.setattr(databases, "RECONNECT_SECONDS", 0.3)
    postgres.stop()
    try:
        with pytest.raises(EnvironmentMissing) as raised:
            ledger.commit(claim, DONE, lambda: pytest.fail("published"))
        started = time.monotonic()
        monkeypatch.setattr(databases, "RECONNECT_SECONDS", 600)
        with pytest.raises(EnvironmentMissing):
            ledger.release()
        assert time.monotonic() - started < 60  # the time to wait was used up by the first call
    finally:
        postgres.start()
    pattern = (
        rf"the ledger 127.0.0.1:{postgres.port}/postgres could not be reached for \d s \(.*refused.*\): run the same"
    )
    assert re.match(pattern, str(raised.value))
    assert ledger.commit(claim, DONE, lambda: None)


def test_a_stopped_thread_does_not_wait(postgres: "PostgresServer", ledger: Ledger) -> None:
    stopped = threading.Event()
    for_thread = ledger.for_thread(stopped)
    postgres.stop()
    try:
        threading.Timer(0.2, stopped.set).start()
        with pytest.raises(EnvironmentMissing, match="could not be reached"):
            for_thread.claim()
    finally:
        postgres.start()


def test_a_process_has_one_connection(postgres: "PostgresServer", ledger: Ledger) -> None:
    threads = [ledger.for_thread() for _ in range(3)]
    assert [one.claim() is not None for one in threads] == [True] * 3
    for one in threads:
        one.close()
    assert ledger.remaining() == 3
    count = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'vitx predict'"
    assert postgres.run(count) == [(1,)]


def test_no_session_state_is_left_on_a_pooled_connection(postgres: "PostgresServer", ledger: Ledger) -> None:
    ledger.create_or_join(lambda: pytest.fail("planned twice"))
    ledger.claim()
    database = ledger.for_thread()._database
    for setting, value in (("idle_in_transaction_session_timeout", "0"), ("search_path", '"$user", public')):
        assert database.read(f"SELECT current_setting('{setting}')") == [(value,)]
    assert database.read("SELECT count(*) FROM pg_prepared_statements") == [(0,)]
    assert database.read("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == [(0,)]


def test_a_refusal_of_the_server_is_an_error_with_its_reason(postgres: "PostgresServer", run: str) -> None:
    postgres.run("CREATE ROLE guest LOGIN PASSWORD 'guest'")
    postgres.run("CREATE DATABASE closed")
    postgres.run("REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    url = f"postgresql://guest:guest@127.0.0.1:{postgres.port}/closed"
    with (
        closing(PostgresDatabase(url)) as database,
        pytest.raises(EnvironmentMissing, match=r"/closed refused: permission denied for schema public"),
    ):
        Ledger(database, run=run, lease_seconds=10)


def refusals(postgres: "PostgresServer") -> dict[str, tuple[str, type[Exception], str]]:
    right = postgres.url
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        unused = free.getsockname()[1]
    secret = "not%2Fto%20be%40shown"
    scheme, unread = "--ledger: expected postgresql://USER@HOST:PORT/DATABASE, not ", "--ledger: cannot read the URL"
    return {
        "password": (right.replace(secret, f"{secret}2"), EnvironmentMissing, "password authentication failed"),
        "database": (f"{right}2", EnvironmentMissing, 'database "postgres2" does not exist'),
        "port": (right.replace(str(postgres.port), str(unused)), EnvironmentMissing, "Connection refused"),
        "unescaped": (f"postgresql://vitx:{PASSWORD}@127.0.0.1/postgres", InputError, unread),
        "unescaped @": ("postgresql://vitx:be@shown@127.0.0.1/postgres", InputError, unread),
        "unescaped /": ("postgresql://vitx:not/to@127.0.0.1/postgres", InputError, unread),
        "parameter": (f"{right}?sslmod=require", InputError, unread),
        "mysql": (f"mysql://vitx:{secret}@127.0.0.1/db", InputError, f"{scheme}mysql://…"),
        "path": (f"/{secret}.sqlite", InputError, f"{scheme}what was given"),
    }


@pytest.mark.parametrize(
    "case",
    ["password", "database", "port", "unescaped", "unescaped @", "unescaped /", "parameter", "mysql", "path"],
)
def test_an_error_of_opening_is_one_line_without_the_password(postgres: "PostgresServer", case: str) -> None:
    url, kind, message = refusals(postgres)[case]
    with pytest.raises(kind, match=re.escape(message)) as raised:
        PostgresDatabase(url)
    text = str(raised.value)
    assert "\n" not in text
    assert not any(part in text for part in ("not/to", "not%2F", "be@shown", "shown"))


def test_the_environment_may_hold_the_password(
    postgres: "PostgresServer", run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = f"postgresql://vitx@127.0.0.1:{postgres.port}/postgres"
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    open_ledger(bare, run).close()
    monkeypatch.delenv("PGPASSWORD")
    (tmp_path / "services").write_text(
        f"[predictions]\nhost=127.0.0.1\nport={postgres.port}\ndbname=postgres\nuser=vitx\npassword={PASSWORD}\n"
    )
    monkeypatch.setenv("PGSERVICEFILE", str(tmp_path / "services"))
    with closing(open_ledger("postgresql://?service=predictions", run)) as ledger:
        assert not ledger.has_run()
    (tmp_path / "pgpass").write_text("127.0.0.1:*:*:vitx:not/to be@shown\n")
    os.chmod(tmp_path / "pgpass", 0o600)
    monkeypatch.setenv("PGPASSFILE", str(tmp_path / "pgpass"))
    open_ledger(bare, run).close()


def test_without_psycopg_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("psycopg", "psycopg.conninfo"):
        monkeypatch.setitem(__import__("sys").modules, name, None)
    with pytest.raises(EnvironmentMissing, match=r"pip install 'vitx\[postgres\]'"):
        PostgresDatabase("postgresql://host/db")


def test_workers_whose_connections_are_cut_at_random_do_each_shard_once(postgres: "PostgresServer", run: str) -> None:
    shards = tuple(Shard("tar", f"{index}.tar") for index in range(150))
    recorded: list[int] = []

    def work(report: Callable[[BaseException], None]) -> None:
        try:
            with closing(open_ledger(postgres.url, run)) as one:
                one.create_or_join(lambda: ("plan", Inventory("", shards, "")))
                while one.remaining():
                    if (claim := one.claim()) and one.commit(claim, DONE, lambda: None):
                        recorded.append(claim.id)
        except BaseException as error:  # noqa: BLE001 - handed to the test
            report(error)

    failures: list[BaseException] = []
    threads = [threading.Thread(target=work, args=(failures.append,)) for _ in range(6)]
    for thread in threads:
        thread.start()
    cut = 0
    while any(thread.is_alive() for thread in threads):
        cut += postgres.terminate_connections()
        time.sleep(0.05)
    assert failures == []
    assert sorted(recorded) == list(range(1, 151))
    assert cut > 6
