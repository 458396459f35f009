"""Which device a network runs on."""

import os

import torch

from vitx.core.errors import EnvironmentMissing
from vitx.core.machine import usable_cores
from vitx.core.options import Device, device_name


def check_device(device: Device) -> None:
    """Raise EnvironmentMissing where torch cannot run on `device`."""
    if device == "cuda" and not torch.cuda.is_available():
        raise EnvironmentMissing("device cuda was asked for, but torch sees no GPU; choose --device cpu")


def choose_device(name: str = "auto") -> torch.device:
    """Return the device called auto, cpu or cuda. auto takes a GPU if there is one, under torchrun one a process.

    On a CPU torch's threads become no more than `usable_cores`: of a container's limit torch does not know.
    """
    check_device(name := device_name(name))
    if name == "cpu" or not torch.cuda.is_available():
        torch.set_num_threads(min(torch.get_num_threads(), usable_cores()))
        return torch.device("cpu")
    if "LOCAL_RANK" not in os.environ:
        return torch.device("cuda")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device
