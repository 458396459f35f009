"""Checkpoints and metrics of a run folder, written so that a kill at any moment leaves a state to resume from.

The order matters: the checkpoint's folder appears whole, then its line of metrics, then the links `last` and `best`
switch, then folders that no link names are removed. A checkpoint within an epoch is named by the link `resume` alone,
until the epoch's own takes its place. Specification: docs/run-folder.md.
"""

import errno
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
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
from vitx.train.recipes.optimizer_groups import Metric, Selection

Metrics = dict[str, Any]
FILES = ("model.safetensors", "ema.safetensors", "optimizer.safetensors")
LINKS = ("last", "best", "resume")


class Tensors(NamedTuple):
    """The three files of a checkpoint; none of them needs pickle."""

    model: dict[str, Tensor]
    ema: dict[str, Tensor]
    optimizer: dict[str, Tensor]


def folder_name(epoch: int) -> str:
    return f"epoch-{epoch:04d}"


def best_of(history: list[Metrics], metric: Metric = "top1") -> Metrics:
    """The epoch of the best `metric` (highest top-1, lowest of the others); among equals of lowest NLL, the first."""
    sign = 1 if metric == "top1" else -1
    return max(history, key=lambda row: (sign * row[metric], -row["nll"], -row["epoch"]))


def is_finished(history: list[Metrics], epochs: int, selection: Selection) -> bool:
    """All epochs are done, or as many as the recipe's patience have passed since the best one."""
    done = len(history)
    if done >= epochs:
        return True
    stale = done - best_of(history, selection.metric)["epoch"] if done else 0
    return bool(selection.patience and stale >= selection.patience)


def save(
    run: RunFolder,
    tensors: Tensors,
    history: list[Metrics],
    rng: dict[str, Any],
    trainer: dict[str, Any] | None = None,
    *,
    metric: Metric = "top1",
) -> None:
    """Write the checkpoint of the last epoch of `history` and make it `last`, and `best` if it is.

    Raises OSError when the disk is full; what was there before is then still whole.
    """
    latest = history[-1]
    state = _state(history, latest["step"], rng, trainer or {}, metric)
    state = _write(run.path / "checkpoints" / folder_name(latest["epoch"]), tensors, state)
    write_metrics(run, history)
    publish(run, state)


def save_within_epoch(
    run: RunFolder,
    tensors: Tensors,
    history: list[Metrics],
    step: int,
    rng: dict[str, Any],
    trainer: dict[str, Any],
    *,
    metric: Metric = "top1",
) -> None:
    """Write a checkpoint after `step` steps, in the middle of an epoch, that only resuming reads. Raises OSError."""
    folder = run.path / "checkpoints" / f"step-{step:08d}"
    _write(folder, tensors, _state(history, step, rng, trainer, metric))
    link_atomically(folder.with_name("resume"), folder.name)
    _remove_unnamed(folder.parent)


def _state(
    history: list[Metrics], step: int, rng: dict[str, Any], trainer: dict[str, Any], metric: Metric
) -> CheckpointState:
    best: Metrics = best_of(history, metric) if history else {"epoch": 0, metric: 0.0}
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


def _write(folder: Path, tensors: Tensors, state: CheckpointState) -> CheckpointState:
    with staged_folder(folder) as stage:
        for name, values in zip(FILES, tensors, strict=True):
            _save_file({key: value.detach().cpu().contiguous() for key, value in values.items()}, stage / name)
        state = state.model_copy(update={"sha256": {name: sha256_file(stage / name) for name in FILES}})
        write_json(stage / "state.json", state)
    return state


def _save_file(tensors: dict[str, Tensor], path: Path) -> None:
    try:
        save_file(tensors, path)
    except SafetensorError as error:
        found = re.search(r"os error (\d+)", str(error))
        number = int(found[1]) if found else errno.EIO
        raise OSError(number, os.strerror(number), str(path)) from None


def publish(run: RunFolder, state: CheckpointState) -> None:
    """Switch the links to the finished epoch `state` and remove what no link names. Doing it twice does no harm."""
    folder = run.path / "checkpoints"
    link_atomically(folder / "last", folder_name(state.epoch))
    link_atomically(folder / "best", folder_name(state.best_epoch))
    (folder / "resume").unlink(missing_ok=True)
    _remove_unnamed(folder)


def _remove_unnamed(folder: Path) -> None:
    kept = {(folder / link).readlink().name for link in LINKS if (folder / link).is_symlink()}
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink() and path.name not in kept:
            shutil.rmtree(path)


def tidy(run: RunFolder) -> None:
    """Remove the files and links that a killed process had not finished writing; nobody else may write into `run` now.

    Folders of checkpoints that no link names go with the next one that is saved.
    """
    for path in (run.metrics_path, *(run.path / "checkpoints" / link for link in LINKS)):
        remove_unfinished(path)


def newest(run: RunFolder) -> tuple[Path, CheckpointState] | None:
    """The checkpoint to resume from; None when nothing was ever saved."""
    links = [link for link in ("last", "resume") if (run.path / "checkpoints" / link).is_symlink()]
    return max((_read_state(run, link) for link in links), key=lambda pair: pair[1].step, default=None)


def load_last(run: RunFolder) -> tuple[Tensors, CheckpointState] | None:
    """The newest checkpoint to resume from, every file verified; None when nothing was ever saved.

    Raises InputError naming the file that is corrupt or missing.
    """
    found = newest(run)
    if found is None:
        return None
    folder, state = found
    verify_digests(folder, state.sha256)
    return Tensors(*(load_file(folder / name) for name in FILES)), state


def _read_state(run: RunFolder, link: str) -> tuple[Path, CheckpointState]:
    checkpoints = run.path / "checkpoints"
    folder = checkpoints / (checkpoints / link).readlink()
    return folder, read_record(folder / "state.json", CheckpointState)


def write_metrics(run: RunFolder, history: list[Metrics]) -> None:
    """Write metrics.jsonl, one line an epoch, whole or not at all."""
    lines = [json.dumps(row, allow_nan=False) + "\n" for row in history]
    write_bytes(run.metrics_path, "".join(lines).encode())


def read_metrics(path: Path, epochs: int) -> list[Metrics]:
    """The metrics of the first `epochs` epochs; raise InputError when the file does not hold exactly one line each.

    Lines of later epochs, which a killed run wrote before its checkpoint became `last`, are left out.
    """
    lines = path.read_text().splitlines() if path.is_file() else []
    try:
        history: list[Metrics] = [row for row in map(json.loads, lines) if row["epoch"] <= epochs]
    except (json.JSONDecodeError, KeyError, TypeError):
        raise InputError(f"{path} holds a line that is not an epoch's metrics: restore it, or train anew") from None
    if [row["epoch"] for row in history] != list(range(1, epochs + 1)):
        raise InputError(f"{path} does not hold the epochs 1 to {epochs} of its checkpoint: restore it, or train anew")
    return history
