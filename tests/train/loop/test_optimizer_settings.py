"""What timm is asked for, the whole rate of a run by its formula, and states by name."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from vitx.core.errors import InputError
from vitx.train.loop import optimization
from vitx.train.loop.optimization import (
    OptimizerState,
    build_optimizer,
    build_schedule,
    optimizer_state,
    restore_optimizer,
)
from vitx.train.recipes.optimization_settings import Optimizer, Schedule


def network() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))


def made(**settings: Any) -> Any:
    return build_optimizer(network(), Optimizer(**{"lr": 0.25, "weight_decay": 0.125, **settings}), 64)


def test_each_setting_reaches_its_optimizer() -> None:
    adamw = made(betas=(0.8, 0.7))
    assert (type(adamw).__name__, adamw.defaults["lr"], adamw.defaults["betas"]) == ("AdamW", 0.25, (0.8, 0.7))
    assert sorted(group["weight_decay"] for group in adamw.param_groups) == [0, 0.125]
    assert made(kwargs={"betas": (0.5, 0.5)}, betas=(0.8, 0.7)).defaults["betas"] == (0.5, 0.5)
    assert made(kwargs={"eps": 0.5}).defaults["eps"] == 0.5
    assert made(name="SGD", momentum=0.75).defaults["momentum"] == 0.75
    assert made(name="lookahead_adamw", betas=(0.8, 0.7)).defaults["betas"] == (0.8, 0.7)
    assert "betas" not in made(name="sgd", betas=(0.8, 0.7)).defaults
    assert len(made(name="adan", betas=(0.8, 0.7)).defaults["betas"]) == 3, "which two of three would not say"


@pytest.mark.parametrize(("name", "fused"), [("adam", True), ("adamw", True), ("sgd", None), ("nadam", None)])
def test_adam_runs_as_one_kernel(name: str, fused: bool | None) -> None:
    assert made(name=name).defaults.get("fused") is fused
    if fused:
        assert made(name=name, kwargs={"fused": False}).defaults["fused"] is False
        assert made(name=name, kwargs={"foreach": True}).defaults["fused"] is False


def test_layer_decay_is_none_of_timms_where_it_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(optimization, "create_optimizer_v2", lambda *given, **named: asked.append((given, named)))
    model = network()
    for decay, passed in ((1.0, None), (0.5, 0.5)):
        build_optimizer(model, Optimizer(lr=0.25, name="Lamb", layer_decay=decay, momentum=0.5, weight_decay=0.125), 64)
        assert asked.pop() == (
            (model, "lamb"),
            {"lr": 0.25, "weight_decay": 0.125, "momentum": 0.5, "layer_decay": passed, "betas": (0.9, 0.999)},
        )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"name": "Adahessian"},
            "optimizer.name=Adahessian needs second derivatives: choose one of the first order",
        ),
        ({"name": "Kron"}, "optimizer.name=Kron keeps a state that no checkpoint holds: choose another"),
        (
            {"name": "Lookahead_kron"},
            "optimizer.name=Lookahead_kron keeps a state that no checkpoint holds: choose another",
        ),
    ],
)
def test_an_unusable_optimizer_is_refused_by_the_name_that_was_given(settings: Any, message: str) -> None:
    with pytest.raises(InputError) as refused:
        made(**settings)
    assert str(refused.value) == message
    with pytest.raises(InputError, match=r"^optimizer\.name=AdamW cannot be made with these settings: .*epps"):
        made(name="AdamW", kwargs={"epps": 1})
    with pytest.raises(InputError, match=r"optimizer\.kwargs\.clip_threshold=abc: expected a number$"):
        made(name="adafactor", kwargs={"clip_threshold": "abc"})
    assert made(name="lamb", kwargs={"max_grad_norm": None}).defaults["max_grad_norm"] is None
    with pytest.raises(InputError, match=r"^unknown optimizer\.name 'lookahead_adamv': did you mean"):
        made(name="lookahead_adamv")


@pytest.mark.parametrize(("epochs", "steps", "warmup"), [(3, 7, 0.45), (10, 10, 1), (2, 3, 0), (1, 4, 0.5)])
def test_the_whole_rate_by_its_formula(epochs: int, steps: int, warmup: float) -> None:
    """Linear from `warmup_lr`, then half a cosine over the remaining steps."""
    settings = Schedule(warmup_epochs=warmup, warmup_lr=0.125, min_lr=0.0625)
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    schedule = build_schedule(optimizer, settings, epochs=epochs, steps=steps)
    total, before = epochs * steps, math.floor(warmup * steps)
    for number in range(total):
        schedule.step_update(number)
        if number < before:
            expected = 0.125 + (0.5 - 0.125) * number / before
        else:
            place = (number - before) / (total - before)
            expected = 0.0625 + (0.5 - 0.0625) * (1 + math.cos(math.pi * place)) / 2
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected, rel=1e-6), number


def test_a_schedule_that_timm_does_not_take_is_refused() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    with pytest.raises(InputError, match=r"^schedule\.name=wsd cannot be made with these settings: .*decay_epochs"):
        build_schedule(optimizer, Schedule(name="wsd", kwargs={"decay_epochs": 9}), epochs=2, steps=3)
    with pytest.raises(InputError, match=r"^schedule\.name=rsqrt cannot be made with these settings: .*infinity"):
        build_schedule(optimizer, Schedule(name="rsqrt", kwargs={"decay_epochs": 1e308}), epochs=2, steps=3)


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("multistep", {"decay_milestones": "abc"}),
        ("step", {"decay_rate": "half"}),
        ("step", {"decay_epochs": 0}),
        ("step", {"decay_rate": -0.5, "decay_epochs": 1}),
        ("cosine", {"k_decay": -1.0}),
    ],
)
def test_arguments_that_make_no_rate_are_refused_before_the_first_step(name: Any, given: dict[str, Any]) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    with pytest.raises(InputError, match=rf"^schedule\.name={name} cannot be made with these settings: "):
        build_schedule(optimizer, Schedule(name=name, kwargs=given, warmup_epochs=1), epochs=4, steps=3)


@pytest.mark.parametrize(
    ("name", "given", "refused"),
    [
        ("step", {"unknown": 1}, "unknown"),
        ("step", {"patience_epochs": 3}, "patience_epochs"),
        ("step", {"decay_epochs": 1, "decay_rate": 0.5}, ""),
        ("cosine", {"decay_rate": 0.5}, "decay_rate"),
        ("cosine", {"cycle_decay": 0.5}, "cycle_decay"),
        *((name, {"cycle_limit": 2}, "cycle_limit") for name in ("cosine", "tanh", "poly")),
        ("cosine", {"cycle_mul": 2.0}, "cycle_mul"),
        ("cosine", {"k_decay": 1.0}, ""),
        ("cosine", {"noise_pct": 0.5}, "noise_pct"),
        ("cosine", {"noise_pct": 0.5, "noise": 0.5}, ""),
        ("step", {"cycle_limit": 2}, "cycle_limit"),
        ("poly", {"decay_rate": 2.0, "k_decay": 1.0}, ""),
    ],
)
def test_an_argument_that_the_schedule_does_not_heed_is_refused(name: Any, given: dict[str, Any], refused: str) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule = Schedule(name=name, kwargs=given)
    if not refused:
        build_schedule(optimizer, schedule, epochs=2, steps=3)
        return
    with pytest.raises(
        InputError, match=rf"^schedule\.kwargs\.{refused} has no effect with schedule\.name={name}, which"
    ):
        build_schedule(optimizer, schedule, epochs=2, steps=3)


@pytest.mark.parametrize("name", ["constant", "step", "multistep", "cosine", "wsd"])
def test_the_cool_down_of_a_schedule_that_has_no_end_is_refused(name: Any) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule = Schedule(name=name, min_lr=0.125, cooldown_epochs=0.25)
    if name in ("cosine", "wsd"):
        build_schedule(optimizer, schedule, epochs=2, steps=3)
        return
    with pytest.raises(InputError) as refused:
        build_schedule(optimizer, schedule, epochs=2, steps=3)
    assert str(refused.value) == (
        f"schedule.cooldown_epochs=0.25 has no effect with schedule.name={name}, which does not end at min_lr: set "
        "schedule.cooldown_epochs=0"
    )


def test_what_timm_only_warns_of_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def warned(*given: Any, **named: Any) -> Any:
        import warnings

        warnings.warn("this argument is ignored", stacklevel=1)

    monkeypatch.setattr(optimization, "create_scheduler_v2", warned)
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.5)
    with pytest.raises(InputError) as refused:
        build_schedule(optimizer, Schedule(name="step"), epochs=2, steps=3)
    assert str(refused.value) == ("schedule.name=step cannot be made with these settings: this argument is ignored")


class Counting(torch.optim.SGD):
    """Its state has a tensor, numbers and nothing; its first group counts steps."""

    def __init__(self, model: nn.Module, **state: Any) -> None:
        weights = [parameter for parameter in model.parameters() if parameter.ndim == 2]
        others = [parameter for parameter in model.parameters() if parameter.ndim < 2]
        super().__init__([{"params": others, "step": 4, "lookahead_step": 2}, {"params": weights, "lr": 0.5}], lr=0.25)
        for number, parameter in enumerate(model.parameters()):
            if number != 1:
                self.state[parameter] = {"mean": torch.full_like(parameter, number), "count": number, **state}


def test_a_state_is_named_by_parameters_and_groups() -> None:
    model = network()
    state = optimizer_state(Counting(model, none=None, rate=0.5), model)
    names = [name for number, (name, _) in enumerate(model.named_parameters()) if number != 1]
    assert state.tensors.keys() == {f"mean/{name}" for name in names}
    assert torch.equal(state.tensors["mean/2.weight"], torch.full((2, 4), 4.0))
    expected: dict[str, Any] = {"step/groups.0": 4, "lookahead_step/groups.0": 2}
    numbers = dict(zip((name for name, _ in model.named_parameters()), range(6), strict=True))
    for name in names:
        expected |= {f"none/{name}": None, f"rate/{name}": 0.5, f"count/{name}": numbers[name]}
    assert state.numbers == expected


def test_a_state_that_no_checkpoint_holds_is_refused() -> None:
    model = network()
    for value in ([1], "text"):  # torch makes a generator of a text when it loads a state
        with pytest.raises(InputError) as refused:
            optimizer_state(Counting(model, history=value), model)
        assert str(refused.value) == (
            f"the state 'history' of this optimizer is a {type(value).__name__}, which no checkpoint holds: choose "
            "another optimizer.name"
        )


def test_a_state_is_restored_to_its_parameters_and_groups() -> None:
    model, other = network(), network()
    state = optimizer_state(Counting(model, rate=0.5), model)
    fresh = Counting(other)
    fresh.state.clear()
    fresh.param_groups[0]["step"] = 0
    restored = OptimizerState({**state.tensors, "shift/groups.1": torch.ones(3)}, state.numbers)
    restore_optimizer(fresh, other, restored)
    assert [group.get("step") for group in fresh.param_groups] == [4, None]
    assert fresh.param_groups[0]["lookahead_step"] == 2
    assert torch.equal(fresh.param_groups[1]["shift"], torch.ones(3))
    assert [group["lr"] for group in fresh.param_groups] == [0.25, 0.5], "rates are the schedule's"
    for number, parameter in enumerate(other.parameters()):
        if number == 1:
            assert parameter not in fresh.state
            continue
        found = fresh.state[parameter]
        assert torch.equal(found["mean"], torch.full_like(parameter, number))
        assert (found["count"], found["rate"]) == (number, 0.5)


def test_a_restored_tensor_lies_where_its_parameter_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under FSDP it is a part of the parameter's; what belongs to a group is placed like itself."""
    model = network()
    placed: list[tuple[torch.Tensor, torch.Tensor]] = []

    def record(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        placed.append((parameter, value))
        return value + 1

    monkeypatch.setattr(optimization, "placed_like", record)
    mean, shift = torch.zeros(4, 3), torch.zeros(2)
    optimizer = Counting(model)
    restore_optimizer(optimizer, model, OptimizerState({"mean/0.weight": mean, "shift/groups.1": shift}, {}))
    assert [(id(one), id(other)) for one, other in placed] == [(id(model[0].weight), id(mean)), (id(shift), id(shift))]
    assert torch.equal(optimizer.state[model[0].weight]["mean"], torch.ones(4, 3))
    assert torch.equal(optimizer.param_groups[1]["shift"], torch.ones(2))


def test_the_state_of_a_wrapped_optimizer_is_that_of_the_one_inside() -> None:
    model = network()
    wrapped = build_optimizer(model, Optimizer(lr=0.1, name="lookahead_sgd", momentum=0.9), 64)
    model(torch.ones(1, 3)).sum().backward()
    wrapped.step()
    found = optimizer_state(wrapped, model)
    assert "momentum_buffer/0.weight" in found.tensors
    assert found.numbers["lookahead_step/groups.0"] == 1
