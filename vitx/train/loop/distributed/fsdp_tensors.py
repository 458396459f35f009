"""Tensors that FSDP splits over processes (DTensors): gathered for a checkpoint, and split again when it is loaded."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


def gathered(tensor: Tensor) -> Tensor:
    """The whole tensor without gradient; a collective call where it is sharded, so all processes have to make it.

    A gathered tensor is on the CPU of the first process, which writes the files, and empty in the others: a device that
    holds a part of a state need not have memory for all of it.
    """
    if isinstance(tensor, DTensor):
        full: Tensor = tensor.full_tensor()
        return full.detach().cpu() if dist.get_rank() == 0 else torch.empty(0)
    return tensor.detach()


def placed_like(reference: Tensor, value: Tensor) -> Tensor:
    """Copy the whole tensor `value` to the device of `reference`, split over the processes as `reference` is.

    It is always a copy: a kernel may split its loop by the alignment of the memory, and the buffer of a file is aligned
    otherwise than a tensor of torch's, which would change the last bits of a resumed run.
    """
    # An optimizer's state may have another shape than its parameter (a step count): that is whole in each process.
    if isinstance(reference, DTensor) and value.shape == reference.shape:
        mesh, placements = reference.device_mesh, reference.placements
        # Every process has read the whole tensor from the file, so none has to send it (src_data_rank).
        return distribute_tensor(value.to(reference.device), mesh, placements, src_data_rank=None)
    if not isinstance(reference, DTensor) and value.shape == reference.shape:
        # With the strides of `reference` too: fused optimizers walk through memory as it lies (channels_last).
        return torch.empty_like(reference, dtype=value.dtype).copy_(value)
    return value.to(reference.device, copy=True)


def gathered_state(module: nn.Module) -> dict[str, Tensor]:
    """The module's state by name, each tensor as `gathered` returns it; all processes have to call it."""
    return {name: gathered(value) for name, value in module.state_dict().items()}


def load_gathered_state(module: nn.Module, state: dict[str, Tensor]) -> None:
    """Load what `gathered_state` returned in the first process."""
    module.load_state_dict({name: placed_like(value, state[name]) for name, value in module.state_dict().items()})
