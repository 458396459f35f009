"""Who does which shard: claims, leases that run out, outputs that only the holder may put in place."""

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from vitx.core.errors import EnvironmentMissing
from vitx.core.files import sha256_bytes
from vitx.serve.offline import ledger as module
from vitx.serve.offline.disk import Patience, is_full
from vitx.serve.offline.inputs import Inventory, Shard
from vitx.serve.offline.ledger import Done, Ledger

SHARDS = tuple(Shard("images", "", 100 * index, 4) for index in range(3))
DONE = Done(sha256_bytes(b"rows"), 4, 1, {0: 2, 3: 1})


class Clock:
    """Seconds since 1970, as the ledger sees them."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("vitx.serve.offline.ledger.time.time", made)
    return made


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with closing(Ledger(tmp_path / "ledger.sqlite", lease_seconds=10)) as opened:
        opened.plan(lambda: ("plan", Inventory("/images", SHARDS, "digest")))
        yield opened


def other(ledger: Ledger) -> Ledger:
    return Ledger(ledger.path, lease_seconds=10)


def test_each_shard_is_claimed_once_in_order(ledger: Ledger) -> None:
    with closing(other(ledger)) as second:
        claims = [one.claim() for one in (ledger, second, ledger, second)]
    assert [claim and claim.shard for claim in claims] == [*SHARDS, None]


def test_threads_share_out_the_shards(tmp_path: Path) -> None:
    shards = tuple(Shard("tar", f"{index}.tar") for index in range(200))
    taken: list[str] = []

    def take(path: Path) -> None:
        with closing(Ledger(path)) as one:
            one.plan(lambda: ("plan", Inventory("", shards, "")))
            while claim := one.claim():
                taken.append(claim.shard.location)

    threads = [threading.Thread(target=take, args=(tmp_path / "ledger.sqlite",)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == sorted(shard.location for shard in shards)


def test_an_expired_lease_is_anothers_and_a_renewed_one_is_not(ledger: Ledger, clock: Clock) -> None:
    with closing(other(ledger)) as second:
        first = ledger.claim()
        assert first is not None
        assert [second.claim() is not None for _ in range(3)] == [True, True, False]
        clock.now += 9
        ledger.renew()
        second.renew()
        clock.now += 9
        assert second.claim() is None
        second.renew()
        clock.now += 2
        assert second.claim() == first


def test_a_worker_that_slept_cannot_replace_what_another_finished(ledger: Ledger, clock: Clock) -> None:
    with closing(other(ledger)) as second:
        claim = ledger.claim()
        assert claim is not None
        for _ in range(2):
            second.claim()
        clock.now += 11
        second.renew()
        assert second.claim() == claim
        published: list[str] = []
        assert not ledger.commit(claim, DONE, lambda: published.append("sleeper"))
        assert second.commit(claim, DONE, lambda: published.append("second"))
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


def test_release_gives_shards_back_at_once(ledger: Ledger) -> None:
    claims = [ledger.claim() for _ in range(3)]
    assert claims[1] is not None
    with closing(other(ledger)) as second:
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


def test_totals_are_sums(ledger: Ledger) -> None:
    claim = ledger.claim()
    assert claim is not None
    ledger.commit(claim, DONE, lambda: None)
    assert ledger.totals() == (3, 1, 4, 1, 12)
    assert list(ledger.classes()) == [{0: 2, 3: 1}]
    assert ledger.first_with_errors() == 1


def test_a_plan_is_made_by_one(ledger: Ledger) -> None:
    with closing(other(ledger)) as second:
        assert second.plan(lambda: pytest.fail("planned twice")) == ("plan", "/images")
        assert second.digest() == "digest"


def test_a_plan_that_fails_leaves_none(tmp_path: Path) -> None:
    with closing(Ledger(tmp_path / "ledger.sqlite")) as one:
        with pytest.raises(ValueError, match="no images"):
            one.plan(lambda: (_ for _ in ()).throw(ValueError("no images")))
        assert not one.is_planned()


def test_a_lock_that_is_never_freed_is_an_error(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUSY_SECONDS", 0.05)
    holder = sqlite3.connect(ledger.path, isolation_level=None)
    holder.execute("BEGIN IMMEDIATE")
    with closing(holder), closing(other(ledger)) as second, pytest.raises(EnvironmentMissing, match="was locked for"):
        second.claim()


def test_names_of_any_bytes_come_back(tmp_path: Path) -> None:
    name = "caf\udce9/ö.tar"
    with closing(Ledger(tmp_path / "ledger.sqlite")) as one:
        assert one.plan(lambda: ("", Inventory("/b\udcff", (Shard("tar", name),), ""))) == ("", "/b\udcff")
        claim = one.claim()
    assert claim is not None
    assert claim.shard.location == name


def test_a_full_disk_is_waited_for_and_then_named(tmp_path: Path) -> None:
    calls = 0

    def full_twice() -> str:
        nonlocal calls
        calls += 1
        if calls < 3:
            raise OSError(28, "No space left on device")
        return "written"

    assert Patience(tmp_path, 30).retry(full_twice) == "written"
    calls = -1_000
    with pytest.raises(EnvironmentMissing, match=r"the disk of '.*' has been full for 0 s \(.*No space.*make room"):
        Patience(tmp_path, 0.1).retry(full_twice)
    with pytest.raises(OSError, match="Permission"):
        Patience(tmp_path).retry(lambda: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))


def test_sqlite_says_that_the_disk_is_full(tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / "small.sqlite")
    database.execute("PRAGMA max_page_count = 2")
    with closing(database), pytest.raises(sqlite3.OperationalError) as raised:
        database.execute("CREATE TABLE rows AS SELECT randomblob(100000)")
    assert is_full(raised.value)
