"""One worker with shards of its own: what it counts, gives on and raises when something fails on the way."""

import itertools
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from bundle_fixture import LABELS, PREPROCESSING, NumpySession, colour_image, listed, png
from server_process import HANG
from vitx.core.errors import CheckFailed, InputError
from vitx.core.preprocess import UInt8Array
from vitx.predict import PREDICTIONS
from vitx.predict.ledger import Claim
from vitx.predict.options import PredictOptions
from vitx.predict.outputs.parts import Part, PartWriter
from vitx.predict.pipeline.worker import Job, Worker, refuse_unreadable, slice_size
from vitx.runtimes.session import Float32Array


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
        self.claims = [Claim(number, shard) for number, shard in enumerate(self.inventory.shards, 1)]
        self.committed: list[int] = []
        self.predicted: list[int] = []

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
            "certified": True,
        }
        return Worker(Job(**given | changes), session or NumpySession())

    def commit(self, claim: Claim, part: Part) -> None:
        part.publish()
        self.committed.append(claim.id)

    def run(self, worker: Worker, claims: Iterable[Claim] | None = None) -> None:
        with closing(worker):
            worker.run(self.claims if claims is None else claims, self.commit, self.predicted.append)

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


def test_batches_are_counted_and_parts_committed_in_order(bench: Bench) -> None:
    bench.run(bench.worker())
    assert bench.predicted == [3, 1, 3, 1, 3]  # batches of three, and the end of each shard
    assert bench.committed == [1, 2, 3]
    assert bench.paths() == NAMES
    assert bench.temporary() == []


def test_shards_of_several_calls_are_done_at_the_same_time(bench: Bench) -> None:
    """As actors of Ray do them: each call has a shard, and the calls share the threads."""
    met, began = threading.Barrier(3, timeout=HANG), itertools.count()

    class Meeting(NumpySession):
        callers = 3

        def _infer(self, images: UInt8Array) -> Float32Array:
            if next(began) < 3:
                met.wait()  # until each call has a batch in the model
            return super()._infer(images)

    with closing(bench.worker(Meeting(), {"batch_size": 4})) as worker, ThreadPoolExecutor(3) as calls:
        list(calls.map(lambda claim: worker.run([claim], bench.commit), bench.claims))
    assert sorted(bench.committed) == [1, 2, 3]
    assert bench.paths() == NAMES


class TwoCallers(NumpySession):
    """The first two calls meet in the model, and one of them leaves it only after the other."""

    callers = 2

    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count()
        self.met, self.one_left = threading.Barrier(2, timeout=HANG), threading.Event()

    def _infer(self, images: UInt8Array) -> Float32Array:
        if next(self.numbers) < 2 and self.met.wait() == 0:
            assert self.one_left.wait(HANG)
        self.one_left.set()
        return super()._infer(images)


def test_batches_of_several_callers_are_in_the_model_at_once_and_written_in_order(bench: Bench) -> None:
    session = TwoCallers()
    worker = bench.worker(session=session)
    assert worker.timer.threads["infer"] == 2
    bench.run(worker)
    assert not session.met.broken
    assert bench.paths() == NAMES
    assert bench.committed == [1, 2, 3]


def test_containers_are_read_by_one_thread(bench: Bench) -> None:
    assert bench.worker().timer.threads == {"read": 2, "decode": 2, "infer": 1, "write": 1, "commit": 1}
    assert bench.worker(has_single_files=False, read_threads=7, decode_threads=3).timer.threads == {
        "read": 1,
        "decode": 3,
        "infer": 1,
        "write": 1,
        "commit": 1,
    }


def test_every_stage_is_timed(bench: Bench) -> None:
    worker = bench.worker()
    bench.run(worker)
    assert all(share > 0 for share in worker.timer.shares(1.0).values())


def test_outputs_need_a_session_that_gives_them(bench: Bench) -> None:
    with pytest.raises(InputError, match=r"^the session gives no embedding: load_session\(…, outputs=\('embedding',"):
        bench.worker(asked={"embeddings": True, "attention": True})


