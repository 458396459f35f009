"""What OpenVINO and PyTorch are asked for: precision, threads, requests, device; the libraries' objects stand in."""

import os
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from bundle_fixture import IMAGE_SIZE, PREPROCESSING, with_embedding, write_bundle
from run_fixture import ColourMean, write_run
from vitx.core.bundle import Bundle, FileEntry
from vitx.core.errors import CheckFailed, EnvironmentMissing, InputError
from vitx.runtimes import SessionClosed
from vitx.runtimes import openvino as openvino_runtime
from vitx.runtimes import torch as torch_runtime
from vitx.runtimes.openvino import IR, OpenVinoSession
from vitx.runtimes.torch import TorchSession, checkpoint_name, load_run

IMAGES = np.arange(2 * IMAGE_SIZE**2 * 3, dtype=np.uint8).reshape(2, IMAGE_SIZE, IMAGE_SIZE, 3)


class Model:
    """Stands for OpenVINO's core, model and request at once; its logits say which request computed them."""

    def __init__(self) -> None:
        self.compiled: list[Any] = []
        self.precision, self.requests = "bf16", 0
        self.outputs = [SimpleNamespace(get_names=lambda: {"logits"})]
        self.error: Exception | None = None

    def read_model(self, graph: Any) -> bytes:
        content: bytes = graph.read()
        return content

    def compile_model(self, *arguments: Any) -> "Model":
        self.compiled.append(arguments)
        if self.error is not None:
            raise self.error
        return self

    def get_property(self, name: str) -> Any:
        assert name == "INFERENCE_PRECISION_HINT"
        return SimpleNamespace(get_type_name=lambda: self.precision)

    def create_infer_request(self) -> Any:
        self.requests += 1
        number = self.requests

        def infer(inputs: dict[str, Any]) -> dict[str, Any]:
            assert [*inputs] == ["images"]
            if self.error is not None:
                raise self.error
            logits = np.full((len(inputs["images"]), 4), number, np.float32)
            return {"outputs/embedding": -logits[:, :2], "logits": logits}

        return SimpleNamespace(infer=infer)


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Model:
    pytest.importorskip("openvino", reason="an optional target")
    model = Model()
    monkeypatch.setattr(openvino_runtime, "openvino_core", lambda: model)
    return model


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    bundle = write_bundle(tmp_path / "tiny.vitx")
    bundle.manifest.files[IR] = FileEntry(sha256="", size=0)
    return bundle


