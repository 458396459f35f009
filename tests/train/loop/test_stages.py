"""Rates and stages as the papers print them: scaled by the batch, with or without a warm-up before the curve."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from timm.layers import DropPath

from training_jobs import TINY, metrics_of, recipe_of
from vitx.core.errors import InputError
from vitx.core.run import RunFolder
from vitx.train import train
from vitx.train.loop.distributed.processes import ALONE
from vitx.train.loop.optimization import build_schedule, describe_rate
from vitx.train.loop.trainer import Trainer
from vitx.train.recipes.optimization_settings import Optimizer, Schedule, Stage
from vitx.train.recipes.recipe import Recipe
from vitx.train.recipes.registry import get_recipe

STAGES = 'stages=[{"until":2,"drop_path_rate":0.2}]'
SHORT = (
    *TINY,
    "workers=0",
    "batch_size=6",
    "epochs=4",
    "model.kwargs.drop_path_rate=0.5",
    "schedule.warmup_epochs=0.5",
)


class Stopped(Exception):
    pass


def staged(image_folder: Path, *overrides: str) -> Recipe:
    return recipe_of(*SHORT, STAGES, *overrides).on_data(str(image_folder))


def cosine(place: float, highest: float, lowest: float) -> float:
    return lowest + (highest - lowest) * (1 + math.cos(math.pi * place)) / 2


@pytest.mark.parametrize("prefix", [False, True])
def test_the_rate_of_every_step_with_warmup_and_cooldown(prefix: bool) -> None:
    epochs, steps = 12, 5
    settings = Schedule(warmup_epochs=2, warmup_lr=0.1, warmup_prefix=prefix, cooldown_epochs=3, min_lr=0.05)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = build_schedule(optimizer, settings, epochs=epochs, steps=steps)
    for step in range(epochs * steps):
        schedule.step_update(step)
        begin, end = 10 * prefix, 9 * steps  # of the curve
        if step < 10:
            expected = 0.1 + 0.9 * step / 10
        else:
            expected = cosine((step - begin) / (end - begin), 1.0, 0.05) if step < end else 0.05
        assert optimizer.param_groups[0]["lr"] == pytest.approx(expected, rel=1e-9), step


def test_a_warm_up_is_at_most_half_of_the_epochs() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = build_schedule(optimizer, Schedule(warmup_epochs=5), epochs=4, steps=10)
    rates = []
    for step in range(40):
        schedule.step_update(step)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates.index(max(rates)) == 20


def test_the_rate_is_said_at_the_start() -> None:
    assert describe_rate(get_recipe("deit-s"), 1024) == (
        "learning rate 0.001 at 1024 images a step, 0.0005 for 512; 5 epochs of warm-up"
    )
    assert describe_rate(get_recipe("digits-deit").model_copy(update={"epochs": 3}), 64) == (
        "learning rate 0.002 at 64 images a step; 1.5 epochs of warm-up, half of all instead of 4.5"
    )
    of_two = get_recipe("digits-deit").model_copy(update={"epochs": 2})
    assert describe_rate(of_two, 64).endswith("; 1 epoch of warm-up, half of all instead of 4.5")


def test_the_rate_grows_with_the_batch() -> None:
    assert Optimizer(lr=5e-4, lr_base_size=512).rate(1024) == pytest.approx(1e-3)
    assert Optimizer(lr=5e-4, lr_base_size=512).rate(256) == pytest.approx(2.5e-4)
    assert Optimizer(lr=5e-4).rate(256) == 5e-4


def rates_and_drop_paths(trainer: Trainer, epochs: int) -> list[tuple[float, float]]:
    """The first rate and the last block's drop path of each epoch."""
    found = []
    for epoch in range(1, epochs + 1):
        trainer._enter_stage(epoch)
        trainer.schedule.step_update((epoch - 1) * trainer.data.steps)
        last = [module for module in trainer.model.modules() if isinstance(module, DropPath)][-1]
        found.append((trainer.optimizer.param_groups[0]["lr"], last.drop_prob))
    return found


