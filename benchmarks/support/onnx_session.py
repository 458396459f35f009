"""A session of ONNX Runtime on the processor, with nothing of vitx around it."""

from pathlib import Path
from typing import Any

import onnxruntime


def cpu_session(graph: Path | bytes, threads: int = 1) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    source = graph if isinstance(graph, bytes) else str(graph)
    return onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
