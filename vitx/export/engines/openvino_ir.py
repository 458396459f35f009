"""OpenVINO IR from a bundle's graph."""

import errno
import os
from pathlib import Path

from vitx.core.errors import missing_package
from vitx.core.files import staged_folder

IR_FOLDER = "openvino"


def openvino_from_onnx(onnx_path: Path, folder: Path) -> list[Path]:
    """Convert a graph to OpenVINO IR: `model.xml` and `model.bin` in `folder`, which appears whole.

    Weights keep the graph's precision: by default `save_model` would compress them to float16. Raises
    EnvironmentMissing when OpenVINO is not installed, OSError when the disk is full.
    """
    try:
        import openvino
    except ModuleNotFoundError:
        raise missing_package("openvino", "openvino") from None
    model = openvino.convert_model(str(onnx_path))
    with staged_folder(folder) as stage:
        try:
            openvino.save_model(model, str(stage / "model.xml"), compress_to_fp16=False)
        except RuntimeError as error:
            if "iostream" not in str(error):
                raise
            # A stream of C++ does not tell why it could not be written. It is no crash to search the graph for.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from None
    return sorted(folder.iterdir())
