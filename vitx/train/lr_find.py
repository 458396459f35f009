"""`vitx train --lr-find`: the learning-rate range test (Smith, arXiv 1506.01186, §3.3), without a run folder."""

import math
import os
from collections.abc import Iterator, Sequence
from itertools import count
from statistics import fmean
from typing import Any

from vitx.core.console import progress
from vitx.core.errors import CheckFailed
from vitx.core.run import RunFolder
from vitx.train.loop.determinism import device_to_train_on
from vitx.train.loop.distributed.processes import join_processes
from vitx.train.loop.inputs.prefetch import DeviceBatch
from vitx.train.loop.trainer import Trainer
from vitx.train.recipes.recipe import Recipe

# The rate grows by the same factor in each step, from the first to the last.
FIRST_RATE, LAST_RATE, STEPS = 1e-6, 1.0, 100
SMOOTHING = 0.9  # share of the mean loss that a step leaves
DIVERGED = 4.0  # times the lowest smoothed loss: no higher rate is tried
SHOWN_ROWS, BAR = 20, 40

Curve = Sequence[tuple[float, float]]


def lr_find(recipe: Recipe, *, skip_bad: bool = False, device: str = "auto", quiet: bool = False) -> dict[str, Any]:
    """Raise the rate over a hundred steps of `recipe` from fresh weights; nothing is written.

    Returns the suggested `optimizer.lr`, a tenth of the rate at which the smoothed loss was lowest (Smith takes that
    rate as the top of a cycle; the tenth leaves room for a whole run), and the curve as (rate, smoothed loss). Raises
    what `train` raises before and in its first steps, and CheckFailed where the first loss is not finite, or where the
    loss falls at no rate.
    """
    with (
        device_to_train_on(device, deterministic=recipe.execution.deterministic) as chosen,
        join_processes(chosen) as processes,
    ):
        # Of no run: nothing is written, and one that is there may have been begun on other images.
        trainer = Trainer(recipe, RunFolder(os.devnull), chosen, processes, skip_bad=skip_bad, quiet=True)
        curve = _curve(trainer, quiet=quiet)
    if not curve:
        raise CheckFailed("the first loss is not finite: look at the losses' weights, the initial weights and the data")
    lowest = min(range(len(curve)), key=lambda index: curve[index][1])
    if lowest == 0:
        raise CheckFailed(f"the loss falls at no rate from {FIRST_RATE:g} on: look at the data and the other settings")
    best, settings = curve[lowest][0], recipe.optimizer
    scale = settings.lr_base_size / trainer.data.batch_size if settings.lr_base_size else 1.0
    return {
        "suggested optimizer.lr": float(f"{best / 10 * scale:.2g}"),
        "optimizer.lr of the recipe": settings.lr,
        "rate of the lowest loss": float(f"{best:.2g}"),
        "lowest loss": round(curve[lowest][1], 4),
        "stopped at": float(f"{curve[-1][0]:.2g}"),
        "curve": [(float(f"{rate:.4g}"), round(loss, 4)) for rate, loss in curve],
    }


def _curve(trainer: Trainer, *, quiet: bool) -> Curve:
    """The smoothed loss by rate, up to the first that is not finite or has diverged."""
    trainer.model.train()
    curve: list[tuple[float, float]] = []
    mean = 0.0
    with progress("rate", STEPS, quiet=quiet) as bar:
        for step, (epoch, batch) in zip(range(STEPS), _batches(trainer), strict=False):
            rate = FIRST_RATE * (LAST_RATE / FIRST_RATE) ** (step / (STEPS - 1))
            for group in trainer.optimizer.param_groups:
                group["lr"] = rate * group.get("lr_scale", 1.0)  # timm's, of layer_decay
            losses, _ = trainer.stepper(epoch, batch)
            total = fmean(trainer.processes.gather(float(losses["total"])))  # so that all stop after the same step
            mean = SMOOTHING * mean + (1 - SMOOTHING) * total
            smoothed = mean / (1 - SMOOTHING ** (step + 1))
            if not math.isfinite(smoothed) or (curve and smoothed > DIVERGED * min(loss for _, loss in curve)):
                break
            curve.append((rate, smoothed))
            bar.update(step + 1, f"rate {rate:.2g}, loss {smoothed:.3f}")
    return curve


def _batches(trainer: Trainer) -> Iterator[tuple[int, DeviceBatch]]:
    for epoch in count(1):
        for batch in trainer.batches(epoch):
            yield epoch, batch


def rows(curve: Curve) -> list[tuple[str, str, str]]:
    """About twenty lines for a terminal: rate, smoothed loss, and a bar from the lowest loss on, half full at first."""
    lowest, first = min(loss for _, loss in curve), curve[0][1]
    every, half = max(1, len(curve) // SHOWN_ROWS), BAR / 2
    heights = [min(BAR, round(half * (loss - lowest) / max(first - lowest, 1e-9))) for _, loss in curve]
    lines = [(f"{rate:.1e}", f"{loss:.3f}", "█" * bar) for (rate, loss), bar in zip(curve, heights, strict=True)]
    return lines[::every]
