"""`vitx train --dry-run`: what a run would be, by some of its steps, without a run folder."""

import sys
import time
from itertools import islice, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from vitx.core.console import counted
from vitx.core.errors import CheckFailed
from vitx.core.run import RunFolder
from vitx.train.loop.checkpoint import newest_checkpoint
from vitx.train.loop.determinism import device_to_train_on
from vitx.train.loop.distributed.processes import join_processes
from vitx.train.loop.resuming import check_run_folder
from vitx.train.loop.trainer import Trainer
from vitx.train.recipes.idle_settings import idle_settings
from vitx.train.recipes.recipe import Recipe

# The first steps are slower: memory is found, kernels are chosen.
WARM_UP_STEPS, TIMED_STEPS = 2, 4
# Each epoch ends with two passes over the evaluation split, without a backward pass.
EVALUATIONS, FORWARD_SHARE = 2, 1 / 3


def dry_run(
    recipe: Recipe, out: Path, *, resume: bool = False, skip_bad: bool = False, device: str = "auto"
) -> dict[str, Any]:
    """Take a few steps of `recipe`, and return data, shapes, memory, steps and time; nothing is written.

    Raises what `train` raises before and in its first steps, and CheckFailed where one of these is not finite.
    """
    check_run_folder(RunFolder(out), recipe, resume=resume)
    with (
        device_to_train_on(device, deterministic=recipe.execution.deterministic) as chosen,
        join_processes(chosen) as processes,
    ):
        saved = newest_checkpoint(RunFolder(out))
        trainer = Trainer(
            recipe, RunFolder(out), chosen, processes, skip_bad=skip_bad, quiet=True, initial_weights=saved is None
        )
        seconds = _seconds_of_a_step(trainer)
        _check_finite(trainer)
        data, size, train = trainer.data, recipe.preprocessing.image_size, len(trainer.train_images)
        parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
        evaluated = len(trainer.val_images)
        epoch = data.steps * seconds + EVALUATIONS * FORWARD_SHARE * evaluated * seconds / data.batch_size
        return {
            "data": trainer.train_images.name,
            "classes": ", ".join(trainer.train_images.class_names),
            "images to train on": train,
            "images to evaluate on": evaluated,
            "network": f"{recipe.model.name}, {parameters / 1e6:.2f} M parameters",
            "begins from": str(saved[0]) if saved else recipe.model.initial_checkpoint or "random weights",
            "a batch": f"{data.batch_size} × 3 × {size} × {size}",
            "steps": f"{data.steps} an epoch, {data.steps * recipe.epochs} in {counted(recipe.epochs, 'epoch')}",
            "learning rate": recipe.optimizer.rate(data.batch_size),
            **({"without effect": "; ".join(idle)} if (idle := idle_settings(recipe)) else {}),
            **_memory(trainer.device),
            "seconds a step": round(seconds, 4),
            "minutes in all, about": round(recipe.epochs * epoch / 60, 1),
        }


def _seconds_of_a_step(trainer: Trainer) -> float:
    times = [time.perf_counter()]
    for batch in islice(trainer.batches(1), WARM_UP_STEPS + TIMED_STEPS):
        trainer.step(1, batch)
        if trainer.device.type == "cuda":
            torch.cuda.synchronize(trainer.device)
        times.append(time.perf_counter())
    seconds = [after - before for before, after in pairwise(times)]
    return median(seconds[WARM_UP_STEPS:] or seconds[-1:])


def _check_finite(trainer: Trainer) -> None:
    """Raise CheckFailed where the run itself would stop at one of the steps that were taken."""
    found = trainer.log.first_not_finite(trainer.processes)
    if found is not None:
        settings = trainer.recipe.optimizer
        raise CheckFailed(
            f"the loss or its gradient is not finite at step {found + 1}: look at optimizer.lr ({settings.lr:g}), "
            "the losses' weights and the other settings"
        )


def _memory(device: torch.device) -> dict[str, float]:
    """The most that was used so far: of the GPU, or of this process without its workers; Windows does not tell."""
    if device.type == "cuda":
        most = torch.cuda.max_memory_reserved(device)
    elif sys.platform == "win32":
        return {}
    else:
        import resource

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {"memory (GiB)": round(most / 2**30, 2)}
