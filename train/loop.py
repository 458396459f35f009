"""The training loop: one epoch, one evaluation, one checkpoint, until the recipe's epochs are done.

Nothing random is carried from one epoch to the next, so resuming needs the weights, the optimizer's state and the
number of the epoch, and gives the same bits as never having stopped.
"""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import timm
import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from vitx.core.console import log, progress
from vitx.core.errors import CheckFailed, InputError
from vitx.core.files import read_record, staged_folder, write_json
from vitx.core.images import ImageSet, open_images
from vitx.core.run import ModelSpec, RunFolder, RunInfo
from vitx.models import build_model, image_tensor
from vitx.models.recalibration import measure_batch_norm
from vitx.train.checkpoint import Metrics, Tensors, load_last, publish, read_metrics, save, write_metrics
from vitx.train.data import CUTMIX, NETWORK, WEIGHTS, Batch, TrainingData, seed_of
from vitx.train.environment import RunEnvironment, choose_device
from vitx.train.evaluate import evaluate
from vitx.train.objective import check_model, losses_of, mix, patch_grid
from vitx.train.optimization import (
    build_optimizer,
    learning_rate,
    optimizer_tensors,
    restore_optimizer,
    set_learning_rate,
)
from vitx.train.recipe import Recipe, first_difference
from vitx.train.tensorboard import scalar_board

# Training images that measure the BatchNorm statistics of the averaged weights.
CALIBRATION_IMAGES = 256


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
    quiet: bool = False,
) -> TrainingResult:
    """Train `recipe` into the run folder `out`; see docs/run-folder.md for what it holds.

    With `resume` a run that was stopped goes on after its last finished epoch; one that has finished is returned as
    it is. Raises InputError when `out` exists and `resume` is off, when the recipe or the images are not those of the
    run, or when the data or a checkpoint cannot be read; CheckFailed when a loss is no longer finite.
    """
    folder = RunFolder(out)
    _check_out(folder, recipe, resume=resume)
    trainer = Trainer(recipe, folder, choose_device(device), skip_bad=skip_bad, quiet=quiet)
    trainer.open_run()
    return trainer.train()


def model_spec(recipe: Recipe, num_classes: int) -> ModelSpec:
    """The network of a recipe, with the arguments that follow from the data, the image size and the losses."""
    kwargs = dict(recipe.model.kwargs)
    config = timm.get_pretrained_cfg(recipe.model.name) if timm.is_model(recipe.model.name) else None
    if config is not None and config.fixed_input_size:
        kwargs["img_size"] = recipe.preprocessing.image_size
    if recipe.losses.mixing:
        kwargs["patch_head"] = True
    return ModelSpec(name=recipe.model.name, num_classes=num_classes, kwargs=kwargs)


def build_checked(recipe: Recipe, spec: ModelSpec) -> nn.Module:
    """Build the network with fresh weights; raise InputError when it cannot compute the recipe's losses."""
    try:
        model = build_model(spec)
    except InputError:
        # A network that has no patch head refuses the argument; name the loss that asked for it instead.
        kwargs = {name: value for name, value in spec.kwargs.items() if name != "patch_head"}
        check_model(recipe, build_model(spec.model_copy(update={"kwargs": kwargs})))
        raise
    check_model(recipe, model)
    return model


