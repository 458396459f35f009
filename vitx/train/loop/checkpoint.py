"""Checkpoints and metrics of a run folder, written so that a kill at any moment leaves a state to resume from.

The order matters: first the checkpoint's folder appears whole, then metrics.jsonl gets its line, then the links `last`
and `best` are switched, then folders without a link are removed. A checkpoint within an epoch has the link `resume`
alone, until the checkpoint at the end of the epoch replaces it. Specification: docs/run-folder.md.
"""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file
from torch import Tensor

from vitx.core.errors import InputError
from vitx.core.files import (
    link_atomically,
    read_record,
    remove_unfinished,
    sha256_file,
    staged_folder,
    write_bytes,
    write_json,
)
from vitx.core.run import CheckpointState, RunFolder, verify_digests
from vitx.models.build import save_tensors
from vitx.train.metrics_file import read_lines
from vitx.train.progress import PROGRESS_FILE
from vitx.train.recipes.optimization_settings import Metric, Selection

Metrics = dict[str, Any]
TENSOR_FILES = ("model.safetensors", "ema.safetensors", "optimizer.safetensors")
LINKS = ("last", "best", "resume")


class CheckpointTensors(NamedTuple):
    """The contents of a checkpoint's three safetensors files, in the order of `TENSOR_FILES`."""

    model: dict[str, Tensor]
    ema: dict[str, Tensor]
    optimizer: dict[str, Tensor]


def folder_name(epoch: int) -> str:
    return f"epoch-{epoch:04d}"


def best_row(history: list[Metrics], metric: Metric = "top1") -> Metrics:
    """The row of the epoch with the best `metric`: the highest top-1, or the lowest of another metric.

    Among equal epochs the one of lowest NLL, then the first.
    """
    sign = 1 if metric == "top1" else -1
    return max(history, key=lambda row: (sign * row[metric], -row["nll"], -row["epoch"]))


def is_finished(history: list[Metrics], epochs: int, selection: Selection) -> bool:
    """Whether all epochs are done, or `selection.patience` epochs have passed since the best one."""
    done = len(history)
    if done >= epochs:
        return True
    since_best = done - best_row(history, selection.metric)["epoch"] if done else 0
    return bool(selection.patience and since_best >= selection.patience)


def save_epoch(
    run: RunFolder,
    tensors: CheckpointTensors,
    history: list[Metrics],
    rng: dict[str, Any],
    trainer: dict[str, Any] | None = None,
    *,
    metric: Metric = "top1",
    keep_every: int = 0,
) -> None:
    """Write the checkpoint of the last epoch of `history`, and link it as `last`, and as `best` if it is the best.

    Other epochs are removed, but for every `keep_every`-th where that is not 0. Raises OSError when the disk is full;
    the checkpoints that were there before are then still whole.
    """
    latest = history[-1]
    state = _state(history, latest["step"], rng, trainer or {}, metric)
    state = _write(run.path / "checkpoints" / folder_name(latest["epoch"]), tensors, state)
    write_metrics(run, history)
    switch_links(run, state, keep_every)


def save_initial(run: RunFolder, tensors: CheckpointTensors) -> None:
    """Write the weights that training begins with as epoch 0, which has no link; a resumed run has them already."""
    folder = run.path / "checkpoints" / folder_name(0)
    if not folder.exists():
        _write(folder, tensors, _state([], 0, {}, {}, "top1"))


def save_within_epoch(
    run: RunFolder,
    tensors: CheckpointTensors,
    history: list[Metrics],
    step: int,
    rng: dict[str, Any],
    trainer: dict[str, Any],
    *,
    metric: Metric = "top1",
    keep_every: int = 0,
) -> None:
    """Write a checkpoint after `step` steps, within an epoch; only resuming reads it. Raises OSError."""
    folder = run.path / "checkpoints" / f"step-{step:08d}"
    _write(folder, tensors, _state(history, step, rng, trainer, metric))
    link_atomically(folder.with_name("resume"), folder.name)
    _remove_unnamed(folder.parent, keep_every)


def _state(
    history: list[Metrics], step: int, rng: dict[str, Any], trainer: dict[str, Any], metric: Metric
) -> CheckpointState:
    best: Metrics = best_row(history, metric) if history else {"epoch": 0, metric: 0.0}
    return CheckpointState(
        epoch=len(history),
        step=step,
        best_metric=best[metric],
        best_epoch=best["epoch"],
        metrics=history[-1] if history else {},
        rng=rng,
        trainer=trainer,
        sha256={},
    )


