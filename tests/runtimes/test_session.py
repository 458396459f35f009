"""The life of a session: infer until close, on every runtime that a CPU has; and every verb closes what it loads."""

import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
import torch

from bundle_fixture import (
    BIAS,
    IMAGE_SIZE,
    PREPROCESSING,
    WEIGHT,
    Float32Array,
    NumpySession,
    with_embedding,
    write_bundle,
)
from cli_fixture import Vitx
from server_process import HANG
from vitx.core.bundle import Bundle
from vitx.core.errors import CheckFailed, InputError
from vitx.core.preprocess import UInt8Array
from vitx.core.run import RunFolder
from vitx.runtimes import Session, SessionClosed, load_session
from vitx.runtimes.instances import SessionPool, load_elastic, load_instances
from vitx.runtimes.torch import load_run
from vitx.serve.models.loading import Loader
from vitx.serve.options import ServeOptions

IMAGES = np.zeros((2, IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)


class Held(NumpySession):
    """Infers while `go` is set, waits otherwise; counts how often it was freed."""

    def __init__(self) -> None:
        super().__init__()
        self.began, self.go = Event(), Event()
        self.freed = 0

    def _infer(self, images: UInt8Array) -> Float32Array:
        self.began.set()
        assert self.go.wait(HANG)
        return super()._infer(images)

    def _close(self) -> None:
        self.freed += 1


def assert_closed(session: Session) -> None:
    for call in (session.infer, session.infer_outputs):
        with pytest.raises(SessionClosed, match="the session is closed: load the model again"):
            call(IMAGES)
    session.close()


def test_a_closed_session_refuses_and_is_freed_once() -> None:
    with Held() as session:
        session.go.set()
        assert len(session.infer(IMAGES)) == 2
        assert session.freed == 0
    assert_closed(session)
    assert session.freed == 1


def test_an_error_closes_too() -> None:
    session = Held()
    with pytest.raises(KeyError), session:
        raise KeyError
    assert session.freed == 1


def test_close_waits_for_the_calls_that_run_and_refuses_others() -> None:
    session = Held()
    with ThreadPoolExecutor(4) as threads:
        running = threads.submit(session.infer, IMAGES)
        assert session.began.wait(HANG)
        closing = [threads.submit(session.close) for _ in range(2)]
        while not session._closed:
            pass
        with pytest.raises(SessionClosed):
            session.infer(IMAGES)
        assert session.freed == 0
        assert not any(one.done() for one in closing)
        session.go.set()
        assert len(running.result(HANG)) == 2
        for one in closing:
            one.result(HANG)
    assert session.freed == 1


def test_a_call_that_failed_no_longer_runs() -> None:
    session = Held()
    session.go.set()
    with pytest.raises(IndexError):
        session.infer_outputs(IMAGES[0, 0, 0])
    closing = Thread(target=session.close)
    closing.start()
    closing.join(HANG)
    assert session.freed == 1


@pytest.mark.parametrize("outputs", [(), ("embedding",)])
def test_onnx_runtime_is_freed(tmp_path: Path, outputs: tuple[str, ...]) -> None:
    bundle = with_embedding(write_bundle(tmp_path / "tiny.vitx"))
    with load_session(bundle, device="cpu", threads=1, outputs=outputs) as session:
        assert len(session.infer(IMAGES)) == 2
        assert session.outputs == outputs
        assert session.profiles == ()
        held: Any = session
        inner = weakref.ref(held._session)
    assert inner() is None
    assert_closed(session)
    assert session.describe()["runtime"] == "onnxruntime"


def test_openvino_is_freed(tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openvino", reason="an optional target")
    monkeypatch.setattr("vitx.runtimes.openvino.IR", "model.onnx")  # OpenVINO reads ONNX as well as its own IR
    with load_session(tiny_bundle, "openvino", threads=1) as session:
        assert len(session.infer(IMAGES)) == 2
        held: Any = session
        inner = weakref.ref(held._model)
    assert inner() is None
    assert_closed(session)
    assert session.describe()["runtime"] == "openvino"


def test_torch_is_freed(tiny_run: RunFolder) -> None:
    from vitx.runtimes.torch import load_run

    with load_run(tiny_run, device="cpu")[0] as session:
        assert len(session.infer(IMAGES)) == 2
        network = weakref.ref(session.network())
        same = session.with_normalization((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    assert_closed(session)
    assert session.describe()["runtime"] == "torch"
    # The network is freed with the last session that runs it.
    assert len(same.infer(IMAGES)) == 2
    same.close()
    assert network() is None


def test_a_pool_closes_its_sessions() -> None:
    sessions = [Held(), Held()]
    pool = SessionPool(sessions)
    pool.close()
    assert_closed(pool)
    assert [session.freed for session in sessions] == [1, 1]


def test_instances_that_were_loaded_are_closed_when_the_next_cannot_be() -> None:
    loaded: list[Held] = []

    def load() -> Session:
        if len(loaded) == 2:
            raise InputError("no memory for another")
        loaded.append(Held())
        return loaded[-1]

    with pytest.raises(InputError, match="no memory for another"):
        load_instances(load, 3, 2)
    assert [session.freed for session in loaded] == [1, 1]


def test_a_batch_alone_has_every_core_and_several_share_them() -> None:
    loaded: dict[int | None, Held] = {}

    def load(threads: int | None) -> Session:
        return loaded.setdefault(threads, Held())

    session = load_elastic(load, 1, 3)
    alone, beside = loaded[None], loaded[3]
    assert session.under_load is beside
    with ThreadPoolExecutor(2) as callers:
        first = callers.submit(session.infer, IMAGES)
        assert alone.began.wait(HANG)
        second = callers.submit(session.infer_outputs, IMAGES)
        assert beside.began.wait(HANG)
        for held in (beside, alone):
            held.go.set()
        assert np.array_equal(first.result(), second.result()["logits"])
    alone.began.clear()
    beside.began.clear()
    session.infer(IMAGES)
    assert alone.began.is_set()
    assert not beside.began.is_set()
    session.close()
    assert_closed(session)
    assert (alone.freed, beside.freed) == (1, 1)


def test_a_model_of_which_the_second_copy_cannot_be_loaded_is_closed() -> None:
    first = Held()

    def load(threads: int | None) -> Session:
        if threads is not None:
            raise InputError("no memory for another")
        return first

    with pytest.raises(InputError, match="no memory for another"):
        load_elastic(load, 2, 2)
    assert first.freed == 1


def test_a_server_on_a_cpu_takes_the_cores_as_the_load_asks(
    tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitx.runtimes.instances.usable_cores", lambda: 4)

    def described(instances: int | None, threads: int | None) -> Any:
        loader = Loader(ServeOptions(max_batch=2, device="cpu", instances=instances, threads=threads))
        warm = loader.warm(loader.verify(tiny_bundle.path))
        with warm.session as session:
            assert warm.batching.instances == session.callers
            return session.describe().get("side_by_side")

    assert described(None, None) == {"batches": 4, "threads": 1}
    assert described(2, None) == {"batches": 2, "threads": 2}
    assert described(1, None) is None
    assert described(2, 1) is None


def test_a_model_that_is_refused_is_closed(tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    class Infinite(Held):
        classes = 4

        def _infer(self, images: UInt8Array) -> Float32Array:
            return np.full((len(images), self.classes), np.inf, dtype=np.float32)

    loader = Loader(ServeOptions(max_batch=2, device="cpu", allow_uncertified=True))
    session = Infinite()
    monkeypatch.setattr("vitx.serve.models.loading.load_session", lambda *args, **options: session)
    with pytest.raises(CheckFailed, match="not finite"):
        loader.warm(loader.verify(tiny_bundle.path))
    assert session.freed == 1
    session = Infinite()
    session.classes = 5
    with pytest.raises(InputError, match="its manifest says"):
        loader.warm(loader.verify(tiny_bundle.path))
    assert session.freed == 1


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Session]:
    """Every session that is made while the test runs."""
    sessions: list[Session] = []
    make = Session.__init__

    def note(self: Session) -> None:
        make(self)
        sessions.append(self)

    monkeypatch.setattr(Session, "__init__", note)
    return sessions


@pytest.mark.parametrize(
    ("arguments", "least"),
    [
        (("eval", "BUNDLE"), 1),
        (("eval", "RUN"), 1),
        (("parity", "RUN", "BUNDLE"), 2),
        (("parity", "--verify", "BUNDLE"), 1),
        (("bench", "BUNDLE", "--run", "RUN", "--batch", "1", "--seconds", "0.02", "--threads", "1"), 3),
        (("bench", "BUNDLE", "--rate", "100", "--seconds", "0.05"), 1),
        (("bench", "BUNDLE", "--tune"), 2),
    ],
)
def test_a_verb_closes_what_it_loads(
    arguments: tuple[str, ...],
    least: int,
    made: list[Session],
    vitx: Vitx,
    tiny_bundle: Bundle,
    tiny_run: RunFolder,
    colours_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vitx.bench.autotune.TRIAL_SECONDS", 0.01)
    paths = {"BUNDLE": tiny_bundle.path, "RUN": tiny_run.path}
    data = () if arguments[0] == "bench" else ("--data", colours_folder)
    code, _, err = vitx(*(paths.get(one, one) for one in arguments), *data, "--device", "cpu", "--json")
    assert code == 0, err
    assert len(made) >= least
    assert all(session._closed for session in made)


def test_the_checkpoint_s_logits_in_float64(tiny_run: RunFolder) -> None:
    """Each image alone, on the CPU, and the session's own network stays in float32."""
    images = np.random.default_rng(0).integers(0, 256, (5, 16, 16, 3), dtype=np.uint8)
    normal = (images.astype(np.float64) / 255 - PREPROCESSING.mean) / PREPROCESSING.std
    with load_run(tiny_run, device="cpu")[0] as session:
        found = session.infer_float64(images)["logits"]
        assert found.dtype == np.float64
        np.testing.assert_allclose(found, normal.mean(axis=(1, 2)) @ WEIGHT.astype(np.float64) + BIAS, atol=1e-13)
        assert 1e-9 < np.abs(session.infer(images) - found).max() < 1e-5
        assert next(session.network().parameters()).dtype == torch.float32
