"""OpenVINO IR from a bundle's graph."""

import errno
import os
from pathlib import Path

from vitx.core.errors import InputError
from vitx.core.files import staged_folder
from vitx.core.machine import openvino_core

IR_FOLDER = "openvino"


def openvino_from_onnx(onnx_path: Path, folder: Path) -> list[Path]:
    """Convert a graph to OpenVINO IR: `model.xml` and `model.bin` in `folder`, which appears whole.

    Weights keep the graph's precision: by default `save_model` would compress them to float16. The model is compiled
    once, for there are graphs that OpenVINO converts and no runtime could then load. Raises EnvironmentMissing when
    OpenVINO is not installed, InputError for a graph that it refuses, OSError when the disk is full.
    """
    core = openvino_core()
    import openvino

    refused, remedy = "convert", ", or, where it is int8 for TensorRT, try --base fp32"
    try:
        model = openvino.convert_model(str(onnx_path))
        refused, remedy = "compile", ""
        core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    except RuntimeError as error:  # where it failed comes first, the reason last
        reason = str(error).strip().rpartition("\n")[2]
        raise InputError(
            f"OpenVINO cannot {refused} the graph ({reason}): leave --openvino and --for cpu out{remedy}"
        ) from None
    with staged_folder(folder) as stage:
        try:
            openvino.save_model(model, str(stage / "model.xml"), compress_to_fp16=False)
        except RuntimeError as error:
            if "iostream" not in str(error):
                raise
            # A stream of C++ does not tell why it could not be written. It is no crash to search the graph for.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from None
    return sorted(folder.iterdir())
