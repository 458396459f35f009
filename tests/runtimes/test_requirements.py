"""The runtimes by name: what each takes, and why it cannot be used here. Packages, compilers and GPUs stand in."""

from types import SimpleNamespace
from typing import Any

import onnxruntime
import pytest

from vitx.core.errors import EnvironmentMissing, InputError
from vitx.core.machine import Gpu
from vitx.runtimes import requirements
from vitx.runtimes.requirements import RUNTIMES, reported_name, require, why_unusable

# Source, device, whether it gives further outputs, modules, extra.
TABLE = {
    "onnxruntime": ("bundle", "auto", True, (), ""),
    "onnxruntime-cpu": ("bundle", "cpu", True, (), ""),
    "onnxruntime-int8": ("bundle", "cpu", False, (), ""),
    "onnxruntime-cuda": ("bundle", "cuda", True, (), ""),
    "onnxruntime-tensorrt": ("bundle", "cuda", False, (), ""),
    "tensorrt": ("bundle", "cuda", False, ("tensorrt|tensorrt_lean", "cuda.bindings"), "trt"),
    "tensorrt-rtx": ("bundle", "cuda", False, ("tensorrt_rtx", "cuda.bindings"), "trt-rtx"),
    "openvino": ("bundle", "cpu", True, ("openvino",), "openvino"),
    "openvino-bf16": ("bundle", "cpu", True, ("openvino",), "openvino"),
    "torch": ("run", "auto", True, ("torch", "timm"), "train"),
    "torch-compile": ("run", "auto", True, ("torch", "timm"), "train"),
}
# As `vitx doctor` prints it.
RUNS = [
    "model.onnx, on a GPU where there is one",
    "model.onnx",
    "the int8 graph made by vitx export --for cpu",
    "model.onnx",
    "model.onnx, compiled by TensorRT on loading",
    "a plan made by vitx export --trt",
    "a plan made by vitx export --trt-rtx",
    "the IR made by vitx export --openvino",
    "the same, its products in bfloat16 where the processor has them",
    "a run's checkpoint",
    "a run's checkpoint, compiled on loading",
]


@pytest.fixture(autouse=True)
def _everything_is_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "local_gpus", lambda: (Gpu("A", "sm89"),))
    monkeypatch.setattr(requirements, "find_spec", lambda name: object())
    monkeypatch.setattr(requirements, "cpu_architecture", lambda: "x86_64 avx2 amx_bf16")
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    providers = ["CUDAExecutionProvider", "TensorrtExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: providers)


def test_what_each_runtime_is() -> None:
    found = {
        name: (each.source, each.device, each.outputs, each.packages, each.extra) for name, each in RUNTIMES.items()
    }
    assert found == TABLE
    for name, runtime in RUNTIMES.items():
        assert (require(name), why_unusable(name)) == (runtime, "")
    assert [each.runs for each in RUNTIMES.values()] == RUNS
    with pytest.raises(
        InputError, match=r"^unknown runtime 'tensorrtx': did you mean .*known: onnxruntime, onnxruntime-"
    ):
        require("tensorrtx")
    assert "unknown runtime 'x'" in why_unusable("x")


def test_onnx_runtime_is_one_on_a_cpu_and_on_a_gpu() -> None:
    found = {name: reported_name(name) for name in RUNTIMES}
    alike = ("onnxruntime-cpu", "onnxruntime-cuda")
    assert found == {name: "onnxruntime" if name in alike else name for name in RUNTIMES}


def test_a_gpu_is_asked_for_where_one_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "local_gpus", lambda: ())
    lacking = {name for name in RUNTIMES if "needs an NVIDIA GPU, and the driver offers none" in why_unusable(name)}
    assert lacking == {name for name, row in TABLE.items() if row[1] == "cuda"}
    with pytest.raises(EnvironmentMissing, match=r"choose onnxruntime-cpu, or a machine with one$"):
        require("tensorrt")


