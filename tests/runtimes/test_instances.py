"""Several sessions that look like one: who computes what, what is closed, and what tuning found."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest

from bundle_fixture import IMAGE_SIZE, Float32Array, NumpySession, write_bundle
from server_process import HANG
from vitx.core.bundle import timestamp
from vitx.core.latency import Latency, Setting, Tuning
from vitx.core.machine import describe_machine
from vitx.core.preprocess import UInt8Array
from vitx.core.tensorrt_plan import Profile
from vitx.runtimes.instances import (
    ElasticSession,
    SessionPool,
    load_elastic,
    load_instances,
    sessions_on,
    tuned_setting,
)
from vitx.runtimes.session import Session

IMAGES = np.zeros((2, IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)


class Numbered(Session):
    """Its logits are its number; `within` runs in each call."""

    artefacts, outputs = ("model.onnx", "outputs/embedding.onnx"), ("embedding",)

    def __init__(self, number: int, within: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.number, self.within, self.freed = number, within, 0

    def _infer(self, images: UInt8Array) -> Float32Array:
        self.within()
        return np.full((len(images), 4), self.number, np.float32)

    def _infer_outputs(self, images: UInt8Array) -> dict[str, Float32Array]:
        return {"logits": self._infer(images), "embedding": np.zeros((len(images), 3), np.float32)}

    def _close(self) -> None:
        self.freed += 1

    def describe(self) -> dict[str, Any]:
        return {"runtime": "numbered", "threads": self.number}


def test_a_pool_computes_as_many_batches_at_once_as_it_has_sessions() -> None:
    barrier = Barrier(3)
    sessions = [Numbered(number, lambda: barrier.wait(HANG)) for number in range(3)]
    pool = SessionPool(sessions)
    with ThreadPoolExecutor(9) as callers:
        plain = [*callers.map(pool.infer, [IMAGES] * 9)]
        both = [*callers.map(pool.infer_outputs, [IMAGES] * 9)]
    assert sorted(logits[0, 0] for logits in plain) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [[*found] for found in both] == [["logits", "embedding"]] * 9
    assert pool.describe() == {"runtime": "numbered", "threads": 0, "sessions": 3}
    assert (pool.callers, pool.outputs, pool.artefacts) == (3, Numbered.outputs, Numbered.artefacts)
    pool.close()
    assert [session.freed for session in sessions] == [1, 1, 1]


def test_a_session_whose_batch_failed_is_free_again() -> None:
    def fail() -> None:
        raise KeyError

    pool = SessionPool([Numbered(0, fail)])
    for call in (pool.infer, pool.infer_outputs, pool.infer):
        with pytest.raises(KeyError):
            call(IMAGES)
    assert pool._free.qsize() == 1


def test_a_pool_takes_the_batches_of_its_sessions() -> None:
    first = Numbered(0)
    first.profiles = (Profile(minimum=1, optimum=2, maximum=4),)
    assert SessionPool([first, Numbered(1)]).profiles == first.profiles


def test_an_elastic_session_is_described_by_both() -> None:
    session = load_elastic(lambda threads: Numbered(8 if threads is None else threads), 3, 8)
    assert isinstance(session, ElasticSession)
    assert session.infer(IMAGES)[0, 0] == session.infer_outputs(IMAGES)["logits"][0, 0] == 8  # alone, on every core
    assert session.describe() == {"runtime": "numbered", "threads": 8, "side_by_side": {"batches": 3, "threads": 2}}
    assert (session.callers, session.outputs, session.artefacts) == (3, Numbered.outputs, Numbered.artefacts)
    assert session.under_load.describe() == {"runtime": "numbered", "threads": 2, "sessions": 3}
    alone: Any = session._alone
    assert alone.freed == 0
    session.close()
    assert alone.freed == 1
    assert load_elastic(lambda threads: Numbered(threads or 0), 8, 2).under_load.describe()["threads"] == 1


@pytest.mark.parametrize(
    ("instances", "threads", "concurrent", "loaded"),
    [(1, 4, False, 1), (1, None, False, 1), (3, 1, True, 1), (3, 1, False, 3), (3, 2, True, 3), (2, None, True, 2)],
)
def test_each_caller_has_a_session_but_where_one_of_a_thread_is_concurrent(
    instances: int, threads: int | None, concurrent: bool, loaded: int
) -> None:
    made: list[Numbered] = []

    def load() -> Session:
        made.append(Numbered(len(made)))
        made[-1].concurrent = concurrent
        return made[-1]

    session = load_instances(load, instances, threads)
    assert (len(made), session.callers) == (loaded, instances)
    assert [each.freed for each in made] == [0] * loaded
    assert session.infer(IMAGES)[0, 0] == 0


@pytest.mark.parametrize(
    ("cores", "sessions"), [(1, 1), (2, 2), (4, 4), (7, 7), (8, 8), (9, 3), (10, 5), (11, 5), (12, 6), (15, 7), (64, 8)]
)
def test_sessions_of_equal_threads_leave_few_cores_idle(cores: int, sessions: int) -> None:
    assert sessions_on(cores) == sessions


def test_the_setting_is_the_one_found_for_this_runtime(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = write_bundle(tmp_path / "tiny.vitx")
    assert tuned_setting(bundle, "onnxruntime") is None
    bundle.record_latency(Latency(runtime={}, machine=describe_machine(), points=(), created=timestamp()))
    assert tuned_setting(bundle, "onnxruntime") is None
    best = Setting(instances=2, threads=1, batch_size=4, images_per_second=1.0, median_ms=1.0)
    tuning = Tuning(best=best, tried=(best,), runtime={"runtime": "onnxruntime"}, created=timestamp())
    bundle.record_latency(
        Latency(runtime={}, machine=describe_machine(), points=(), tuning=tuning, created=timestamp())
    )
    assert tuned_setting(bundle, "onnxruntime") == tuned_setting(bundle, "onnxruntime-cpu") == best
    assert capsys.readouterr().err == ""
    assert tuned_setting(bundle, "openvino") is None  # as the server's auto may choose: tuning would be without effect
    assert capsys.readouterr().err == (
        "vitx: 'tiny' was tuned in onnxruntime and not in openvino, for which "
        "`vitx bench BUNDLE --tune --runtime openvino` finds the setting\n"
    )


def test_one_numpy_session_is_one_session() -> None:
    assert isinstance(load_instances(NumpySession, 1, None), NumpySession)
