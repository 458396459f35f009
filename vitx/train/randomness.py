"""Seeds for library code that draws from the global random generators.

timm's and torchvision's transforms draw from Python's, numpy's and torch's global generators. Inside `seeded` these
start from the given seed; afterwards they continue from the state they had before.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch.utils.data import get_worker_info


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed the global generators of this process, and of the GPU `device`; restore their states at the end.

    In a DataLoader worker nothing else draws random numbers, so there the states are not restored: copying them would
    cost time for every sample.
    """
    if get_worker_info() is not None:
        seed_generators(seed)
        yield
        return
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng([device] if device is not None and device.type == "cuda" else []):
        seed_generators(seed, device)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def seed_generators(seed: int, device: torch.device | None = None) -> None:
    """Seed Python's, numpy's and torch's global generators of this process, and that of the GPU `device`."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # numpy takes 32 bits
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed every device there is
    if device is not None and device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
