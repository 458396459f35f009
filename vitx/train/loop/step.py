"""One optimizer step: mix the batch, forward and backward in parts, average over processes, clip, update."""

import math
import random
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn

from vitx.train.loop.distributed.processes import Processes, accumulating
from vitx.train.loop.inputs.prefetch import DeviceBatch, Prefetcher
from vitx.train.loop.inputs.training_data import CUTMIX, NETWORK, seed_of
from vitx.train.loop.sharpness import perturbed, untracked_batch_norm
from vitx.train.losses.cutmix import MixedBatch
from vitx.train.losses.distillation import Teacher
from vitx.train.losses.objective import compute_losses, mix_batch, patch_grid
from vitx.train.randomness import seed_generators
from vitx.train.recipes.recipe import Recipe

PRECISIONS = {"bfloat16": torch.bfloat16, "float16": torch.float16}
# Of the loss in float16: a gradient that is not finite below it has not overflowed. It is reached in thirty steps.
SMALLEST_SCALE = 2.0**-14


class Objective(nn.Module):
    """Forward pass and losses as one module, because DDP and FSDP hook the `forward` of the module that they wrap."""

    def __init__(self, network: nn.Module, recipe: Recipe, classes: int, teacher: Teacher | None) -> None:
        super().__init__()
        self.network, self.recipe, self.classes, self.teacher = network, recipe, classes, teacher

    def forward(self, batch: MixedBatch) -> dict[str, Tensor]:
        return compute_losses(self.network, batch, self.recipe, self.classes, teacher=self.teacher)

    def become_root(self) -> None:
        """Do nothing: FSDP counts a call of it as a forward pass of this module."""


