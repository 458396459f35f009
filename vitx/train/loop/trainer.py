"""The training loop: one epoch, one evaluation, one checkpoint, until the recipe's epochs are done.

No random generator's state goes from one step to the next. So resuming needs the weights, the optimizer's state and the
number of the step alone, and a resumed run ends in the same bits as one that was never stopped.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from timm.utils import ModelEmaV3
from torch import nn

from vitx.core.console import log, progress
from vitx.core.errors import CheckFailed
from vitx.core.files import staged_folder, write_bytes, write_json
from vitx.core.run import CheckpointState, RunFolder, RunInfo
from vitx.data.flat_folder import FolderSplit, check_outside
from vitx.data.open import log_skipped, open_splits
from vitx.models.recalibration import measure_batch_norm
from vitx.train.loop.checkpoint import (
    CheckpointTensors,
    Metrics,
    is_finished,
    load_newest,
    newest_checkpoint,
    read_metrics,
    remove_unfinished_writes,
    save_epoch,
    save_initial,
    save_within_epoch,
    switch_links,
    write_metrics,
)
from vitx.train.loop.determinism import device_to_train_on
from vitx.train.loop.distributed.batch_part import BatchPart
from vitx.train.loop.distributed.fsdp_tensors import gathered_state, load_gathered_state
from vitx.train.loop.distributed.processes import Processes, join_processes, parallelize, shard_module, unsharded
from vitx.train.loop.environment import ENVIRONMENT_FILE, RunEnvironment
from vitx.train.loop.evaluation import Evaluation, EvaluationStopped, check_finite_evaluation, evaluate
from vitx.train.loop.failures import explain_full_disk, explain_lost_process, save_failed_batch
from vitx.train.loop.first_batch import FIRST_BATCH, first_batch
from vitx.train.loop.inputs.prefetch import DeviceBatch, Prefetcher
from vitx.train.loop.inputs.training_data import WEIGHTS, TrainingData, seed_of
from vitx.train.loop.interruption import StopRequest, TrainingStopped, signals_to
from vitx.train.loop.metric_writers import require_wandb, tensorboard_writer, wandb_writer
from vitx.train.loop.network import (
    apply_execution,
    build_network,
    drop_path_rates,
    load_initial_weights,
    model_spec,
)
from vitx.train.loop.optimization import (
    OptimizerState,
    build_optimizer,
    build_schedule,
    describe_rate,
    optimizer_state,
    restore_optimizer,
)
from vitx.train.loop.result import TrainingResult, describe_epoch
from vitx.train.loop.resuming import VISIBILITY_TIMEOUT, changed_settings, check_processes_agree, check_run_folder
from vitx.train.loop.run_lock import RunLock, timeout_under_torchrun
from vitx.train.loop.step import EpochLog, Objective, Stepper, mean_losses, resumed_sums
from vitx.train.loop.step_log import StepLog, lacks_end
from vitx.train.losses.distillation import load_teacher
from vitx.train.losses.objective import check_even
from vitx.train.recipes.idle_settings import idle_settings
from vitx.train.recipes.optimization_settings import Stage
from vitx.train.recipes.recipe import RECIPE_FILE, Recipe, read_recipe

# Steps between two checks that the losses are finite: each check waits for the device.
STEPS_BETWEEN_CHECKS = 50
# Steps after which several processes tell each other whether one of them got a signal to stop.
STEPS_BETWEEN_SIGNALS = 8
SECONDS_BETWEEN_UPDATES = 0.1  # of the progress bar

# Called with the number of the epoch that was saved, and the averaged network.
AfterEpoch = Callable[[int, nn.Module], None]


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
    """Train `recipe` into the run folder `out`, which docs/run-folder.md describes.

    With `resume` a run that was stopped continues from its newest checkpoint; a finished run is returned as it is.
    Under torchrun the processes share every batch. `wandb` names a project of Weights & Biases for the metrics.
    `after_epoch` is called when an epoch is saved, in the process that writes the files, with the number of the epoch
    and the averaged network; and again when a run resumes at the end of an epoch, whose call a kill may have ended.

    Raises InputError when `out` exists and `resume` is off, when the recipe or the images are not those of the run,
    when the data or a checkpoint cannot be read, or when `execution.deterministic` is not possible; CheckFailed when a
    loss is no longer finite; EnvironmentMissing when the disk is full or the package wandb is missing; TrainingStopped
    after a SIGTERM, SIGHUP or SIGINT, when all is saved.
    """
    folder = RunFolder(out)
    require_wandb(wandb)  # before there is a folder
    with (
        device_to_train_on(device, deterministic=recipe.execution.deterministic) as chosen,
        join_processes(chosen) as processes,
        explain_lost_process(folder),
        RunLock(folder) as lock,
    ):
        if processes.writes and resume:
            lock.acquire(timeout_under_torchrun(VISIBILITY_TIMEOUT))
        processes.barrier()  # from here on no other training writes into the folder
        check_processes_agree(processes, folder, recipe)
        check_run_folder(folder, recipe, resume=resume)
        processes.barrier()  # all have looked at the folder before the first process makes it
        # The initial weights of a run that has its own need not be there any more.
        choices = {"initial_weights": newest_checkpoint(folder) is None, "quiet": quiet or not processes.writes}
        trainer = Trainer(recipe, folder, chosen, processes, skip_bad=skip_bad, **choices)
        with explain_full_disk(folder):
            trainer.open_run()
            if processes.writes:
                lock.acquire()  # of a new run, which had no folder to lock until now
            return trainer.train(wandb, after_epoch)


class Trainer:
    """All that a run keeps in memory between its steps.

    `model` is trained, `ema.module` is its moving average (evaluated, exported and served), `history` has the metrics
    of the finished epochs, `batches_done` and `log` belong to the epoch under way.
    """

    step_log: StepLog | None = None  # of the process that writes, while the run trains
    teacher_sha256 = ""  # of the weights that teach, if any do
    started = seconds_before = 0.0  # when the epoch under way began, and what it had taken when it was saved

    def __init__(
        self,
        recipe: Recipe,
        run: RunFolder,
        device: torch.device,
        processes: Processes,
        *,
        skip_bad: bool,
        quiet: bool,
        initial_weights: bool = True,
    ) -> None:
        self.recipe, self.run, self.device, self.processes, self.quiet = recipe, run, device, processes, quiet
        data, check_size = run.images_of(recipe.data), recipe.preprocessing.check_size
        self.train_images, self.val_images = open_splits(data, skip_bad=skip_bad, check_size=check_size)
        if not run.exists():  # one that is there goes on wherever it is
            check_outside(self.train_images, run.path)
        log_skipped(self.train_images, self.val_images)
        self.data = TrainingData(
            self.train_images,
            recipe.preprocessing,
            recipe.augmentation,
            batch_size=recipe.batch_size,
            seed=recipe.seed,
        )
        # Raises before anything is built if the batch cannot be split into the parts of all processes and passes.
        parts = BatchPart(0, processes.count * recipe.optimizer.accumulate).slices(self.data.batch_size)
        if recipe.mixup.on:
            check_even(sum(part.stop - part.start for part in parts))
        self._build_network(initial_weights=initial_weights)
        self.drop_path_rates = drop_path_rates(self.model)
        self.optimizer = build_optimizer(self.model, recipe.optimizer, self.data.batch_size)
        self.prefetcher = Prefetcher(recipe.preprocessing, device, channels_last=recipe.execution.channels_last)
        self.stepper = Stepper(
            self.objective, self.model, self.optimizer, recipe, self.spec.num_classes, self.prefetcher, processes
        )
        self._set_stage(recipe.stage(1))
        self.history: list[Metrics] = []
        self.batches_done, self.log = 0, EpochLog(self.data.steps, device)

    def _build_network(self, *, initial_weights: bool) -> None:
        recipe, class_names = self.recipe, self.train_images.class_names
        self.spec = model_spec(recipe, len(class_names))
        torch.manual_seed(seed_of(recipe.seed, WEIGHTS))
        model = build_network(recipe, self.spec)
        if recipe.model.initial_checkpoint and initial_weights:
            load_initial_weights(model, self.spec, recipe.model.initial_checkpoint, quiet=self.quiet)
        model = model.to(self.device)
        sharded = recipe.execution.parallel == "fsdp" and self.processes.count > 1
        # foreach updates all tensors in one kernel, which cannot mix FSDP's sharded tensors with whole ones.
        self.ema = ModelEmaV3(model, decay=recipe.ema_decay, use_warmup=recipe.ema_warmup, foreach=not sharded)
        self.model: nn.Module = apply_execution(
            model, recipe.model.name, recipe.execution, self.device, processes=self.processes.count
        )
        teacher = load_teacher(recipe.distillation, recipe.preprocessing, class_names)
        if teacher is not None:
            self.teacher_sha256 = teacher.sha256
            teacher.to(self.device)
            # DeiT's distilled networks then return the logits of both heads; others have no such method.
            getattr(self.model, "set_distilled_training", lambda _: None)(True)
        objective = Objective(self.model, recipe, self.spec.num_classes, teacher)
        self.objective = parallelize(objective, recipe.execution.parallel, self.processes, self.device)
        if sharded:
            shard_module(self.ema.module, self.device)

    def open_run(self) -> None:
        """Make the run folder, or resume from the one that exists."""
        environment = RunEnvironment.now(
            self.device,
            self.train_images,
            self.val_images,
            processes=self.processes.count,
            teacher=self.teacher_sha256,
        )
        self.processes.agreed(
            lambda: (environment.data, environment.teacher),
            "the processes see other images than each other, or another teacher: copy the same to each node",
        )
        if self.run.exists():
            begun = RunEnvironment.read(self.run.path)
            begun.check_same_data(environment)
            changed = changed_settings(read_recipe(self.run.path), self.recipe)
            for difference in (*begun.differences(environment), *changed):
                log(f"resumed {difference}", quiet=self.quiet)
            self._restore()
        elif self.processes.writes:
            self._make_folder(environment)
            log(describe_rate(self.recipe, self.data.batch_size), quiet=self.quiet)
            if idle := idle_settings(self.recipe):
                log(f"without effect: {'; '.join(idle)}", quiet=self.quiet)
        self.processes.barrier()

    def _make_folder(self, environment: RunEnvironment) -> None:
        info = RunInfo(
            name=self.run.path.resolve().name,
            recipe=self.recipe.name,
            model=self.spec,
            class_names=self.train_images.class_names,
            preprocessing=self.recipe.preprocessing,
            data=str(self.run.split_path) if self.train_images.by_hash else self.recipe.data,
            seed=self.recipe.seed,
        )
        with staged_folder(self.run.path, replaces=False) as stage:
            write_json(stage / RECIPE_FILE, self.recipe)
            write_json(stage / ENVIRONMENT_FILE, environment)
            write_bytes(stage / FIRST_BATCH, first_batch(self.data))
            if self.train_images.by_hash:
                write_json(RunFolder(stage).split_path, FolderSplit.of(self.train_images, self.val_images))
            write_json(RunFolder(stage).info_path, info)

    def _restore(self) -> None:
        """Load the newest checkpoint, and complete on the disk what a kill interrupted."""
        loaded = load_newest(self.run)
        self.processes.barrier()  # all have read before the first process removes or switches anything
        if self.processes.writes:
            remove_unfinished_writes(self.run)
        if loaded is None:
            if self.processes.writes:
                write_metrics(self.run, [])
            return
        tensors, state = loaded
        self.history = read_metrics(self.run.metrics_path, state.epoch)
        self._restore_epoch_progress(state)
        load_gathered_state(self.model, tensors.model)
        load_gathered_state(self.ema.module, tensors.ema)
        restore_optimizer(
            self.optimizer, self.model, OptimizerState(tensors.optimizer, state.trainer.get("optimizer", {}))
        )
        if self.stepper.scaler.is_enabled():
            self.stepper.scaler.load_state_dict(state.trainer["scaler"])
        self.processes.barrier()
        if self.processes.writes:
            write_metrics(self.run, self.history)  # without lines of epochs that are trained again
            if not self.batches_done:  # the end of an epoch: its links may not have been switched
                switch_links(self.run, state, self.recipe.keep_every)

    def _restore_epoch_progress(self, state: CheckpointState) -> None:
        """Restore how many batches of the epoch under way are done, their seconds, and the sums of their losses."""
        self.batches_done, self.seconds_before = (state.trainer.get(name, 0) for name in ("batches", "seconds"))
        sums = state.trainer["losses"] if self.batches_done else [{}]
        own_sums = resumed_sums(self.processes.rank, self.processes.count, sums)
        self.log = EpochLog(self.data.steps, self.device, own_sums)

    def train(self, wandb: str | None = None, after_epoch: AfterEpoch | None = None) -> TrainingResult:
        """Train the remaining epochs; the arguments and errors are those of the function `train`."""
        done = len(self.history)
        # A kill after the last checkpoint leaves its events and the word that the run has ended unwritten.
        if not self._finished() or lacks_end(self.run.path):
            self._save_initial()
            with ExitStack() as stack:
                metric_writers = [stack.enter_context(writer) for writer in self._metric_writers(done, wandb)]
                for write in metric_writers if done else ():  # of the last epoch before this process
                    write(self.history[-1])
                stack.enter_context(signals_to((request := StopRequest()).receive))
                if self.processes.writes:
                    self.step_log = stack.enter_context(self._new_step_log())
                if done and not self.batches_done:  # a kill may have come between the checkpoint and the call
                    self._tell_of_epoch(after_epoch)
                while not self._finished():
                    self.history.append(self._epoch(len(self.history) + 1, request))
                    self._save()
                    for write in metric_writers:
                        write(self.history[-1])
                    log(describe_epoch(self.history[-1], self.recipe.epochs), quiet=self.quiet)
                    self._tell_of_epoch(after_epoch)
                    if (signal := self._stop_signal(request)) and not self._finished():
                        raise TrainingStopped(signal)
        return TrainingResult(self.run, self.history, done, len(self.val_images))

    def _tell_of_epoch(self, after_epoch: AfterEpoch | None) -> None:
        if after_epoch is not None:
            with unsharded(self.ema.module):  # a collective call
                if self.processes.writes:
                    after_epoch(len(self.history), self.ema.module)

    def _metric_writers(self, done: int, wandb: str | None) -> Iterator[Any]:
        if self.processes.writes:
            yield tensorboard_writer(self.run.path / "tensorboard", max(done, 1))
            if wandb is not None:
                yield wandb_writer(wandb, self.run.path, self.recipe.model_dump(mode="json"))

    def _new_step_log(self) -> StepLog:
        return StepLog(
            self.run.path,
            steps=self.recipe.epochs * self.data.steps,
            epochs=self.recipe.epochs,
            done=len(self.history) * self.data.steps + self.batches_done,
            batch_size=self.data.batch_size,
            device=self.device,
        )

    def _finished(self) -> bool:
        return is_finished(self.history, self.recipe.epochs, self.recipe.selection)

    def _stop_signal(self, request: StopRequest) -> int:
        """The signal that any process has received, 0 for none; exchanged, so that all stop after the same step."""
        return max(self.processes.gather(request.signal))

    def _epoch(self, epoch: int, request: StopRequest) -> Metrics:
        """Train one epoch and evaluate the averaged weights, and the trained ones; return its line of metrics.jsonl."""
        self.started, self.seconds_before = time.perf_counter() - self.seconds_before, 0.0
        self._enter_stage(epoch)
        losses = self._optimize(epoch, request)
        values, raw = self._evaluate_both(epoch, request)
        self.batches_done, self.log = 0, EpochLog(self.data.steps, self.device)
        return {
            "epoch": epoch,
            "step": epoch * self.data.steps,
            "lr": max(group["lr"] for group in self.optimizer.param_groups),
            "losses": losses,
            **asdict(values),
            "raw": {name: getattr(raw, name) for name in ("top1", "top5", "nll", "ece", "brier")},
            "seconds": round(time.perf_counter() - self.started, 3),
        }

    def _evaluate_both(self, epoch: int, request: StopRequest) -> tuple[Evaluation, Evaluation]:
        """Evaluate the averaged weights and the trained ones; on a signal save the steps of `epoch` instead."""
        preprocessing = self.recipe.preprocessing
        some_images = Prefetcher(preprocessing, self.device).images(self.data.calibration_batches(preprocessing))
        try:
            with unsharded(self.ema.module):
                # Averaged running statistics lag behind averaged weights; docs/training.md has the numbers.
                measured = measure_batch_norm([self.ema.module], some_images)
                values = self._evaluate(self.ema.module, epoch, request)
            # An average that keeps nothing is the trained weights, but for BatchNorm's statistics, its own.
            if not (self.recipe.ema_decay or measured):
                return values, values
            with unsharded(self.objective):  # it holds the groups of the network's parameters
                return values, self._evaluate(self.model, epoch, request)
        except EvaluationStopped:
            self._save_within_epoch(epoch)
            raise TrainingStopped(self._stop_signal(request)) from None

    def _evaluate(self, model: nn.Module, epoch: int, request: StopRequest) -> Evaluation:
        asked, recipe, images = partial(self._stop_signal, request), self.recipe, self.val_images
        values = evaluate(
            model, images, recipe.preprocessing, recipe.batch_size, self.device, self.processes, asked, quiet=self.quiet
        )
        check_finite_evaluation(epoch, values)
        return values

    def _enter_stage(self, epoch: int) -> None:
        """Give `epoch` the schedule and drop path of its stage, and begin the optimizer anew where the recipe does."""
        stage = self.recipe.stage(epoch)
        if stage == self.stage:
            return
        before = self.recipe.stage(epoch - 1)  # not always self.stage: a resumed run was built in the first one
        if before != stage and before.fresh_optimizer and not self.batches_done:
            self.optimizer = build_optimizer(self.model, self.recipe.optimizer, self.data.batch_size)
            self.stepper.optimizer = self.optimizer
        self._set_stage(stage)

    def _set_stage(self, stage: Stage) -> None:
        recipe, self.stage = self.recipe, stage
        self.schedule = build_schedule(self.optimizer, recipe.schedule, epochs=stage.until, steps=self.data.steps)
        if recipe.stages:
            factor = stage.drop_path_rate / recipe.model.kwargs["drop_path_rate"]
            for module, rate in self.drop_path_rates.items():  # of a network that was built for the last stage
                module.drop_prob = rate * factor

    def _optimize(self, epoch: int, request: StopRequest) -> dict[str, float]:
        """Take the remaining steps of `epoch`; return the mean of each loss over all steps of the epoch."""
        self.model.train()
        steps, checkpoint_steps, shown = self.data.steps, self.recipe.checkpoint_steps, 0.0
        if self.step_log is not None:
            self.step_log.begin_epoch()
        with progress(f"epoch {epoch}/{self.recipe.epochs}", steps, quiet=self.quiet) as bar:
            for batch in self.batches(epoch):
                self.step(epoch, batch)
                self.batches_done = done = batch.number + 1
                if time.monotonic() - shown > SECONDS_BETWEEN_UPDATES:
                    shown = time.monotonic()
                    bar.update(done, self.step_log.note if self.step_log else "")
                if done % STEPS_BETWEEN_CHECKS == 0:
                    self._check_finite(epoch)
                if done == steps:
                    break
                exchange = self.processes.count == 1 or done % STEPS_BETWEEN_SIGNALS == 0
                signal = self._stop_signal(request) if exchange else 0
                if signal or (checkpoint_steps and done % checkpoint_steps == 0):
                    self._save_within_epoch(epoch)
                if signal:
                    raise TrainingStopped(signal)
        self._check_finite(epoch)
        self.schedule.step_update(epoch * steps - 1)  # of an epoch that was stopped after its last step
        return mean_losses(self.processes.gather(self.log.totals()), steps)

    def batches(self, epoch: int) -> Iterator[DeviceBatch]:
        """This process's part of each remaining batch of `epoch`, on the device."""
        workers = self.recipe.workers
        batches = self.data.batches(epoch, workers, first=self.batches_done, part=self.processes.batch_part)
        # Without workers this process makes the samples, and seeds the global generators that the steps draw from: a
        # thread must not do that during a step.
        return self.prefetcher.batches(batches, ahead=workers > 0)

    def step(self, epoch: int, batch: DeviceBatch) -> None:
        """Take one optimizer step, at the rate of the schedule; update the averaged weights and the log."""
        step = (epoch - 1) * self.data.steps + batch.number
        self.schedule.step_update(step)
        losses, checked_total = self.stepper(epoch, batch)
        # The step sets the warm-up of the decay; without it timm takes the constant decay from the first step.
        self.ema.update(self.model, step=step + 1 if self.recipe.ema_warmup else None)
        self.log.add(batch.number, losses, checked_total)
        if self.step_log is not None:
            rate = max(group["lr"] for group in self.optimizer.param_groups)
            self.step_log(step, losses, rate, self.stepper.gradient_norm)

    def _check_finite(self, epoch: int) -> None:
        """Raise CheckFailed when a loss or gradient of the epoch so far was not finite; called before saving."""
        found = self.log.first_not_finite(self.processes)
        if found is None:
            return
        where = save_failed_batch(self.run, self.data, epoch, found) if self.processes.writes else ""
        settings = self.recipe.optimizer
        raise CheckFailed(
            f"the loss or its gradient is not finite at batch {found} in epoch {epoch}: lower optimizer.lr "
            f"({settings.lr:g}) or {'' if settings.clip else 'set '}optimizer.clip ({settings.clip:g}); its images are "
            f"in '{where}', and what was saved before is kept"
        )

    def _save(self) -> None:
        """Save the epoch that has just ended."""
        tensors, trainer = self._state()  # a collective call, so it stands before `writes`
        if self.processes.writes:
            rng = {"seed": self.recipe.seed, "next_epoch": len(self.history) + 1}
            save_epoch(self.run, tensors, self.history, rng, trainer, **self._kept())
        self.processes.barrier()

    def _save_within_epoch(self, epoch: int) -> None:
        """Save a checkpoint from which the rest of `epoch` can be trained."""
        self._check_finite(epoch)
        tensors, trainer = self._state()
        trainer |= {"batches": self.batches_done, "losses": self.processes.gather(self.log.totals())}
        trainer["seconds"] = time.perf_counter() - self.started
        if self.processes.writes:
            step = (epoch - 1) * self.data.steps + self.batches_done
            rng = {"seed": self.recipe.seed, "next_epoch": epoch, "next_batch": self.batches_done}
            save_within_epoch(self.run, tensors, self.history, step, rng, trainer, **self._kept())
        self.processes.barrier()

    def _kept(self) -> dict[str, Any]:
        return {"metric": self.recipe.selection.metric, "keep_every": self.recipe.keep_every}

    def _save_initial(self) -> None:
        if self.recipe.keep_every and not self.history and not self.batches_done:
            tensors, _ = self._state()
            if self.processes.writes:
                save_initial(self.run, tensors)

    def _state(self) -> tuple[CheckpointTensors, dict[str, Any]]:
        """The tensors and numbers of a checkpoint. They are gathered, so all processes have to call it."""
        state = optimizer_state(self.optimizer, self.model)
        trainer: dict[str, Any] = {"optimizer": state.numbers}
        if self.stepper.scaler.is_enabled():
            trainer["scaler"] = self.stepper.scaler.state_dict()
        return CheckpointTensors(gathered_state(self.model), gathered_state(self.ema.module), state.tensors), trainer
