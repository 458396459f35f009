"""The network in Triton's Python backend: what `benchmarks/serve/server.py` puts into its model repository."""

from typing import Any

import numpy as np
import onnxruntime
import triton_python_backend_utils as triton  # type: ignore[import-not-found]


class TritonPythonModel:
    """One instance: a session of one thread over the graph beside this file."""

    def initialize(self, arguments: dict[str, str]) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        path = f"{arguments['model_repository']}/{arguments['model_version']}/model.onnx"
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def execute(self, requests: list[Any]) -> list[Any]:
        images = [triton.get_input_tensor_by_name(request, "images").as_numpy() for request in requests]
        logits = self._session.run(None, {"images": np.concatenate(images)})[0]
        ends = np.cumsum([len(rows) for rows in images])[:-1]
        return [triton.InferenceResponse([triton.Tensor("logits", rows)]) for rows in np.split(logits, ends)]
