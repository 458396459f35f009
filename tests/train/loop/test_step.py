"""One optimizer step by hand: what is clipped, averaged over parts, drawn, checked, and kept in the log."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from training_jobs import TINY, recipe_of
from vitx.core.run import RunFolder
from vitx.train.loop.distributed.processes import ALONE
from vitx.train.loop.step import EpochLog, mean_losses, resumed_sums
from vitx.train.loop.trainer import Trainer
from vitx.train.recipes.recipe import apply_overrides

# Without BatchNorm, dropout and mixing, so that a step is a function of the weights and the images alone.
PLAIN = (
    *TINY,
    'model.kwargs.attention=["plain","plain"]',
    *("workers=0", "batch_size=6", "cutmix.probability=0", "losses.mixing=0", "schedule.warmup_epochs=0"),
    *("optimizer.name=momentum", "optimizer.momentum=0", "optimizer.weight_decay=0", "optimizer.lr=0.5"),
)


@pytest.fixture
def trainer(image_folder: Path, tmp_path: Path) -> Any:
    def make(*overrides: str) -> Trainer:
        recipe = apply_overrides(recipe_of(*PLAIN).on_data(str(image_folder)), overrides)
        return Trainer(recipe, RunFolder(tmp_path / "run"), torch.device("cpu"), ALONE, skip_bad=False, quiet=True)

    return make


def flat(model: Any) -> Tensor:
    return torch.cat([parameter.detach().flatten().double() for parameter in model.parameters()])


def flat_gradient(model: Any) -> Tensor:
    return torch.cat([parameter.grad.flatten().double() for parameter in model.parameters()])


def change_in_a_step(trainer: Trainer) -> Tensor:
    trainer.model.train()
    before = flat(trainer.model)
    trainer.step(1, next(trainer.batches(1)))
    return flat(trainer.model) - before


def test_the_norm_of_the_whole_gradient_is_clipped(trainer: Any) -> None:
    free, clipped = change_in_a_step(trainer("optimizer.clip=0")), change_in_a_step(trainer("optimizer.clip=0.01"))
    assert free.norm() > 0.5 * 0.02, "without clipping the step is longer"
    torch.testing.assert_close(clipped, 0.5 * 0.01 * free / free.norm(), rtol=1e-3, atol=1e-7)
    wide = change_in_a_step(trainer("optimizer.clip=1000"))
    torch.testing.assert_close(wide, free, rtol=1e-5, atol=1e-8)


def test_a_step_with_sam_goes_along_the_gradient_of_the_point_uphill(trainer: Any) -> None:
    """w − lr·∇L(w + ρ·g/‖g‖), each gradient taken by hand on the same batch."""
    found = change_in_a_step(trainer("optimizer.clip=0", "optimizer.sam_rho=0.3"))
    other = trainer("optimizer.clip=0")
    batch = next(other.batches(1))
    other.model.train()
    other.stepper._backward(1, batch)
    gradient = flat_gradient(other.model)
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.add_(0.3 * parameter.grad / gradient.norm().float())
    other.stepper._backward(1, batch)
    torch.testing.assert_close(found, -0.5 * flat_gradient(other.model), rtol=1e-3, atol=1e-6)


def test_accumulated_losses_are_means_over_the_batch(trainer: Any) -> None:
    losses = []
    for accumulate in (1, 3):
        one = trainer(f"optimizer.accumulate={accumulate}", "optimizer.clip=0")
        one.model.train()
        found, checked = one.stepper(1, next(one.batches(1)))
        assert torch.equal(checked, found["total"])
        assert not any(value.requires_grad for value in found.values())
        losses.append(found)
    assert losses[0].keys() == losses[1].keys() >= {"classification", "total"}
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("clip", [1, 0])
def test_a_gradient_that_is_not_finite_is_seen(trainer: Any, clip: float) -> None:
    one = trainer(f"optimizer.clip={clip}")
    one.model.train()
    one.model.head.weight.register_hook(lambda gradient: gradient * math.inf)
    losses, checked = one.stepper(1, next(one.batches(1)))
    assert torch.isfinite(losses["total"])
    assert not torch.isfinite(checked)


def test_a_gradient_is_that_of_its_step_alone(trainer: Any) -> None:
    one, fresh = (trainer("optimizer.lr=1e-30", "schedule.min_lr=0") for _ in range(2))
    batches = list(one.batches(1))
    for each in (one, fresh):
        each.model.train()
    one.stepper(1, batches[0])
    one.stepper(1, batches[1])
    fresh.stepper(1, batches[1])
    torch.testing.assert_close(flat_gradient(one.model), flat_gradient(fresh.model), rtol=1e-5, atol=1e-8)


def test_dropout_differs_between_steps_and_parts_and_follows_from_the_place_alone(trainer: Any) -> None:
    one = trainer("optimizer.accumulate=3")
    batches = list(one.batches(1))

    def draws(epoch: int, batch: Any) -> list[float]:
        return [torch.rand(()).item() for _ in one.stepper._parts(epoch, batch)]

    found = [value for place in ((1, batches[0]), (1, batches[1]), (2, batches[0])) for value in draws(*place)]
    assert len(set(found)) == 9
    torch.manual_seed(99)
    assert draws(1, batches[1]) == found[3:6]


@pytest.mark.parametrize(("box", "boxes"), [("batch", 1), ("sample", 6)])
@pytest.mark.parametrize("erasing", [0, 0.9])
def test_parts_share_the_box_of_the_batch_or_draw_their_own(trainer: Any, box: str, boxes: int, erasing: float) -> None:
    settings = ("cutmix.probability=1", "cutmix.alpha=8", f"cutmix.box={box}", f"augmentation.erasing={erasing}")
    one = trainer("optimizer.accumulate=3", *settings)
    masks = [mask for part in one.stepper._parts(1, next(one.batches(1))) for mask in part.partner_Bn]
    assert len(masks) == 6
    assert len({tuple(mask.tolist()) for mask in masks}) == boxes


@pytest.mark.parametrize("mixing", [("augmentation.erasing=0.9",), ("cutmix.box=sample",)])
def test_parts_share_the_mixup_of_the_batch(trainer: Any, mixing: tuple[str, ...]) -> None:
    """Its λ is drawn for the whole batch, whatever else is drawn for each image."""
    one = trainer("optimizer.accumulate=3", "losses.label_smoothing=0", "mixup.mixup=0.8", *mixing)
    parts = list(one.stepper._parts(1, next(one.batches(1))))
    shares = [{round(float(value), 4) for value in part.targets_BC.flatten()} - {0, 1} for part in parts]
    assert len(set.union(*shares)) <= 2, "λ and 1 − λ"


def test_averaged_weights_follow_the_warm_up_of_their_decay(trainer: Any) -> None:
    """timm: the decay of step t (from 1) is 1 − t^(−2/3), at most the recipe's; the first step copies the weights."""
    one = trainer("ema_decay=0.5")
    one.model.train()
    averaged = torch.zeros(())
    for number, batch in enumerate(list(one.batches(1))[:3] + list(one.batches(2))[:2]):
        decay = min(0.5, 1 - (number + 1) ** (-2 / 3))
        epoch, place = divmod(number, one.data.steps)
        one.step(epoch + 1, batch)
        assert batch.number == place
        averaged = decay * averaged + (1 - decay) * flat(one.model)
        torch.testing.assert_close(flat(one.ema.module), averaged, rtol=1e-5, atol=1e-7)


