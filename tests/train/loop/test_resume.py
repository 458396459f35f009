"""A run that is killed, however often, ends in the same bits as one that was left alone."""

import itertools
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from cli_fixture import Vitx
from epoch_row import epoch_row
from server_process import HANG
from training_jobs import (
    TINY,
    TINY_SETTINGS,
    VitxProcess,
    context,
    metrics_of,
    recipe_of,
    stop_in_a_group,
    train_in_a_group,
)
from vitx.core.errors import InputError
from vitx.core.run import RunFolder
from vitx.train import train
from vitx.train.loop import trainer
from vitx.train.loop.checkpoint import (
    TENSOR_FILES,
    CheckpointTensors,
    best_row,
    load_newest,
    read_metrics,
    save_epoch,
    switch_links,
)
from vitx.train.loop.evaluation import Evaluation, evaluate
from vitx.train.loop.interruption import TrainingStopped


def epochs_done(run: Path) -> int:
    last = run / "checkpoints" / "last"
    return int(last.readlink().name.removeprefix("epoch-")) if last.is_symlink() else 0


def newest_step(run: Path) -> int:
    """The step of the newest checkpoint, 0 before the first."""
    steps = [0]
    for link in ("last", "resume"):
        with suppress(OSError):  # between two looks the links move and old folders go
            state = run / "checkpoints" / link / "state.json"
            steps.append(json.loads(state.read_text())["step"])
    return max(steps)


def names_in(run: Path) -> set[str]:
    """The relative paths of all files but TensorBoard's, of which every process writes a new one."""
    paths = (path.relative_to(run) for path in run.rglob("*"))
    return {str(path) for path in paths if "tensorboard" not in path.parts[:-1]}


