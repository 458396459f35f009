"""A worker's shards under leases: what it waits for, what it gives back, and how often it renews."""

import errno
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import pytest

from server_process import wait_until
from vitx.core.errors import EnvironmentMissing
from vitx.predict.inputs.inventory import Inventory, Shard
from vitx.predict.ledger import Claim, Ledger, ShardRecord
from vitx.predict.outputs.parts import Part
from vitx.predict.pipeline.disk import DiskFullBackoff
from vitx.predict.pipeline.leases import LeasedShards

SHARDS = tuple(Shard("tar", f"{index}.tar") for index in range(4))
RECORD = ShardRecord("digest", 3, 1, {0: 2})
FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with closing(Ledger(tmp_path / "ledger.sqlite", lease_seconds=1000)) as opened:
        opened.create_or_join(lambda: ("plan", Inventory("", SHARDS, "")))
        yield opened


@pytest.fixture
def other(tmp_path: Path, ledger: Ledger) -> Iterator[Ledger]:
    with closing(Ledger(tmp_path / "ledger.sqlite", lease_seconds=1000)) as opened:
        yield opened


@pytest.fixture
def shards(ledger: Ledger, tmp_path: Path) -> Iterator[LeasedShards]:
    with closing(LeasedShards(ledger, DiskFullBackoff(tmp_path))) as opened:
        yield opened


def part(folder: Path) -> Part:
    (folder / "temporary").write_bytes(b"rows")
    return Part(folder / "part", folder / "temporary", RECORD)


def held(ledger: Ledger, worker: str) -> list[int]:
    query = "SELECT id FROM shard WHERE digest IS NULL AND owner = ? AND lease > 0 ORDER BY id"
    return [number for (number,) in ledger._rows(query, worker)]


def test_claims_end_when_every_shard_is_done(shards: LeasedShards, ledger: Ledger, other: Ledger) -> None:
    for _ in range(2):
        theirs = other.claim()
        assert theirs is not None
        other.commit(theirs, RECORD, lambda: None)
    claims = shards.claims()
    for number in (3, 4):
        claim = next(claims)
        assert claim == Claim(number, SHARDS[number - 1])
        assert ledger.commit(claim, RECORD, lambda: None)
    assert next(claims, None) is None


def test_a_released_shard_is_claimed_again_at_once(shards: LeasedShards) -> None:
    claims = shards.claims()
    mine = [next(claims) for _ in SHARDS]
    shards.release(mine[2])
    assert next(claims) == mine[2]


def test_stopped_claims_end_and_what_is_held_is_given_back(ledger: Ledger, other: Ledger, tmp_path: Path) -> None:
    shards = LeasedShards(ledger, DiskFullBackoff(tmp_path))
    claims = shards.claims()
    first = next(claims)
    next(claims)
    assert shards.commit(first, part(tmp_path))
    shards.stop()
    assert next(claims, None) is None
    assert held(ledger, ledger.worker) == [2]
    shards.close()
    assert held(ledger, ledger.worker) == []
    assert not shards._renewal_thread.is_alive()
    claim = other.claim()
    assert claim is not None
    assert claim.id == 2
    for one in (shards._claiming, shards._committing, shards._renewing):
        with pytest.raises(sqlite3.ProgrammingError, match="closed database"):
            one.totals()


def test_a_commit_publishes_what_is_held_and_removes_what_is_not(
    shards: LeasedShards, other: Ledger, tmp_path: Path
) -> None:
    theirs = other.claim()
    assert theirs is not None
    assert not shards.commit(theirs, part(tmp_path))
    assert not (tmp_path / "temporary").exists()
    assert not (tmp_path / "part").exists()
    assert shards.commit(next(shards.claims()), part(tmp_path))
    assert (tmp_path / "part").read_bytes() == b"rows"
    assert other.totals().done == 1


def test_free_shards_are_claimed_up_to_a_limit(shards: LeasedShards, other: Ledger) -> None:
    assert [claim.id for claim in shards.claim_free(3)] == [1, 2, 3]
    assert other.claim() == Claim(4, SHARDS[3])
    for claim in (Claim(number, SHARDS[number - 1]) for number in (1, 2, 3)):
        shards.release(claim)
    assert [claim.id for claim in shards.claim_free(10)] == [1, 2, 3]


def test_no_free_shards_are_claimed_when_all_are_done(shards: LeasedShards, other: Ledger) -> None:
    while claim := other.claim():
        other.commit(claim, RECORD, lambda: None)
    assert shards.claim_free(3) == []


