"""A step on a network of one product: its gradients, losses, draws and number formats, all by hand."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from training_jobs import recipe_of
from vitx.core.preprocess import Preprocessing
from vitx.train.loop import step
from vitx.train.loop.distributed.processes import ALONE, Processes
from vitx.train.loop.inputs.prefetch import DeviceBatch, Prefetcher
from vitx.train.loop.inputs.training_data import CUTMIX, NETWORK, seed_of
from vitx.train.loop.step import (
    EpochLog,
    Objective,
    Stepper,
    autocast_precision,
    mean_losses,
    resumed_sums,
)
from vitx.train.losses.cutmix import MixedBatch
from vitx.train.randomness import seed_generators

CPU = torch.device("cpu")
PLAIN = ("cutmix.probability=0", "losses.mixing=0", "seed=5", "optimizer.clip=0")
LABELS = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2])
IMAGES = torch.randn(12, 3, 4, 4, generator=torch.Generator().manual_seed(0))


class Network(nn.Module):
    """One number for an image, and a parameter that no loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 48))
        self.unused = nn.Parameter(torch.ones(2))
        self.norm = nn.BatchNorm2d(3, affine=False)

    def forward(self, images: Tensor) -> Tensor:
        self.norm(images)  # counts its batches
        return images.flatten(1) @ self.weight