def test_one_image_whose_output_is_not_finite_has_an_error_and_the_others_their_classes(bench: Bench) -> None:
    class Poisoned(NumpySession):
        """Of the second image of each batch a further output is not finite; its logits are."""

        outputs = ("embedding",)

        def _infer_outputs(self, images: UInt8Array) -> dict[str, Float32Array]:
            embedding = np.ones((len(images), 3), np.float32)
            embedding[1:2, 2] = np.inf
            return {"logits": self._infer(images), "embedding": embedding}

    bench.run(bench.worker(Poisoned(), {"batch_size": 4, "embeddings": True}))
    rows = pq.read_table(bench.out / PREDICTIONS).to_pylist()
    wrong = {row["path"]: row["error"] for row in rows if row["error"] is not None}
    not_finite = "the model's output is not finite"
    empty = "not an image: empty"
    assert wrong == {"01.png": not_finite, "02.png": empty, "05.png": not_finite, "08.png": empty, "10.png": not_finite}
    classes = [LABELS[int(row["path"][:2]) % 4] for row in rows if row["error"] is None]
    assert [row["class"] for row in rows if row["error"] is None] == classes


def test_strict_names_the_first_unreadable_image_and_leaves_the_rest(bench: Bench) -> None:
    worker = bench.worker(asked={"strict": True, "batch_size": 20})
    with pytest.raises(
        CheckFailed, match=r"^unreadable image 02\.png: not an image: empty; without --strict it becomes a row$"
    ):
        bench.run(worker)
    assert bench.committed == []
    assert bench.temporary() == []


def test_the_first_error_of_a_part_is_named() -> None:
    refuse_unreadable(iter("ab"), [None, None])
    with pytest.raises(CheckFailed, match="unreadable image b: torn"):
        refuse_unreadable(iter("abc"), [None, "torn", "empty"])
    with pytest.raises(ValueError, match="shorter"):  # they are of one batch
        refuse_unreadable(iter("ab"), [None])


class Broken(Exception):
    pass


def fail(*_: object, **__: object) -> Any:
    raise Broken


class FailingSession(NumpySession):
    def _infer(self, images: UInt8Array) -> Any:
        raise Broken


@pytest.mark.parametrize("place", ["claims", "read_shard", "read_item", "decode", "infer", "rows", "add", "finish"])
def test_an_error_of_any_stage_reaches_the_caller(bench: Bench, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """And nothing goes on: threads ended, temporary files removed."""
    module = "vitx.predict.pipeline.worker"
    match place:
        case "read_shard" | "read_item":
            monkeypatch.setattr(f"{module}.{place}", fail)
        case "decode":
            monkeypatch.setattr("vitx.core.preprocess.decode", fail)
        case "rows":
            monkeypatch.setattr(f"{module}.rank", fail)
        case "add" | "finish":
            monkeypatch.setattr(PartWriter, place, fail)
    worker = bench.worker(FailingSession() if place == "infer" else None)
    before = set(threading.enumerate())
    with pytest.raises(Broken):
        bench.run(worker, (fail() for _ in range(1)) if place == "claims" else None)
    assert set(threading.enumerate()) <= before
    assert bench.temporary() == []
    assert bench.committed == []


def test_an_error_of_a_commit_ends_the_work(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Although a thread takes shards, of which there is no end, and others wait to be committed."""
    before, publish = set(threading.enumerate()), Part.publish

    def second(part: Part) -> None:
        if bench.committed == [1]:
            raise Broken
        publish(part)

    monkeypatch.setattr(Part, "publish", second)
    with pytest.raises(Broken):
        bench.run(bench.worker(), itertools.chain(bench.claims, itertools.repeat(bench.claims[2])))
    assert set(threading.enumerate()) <= before
    assert bench.committed == [1]
    assert bench.paths() == NAMES[:4]


def test_batches_are_predicted_while_a_part_is_committed(bench: Bench) -> None:
    """A store may take long for it."""
    last = threading.Event()

    class Signals(NumpySession):
        batches = 0

        def _infer(self, images: UInt8Array) -> Float32Array:
            self.batches += 1
            if self.batches == 9:  # the other two cannot be read
                last.set()
            return super()._infer(images)

    commit = bench.commit

    def slow(claim: Claim, part: Part) -> None:
        assert last.wait(HANG)
        commit(claim, part)

    bench.commit = slow  # type: ignore[method-assign]
    bench.run(bench.worker(Signals(), {"batch_size": 1}))
    assert bench.committed == [1, 2, 3]
