"""A worker's shards: in order, those that are lost again at the end, until all are done or it is stopped."""

import errno
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from vitx.core.errors import EnvironmentMissing
from vitx.predict.ledger import Claim, Ledger, Shard, ShardRecord
from vitx.predict.outputs.parts import Part
from vitx.predict.pipeline.disk import DiskFullBackoff
from vitx.predict.pipeline.executor import LedgerShards

CLAIMS = [Claim(number, Shard("tar", f"{number}.tar")) for number in (1, 2, 3)]


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with closing(Ledger(tmp_path / "ledger.sqlite")) as opened:
        opened.create({}, (claim.shard for claim in CLAIMS))
        yield opened


@pytest.fixture
def shards(ledger: Ledger, tmp_path: Path) -> LedgerShards:
    return LedgerShards(ledger, DiskFullBackoff(tmp_path))


def part(folder: Path) -> Part:
    (folder / "temporary").write_bytes(b"rows")
    return Part(folder / "part", folder / "temporary", ShardRecord("digest", 3, 1, {0: 2}))


def test_claims_end_when_every_shard_is_done(shards: LedgerShards, ledger: Ledger, tmp_path: Path) -> None:
    claims = shards.claims()
    for claim in CLAIMS:
        assert next(claims) == claim
        shards.commit(claim, part(tmp_path))
    assert (tmp_path / "part").read_bytes() == b"rows"
    assert next(claims, None) is None
    assert ledger.totals().done == 3


def test_who_asks_for_more_waits_for_what_is_not_done(shards: LedgerShards, tmp_path: Path) -> None:
    """One of these may be lost yet."""
    claims = shards.claims()
    assert [next(claims) for _ in CLAIMS] == CLAIMS
    rest: list[Claim] = []
    reader = threading.Thread(target=lambda: rest.extend(claims))
    reader.start()
    shards.commit(CLAIMS[0], part(tmp_path))
    shards.release(CLAIMS[1])
    shards.commit(CLAIMS[2], part(tmp_path))
    shards.release(CLAIMS[1])
    shards.commit(CLAIMS[1], part(tmp_path))
    reader.join()
    assert rest == [CLAIMS[1], CLAIMS[1]]


@pytest.mark.parametrize("taken", [1, 3])
def test_stopped_claims_end(shards: LedgerShards, ledger: Ledger, taken: int) -> None:
    claims = shards.claims()
    for _ in range(taken):
        next(claims)
    shards.stop()
    assert next(claims, None) is None
    assert list(ledger.unfinished()) == CLAIMS


def test_a_commit_waits_for_a_full_disk(
    shards: LedgerShards, ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be full when the file has its name already: the second time it is only recorded."""
    change, failing, calls = Ledger._change, {1, 3}, 0

    def full(self: Ledger, *given: Any) -> int:
        nonlocal calls
        calls += 1
        if calls in failing:
            raise OSError(errno.ENOSPC, "No space left on device")
        return change(self, *given)

    monkeypatch.setattr(Ledger, "_change", full)
    shards.commit(CLAIMS[0], part(tmp_path))
    assert (ledger.totals().done, calls) == (1, 5)
    failing.add(6)
    impatient = LedgerShards(ledger, DiskFullBackoff(tmp_path, 0))
    with pytest.raises(EnvironmentMissing, match="make room"):
        impatient.commit(CLAIMS[1], part(tmp_path))
    assert ledger.totals().done == 1
