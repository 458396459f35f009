"""What is refused before a runtime's library is imported: names, threads, devices, outputs and paths."""

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bundle_fixture import with_attention, with_embedding, write_bundle
from vitx.core.bundle import Bundle
from vitx.core.errors import EnvironmentMissing, InputError
from vitx.runtimes import load, load_session
from vitx.runtimes.requirements import RUNTIMES


@pytest.fixture
def bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bundle:
    """Of which nothing is loaded."""

    def refuse(name: str) -> None:
        raise EnvironmentMissing(f"asked for {name}")

    monkeypatch.setattr(load, "require", refuse)
    return with_attention(with_embedding(write_bundle(tmp_path / "tiny.vitx")))


def refused(bundle: Bundle, runtime: str = "onnxruntime", **given: Any) -> str:
    with pytest.raises((InputError, EnvironmentMissing)) as caught:
        load_session(bundle, runtime, **given)
    return str(caught.value)


def test_what_may_be_loaded_is_asked_of_the_runtimes(bundle: Bundle) -> None:
    for name, runtime in RUNTIMES.items():
        if runtime.source == "bundle":
            for device in {"auto", "cpu" if runtime.device == "auto" else runtime.device}:
                assert refused(bundle, name, device=device) == f"asked for {name}"
    for threads in (1, 1024, np.int64(2), None):
        assert refused(bundle, threads=threads) == "asked for onnxruntime"
    assert refused(bundle, "no such runtime", outputs=("rollout",)).startswith("unknown runtime 'no such runtime': ")
    assert refused(bundle, "openvino", outputs=("embedding", "attention")) == "asked for openvino"


@pytest.mark.parametrize("threads", [0, -1, 1025, 1.5, 1.0, np.float64(2), True, False, "2"])
def test_a_number_of_threads_that_cannot_be(bundle: Bundle, threads: Any) -> None:
    assert refused(bundle, threads=threads) == f"threads={threads}: expected a whole number from 1 to 1024, or None"


def test_numpys_number_of_threads_becomes_pythons(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "require", lambda name: None)
    monkeypatch.setattr("vitx.runtimes.onnxruntime.OnnxRuntimeSession", lambda bundle, **given: given)
    found: Any = load_session(bundle, threads=np.int64(3))  # type: ignore[arg-type]
    assert type(found["threads"]) is int


def test_a_runtime_of_runs_names_those_of_bundles(bundle: Bundle) -> None:
    names = ", ".join(name for name in RUNTIMES if not name.startswith("torch"))
    expected = "the runtime torch runs a run's checkpoint and not a bundle: load the run, or choose "
    assert refused(bundle, "torch") == expected + names


def test_a_device_that_a_runtime_does_not_have(bundle: Bundle) -> None:
    for name, own, other in (("openvino", "cpu", "cuda"), ("tensorrt", "cuda", "cpu")):
        said = f"the runtime {name} runs on {own}, and device {other} was asked for: drop one"
        assert refused(bundle, name, device=other) == said
    assert refused(bundle, device="gpu").startswith("unknown device 'gpu': did you mean cpu?")


def test_outputs_that_a_bundle_or_a_runtime_lacks(bundle: Bundle) -> None:
    assert "has no output 'rollout' (embedding, attention)" in refused(bundle, outputs=("rollout",))
    alone = "the runtime tensorrt gives logits alone, what it runs is built for them: "
    assert refused(bundle, "tensorrt", outputs=("embedding",)) == f"{alone}embedding needs onnxruntime or openvino"
    both = refused(bundle, "tensorrt", outputs=("embedding", "attention"))
    assert both == f"{alone}embedding, attention need onnxruntime or openvino"


@pytest.mark.skipif(sys.platform != "linux", reason="a file system that takes any bytes for a name")
def test_a_path_that_is_not_utf8(bundle: Bundle, tmp_path: Path) -> None:
    other = Bundle.open(shutil.copytree(bundle.path, tmp_path / "caf\udce9.vitx"))
    assert refused(other).startswith("the runtimes take no path that is not UTF-8, as ")
