"""The training loop: one epoch, one evaluation, one checkpoint, until the recipe's epochs are done.

Nothing random is carried from one step to the next, so resuming needs the weights, the optimizer's state and the
number of the step, and gives the same bits as never having stopped.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from vitx.core.console import log, progress
from vitx.core.errors import CheckFailed
from vitx.core.files import read_record, staged_folder, write_json
from vitx.core.run import CheckpointState, RunFolder, RunInfo
from vitx.data.image_set import ImageSet
from vitx.data.open import open_images
from vitx.models.device import choose_device
from vitx.models.recalibration import measure_batch_norm
from vitx.train.loop.checkpoint import (
    Metrics,
    Tensors,
    is_finished,
    load_last,
    publish,
    read_metrics,
    save,
    save_within_epoch,
    tidy,
    write_metrics,
)
from vitx.train.loop.determinism import deterministic_algorithms
from vitx.train.loop.distributed.fsdp_tensors import load_whole_state, whole_state
from vitx.train.loop.distributed.process_share import Shard
from vitx.train.loop.distributed.processes import Processes, joined, parallelize, shard_module, unsharded
from vitx.train.loop.environment import RunEnvironment
from vitx.train.loop.evaluation import evaluate
from vitx.train.loop.failures import naming_a_full_disk, naming_a_lost_process, save_failed_batch
from vitx.train.loop.inputs.prefetch import DeviceBatch, Prefetcher
from vitx.train.loop.inputs.training_data import WEIGHTS, TrainingData, seed_of
from vitx.train.loop.interruption import StopRequest, TrainingStopped, stop_request
from vitx.train.loop.network import build_checked, load_initial_weights, model_spec, switch_on
from vitx.train.loop.optimization import (
    OptimizerState,
    build_optimizer,
    build_schedule,
    optimizer_state,
    restore_optimizer,
)
from vitx.train.loop.resuming import SECONDS_TO_BE_SEEN, check_alike, check_out, layout_differences
from vitx.train.loop.run_lock import RunLock, patience_of_torchrun
from vitx.train.loop.step import EpochLog, Objective, Stepper, mean_losses, sums_for
from vitx.train.loop.tensorboard import scalar_board
from vitx.train.loop.weights_and_biases import project_board
from vitx.train.losses.distillation import load_teacher
from vitx.train.recipes.recipe import Recipe

# Training images that measure the BatchNorm statistics of the averaged weights.
CALIBRATION_IMAGES = 256
# Steps between two looks at whether the losses are finite: each look waits for the device.
STEPS_BETWEEN_CHECKS = 50
# Steps between two exchanges of several processes on whether one of them was asked to stop.
STEPS_BETWEEN_SIGNALS = 8
SECONDS_BETWEEN_UPDATES = 0.1


AfterEpoch = Callable[[int, nn.Module], None]


@dataclass(frozen=True)
class TrainingResult:
    """A finished run and its metrics, one entry an epoch."""

    run: RunFolder
    history: list[Metrics]
    resumed_from: int


def train(
    recipe: Recipe,
    out: Path | str,
    *,
    resume: bool = False,
    skip_bad: bool = False,
    device: str = "auto",
    wandb: str | None = None,
    after_epoch: AfterEpoch | None = None,
    quiet: bool = False,
) -> TrainingResult:
    """Train `recipe` into the run folder `out`; see docs/run-folder.md for what it holds.

    With `resume` a run that was stopped goes on where it last saved; one that has finished is returned as it is. Under
    torchrun the processes share every batch. `wandb` names a project of Weights & Biases that the metrics go to.
    `after_epoch` is called when an epoch is saved, in every process, with its number and the averaged network.

    Raises InputError when `out` exists and `resume` is off, when the recipe or the images are not those of the run,
    when the data or a checkpoint cannot be read, or when `execution.deterministic` cannot be had; CheckFailed when a
    loss is no longer finite; EnvironmentMissing when the disk is full; TrainingStopped when SIGTERM or SIGINT asked to
    stop, after all has been saved.
    """
    folder = RunFolder(out)
    with (
        deterministic_algorithms(device, on=recipe.execution.deterministic),
        joined(chosen := choose_device(device)) as processes,
        naming_a_lost_process(folder),
        RunLock(folder) as lock,
    ):
        if processes.writes and resume:
            lock.take(patience_of_torchrun(SECONDS_TO_BE_SEEN))
        processes.wait()  # nobody else writes from here on
        check_alike(processes, folder, recipe)
        check_out(folder, recipe, resume=resume)
        processes.wait()  # before the first of them makes the folder
        trainer = Trainer(recipe, folder, chosen, processes, skip_bad=skip_bad, quiet=quiet or not processes.writes)
        with naming_a_full_disk(folder):
            trainer.open_run()
            if processes.writes:
                lock.take()
            return trainer.train(wandb, after_epoch)


class Trainer:
    """Everything a run holds in memory between its steps."""

    def __init__(
        self,
        recipe: Recipe,
        run: RunFolder,
        device: torch.device,
        processes: Processes,
        *,
        skip_bad: bool,
        quiet: bool,
    ) -> None:
        self.recipe, self.run, self.device, self.processes, self.quiet = recipe, run, device, processes, quiet
        self.train_images = open_images(recipe.data, "train", skip_bad=skip_bad)
        self.val_images = open_images(recipe.data, "val", skip_bad=skip_bad)
        _log_skipped(self.train_images, self.val_images)
        self.data = TrainingData(
            self.train_images,
            recipe.preprocessing,
            recipe.augmentation,
            batch_size=recipe.batch_size,
            seed=recipe.seed,
        )
        whole_batch = np.arange(self.data.batch_size)
        Shard(0, processes.count * recipe.optimizer.accumulate).of(whole_batch)  # or say what batch_size fits
        self._build_network()
        self.optimizer = build_optimizer(self.model, recipe.optimizer)
        self.schedule = build_schedule(self.optimizer, recipe.schedule, epochs=recipe.epochs, steps=self.data.steps)
        self.prefetcher = Prefetcher(recipe.preprocessing, device, channels_last=recipe.execution.channels_last)
        self.stepper = Stepper(
            self.objective, self.model, self.optimizer, recipe, self.spec.num_classes, self.prefetcher, processes
        )
        self.history: list[Metrics] = []
        self.batches_done, self.log = 0, EpochLog(self.data.steps, device)

    def _build_network(self) -> None:
        recipe, class_names = self.recipe, self.train_images.class_names
        self.spec = model_spec(recipe, len(class_names))
        torch.manual_seed(seed_of(recipe.seed, WEIGHTS))
        model = build_checked(recipe, self.spec)
        if recipe.model.initial_checkpoint:
            load_initial_weights(model, self.spec, recipe.model.initial_checkpoint, quiet=self.quiet)
        model = model.to(self.device)
        sharded = recipe.execution.parallel == "fsdp" and self.processes.count > 1
        # Tensors in parts cannot be mixed with whole ones in one fused update.
        self.ema = ModelEmaV3(model, decay=recipe.ema_decay, use_warmup=True, foreach=not sharded)
        self.model: nn.Module = switch_on(
            model, recipe.model.name, recipe.execution, self.device, processes=self.processes.count
        )
        teacher = load_teacher(recipe.distillation, recipe.preprocessing, class_names)
        if teacher is not None:
            teacher.to(self.device)
            getattr(self.model, "set_distilled_training", lambda _: None)(True)  # DeiT's distilled networks
        objective = Objective(self.model, recipe, self.spec.num_classes, teacher)
        self.objective = parallelize(objective, recipe.execution.parallel, self.processes, self.device)
        if sharded:
            shard_module(self.ema.module, self.device)

    def open_run(self) -> None:
        """Make the run folder, or take up the one that is there."""
        environment = RunEnvironment.now(
            self.device, self.train_images, self.val_images, processes=self.processes.count
        )
        self.processes.same(
            lambda: environment.data, "the processes see other images than each other: copy the same to each node"
        )
        if self.run.info_path.is_file():
            begun = read_record(self.run.path / "environment.json", RunEnvironment)
            begun.check_same_data(environment)
            for difference in begun.differences(environment):
                log(f"resumed {difference}: the result may differ in its last bits", quiet=self.quiet)
            for difference in layout_differences(read_record(self.run.path / "recipe.json", Recipe), self.recipe):
                log(f"resumed {difference}", quiet=self.quiet)
            self._restore()
        elif self.processes.writes:
            self._make_folder(environment)
        self.processes.wait()

    def _make_folder(self, environment: RunEnvironment) -> None:
        info = RunInfo(
            name=self.run.path.resolve().name,
            recipe=self.recipe.name,
            model=self.spec,
            class_names=self.train_images.class_names,
            preprocessing=self.recipe.preprocessing,
            data=self.recipe.data,
            seed=self.recipe.seed,
        )
        with staged_folder(self.run.path) as stage:
            write_json(stage / "recipe.json", self.recipe)
            write_json(stage / "environment.json", environment)
            write_json(stage / "run.json", info)

    def _restore(self) -> None:
        loaded = load_last(self.run)
        self.processes.wait()  # all have read before one tidies up
        if self.processes.writes:
            tidy(self.run)
        if loaded is None:
            if self.processes.writes:
                write_metrics(self.run, [])
            return
        tensors, state = loaded
        self.history = read_metrics(self.run.metrics_path, state.epoch)
        self._restore_progress(state)
        load_whole_state(self.model, tensors.model)
        load_whole_state(self.ema.module, tensors.ema)
        restore_optimizer(
            self.optimizer, self.model, OptimizerState(tensors.optimizer, state.trainer.get("optimizer", {}))
        )
        if self.stepper.scaler.is_enabled():
            self.stepper.scaler.load_state_dict(state.trainer["scaler"])
        self.processes.wait()
        if self.processes.writes:
            write_metrics(self.run, self.history)
            if not self.batches_done:
                publish(self.run, state)

    def _restore_progress(self, state: CheckpointState) -> None:
        """How far into the next epoch the checkpoint is, and what its batches have cost so far."""
        self.batches_done = state.trainer.get("batches", 0)
        sums = state.trainer["losses"] if self.batches_done else [{}]
        ours = sums_for(self.processes.rank, self.processes.count, sums)
        self.log = EpochLog(self.data.steps, self.device, ours)

    def train(self, wandb: str | None = None, after_epoch: AfterEpoch | None = None) -> TrainingResult:
        """Train the epochs that are left; see `train`."""
        done = len(self.history)
        if not self._finished():
            with ExitStack() as stack:
                boards = [stack.enter_context(board) for board in self._boards(done, wandb)]
                request = stack.enter_context(stop_request())
                while not self._finished():
                    self.history.append(self._epoch(len(self.history) + 1, request))
                    self._save()
                    for write in boards:
                        write(self.history[-1])
                    log(_summary(self.history[-1], self.recipe.epochs), quiet=self.quiet)
                    if after_epoch is not None:
                        with unsharded(self.ema.module):
                            after_epoch(len(self.history), self.ema.module)
                    signal = self._stop_signal(request)
                    if signal and not self._finished():
                        raise TrainingStopped(signal)
        return TrainingResult(self.run, self.history, done)

    def _boards(self, done: int, wandb: str | None) -> Iterator[Any]:
        if self.processes.writes:
            yield scalar_board(self.run.path / "tensorboard", done)
            if wandb is not None:
                yield project_board(wandb, self.run.path, self.recipe.model_dump(mode="json"))

    def _finished(self) -> bool:
        return is_finished(self.history, self.recipe.epochs, self.recipe.selection)

    def _stop_signal(self, request: StopRequest) -> int:
        """The signal that asked any process to stop, or 0; all stop after the same step."""
        return max(self.processes.gather(request.signal))

    def _epoch(self, epoch: int, request: StopRequest) -> Metrics:
        started = time.perf_counter()
        losses = self._optimize(epoch, request)
        with unsharded(self.ema.module):
            measure_batch_norm([self.ema.module], self._calibration_images())
            values = evaluate(
                self.ema.module,
                self.val_images,
                self.recipe.preprocessing,
                self.recipe.batch_size,
                self.device,
                processes=self.processes,
            )
        return {
            "epoch": epoch,
            "step": epoch * self.data.steps,
            "lr": max(group["lr"] for group in self.optimizer.param_groups),
            "losses": losses,
            **values.as_dict(),
            "seconds": round(time.perf_counter() - started, 3),
        }

    def _optimize(self, epoch: int, request: StopRequest) -> dict[str, float]:
        """The rest of one pass over the training images; returns the mean of every loss over the whole pass."""
        self.model.train()
        steps, every, shown = self.data.steps, self.recipe.checkpoint_steps, 0.0
        with progress(f"epoch {epoch}/{self.recipe.epochs}", steps, quiet=self.quiet) as bar:
            for batch in self.batches(epoch):
                self.step(epoch, batch)
                self.batches_done = done = batch.number + 1
                if time.monotonic() - shown > SECONDS_BETWEEN_UPDATES:
                    shown = time.monotonic()
                    bar.update(done)
                if done % STEPS_BETWEEN_CHECKS == 0:
                    self._check_finite(epoch)
                if done == steps:
                    break
                asked = self.processes.count == 1 or done % STEPS_BETWEEN_SIGNALS == 0
                signal = self._stop_signal(request) if asked else 0
                if signal or (every and done % every == 0):
                    self._save_within_epoch(epoch)
                if signal:
                    raise TrainingStopped(signal)
        self._check_finite(epoch)
        means = mean_losses(self.processes.gather(self.log.totals()), steps)
        self.batches_done, self.log = 0, EpochLog(steps, self.device)
        return means

    def batches(self, epoch: int) -> Iterator[DeviceBatch]:
        """This process's part of what is left of the batches of `epoch`, on the device."""
        workers = self.recipe.workers
        batches = self.data.batches(epoch, workers, first=self.batches_done, shard=self.processes.shard)
        # Without workers samples are made where they are taken, and draw from generators that the steps draw from too.
        return self.prefetcher.batches(batches, ahead=workers > 0)

    def step(self, epoch: int, batch: DeviceBatch) -> None:
        """One optimizer step, and what it moves: the schedule, the averaged weights, the log."""
        step = (epoch - 1) * self.data.steps + batch.number
        self.schedule.step_update(step)
        losses, health = self.stepper(epoch, batch)
        self.ema.update(self.model, step=step + 1)
        self.log.add(batch.number, losses, health)

    def _calibration_images(self) -> Iterator[Tensor]:
        """Some training images, the same in every epoch and process, as evaluation sees them."""
        size = self.data.batch_size
        chosen = self.train_images.subset(self.data.order(0)[: max(CALIBRATION_IMAGES, size)])
        return Prefetcher(self.recipe.preprocessing, self.device).images(
            chosen.batches(self.recipe.preprocessing, size)
        )

    def _check_finite(self, epoch: int) -> None:
        """Stop before anything is saved when a loss or gradient of the epoch so far was not finite."""
        found = [number for number in self.processes.gather(self.log.first_unsound()) if number is not None]
        if not found:
            return
        where = save_failed_batch(self.run, self.data, epoch, min(found)) if self.processes.writes else ""
        settings = self.recipe.optimizer
        raise CheckFailed(
            f"the loss or its gradient is not finite at batch {min(found)} in epoch {epoch}: lower optimizer.lr "
            f"({settings.lr:g}) or optimizer.clip ({settings.clip:g}); its images are in '{where}', and the last "
            "checkpoint is kept"
        )

    def _save(self) -> None:
        """Save the epoch that has just ended."""
        tensors, trainer = self._state()
        if self.processes.writes:
            rng = {"seed": self.recipe.seed, "next_epoch": len(self.history) + 1}
            save(self.run, tensors, self.history, rng, trainer, metric=self.recipe.selection.metric)
        self.processes.wait()

    def _save_within_epoch(self, epoch: int) -> None:
        """Save what the rest of `epoch` goes on from."""
        self._check_finite(epoch)
        tensors, trainer = self._state()
        trainer |= {"batches": self.batches_done, "losses": self.processes.gather(self.log.totals())}
        if self.processes.writes:
            step = (epoch - 1) * self.data.steps + self.batches_done
            rng = {"seed": self.recipe.seed, "next_epoch": epoch, "next_batch": self.batches_done}
            metric = self.recipe.selection.metric
            save_within_epoch(self.run, tensors, self.history, step, rng, trainer, metric=metric)
        self.processes.wait()

    def _state(self) -> tuple[Tensors, dict[str, Any]]:
        """Everything that training goes on from; gathered, so all processes take part."""
        state = optimizer_state(self.optimizer, self.model)
        trainer: dict[str, Any] = {"optimizer": state.numbers}
        if self.stepper.scaler.is_enabled():
            trainer["scaler"] = self.stepper.scaler.state_dict()
        return Tensors(whole_state(self.model), whole_state(self.ema.module), state.tensors), trainer


def _log_skipped(*sets: ImageSet) -> None:
    for images in sets:
        if images.skipped:
            more = f" and {len(images.skipped) - 1} more" if len(images.skipped) > 1 else ""
            log(f"left out {len(images.skipped)} unreadable images: {images.skipped[0]}{more}")


def _summary(metrics: Metrics, epochs: int) -> str:
    losses = " ".join(f"{name} {value:.3f}" for name, value in metrics["losses"].items())
    return (
        f"epoch {metrics['epoch']}/{epochs}: top-1 {metrics['top1']:.2%} NLL {metrics['nll']:.4f} "
        f"({losses}) lr {metrics['lr']:.2g} {metrics['seconds']:.1f} s"
    )
