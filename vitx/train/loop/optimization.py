"""timm's optimizers and schedules by name, and an optimizer's state as tensors and plain numbers, without pickle."""

import inspect
import math
import warnings
from typing import Any, NamedTuple

import torch
from timm.optim import create_optimizer_v2, get_optimizer_class, get_optimizer_info, list_optimizers
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from torch import Tensor, nn

from vitx.core.errors import UNUSABLE, InputError, unknown_name
from vitx.train.loop.distributed.fsdp_tensors import gathered, placed_like
from vitx.train.recipes.optimization_settings import WITHOUT_END, Optimizer, Schedule, refuse_impossible_schedule
from vitx.train.recipes.recipe import Recipe

# Names of parameter groups among those of parameters, in a checkpoint: "groups.0", "groups.1", …
GROUP = "groups."
# timm's optimizer whose state are lists of tensors, which have no name of their own in a checkpoint.
KEEPS_LISTS = "kron"
# What some optimizers count in a parameter group instead of in a parameter's state.
GROUP_COUNTERS = ("step", "lookahead_step")
# What each schedule of timm heeds among the arguments of `create_scheduler_v2`, beside `noise`. A run is one cycle:
# with cycle_limit another would begin where the cool-down is.
_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "cosine": ("k_decay",),
    "tanh": (),
    "poly": ("k_decay", "decay_rate"),
    "step": ("decay_epochs", "decay_rate"),
    "multistep": ("decay_milestones", "decay_rate"),
    "wsd": ("decay_epochs", "decay_fn"),
    "rsqrt": ("decay_epochs", "decay_fn", "stable_timescale"),
    "constant": (),
}
_OF_NOISE = {"noise_pct", "noise_std", "noise_seed"}


class OptimizerState(NamedTuple):
    """`tensors` are named ENTRY/PARAMETER, such as "exp_avg/head.weight", or ENTRY/groups.0 for those of a parameter
    group; `numbers` has the same names and holds what an optimizer counts as plain numbers.
    """

    tensors: dict[str, Tensor]
    numbers: dict[str, Any]


def build_optimizer(model: nn.Module, settings: Optimizer, batch_size: int) -> torch.optim.Optimizer:
    """Return timm's optimizer `settings.name`, at the rate for steps of `batch_size` images.

    timm makes the parameter groups: weight decay on matrices only (no biases, norms, positions or class token), and
    with `layer_decay` < 1 one group a layer, whose rate is lr · layer_decay^(layers after it).
    Raises InputError for a name, an argument or a layer decay that timm cannot use.
    """
    name = settings.name.lower()
    base = name.removeprefix("lookahead_")  # timm wraps any optimizer whose name has this prefix
    known = [str(each) for each in list_optimizers()]
    if base not in known:
        raise unknown_name("optimizer.name", settings.name, known)
    info = get_optimizer_info(base)
    if info.second_order:
        raise InputError(f"optimizer.name={settings.name} needs second derivatives: choose one of the first order")
    if base.startswith(KEEPS_LISTS):
        raise InputError(f"optimizer.name={settings.name} keeps a state that no checkpoint holds: choose another")
    arguments = dict(settings.kwargs)
    if info.has_betas and info.num_betas == 2:
        arguments.setdefault("betas", settings.betas)
    try:
        accepted = inspect.signature(get_optimizer_class(base)).parameters
        for key, value in arguments.items():  # of which many are used in the first step alone
            default = accepted[key].default if key in accepted else None
            if isinstance(default, bool) and value not in (True, False):
                raise ValueError(f"optimizer.kwargs.{key}={value}: expected true or false")
            if type(default) in (int, float) and not isinstance(value, int | float | None):
                raise ValueError(f"optimizer.kwargs.{key}={value}: expected a number")
        if base in ("adam", "adamw") and "fused" in accepted:
            arguments.setdefault("fused", not arguments.get("foreach"))  # one kernel for all parameters
        return create_optimizer_v2(
            model,
            name,
            lr=settings.rate(batch_size),
            weight_decay=settings.weight_decay,
            momentum=settings.momentum,
            layer_decay=settings.layer_decay if settings.layer_decay < 1 else None,
            **arguments,
        )
    except (ImportError, *UNUSABLE) as error:
        raise InputError(f"optimizer.name={settings.name} cannot be made with these settings: {error}") from None