def test_openvino_computes_in_float32_unless_bfloat16_is_asked_for(
    core: Model, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitx.core.machine.usable_cores", lambda: os.cpu_count())
    plain, three = OpenVinoSession(bundle), OpenVinoSession(bundle, threads=3)
    low = OpenVinoSession(bundle, threads=1, bf16=True)
    path, hint = str(bundle.path / IR), {"PERFORMANCE_HINT": "LATENCY", "ENABLE_MMAP": False}
    unbound = {"ENABLE_CPU_PINNING": False}
    assert core.compiled == [
        (path, "CPU", {"INFERENCE_PRECISION_HINT": "f32", **hint}),
        (path, "CPU", {"INFERENCE_PRECISION_HINT": "f32", **hint, "INFERENCE_NUM_THREADS": 3, **unbound}),
        (path, "CPU", {"INFERENCE_PRECISION_HINT": "bf16", **hint, "INFERENCE_NUM_THREADS": 1, **unbound}),
    ]
    about = {"version": version("openvino"), "provider": "CPU"}
    assert plain.describe() == {"runtime": "openvino", **about, "precision": "fp32", "threads": "all cores"}
    assert three.describe()["threads"] == 3
    assert low.describe() == {"runtime": "openvino-bf16", **about, "precision": "bf16", "threads": 1}
    assert plain.artefacts == ("openvino/model.xml", "openvino/model.bin")


def test_where_cores_are_limited_openvino_takes_no_more(
    core: Model, bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr("vitx.core.machine.usable_cores", lambda: 2)
    assert OpenVinoSession(bundle).describe()["threads"] == core.compiled[0][2]["INFERENCE_NUM_THREADS"] == 2


def test_a_processor_without_bfloat16_is_said(core: Model, bundle: Bundle) -> None:
    core.precision = "f32"
    OpenVinoSession(bundle)
    with pytest.raises(
        EnvironmentMissing, match="no bfloat16 products, OpenVINO would take f32: choose the runtime op"
    ):
        OpenVinoSession(bundle, bf16=True)
    core.error = RuntimeError("no IR")
    with pytest.raises(InputError, match=r"OpenVINO cannot load .*model\.xml: no IR"):
        OpenVinoSession(bundle)


def test_an_idle_request_is_taken_and_a_failed_one_is_not(core: Model, bundle: Bundle) -> None:
    session = OpenVinoSession(bundle)
    assert [session.infer(IMAGES)[0, 0] for _ in range(3)] == [1, 1, 1]
    core.error = RuntimeError("no memory")
    with pytest.raises(CheckFailed, match="the IR of 'tiny' fails on a batch of 2: no memory"):
        session.infer(IMAGES)
    core.error = None
    assert (session.infer(IMAGES)[0, 0], core.requests) == (2, 2)
    with pytest.raises(InputError, match=r"expected uint8 \(N, 16, 16, 3\)"):
        session.infer(IMAGES[0])


def test_further_outputs_are_read_from_the_graph_and_their_parts(core: Model, tmp_path: Path) -> None:
    bundle = with_embedding(write_bundle(tmp_path / "tiny.vitx"))
    core.outputs.append(SimpleNamespace(get_names=lambda: {"outputs/embedding"}))
    session = OpenVinoSession(bundle, outputs=("embedding",))
    assert core.compiled[0][0] == bundle.graph_bytes(("embedding",))
    assert session.artefacts == ("model.onnx", "outputs/embedding.onnx")
    assert (session.outputs, session.describe()["outputs"]) == (("embedding",), ["embedding"])
    found = session.infer_outputs(IMAGES)
    assert [(name, values.tolist()) for name, values in found.items()] == [
        ("logits", [[1.0] * 4] * 2),
        ("embedding", [[-1.0] * 2] * 2),
    ]
    assert session.infer(IMAGES).tolist() == [[1.0] * 4] * 2
    core.error = RuntimeError("no memory")
    with pytest.raises(CheckFailed, match=r"^the graph of 'tiny' fails on a batch of 2: no memory$"):
        session.infer(IMAGES)
    with pytest.raises(InputError, match=r"^OpenVINO cannot load .*model\.onnx with embedding: no memory$"):
        OpenVinoSession(bundle, outputs=("embedding",))
    core.error = None
    core.outputs.pop()
    with pytest.raises(
        InputError, match=r"^the manifest names the output 'outputs/embedding', but the graph has logits$"
    ):
        OpenVinoSession(bundle, outputs=("embedding",))
    session.close()
    with pytest.raises(SessionClosed):
        session.infer(IMAGES)
    assert not {"_model", "_idle"} & vars(session).keys()


def test_without_an_ir_openvino_says_how_to_make_one(core: Model, tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match="has no OpenVINO IR: export it again with --openvino, or choose onnxruntime-cpu"
    ):
        OpenVinoSession(write_bundle(tmp_path / "bare.vitx"))
    assert core.compiled == []


def exact(images: Any) -> Any:
    pixels = (images.astype(np.float64) / 255 - PREPROCESSING.mean) / PREPROCESSING.std
    return pixels.mean(axis=(1, 2))


def test_a_network_is_run_in_evaluation_mode_as_it_was_normalised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout of everything would give zeros."""
    network: Any = nn.Sequential(nn.Dropout(1.0), ColourMean(4)).train()
    weight, bias = (value.detach().double().numpy() for value in (network[1].head.weight, network[1].head.bias))
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    session = TorchSession(network, PREPROCESSING, threads=5)
    assert (threads, network.training, session.network() is network) == ([5], False, True)
    expected = exact(IMAGES) @ weight.T + bias
    with torch.autocast("cpu", torch.bfloat16):  # a notebook's
        np.testing.assert_allclose(session.infer(IMAGES), expected, atol=1e-5)
    np.testing.assert_allclose(session.infer(IMAGES[::-1]), expected[::-1], atol=1e-5)
    np.testing.assert_allclose(session.infer_float64(IMAGES)["logits"], expected, atol=1e-12)
    assert network[1].head.weight.dtype == torch.float32
    mean, std = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)
    other = session.with_normalization(mean, std)
    assert len(threads) == 1
    again = ((IMAGES / 255 - mean) / std).mean(axis=(1, 2)) @ weight.T + bias
    np.testing.assert_allclose(other.infer(IMAGES), again, atol=1e-5)
    assert session.describe() == {
        "runtime": "torch",
        "version": torch.__version__,
        "provider": "cpu",
        "precision": "fp32",
        "threads": torch.get_num_threads(),
    }


@pytest.mark.parametrize("shape", [(0, 16, 16, 3), (1, 8, 8, 3), (16, 16, 3), (1, 3, 16, 16)])
def test_a_network_takes_images_alone(shape: tuple[int, ...]) -> None:
    """It had answered for images of another size, of another type, and for none at all."""
    session = TorchSession(ColourMean(4), PREPROCESSING, device="cpu")
    for images in (np.zeros(shape, np.uint8), np.zeros((1, 16, 16, 3), np.float32), np.zeros((1, 16, 16, 3), np.int64)):
        with pytest.raises(InputError, match=r"^images are .*: expected uint8 \(N, 16, 16, 3\), at least one image$"):
            session.infer(images)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, torch.AcceleratorError])
def test_a_gpu_that_fails_is_one_error(kind: type[Exception]) -> None:
    class Failing(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            raise kind("CUDA out of memory. Tried to allocate 9 GiB\nmore")

    session = TorchSession(Failing(), PREPROCESSING, device="cpu")
    with pytest.raises(CheckFailed, match=r"^the network fails on cpu on a batch of 2: CUDA out of memory.* 9 GiB$"):
        session.infer(IMAGES)


def test_a_network_is_compiled_while_it_loads_and_the_callers_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for a batch of one and once for others: torch specialises on a size of one."""
    network, batches = ColourMean(4), []

    class Compiled(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            batches.append(len(images))
            logits: torch.Tensor = network(images) + 1
            return logits

    asked: list[Any] = []

    def compile_network(module: nn.Module, **given: object) -> nn.Module:
        asked.append((module, given))
        return Compiled()

    monkeypatch.setattr(torch_runtime, "require", asked.append)
    monkeypatch.setattr(torch, "compile", compile_network)
    session = TorchSession(network, PREPROCESSING, device="cpu", compiled=True)
    assert (asked, batches) == (["torch-compile", (network, {"dynamic": True})], [2, 1])
    np.testing.assert_allclose(
        session.infer(IMAGES), TorchSession(network, PREPROCESSING, device="cpu").infer(IMAGES) + 1, rtol=1e-5
    )
    assert (session.network(), session.describe()["runtime"]) == (network, "torch-compile")


def test_a_gpu_that_torch_does_not_see_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        EnvironmentMissing, match=r"^device cuda was asked for, but torch sees no GPU; choose --device cpu$"
    ):
        TorchSession(ColourMean(4), PREPROCESSING, device="cuda")
    assert TorchSession(ColourMean(4), PREPROCESSING).describe()["provider"] == "cpu"


def test_operations_are_of_one_image_or_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    session = TorchSession(nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 4)), PREPROCESSING, device="cpu")
    assert session.flops() == 2 * 3 * 16 * 16 * 4
    convolution = TorchSession(nn.Sequential(nn.Conv2d(3, 4, 16), nn.Flatten()), PREPROCESSING, device="cpu")
    torch.set_default_dtype(torch.float64)  # a notebook's
    try:
        assert convolution.flops() == 2 * 3 * 16 * 16 * 4
    finally:
        torch.set_default_dtype(torch.float32)

    def refuse(*given: Any) -> int:
        raise InputError("no formula")

    monkeypatch.setattr(torch_runtime, "count_flops", refuse)
    assert session.flops() is None


