"""Several processes that train one network: started by torchrun, each with its part of every batch."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from vitx.core.errors import InputError
from vitx.train.loop.distributed.process_share import Shard

T = TypeVar("T")


@dataclass(frozen=True)
class Processes:
    """This process among the `count` that train together. Every method is called by all of them, or by none."""

    rank: int = 0
    count: int = 1

    @property
    def writes(self) -> bool:
        """Whether this is the one process that writes files and speaks."""
        return self.rank == 0

    @property
    def shard(self) -> Shard:
        """The part of every training batch that is this process's."""
        return Shard(self.rank, self.count)

    def share(self, number: int) -> npt.NDArray[np.int64]:
        """The part of `number` things that is this process's: in order, none twice, none left out."""
        return np.array_split(np.arange(number), self.count)[self.rank]

    def gather(self, value: T) -> list[T]:
        """The values of all processes, in their order."""
        if self.count == 1:
            return [value]
        values: list[T] = [value] * self.count
        dist.all_gather_object(values, value)
        return values

    def same(self, look: Callable[[], T], complaint: str, patience: float = 0.0) -> T:
        """What every process sees when it looks; raise InputError(complaint) in all of them where that differs.

        They look again for `patience` seconds: a network file system shows a change late.
        """
        deadline = time.monotonic() + patience
        while True:
            seen = self.gather((look(), time.monotonic() > deadline))
            if all(value == seen[0][0] for value, _ in seen):
                return seen[0][0]
            if any(late for _, late in seen):
                raise InputError(complaint)
            time.sleep(1)

    def wait(self) -> None:
        """Return when all processes are here."""
        if self.count > 1:
            self.gather(None)  # a barrier of the CPU's back end, whatever the GPUs' is


ALONE = Processes()


@contextmanager
def joined(device: torch.device) -> Iterator[Processes]:
    """Join the processes that torchrun started, over gloo on CPUs and NCCL on GPUs; alone where it started none."""
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

    `objective` holds the network as `network`. One process that torchrun started, such as the last that is left of
    several, holds all of it. Raises InputError for FSDP without torchrun.
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
        return objective
    return DistributedDataParallel(objective, device_ids=[device] if device.type == "cuda" else None)


def shard_module(module: nn.Module, device: torch.device) -> None:
    """Keep each block's parameters in parts (FSDP2), and the others' together."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    network = getattr(module, "network", module)
    for block in getattr(network, "blocks", ()):
        fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)


@contextmanager
def accumulating(module: nn.Module, *, last: bool) -> Iterator[None]:
    """Gradients of the passes before the `last` are only summed; the last one's backward pass averages the sums."""
    with ExitStack() as stack:
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(last)
        elif isinstance(module, DistributedDataParallel) and not last:
            stack.enter_context(module.no_sync())
        yield


@contextmanager
def unsharded(module: nn.Module) -> Iterator[None]:
    """Hold whole parameters, so that each process can run as many forward passes as it has to."""
    parts = [part for part in module.modules() if isinstance(part, FSDPModule)]
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.reshard()
            part.set_reshard_after_forward(True, recurse=False)