class Stepper:
    """Takes the optimizer steps of a run.

    All random draws of a step follow from (seed, epoch, batch): no generator's state goes from one step to the next.
    """

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
        self.gradient_norm: Tensor | None = None  # of the last step, before it was clipped
        # What is computed again in the backward pass is no other batch.
        recomputes = recipe.execution.grad_checkpointing
        self.while_backward = partial(untracked_batch_norm, network) if recomputes else nullcontext
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.precision is torch.float16)

    def __call__(self, epoch: int, batch: DeviceBatch) -> tuple[dict[str, Tensor], Tensor]:
        """Take one step on this process's part of a batch.

        Returns the detached losses by name, and the total loss as a scalar that is also not finite where the norm of
        the gradient is not. Nothing is read here: reading a value would wait for the device.
        """
        settings = self.recipe.optimizer
        losses = self._backward(epoch, batch)
        if settings.sam_rho:
            # SAM's second pass: the gradient at w + ρ·g/‖g‖ replaces the one at w (docs/maths.md §2.7).
            with perturbed(self.parameters, settings.sam_rho), untracked_batch_norm(self.network):
                self._backward(epoch, batch)
        self.scaler.unscale_(self.optimizer)  # without float16 the scaler is off, and this does nothing
        # Without clipping too: a norm costs 0.2 % of a step, and tells a gradient that is not finite.
        norm = nn.utils.clip_grad_norm_(self.parameters, settings.clip or math.inf)
        # Under FSDP the norm is a DTensor, whose parts `full_tensor` sums up.
        self.gradient_norm = getattr(norm, "full_tensor", lambda: norm)()
        fault = 0 * self.gradient_norm  # NaN where that is not finite
        if self.scaler.is_enabled():  # which skips a step whose gradient overflows, and halves the scale
            fault = torch.where(self.scaler.scale(torch.ones_like(fault)) < SMALLEST_SCALE, fault, 0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return losses, losses["total"] + fault

    def _backward(self, epoch: int, batch: DeviceBatch) -> dict[str, Tensor]:
        """Leave the gradient of the whole batch in the parameters; return the mean losses over its parts."""
        self.optimizer.zero_grad(set_to_none=True)
        parts = self.recipe.optimizer.accumulate
        means: dict[str, Tensor] = {}
        for number, part in enumerate(self._parts(epoch, batch), 1):
            with accumulating(self.objective, last=number == parts):
                # Without the cache of cast weights: only the outermost autocast empties it, and one is around the whole
                # training. What is computed again in the backward pass would leave its weights to the next step.
                on = self.precision is not None
                with torch.autocast(self.device.type, self.precision, enabled=on, cache_enabled=False):
                    losses = self.objective(part)
                # Each part's loss is a mean over its images, so 1/parts makes the sum a mean over the batch.
                with self.while_backward():
                    self.scaler.scale(losses["total"] / parts).backward()
            for name, loss in losses.items():
                means[name] = means.get(name, 0) + loss.detach() / parts
        return means

    def _parts(self, epoch: int, batch: DeviceBatch) -> Iterator[MixedBatch]:
        """The parts of gradient accumulation, mixed, with the generators seeded for each part's forward pass."""
        recipe, count = self.recipe, self.recipe.optimizer.accumulate
        for index in range(count):
            pixels, labels = batch.part(index, count)
            images = self.prefetcher.normalized(pixels)
            if images is pixels and recipe.optimizer.sam_rho:  # SAM takes the batch twice, and mixing may change it
                images = images.clone()
            number = self.processes.rank * count + index  # of this part among the parts of all processes
            # A draw for the whole batch (one CutMix box) must be equal in all parts, draws for each image must differ.
            place = (recipe.seed, CUTMIX, epoch, batch.number)
            rng = random.Random(seed_of(*place))
            image_rng = random.Random(seed_of(*place, *((number,) if number else ())))
            mixed = mix_batch(images, labels, recipe, self.grid, rng, image_rng, classes=self.classes)
            # For dropout and drop path.
            seed_generators(seed_of(recipe.seed, NETWORK, epoch, batch.number, number), self.device)
            yield mixed


def autocast_precision(recipe: Recipe, device: torch.device) -> torch.dtype | None:
    """The dtype of autocast, None for no autocast: auto is bfloat16 on a GPU and none on a CPU."""
    choice = recipe.execution.precision
    if choice == "auto":
        return torch.bfloat16 if device.type == "cuda" else None
    return PRECISIONS.get(choice)


class EpochLog:
    """The losses of one epoch's steps, kept on the device: reading a value after each step would wait for the device.

    `sums` are the sums so far when an epoch is resumed. `checked_totals` is float32 (steps,), 0 for steps to come.
    """

    def __init__(self, steps: int, device: torch.device, sums: dict[str, float] | None = None) -> None:
        self.sums = {name: torch.tensor(value, device=device) for name, value in (sums or {}).items()}
        self.checked_totals = torch.zeros(steps, device=device)

    def add(self, number: int, losses: dict[str, Tensor], checked_total: Tensor) -> None:
        """Add the outcome of batch `number`, as `Stepper` returns it."""
        for name, loss in losses.items():
            self.sums[name] = self.sums[name] + loss if name in self.sums else loss
        self.checked_totals[number] = checked_total

    def first_not_finite(self, processes: Processes) -> int | None:
        """The first batch whose loss or gradient was not finite in one of the processes, which call it together."""
        own = (~torch.isfinite(self.checked_totals)).nonzero().flatten()[:1].tolist()
        return min(chain.from_iterable(processes.gather(own)), default=None)

    def totals(self) -> dict[str, float]:
        """The sums of the losses by name. A Python float holds a float32 exactly, so a resumed epoch has equal sums."""
        return {name: value.item() for name, value in self.sums.items()}


def resumed_sums(rank: int, count: int, sums: list[dict[str, float]]) -> dict[str, float]:
    """The loss sums from which process `rank` of `count` resumes an epoch; `sums` has one entry a saved process.

    Each process takes its own sums. After a change of their number all take the mean, so the epoch's mean is kept.
    """
    if len(sums) == count:
        return sums[rank]
    return mean_losses(sums, steps=1)


def mean_losses(sums: list[dict[str, float]], steps: int) -> dict[str, float]:
    """The mean of each loss over `steps` steps and all processes; `sums` has one entry a process."""
    return {name: math.fsum(part[name] for part in sums) / (steps * len(sums)) for name in sums[0]}
