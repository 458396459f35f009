"""Several sessions that look like one: who computes what, what is closed, and what tuning found."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest

import vitx.runtimes.instances as instances_module
import vitx.runtimes.session as session_module
from bundle_fixture import IMAGE_SIZE, Float32Array, NumpySession, write_bundle
from server_process import HANG
from vitx.core.bundle import timestamp
from vitx.core.errors import InputError
from vitx.core.latency import Latency, Setting, Tuning
from vitx.core.machine import describe_machine
from vitx.core.preprocess import UInt8Array
from vitx.core.tensorrt_plan import Profile
from vitx.runtimes.instances import (
    ElasticSession,
    SessionPool,
    load_elastic,
    load_for_callers,
    load_instances,
    runs_on_cpu,
    serving_setting,
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


@pytest.mark.parametrize(
    ("runtime", "device", "gpus", "on_cpu"),
    [
        ("onnxruntime", "cpu", 1, True),
        ("onnxruntime", "auto", 1, False),
        ("onnxruntime", "auto", 0, True),
        ("onnxruntime", "cuda", 0, False),
        ("openvino", "auto", 1, True),  # a CPU's runtime beside a GPU
        ("onnxruntime-cuda", "auto", 0, False),
    ],
)
def test_where_a_runtime_computes(
    monkeypatch: pytest.MonkeyPatch, runtime: str, device: Any, gpus: int, on_cpu: bool
) -> None:
    monkeypatch.setattr(session_module, "local_gpus", lambda: ["a GPU"] * gpus)
    assert runs_on_cpu(runtime, device) is on_cpu


def test_where_an_unknown_runtime_computes_is_not_known() -> None:
    with pytest.raises(InputError, match=r"^unknown runtime 'onnx'"):
        runs_on_cpu("onnx", "cpu")


def test_the_setting_is_as_given_or_as_tuned_or_a_session_a_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instances_module, "usable_cores", lambda: 10)
    bundle = write_bundle(tmp_path / "tiny.vitx")
    setting = partial(serving_setting, bundle, "onnxruntime")
    assert setting("cpu", None, None) == (5, None)
    best = Setting(instances=2, threads=3, batch_size=4, images_per_second=1.0, median_ms=1.0)
    tuning = Tuning(best=best, tried=(best,), runtime={"runtime": "onnxruntime"}, created=timestamp())
    bundle.record_latency(
        Latency(runtime={}, machine=describe_machine(), points=(), tuning=tuning, created=timestamp())
    )
    assert setting("cpu", None, None) == (2, 3)
    assert (setting("cpu", 4, None), setting("cpu", None, 4)) == ((4, None), (1, 4))
    assert (setting("cuda", None, None), setting("cuda", 4, 2)) == ((1, None), (4, 2))


@pytest.mark.parametrize(
    ("instances", "threads", "on_cpu", "loaded"),
    [
        (3, None, True, [None, 2, 2, 2]),  # alone on all cores, beside others on a share of them
        (2, None, True, [None, 4, 4]),
        (3, None, False, [None] * 3),
        (3, 4, True, [4] * 3),
        (1, None, True, [None]),
    ],
)
def test_callers_share_the_cores_of_a_cpu_unless_their_threads_are_given(
    monkeypatch: pytest.MonkeyPatch, instances: int, threads: int | None, on_cpu: bool, loaded: list[int | None]
) -> None:
    monkeypatch.setattr(instances_module, "usable_cores", lambda: 8)
    asked: list[int | None] = []

    def load(threads: int | None) -> Session:
        asked.append(threads)
        return Numbered(0)

    assert load_for_callers(load, instances, threads, on_cpu=on_cpu).callers == instances
    assert asked == loaded


def test_one_numpy_session_is_one_session() -> None:
    assert isinstance(load_instances(NumpySession, 1, None), NumpySession)
