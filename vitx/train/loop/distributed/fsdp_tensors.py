"""Tensors that FSDP keeps in parts: gathered for a file, and cut again as another tensor is."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(tensor: Tensor) -> Tensor:
    """The tensor without gradient, gathered from all processes where it is sharded; all of them have to call it.

    What is gathered lies in the host's memory of the first process, which writes files, and is empty in the others: a
    device that holds a part of a state need not have room for all of it.
    """
    if isinstance(tensor, DTensor):
        gathered: Tensor = tensor.full_tensor()
        return gathered.detach().cpu() if dist.get_rank() == 0 else torch.empty(0)
    return tensor.detach()


def like(reference: Tensor, value: Tensor) -> Tensor:
    """Put a whole tensor on the device of `reference`, in the same parts where that is sharded and of its shape.

    It is always a copy: what a file's buffer is aligned to must not decide how a kernel splits its loop.
    """
    if isinstance(reference, DTensor) and value.shape == reference.shape:
        mesh, placements = reference.device_mesh, reference.placements
        return distribute_tensor(value.to(reference.device), mesh, placements, src_data_rank=None)  # all have read it
    return value.to(reference.device, copy=True)


def whole_state(module: nn.Module) -> dict[str, Tensor]:
    """The module's state by name, each tensor as `whole` has it; all processes have to call it."""
    return {name: whole(value) for name, value in module.state_dict().items()}


def load_whole_state(module: nn.Module, state: dict[str, Tensor]) -> None:
    """Load what `whole_state` returned."""
    module.load_state_dict({name: like(value, state[name]) for name, value in module.state_dict().items()})
