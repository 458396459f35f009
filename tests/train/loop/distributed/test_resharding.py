"""A checkpoint is whole, whatever number of processes wrote it: any other number resumes from the same bits."""

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import vitx.train.loop.trainer
from server_process import free_port
from training_jobs import (
    TINY,
    die_at,
    exit_codes,
    metrics_of,
    recipe_of,
    refused_among_others,
    restored_state,
    start_all,
    train_one,
    train_one_of,
)
from vitx.core.errors import InputError
from vitx.train.loop.checkpoint import TENSOR_FILES
from vitx.train.loop.evaluation import EvaluationStopped
from vitx.train.loop.interruption import TrainingStopped
from vitx.train.loop.step import mean_losses, resumed_sums
from vitx.train.recipes.recipe import Recipe

# Matrices of 10 and 16 rows and norms of 2 values: over 3 and 4 processes parts are unequal, and some are empty.
SMALL = (*TINY, "epochs=2", "batch_size=24", "checkpoint_steps=2", "workers=0")  # five steps an epoch
FSDP, DDP = "execution.parallel=fsdp", "execution.parallel=ddp"


@pytest.fixture(scope="module")
def small(larger_folder: Path) -> Callable[..., Recipe]:
    """The recipe with more overrides."""
    return lambda *overrides: recipe_of(*SMALL, *overrides).on_data(str(larger_folder))


def checkpoint_of(run: Path) -> dict[str, torch.Tensor]:
    """All tensors of the newest checkpoint, by file and name."""
    folder = run / "checkpoints"
    folder = folder / ("resume" if (folder / "resume").is_symlink() else "last")
    return {f"{name}: {key}": value for name in TENSOR_FILES for key, value in load_file(folder / name).items()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, small: Callable[..., Recipe]) -> Path:
    """A run of one process that nothing stopped."""
    run = tmp_path_factory.mktemp("alone") / "run"
    train_one(small(), run, {})
    return run


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, small: Callable[..., Recipe]) -> dict[str, Path]:
    """Runs of one process and of two, whose last process was killed after a checkpoint within the second epoch."""
    folder = tmp_path_factory.mktemp("killed")
    for name, count, parallel in (("one", 1, DDP), ("two", 2, FSDP)):
        codes = exit_codes(die_at, count, count, free_port(), small(parallel), folder / name, (2, 3))
        assert codes == [3] * (count - 1) + [-9]
        state = json.loads((folder / name / "checkpoints" / "resume" / "state.json").read_text())
        assert (state["epoch"], state["trainer"]["batches"], len(state["trainer"]["losses"])) == (1, 2, count)
    return {"one": folder / "one", "two": folder / "two"}


@pytest.mark.parametrize(
    ("begun", "count", "parallel"),
    [("two", 1, DDP), ("two", 4, FSDP), ("one", 2, FSDP), ("one", 3, DDP)],
)
def test_another_number_of_processes_begins_from_the_same_bits(
    tmp_path: Path, small: Callable[..., Recipe], killed: dict[str, Path], begun: str, count: int, parallel: str
) -> None:
    out = tmp_path / "state"
    start_all(restored_state, count, count, free_port(), small(parallel), killed[begun], out)
    expected, found = checkpoint_of(killed[begun]), load_file(out)
    assert any("exp_avg_sq/" in name for name in expected)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name


@pytest.mark.parametrize(("begun", "count", "parallel"), [("two", 3, FSDP), ("one", 2, FSDP), ("two", 1, FSDP)])
def test_another_number_of_processes_ends_where_one_does(
    tmp_path: Path,
    small: Callable[..., Recipe],
    alone: Path,
    killed: dict[str, Path],
    begun: str,
    count: int,
    parallel: str,
) -> None:
    """Order, augmentation and CutMix do not depend on the number; neither do the losses, but for rounding."""
    run = tmp_path / "run"
    shutil.copytree(killed[begun], run, symlinks=True)
    start_all(train_one_of, count, count, free_port(), small(parallel), run, True)
    expected, found = metrics_of(alone), metrics_of(run)
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    for before, after in zip(expected, found, strict=True):
        assert after["losses"] == pytest.approx(before["losses"], rel=1e-4)
        assert after["nll"] == pytest.approx(before["nll"], rel=1e-4)


def test_fsdp_goes_on_from_an_evaluation_that_was_stopped(
    tmp_path: Path, small: Callable[..., Recipe], alone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first forward pass is of the network, without the losses around it."""

    def stopped(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGTERM)
        raise EvaluationStopped

    monkeypatch.setattr(vitx.train.loop.trainer, "evaluate", stopped)
    with pytest.raises(TrainingStopped):
        train_one(small(), tmp_path / "run", {})
    start_all(train_one_of, 2, 2, free_port(), small(FSDP), tmp_path / "run", True)
    expected, found = (metrics_of(run)[-1]["losses"] for run in (alone, tmp_path / "run"))
    assert found == pytest.approx(expected, rel=1e-4)


def test_sums_of_an_epoch_keep_their_mean() -> None:
    sums = [{"total": 3.0}, {"total": 5.0}]
    assert [resumed_sums(rank, 2, sums) for rank in range(2)] == sums
    for count in (1, 3, 4):
        assert mean_losses([resumed_sums(rank, count, sums) for rank in range(count)], 2) == mean_losses(sums, 2)


def test_processes_that_disagree_about_the_run_are_refused(
    tmp_path: Path, small: Callable[..., Recipe], image_folder: Path, alone: Path
) -> None:
    """Another recipe, a run folder that only one of them sees, other images at the same path."""
    recipe, new, here = small(), tmp_path / "new", tmp_path / "here"
    shutil.copytree(image_folder, here / "images")
    (here / "images" / "train" / "class-0" / "0.png").unlink()
    relative = recipe.model_copy(update={"data": "images", "batch_size": 12})
    for recipes, outs, text in (
        ([recipe, small("seed=1")], [new, new], "started with different recipes"),
        ([recipe, recipe], [alone, new], "--out must be on storage that all nodes share"),
        ([relative, relative], [new, new], "the processes see other images than each other"),
    ):
        places = [image_folder.parent, here]
        start_all(refused_among_others, 2, 2, free_port(), recipes, outs, places, text)
    assert not new.exists()


def test_only_settings_of_how_a_run_is_computed_may_change(
    small: Callable[..., Recipe], killed: dict[str, Path]
) -> None:
    with pytest.raises(InputError, match=r"execution\.parallel=fsdp .* start them with torchrun, or go on in one with"):
        train_one(small(FSDP), killed["two"], {}, resume=True)
    with pytest.raises(InputError, match=r"cannot resume .*: batch_size is 24 in the run but 12 was asked for"):
        train_one(small(DDP, "batch_size=12"), killed["two"], {}, resume=True)
