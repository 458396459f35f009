"""One worker with shards of its own: what it counts, gives back and raises when something fails on the way."""

import errno
import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from bundle_fixture import LABELS, PREPROCESSING, NumpySession, colour_image, listed, png
from vitx.core.errors import CheckFailed, InputError
from vitx.core.preprocess import UInt8Array
from vitx.predict import PREDICTIONS
from vitx.predict.inputs.inventory import Inventory
from vitx.predict.ledger import Claim
from vitx.predict.options import PredictOptions
from vitx.predict.outputs.parts import Part, PartWriter
from vitx.predict.pipeline.disk import DiskFullBackoff
from vitx.predict.pipeline.worker import Job, Worker, refuse_unreadable, slice_size
from vitx.runtimes.session import Float32Array

FULL = OSError(errno.ENOSPC, "No space left on device")


class ListedShards:
    """Shards of a list, each until it is committed; records what the worker says of them."""

    def __init__(self, inventory: Inventory) -> None:
        self._todo = [Claim(number, shard) for number, shard in enumerate(inventory.shards, 1)]
        self._count = len(self._todo)
        self._changed = threading.Condition()
        self._stopped = False
        self.committed: list[int] = []
        self.released: list[int] = []
        self.stops = 0
        self.before_claim: Callable[[], None] = lambda: None
        self.before_commit: Callable[[], None] = lambda: None

    def claims(self) -> Iterator[Claim]:
        while True:
            self.before_claim()
            with self._changed:
                done = lambda: self._stopped or self._todo or len(self.committed) == self._count  # noqa: E731
                assert self._changed.wait_for(done, 20)
                if self._stopped or not self._todo:
                    return
                claim = self._todo.pop(0)
            yield claim

    def commit(self, claim: Claim, part: Part) -> None:
        self.before_commit()
        part.publish()
        with self._changed:
            self.committed.append(claim.id)
            self._changed.notify_all()

    def release(self, claim: Claim) -> None:
        with self._changed:
            self.released.append(claim.id)
            self._todo.append(claim)
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self.stops += 1
            self._changed.notify_all()


class Waits(DiskFullBackoff):
    """Counts its waits, which take no time."""

    def __init__(self, out: Path) -> None:
        super().__init__(out)
        self.errors: list[BaseException] = []

    def wait(self, error: BaseException) -> None:
        self.errors.append(error)


class Bench:
    """Eleven images in shards of four; the third and the ninth cannot be read."""

    def __init__(self, folder: Path) -> None:
        rng = np.random.default_rng(5)
        images = folder / "images"
        images.mkdir()
        for index in range(11):
            (images / f"{index:02d}.png").write_bytes(b"" if index in (2, 8) else png(colour_image(index % 4, rng)))
        self.out, self.listing = folder, folder / "list"
        (folder / PREDICTIONS).mkdir()
        self.inventory = listed(str(images), self.listing, 4)
        self.shards, self.backoff = ListedShards(self.inventory), Waits(folder)

    def worker(
        self, session: NumpySession | None = None, asked: dict[str, Any] | None = None, **changes: Any
    ) -> Worker:
        given: dict[str, Any] = {
            "out": self.out,
            "listing": self.listing,
            "base": self.inventory.base,
            "labels": LABELS,
            "preprocessing": PREPROCESSING,
            "options": PredictOptions(**{"batch_size": 3, "top_k": 2} | (asked or {})),
            "read_threads": 2,
            "decode_threads": 2,
        }
        return Worker(Job(**given | changes), session or NumpySession(), self.shards, self.backoff)

    def paths(self) -> list[str]:
        return [str(path) for path in pq.read_table(self.out / PREDICTIONS)["path"].to_pylist()]

    def temporary(self) -> list[str]:
        return [path.name for path in (self.out / PREDICTIONS).iterdir() if path.name.startswith(".")]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


NAMES = [f"{index:02d}.png" for index in range(11)]


@pytest.mark.parametrize(
    ("batch", "threads", "size"), [(32, 4, 4), (32, 16, 1), (32, 64, 1), (1, 1, 1), (9, 1, 4), (10, 2, 2)]
)
def test_a_thread_decodes_half_its_share_of_a_batch(batch: int, threads: int, size: int) -> None:
    assert slice_size(batch, threads) == size


def test_images_are_counted_when_inferred_and_when_committed(bench: Bench) -> None:
    worker = bench.worker()
    seen: list[int] = []
    worker.on_progress = lambda: seen.append(worker.images)
    worker.run()
    assert seen == [3, 4, 7, 8, 11]  # batches of three, and the end of each shard
    assert (worker.images, worker.committed, worker.shards_done) == (11, 11, 3)
    assert bench.shards.committed == [1, 2, 3]
    assert bench.shards.released == []
    assert bench.shards.stops == 1
    assert bench.paths() == NAMES
    assert bench.temporary() == []


class TwoCallers(NumpySession):
    """The first two calls meet in the model, and one of them leaves it only after the other."""

    callers = 2

    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count()
        self.met, self.one_left = threading.Barrier(2, timeout=20), threading.Event()

    def _infer(self, images: UInt8Array) -> Float32Array:
        if next(self.numbers) < 2 and self.met.wait() == 0:
            assert self.one_left.wait(20)
        self.one_left.set()
        return super()._infer(images)


def test_batches_of_several_callers_are_in_the_model_at_once_and_written_in_order(bench: Bench) -> None:
    session = TwoCallers()
    worker = bench.worker(session=session)
    assert worker.timer.threads["infer"] == 2
    worker.run()
    assert not session.met.broken
    assert bench.paths() == NAMES
    assert bench.shards.committed == [1, 2, 3]


