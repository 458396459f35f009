"""Where finished parts go, and the progress that is shown: every number by hand."""

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from vitx.core.errors import EnvironmentMissing
from vitx.predict.ledger import Claim, Ledger, Shard, ShardRecord
from vitx.predict.outputs.parts import Part
from vitx.predict.pipeline.executor import Output

# Two of ten images; what is done has forty.
DONE, CLAIMS = 2, [Claim(number, Shard("images", "list", number, 24)) for number in range(1, 11)]


class Bar:
    """A progress bar, and the clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.shown: list[tuple[int, str]] = []
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def update(self, done: int, note: str = "") -> None:
        self.shown.append((done, note))


@pytest.fixture
def bar(monkeypatch: pytest.MonkeyPatch) -> Bar:
    return Bar(monkeypatch)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """Ten shards of 24 images, of which two are done with 20 each."""
    with closing(Ledger(tmp_path / "ledger.sqlite")) as opened:
        opened.create({}, (claim.shard for claim in CLAIMS))
        for claim in CLAIMS[:DONE]:
            opened.commit(claim, ShardRecord("digest", 20, 0, {}), lambda: None)
        yield opened


def part(folder: Path) -> Part:
    (folder / "temporary").write_bytes(b"rows")
    return Part(folder / "part", folder / "temporary", ShardRecord("digest", 24, 1, {0: 23}))


def shares(seconds: float) -> dict[str, float]:
    return {"read": 1 / seconds, "infer": 0.3}


class Store:
    """Takes files; or fails."""

    def __init__(self, folder: Path, *, fails: bool = False) -> None:
        self.folder, self.fails = folder, fails
        self.taken: list[str] = []

    def put(self, path: Path, name: str) -> None:
        assert path.read_bytes() == b"rows"
        assert not (self.folder / "part").exists()  # what has its name is in the store
        if self.fails:
            raise EnvironmentMissing("no answer")
        self.taken.append(name)


def test_a_part_is_in_the_store_in_the_folder_and_in_the_ledger(ledger: Ledger, bar: Bar, tmp_path: Path) -> None:
    store: Any = Store(tmp_path)
    output = Output(ledger, store, bar)
    output.commit(CLAIMS[2], part(tmp_path))
    assert store.taken == ["predictions.parquet/part"]
    assert (tmp_path / "part").read_bytes() == b"rows"
    assert ledger.totals()[1:3] == (3, 64)
    bar.now += 4
    found = output.performance(shares, {"provider": "CPU"})
    assert found == (24, 4.0, {"read": 0.25, "infer": 0.3}, {"provider": "CPU"})


def test_what_the_store_did_not_take_is_not_done(ledger: Ledger, bar: Bar, tmp_path: Path) -> None:
    store: Any = Store(tmp_path, fails=True)
    with pytest.raises(EnvironmentMissing, match="no answer"):
        Output(ledger, store, bar).commit(CLAIMS[2], part(tmp_path))
    assert not (tmp_path / "part").exists()
    assert next(ledger.unfinished()) == CLAIMS[2]


def test_progress_counts_everything_and_the_rate_what_came_since_the_start(ledger: Ledger, bar: Bar) -> None:
    output = Output(ledger, None, bar)
    bar.now += 4
    output.report(40, shares)  # 40 in 4 s; as many were done before
    bar.now += 4
    output.report(24, shares)
    assert bar.shown == [(80, "10 images/s, bound by infer"), (104, "8 images/s, bound by infer")]


def test_at_the_very_start_there_is_no_rate(ledger: Ledger, bar: Bar) -> None:
    """It was divided by the seconds since the start, none on a coarse clock."""
    Output(ledger, None, bar).report(24, shares)
    assert bar.shown == []


def test_progress_is_of_shards_where_the_images_are_not_known(bar: Bar, tmp_path: Path) -> None:
    with closing(Ledger(tmp_path / "tars.sqlite")) as ledger:
        ledger.create({}, (Shard("tar", "a"), Shard("tar", "b")))
        output = Output(ledger, None, bar)
        output.commit(next(ledger.unfinished()), part(tmp_path))
        bar.now += 5
        output.report(30, lambda _: {"read": 0.9, "infer": 0.1})
    assert bar.shown == [(1, "6 images/s, bound by read")]


def test_without_an_image_there_is_no_rate(ledger: Ledger, bar: Bar) -> None:
    output = Output(ledger, None, bar)
    bar.now += 1
    output.report(0, shares)
    assert bar.shown == [(40, "0 images/s, bound by read")]


def test_the_bar_moves_twice_a_second_at_most(ledger: Ledger, bar: Bar) -> None:
    output = Output(ledger, None, bar)
    bar.now += 1
    for seconds, shown in ((0.0, 1), (0.49, 1), (0.02, 2)):
        bar.now += seconds
        output.report(0, shares)
        assert len(bar.shown) == shown