class Trainer:
    """Everything a run holds in memory between its epochs."""

    def __init__(self, recipe: Recipe, run: RunFolder, device: torch.device, *, skip_bad: bool, quiet: bool) -> None:
        self.recipe, self.run, self.device, self.quiet = recipe, run, device, quiet
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
        self.spec = model_spec(recipe, len(self.train_images.class_names))
        torch.manual_seed(seed_of(recipe.seed, WEIGHTS))
        self.model = build_checked(recipe, self.spec).to(device)
        self.grid = patch_grid(self.model)
        self.ema = ModelEmaV3(self.model, decay=recipe.ema_decay, use_warmup=True)
        self.optimizer = build_optimizer(self.model, recipe.optimizer)
        self.history: list[Metrics] = []

    @property
    def total_steps(self) -> int:
        return self.recipe.epochs * self.data.steps

    def open_run(self) -> None:
        """Make the run folder, or take up the one that is there."""
        environment = RunEnvironment.now(self.device, self.train_images, self.val_images)
        if not self.run.info_path.is_file():
            self._make_folder(environment)
            return
        begun = read_record(self.run.path / "environment.json", RunEnvironment)
        begun.check_same_data(environment)
        for difference in begun.differences(environment):
            log(f"resumed {difference}: the result may differ in its last bits", quiet=self.quiet)
        self._restore()

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
        if loaded is None:
            write_metrics(self.run, [])
            return
        tensors, state = loaded
        self.history = read_metrics(self.run.metrics_path, state.epoch)
        write_metrics(self.run, self.history)
        self.model.load_state_dict(tensors.model)
        self.ema.module.load_state_dict(tensors.ema)
        restore_optimizer(self.optimizer, self.model, tensors.optimizer)
        publish(self.run, state)

    def train(self) -> TrainingResult:
        """Train the epochs that are left."""
        done = len(self.history)
        if done < self.recipe.epochs:
            with scalar_board(self.run.path / "tensorboard", done) as write_scalars:
                for epoch in range(done + 1, self.recipe.epochs + 1):
                    self.history.append(self._epoch(epoch))
                    save(self.run, self._tensors(), self.history, self._rng(epoch))
                    write_scalars(self.history[-1])
                    log(_summary(self.history[-1], self.recipe.epochs), quiet=self.quiet)
        return TrainingResult(self.run, self.history, done)

    def _epoch(self, epoch: int) -> Metrics:
        started = time.perf_counter()
        losses = self._optimize(epoch)
        measure_batch_norm([self.ema.module], self._calibration_images())
        values = evaluate(
            self.ema.module, self.val_images, self.recipe.preprocessing, self.recipe.batch_size, self.device
        )
        return {
            "epoch": epoch,
            "step": epoch * self.data.steps,
            "lr": self.optimizer.param_groups[0]["lr"],
            "losses": losses,
            **values.as_dict(),
            "seconds": round(time.perf_counter() - started, 3),
        }

    def _optimize(self, epoch: int) -> dict[str, float]:
        """One pass over the training images; returns the mean of every loss."""
        self.model.train()
        torch.manual_seed(seed_of(self.recipe.seed, NETWORK, epoch))
        sums: dict[str, Tensor] = {}
        with progress(f"epoch {epoch}/{self.recipe.epochs}", self.data.steps, quiet=self.quiet) as bar:
            for batch in self.data.batches(epoch, self.recipe.workers):
                for name, loss in self._step(epoch, batch).items():
                    sums[name] = sums.get(name, 0) + loss.detach()
                bar.update(batch.number + 1)
        means = {name: value.item() / self.data.steps for name, value in sums.items()}
        self._check_finite(epoch, means["total"])
        return means

    def _step(self, epoch: int, batch: Batch) -> dict[str, Tensor]:
        step = (epoch - 1) * self.data.steps + batch.number
        settings = self.recipe.optimizer
        set_learning_rate(self.optimizer, learning_rate(step, self.total_steps, settings.lr, self.recipe.schedule))
        losses = self._losses(epoch, batch)
        self.optimizer.zero_grad(set_to_none=True)
        losses["total"].backward()  # type: ignore[no-untyped-call]
        if settings.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip)
        self.optimizer.step()
        self.ema.update(self.model, step=step + 1)
        return losses

    def _losses(self, epoch: int, batch: Batch) -> dict[str, Tensor]:
        preprocessing = self.recipe.preprocessing
        images = image_tensor(batch.images, preprocessing.mean, preprocessing.std).to(self.device)
        labels = torch.from_numpy(batch.labels).to(self.device)
        rng = random.Random(seed_of(self.recipe.seed, CUTMIX, epoch, batch.number))
        mixed = mix(images, labels, self.recipe, self.grid, rng, classes=self.spec.num_classes)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            return losses_of(self.model, mixed, self.recipe, self.spec.num_classes)

    def _calibration_images(self) -> Iterator[Tensor]:
        """Some training images, the same in every epoch, as evaluation sees them."""
        preprocessing = self.recipe.preprocessing
        chosen = self.data.order(0)[: max(CALIBRATION_IMAGES, self.data.batch_size)]
        for start in range(0, len(chosen), self.data.batch_size):
            part = chosen[start : start + self.data.batch_size]
            pixels = np.stack([preprocessing.from_bytes(self.train_images.read(int(index))) for index in part])
            yield image_tensor(pixels, preprocessing.mean, preprocessing.std).to(self.device)

    def _check_finite(self, epoch: int, total: float) -> None:
        if not torch.isfinite(torch.tensor(total)):
            raise CheckFailed(
                f"the loss is {total} in epoch {epoch}: lower optimizer.lr ({self.recipe.optimizer.lr:g}) or "
                f"optimizer.clip ({self.recipe.optimizer.clip:g}); the checkpoints of earlier epochs are kept"
            )

    def _tensors(self) -> Tensors:
        return Tensors(
            model=self.model.state_dict(),
            ema=self.ema.module.state_dict(),
            optimizer=optimizer_tensors(self.optimizer, self.model),
        )

    def _rng(self, epoch: int) -> dict[str, int]:
        """All that the generators of the next epoch are derived from."""
        return {"seed": self.recipe.seed, "next_epoch": epoch + 1}


def _check_out(run: RunFolder, recipe: Recipe, *, resume: bool) -> None:
    """Refuse a folder in use, and a run that was started with another recipe."""
    if not run.path.exists() or (run.path.is_dir() and not any(run.path.iterdir())):
        return
    if not resume:
        raise InputError(f"'{run.path}' exists: pass --resume to go on with it, or another --out")
    RunFolder.open(run.path)
    difference = first_difference(recipe, read_record(run.path / "recipe.json", Recipe))
    if difference:
        raise InputError(f"cannot resume '{run.path}': {difference}; leave it as it is, or pass another --out")


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