class Squares(nn.Module):
    """Mean squared error as `total`, a half of it as `classification`."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.seen, self.formats = network, list[MixedBatch](), list[Any]()

    def forward(self, batch: MixedBatch) -> dict[str, Tensor]:
        self.seen.append(batch)
        enabled = torch.is_autocast_enabled("cpu")
        self.formats.append(torch.get_autocast_dtype("cpu") if enabled else None)
        total = (self.network(batch.images_B3SS).float() - batch.labels_B).square().mean()
        return {"classification": total / 2, "total": total}


def stepper(*overrides: str, processes: Processes = ALONE, lr: float = 0.01, **more: Any) -> Any:
    network = Network()
    return Stepper(
        more.get("objective") or Squares(network),
        network,
        torch.optim.SGD(network.parameters(), lr=lr, momentum=0.9, weight_decay=0.5 if more.get("decay") else 0),
        recipe_of(*PLAIN, *overrides),
        3,
        Prefetcher(Preprocessing(image_size=4), CPU),
        processes,
    )


def batch(number: int = 7) -> DeviceBatch:
    return DeviceBatch(number, IMAGES, LABELS)


def gradient_by_hand(weight: Tensor) -> Tensor:
    x = IMAGES.flatten(1).double()
    return 2 * x.T @ (x @ weight.double() - LABELS) / 12


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_a_step_goes_down_the_gradient_of_the_whole_batch(accumulate: int) -> None:
    one = stepper(f"optimizer.accumulate={accumulate}")
    before = one.network.weight.detach().clone()
    one.network.weight.grad = torch.full_like(before, 9)
    one.network.unused.grad = torch.ones(2)
    losses, checked = one(1, batch())
    expected = gradient_by_hand(before)
    torch.testing.assert_close(one.network.weight.detach().double(), before - 0.01 * expected, rtol=1e-5, atol=1e-6)
    total = (IMAGES.flatten(1).double() @ before.double() - LABELS).square().mean().item()
    assert losses["total"].item() == pytest.approx(total, rel=1e-5)
    assert losses["classification"].item() == pytest.approx(total / 2, rel=1e-5)
    assert torch.equal(checked, losses["total"])
    assert not any(loss.requires_grad for loss in losses.values())
    assert len(one.objective.seen) == accumulate, "no second pass without SAM"
    assert one.network.unused.grad is None, "or a momentum would move it"
    assert torch.equal(one.network.unused.detach(), torch.ones(2))
    assert one.optimizer.state[one.network.weight]["momentum_buffer"].shape == (48,)
    for parameter in one.network.parameters():
        assert any(parameter is each for each in one.parameters)


def test_parts_are_those_of_the_batch_and_the_last_exchanges_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    lasts: list[bool] = []

    @contextmanager
    def recorded(module: nn.Module, *, last: bool) -> Iterator[None]:
        assert module is one.objective
        lasts.append(last)
        yield

    monkeypatch.setattr(step, "accumulating", recorded)
    one = stepper("optimizer.accumulate=3")
    one(1, batch())
    assert lasts == [False, False, True]
    rows = [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    for part, chosen in zip(one.objective.seen, rows, strict=True):
        assert torch.equal(part.images_B3SS, IMAGES[chosen])
        assert torch.equal(part.labels_B, LABELS[chosen])


def test_sam_takes_each_batch_twice_and_counts_it_once() -> None:
    one = stepper("optimizer.sam_rho=0.2")
    before = one.network.weight.detach().clone()
    losses, _ = one(1, batch())
    gradient = gradient_by_hand(before)
    uphill = before + 0.2 * gradient / gradient.norm()
    expected = before - 0.01 * gradient_by_hand(uphill)
    torch.testing.assert_close(one.network.weight.detach().double(), expected, rtol=1e-5, atol=1e-6)
    total = (IMAGES.flatten(1).double() @ before.double() - LABELS).square().mean().item()
    assert losses["total"].item() == pytest.approx(total, rel=1e-5), "the loss is that of the weights themselves"
    assert len(one.objective.seen) == 2
    assert one.network.norm.num_batches_tracked == 1


@pytest.mark.parametrize(("rho", "copied"), [(0.0, False), (0.1, True)])
def test_sam_keeps_the_images_that_mixing_may_change(rho: float, copied: bool) -> None:
    one = stepper(f"optimizer.sam_rho={rho}")
    (part,) = one._parts(1, batch())
    assert (part.images_B3SS.data_ptr() != IMAGES.data_ptr()) is copied
    assert torch.equal(part.images_B3SS, IMAGES)
    pixels = torch.full((2, 4, 4, 3), 255, dtype=torch.uint8)
    (bright,) = one._parts(1, DeviceBatch(0, pixels, LABELS[:2]))
    assert bright.images_B3SS.shape == (2, 3, 4, 4)
    assert bright.images_B3SS.dtype == torch.float32


@pytest.mark.parametrize("clip", [0.5, 1e6])
def test_the_gradient_is_clipped_to_its_norm(clip: float) -> None:
    one = stepper(f"optimizer.clip={clip}")
    before = one.network.weight.detach().clone()
    losses, checked = one(1, batch())
    gradient = gradient_by_hand(before)
    expected = gradient * min(1.0, clip / gradient.norm().item())
    torch.testing.assert_close(one.network.weight.detach().double(), before - 0.01 * expected, rtol=1e-5, atol=1e-6)
    assert checked.item() == losses["total"].item(), "a finite norm changes nothing"


@pytest.mark.parametrize("sharded", [False, True])
def test_a_norm_that_is_not_finite_shows_in_the_checked_total(monkeypatch: pytest.MonkeyPatch, sharded: bool) -> None:
    """Under FSDP the norm is a DTensor, which has to be summed up."""

    class Sharded:
        def full_tensor(self) -> Tensor:
            return torch.tensor(float("inf"))

    norm: Any = Sharded() if sharded else torch.tensor(float("inf"))
    clipped: list[Any] = []
    one = stepper("optimizer.clip=0.5")

    def clip(parameters: Any, largest: float) -> Any:
        clipped.append((parameters, largest))
        return norm

    monkeypatch.setattr(nn.utils, "clip_grad_norm_", clip)
    losses, checked = one(1, batch())
    assert torch.isfinite(losses["total"])
    assert not torch.isfinite(checked)
    assert clipped == [(one.parameters, 0.5)]


@pytest.mark.parametrize(
    ("precision", "dtype", "scaled"),
    [("auto", None, False), ("float32", None, False), ("bfloat16", torch.bfloat16, False)],
)
def test_the_forward_pass_is_in_the_recipes_format(precision: str, dtype: Any, scaled: bool) -> None:
    one = stepper(f"execution.precision={precision}")
    one(1, batch())
    assert one.objective.formats == [dtype]
    assert one.scaler.is_enabled() is scaled
    assert one.precision is dtype
    assert not torch.is_autocast_enabled("cpu")


def test_in_float16_the_loss_is_scaled_and_a_step_that_overflows_is_skipped() -> None:
    one = stepper("execution.precision=float16", "optimizer.clip=1e30", lr=1e-3)
    assert one.scaler.is_enabled()
    one.scaler = torch.amp.GradScaler("cpu", init_scale=64.0)  # with 2^16 the first step of such a loss overflows
    before = one.network.weight.detach().clone()
    losses, checked = one(1, batch())
    assert one.objective.formats == [torch.float16]
    moved = (one.network.weight.detach() - before).double()
    torch.testing.assert_close(moved, -1e-3 * gradient_by_hand(before), rtol=2e-2, atol=1e-4)
    assert torch.equal(checked, losses["total"])
    one.network.weight.register_hook(lambda gradient: gradient * float("inf"))
    kept = one.network.weight.detach().clone()
    losses, checked = one(1, batch())
    assert torch.equal(one.network.weight.detach(), kept)
    assert one.scaler.get_scale() == 32
    assert torch.equal(checked, losses["total"]), "the scaler sees to it"


def test_a_gradient_that_no_scale_makes_finite_is_told() -> None:
    """Each step would be skipped to the end of the run, and its loss be finite."""
    one = stepper("execution.precision=float16")
    one.network.weight.register_hook(lambda gradient: gradient * float("nan"))
    kept = one.network.weight.detach().clone()
    scales, finite = [], []
    for _ in range(32):
        scales.append(one.scaler.get_scale())
        losses, checked = one(1, batch())
        assert bool(losses["total"].isfinite())
        finite.append(bool(checked.isfinite()))
    assert torch.equal(one.network.weight.detach(), kept)
    assert finite == [scale >= 2**-14 for scale in scales]
    assert finite == [True] * 31 + [False]


def test_the_format_follows_from_recipe_and_device() -> None:
    cuda = torch.device("cuda")
    for choice, on_cpu, on_gpu in (
        ("auto", None, torch.bfloat16),
        ("float32", None, None),
        ("bfloat16", torch.bfloat16, torch.bfloat16),
        ("float16", torch.float16, torch.float16),
    ):
        recipe = recipe_of(f"execution.precision={choice}")
        assert autocast_precision(recipe, CPU) is on_cpu
        assert autocast_precision(recipe, cuda) is on_gpu


@pytest.mark.parametrize("seed", [3, 2**40 + 3])
def test_all_generators_are_seeded(seed: int) -> None:
    for generator in (torch.manual_seed, np.random.seed, random.seed):
        generator(99)
    seed_generators(seed)
    assert torch.initial_seed() == seed
    assert torch.rand(()) == torch.rand((), generator=torch.Generator().manual_seed(seed))
    assert np.random.random() == np.random.RandomState(3).random_sample()
    assert random.random() == random.Random(seed).random()


@pytest.mark.parametrize("rank", [0, 2])
def test_each_part_draws_from_its_place(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    asked: list[Any] = []

    def recorded(images: Tensor, labels: Tensor, recipe: Any, grid: Any, *rngs: random.Random, classes: int) -> Any:
        asked.append((images, labels, recipe, grid, [rng.random() for rng in rngs], classes))
        return len(asked)

    monkeypatch.setattr(step, "mix_batch", recorded)
    one = stepper("optimizer.accumulate=2", processes=Processes(rank, 3))
    one.grid = "the grid"
    for index, mixed in enumerate(one._parts(4, batch(number=7))):
        assert mixed == index + 1
        number = 2 * rank + index
        assert torch.initial_seed() == seed_of(5, NETWORK, 4, 7, number)
        images, labels, recipe, grid, drawn, classes = asked[index]
        places = ((4, 7), (4, 7, number) if number else (4, 7))  # of the batch's draws, and of each image's
        assert drawn == [random.Random(seed_of(5, CUTMIX, *place)).random() for place in places]
        assert torch.equal(images, batch().part(index, 2)[0])
        assert torch.equal(labels, batch().part(index, 2)[1])
        assert (recipe, grid, classes) == (one.recipe, "the grid", 3)
    assert len(asked) == 2


def test_the_objective_asks_for_the_losses_of_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(step, "compute_losses", lambda *given, **named: asked.append((given, named)))
    network, recipe, teacher = Network(), recipe_of(), SimpleNamespace()
    objective = Objective(network, recipe, 3, teacher)  # type: ignore[arg-type]
    objective("the batch")
    assert asked == [((network, "the batch", recipe, 3), {"teacher": teacher})]
    assert set(objective.parameters()) == set(network.parameters())


def test_parameters_that_are_frozen_take_no_part() -> None:
    network = Network()
    network.unused.requires_grad_(False)
    made = Stepper(
        Squares(network),
        network,
        torch.optim.SGD([network.weight], lr=0.1),
        recipe_of(*PLAIN),
        3,
        Prefetcher(Preprocessing(image_size=4), CPU),
        ALONE,
    )
    assert [parameter.shape for parameter in made.parameters] == [(48,)]
    assert made.grid is None
    assert (made.device, made.classes, made.processes) == (CPU, 3, ALONE)


def test_the_log_keeps_sums_on_the_device_and_checks_every_step() -> None:
    log = EpochLog(3, CPU)
    assert (log.sums, log.checked_totals.tolist(), log.totals()) == ({}, [0, 0, 0], {})
    for number, value in ((0, 1.0), (2, float("-inf"))):
        log.add(number, {"total": torch.tensor(2.0)}, torch.tensor(value))
    assert log.totals() == {"total": 4.0}
    first = log.first_not_finite(ALONE)
    assert (first, type(first)) == (2, int)
    assert log.checked_totals.tolist() == [1.0, 0.0, float("-inf")]
    on_meta = EpochLog(3, torch.device("meta"), {"total": 1.0})
    assert on_meta.sums["total"].device.type == on_meta.checked_totals.device.type == "meta"


def test_each_process_goes_on_with_its_own_sums_and_another_number_of_them_with_the_mean() -> None:
    sums = [{"a": 1.0, "b": 6.0}, {"a": 2.0, "b": 0.0}]
    assert [resumed_sums(rank, 2, sums) for rank in (0, 1)] == sums
    assert [resumed_sums(rank, 3, sums) for rank in (0, 2)] == [{"a": 1.5, "b": 3.0}] * 2
    assert resumed_sums(0, 1, sums) == {"a": 1.5, "b": 3.0}


def test_means_are_over_steps_and_processes() -> None:
    sums = [{"a": 1e16, "b": 1.0}, {"a": 1.0, "b": 2.0}, {"a": -1e16, "b": 6.0}]
    assert mean_losses(sums, steps=2) == {"a": 1 / 6, "b": 1.5}
