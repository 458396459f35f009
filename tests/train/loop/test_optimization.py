"""The learning rate, which parameters are decayed, and optimizers that resume to the bit."""

import json
from typing import Any

import pytest
import timm
import torch

import vitx.models  # noqa: F401  # registers deepvit_digits
from vitx.core.errors import InputError
from vitx.train.loop.optimization import (
    OptimizerState,
    build_optimizer,
    build_schedule,
    optimizer_state,
    restore_optimizer,
)
from vitx.train.recipes.optimization_settings import Optimizer, Schedule

SETTINGS = Optimizer(lr=1e-2, weight_decay=0.1)


def network() -> Any:
    torch.manual_seed(0)
    return timm.create_model(
        "deepvit_digits", depth=2, attention="re-attention", embed_dim=16, num_heads=2, img_size=16
    )


def rates(settings: Schedule, *, epochs: int = 10, steps: int = 10, lr: float = 1.0) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    schedule = build_schedule(optimizer, settings, epochs=epochs, steps=steps)
    found = []
    for step in range(epochs * steps):
        schedule.step_update(step)
        found.append(optimizer.param_groups[0]["lr"])
    return found


def test_the_rate_rises_and_falls_to_its_minimum() -> None:
    found = rates(Schedule(warmup_epochs=1, min_lr=0.01))
    assert found[:11] == pytest.approx([step / 10 for step in range(11)])
    assert found[10:] == sorted(found[10:], reverse=True)
    assert found[10 + 45] == pytest.approx(0.505)
    assert found[99] == pytest.approx(0.01, abs=1e-3)
    assert rates(Schedule(warmup_epochs=1, warmup_lr=0.2))[0] == pytest.approx(0.2)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_short_runs_have_a_rate(steps: int) -> None:
    assert all(0 <= rate <= 1 for rate in rates(Schedule(warmup_epochs=0.5), epochs=1, steps=steps))
    assert max(rates(Schedule(warmup_epochs=0.5), epochs=1, steps=steps)) > 0.4


@pytest.mark.parametrize(
    ("settings", "step", "rate"),
    [
        (Schedule(name="constant"), 99, 1.0),
        (Schedule(name="step", kwargs={"decay_epochs": 4, "decay_rate": 0.1}), 45, 0.1),
        (Schedule(name="multistep", kwargs={"decay_milestones": [3], "decay_rate": 0.5}), 31, 0.5),
        (Schedule(name="poly", kwargs={"decay_rate": 1.0}), 50, 0.5),
        (Schedule(name="wsd", warmup_epochs=1, kwargs={"decay_epochs": 0.5}), 50, 1.0),
        (Schedule(name="tanh"), 0, 1.0),
    ],
)
def test_the_schedules_of_timm_by_name(settings: Schedule, step: int, rate: float) -> None:
    assert rates(settings)[step] == pytest.approx(rate, rel=0.02)


def test_a_wrong_schedule_argument_is_named() -> None:
    with pytest.raises(
        InputError, match=r"schedule\.kwargs\.decay_eposch has no effect with schedule\.name=cosine, which"
    ):
        rates(Schedule(kwargs={"decay_eposch": 3}))


def test_only_matrices_are_decayed() -> None:
    model = network()
    optimizer = build_optimizer(model, SETTINGS, 64)
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    for name, parameter in model.named_parameters():
        spared = parameter.ndim <= 1 or name in ("pos_embed", "cls_token")
        assert (id(parameter) in decayed) is not spared, name


def test_layer_decay_lowers_the_rate_of_each_layer_before() -> None:
    model = network()
    optimizer = build_optimizer(model, Optimizer(lr=1.0, layer_decay=0.5), 64)
    schedule = build_schedule(optimizer, Schedule(name="constant"), epochs=1, steps=4)
    schedule.step_update(1)
    rate = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert rate[id(model.head.weight)] == 1.0
    assert rate[id(model.blocks[1].attn.qkv.weight)] == 0.5
    assert rate[id(model.blocks[0].attn.qkv.weight)] == 0.25
    assert rate[id(model.patch_embed.proj.weight)] == 0.125


# One optimizer for each way to keep a state: tensors, numbers, a counter in the group, a tensor in the group, a wrapper
# (Lookahead), and a second algorithm for vectors (Muon).
@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor", "adan", "lamb", "lookahead_adamw", "muon", "lion"])
def test_a_restored_optimizer_takes_the_same_steps(name: str) -> None:
    def step(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> None:
        images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        model(images).square().mean().backward()
        optimizer.step()

    settings = SETTINGS.model_copy(update={"name": name})
    first, second = network(), network()
    ours = build_optimizer(first, settings, 64)
    for seed in (1, 2):
        step(first, ours, seed)
    second.load_state_dict(first.state_dict())
    theirs = build_optimizer(second, settings, 64)
    state = optimizer_state(ours, first)
    copied = {key: value.clone() for key, value in state.tensors.items()}
    restore_optimizer(theirs, second, OptimizerState(copied, json.loads(json.dumps(state.numbers))))
    for seed in range(3, 9):  # beyond Lookahead's six
        step(first, ours, seed)
        step(second, theirs, seed)
    for key, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[key]), key


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "adamv"}, r"unknown optimizer\.name 'adamv': did you mean adam"),
        ({"name": "adahessian"}, "needs second derivatives"),
        ({"name": "kron"}, "keeps a state that no checkpoint holds"),
        ({"name": "fusedadamw"}, r"optimizer\.name=fusedadamw cannot be made"),
        ({"name": "adamw", "kwargs": {"epps": 1}}, r"optimizer\.name=adamw cannot be made .*epps"),
        ({"name": "adamw", "kwargs": {"betas": [0.9]}}, r"optimizer\.name=adamw cannot be made"),
        (
            {"name": "adamw", "kwargs": {"amsgrad": "maybe"}},
            r"optimizer\.kwargs\.amsgrad=maybe: expected true or false",
        ),
    ],
)
def test_an_unusable_optimizer_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        build_optimizer(network(), Optimizer(lr=1e-3, **settings), 64)