def test_each_stage_has_its_own_schedule_and_drop_path(image_folder: Path, tmp_path: Path) -> None:
    recipe = staged(image_folder, "optimizer.lr=0.5", "schedule.min_lr=0.125", "schedule.warmup_prefix=false")
    trainer = Trainer(recipe, RunFolder(tmp_path), torch.device("cpu"), ALONE, skip_bad=False, quiet=True)
    first = trainer.optimizer
    found = rates_and_drop_paths(trainer, 4)
    assert [rate for _, rate in found] == pytest.approx([0.2, 0.2, 0.5, 0.5])
    expected = [0.0, cosine(1 / 2, 0.5, 0.125), cosine(2 / 4, 0.5, 0.125), cosine(3 / 4, 0.5, 0.125)]
    assert [rate for rate, _ in found] == pytest.approx(expected)
    assert trainer.optimizer is not first
    assert trainer.stepper.optimizer is trainer.optimizer
    kept = staged(image_folder, 'stages=[{"until":2,"drop_path_rate":0.2,"fresh_optimizer":false}]')
    trainer = Trainer(kept, RunFolder(tmp_path), torch.device("cpu"), ALONE, skip_bad=False, quiet=True)
    first = trainer.optimizer
    rates_and_drop_paths(trainer, 4)
    assert trainer.optimizer is first


def stopping_after(epoch: int) -> Any:
    def stop(number: int, _: torch.nn.Module) -> None:
        if number == epoch:
            raise Stopped

    return stop


@pytest.mark.parametrize("epoch", [1, 2, 3])
def test_a_staged_run_resumes_to_the_bit(image_folder: Path, tmp_path: Path, epoch: int) -> None:
    recipe = staged(image_folder)
    train(recipe, tmp_path / "whole", device="cpu", quiet=True)
    with pytest.raises(Stopped):
        train(recipe, tmp_path / "stopped", device="cpu", quiet=True, after_epoch=stopping_after(epoch))
    train(recipe, tmp_path / "stopped", device="cpu", quiet=True, resume=True)
    for name in ("model", "ema", "optimizer"):
        whole, resumed = (
            load_file(RunFolder(tmp_path / run).checkpoint("last")[0] / f"{name}.safetensors")
            for run in ("whole", "stopped")
        )
        assert whole.keys() == resumed.keys()
        assert all(torch.equal(whole[key], resumed[key]) for key in whole), name
    rates = [row["lr"] for row in metrics_of(tmp_path / "stopped")]
    assert rates == [row["lr"] for row in metrics_of(tmp_path / "whole")]
    assert rates[2] > rates[1], "the second stage begins at a higher rate"


def test_a_constant_average_begins_with_the_initial_weights(image_folder: Path, tmp_path: Path) -> None:
    recipe = staged(image_folder, "ema_decay=0.75", "ema_warmup=false", "schedule.warmup_epochs=0")
    trainer = Trainer(recipe, RunFolder(tmp_path), torch.device("cpu"), ALONE, skip_bad=False, quiet=True)
    weight = trainer.model.get_parameter("head.weight")
    before = weight.detach().clone()
    trainer.step(1, next(trainer.batches(1)))
    assert not torch.equal(before, weight)
    average = trainer.ema.module.get_parameter("head.weight")
    torch.testing.assert_close(average.detach(), 0.75 * before + 0.25 * weight.detach())


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            'stages=[{"until":4,"drop_path_rate":0.1}]',
            r"stages end after \[4\] epochs, expected rising numbers below 4",
        ),
        (
            'stages=[{"until":3,"drop_path_rate":0.1},{"until":2,"drop_path_rate":0.1}]',
            r"stages end after \[3, 2\] epochs",
        ),
        ("model.kwargs.drop_path_rate=0", r"model\.kwargs\.drop_path_rate=0 leaves out of the network"),
        ("schedule.cooldown_epochs=1", r"schedule\.cooldown_epochs 1 is half of 2 epochs or more"),
        ("schedule.min_lr=1", r"schedule\.min_lr 1 is above the learning rate"),
    ],
)
def test_impossible_stages_are_refused(override: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        recipe_of(*SHORT, STAGES, override)


def test_the_stage_of_each_epoch() -> None:
    recipe = recipe_of(*SHORT, STAGES)
    assert [recipe.stage(epoch).until for epoch in (1, 2, 3, 4)] == [2, 2, 4, 4]
    assert recipe.stage(4) == Stage(until=4, drop_path_rate=0.5)
