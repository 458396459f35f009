"""The canary: what it detects, what it accepts, and how it changes readiness."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bundle_fixture import NumpySession, write_bundle
from server_process import running_server, wait_until
from vitx.core.bundle import Bundle
from vitx.core.errors import CheckFailed
from vitx.core.preprocess import UInt8Array
from vitx.runtimes.instances import ElasticSession
from vitx.runtimes.session import Float32Array
from vitx.serve.models.canary import Canary, canary_images, replay_once
from vitx.serve.observe.metrics import Metrics

# While the file DRIFT exists, the model's logits are what the file says higher.
DRIFTING = """
from pathlib import Path
from vitx.runtimes import Session
from vitx.serve.models import loading
load, drift = loading.load_session, Path("DRIFT")
class Drifting(Session):
    def __init__(self, session):
        super().__init__()
        self.session = session
    def describe(self):
        return self.session.describe()
    def _infer(self, images):
        return self.session.infer(images) + (float(drift.read_text()) if drift.exists() else 0)
loading.load_session = lambda *args, **options: Drifting(load(*args, **options))
from vitx.cli import main
main()
"""


class Session(NumpySession):
    """The reference with faults that come later."""

    def __init__(self) -> None:
        super().__init__()
        self.drift = 0.0
        self.provider = "cpu"
        self.failure: Exception | None = None

    def _infer(self, images: UInt8Array) -> Float32Array:
        if self.failure is not None:
            raise self.failure
        return super()._infer(images) + np.float32(self.drift)

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "provider": self.provider}


def test_the_images_are_fixed_and_smooth() -> None:
    images = canary_images((16, 16, 3))
    assert images.shape == (4, 16, 16, 3)
    assert images.dtype == np.uint8
    assert np.array_equal(images, canary_images((16, 16, 3)))
    assert images.std() > 30
    steps = np.abs(np.diff(images.astype(int), axis=1))
    assert steps.max() <= 64  # a quarter of the range: four pixels lie between two colours
    assert canary_images((32, 48, 3), 2).shape == (2, 32, 48, 3)


def test_drift_provider_and_failure_are_found(tiny_bundle: Bundle) -> None:
    session = Session()
    certificate = tiny_bundle.require_certificate()
    allowed = certificate.max_logit_error_allowed
    canary = Canary(tiny_bundle, certificate, session, max_batch=32)
    assert canary.fault() is None
    session.drift = 0.5 * allowed
    assert canary.fault() is None
    session.drift = 2 * allowed
    assert canary.fault() == f"logits of the canary batch moved by {2 * allowed:.3g}: at most {allowed:.3g} is allowed"
    session.drift = float("nan")
    assert "moved by nan" in str(canary.fault())
    session.drift, session.provider = 0.0, "cuda"
    assert canary.fault() == "the provider is cuda and was cpu"
    session.provider, session.failure = "cpu", RuntimeError("out of memory")
    assert canary.fault() == "the canary batch failed: out of memory"
    session.failure = None
    assert canary.fault() is None


def test_a_session_that_is_not_finite_is_refused_at_once(tiny_bundle: Bundle) -> None:
    session = Session()
    session.drift = float("nan")
    with pytest.raises(CheckFailed, match="logits that are not finite"):
        Canary(tiny_bundle, None, session, max_batch=1)


class Alone(Session):
    """One image alone has other logits than in a batch."""

    def __init__(self, move: float) -> None:
        super().__init__()
        self.move, self.sizes = move, set[int]()

    def _infer(self, images: UInt8Array) -> Float32Array:
        self.sizes.add(len(images))
        self.drift = self.move if len(images) == 1 else 0.0
        return super()._infer(images)


def test_an_image_alone_has_the_logits_it_has_in_a_batch(tiny_bundle: Bundle) -> None:
    certificate = tiny_bundle.require_certificate()
    allowed = certificate.max_logit_error_allowed
    for move, text in ((float("nan"), "nan"), (2.2 * allowed, f"{2.2 * allowed:.1g}")):
        found = f"has logits that move by {text}.* with its neighbours in the batch: at most {2 * allowed:.3g} is"
        with pytest.raises(CheckFailed, match=found):
            Canary(tiny_bundle, certificate, Alone(move), max_batch=4)
    assert Canary(tiny_bundle, certificate, Alone(1.8 * allowed), max_batch=4).fault() is None


@pytest.mark.parametrize(("max_batch", "sizes"), [(2, {1, 2}), (4, {1, 4}), (32, {1, 4})])
def test_no_more_images_than_a_batch_holds_are_run(tiny_bundle: Bundle, max_batch: int, sizes: set[int]) -> None:
    session = Alone(0)
    Canary(tiny_bundle, None, session, max_batch)
    assert session.sizes == sizes


def test_one_image_that_is_not_finite_is_enough(tiny_bundle: Bundle) -> None:
    class Last(Session):
        def _infer(self, images: UInt8Array) -> Float32Array:
            logits = super()._infer(images)
            logits[-1, 0] = np.inf if len(images) > 1 else logits[-1, 0]
            return logits

    with pytest.raises(CheckFailed, match="logits that are not finite"):
        Canary(tiny_bundle, None, Last(), max_batch=4)


def test_what_runs_several_batches_is_compared_too(tiny_bundle: Bundle) -> None:
    alone, beside = Session(), Session()
    session = ElasticSession(alone, beside)
    canary = Canary(tiny_bundle, None, session, max_batch=4)
    assert canary.fault() is None
    beside.drift = 1.0
    assert "moved by 1" in str(canary.fault())
    alone.drift, beside.drift = 1.0, 0.0
    assert "moved by 1" in str(canary.fault())
    with pytest.raises(CheckFailed, match="moved by 1"):
        Canary(tiny_bundle, None, session, max_batch=4)


def test_what_is_known_is_the_measure_of_the_same_runtime_alone(tiny_bundle: Bundle) -> None:
    known = Canary(tiny_bundle, None, Session(), max_batch=4)
    drifted = Session()
    drifted.drift = 1.0
    with pytest.raises(CheckFailed, match=r": logits of the canary batch moved by 1: at most"):
        Canary(tiny_bundle, None, drifted, max_batch=4, known=known)
    drifted.provider = "cuda"
    assert Canary(tiny_bundle, None, drifted, max_batch=4, known=known).fault() is None


def test_a_change_is_counted_each_time_and_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    found: list[str | None] = [None, "drifts", "drifts more", None]
    model = SimpleNamespace(key=("m", "2"), fault=None, cache=None, canary=SimpleNamespace(fault=lambda: found.pop(0)))
    metrics, faults = Metrics(), []
    for _ in range(4):
        asyncio.run(replay_once([model], metrics))
        faults.append(model.fault)
    assert faults == [None, "drifts", "drifts more", None]
    assert capsys.readouterr().err == (
        "vitx: model 'm' version 2 is not ready: drifts\nvitx: model 'm' version 2 is ready again\n"
    )
    counted = [line for line in metrics.exposition().decode().splitlines() if line.startswith("vitx_canaries_total{")]
    assert sorted(counted) == [
        f'vitx_canaries_total{{model="m",result="{result}",version="2"}} 2.0' for result in ("fail", "pass")
    ]


def test_readiness_follows_the_canary(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "tiny.vitx", name="tiny")
    drift = tmp_path / "drift"
    arguments = (bundle.path, "--allow-uncertified", "--canary-seconds", "0.1")
    program = DRIFTING.replace("DRIFT", str(drift))
    with running_server(*arguments, program=program) as server:
        wait_until(lambda: server.metric('vitx_canaries_total{model="tiny",result="pass",version="1"}') >= 2)
        drift.write_text("0.5")
        wait_until(lambda: server.request("GET", "/v2/health/ready")[0] == 503)
        assert server.request("GET", "/v2/models/tiny/ready")[0] == 503
        assert server.request("GET", "/v2/health/live")[0] == 200
        assert "moved by 0.5" in server.json("/v2/models/tiny")["vitx"]["fault"]
        assert server.metric('vitx_canaries_total{model="tiny",result="fail",version="1"}') >= 1
        drift.unlink()
        wait_until(lambda: server.request("GET", "/v2/health/ready")[0] == 200)


def test_a_load_does_not_make_drifted_logits_the_measure(tmp_path: Path) -> None:
    bundle = write_bundle(tmp_path / "tiny.vitx", name="tiny")
    drift, token = tmp_path / "drift", tmp_path / "token"
    token.write_text("a-token-of-management")
    arguments = (bundle.path, "--allow-uncertified", "--canary-seconds", "0.1", "--management")
    program = DRIFTING.replace("DRIFT", str(drift))
    with running_server(*arguments, "--management-token-file", token, program=program) as server:

        def manage(path: str, body: bytes = b"") -> tuple[int, Any]:
            headers = {"Authorization": f"Bearer {token.read_text()}"}
            status, text, _ = server.request("POST", f"/v2/repository/{path}", body, headers)
            return status, json.loads(text or b"null")

        assert manage("models/tiny/load") == (200, None)
        assert [entry["state"] for entry in manage("index")[1]] == ["READY"]
        drift.write_text("0.5")
        wait_until(lambda: server.request("GET", "/v2/health/ready")[0] == 503)
        status, answer = manage("models/tiny/load")
        assert (status, "moved by 0.5" in answer["error"]) == (400, True), answer
        (entry,) = manage("index")[1]
        assert (entry["state"], "moved by 0.5" in entry["reason"]) == ("UNAVAILABLE", True)
        assert manage("index", b'{"ready": true}') == (200, [])
        drift.unlink()
        wait_until(lambda: server.request("GET", "/v2/health/ready")[0] == 200)
        assert manage("models/tiny/load") == (200, None)
