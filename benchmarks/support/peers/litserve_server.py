"""The network in LitServe: two one-thread workers, batches of up to 32 within 2 ms, JSON.

python litserve_server.py MODEL.onnx PORT
"""

import sys
from typing import Any

import litserve  # type: ignore[import-not-found]
import numpy as np
import onnxruntime


class Classifier(litserve.LitAPI):  # type: ignore[misc]
    """{"image": pixels, one after the other} → {"logits": …}."""

    def setup(self, device: str) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
        self.shape = self.session.get_inputs()[0].shape[1:]

    def decode_request(self, request: dict[str, Any]) -> Any:
        return np.asarray(request["image"], dtype=np.uint8).reshape(self.shape)

    def predict(self, images: Any) -> Any:
        return self.session.run(None, {"images": np.asarray(images)})[0]

    def encode_response(self, output: Any) -> dict[str, Any]:
        return {"logits": output.tolist()}


if __name__ == "__main__":
    server = litserve.LitServer(
        Classifier(max_batch_size=32, batch_timeout=0.002), accelerator="cpu", devices=1, workers_per_device=2
    )
    server.run(
        host="127.0.0.1", port=int(sys.argv[2]), num_api_servers=1, log_level="warning", generate_client_file=False
    )