def build_schedule(optimizer: torch.optim.Optimizer, settings: Schedule, *, epochs: int, steps: int) -> Scheduler:
    """Return timm's schedule over `epochs` of `steps` each; `step_update(step)` sets the rates of step 0, 1, …

    A linear warm-up of at most half of the epochs comes first, and the schedule ends with the cool-down. The rate
    follows from the step alone, so a resumed run needs no state of the schedule. Several schedules of one optimizer
    begin from the same rate. Raises InputError for arguments that timm does not take or heed.
    """
    _refuse_without_effect(settings)
    warmup = int(settings.warmup(epochs) * steps)  # in steps
    length = epochs - settings.cooldown_epochs - (warmup / steps if settings.warmup_prefix else 0)
    try:
        # Known exactly by now: a batch has no more images than there are, and its rate may follow from them.
        rate = max(group.get("initial_lr", group["lr"]) for group in optimizer.param_groups)
        refuse_impossible_schedule(rate, settings, epochs)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # timm ignores some arguments and only warns
            schedule: Scheduler
            schedule, _ = create_scheduler_v2(
                optimizer,
                settings.name,
                # timm counts in epochs and multiplies by updates_per_epoch: fractions give the exact step.
                num_epochs=length,  # type: ignore[arg-type]
                warmup_epochs=warmup / steps,  # type: ignore[arg-type]
                warmup_prefix=settings.warmup_prefix,
                warmup_lr=settings.warmup_lr,
                min_lr=settings.min_lr,
                step_on_epochs=False,
                updates_per_epoch=steps,
                **settings.kwargs,
            )
        # Arguments of another type, or out of range, show in the rates alone: a thousand of them, and the first last.
        total = epochs * steps
        for step in (total - 1, *reversed(range(0, total, max(1, total // 1000)))):
            schedule.step_update(step)
            for group in optimizer.param_groups:
                if not 0 <= group["lr"] < math.inf:
                    raise ValueError(f"the rate of step {step} would be {group['lr']:g}")
    except (Warning, *UNUSABLE) as error:
        raise InputError(f"schedule.name={settings.name} cannot be made with these settings: {error}") from None
    return schedule


def _refuse_without_effect(settings: Schedule) -> None:
    """timm takes the arguments of every schedule for each, and drops those that are of another."""
    # Nearly every recipe has a min_lr, so that one is let pass: a constant rate is asked for by its name alone.
    if settings.name in WITHOUT_END and settings.cooldown_epochs:
        raise InputError(
            f"schedule.cooldown_epochs={settings.cooldown_epochs:g} has no effect with schedule.name={settings.name}, "
            "which does not end at min_lr: set schedule.cooldown_epochs=0"
        )
    heeded = {"noise", *_ARGUMENTS[settings.name]}
    heeded |= _OF_NOISE if settings.kwargs.get("noise") is not None else set()
    for name in settings.kwargs:
        if name not in heeded:
            raise InputError(
                f"schedule.kwargs.{name} has no effect with schedule.name={settings.name}, which heeds "
                f"{', '.join(sorted(heeded))}: leave it out"
            )


def describe_rate(recipe: Recipe, batch_size: int) -> str:
    """What the rate of a run, which begins with the first stage of `recipe`, comes to, in words."""
    optimizer, schedule = recipe.optimizer, recipe.schedule
    scaled = f", {optimizer.lr:g} for {optimizer.lr_base_size}" if optimizer.lr_base_size else ""
    warmup = schedule.warmup(recipe.stage(1).until)
    cut = f", half of all instead of {schedule.warmup_epochs:g}" if warmup < schedule.warmup_epochs else ""
    return (
        f"learning rate {optimizer.rate(batch_size):g} at {batch_size} images a step{scaled}; "
        f"{warmup:g} {'epoch' if warmup == 1 else 'epochs'} of warm-up{cut}"
    )


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> OptimizerState:
    """Return the whole state. Sharded entries are gathered, so all processes have to call it.

    Raises InputError for an optimizer whose state has something else than tensors and numbers.
    """
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, Any] = {}
    for owner, entries in _entries(optimizer, model).items():
        for entry, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{entry}/{owner}"] = gathered(value)
            elif isinstance(value, int | float | None):  # torch loads a text as a generator of its letters
                numbers[f"{entry}/{owner}"] = value
            else:
                raise InputError(
                    f"the state '{entry}' of this optimizer is a {type(value).__name__}, which no checkpoint holds: "
                    "choose another optimizer.name"
                )
    return OptimizerState(tensors, numbers)


def restore_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, state: OptimizerState) -> None:
    """Load what `optimizer_state` returned; the names must be those of the model's parameters."""
    parameters = dict(model.named_parameters())
    packed = optimizer.state_dict()
    # torch numbers the parameters over all groups, and a state_dict holds these numbers instead of names.
    numbers = {
        parameter: number
        for group, packed_group in zip(_wrapped(optimizer).param_groups, packed["param_groups"], strict=True)
        for parameter, number in zip(group["params"], packed_group["params"], strict=True)
    }
    for key, value in {**state.tensors, **state.numbers}.items():
        entry, _, owner = key.partition("/")
        if owner in parameters:
            entries = packed["state"].setdefault(numbers[parameters[owner]], {})
        else:
            entries = packed["param_groups"][int(owner.removeprefix(GROUP))]
        entries[entry] = placed_like(parameters.get(owner, value), value) if isinstance(value, Tensor) else value
    optimizer.load_state_dict(packed)


def _entries(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, dict[str, Any]]:
    """The state by parameter name, and the counters by group, such as LAMB's step.

    A group's settings (rate, decay) are left out: the recipe and the schedule set them again.
    """
    base = _wrapped(optimizer)
    entries = {name: base.state[parameter] for name, parameter in model.named_parameters() if parameter in base.state}
    for number, group in enumerate(base.param_groups):
        entries[f"{GROUP}{number}"] = {key: value for key, value in group.items() if key in GROUP_COUNTERS}
    return entries


def _wrapped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer that holds the state: timm's Lookahead keeps it in the optimizer that it wraps."""
    base: torch.optim.Optimizer = getattr(optimizer, "_base_optimizer", optimizer)
    return base
