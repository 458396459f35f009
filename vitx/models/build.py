"""From a specification or a run folder to a network with its weights."""

import errno
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vitx.core.errors import UNUSABLE, InputError, first_line, unknown_name
from vitx.core.files import apply_umask
from vitx.core.options import Checkpoint
from vitx.core.run import CheckpointState, ModelSpec, RunFolder, weights_file


def require_network(name: str, kind: str = "model") -> None:
    """Raise InputError for a name, `NAME` or `NAME.TAG` (of published weights), that timm does not know."""
    if not timm.is_model(name):
        raise unknown_name(kind, name, timm.list_models())
    try:
        timm.get_pretrained_cfg(name)
    except RuntimeError:
        network, _, tag = name.partition(".")
        published = [each.partition(".")[2] for each in timm.list_pretrained(f"{network}.*")]
        raise unknown_name(f"tag of '{network}'", tag, published) from None


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """Make what is built in the block float32 and differentiable, whatever default type or mode a notebook has set."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.inference_mode(False):
            yield
    finally:
        torch.set_default_dtype(before)


@ordinary_tensors()
def build_model(spec: ModelSpec) -> nn.Module:
    """Build the network of `spec` with fresh weights; raise InputError for a name or argument timm does not know."""
    require_network(spec.name)
    try:
        model: nn.Module = timm.create_model(spec.name, num_classes=spec.num_classes, **spec.kwargs)
    except InputError:
        raise
    except UNUSABLE as error:
        raise InputError(f"model '{spec.name}' does not take these arguments: {first_line(error)}") from None
    return model


def load_weights(model: nn.Module, path: Path) -> None:
    """Load a safetensors file whose keys and shapes must be exactly the model's."""
    try:
        state = load_file(path)
    except FileNotFoundError:  # which safetensors says of every file that it cannot open
        with path.open("rb"):
            raise
    except SafetensorError as error:
        raise InputError(f"{path} is not a safetensors file: {error}") from None
    expected = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    found = {key: tuple(value.shape) for key, value in state.items()}
    if differing := sorted(dict(expected.items() ^ found.items())):
        first = differing[0]
        raise InputError(
            f"{path} belongs to another architecture: {entries_differ(len(differing))}, the first is '{first}' "
            f"({found.get(first, 'absent')} in the file, {expected.get(first, 'absent')} in the model)"
        )
    model.load_state_dict(state)


def entries_differ(count: int) -> str:
    return "1 entry differs" if count == 1 else f"{count} entries differ"


def separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, contiguous, each with memory of its own, as a safetensors file needs them.

    Layers may share weights (CoaT's position encodings), which no such file can say.
    """
    found = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
    first = {value.data_ptr(): key for key, value in reversed(found.items())}
    return {key: value if first[value.data_ptr()] == key else value.clone() for key, value in found.items()}


def save_tensors(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Write them, of which some may share memory, as a safetensors file; raise OSError, as on a full disk."""
    try:
        save_file(separate(tensors), path, metadata)
    except SafetensorError as error:
        # safetensors gives the system's error as text alone.
        found = re.search(r"os error (\d+)", str(error))
        number = int(found[1]) if found else errno.EIO
        raise OSError(number, os.strerror(number), str(path)) from None
    apply_umask(path)


def load_run_model(run: RunFolder, which: Checkpoint = "best") -> tuple[nn.Module, CheckpointState]:
    """Return a run's network in evaluation mode, with the weights that `weights_file` names."""
    model = build_model(run.info.model)
    while True:
        folder, state = run.checkpoint(which)
        with suppress(FileNotFoundError):  # it was there a moment ago: a running training has replaced it since
            load_weights(model, folder / weights_file(which, state))
            return model.eval(), state


class Normalization:
    """uint8 (B, S, S, 3) to float32 (B, 3, S, S) on `device`: (x/255 − mean)/std, the same bits on every device.

    mean and std are copied to the device once: a copy for each batch would wait for all work queued there.
    """

    def __init__(
        self, mean: tuple[float, ...], std: tuple[float, ...], device: torch.device | str | None = "cpu"
    ) -> None:
        # A tensor, not a number: by a number a GPU divides as a product with its reciprocal, which rounds differently.
        self.full = torch.tensor(255.0, dtype=torch.float32, device=device)
        self.mean, self.std = (
            torch.tensor(each, dtype=torch.float32, device=device).view(1, 3, 1, 1) for each in (mean, std)
        )

    def __call__(
        self, images: torch.Tensor, memory_format: torch.memory_format = torch.contiguous_format
    ) -> torch.Tensor:
        # (B, S, S, 3) → (B, 3, S, S) while they are bytes, then float32 in place: a third of the time.
        ordered = images.permute(0, 3, 1, 2).contiguous(memory_format=memory_format)
        return ordered.to(torch.float32).div_(self.full).sub_(self.mean).div_(self.std)


def image_tensor(images: Any, mean: tuple[float, ...], std: tuple[float, ...]) -> torch.Tensor:
    """Normalise uint8 (B, S, S, 3) in the host's memory to float32 (B, 3, S, S)."""
    return Normalization(mean, std)(torch.as_tensor(images))
