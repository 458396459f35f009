"""One optimizer step: mix, pass in parts, average over processes, clip, update."""

import math
import random
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from vitx.train.loop.distributed.processes import Processes, accumulating
from vitx.train.loop.inputs.prefetch import DeviceBatch, Prefetcher
from vitx.train.loop.inputs.training_data import CUTMIX, NETWORK, seed_of
from vitx.train.loop.sharpness import perturbed, untracked_batch_norm
from vitx.train.losses.cutmix import MixedBatch
from vitx.train.losses.distillation import Teacher
from vitx.train.losses.objective import losses_of, mix, patch_grid
from vitx.train.recipes.recipe import Recipe

PRECISIONS = {"bfloat16": torch.bfloat16, "float16": torch.float16}


class Objective(nn.Module):
    """Forward pass and losses as one module: what DDP and FSDP wrap is what they see called."""

    def __init__(self, network: nn.Module, recipe: Recipe, classes: int, teacher: Teacher | None) -> None:
        super().__init__()
        self.network, self.recipe, self.classes, self.teacher = network, recipe, classes, teacher

    def forward(self, batch: MixedBatch) -> dict[str, Tensor]:
        return losses_of(self.network, batch, self.recipe, self.classes, teacher=self.teacher)


class Stepper:
    """Takes the optimizer steps of a run. All randomness follows from (seed, epoch, batch), nothing is carried."""

    def __init__(
        self,
        objective: nn.Module,
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
        recipe: Recipe,
        classes: int,
        prefetcher: Prefetcher,
        processes: Processes,
    ) -> None:
        self.objective, self.network, self.optimizer = objective, network, optimizer
        self.recipe, self.classes, self.processes = recipe, classes, processes
        self.prefetcher, self.device = prefetcher, prefetcher.device
        self.parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
        self.grid = patch_grid(network)
        self.precision = autocast_precision(recipe, self.device)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision is torch.float16)

    def __call__(self, epoch: int, batch: DeviceBatch) -> tuple[dict[str, Tensor], Tensor]:
        """Take one step on this process's part of a batch.

        Returns the detached losses by name, and a scalar that is finite exactly if the step was sound.
        """
        settings = self.recipe.optimizer
        losses = self._gradients(epoch, batch)
        health = losses["total"]
        if settings.sam_rho:
            with perturbed(self.parameters, settings.sam_rho), untracked_batch_norm(self.network):
                self._gradients(epoch, batch)
        self.scaler.unscale_(self.optimizer)
        if settings.clip:
            norm = nn.utils.clip_grad_norm_(self.parameters, settings.clip)
            if not self.scaler.is_enabled():  # which skips a step whose gradient overflows
                health = health + 0 * getattr(norm, "full_tensor", lambda: norm)()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return losses, health

    def _gradients(self, epoch: int, batch: DeviceBatch) -> dict[str, Tensor]:
        """Sum the gradients of all parts of the batch; return the means of the losses."""
        self.optimizer.zero_grad(set_to_none=True)
        parts = self.recipe.optimizer.accumulate
        means: dict[str, Tensor] = {}
        for number, part in enumerate(self._parts(epoch, batch), 1):
            with accumulating(self.objective, last=number == parts):
                with torch.autocast(self.device.type, self.precision, enabled=self.precision is not None):
                    losses = self.objective(part)
                self.scaler.scale(losses["total"] / parts).backward()
            for name, loss in losses.items():
                means[name] = means.get(name, 0) + loss.detach() / parts
        return means

    def _parts(self, epoch: int, batch: DeviceBatch) -> Iterator[MixedBatch]:
        """The batch in the parts of gradient accumulation, mixed, the generators seeded for each."""
        recipe, count = self.recipe, self.recipe.optimizer.accumulate
        for index in range(count):
            pixels, labels = batch.part(index, count)
            images = self.prefetcher.normalized(pixels)
            if images is pixels and recipe.optimizer.sam_rho:  # which takes the batch twice, and mixing may change it
                images = images.clone()
            number = self.processes.rank * count + index
            # What is drawn once for a batch must be the same in all of its parts.
            place = (epoch, batch.number, number) if number and _mixes_each_image(recipe) else (epoch, batch.number)
            rng = random.Random(seed_of(recipe.seed, CUTMIX, *place))
            mixed = mix(images, labels, recipe, self.grid, rng, classes=self.classes)
            seed_generators(seed_of(recipe.seed, NETWORK, epoch, batch.number, number))
            yield mixed


def _mixes_each_image(recipe: Recipe) -> bool:
    return bool(recipe.augmentation.erasing) or recipe.cutmix.box == "sample" or recipe.mixup.mode != "batch"


def seed_generators(seed: int) -> None:
    """Seed what a network may draw from: torch on all devices, numpy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def autocast_precision(recipe: Recipe, device: torch.device) -> torch.dtype | None:
    """The dtype of autocast, or None for none: auto is bfloat16 on a GPU."""
    choice = recipe.execution.precision
    if choice == "auto":
        return torch.bfloat16 if device.type == "cuda" else None
    return PRECISIONS.get(choice)


class EpochLog:
    """What one epoch's steps were like, kept on the device: reading a value there would wait for it."""

    def __init__(self, steps: int, device: torch.device, sums: dict[str, float] | None = None) -> None:
        self.sums = {name: torch.tensor(value, device=device) for name, value in (sums or {}).items()}
        self.health = torch.zeros(steps, device=device)

    def add(self, number: int, losses: dict[str, Tensor], health: Tensor) -> None:
        for name, loss in losses.items():
            self.sums[name] = self.sums[name] + loss if name in self.sums else loss
        self.health[number] = health

    def first_unsound(self) -> int | None:
        """The first batch whose loss or gradient was not finite."""
        found = (~torch.isfinite(self.health)).nonzero()
        return int(found[0]) if len(found) else None

    def totals(self) -> dict[str, float]:
        """The sums of the losses by name; exact, so that an epoch can go on from them."""
        return {name: value.item() for name, value in self.sums.items()}


def sums_for(rank: int, count: int, sums: list[dict[str, float]]) -> dict[str, float]:
    """What process `rank` of `count` goes on from, where processes had come to `sums` in an epoch.

    Each goes on from its own; where there were more or fewer of them, all from the mean.
    """
    if len(sums) == count:
        return sums[rank]
    return mean_losses(sums, 1)


def mean_losses(totals: list[dict[str, float]], steps: int) -> dict[str, float]:
    """The mean of each loss over `steps` steps and all processes, whose sums are `totals`."""
    return {name: math.fsum(part[name] for part in totals) / (steps * len(totals)) for name in totals[0]}
