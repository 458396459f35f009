"""What ONNX Runtime is asked for, on a CPU and on GPUs that are not here: the library's session stands in."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as native

from bundle_fixture import IMAGE_SIZE, LABELS, write_bundle
from vitx.core.bundle import Bundle
from vitx.core.errors import EnvironmentMissing, InputError
from vitx.core.machine import Gpu
from vitx.runtimes import load_session
from vitx.runtimes import onnxruntime as module
from vitx.runtimes.onnxruntime import OnnxRuntimeSession, tensorrt_options

CPU: tuple[str, dict[str, str]] = ("CPUExecutionProvider", {})
CUDA, TENSORRT = ("CUDAExecutionProvider", {"use_tf32": "0"}), "TensorrtExecutionProvider"
EXACT, QDQ, ASSIGNED = (
    "session.x64quantprecision",
    "session.disable_quant_qdq",
    "session.record_ep_graph_assignment_info",
)


class Loaded:
    """Stands for `onnxruntime.InferenceSession`: notes what it is made with, computes zeros."""

    made: "list[Loaded]"
    used: tuple[str, ...] = ()  # the providers that it says it uses; by default those that were asked for
    elsewhere: tuple[str, ...] = ()  # operators that it gives to the CPU
    error: Exception | None = None
    inputs: tuple[str, ...] = ("images",)
    outputs: tuple[str, ...] = ("logits",)

    def __init__(
        self, path: str, options: Any, providers: Any, enable_fallback: int, disabled_optimizers: list[str] | None
    ) -> None:
        if self.error is not None:
            raise self.error
        self.path, self.options, self.providers, self.fallback = path, options, providers, enable_fallback
        self.disabled = disabled_optimizers
        self.batches: list[int] = []
        self.made.append(self)

    def entry(self, key: str) -> str:
        try:
            return str(self.options.get_session_config_entry(key))
        except RuntimeError:  # it was not set
            return ""

    def get_providers(self) -> list[str]:
        return [*(self.used or [name for name, _ in self.providers])]

    def get_provider_graph_assignment_info(self) -> list[Any]:
        nodes = [SimpleNamespace(op_type=name) for name in (*self.elsewhere, "Shape")]
        first, rest = self.providers[0][0], [SimpleNamespace(op_type="MatMul")]
        parts = [("CPUExecutionProvider", nodes), (first, rest)]
        return [SimpleNamespace(ep_name=name, get_nodes=lambda nodes=nodes: nodes) for name, nodes in parts]

    def get_inputs(self) -> list[Any]:
        return [SimpleNamespace(name=name) for name in self.inputs]

    def get_outputs(self) -> list[Any]:
        return [SimpleNamespace(name=name) for name in self.outputs]

    def run(self, names: list[str], inputs: dict[str, Any]) -> list[Any]:
        assert (names, [*inputs]) == (["logits"], ["images"])
        self.batches.append(len(inputs["images"]))
        return [np.full((len(inputs["images"]), len(LABELS)), inputs["images"][0, 0, 0, 0], np.float32)]


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> type[Loaded]:
    class Fresh(Loaded):
        made: "list[Loaded]" = []  # noqa: RUF012 - a list of this test's own

    monkeypatch.setattr(onnxruntime, "InferenceSession", Fresh)
    monkeypatch.setattr(module, "local_gpus", lambda: (Gpu("A", "sm89"),))
    return Fresh


@pytest.fixture
def preloaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which libraries were loaded ahead: those that pip installed, and TensorRT."""
    asked: list[str] = []
    monkeypatch.setattr(onnxruntime, "preload_dlls", lambda: asked.append("libraries"), raising=False)
    monkeypatch.setattr(module, "importlib", SimpleNamespace(import_module=asked.append))
    return asked


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return write_bundle(tmp_path / "tiny.vitx")


def of_precision(bundle: Bundle, precision: str) -> Bundle:
    return Bundle(bundle.path, bundle.manifest.model_copy(update={"precision": precision}))


