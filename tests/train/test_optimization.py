"""The learning rate, what is decayed, and an optimizer that goes on where it stopped."""

from typing import Any

import pytest
import timm
import torch

import vitx.models  # noqa: F401  # registers deepvit_digits
from vitx.train.optimization import build_optimizer, learning_rate, optimizer_tensors, restore_optimizer
from vitx.train.trainer_settings import Optimizer, Schedule

SETTINGS = Optimizer(lr=1e-2, weight_decay=0.1)


def network() -> Any:
    torch.manual_seed(0)
    return timm.create_model("deepvit_digits", depth=2, attention="re-attention", embed_dim=16)


def test_the_rate_rises_and_falls_to_its_minimum() -> None:
    rates = [learning_rate(step, 100, 1.0, Schedule(warmup=0.1, min_lr=0.01)) for step in range(100)]
    assert rates[:11] == sorted(rates[:11])
    assert rates[0] == pytest.approx(1 / 11)
    assert rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[99] == pytest.approx(0.01)
    assert rates[10 + 89 // 2] == pytest.approx(0.505, abs=0.01)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_short_runs_have_a_rate(steps: int) -> None:
    assert all(
        0 < learning_rate(step, steps, 1.0, Schedule(warmup=0.5)) <= 1 or step == steps - 1 for step in range(steps)
    )


def test_only_matrices_are_decayed() -> None:
    model = network()
    optimizer = build_optimizer(model, SETTINGS)
    decayed = {id(p) for group in optimizer.param_groups if group["weight_decay"] for p in group["params"]}
    for name, parameter in model.named_parameters():
        spared = parameter.ndim <= 1 or name in ("pos_embed", "cls_token")
        assert (id(parameter) in decayed) is not spared, name


def test_a_restored_optimizer_takes_the_same_steps() -> None:
    def step(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> None:
        images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        model(images).square().mean().backward()
        optimizer.step()

    first, second = network(), network()
    ours = build_optimizer(first, SETTINGS)
    step(first, ours, 1)
    second.load_state_dict(first.state_dict())
    theirs = build_optimizer(second, SETTINGS)
    restore_optimizer(theirs, second, optimizer_tensors(ours, first))
    for seed in (2, 3):
        step(first, ours, seed)
        step(second, theirs, seed)
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name
