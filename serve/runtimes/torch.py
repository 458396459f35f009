"""PyTorch: the reference of parity and bench. The one file of the serving stage that imports torch and the models."""

from typing import Any

import torch
from torch import nn

from vitx.core.errors import EnvironmentMissing
from vitx.core.preprocess import Preprocessing, UInt8Array
from vitx.core.run import Checkpoint, RunFolder
from vitx.models import image_tensor, load_run_model
from vitx.serve.runtimes import Device, Float32Array


class TorchSession:
    """A network in evaluation mode behind the session protocol."""

    def __init__(self, model: nn.Module, preprocessing: Preprocessing, *, device: Device = "auto") -> None:
        if device == "cuda" and not torch.cuda.is_available():
            raise EnvironmentMissing("device cuda was asked for, but torch sees no GPU; choose --device cpu")
        self._device = torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")
        self._model = model.eval().to(self._device)
        self._preprocessing = preprocessing

    @torch.inference_mode()
    def infer(self, images: UInt8Array) -> Float32Array:
        """Return logits float32 (N, C) of images uint8 (N, S, S, 3)."""
        inputs = image_tensor(images, self._preprocessing.mean, self._preprocessing.std).to(self._device)
        logits: Float32Array = self._model(inputs).float().cpu().numpy()
        return logits

    def describe(self) -> dict[str, Any]:
        return {
            "runtime": "torch",
            "version": torch.__version__,
            "provider": str(self._device),
            "precision": "fp32",
            "threads": torch.get_num_threads(),
        }


def load_run_session(run: RunFolder, which: Checkpoint = "best", *, device: Device = "auto") -> TorchSession:
    """Load a run's checkpoint as the reference."""
    model, _ = load_run_model(run, which)
    return TorchSession(model, run.info.preprocessing, device=device)
