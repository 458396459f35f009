"""Library code that draws from the global generators, made to follow from a seed.

timm's and torchvision's transforms draw from Python's, numpy's and torch's. Inside `seeded` these start from the given
seed, and afterwards go on as if nothing had happened.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch.utils.data import get_worker_info


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed the global generators of this process, those of `device` too; put them back at the end.

    A worker of a DataLoader, which nothing else draws in, is spared the putting back.
    """
    if get_worker_info() is not None:
        _seed(seed, None)
        yield
        return
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device is not None and device.type == "cuda" else []):
        _seed(seed, device)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def _seed(seed: int, device: torch.device | None) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would go through every kind of device
    if device is not None and device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
