"""The clients without sockets of benchmarks/serve/server_overhead.py, against the server as it is."""

from dataclasses import replace

import pytest
import server_overhead
import uvloop

from bundle_fixture import IMAGE_SIZE, LABELS
from support.server_peers import SMALL
from vitx.core.bundle import Bundle
from vitx.serve.models.loading import Loader, WarmModel
from vitx.serve.options import ServeOptions


@pytest.fixture
def warm(tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> WarmModel:
    network = replace(SMALL, name="tiny", image_size=IMAGE_SIZE, classes=len(LABELS))
    monkeypatch.setattr(server_overhead, "SMALL", network)
    monkeypatch.setattr(server_overhead, "configure_process", lambda: None)  # of a process that only serves
    loader = Loader(ServeOptions(device="cpu", instances=1, threads=1))
    return loader.warm(loader.verify(tiny_bundle.path))


def test_every_request_is_answered(warm: WarmModel) -> None:
    assert uvloop.run(server_overhead.microseconds(warm, 200, None)) > 0


def test_a_refusal_ends_the_run(warm: WarmModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_overhead, "infer_request", lambda *_: b"GET /nowhere HTTP/1.1\r\nHost: here\r\n\r\n")
    with pytest.raises(RuntimeError, match=r"not an answer: b'HTTP/1\.1 404"):
        uvloop.run(server_overhead.microseconds(warm, 200, None))