@pytest.mark.parametrize("exact", [True, False])
def test_on_a_cpu(
    loaded: type[Loaded], preloaded: list[str], bundle: Bundle, monkeypatch: pytest.MonkeyPatch, exact: bool
) -> None:
    monkeypatch.setattr("vitx.core.machine.sums_int8_exactly", lambda: exact)
    monkeypatch.setattr("vitx.core.machine.usable_cores", lambda: os.cpu_count())
    session = OnnxRuntimeSession(bundle, device="cpu", threads=3)
    other = OnnxRuntimeSession(of_precision(bundle, "fp8"), device="cpu", graph=bundle.path / "other.onnx")
    first, second = loaded.made
    assert (first.providers, first.fallback, first.path) == ([CPU], 0, str(bundle.model_path))
    assert (first.options.intra_op_num_threads, first.options.log_severity_level) == (3, 3)
    assert [first.entry(key) for key in (EXACT, QDQ, ASSIGNED)] == ["" if exact else "1", "", ""]
    unasked = onnxruntime.SessionOptions().intra_op_num_threads
    assert (second.options.intra_op_num_threads, second.entry(QDQ)) == (unasked, "1")
    assert second.path == str(bundle.path / "other.onnx")
    assert preloaded == []
    about = {"runtime": "onnxruntime", "version": onnxruntime.__version__, "provider": "CPUExecutionProvider"}
    assert session.describe() == {**about, "precision": "fp32", "threads": 3}
    assert other.describe() == {**about, "precision": "fp8", "threads": "all cores", "graph": "other.onnx"}


