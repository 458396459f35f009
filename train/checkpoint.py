"""Checkpoints and metrics of a run folder, written so that a kill at any moment leaves a state to resume from.

The order matters: the checkpoint's folder appears whole, then its line of metrics, then the links `last` and `best`
switch, then folders that no link names are removed. Specification: docs/run-folder.md.
"""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file, save_file
from torch import Tensor

from vitx.core.errors import InputError
from vitx.core.files import link_atomically, sha256_file, staged_folder, write_bytes, write_json
from vitx.core.run import CheckpointState, RunFolder

Metrics = dict[str, Any]
FILES = ("model.safetensors", "ema.safetensors", "optimizer.safetensors")


class Tensors(NamedTuple):
    """The three files of a checkpoint; none of them needs pickle."""

    model: dict[str, Tensor]
    ema: dict[str, Tensor]
    optimizer: dict[str, Tensor]


def folder_name(epoch: int) -> str:
    return f"epoch-{epoch:04d}"


def best_of(history: list[Metrics]) -> Metrics:
    """The epoch of highest top-1; among equals the one of lowest NLL, then the first."""
    return max(history, key=lambda row: (row["top1"], -row["nll"], -row["epoch"]))


def save(run: RunFolder, tensors: Tensors, history: list[Metrics], rng: dict[str, Any]) -> None:
    """Write the checkpoint of the last epoch of `history` and make it `last`, and `best` if it is."""
    latest, best = history[-1], best_of(history)
    folder = run.path / "checkpoints" / folder_name(latest["epoch"])
    with staged_folder(folder) as stage:
        for name, values in zip(FILES, tensors, strict=True):
            save_file({key: value.detach().cpu().contiguous() for key, value in values.items()}, stage / name)
        state = CheckpointState(
            epoch=latest["epoch"],
            step=latest["step"],
            best_metric=best["top1"],
            best_epoch=best["epoch"],
            metrics=latest,
            rng=rng,
            sha256={name: sha256_file(stage / name) for name in FILES},
        )
        write_json(stage / "state.json", state)
    write_metrics(run, history)
    publish(run, state)


def publish(run: RunFolder, state: CheckpointState) -> None:
    """Switch the links to `state` and remove what no link names. Doing it twice does no harm."""
    folder = run.path / "checkpoints"
    kept = {"last": folder_name(state.epoch), "best": folder_name(state.best_epoch)}
    for link, target in kept.items():
        link_atomically(folder / link, target)
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink() and path.name not in kept.values():
            shutil.rmtree(path)


def load_last(run: RunFolder) -> tuple[Tensors, CheckpointState] | None:
    """The checkpoint to resume from, every file verified; None when the first epoch was never finished.

    Raises InputError naming the file that is corrupt or missing.
    """
    if not run.checkpoint_path("last").is_symlink():
        return None
    folder, state = run.checkpoint("last")
    return Tensors(*(load_file(folder / name) for name in FILES)), state


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