@pytest.mark.parametrize(("name", "row"), [(name, row) for name, row in TABLE.items() if row[3]])
def test_each_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch, name: str, row: Any) -> None:
    for package in row[3]:
        modules = package.split("|")
        monkeypatch.setattr(
            requirements, "find_spec", lambda module, gone=modules: None if module in gone else object()
        )
        words = f"the runtime {name} needs the package {' or '.join(modules)}, which is not installed: "
        assert why_unusable(name) == f"{words}pip install 'vitx[{row[4]}]'"
    monkeypatch.setattr(requirements, "find_spec", lambda module: None if module == "tensorrt" else object())
    assert why_unusable(name) == ""  # the lean runtime is enough


def test_a_module_within_a_package_that_is_missing_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(module: str) -> object:
        if "." in module:
            raise ModuleNotFoundError("No module named 'cuda'")
        return object()

    monkeypatch.setattr(requirements, "find_spec", find)
    assert why_unusable("tensorrt-rtx").startswith("the runtime tensorrt-rtx needs the package cuda.bindings, which")


@pytest.mark.parametrize(
    ("name", "provider"),
    [("onnxruntime-cuda", "CUDAExecutionProvider"), ("onnxruntime-tensorrt", "TensorrtExecutionProvider")],
)
def test_a_build_without_the_provider_is_told_how_to_be_replaced(
    monkeypatch: pytest.MonkeyPatch, name: str, provider: str
) -> None:
    kept = [each for each in onnxruntime.get_available_providers() if each != provider]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: kept)
    remedy = "pip uninstall onnxruntime, then pip install --force-reinstall --no-deps onnxruntime-gpu"
    assert why_unusable(name) == f"this ONNX Runtime was built without {provider}: {remedy}"


def test_files_of_onnx_runtime_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitx.core.machine.find_spec", lambda name: SimpleNamespace(origin=None))
    lacking = {name for name in RUNTIMES if "files of the package onnxruntime" in why_unusable(name)}
    assert lacking == {name for name in RUNTIMES if name.startswith("onnxruntime")}


@pytest.mark.parametrize(
    ("processor", "has"),
    [
        ("x86_64 avx512f avx512_bf16", True),
        ("x86_64 amx_bf16", True),
        ("aarch64 bf16", True),
        ("x86_64 avx512f amx_int8", False),
        ("x86_64", False),
    ],
)
def test_bfloat16_is_a_matter_of_the_processor(monkeypatch: pytest.MonkeyPatch, processor: str, has: bool) -> None:
    monkeypatch.setattr(requirements, "cpu_architecture", lambda: processor)
    said = (
        f"the runtime openvino-bf16 needs a processor with bfloat16 products, this one is {processor}: choose openvino"
    )
    assert why_unusable("openvino-bf16") == ("" if has else said)
    assert why_unusable("openvino") == ""


@pytest.mark.parametrize(
    ("platform", "chosen", "compiler"),
    [
        ("linux", None, "g++"),
        ("linux", "", "g++"),
        ("win32", None, "cl"),
        ("darwin", None, "clang++"),
        ("linux", "icpx", "icpx"),
    ],
)
def test_inductor_needs_its_compiler(
    monkeypatch: pytest.MonkeyPatch, platform: str, chosen: str | None, compiler: str
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    if chosen is not None:
        monkeypatch.setenv("CXX", chosen)
    monkeypatch.setattr(requirements, "sys", SimpleNamespace(platform=platform))
    asked: list[str] = []
    monkeypatch.setattr(requirements, "shutil", SimpleNamespace(which=asked.append))
    said = (
        f"the runtime torch-compile needs a C++ compiler, and '{compiler}' is not there: install it, name another one "
    )
    assert why_unusable("torch-compile") == f"{said}in CXX, or choose torch"
    assert asked == [compiler]
    assert why_unusable("torch") == ""
