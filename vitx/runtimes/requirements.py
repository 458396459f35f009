"""The runtimes by name, what each runs, and whether it can be used here; the check imports no runtime's library."""

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal

from vitx.core.errors import EnvironmentMissing, VitxError, unknown_name
from vitx.core.machine import AGAIN, cpu_architecture, local_gpus, require_onnxruntime
from vitx.core.options import Device


@dataclass(frozen=True)
class Runtime:
    """A runtime: `source` is what it loads, `device` where it runs ("auto": on a GPU if there is one).

    outputs: whether it gives what a bundle has beside logits.
    packages: modules it needs besides vitx's base, where "a|b" means either; `extra` is the extra that installs them.
    check: raises EnvironmentMissing for anything else that is missing.
    """

    source: Literal["bundle", "run"]
    device: Device
    runs: str
    outputs: bool = True
    packages: tuple[str, ...] = ()
    extra: str = ""
    check: Callable[[], None] = lambda: None


def find(name: str) -> Runtime:
    """Return a runtime; raise InputError for an unknown name."""
    if (runtime := RUNTIMES.get(name)) is None:
        raise unknown_name("runtime", name, RUNTIMES)
    return runtime


def require(name: str) -> Runtime:
    """Return a runtime if it can be used here.

    Raises InputError for an unknown name, EnvironmentMissing with the reason and the remedy otherwise.
    """
    runtime = find(name)
    if runtime.device == "cuda" and not local_gpus():
        raise EnvironmentMissing(
            f"the runtime {name} needs an NVIDIA GPU, and the driver offers none here: choose onnxruntime-cpu, or a "
            "machine with one"
        )
    for package in runtime.packages:
        modules = package.split("|")
        if not any(map(_importable, modules)):
            raise EnvironmentMissing(
                f"the runtime {name} needs the package {' or '.join(modules)}, which is not installed: "
                f"pip install 'vitx[{runtime.extra}]'"
            )
    runtime.check()
    return runtime


def why_unusable(name: str) -> str:
    """Why a runtime cannot be used here; empty if it can."""
    try:
        require(name)
    except VitxError as reason:
        return str(reason)
    return ""


def _importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is not installed
        return False


def _check_provider(provider: str) -> Callable[[], None]:
    def check() -> None:
        require_onnxruntime()
        import onnxruntime

        if provider not in onnxruntime.get_available_providers():
            raise EnvironmentMissing(
                f"this ONNX Runtime was built without {provider}: pip uninstall onnxruntime, then "
                f"{AGAIN} onnxruntime-gpu"
            )

    return check


def _check_bfloat16() -> None:
    if not {"avx512_bf16", "amx_bf16", "bf16"} & set(cpu_architecture().split()):
        raise EnvironmentMissing(
            f"the runtime openvino-bf16 needs a processor with bfloat16 products, this one is {cpu_architecture()}: "
            "choose openvino"
        )


def _check_compiler() -> None:
    """Raise EnvironmentMissing without a C++ compiler: Inductor calls one, on a GPU for the code around kernels."""
    names = {"win32": "cl", "darwin": "clang++"}
    compiler = os.environ.get("CXX") or names.get(sys.platform, "g++")
    if shutil.which(compiler) is None:
        raise EnvironmentMissing(
            f"the runtime torch-compile needs a C++ compiler, and '{compiler}' is not there: install it, name another "
            "one in CXX, or choose torch"
        )


RUNTIMES: Mapping[str, Runtime] = {
    "onnxruntime": Runtime("bundle", "auto", "model.onnx, on a GPU where there is one", check=require_onnxruntime),
    "onnxruntime-cpu": Runtime("bundle", "cpu", "model.onnx", check=require_onnxruntime),
    "onnxruntime-int8": Runtime(
        "bundle", "cpu", "the int8 graph made by vitx export --for cpu", outputs=False, check=require_onnxruntime
    ),
    "onnxruntime-cuda": Runtime("bundle", "cuda", "model.onnx", check=_check_provider("CUDAExecutionProvider")),
    "onnxruntime-tensorrt": Runtime(
        "bundle",
        "cuda",
        "model.onnx, compiled by TensorRT on loading",
        outputs=False,
        check=_check_provider("TensorrtExecutionProvider"),
    ),
    "tensorrt": Runtime(
        "bundle",
        "cuda",
        "a plan made by vitx export --trt",
        outputs=False,
        packages=("tensorrt|tensorrt_lean", "cuda.bindings"),
        extra="trt",
    ),
    "tensorrt-rtx": Runtime(
        "bundle",
        "cuda",
        "a plan made by vitx export --trt-rtx",
        outputs=False,
        packages=("tensorrt_rtx", "cuda.bindings"),
        extra="trt-rtx",
    ),
    "openvino": Runtime(
        "bundle", "cpu", "the IR made by vitx export --openvino", packages=("openvino",), extra="openvino"
    ),
    "openvino-bf16": Runtime(
        "bundle",
        "cpu",
        "the same, its products in bfloat16 where the processor has them",
        packages=("openvino",),
        extra="openvino",
        check=_check_bfloat16,
    ),
    "torch": Runtime("run", "auto", "a run's checkpoint", packages=("torch", "timm"), extra="train"),
    "torch-compile": Runtime(
        "run",
        "auto",
        "a run's checkpoint, compiled on loading",
        packages=("torch", "timm"),
        extra="train",
        check=_check_compiler,
    ),
}


def reported_name(runtime: str) -> str:
    """What `Session.describe` calls a runtime: ONNX Runtime is one, on a CPU and on a GPU."""
    return "onnxruntime" if runtime in ("onnxruntime-cpu", "onnxruntime-cuda") else runtime
