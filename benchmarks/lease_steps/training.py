"""The steps of `lease.py training`: images a second of `vitx train`, where a step goes, and what the losses cost."""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from lease_steps.step_report import Report, run_step
from lease_steps.training_runs import precisions, resume, torchrun
from support.images import write_photographs
from vitx.core.run import RunFolder
from vitx.models import image_tensor
from vitx.train import apply_overrides, get_recipe
from vitx.train.loop.distributed.processes import Processes
from vitx.train.loop.trainer import Trainer
from vitx.train.losses.objective import compute_losses, mix_batch, patch_grid
from vitx.train.recipes.recipe import Recipe

RECIPES = {"deepvit-16": "deepvit_16b", "deit-s": "deit_small_12"}
BATCH, FILES = 256, 6144
PHASES = ("input", "upload", "forward", "backward", "optimizer", "average")


# --- recipes


def recipe_for(name: str, folder: Path, report: Report, *more: str) -> Recipe:
    """The published recipe on these images, batch 256; two blocks at 64 px in a rehearsal."""
    sets = [f"batch_size={BATCH}", f"workers={max(1, (os.cpu_count() or 2) - 2)}"]
    sets += ["epochs=1", "schedule.cooldown_epochs=0", *more]
    recipe = get_recipe(name).on_data(str(folder))
    if report.rehearsed:
        sets[:2] = ["batch_size=8", "workers=1"]
        sets += ["model.kwargs.depth=2", "preprocessing.image_size=64", "schedule.min_lr=0"]
    return apply_overrides(recipe, sets)


@contextmanager
def trainer_of(recipe: Recipe, device: str) -> Iterator[Trainer]:
    with tempfile.TemporaryDirectory() as folder:
        yield Trainer(
            recipe, RunFolder(Path(folder) / "run"), torch.device(device), Processes(), skip_bad=False, quiet=True
        )


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# --- images a second


def speed(report: Report) -> None:
    """`vitx train` as a user runs it, from JPEGs; and its steps alone, on batches that are there already."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_photographs(folder, 64 if report.rehearsed else FILES, different=256, evaluation=16)
        for title, more in {
            "published": [],
            "crops, flips": ["augmentation.auto_augment=", "augmentation.erasing=0"],
            "compiled": ["augmentation.auto_augment=", "augmentation.erasing=0", "execution.compile=true"],
        }.items():
            for recipe_name in RECIPES:
                recipe = recipe_for(recipe_name, folder, report, *more)
                row = whole_and_alone(recipe, report.device, steps=2 if report.rehearsed else 20)
                line = f"{recipe_name} {title:<12} {row['with_input']:7.0f} images/s from JPEGs, steps alone "
                line += f"{row['alone']:7.0f}; main thread's processor {1e3 * row['main_thread_seconds']:.0f} ms a step"
                report.row(f"{recipe_name} {title}", row, line)


def whole_and_alone(recipe: Recipe, device: str, steps: int) -> dict[str, float]:
    with trainer_of(recipe, device) as trainer:
        trainer.model.train()
        size = trainer.data.batch_size
        batches = trainer.batches(1)
        kept: list[Any] = []
        started = processor = 0.0
        for number, batch in enumerate(batches):
            trainer.step(1, batch)
            if number == 2:
                wait(device)
                started, processor = time.perf_counter(), time.thread_time()
            kept = [*kept, batch][-3:]
            if number == steps + 2:
                break
        done = number - 2
        wait(device)
        whole, thread = time.perf_counter() - started, time.thread_time() - processor
        started = time.perf_counter()
        for number in range(steps):
            trainer.step(1, kept[number % len(kept)])
        wait(device)
        alone = time.perf_counter() - started
    return {
        "with_input": done * size / whole,
        "alone": steps * size / alone,
        "main_thread_seconds": thread / max(done, 1),
        "batch": size,
        "steps": steps,
        "peak_mib": torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else 0.0,
    }


class Marks:
    """Times at the boundaries of a step's phases, by events of the device, or by the clock on a CPU."""

    def __init__(self, device: str) -> None:
        self.device, self.marks = device, list[tuple[str, Any]]()

    def add(self, phase: str) -> None:
        if self.device == "cpu":
            self.marks.append((phase, time.perf_counter()))
            return
        make_event: Any = torch.cuda.Event
        event = make_event(enable_timing=True)
        event.record()
        self.marks.append((phase, event))

    def milliseconds(self) -> dict[str, float]:
        """Median of each phase over the steps: a mark ends the phase that it names."""
        wait(self.device)
        times: dict[str, list[float]] = {phase: [] for phase in PHASES}
        for (_, before), (phase, after) in zip(self.marks, self.marks[1:], strict=False):
            gone = before.elapsed_time(after) if self.device == "cuda" else 1e3 * (after - before)
            times[phase].append(gone)
        return {phase: statistics.median(values) for phase, values in times.items() if values}

    def around(self, owner: Any, name: str, before: str | None, after: str | None) -> None:
        """Mark the end of phases when `owner.name` is called and when it returns."""
        call = getattr(owner, name)

        def marked(*arguments: Any, **keywords: Any) -> Any:
            if before:
                self.add(before)
            result = call(*arguments, **keywords)
            if after:
                self.add(after)
            return result

        setattr(owner, name, marked)


