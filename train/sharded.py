"""Tensors that FSDP keeps in parts: gathered for a file, and cut again as another tensor is."""

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(tensor: Tensor) -> Tensor:
    """The tensor without gradient, gathered from all processes where it is sharded; all of them have to call it."""
    if isinstance(tensor, DTensor):
        gathered: Tensor = tensor.full_tensor()
        return gathered.detach()
    return tensor.detach()


def like(reference: Tensor, value: Tensor) -> Tensor:
    """Put a whole tensor on the device of `reference`, in the same parts where that is sharded and of its shape.

    It is always a copy: what a file's buffer is aligned to must not decide how a kernel splits its loop.
    """
    if isinstance(reference, DTensor) and value.shape == reference.shape:
        return distribute_tensor(value.to(reference.device), reference.device_mesh, reference.placements)
    return value.to(reference.device, copy=True)


def whole_state(module: nn.Module) -> dict[str, Tensor]:
    """The module's state by name, gathered; all processes have to call it."""
    return {name: whole(value) for name, value in module.state_dict().items()}


def load_whole_state(module: nn.Module, state: dict[str, Tensor]) -> None:
    """Load what `whole_state` returned."""
    module.load_state_dict({name: like(value, state[name]) for name, value in _entries(module)})


def _entries(module: nn.Module) -> Any:
    return module.state_dict().items()
