"""OpenVINO IR from a bundle's graph."""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np

from vitx.core.errors import InputError
from vitx.core.files import staged_folder
from vitx.core.machine import openvino_core
from vitx.export.graph import CHECKED_BATCHES

IR_FOLDER = "openvino"


def openvino_from_onnx(onnx_path: Path, folder: Path) -> list[Path]:
    """Convert a graph to OpenVINO IR: `model.xml` and `model.bin` in `folder`, which appears whole.

    Weights keep the graph's precision: by default `save_model` would compress them to float16. What was written is
    compiled once and run on black images: there are graphs that OpenVINO converts and cannot load, or loads and cannot
    run, and on a full disk OpenVINO 2025.0 cuts its files without a word. Raises EnvironmentMissing when OpenVINO is
    not installed, InputError for a graph that it refuses, OSError when the disk is full.
    """
    core = openvino_core()
    import openvino
    from openvino.frontend import GeneralFailure, NotImplementedFailure, OpConversionFailure, OpValidationFailure

    try:
        model = openvino.convert_model(str(onnx_path))
    except (RuntimeError, GeneralFailure, NotImplementedFailure, OpConversionFailure, OpValidationFailure) as error:
        raise _refused("convert the graph", error, ", or, where it is int8 for TensorRT, try --base fp32") from None
    with staged_folder(folder) as stage:
        ir = str(stage / "model.xml")
        try:
            openvino.save_model(model, ir, compress_to_fp16=False)
        except RuntimeError as error:
            if "iostream" not in str(error):
                raise
            # A stream of C++ does not tell why it could not be written. It is no crash to search the graph for.
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder)) from None
        step = "compile the graph"
        try:
            compiled = core.compile_model(ir, "CPU", {"INFERENCE_PRECISION_HINT": "f32", "ENABLE_MMAP": False})
            for batch in CHECKED_BATCHES:
                step = f"run the graph on a batch of {batch}"
                compiled([_zeros(given, batch) for given in compiled.inputs])
        except RuntimeError as error:
            raise _refused(step, error) from None
    return sorted(folder.iterdir())


def _zeros(given: Any, batch: int) -> np.ndarray:
    """For an input of a graph, of which a part, as a reproduction tries, may have several."""
    sizes = [batch if size.is_dynamic else size.get_length() for size in given.get_partial_shape()]
    return np.zeros(sizes, given.get_element_type().to_dtype())


def _refused(step: str, error: Exception, remedy: str = "") -> InputError:
    reason = str(error).strip().rpartition("\n")[2].removeprefix("-- ")  # where it failed comes first, the reason last
    return InputError(f"OpenVINO cannot {step} ({reason}): leave --openvino and --for cpu out{remedy}")
