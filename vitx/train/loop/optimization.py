"""timm's optimizers and schedules by name, and an optimizer's state as tensors and plain numbers, without pickle."""

import inspect
import warnings
from typing import Any, NamedTuple

import torch
from timm.optim import create_optimizer_v2, get_optimizer_class, get_optimizer_info, list_optimizers
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from torch import Tensor, nn

from vitx.core.errors import InputError, unknown_name
from vitx.train.loop.distributed.fsdp_tensors import like, whole
from vitx.train.recipes.optimizer_groups import Optimizer, Schedule

# Where the counters of a parameter group are, among the parameters' names.
GROUP = "groups."
# An optimizer that keeps lists of tensors.
LISTS = "kron"
COUNTERS = ("step", "lookahead_step")


class OptimizerState(NamedTuple):
    """`tensors` are named ENTRY/PARAMETER, such as "exp_avg/head.weight", those of a group ENTRY/groups.0; `numbers`
    are what is counted without a tensor.
    """

    tensors: dict[str, Tensor]
    numbers: dict[str, Any]


def build_optimizer(model: nn.Module, settings: Optimizer) -> torch.optim.Optimizer:
    """Return timm's optimizer `settings.name`; weight decay on matrices only: no bias, norm, position or class token.

    Raises InputError for a name, an argument or a layer decay that timm cannot use.
    """
    name = settings.name.lower()
    base = name.removeprefix("lookahead_")
    known = [str(each) for each in list_optimizers()]
    if base not in known:
        raise unknown_name("optimizer.name", settings.name, known)
    info = get_optimizer_info(base)
    if info.second_order:
        raise InputError(f"optimizer.name={settings.name} needs second derivatives: choose one of the first order")
    if base.startswith(LISTS):
        raise InputError(f"optimizer.name={settings.name} keeps a state that no checkpoint holds: choose another")
    arguments = dict(settings.kwargs)
    if info.has_betas and info.num_betas == 2:
        arguments.setdefault("betas", settings.betas)
    if base in ("adam", "adamw") and "fused" in inspect.signature(get_optimizer_class(base)).parameters:
        arguments.setdefault("fused", True)
    try:
        return create_optimizer_v2(
            model,
            name,
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            momentum=settings.momentum,
            layer_decay=settings.layer_decay if settings.layer_decay < 1 else None,
            **arguments,
        )
    except (TypeError, ValueError, AssertionError, ImportError) as error:
        raise InputError(f"optimizer.name={settings.name} cannot be made with these settings: {error}") from None


def build_schedule(optimizer: torch.optim.Optimizer, settings: Schedule, *, epochs: int, steps: int) -> Scheduler:
    """Return timm's schedule over `epochs` of `steps` each; `step_update(step)` sets the rates of that step, from 0.

    Raises InputError for arguments that timm does not take.
    """
    warmup = int(settings.warmup * epochs * steps)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # timm ignores some arguments with no more than a warning
            schedule: Scheduler
            schedule, _ = create_scheduler_v2(
                optimizer,
                settings.name,
                # In steps: one "epoch" of timm's is `steps` updates, so these may be fractions.
                num_epochs=epochs - warmup / steps,  # type: ignore[arg-type]
                warmup_epochs=warmup / steps,  # type: ignore[arg-type]
                warmup_prefix=True,
                warmup_lr=settings.warmup_lr,
                min_lr=settings.min_lr,
                step_on_epochs=False,
                updates_per_epoch=steps,
                **settings.kwargs,
            )
    except (TypeError, ValueError, AssertionError, Warning) as error:
        raise InputError(f"schedule.name={settings.name} cannot be made with these settings: {error}") from None
    return schedule


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> OptimizerState:
    """Return the whole state; sharded entries are gathered, which every process has to take part in.

    Raises InputError for an optimizer that keeps something else than tensors and numbers.
    """
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {}
    for place, entries in _entries(optimizer, model).items():
        for entry, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{entry}/{place}"] = whole(value)
            elif isinstance(value, int | float | str | None):
                numbers[f"{entry}/{place}"] = value
            else:
                raise InputError(
                    f"the state '{entry}' of this optimizer is a {type(value).__name__}, which no checkpoint holds: "
                    "choose another optimizer.name"
                )
    return OptimizerState(tensors, numbers)


def restore_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, state: OptimizerState) -> None:
    """Put back what `optimizer_state` returned; the names must be those of the model's parameters."""
    parameters = dict(model.named_parameters())
    packed = optimizer.state_dict()
    numbers = {
        parameter: number
        for group, names in zip(_base(optimizer).param_groups, packed["param_groups"], strict=True)
        for parameter, number in zip(group["params"], names["params"], strict=True)
    }
    for key, value in {**state.tensors, **state.numbers}.items():
        entry, _, place = key.partition("/")
        if place in parameters:
            entries = packed["state"].setdefault(numbers[parameters[place]], {})
        else:
            entries = packed["param_groups"][int(place.removeprefix(GROUP))]
        entries[entry] = like(parameters.get(place, value), value) if isinstance(value, Tensor) else value
    optimizer.load_state_dict(packed)


def _entries(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, dict[str, Any]]:
    """The state by parameter, and what is counted by group, such as LAMB's step; settings are the recipe's."""
    base = _base(optimizer)
    entries = {name: base.state[parameter] for name, parameter in model.named_parameters() if parameter in base.state}
    for number, group in enumerate(base.param_groups):
        counters = {key: value for key, value in group.items() if key in COUNTERS}
        entries[f"{GROUP}{number}"] = counters
    return entries


def _base(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """What holds the state: timm's Lookahead keeps it in the optimizer that it wraps."""
    base: torch.optim.Optimizer = getattr(optimizer, "_base_optimizer", optimizer)
    return base