def test_containers_are_read_by_one_thread(bench: Bench) -> None:
    assert bench.worker().timer.threads == {"read": 2, "decode": 2, "infer": 1, "write": 1}
    assert bench.worker(has_single_files=False, read_threads=7, decode_threads=3).timer.threads == {
        "read": 1,
        "decode": 3,
        "infer": 1,
        "write": 1,
    }


def test_every_stage_is_timed(bench: Bench) -> None:
    worker = bench.worker()
    worker.run()
    assert all(share > 0 for share in worker.timer.shares(1.0).values())


def test_outputs_need_a_session_that_gives_them(bench: Bench) -> None:
    with pytest.raises(InputError, match=r"^the session gives no embedding: load_session\(…, outputs=\('embedding',"):
        bench.worker(asked={"embeddings": True, "attention": True})


def test_strict_names_the_first_unreadable_image_and_leaves_the_rest(bench: Bench) -> None:
    worker = bench.worker(asked={"strict": True, "batch_size": 20})
    with pytest.raises(
        CheckFailed, match=r"^unreadable image 02\.png: not an image: empty; without --strict it becomes a row$"
    ):
        worker.run()
    assert bench.shards.stops == 1
    assert bench.shards.committed == []
    assert bench.temporary() == []


def test_the_first_error_of_a_part_is_named() -> None:
    refuse_unreadable(iter("ab"), [None, None])
    with pytest.raises(CheckFailed, match="unreadable image b: torn"):
        refuse_unreadable(iter("abc"), [None, "torn", "empty"])


class Broken(Exception):
    pass


def fail(*_: object, **__: object) -> Any:
    raise Broken


class FailingSession(NumpySession):
    def _infer(self, images: UInt8Array) -> Any:
        raise Broken


@pytest.mark.parametrize("place", ["claims", "read_shard", "read_item", "decode", "infer", "rows", "add", "commit"])
def test_an_error_of_any_stage_reaches_the_caller(bench: Bench, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """And nothing goes on: threads ended, temporary files removed, shards stopped."""
    module = "vitx.predict.pipeline.worker"
    match place:
        case "claims":
            bench.shards.before_claim = fail
        case "read_shard" | "read_item":
            monkeypatch.setattr(f"{module}.{place}", fail)
        case "decode":
            monkeypatch.setattr("vitx.core.preprocess.decode", fail)
        case "rows":
            monkeypatch.setattr(f"{module}.rank", fail)
        case "add":
            monkeypatch.setattr(PartWriter, "add", fail)
        case "commit":
            bench.shards.before_commit = fail
    worker = bench.worker(FailingSession() if place == "infer" else None)
    before = threading.active_count()
    with pytest.raises(Broken):
        worker.run()
    assert threading.active_count() == before
    assert bench.shards.stops == 1
    assert bench.temporary() == []
    assert bench.shards.committed == []
    assert worker.committed == 0


def test_an_error_of_writing_ends_the_claims_of_a_worker_that_waits_for_them(bench: Bench) -> None:
    """Its reader waits for a shard, and its model for the reader: nobody would put the next value and see the error."""
    waiting, failed = threading.Event(), threading.Event()
    calls: list[int] = []

    def claim() -> None:
        calls.append(1)
        if len(calls) == 4:  # all shards are taken
            waiting.set()

    def commit() -> None:
        if len(bench.shards.committed) == 2:
            assert waiting.wait(20)
            failed.set()
            raise Broken

    bench.shards.before_claim, bench.shards.before_commit = claim, commit
    with pytest.raises(Broken):
        bench.worker().run()
    assert failed.is_set()
    assert bench.shards.committed == [1, 2]
    assert bench.paths() == NAMES[:8]


@pytest.mark.parametrize("failing_add", [1, 2, 3])
def test_rows_that_found_no_room_are_made_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, failing_add: int
) -> None:
    """The shard is given back, its other rows are ignored, and it is done when it comes again."""
    add, calls = PartWriter.add, 0

    def full(self: PartWriter, rows: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == failing_add:
            raise FULL
        add(self, rows)

    monkeypatch.setattr(PartWriter, "add", full)
    worker = bench.worker()
    worker.run()
    failed = 1 if failing_add <= 2 else 2  # a shard has two batches
    assert bench.shards.released == [failed]
    assert bench.shards.committed == [*(shard for shard in (1, 2, 3) if shard != failed), failed]
    assert bench.backoff.errors == [FULL]
    assert bench.paths() == NAMES
    assert worker.committed == 11
    assert worker.images == 15
    assert bench.temporary() == []


def test_a_part_whose_end_finds_no_room_is_made_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    finish, calls = PartWriter.finish, 0

    def full(self: PartWriter) -> Part:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise FULL
        return finish(self)

    monkeypatch.setattr(PartWriter, "finish", full)
    bench.worker().run()
    assert bench.shards.released == [2]
    assert bench.shards.committed == [1, 3, 2]
    assert bench.backoff.errors == [FULL]
    assert bench.paths() == NAMES


def test_an_error_that_is_not_a_full_disk_is_not_waited_for(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: PartWriter, rows: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(PartWriter, "add", denied)
    with pytest.raises(PermissionError):
        bench.worker().run()
    assert bench.backoff.errors == []
    assert bench.shards.released == []


def test_a_temporary_file_that_was_removed_is_made_again(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    finish, calls = PartWriter.finish, 0

    def removed(self: PartWriter) -> Part:
        nonlocal calls
        calls += 1
        if calls == 1:
            self._temporary.unlink()
        return finish(self)

    monkeypatch.setattr(PartWriter, "finish", removed)
    bench.worker().run()
    assert bench.shards.released == [1]
    assert bench.shards.committed == [2, 3, 1]
    assert bench.backoff.errors == []
    assert bench.paths() == NAMES
