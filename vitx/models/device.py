"""Which device a network runs on."""

import os

import torch

from vitx.core.errors import EnvironmentMissing, InputError
from vitx.core.machine import usable_cores


def choose_device(name: str = "auto") -> torch.device:
    """Return the device called auto, cpu or cuda. auto takes a GPU if there is one, under torchrun one a process.

    On a CPU torch's threads become no more than `usable_cores`: of a container's limit torch does not know.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise InputError(f"device '{name}': expected auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise EnvironmentMissing("no CUDA device is available to torch: pass --device cpu, or install a GPU driver")
    if name == "cpu" or not torch.cuda.is_available():
        torch.set_num_threads(min(torch.get_num_threads(), usable_cores()))
        return torch.device("cpu")
    if "LOCAL_RANK" not in os.environ:
        return torch.device("cuda")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device
