"""PyTorch: the reference of parity and bench. The one file of vitx.runtimes that imports torch and the models."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import Any, cast, get_args

import numpy as np
import torch
from torch import nn

from vitx.core.errors import CheckFailed, EnvironmentMissing, InputError, first_line, unknown_name
from vitx.core.options import Checkpoint, device_name
from vitx.core.preprocess import Preprocessing, UInt8Array
from vitx.core.probabilities import Float64Array
from vitx.core.run import RunFolder, weights_file
from vitx.models import image_tensor, load_run_model, reattention_impl
from vitx.models.device import check_device as check_device  # parity, which sees no models, asks before it exports
from vitx.models.flops import count_flops
from vitx.models.outputs import recorded_outputs
from vitx.runtimes.requirements import require
from vitx.runtimes.session import Device, Float32Array, Session, check_images


class TorchSession(Session):
    """A network in evaluation mode as a session, in true float32 (no TF32).

    threads: torch's own setting, which holds for the whole process. compiled: compile the network with Inductor while
    loading, once for a batch of one and once for all others; this takes seconds to minutes. Raises EnvironmentMissing
    when the device or a compiler is missing.
    """

    def __init__(
        self,
        model: nn.Module,
        preprocessing: Preprocessing,
        *,
        device: Device = "auto",
        threads: int | None = None,
        compiled: bool = False,
    ) -> None:
        super().__init__()
        check_device(device)
        if threads is not None:
            torch.set_num_threads(threads)
        self._device = torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")
        self._network = self._model = model.eval().to(self._device)
        self._preprocessing = preprocessing
        self._compiled = compiled
        self._reattention = reattention_impl(self._network)
        if compiled:
            require("torch-compile")
            self._compile()

    def _compile(self) -> None:
        # nn.Module.compile() would change the caller's module in place.
        self._model = cast(nn.Module, torch.compile(self._network, dynamic=True))
        size = self._preprocessing.image_size
        try:
            for rows in (2, 1):  # torch specialises on a size of one, so it is compiled separately
                self.infer(np.zeros((rows, size, size, 3), dtype=np.uint8))
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = " ".join(str(error).split("\n")[:2]).strip()  # "backend='inductor' raised:", and what
            raise EnvironmentMissing(f"torch.compile cannot compile the network ({reason}): choose torch") from None

    @torch.inference_mode()
    def _infer(self, images: UInt8Array) -> Float32Array:
        size = self._preprocessing.image_size
        check_images(images, (size, size, 3))
        # torch.from_numpy refuses negative strides, which a reversed batch has.
        inputs = image_tensor(np.ascontiguousarray(images), self._preprocessing.mean, self._preprocessing.std)
        try:
            with self._full_precision(), torch.autocast(self._device.type, enabled=False):
                logits: Float32Array = self._model(inputs.to(self._device)).float().cpu().numpy()
        except (torch.OutOfMemoryError, torch.AcceleratorError) as error:  # of the GPU
            what = f"the network fails on {self._device} on a batch of {len(images)}"
            raise CheckFailed(f"{what}: {first_line(error)}") from None
        return logits

    @torch.inference_mode()
    def infer_float64(self, images: UInt8Array, outputs: Sequence[str] = ()) -> dict[str, Float64Array]:
        """`logits` (N, C) and further outputs in float64, on the CPU, of images uint8 (N, S, S, 3).

        It is what rounding is measured from. Raises InputError for outputs that this network does not have.
        """
        network = deepcopy(self._network).cpu().double().eval()
        mean = torch.tensor(self._preprocessing.mean, dtype=torch.float64)
        std = torch.tensor(self._preprocessing.std, dtype=torch.float64)
        rows: list[dict[str, Float64Array]] = []
        with recorded_outputs(network, outputs) as recorded:
            for image in images:  # one at a time: float64 maps of a large network are not small
                pixels = (torch.from_numpy(image.copy()).double() / 255 - mean) / std
                found = {"logits": network(pixels.permute(2, 0, 1)[None]), **recorded()}
                rows.append({name: value.numpy() for name, value in found.items()})
        return {name: np.concatenate([row[name] for row in rows]) for name in ("logits", *outputs)}

    def flops(self) -> int | None:
        """Of one image; None for a network with an operator that has no formula."""
        size = self._preprocessing.image_size
        try:
            return count_flops(self._network, torch.empty(1, 3, size, size, dtype=torch.float32))
        except InputError:
            return None

    def _close(self) -> None:
        del self._model, self._network

    def network(self) -> nn.Module:
        """The network as it was given, on the CPU: not to be changed, unless it had to be copied from a GPU."""
        return self._network if self._device.type == "cpu" else deepcopy(self._network).cpu()

    def with_normalization(self, mean: tuple[float, float, float], std: tuple[float, float, float]) -> "TorchSession":
        """Return another session of the same network that normalises images with this mean and std."""
        other = self._preprocessing.model_copy(update={"mean": mean, "std": std})
        return TorchSession(self._network, other, device="cpu" if self._device.type == "cpu" else "cuda")

    def _full_precision(self) -> AbstractContextManager[None]:
        # By default cuDNN convolves in TF32; a reference must not.
        if self._device.type == "cuda":
            return cast(AbstractContextManager[None], torch.backends.cudnn.flags(enabled=True, allow_tf32=False))
        return nullcontext()

    def describe(self) -> dict[str, Any]:
        return {
            "runtime": "torch-compile" if self._compiled else "torch",
            "version": torch.__version__,
            "provider": str(self._device),
            "precision": "fp32",
            "threads": torch.get_num_threads(),
            **({"reattention_impl": self._reattention} if self._reattention else {}),
        }


def load_run(
    run: RunFolder,
    which: str = "best",
    *,
    device: str = "auto",
    threads: int | None = None,
    compiled: bool = False,
) -> tuple[TorchSession, str]:
    """Load a run's checkpoint as the reference; `compiled` for the runtime torch-compile.

    With the sha256 of the weights that were read: the EMA's where the run kept one.
    """
    checkpoint = checkpoint_name(which)
    model, state = load_run_model(run, checkpoint)
    session = TorchSession(
        model, run.info.preprocessing, device=device_name(device), threads=threads, compiled=compiled
    )
    return session, state.sha256[weights_file(checkpoint, state)]


def checkpoint_name(name: str) -> Checkpoint:
    """Return `name` as a checkpoint; raise InputError for a name that is none."""
    if name not in get_args(Checkpoint):
        raise unknown_name("checkpoint", name, get_args(Checkpoint))
    return cast(Checkpoint, name)
