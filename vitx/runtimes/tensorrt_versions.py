"""Which TensorRT goes with what: plans with their own release, ONNX Runtime's provider with the one it is linked to."""

import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from vitx.core.tensorrt_plan import MODULES, installed_library

_PROVIDER = "libonnxruntime_providers_tensorrt.so"


def provider_needs() -> int | None:
    """The major version of TensorRT whose library ONNX Runtime's provider names; None where there is no provider."""
    spec = find_spec("onnxruntime")
    folders: Sequence[str] = (spec.submodule_search_locations or ()) if spec else ()
    for library in (Path(folder) / "capi" / _PROVIDER for folder in folders):
        if library.is_file() and (found := re.search(rb"libnvinfer\.so\.(\d+)", library.read_bytes())):
            return int(found[1])
    return None


def tensorrt_report() -> dict[str, str]:
    """What each installed TensorRT serves, for `vitx doctor`."""
    needed = provider_needs()
    library = installed_library(MODULES["tensorrt"])
    provider = "" if needed is None else f"libnvinfer.so.{needed}, TensorRT {needed}"
    if library is None:
        classic = "not installed: vitx[trt] brings the newest, for plans"
        classic += f"; vitx[trt{needed}] brings {needed}, for plans and for ONNX Runtime" if provider else ""
    elif needed is None or library.version.split(".")[0] == str(needed):
        classic = f"{library.version}: for plans" + (" and for ONNX Runtime" if provider else "")
    else:
        classic = f"{library.version}: for plans, not for ONNX Runtime (vitx[trt{needed}] serves both)"
    rtx = installed_library(MODULES["tensorrt-rtx"])
    return {
        "tensorrt": classic,
        "tensorrt of onnxruntime": provider or "this ONNX Runtime has no TensorRT provider",
        "tensorrt-rtx": f"{rtx.version}: for its own plans" if rtx else "not installed: pip install 'vitx[trt-rtx]'",
    }