def test_the_rate_of_a_step_is_that_of_its_place_in_the_whole_run(trainer: Any) -> None:
    one = trainer("epochs=4", "schedule.min_lr=0.1", "optimizer.lr=0.5")
    steps = one.data.steps
    for epoch, batch in ((1, 0), (1, 1), (2, 0), (4, steps - 1)):
        one.step(epoch, list(one.batches(epoch))[batch])
        place = ((epoch - 1) * steps + batch) / (4 * steps)
        expected = 0.1 + 0.2 * (1 + math.cos(math.pi * place))
        assert one.optimizer.param_groups[0]["lr"] == pytest.approx(expected, rel=1e-6)


def test_the_log_sums_losses_and_names_the_first_bad_batch() -> None:
    log = EpochLog(4, torch.device("cpu"), {"total": 1.5})
    assert log.first_not_finite(ALONE) is None
    for number, value in enumerate([1.0, math.nan, 2.0, math.inf]):
        log.add(number, {"total": torch.tensor(0.25), "cosine": torch.tensor(0.5)}, torch.tensor(value))
    assert log.first_not_finite(ALONE) == 1
    assert log.totals() == {"total": 2.5, "cosine": 2.0}


def test_sums_of_several_processes() -> None:
    sums = [{"total": 6.0}, {"total": 10.0}]
    assert mean_losses(sums, steps=4) == {"total": 2.0}
    assert [resumed_sums(rank, 2, sums) for rank in (0, 1)] == sums
    assert [resumed_sums(rank, 3, sums) for rank in (0, 1, 2)] == [{"total": 8.0}] * 3