def test_where_cores_are_limited_as_many_threads_are_asked_for(
    loaded: type[Loaded], bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ONNX Runtime itself starts a thread for each core of the machine, and binds it to one that may be forbidden."""
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr("vitx.core.machine.usable_cores", lambda: 2)
    session = OnnxRuntimeSession(bundle, device="cpu")
    assert (loaded.made[0].options.intra_op_num_threads, session.describe()["threads"]) == (2, 2)


@pytest.mark.parametrize("base", ["fp32", "fp16", "bf16"])
def test_8_bits_beside_a_half_type_run_as_they_stand(loaded: type[Loaded], bundle: Bundle, base: str) -> None:
    of_base = Bundle(bundle.path, bundle.manifest.model_copy(update={"precision": "int8", "base": base}))
    OnnxRuntimeSession(of_base, device="cpu")
    assert loaded.made[0].entry(QDQ) == ("" if base == "fp32" else "1")
    assert (loaded.made[0].disabled is None) == (base == "fp32")


def test_on_a_gpu_float32_is_no_tf32(
    loaded: type[Loaded], preloaded: list[str], bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitx.core.machine.sums_int8_exactly", lambda: False)
    session = OnnxRuntimeSession(bundle, device="cuda")
    (found,) = loaded.made
    assert (found.providers, found.fallback) == ([CUDA, CPU], 0)
    assert [found.entry(key) for key in (EXACT, QDQ, ASSIGNED)] == ["", "", "1"]
    assert (preloaded, session.provider, session.profiles) == (["libraries"], "CUDAExecutionProvider", ())
    session.infer(np.zeros((300, IMAGE_SIZE, IMAGE_SIZE, 3), np.uint8))
    assert found.batches == [300]


def test_compiled_by_tensorrt(
    loaded: type[Loaded], preloaded: list[str], bundle: Bundle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("NVIDIA_TF32_OVERRIDE", raising=False)
    cache = tmp_path / "a" / "cache"
    half = OnnxRuntimeSession(of_precision(bundle, "fp16"), tensorrt=True, engine_cache=cache)
    assert "NVIDIA_TF32_OVERRIDE" not in os.environ
    session = OnnxRuntimeSession(bundle, tensorrt=True)
    assert os.environ["NVIDIA_TF32_OVERRIDE"] == "0"
    kept, temporary = loaded.made
    assert kept.providers == [tensorrt_options("images", (16, 16, 3), "fp16", cache), CUDA, CPU]
    folder = Path(temporary.providers[0][1]["trt_engine_cache_path"])
    assert temporary.providers[0] == tensorrt_options("images", (16, 16, 3), "fp32", folder)
    assert (cache.is_dir(), folder.is_dir(), preloaded) == (True, True, ["libraries", "tensorrt"] * 2)
    images = np.arange(300, dtype=np.uint8)[:, None, None, None] * np.ones((1, IMAGE_SIZE, IMAGE_SIZE, 3), np.uint8)
    assert [*session.infer(images)[:, 0]] == [0] * 128 + [128] * 128 + [0] * 44
    session.infer(images[:128])
    assert temporary.batches == [128, 128, 44, 128]
    assert session.describe()["profiles"] == ["1..128 (best at 32)"]
    for each in (half, session):
        each.close()
    assert (cache.is_dir(), folder.exists()) == (True, False)
    with pytest.raises(
        InputError, match="TensorRT provider takes no fp8 graph: run its plan with the runtime tensorrt"
    ):
        OnnxRuntimeSession(of_precision(bundle, "fp8"), tensorrt=True, engine_cache=cache)
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")  # the user's own choice
    OnnxRuntimeSession(bundle, tensorrt=True).close()
    assert os.environ["NVIDIA_TF32_OVERRIDE"] == "1"


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "int8"])
def test_every_option_of_tensorrt(precision: str) -> None:
    shapes = {"min": 1, "opt": 32, "max": 128}
    assert tensorrt_options("x", (2, 4, 3), precision, Path("/cache")) == (
        TENSORRT,
        {
            "trt_engine_cache_enable": "1",
            "trt_engine_cache_path": "/cache",
            "trt_timing_cache_enable": "1",
            "trt_timing_cache_path": "/cache",
            **{f"trt_profile_{kind}_shapes": f"x:{batch}x2x4x3" for kind, batch in shapes.items()},
            **({} if precision == "fp32" else {f"trt_{precision}_enable": "1"}),
        },
    )


@pytest.mark.parametrize(
    ("tensorrt", "remedy"),
    [
        (
            False,
            r"instead of CUDAExecutionProvider: install the CUDA and cuDNN libraries .*"
            r" \(pip install 'onnxruntime-gpu\[cuda,cudnn\]'\), or choose --device cpu$",
        ),
        (True, r"instead of TensorrtExecutionProvider: install the TensorRT 10 libraries .* choose onnxruntime-cuda"),
    ],
)
@pytest.mark.usefixtures("preloaded")
def test_another_provider_than_asked_for(
    loaded: type[Loaded], bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensorrt: bool, remedy: str
) -> None:
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    loaded.used = ("CPUExecutionProvider",)
    with pytest.raises(EnvironmentMissing, match=f"would use CPUExecutionProvider {remedy}"):
        OnnxRuntimeSession(bundle, device="cuda", tensorrt=tensorrt, engine_cache=tmp_path)
    loaded.used, loaded.elsewhere = (), ("Softmax", "Conv", "Gather", "Conv")
    with pytest.raises(
        EnvironmentMissing, match="does not compute all of the graph of 'tiny', Conv, Softmax would run"
    ):
        OnnxRuntimeSession(bundle, device="cuda", tensorrt=tensorrt, engine_cache=tmp_path)
    compute = ("Attention", "Conv", "Gemm", "LayerNormalization", "MatMul", "MultiHeadAttention", "Softmax")
    loaded.elsewhere = compute
    with pytest.raises(
        EnvironmentMissing, match=f"of the graph of 'tiny', {', '.join(compute)} would run elsewhere: ch"
    ):
        OnnxRuntimeSession(bundle, device="cuda", tensorrt=tensorrt, engine_cache=tmp_path)
    loaded.elsewhere = ("Gather",)  # arithmetic of shapes
    OnnxRuntimeSession(bundle, device="cuda", tensorrt=tensorrt, engine_cache=tmp_path)


@pytest.mark.parametrize("error", [RuntimeError("\n no cudnn \nmore"), ValueError("no cudnn")])
@pytest.mark.usefixtures("preloaded")
def test_a_provider_whose_libraries_are_missing(loaded: type[Loaded], bundle: Bundle, error: Exception) -> None:
    loaded.error = error
    with pytest.raises(EnvironmentMissing, match=r"^ONNX Runtime cannot use CUDAExecutionProvider: no cudnn$"):
        OnnxRuntimeSession(bundle, device="cuda")


@pytest.mark.parametrize(
    ("inputs", "outputs", "message"),
    [
        (("pixels", "mask"), ("logits",), "the manifest names the input 'images', but the graph has pixels, mask"),
        (("images",), ("scores", "boxes"), "the manifest names the output 'logits', but the graph has scores, boxes"),
        (("images", "mask"), ("logits",), "the graph has the inputs images, mask: expected images alone"),
    ],
)
def test_names_that_the_manifest_does_not_have(
    loaded: type[Loaded], bundle: Bundle, inputs: tuple[str, ...], outputs: tuple[str, ...], message: str
) -> None:
    loaded.inputs, loaded.outputs = inputs, outputs
    with pytest.raises(InputError, match=f"^{message}$"):
        OnnxRuntimeSession(bundle, device="cpu")


def test_further_outputs_are_looked_for_and_described(loaded: type[Loaded], bundle: Bundle) -> None:
    loaded.outputs = ("logits", "outputs/embedding")
    session = OnnxRuntimeSession(bundle, device="cpu", outputs=("embedding",), parts=(b"",))
    assert session.describe()["outputs"] == ["embedding"]
    loaded.outputs = ("logits",)
    with pytest.raises(InputError, match=r"the output 'outputs/embedding', but the graph has logits$"):
        OnnxRuntimeSession(bundle, device="cpu", outputs=("embedding",), parts=(b"",))


@pytest.mark.usefixtures("preloaded")
def test_bf16_that_a_cpu_cannot_load(loaded: type[Loaded], bundle: Bundle) -> None:
    loaded.error = native.NotImplemented("\n no kernel\nmore")
    message = r"^'tiny' is a bf16 bundle, and ONNX Runtime has no bf16 kernels for a CPU \(no kernel\): run the fp32"
    message += r" or fp16 bundle on this machine, this one with the runtime openvino \(`vitx export --openvino`\), or"
    half_base = Bundle(bundle.path, bundle.manifest.model_copy(update={"precision": "int8", "base": "bf16"}))
    for unknown in (of_precision(bundle, "bf16"), half_base):
        with pytest.raises(EnvironmentMissing, match=message):
            OnnxRuntimeSession(unknown, device="cpu")
        with pytest.raises(InputError, match="ONNX Runtime cannot load"):
            OnnxRuntimeSession(unknown, device="cuda")
    with pytest.raises(InputError, match="ONNX Runtime cannot load"):
        OnnxRuntimeSession(bundle, device="cpu")


@pytest.mark.usefixtures("preloaded")
def test_auto_is_a_gpu_where_there_is_one_and_a_build_for_it(
    loaded: type[Loaded], bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    for gpus, built, expected in ((1, True, CUDA), (1, False, CPU), (0, True, CPU), (0, False, CPU)):
        monkeypatch.setattr(module, "local_gpus", lambda gpus=gpus: (Gpu("A", "sm89"),) * gpus)
        names = [name for name, _ in ((CUDA, CPU) if built else (CPU,))]
        monkeypatch.setattr(onnxruntime, "get_available_providers", lambda names=names: names)
        OnnxRuntimeSession(bundle)
        assert loaded.made[-1].providers[0] == expected
        OnnxRuntimeSession(bundle, device="cpu")
        assert loaded.made[-1].providers == [CPU]


@pytest.mark.parametrize(
    ("runtime", "device", "place", "expected"),
    [
        ("onnxruntime", "auto", "onnxruntime.OnnxRuntimeSession", {"device": "auto", "threads": 2, "outputs": ()}),
        ("onnxruntime", "cuda", "onnxruntime.OnnxRuntimeSession", {"device": "cuda", "threads": 2, "outputs": ()}),
        ("onnxruntime-cpu", "auto", "onnxruntime.OnnxRuntimeSession", {"device": "cpu", "threads": 2, "outputs": ()}),
        ("onnxruntime-cuda", "cuda", "onnxruntime.OnnxRuntimeSession", {"device": "cuda", "threads": 2, "outputs": ()}),
        (
            *("onnxruntime-tensorrt", "auto", "onnxruntime.OnnxRuntimeSession"),
            {"device": "cuda", "threads": 2, "tensorrt": True, "engine_cache": Path("cache")},
        ),
        ("onnxruntime-int8", "cpu", "onnxruntime.OnnxRuntimeSession", {"device": "cpu", "threads": 2, "int8": True}),
        ("openvino", "cpu", "openvino.OpenVinoSession", {"threads": 2, "bf16": False, "outputs": ()}),
        ("openvino-bf16", "auto", "openvino.OpenVinoSession", {"threads": 2, "bf16": True, "outputs": ()}),
        ("tensorrt", "cuda", "tensorrt.TensorRTSession", {}),
        ("tensorrt-rtx", "auto", "tensorrt.TensorRTSession", {}),
    ],
)
def test_a_name_is_loaded_by_its_session(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, runtime: str, device: str, place: str, expected: dict[str, Any]
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("vitx.runtimes.load.require", lambda name: asked.append(name))
    monkeypatch.setattr(f"vitx.runtimes.{place}", lambda *a, **o: (a, o))
    found: Any = load_session(bundle, runtime, device=device, threads=2, engine_cache=Path("cache"))
    flavor = (runtime,) if runtime.startswith("tensorrt") else ()
    assert (asked, found) == ([runtime], ((bundle, *flavor), expected))


def test_nothing_is_reported_to_the_maker_of_the_library(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    environment |= {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-c", "import vitx.runtimes.onnxruntime"], env=environment, check=True)
    assert [*tmp_path.rglob("*")] == []  # where it reports, it keeps an id of the machine, and what is not sent yet
