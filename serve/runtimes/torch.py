"""PyTorch: the reference of parity and bench. The one file of the serving stage that imports torch and the models."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from vitx.core.errors import EnvironmentMissing, unknown_name
from vitx.core.preprocess import Preprocessing, UInt8Array
from vitx.core.run import Checkpoint, RunFolder
from vitx.models import image_tensor, load_run_model
from vitx.serve.runtimes import Device, Float32Array, device_name


class TorchSession:
    """A network in evaluation mode behind the session protocol, in true float32.

    `threads` sets torch's threads for the whole process, because torch knows no others.
    """

    def __init__(
        self, model: nn.Module, preprocessing: Preprocessing, *, device: Device = "auto", threads: int | None = None
    ) -> None:
        if device == "cuda" and not torch.cuda.is_available():
            raise EnvironmentMissing("device cuda was asked for, but torch sees no GPU; choose --device cpu")
        if threads is not None:
            torch.set_num_threads(threads)
        self._device = torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")
        self._model = model.eval().to(self._device)
        self._preprocessing = preprocessing

    @torch.inference_mode()
    def infer(self, images: UInt8Array) -> Float32Array:
        """Return logits float32 (N, C) of images uint8 (N, S, S, 3)."""
        # torch takes no array with negative strides, such as a reversed batch.
        inputs = image_tensor(np.ascontiguousarray(images), self._preprocessing.mean, self._preprocessing.std).to(
            self._device
        )
        with self._full_precision():
            logits: Float32Array = self._model(inputs).float().cpu().numpy()
        return logits

    def _full_precision(self) -> AbstractContextManager[None]:
        # cuDNN convolves in TF32 unless told otherwise; a reference must not.
        if self._device.type == "cuda":
            return cast(AbstractContextManager[None], torch.backends.cudnn.flags(enabled=True, allow_tf32=False))
        return nullcontext()

    def describe(self) -> dict[str, Any]:
        return {
            "runtime": "torch",
            "version": torch.__version__,
            "provider": str(self._device),
            "precision": "fp32",
            "threads": torch.get_num_threads(),
        }


def load_run_session(
    run: RunFolder, which: str = "best", *, device: str = "auto", threads: int | None = None
) -> TorchSession:
    """Load a run's checkpoint, 'best' or 'last', as the reference."""
    model, _ = load_run_model(run, checkpoint_name(which))
    return TorchSession(model, run.info.preprocessing, device=device_name(device), threads=threads)


def weights_digest(run: RunFolder, which: str = "best") -> str:
    """sha256 of the weights `load_run_session` reads: the averaged ones where the run kept them."""
    _, state = run.checkpoint(checkpoint_name(which))
    return state.sha256["ema.safetensors" if "ema.safetensors" in state.sha256 else "model.safetensors"]


def checkpoint_name(name: str) -> Checkpoint:
    """Return `name` as a checkpoint; raise InputError for another name than 'best' and 'last'."""
    if name not in ("best", "last"):
        raise unknown_name("checkpoint", name, ("best", "last"))
    return cast(Checkpoint, name)