class Event(threading.Event):
    """An event whose waits are recorded and return what was prepared; when that is used up, `at_end` is called."""

    def __init__(self, answers: list[bool]) -> None:
        super().__init__()
        self.answers, self.waits = answers, list[float]()

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.waits.append(timeout)
        return self.answers.pop(0) if self.answers else True


class ScriptedLedger:
    """Answers `claim` from a list; None: all others are held. Records renewals and releases."""

    worker, lease_seconds = "me", 8.0

    def __init__(self, answers: list[Any] | None = None) -> None:
        self.answers = answers or []
        self.calls: list[str] = []
        self.failures: list[Exception] = []

    def for_thread(self) -> "ScriptedLedger":
        return self

    def claim(self) -> Claim | None:
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return cast("Claim | None", answer)

    def remaining(self) -> int:
        return len(self.answers)

    def _do(self, name: str) -> None:
        self.calls.append(name)
        if self.failures:
            raise self.failures.pop(0)

    def renew(self) -> None:
        self._do("renew")

    def release(self, claim: Claim | None = None) -> None:
        self._do("release")

    def commit(self, claim: Claim, record: ShardRecord, publish: Any) -> bool:
        self._do("commit")
        publish()
        return True

    def close(self) -> None:
        self.calls.append("close")


def leased(ledger: ScriptedLedger, folder: Path, stopped: threading.Event | None = None) -> LeasedShards:
    return LeasedShards(cast(Ledger, ledger), DiskFullBackoff(folder, 5, stopped))


def test_looks_for_a_shard_that_others_hold_become_rarer(tmp_path: Path) -> None:
    """Twice as long each time, up to four seconds; as short as at first after a shard or a change of its own."""
    claim = Claim(1, SHARDS[0])
    ledger = ScriptedLedger([None] * 6 + [claim] + [None] * 4 + [claim, None])
    shards = leased(ledger, tmp_path)
    woken = [False] * 6 + [False, False, True, False]
    shards._changed = event = Event(woken)
    assert list(shards.claims()) == [claim, claim]
    assert event.waits == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0, 0.5, 1.0, 2.0, 0.5]
    shards.close()


def test_a_claim_waits_for_a_full_disk(tmp_path: Path) -> None:
    claim = Claim(1, SHARDS[0])
    ledger = ScriptedLedger([FULL, claim, FULL, claim, PermissionError(13, "denied")])
    shards = leased(ledger, tmp_path)
    assert shards.claim_free(2) == [claim, claim]
    with pytest.raises(PermissionError):
        shards.claim_free(1)
    shards.close()


def test_commits_and_releases_wait_for_a_full_disk_and_wake_the_claims(tmp_path: Path) -> None:
    ledger = ScriptedLedger()
    shards = leased(ledger, tmp_path)
    claim = Claim(1, SHARDS[0])
    for action in (lambda: shards.commit(claim, part(tmp_path)), lambda: shards.release(claim)):
        ledger.failures = [FULL]
        shards._changed.clear()
        action()
        assert shards._changed.is_set()
    assert ledger.calls == ["commit"] * 2 + ["release"] * 2
    shards.close()


def test_a_release_that_fails_leaves_the_leases_to_run_out(tmp_path: Path) -> None:
    for failure in (sqlite3.OperationalError("disk I/O error"), EnvironmentMissing("the ledger is lost")):
        ledger = ScriptedLedger()
        shards = leased(ledger, tmp_path)
        ledger.failures = [failure]
        shards.close()
        assert ledger.calls == ["release", "close", "close", "close"]


def test_leases_are_renewed_four_times_in_their_length_though_some_fail(tmp_path: Path) -> None:
    stopped = Event([False] * 4)
    ledger = ScriptedLedger()
    ledger.failures = [sqlite3.OperationalError("database is locked"), EnvironmentMissing("the ledger is lost")]
    shards = leased(ledger, tmp_path, stopped)
    shards._renewal_thread.join(20)
    assert stopped.waits == [2.0] * 5
    assert ledger.calls == ["renew"] * 4
    shards.close()
    assert stopped.is_set()


def test_renewals_go_on_while_the_worker_lives(ledger: Ledger, tmp_path: Path) -> None:
    with closing(Ledger(tmp_path / "ledger.sqlite", lease_seconds=0.04)) as brief:
        brief.worker = "brief"
        with closing(LeasedShards(brief, DiskFullBackoff(tmp_path))) as shards:
            assert shards.temporary_suffix() == "brief"
            next(shards.claims())
            query = "SELECT lease FROM shard WHERE id = 1"
            first = ledger._rows(query)
            wait_until(lambda: ledger._rows(query) > first)
