"""The ledger: claims, leases that run out, and outputs that only the holder of a shard may publish."""

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vitx.core.errors import EnvironmentMissing, InputError
from vitx.core.files import sha256_bytes
from vitx.predict import ledger as ledger_module
from vitx.predict.inputs.inventory import Inventory, Shard
from vitx.predict.inputs.skipped import SkippedNames
from vitx.predict.ledger import Claim, Ledger, ShardRecord
from vitx.predict.options import Share
from vitx.predict.pipeline.disk import DiskFullBackoff, is_full

SHARDS = tuple(Shard("images", "", 100 * index, 4) for index in range(3))
DONE = ShardRecord(sha256_bytes(b"rows"), 4, 1, {0: 2, 3: 1})


class Store:
    """A file for ledgers in which time can be made to pass: all leases are moved into the past."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self) -> Ledger:
        return Ledger(self.path, lease_seconds=10)

    def pass_time(self, seconds: float) -> None:
        with closing(self.open()) as ledger:
            ledger._change("SET lease = lease - ? WHERE lease > 0", (seconds,))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "ledger.sqlite")


@pytest.fixture
def ledger(store: Store) -> Iterator[Ledger]:
    with closing(store.open()) as opened:
        opened.create_or_join(lambda: ("plan", Inventory("/images", SHARDS, "digest")))
        yield opened


@pytest.fixture
def second(store: Store, ledger: Ledger) -> Iterator[Ledger]:
    """Another worker of the same run."""
    with closing(store.open()) as opened:
        yield opened


def test_each_shard_is_claimed_once_in_order(ledger: Ledger, second: Ledger) -> None:
    claims = [one.claim() for one in (ledger, second, ledger, second)]
    assert [claim and claim.shard for claim in claims] == [*SHARDS, None]


def test_threads_share_out_the_shards(store: Store) -> None:
    shards = tuple(Shard("tar", f"{index}.tar") for index in range(200))
    taken: list[str] = []

    def take() -> None:
        with closing(store.open()) as one:
            one.create_or_join(lambda: ("plan", Inventory("", shards, "")))
            while claim := one.claim():
                taken.append(claim.shard.location)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == sorted(shard.location for shard in shards)


def test_threads_of_one_worker_do_not_share_a_transaction(store: Store) -> None:
    shards = tuple(Shard("tar", f"{index}.tar") for index in range(100))
    taken: list[str] = []

    def take(one: Ledger) -> None:
        with closing(one):
            while claim := one.claim():
                taken.append(claim.shard.location)
                one.renew()
                assert one.commit(claim, DONE, lambda: None)

    with closing(store.open()) as worker:
        worker.create_or_join(lambda: ("plan", Inventory("", shards, "")))
        threads = [threading.Thread(target=take, args=(worker.for_thread(),)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert worker.totals().done == 100
    assert sorted(taken) == sorted(shard.location for shard in shards)


def test_an_expired_lease_is_anothers_and_a_renewed_one_is_not(store: Store, ledger: Ledger, second: Ledger) -> None:
    first = ledger.claim()
    assert first is not None
    assert [second.claim() is not None for _ in range(3)] == [True, True, False]
    store.pass_time(9)
    ledger.renew()
    second.renew()
    store.pass_time(9)
    assert second.claim() is None
    second.renew()
    store.pass_time(2)
    assert second.claim() == first


def test_a_worker_that_slept_cannot_replace_what_another_finished(store: Store, ledger: Ledger, second: Ledger) -> None:
    claim = ledger.claim()
    assert claim is not None
    for _ in range(2):
        second.claim()
    store.pass_time(11)
    second.renew()
    again = second.claim()
    assert again == claim
    assert again is not None
    published: list[str] = []
    assert not ledger.commit(claim, DONE, lambda: published.append("sleeper"))
    assert second.commit(again, DONE, lambda: published.append("second"))
    assert not second.commit(claim, DONE, lambda: published.append("again"))
    ledger.release()
    assert published == ["second"]
    assert (ledger.totals().done, ledger.remaining()) == (1, 2)


def test_a_publication_that_fails_is_not_recorded(ledger: Ledger) -> None:
    claim = ledger.claim()
    assert claim is not None

    def fail() -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        ledger.commit(claim, DONE, fail)
    assert ledger.totals().done == 0
    assert ledger.commit(claim, DONE, lambda: None)


def test_release_gives_shards_back_at_once(ledger: Ledger, second: Ledger) -> None:
    claims = [ledger.claim() for _ in range(3)]
    assert claims[1] is not None
    assert second.claim() is None
    ledger.release(claims[1])
    assert second.claim() == claims[1]
    ledger.release()
    assert second.claim() == claims[0]


def test_verification_returns_what_was_changed_or_is_gone(ledger: Ledger, tmp_path: Path) -> None:
    def output(shard: int) -> Path:
        return tmp_path / str(shard)

    for shard in (1, 2, 3):
        claim = ledger.claim()
        assert claim is not None
        output(shard).write_bytes(b"rows")
        ledger.commit(claim, DONE, lambda: None)
    assert ledger.verify(output) == []
    output(1).unlink()
    output(3).write_bytes(b"other rows")
    assert ledger.verify(output) == [1, 3]
    assert ledger.remaining() == 2
    assert ledger.claim() is not None


def test_totals_are_sums(ledger: Ledger) -> None:
    claim = ledger.claim()
    assert claim is not None
    ledger.commit(claim, DONE, lambda: None)
    assert ledger.totals() == (3, 1, 4, 1, 12)
    assert all(type(total) is int for total in ledger.totals())
    assert list(ledger.records()) == [(1, "images", DONE)]
    assert ledger.first_shard_with_errors() == 1
    assert ledger.lists()


def test_totals_leave_out_what_was_set_free(ledger: Ledger, tmp_path: Path) -> None:
    for _ in range(2):
        claim = ledger.claim()
        assert claim is not None
        (tmp_path / str(claim.id)).write_bytes(b"rows")
        ledger.commit(claim, DONE._replace(images=3), lambda: None)
    (tmp_path / "2").unlink()
    assert ledger.verify(lambda shard: tmp_path / str(shard)) == [2]
    # Of the second shard three images were there, which is more certain than the four that were expected.
    assert ledger.totals() == (3, 1, 3, 1, 10)
    assert list(ledger.records()) == [(1, "images", DONE._replace(images=3))]
    assert ledger.first_shard_with_errors() == 1


def test_totals_of_containers_are_not_known_beforehand(store: Store) -> None:
    with closing(store.open()) as one:
        one.create_or_join(lambda: ("", Inventory("", (Shard("tar", "a.tar"), Shard("tar", "b.tar")), "")))
        assert one.totals() == (2, 0, 0, 0, None)
        assert not one.lists()
        while claim := one.claim():
            one.commit(claim, DONE, lambda: None)
        assert one.totals() == (2, 2, 8, 2, 8)


def test_a_run_is_created_by_one(ledger: Ledger, second: Ledger) -> None:
    assert second.create_or_join(lambda: pytest.fail("planned twice")) == ("plan", "/images")
    assert second.listing_digest() == "digest"


def test_the_creation_of_a_run_is_waited_for(store: Store) -> None:
    """While one process lists the input, no other begins to, however long it takes."""
    begun, go_on = threading.Event(), threading.Event()
    plans: list[Any] = []

    def make() -> tuple[str, Inventory]:
        begun.set()
        assert go_on.wait(30)
        return "first", Inventory("", SHARDS, "")

    def join(make: Any) -> None:
        with closing(store.open()) as one:
            plans.append(one.create_or_join(make))

    first = threading.Thread(target=join, args=(make,))
    first.start()
    assert begun.wait(30)
    waiting = threading.Thread(target=join, args=(lambda: ("second", Inventory("", SHARDS, "")),))
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive()
    go_on.set()
    first.join()
    waiting.join()
    assert plans == [("first", ""), ("first", "")]


def test_a_creation_that_fails_leaves_no_run(store: Store) -> None:
    with closing(store.open()) as one:
        with pytest.raises(ValueError, match="no images"):
            one.create_or_join(lambda: (_ for _ in ()).throw(ValueError("no images")))
        assert one.create_or_join(lambda: ("later", Inventory("", SHARDS, "")))[0] == "later"


def test_names_of_any_bytes_come_back(store: Store) -> None:
    name, base = "caf\udce9/ö.tar", "/b\udcff"
    with closing(store.open()) as one:
        assert one.create_or_join(lambda: ("", Inventory(base, (Shard("tar", name, 1 << 40),), ""))) == ("", base)
        claim = one.claim()
    assert claim is not None
    assert claim.shard == Shard("tar", name, 1 << 40)


def test_a_lock_that_is_never_freed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ledger.sqlite"
    with closing(Ledger(path, lease_seconds=10)) as one:
        one.create_or_join(lambda: ("", Inventory("", SHARDS, "")))
    monkeypatch.setattr(ledger_module, "BUSY_SECONDS", 0.05)
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with (
        closing(holder),
        closing(Ledger(path, lease_seconds=10)) as one,
        pytest.raises(EnvironmentMissing, match="was locked for"),
    ):
        one.claim()


def test_a_full_disk_is_waited_for_and_then_an_error(tmp_path: Path) -> None:
    calls = 0

    def full_twice() -> str:
        nonlocal calls
        calls += 1
        if calls < 3:
            raise OSError(28, "No space left on device")
        return "written"

    assert DiskFullBackoff(tmp_path, 30).retry(full_twice) == "written"
    calls = -1_000
    with pytest.raises(EnvironmentMissing, match=r"the disk of '.*' has been full for 0 s \(.*No space.*make room"):
        DiskFullBackoff(tmp_path, 0.1).retry(full_twice)
    with pytest.raises(OSError, match="Permission"):
        DiskFullBackoff(tmp_path).retry(lambda: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))


def test_sqlite_says_that_the_disk_is_full(tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / "small.sqlite")
    database.execute("PRAGMA max_page_count = 2")
    with closing(database), pytest.raises(sqlite3.OperationalError) as raised:
        database.execute("CREATE TABLE rows AS SELECT randomblob(100000)")
    assert is_full(raised.value)


def test_a_ledger_of_another_version_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    with closing(sqlite3.connect(path)) as older:
        older.execute("CREATE TABLE vitx_plan (run TEXT PRIMARY KEY)")
    for _ in range(2):
        with pytest.raises(InputError, match=r"ledger\.sqlite was written by another version of vitx: fin.*--overw"):
            Ledger(path, lease_seconds=1)
    with closing(sqlite3.connect(path)) as older:
        assert older.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall() == [("vitx_plan",)]
    with closing(Ledger(tmp_path / "new", lease_seconds=1)) as newer:
        newer._write(lambda: newer._connection.execute("PRAGMA user_version = 99"))
    with pytest.raises(InputError, match="was written by another version"):
        Ledger(tmp_path / "new", lease_seconds=1)


def test_a_damaged_ledger_is_refused(tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite").write_bytes(b"no database" * 20)
    with pytest.raises(InputError, match=r"ledger\.sqlite is damaged \(.*\): choose .* --overwrite$"):
        Ledger(tmp_path / "ledger.sqlite", lease_seconds=1)


@pytest.mark.parametrize(("share", "numbers"), [((1, 1), [1, 2, 3]), ((2, 5), [2, 7, 12]), ((5, 5), [5, 10, 15])])
def test_the_shards_of_jobs_have_numbers_of_their_own(store: Store, share: tuple[int, int], numbers: list[int]) -> None:
    with closing(store.open()) as one:
        one.create_or_join(lambda: ("", Inventory("", SHARDS, "", Share(*share))))
        assert [claim.id for claim in iter(one.claim, None)] == numbers


def done(ledger: Ledger, **changes: Any) -> Claim:
    """A shard that was claimed and recorded."""
    claim = ledger.claim()
    assert claim is not None
    assert ledger.commit(claim, DONE._replace(**changes), lambda: None)
    return claim


def test_shards_with_errors_are_tried_again_and_know_their_file(ledger: Ledger, second: Ledger) -> None:
    done(ledger)
    done(ledger, errors=0)
    done(ledger, digest="third", errors=2)
    assert ledger.first_shard_with_errors() == 1
    assert ledger.retry_errors() == 2
    assert (ledger.remaining(), ledger.first_shard_with_errors()) == (2, None)
    again = [second.claim(), second.claim(), second.claim()]
    assert again == [Claim(1, SHARDS[0], DONE.digest), Claim(3, SHARDS[2], "third"), None]
    assert again[0] is not None
    assert second.commit(again[0], DONE._replace(digest="new", errors=0), lambda: None)
    assert second.retry_errors() == 0  # what is being done is nobody else's
    second.release()
    claim = second.claim()
    assert claim == again[1]  # what was kept of it is still known
    assert claim is not None
    assert second.commit(claim, DONE._replace(errors=1), lambda: None)
    assert second.verify(lambda shard: Path("nowhere")) == [1, 2, 3]
    assert [claim.kept for claim in iter(second.claim, None)] == [None] * 3  # a recorded file is all that counts


def test_records_are_of_finished_shards(store: Store) -> None:
    shards = (Shard("tar", "a"), Shard("images", "", 0, 4), Shard("tar", "b"), Shard("tar", "c"))
    with closing(store.open()) as one:
        one.create_or_join(lambda: ("", Inventory("", shards, "")))
        assert list(one.records()) == []
        texts, mixed = SkippedNames({".txt": 3}, ["a/x.txt"]), SkippedNames({".md": 1, ".txt": 1}, ["b/y.md"])
        first: dict[str, Any] = {"images": 5, "errors": 2, "listed": 8, "skipped": texts}
        third: dict[str, Any] = {"images": 7, "errors": 1, "listed": 9, "skipped": mixed}
        for changes in (first, {"listed": 4}, third):
            done(one, **changes)
        assert list(one.records()) == [
            (1, "tar", DONE._replace(**first)),
            (2, "images", DONE._replace(listed=4)),
            (3, "tar", DONE._replace(**third)),
        ]
        assert one.totals() == (4, 3, 16, 4, None)


def test_every_finished_shard_is_read_however_many_there_are(store: Store) -> None:
    """They are read a thousand at a time."""
    shards = tuple(Shard("tar", f"{index}.tar") for index in range(2001))
    with closing(store.open()) as one:
        one.create_or_join(lambda: ("", Inventory("", shards, "")))
        one._change("SET digest = 'd', classes = '{\"' || id || '\": 1}', skipped = '{}'", ())
        assert [record.classes for _, _, record in one.records()] == [{number: 1} for number in range(1, 2002)]


def test_a_file_that_was_made_anew_while_it_was_compared_stays(ledger: Ledger, second: Ledger, tmp_path: Path) -> None:
    """Another process set it free, did it again and recorded it between the two."""
    claim = done(ledger)

    def output(shard: int) -> Path:
        second._change("SET digest = 'new' WHERE id = ?", (claim.id,))
        return tmp_path / "gone"

    assert ledger.verify(output) == []
    assert ledger.remaining() == 2


def test_another_thread_has_the_same_name_and_lease(ledger: Ledger) -> None:
    claim = ledger.claim()
    assert claim is not None
    with closing(ledger.for_thread()) as other:
        assert (other.worker, other.lease_seconds, other.path) == (ledger.worker, 10, ledger.path)
        assert other.commit(claim, DONE, lambda: None)
    with closing(Ledger(ledger.path, lease_seconds=10)) as stranger:
        assert stranger.worker != ledger.worker


def test_what_is_no_fault_of_the_file_is_not_called_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(ledger: Ledger) -> None:
        raise KeyboardInterrupt

    with pytest.raises(sqlite3.OperationalError, match="unable to open"):
        Ledger(tmp_path / "no" / "such" / "folder", lease_seconds=1)
    monkeypatch.setattr(Ledger, "_open", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Ledger(tmp_path / "ledger.sqlite", lease_seconds=1)
    monkeypatch.undo()
    monkeypatch.setattr(Ledger, "_create_tables", lambda _: (_ for _ in ()).throw(sqlite3.OperationalError("disk")))
    with pytest.raises(sqlite3.OperationalError, match=r"^disk$"):
        Ledger(tmp_path / "ledger.sqlite", lease_seconds=1)


def busy(code: int = sqlite3.SQLITE_BUSY) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("database is locked")
    error.sqlite_errorcode = code
    return error


@pytest.mark.parametrize("code", [sqlite3.SQLITE_BUSY, sqlite3.SQLITE_BUSY_SNAPSHOT])
def test_a_lock_is_waited_for_to_the_end_of_its_time(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    clock, slept = [1000.0], list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock[0] += 20

    monkeypatch.setattr(ledger_module, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))

    def free_after(seconds: float) -> None:
        if clock[0] < 1000 + seconds:
            raise busy(code)

    ledger._retry_busy(lambda: free_after(80))  # it is asked for when the time is just over
    assert slept == [0.01] * 4
    clock[0] = 1000.0
    with pytest.raises(EnvironmentMissing, match="was locked for 60 s: is it on a network file system"):
        ledger._retry_busy(lambda: free_after(81))
    assert clock[0] == 1080
    clock[0] = 1000.0
    ledger._retry_busy(lambda: free_after(3600), no_limit=True)
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        ledger._retry_busy(lambda: (_ for _ in ()).throw(busy(sqlite3.SQLITE_READONLY)))


def test_only_the_listing_is_waited_for_without_limit(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    begin = ledger._retry_busy

    def record(statement: Any, *, no_limit: bool = False) -> None:
        asked.append(no_limit)
        begin(statement)

    monkeypatch.setattr(ledger, "_retry_busy", record)
    ledger.create_or_join(lambda: pytest.fail("planned twice"))
    ledger.claim()
    ledger.renew()
    assert asked == [True, False, False]


def test_a_transaction_that_is_over_does_not_hide_the_error(ledger: Ledger) -> None:
    """SQLite ends it by itself when the disk is full."""

    def work() -> None:
        ledger._connection.execute("ROLLBACK")
        raise ValueError("full")

    with pytest.raises(ValueError, match=r"^full$"):
        ledger._write(work)
    assert ledger.claim() is not None