def _write(folder: Path, tensors: CheckpointTensors, state: CheckpointState) -> CheckpointState:
    with staged_folder(folder) as stage:
        for name, values in zip(TENSOR_FILES, tensors, strict=True):
            save_tensors(values, stage / name)
        state = state.model_copy(update={"sha256": {name: sha256_file(stage / name) for name in TENSOR_FILES}})
        write_json(stage / "state.json", state)
    return state


def switch_links(run: RunFolder, state: CheckpointState, keep_every: int = 0) -> None:
    """Switch `last` and `best` as `state`, of a finished epoch, says, and remove folders that are not to be kept.

    Calling it twice does no harm, so a resumed run repeats what a kill may have interrupted.
    """
    folder = run.path / "checkpoints"
    link_atomically(folder / "last", folder_name(state.epoch))
    link_atomically(folder / "best", folder_name(state.best_epoch))
    (folder / "resume").unlink(missing_ok=True)
    _remove_unnamed(folder, keep_every)


def _remove_unnamed(folder: Path, keep_every: int) -> None:
    """Remove checkpoints without a link, but for those of every `keep_every`-th epoch."""
    linked = {(folder / link).readlink().name for link in LINKS if (folder / link).is_symlink()}
    for path in sorted(folder.iterdir()):  # first what a kill has left of one
        kind, _, number = path.name.partition("-")
        kept = bool(keep_every) and kind == "epoch" and number.isdigit() and int(number) % keep_every == 0
        if path.is_dir() and not path.is_symlink() and path.name not in linked and not kept:
            if kind in ("epoch", "step"):  # what has a checkpoint's name is whole
                path = path.rename(path.with_name(f".{path.name}.old"))
            shutil.rmtree(path)


def remove_unfinished_writes(run: RunFolder) -> None:
    """Remove the temporary files and links of killed processes; no other process may be writing into `run`.

    Checkpoint folders without a link are removed when the next checkpoint is saved.
    """
    for path in (run.metrics_path, run.path / PROGRESS_FILE, *(run.path / "checkpoints" / link for link in LINKS)):
        remove_unfinished(path)


def newest_checkpoint(run: RunFolder) -> tuple[Path, CheckpointState] | None:
    """The checkpoint to resume from, the one of `last` and `resume` with more steps; None when nothing was saved.

    Raises InputError for a copy without the links, which would be trained from the first epoch, over what is there.
    """
    folder = run.path / "checkpoints"
    links = [link for link in LINKS if (folder / link).is_symlink()]
    copied = [link for link in LINKS if (folder / link).exists() and link not in links]
    newest = [link for link in links if link != "best"]
    # A kill at the end of the first epoch may leave its line without the link.
    if copied or (not newest and len(read_lines(run.metrics_path)) > 1):
        what = f"{folder / copied[0]} is no link" if copied else f"{folder / 'last'} is missing"
        raise InputError(f"{what}: copy the run again with its links, as `cp -a`, `rsync -a` and `tar` do")
    return max((read_state(run, link) for link in newest), key=lambda pair: pair[1].step, default=None)


def load_newest(run: RunFolder) -> tuple[CheckpointTensors, CheckpointState] | None:
    """Load the checkpoint to resume from, the digest of every file verified; None when nothing was saved.

    Raises InputError naming the file that is corrupt or missing.
    """
    found = newest_checkpoint(run)
    if found is None:
        return None
    folder, state = found
    verify_digests(folder, {name: state.sha256.get(name, "") for name in TENSOR_FILES})
    return CheckpointTensors(*(load_file(folder / name) for name in TENSOR_FILES)), state


def read_state(run: RunFolder, link: str) -> tuple[Path, CheckpointState]:
    """The folder that `link` names now, and its state; tensors are not read or verified."""
    path = run.path / "checkpoints" / link
    folder = path.with_name(path.readlink().name)  # one beside it, whatever else the link says
    return folder, read_record(folder / "state.json", CheckpointState)


def write_metrics(run: RunFolder, history: list[Metrics]) -> None:
    """Write metrics.jsonl, one line for each epoch; the file appears whole or not at all."""
    lines = [json.dumps(row, allow_nan=False) + "\n" for row in history]
    write_bytes(run.metrics_path, "".join(lines).encode())


def read_metrics(path: Path, epochs: int) -> list[Metrics]:
    """The metrics of the first `epochs` epochs; raise InputError unless the file has exactly one line for each.

    Lines of later epochs are left out: a killed run wrote them before the link `last` was switched.
    """
    history = [row for row in read_lines(path) if row["epoch"] <= epochs]
    if [row["epoch"] for row in history] != list(range(1, epochs + 1)):
        raise InputError(f"{path} does not hold the epochs 1 to {epochs} of its checkpoint: restore it, or train anew")
    return history