@pytest.mark.parametrize(("kills", "deterministic"), [(12, "false"), (2, "true")])
def test_kills_at_random_moments_end_in_the_same_bits(
    tmp_path: Path, image_folder: Path, kills: int, deterministic: str
) -> None:
    """Workers, bfloat16 autocast, averaged weights, dropout, CutMix, checkpoints every other step."""
    recipe = recipe_of(
        *TINY,
        f"epochs={kills // 2 + 1}",
        "batch_size=4",
        "checkpoint_steps=2",
        f"execution.deterministic={deterministic}",
        "execution.precision=bfloat16",
        "model.kwargs.drop_path_rate=0.2",
        "model.kwargs.proj_drop_rate=0.1",
    ).on_data(str(image_folder))
    alone = context().Process(target=train_in_a_group, args=(recipe, tmp_path / "alone", False))
    alone.start()
    moments, run, gate = random.Random(3), tmp_path / "killed", tmp_path / "gate"
    gate.touch()
    for kill in range(kills):
        process = context().Process(target=train_in_a_group, args=(recipe, run, run.is_dir(), gate))
        process.start()
        deadline = time.monotonic() + HANG
        while not run.is_dir() or newest_step(run) < 2 * kill:
            assert process.is_alive(), "the run ended before it was killed"
            assert time.monotonic() < deadline, f"step {2 * kill} was not reached"
            time.sleep(0.005)
        time.sleep(moments.uniform(0, 0.1))
        assert process.pid is not None
        while os.getpgid(process.pid) != process.pid:  # it goes into a group of its own first
            assert process.is_alive(), "the run ended before it was killed"
            time.sleep(0.005)
        os.killpg(process.pid, signal.SIGKILL)  # the workers too: none is left behind
        process.join()
        assert process.exitcode == -signal.SIGKILL, "the run ended before it was killed"
    final = context().Process(target=train_in_a_group, args=(recipe, run, True))
    final.start()
    for process in (alone, final):
        process.join(HANG)
        assert process.exitcode == 0
    for name in TENSOR_FILES:
        expected, found = (tmp_path / each / "checkpoints" / "last" / name for each in ("alone", "killed"))
        assert expected.read_bytes() == found.read_bytes(), f"{name} differs"
    assert metrics_of(tmp_path / "alone") == metrics_of(run)
    assert names_in(run) == names_in(tmp_path / "alone")
    # A kill may come between a checkpoint and its events, or after events of an epoch that is trained again.
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("top1")] == [row["epoch"] for row in metrics_of(run)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_workers_too_stops_in_order(tmp_path: Path, image_folder: Path, number: signal.Signals) -> None:
    """torchrun and schedulers send SIGTERM to the whole group, and a closed terminal SIGHUP."""
    settings = (*TINY, "epochs=500", "batch_size=4", "checkpoint_steps=1", "workers=2")
    run = tmp_path / "run"
    process = context().Process(target=stop_in_a_group, args=(recipe_of(*settings).on_data(str(image_folder)), run))
    process.start()
    deadline = time.monotonic() + HANG
    while not run.is_dir() or newest_step(run) < 6:
        assert process.is_alive(), "the run ended before it was stopped"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert process.pid is not None
    os.killpg(process.pid, number)
    process.join(HANG)
    assert process.exitcode == number


@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_a_signal_during_an_evaluation_loses_no_step_of_its_epoch(
    tmp_path: Path, image_folder: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """It takes minutes on many photographs, and what stops a process waits for seconds. Twice an epoch, two epochs."""
    recipe = recipe_of(*TINY, "epochs=2", "batch_size=4", "workers=0").on_data(str(image_folder))
    train(recipe, tmp_path / "alone", device="cpu", quiet=True)
    calls = itertools.count(1)

    def signalled(*given: Any, **named: Any) -> Evaluation:
        if next(calls) == call:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate(*given, **named)

    monkeypatch.setattr(trainer, "evaluate", signalled)
    with pytest.raises(TrainingStopped, match="SIGTERM"):
        train(recipe, tmp_path / "stopped", device="cpu", quiet=True)
    assert newest_step(tmp_path / "stopped") == 18 // 4 * (1 if call < 3 else 2), "all steps of the epoch are saved"
    monkeypatch.undo()
    train(recipe, tmp_path / "stopped", resume=True, device="cpu", quiet=True)
    for name in TENSOR_FILES:
        one, other = (tmp_path / run / "checkpoints" / "last" / name for run in ("alone", "stopped"))
        assert one.read_bytes() == other.read_bytes(), f"{name} differs"
    assert metrics_of(tmp_path / "alone") == metrics_of(tmp_path / "stopped")


def test_an_interrupt_says_how_to_resume(start_vitx: Callable[..., VitxProcess], tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    run = ("train", "digits-deepvit", "--set", "epochs=1", *TINY_SETTINGS, "--out", "run")
    process = start_vitx(*run, held=(1, 5))
    while not (tmp_path / "run").is_dir():
        process.require_running()
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    gate.unlink()
    code, err = process.wait()
    assert code == 130, err
    assert "resume with `vitx train digits-deepvit --out run --resume`" in err
    assert "Traceback" not in err


def test_resume_begins_where_nothing_was_written_yet(vitx: Vitx, tmp_path: Path, image_folder: Path) -> None:
    settings = ("--data", image_folder, "--set", "epochs=1", *TINY_SETTINGS, "--set", "batch_size=8")
    for _ in range(2):
        code, _, err = vitx("train", "digits-deepvit", *settings, "--out", tmp_path / "run", "--resume", "-q")
        assert code == 0, err
        shutil.rmtree(tmp_path / "run" / "checkpoints")  # as if killed in the first epoch
    code, _, _ = vitx("train", "digits-deepvit", "--out", tmp_path / "run", "--resume", "-q")
    assert code == 0
    assert epochs_done(tmp_path / "run") == 1


def test_what_killed_writers_left_is_removed(vitx: Vitx, tmp_path: Path, image_folder: Path) -> None:
    settings = ("--data", image_folder, *TINY_SETTINGS, "--set", "batch_size=8")
    run = ("train", "digits-deepvit", *settings, "--out", tmp_path / "run", "-q", "--set")
    code, _, err = vitx(*run, "epochs=1")
    assert code == 0, err
    before = names_in(tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    (tmp_path / "run" / ".metrics.jsonl.x1").touch()
    (checkpoints / ".last.123").symlink_to("epoch-0002")
    (checkpoints / ".epoch-0002.x1").mkdir()
    kept = tmp_path / "run" / ".notes"
    kept.touch()
    code, _, err = vitx(*run, "epochs=1", "--resume")
    assert code == 0, err
    assert names_in(tmp_path / "run") == before | {kept.name}


def row(epoch: int, top1: float, nll: float = 1.0) -> dict[str, Any]:
    return epoch_row(epoch, top1=top1, nll=nll)


def tensors(value: float) -> CheckpointTensors:
    return CheckpointTensors(*({"weight": torch.full((2, 3), value)} for _ in TENSOR_FILES))


def test_a_checkpoint_that_never_became_last_leaves_no_trace(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    history = [row(1, 0.5)]
    save_epoch(run, tensors(1), history, {})
    history.append(row(2, 0.4))
    save_epoch(run, tensors(2), history, {})
    folder = tmp_path / "checkpoints"
    assert {path.name for path in folder.iterdir()} == {"best", "last", "epoch-0001", "epoch-0002"}
    # Killed after the third epoch's folder and metrics, before the link; and once in the middle of writing a folder.
    shutil.copytree(folder / "epoch-0002", folder / "epoch-0003")
    (folder / ".epoch-0003.x1").mkdir()
    with run.metrics_path.open("a") as file:
        file.write(json.dumps(row(3, 0.9)) + "\n")
    loaded = load_newest(run)
    assert loaded is not None
    found, state = loaded
    assert state.epoch == 2
    assert found.model["weight"][0, 0] == 2
    assert read_metrics(run.metrics_path, state.epoch) == history
    switch_links(run, state)
    assert {path.name for path in folder.iterdir()} == {"best", "last", "epoch-0001", "epoch-0002"}
    assert (folder / "best").readlink() == Path("epoch-0001")


def test_a_kill_between_the_links_is_mended(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    history = [row(1, 0.5)]
    save_epoch(run, tensors(1), history, {})
    save_epoch(run, tensors(2), [*history, row(2, 0.8)], {})
    best = tmp_path / "checkpoints" / "best"
    best.unlink()
    best.symlink_to("epoch-0001")
    loaded = load_newest(run)
    assert loaded is not None
    switch_links(run, loaded[1])
    assert best.readlink() == Path("epoch-0002")


def test_the_best_epoch_is_of_highest_top1_then_lowest_nll_then_first() -> None:
    history = [row(1, 0.9, 0.5), row(2, 0.95, 0.6), row(3, 0.95, 0.4), row(4, 0.95, 0.4), row(5, 0.9, 0.1)]
    assert best_row(history)["epoch"] == 3


@pytest.mark.parametrize("text", ["not json\n", '{"epoch": 1}\n{"epoch": 1}\n', "[]\n", ""])
def test_damaged_metrics_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=r"metrics\.jsonl (holds a line|does not hold)"):
        read_metrics(path, 1)
