"""The runtimes by name, what each runs, and whether it can be used here. Nothing heavy is imported to find out."""

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from vitx.core.errors import EnvironmentMissing, VitxError, unknown_name
from vitx.runtimes.cuda import cuda_device_count


@dataclass(frozen=True)
class Runtime:
    """A runtime: `source` is what it loads, `device` where it runs ("auto": on a GPU if there is one).

    packages: importable names that it needs beyond vitx's own, of "a|b" one; `extra` is the extra that brings them.
    """

    source: Literal["bundle", "run"]
    device: Literal["auto", "cpu", "cuda"]
    runs: str
    packages: tuple[str, ...] = ()
    extra: str = ""
    check: Callable[[], None] = lambda: None


def require(name: str) -> Runtime:
    """Return a runtime that can be used here.

    Raises InputError for an unknown name, EnvironmentMissing with the reason and the remedy for one that cannot.
    """
    runtime = RUNTIMES.get(name)
    if runtime is None:
        raise unknown_name("runtime", name, RUNTIMES)
    if runtime.device == "cuda" and cuda_device_count() == 0:
        raise EnvironmentMissing(
            f"the runtime {name} needs an NVIDIA GPU, and the driver offers none here: choose onnxruntime-cpu, or a "
            "machine with one"
        )
    for package in runtime.packages:
        choices = package.split("|")
        if not any(_importable(one) for one in choices):
            raise EnvironmentMissing(
                f"the runtime {name} needs the package {' or '.join(choices)}, which is not installed: "
                f"pip install 'vitx[{runtime.extra}]'"
            )
    runtime.check()
    return runtime


def unusable(name: str) -> str:
    """Why a runtime cannot be used here; empty if it can."""
    try:
        require(name)
    except VitxError as reason:
        return str(reason)
    return ""


def _importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of a parent
        return False


def _check_provider(provider: str) -> Callable[[], None]:
    def check() -> None:
        import onnxruntime

        if provider not in onnxruntime.get_available_providers():
            raise EnvironmentMissing(
                f"this ONNX Runtime was built without {provider}: pip uninstall onnxruntime, then pip install "
                "onnxruntime-gpu"
            )

    return check


def _check_compiler() -> None:
    """Inductor writes C++ for a CPU and for the code around GPU kernels, and calls this compiler."""
    names = {"win32": "cl", "darwin": "clang++"}
    compiler = os.environ.get("CXX") or names.get(sys.platform, "g++")
    if shutil.which(compiler) is None:
        raise EnvironmentMissing(
            f"the runtime torch-compile needs a C++ compiler, and '{compiler}' is not there: install it, name another "
            "one in CXX, or choose torch"
        )


RUNTIMES: Mapping[str, Runtime] = {
    "onnxruntime": Runtime("bundle", "auto", "model.onnx, on a GPU where there is one"),
    "onnxruntime-cpu": Runtime("bundle", "cpu", "model.onnx"),
    "onnxruntime-cuda": Runtime("bundle", "cuda", "model.onnx", check=_check_provider("CUDAExecutionProvider")),
    "onnxruntime-tensorrt": Runtime(
        "bundle",
        "cuda",
        "model.onnx, compiled by TensorRT on loading",
        check=_check_provider("TensorrtExecutionProvider"),
    ),
    "tensorrt": Runtime(
        "bundle", "cuda", "a plan made by vitx export --trt", ("tensorrt|tensorrt_lean", "cuda.bindings"), "trt"
    ),
    "tensorrt-rtx": Runtime(
        "bundle", "cuda", "a plan made by vitx export --trt-rtx", ("tensorrt_rtx", "cuda.bindings"), "trt-rtx"
    ),
    "openvino": Runtime("bundle", "cpu", "the IR made by vitx export --openvino", ("openvino",), "openvino"),
    "torch": Runtime("run", "auto", "a run's checkpoint", ("torch", "timm"), "train"),
    "torch-compile": Runtime(
        "run", "auto", "a run's checkpoint, compiled on loading", ("torch", "timm"), "train", _check_compiler
    ),
}