def test_a_network_on_a_gpu_is_copied_for_who_asks_for_it() -> None:
    session = TorchSession(ColourMean(4), PREPROCESSING, device="cpu")
    session._device = torch.device("cuda")
    assert session.network() is not session._network


def test_convolutions_of_a_gpu_are_no_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    session = TorchSession(ColourMean(4), PREPROCESSING, device="cpu")
    flags: list[Any] = []
    within = nullcontext()

    def cudnn_flags(**given: bool) -> Any:
        flags.append(given)
        return within

    monkeypatch.setattr(torch.backends.cudnn, "flags", cudnn_flags)
    session._full_precision()
    assert flags == []
    session._device = torch.device("cuda")
    assert session._full_precision() is within
    assert flags == [{"enabled": True, "allow_tf32": False}]


def test_a_checkpoint_is_loaded_with_the_digest_of_its_averaged_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_run(tmp_path / "run", "digits", bias_change=1.0)
    digests = run.checkpoint("best")[1].sha256
    session, digest = load_run(run, "last", device="cpu", threads=None, compiled=False)
    assert digest == digests["ema.safetensors"] != digests["model.safetensors"]
    asked: list[str] = []
    state = SimpleNamespace(sha256={"model.safetensors": "of the model", "optimizer.safetensors": "other"})

    def load(_run: Any, which: str) -> tuple[Any, Any]:
        asked.append(which)
        return ColourMean(4), state

    monkeypatch.setattr(torch_runtime, "load_run_model", load)
    session, digest = load_run(run, "last", device="cpu", threads=None, compiled=False)
    assert (digest, asked, session.describe()["runtime"]) == ("of the model", ["last"], "torch")
    assert [checkpoint_name(name) for name in ("best", "last")] == ["best", "last"]
