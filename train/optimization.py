"""AdamW and its learning rate, step by step."""

import math
from typing import Any

import torch
from timm.optim import param_groups_weight_decay
from torch import Tensor, nn

from vitx.train.trainer_settings import Optimizer, Schedule


def build_optimizer(model: nn.Module, settings: Optimizer) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only: no bias, norm, position or class token."""
    spared: Any = getattr(model, "no_weight_decay", tuple)
    groups = param_groups_weight_decay(model, settings.weight_decay, no_weight_decay_list=tuple(spared()))
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, fused=True)


def learning_rate(step: int, steps: int, peak: float, schedule: Schedule) -> float:
    """The rate of `step` (from 0) of `steps`: a linear rise to `peak`, then half a cosine to `min_lr`."""
    warmup = int(schedule.warmup * steps)
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(1, steps - warmup - 1)
    return schedule.min_lr + (peak - schedule.min_lr) * (1 + math.cos(math.pi * progress)) / 2


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """The optimizer's state as flat tensors named ENTRY/PARAMETER, such as "exp_avg/head.weight"."""
    return {
        f"{entry}/{name}": value
        for name, parameter in model.named_parameters()
        for entry, value in optimizer.state[parameter].items()
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Put `optimizer_tensors` back; the names must be those of the model's parameters."""
    parameters = dict(model.named_parameters())
    for key, value in tensors.items():
        entry, _, name = key.partition("/")
        parameter = parameters[name]
        # A copy of its own: what the file's buffer is aligned to must not decide how a kernel splits its loop.
        optimizer.state[parameter][entry] = value.to(parameter.device, copy=True)