def where(report: Report) -> None:
    """Where a step goes: the phases on the device's own clock, and the kernels that take most."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_photographs(folder, 96 if report.rehearsed else 4096, different=256, evaluation=16)
        for recipe_name in RECIPES:
            recipe = recipe_for(recipe_name, folder, report)
            with trainer_of(recipe, report.device) as trainer:
                phases(report, recipe_name, trainer)
                kernels(report, recipe_name, trainer)


def phases(report: Report, name: str, trainer: Trainer) -> None:
    trainer.model.train()
    batches = trainer.batches(1)
    for _ in range(1 if report.rehearsed else 3):
        trainer.step(1, next(batches))
    marks, stepper = Marks(report.device), trainer.stepper
    originals = [(stepper.objective, "forward"), (stepper.scaler, "unscale_"), (stepper.scaler, "step")]
    originals += [(trainer.ema, "update")]
    kept = [getattr(owner, attribute) for owner, attribute in originals]
    marks.around(stepper.objective, "forward", "upload", "forward")
    marks.around(stepper.scaler, "unscale_", "backward", None)
    marks.around(stepper.scaler, "step", None, "optimizer")
    marks.around(trainer.ema, "update", None, "average")
    marks.add("average")
    for number, batch in enumerate(batches):
        marks.add("input")
        trainer.step(1, batch)
        if number == (2 if report.rehearsed else 10):
            break
    for (owner, attribute), method in zip(originals, kept, strict=True):
        setattr(owner, attribute, method)
    row = marks.milliseconds()
    line = " ".join(f"{phase} {value:.1f}" for phase, value in row.items())
    report.row(f"{name} phases", row, f"{name} ms of a step of {trainer.data.batch_size}: {line}")


def kernels(report: Report, name: str, trainer: Trainer) -> None:
    batches = trainer.batches(2)
    batch = next(batches)
    activities = [ProfilerActivity.CPU] if report.rehearsed else [ProfilerActivity.CUDA]
    steps = 1 if report.rehearsed else 4
    with profile(activities=activities) as profiler:
        for _ in range(steps):
            trainer.step(2, batch)
        wait(report.device)
    attribute = "self_cpu_time_total" if report.rehearsed else "self_device_time_total"
    found = sorted(profiler.key_averages(), key=lambda entry: -getattr(entry, attribute))
    total = sum(getattr(entry, attribute) for entry in found)
    top = [
        {
            "name": entry.key[:160],
            "ms": getattr(entry, attribute) / 1e3 / steps,
            "count": entry.count / steps,
            "share": getattr(entry, attribute) / total,
        }
        for entry in found[:10]
    ]
    report.row(f"{name} kernels", {"total_ms": total / 1e3 / steps, "top": top})
    for entry in top[:4]:
        report.row(
            f"{name} {entry['name']}",
            None,
            f"  {100 * entry['share']:4.1f} % {entry['ms']:7.2f} ms {entry['count']:6.0f} × {entry['name'][:90]}",
        )


# --- the losses


def losses(report: Report) -> None:
    """A step of deit_small_12 with each loss of Gong et al. over one without, in bfloat16 at batch 256."""
    import timm

    device, size = report.device, 64 if report.rehearsed else 224
    count = 4 if report.rehearsed else BATCH
    torch.manual_seed(0)
    small: dict[str, Any] = {"depth": 2, "img_size": 64} if report.rehearsed else {}
    model: Any = timm.create_model("deit_small_12", patch_head=True, **small).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    pixels = np.random.default_rng(0).integers(0, 256, (count, size, size, 3), np.uint8)
    images = image_tensor(pixels, (0.5,) * 3, (0.5,) * 3).to(device)
    batch = mixed(images, model)
    base = apply_overrides(get_recipe("patchvit-s-12"), ["cutmix.probability=1"])
    choices = {
        "none": (0, 0, 0),
        "cosine": (0.3, 0, 0),
        "contrastive": (0, 1, 0),
        "mixing": (0, 0, 1),
        "all": (0.3, 1, 1),
    }
    for mode in ("eager", "compiled blocks", "compiled whole"):
        torch.compiler.reset()
        if mode == "compiled blocks":
            for block in model.blocks:
                block.compile()
        times: dict[str, float] = {}
        for choice, weights in choices.items():
            if mode == "compiled whole" and choice not in ("none", "all"):
                continue  # each is a compilation of half a minute
            names = ("cosine", "contrastive", "mixing")
            sets = [f"losses.{name}={weight}" for name, weight in zip(names, weights, strict=True)]
            recipe = apply_overrides(base, sets)
            total = total_of(model, recipe, compile_whole=mode == "compiled whole")
            times[choice] = step_ms(lambda total=total: step(total, batch, optimizer, device), report)  # type: ignore[misc]
            report.row(mode, times)
        line = " ".join(f"{name} {100 * (value / times['none'] - 1):+.1f} %" for name, value in times.items())
        report.row(mode, times, f"{mode}: a step {times['none']:.1f} ms; with {line.removeprefix('none +0.0 % ')}")
        if mode == "compiled blocks":
            for block in model.blocks:
                block._compiled_call_impl = None


def mixed(images: Tensor, model: Any) -> Any:
    import random

    recipe = apply_overrides(get_recipe("patchvit-s-12"), ["cutmix.probability=1", "augmentation.erasing=0"])
    labels = torch.arange(len(images), device=images.device) % 1000
    return mix_batch(images, labels, recipe, patch_grid(model), random.Random(0), classes=1000)


def total_of(model: Any, recipe: Recipe, *, compile_whole: bool) -> Callable[[Any], Tensor]:
    def total(batch: Any) -> Tensor:
        return compute_losses(model, batch, recipe, 1000)["total"]

    if not compile_whole:
        return total
    torch.compiler.reset()
    return torch.compile(total, dynamic=False)


def step(total: Callable[[Any], Tensor], batch: Any, optimizer: Any, device: str) -> None:
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast(device, torch.bfloat16):
        value = total(batch)
    torch.autograd.backward(value)
    optimizer.step()


def step_ms(call: Callable[[], None], report: Report) -> float:
    """Median of some steps, each waited for: steps are long against a launch."""
    times = []
    for number in range(2 if report.rehearsed else 16):
        wait(report.device)
        started = time.perf_counter()
        call()
        wait(report.device)
        if number > 3 or (report.rehearsed and number):
            times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times)


STEPS: dict[str, Callable[[Report], None]] = {
    "speed": speed,
    "where": where,
    "losses": losses,
    "precisions": precisions,
    "resume": resume,
    "torchrun": torchrun,
}

if __name__ == "__main__":
    run_step(STEPS)
