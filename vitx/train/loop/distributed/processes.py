"""Several processes that train one network: started by torchrun, each with its part of every batch.

torchrun sets RANK (the number of a process), LOCAL_RANK (its number on the node) and WORLD_SIZE (how many there are).
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.nn.parallel import DistributedDataParallel

from vitx.core.errors import InputError
from vitx.train.loop.distributed.batch_part import BatchPart

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """This process among the `count` that train together.

    Every method is a collective call: either all processes make it, in the same order, or none does.
    """

    rank: int = 0
    count: int = 1

    @property
    def writes(self) -> bool:
        """Whether this is the one process that writes files and prints."""
        return self.rank == 0

    @property
    def batch_part(self) -> BatchPart:
        """This process's part of every training batch."""
        return BatchPart(self.rank, self.count)

    def indices(self, length: int) -> npt.NDArray[np.int64]:
        """This process's indices of a list of `length`: contiguous, none twice over the processes, none left out."""
        return np.array_split(np.arange(length), self.count)[self.rank]

    def gather(self, value: T) -> list[T]:
        """The values of all processes, by rank."""
        if self.count == 1:
            return [value]
        values: list[T] = [value] * self.count
        dist.all_gather_object(values, value)
        return values

    def agreed(self, read: Callable[[], T], error: str, timeout: float = 0.0) -> T:
        """Return what `read` returns if it is equal in all processes; otherwise raise InputError(error) in all of them.

        They read again, once a second, for `timeout` seconds: a network file system shows a change late.
        """
        deadline = time.monotonic() + timeout
        while True:
            # The deadline is exchanged too, so that all processes stop after the same try.
            values = self.gather((read(), time.monotonic() > deadline))
            if all(value == values[0][0] for value, _ in values):
                return values[0][0]
            if any(late for _, late in values):
                raise InputError(error)
            time.sleep(1)

    def barrier(self) -> None:
        """Return when all processes have called it."""
        if self.count > 1:
            # dist.barrier would go through NCCL on GPUs, and wait on the device; this goes through gloo.
            self.gather(None)


ALONE = Processes()


def is_first_process() -> bool:
    """Whether torchrun counts this process as the first, the one that prints; True without torchrun."""
    return os.environ.get("RANK", "0") == "0"


def launcher() -> list[str]:
    """What starts `vitx` as this process was started; how nodes find each other is left out."""
    if "WORLD_SIZE" not in os.environ:
        return ["vitx"]
    each, nodes = os.environ.get("LOCAL_WORLD_SIZE", "1"), os.environ.get("GROUP_WORLD_SIZE", "1")
    return ["torchrun", *(["--nnodes", nodes] if nodes != "1" else []), "--nproc-per-node", each, "-m", "vitx"]


@contextmanager
def join_processes(device: torch.device) -> Iterator[Processes]:
    """Join the processes that torchrun started, over gloo on CPUs and NCCL on GPUs; without torchrun yield `ALONE`."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield ALONE
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        yield Processes(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


def parallelize(objective: nn.Module, parallel: str, processes: Processes, device: torch.device) -> nn.Module:
    """Return the module whose backward pass averages the gradients of all processes.

    `objective` has the network as its attribute `network`, and a method `become_root` without effect. A single process
    of torchrun, such as the last one that is left of several, holds the whole network. Raises InputError for FSDP
    without torchrun.
    """
    if parallel == "fsdp" and "WORLD_SIZE" not in os.environ:
        raise InputError(
            "execution.parallel=fsdp shares a network among processes: start them with torchrun, or go on in one with "
            "--set execution.parallel=ddp"
        )
    if processes.count == 1:
        return objective
    if parallel == "fsdp":
        shard_module(objective, device)
        make_root(objective)
        return objective
    return DistributedDataParallel(objective, device_ids=[device] if device.type == "cuda" else None)


def shard_module(module: nn.Module, device: torch.device) -> None:
    """Split the parameters over all processes (FSDP2): those of each block as a group, all others as one more.

    A group is gathered when its forward or backward pass begins, so one block is whole in memory at a time.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    network = getattr(module, "network", module)
    for block in getattr(network, "blocks", ()):
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)  # last: it takes the parameters that no block has taken


def make_root(objective: Any) -> None:
    """Let `objective` be the root of all groups: FSDP takes the module whose forward pass is the first.

    A run that resumes within an evaluation would begin with one of the network alone, and fail in the next step.
    """
    register_fsdp_forward_method(objective, "become_root")
    objective.become_root()
    objective.reshard()  # after a forward pass the root's own parameters stay whole


@contextmanager
def accumulating(module: nn.Module, *, last: bool) -> Iterator[None]:
    """Run one pass of gradient accumulation: only the `last` pass exchanges the summed gradients with the others."""
    with ExitStack() as stack:
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(last)
        elif isinstance(module, DistributedDataParallel) and not last:
            stack.enter_context(module.no_sync())
        yield


@contextmanager
def unsharded(module: nn.Module) -> Iterator[None]:
    """Keep whole parameters inside the block, so that processes may run different numbers of forward passes.

    A forward pass of a sharded module is a collective call, which would wait for processes with fewer images.
    """
    groups = [group for group in module.modules() if isinstance(group, FSDPModule)]
    for group in groups:
        group.set_reshard_after_forward(False, recurse=False)
        group.unshard()
    try:
        yield
    finally:
        for group in groups:
            group.reshard()
            group.set_reshard_after_forward(True, recurse=False)
