"""OpenVINO IR from a bundle's graph."""

import errno
import os
from pathlib import Path

from vitx.core.errors import InputError, missing_package
from vitx.core.files import staged_folder

IR_FOLDER = "openvino"


def openvino_from_onnx(onnx_path: Path, folder: Path) -> list[Path]:
    """Convert a graph to OpenVINO IR: `model.xml` and `model.bin` in `folder`, which appears whole.

    Weights keep the graph's precision: by default `save_model` would compress them to float16. Raises
    EnvironmentMissing when OpenVINO is not installed, InputError for a graph that it refuses, OSError when the disk is
    full.
    """
    try:
        import openvino
    except ModuleNotFoundError:
        raise missing_package("openvino", "openvino") from None
    try:
        model = openvino.convert_model(str(onnx_path))
    except RuntimeError as error:  # where it failed comes first, the reason last
        reason = str(error).strip().rpartition("\n")[2]
        raise InputError(
            f"OpenVINO cannot convert the graph ({reason}): leave --openvino and --for cpu out, or, where it is int8 "
            "for TensorRT, add --base fp32"
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
