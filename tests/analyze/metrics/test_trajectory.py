"""Polar coordinates of a training, of weights made by hand and of a run folder."""

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from reference import seq
from run_fixture import ColourMean, digits_source, write_run
from vitx.analyze.metric import AnalysisOptions, MetricContext, NotApplicable
from vitx.analyze.metrics.trajectory import measure_trajectory, polar_trajectory, run_trajectory
from vitx.core.errors import InputError
from vitx.core.files import sha256_file, write_json
from vitx.core.run import RunFolder
from vitx.data.open import open_images


def state(*values: float, steps: int = 0) -> dict[str, Tensor]:
    a, b = torch.tensor(values[:1]).float(), torch.tensor(values[1:]).float()
    return {"a": a, "b": b, "num_batches_tracked": torch.tensor(steps)}


def test_by_hand() -> None:
    found = polar_trajectory([state(1, 1), state(1, 3, steps=9), state(5, 1), state(5, 5)])
    assert found.steps == [0, 1, 2, 3]
    assert found.radius == pytest.approx([0, 2 / math.sqrt(32), 4 / math.sqrt(32), 1])
    assert found.angle == [None, pytest.approx(math.pi / 4), pytest.approx(math.pi / 4), pytest.approx(0)]


def test_small_angles_and_opposite_ones() -> None:
    """arccos in float64 cannot tell 1e-9 from 0."""
    double = [{"w": value} for value in (seq(0, 2) * 0, torch.tensor([1.0, 1e-9], dtype=torch.float64))]
    found = polar_trajectory([*double, {"w": torch.tensor([1.0, 0.0], dtype=torch.float64)}])
    assert found.angle[1] == pytest.approx(1e-9, rel=1e-6)
    found = polar_trajectory([state(0, 0), state(-1, -1), state(1, 1)])
    assert found.angle[1] == pytest.approx(math.pi)
    assert found.radius[1] == pytest.approx(1)


def test_against_flat_vectors() -> None:
    states = [{"a": seq(k, 3, 2), "b": seq(2 * k, 4)} for k in range(5)]
    found = polar_trajectory(states, steps=[0, 10, 20, 30, 40])
    flat = [torch.cat([part.flatten() for part in each.values()]) for each in states]
    for t in range(1, 5):
        here, there = flat[t] - flat[0], flat[4] - flat[0]
        assert found.radius[t] == pytest.approx(float(here.norm() / there.norm()))
        cosine = float(here @ there / here.norm() / there.norm())
        assert found.angle[t] == pytest.approx(math.acos(min(cosine, 1.0)), abs=1e-7)
    assert polar_trajectory(states, names=["b"]) == polar_trajectory([{"b": each["b"]} for each in states])


def run_with(folder: Path, changes: dict[int, float]) -> RunFolder:
    """A run whose checkpoint of each epoch has its first bias moved by so much, and a statistic by its epoch."""
    run = write_run(folder / "run", "digits")
    source, record = run.checkpoint("last")
    tensors = load_file(source / "model.safetensors")
    for epoch, change in changes.items():
        target = run.path / "checkpoints" / f"epoch-{epoch:04d}"
        target.mkdir(exist_ok=True)
        moved = {**tensors, "head.bias": tensors["head.bias"].index_add(0, torch.tensor([0]), torch.tensor([change]))}
        moved["running_mean"] = torch.tensor([float(epoch)])
        for name in ("model.safetensors", "ema.safetensors"):
            save_file(moved, target / name)
        digests = {name: sha256_file(target / name) for name in ("model.safetensors", "ema.safetensors")}
        write_json(
            target / "state.json", record.model_copy(update={"epoch": epoch, "step": 10 * epoch, "sha256": digests})
        )
    return run


def test_of_a_run(tmp_path: Path) -> None:
    found = run_trajectory(run_with(tmp_path, {1: -1.0, 4: 0.0, 12: 3.0}))
    assert found.steps == [10, 40, 120]
    assert found.radius == pytest.approx([0, 0.25, 1])
    assert found.angle == [None, pytest.approx(0, abs=1e-6), pytest.approx(0, abs=1e-6)]


def test_the_metric_is_of_runs_with_two_checkpoints_or_more(tmp_path: Path) -> None:
    run = run_with(tmp_path, {1: -1.0, 4: 0.0, 12: 3.0})
    source = replace(digits_source(str(run.path), ColourMean(4)), recipe="tests")
    context = MetricContext(source, open_images("digits", "val").first(1), AnalysisOptions())
    assert measure_trajectory(context) == run_trajectory(run)
    with pytest.raises(NotApplicable, match=r"^a network without a training run has no trajectory$"):
        measure_trajectory(context._replace(source=replace(source, recipe=None)))
    for epoch in (4, 12):
        shutil.rmtree(run.path / "checkpoints" / f"epoch-{epoch:04d}")
    with pytest.raises(NotApplicable, match=r"holds 1 checkpoint: a trajectory needs the weights it began with, or an"):
        measure_trajectory(context)


def test_of_a_run_in_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last checkpoint is replaced by another while the first is read."""
    run = run_with(tmp_path, {1: 0.0, 12: 3.0, 13: 4.0})
    checkpoints = run.path / "checkpoints"
    (checkpoints / "epoch-0013").rename(tmp_path / "next")

    def read(path: Path) -> Any:
        if (tmp_path / "next").is_dir():
            (tmp_path / "next").rename(checkpoints / "epoch-0013")
            (checkpoints / "epoch-0012").rename(checkpoints / ".epoch-0012.old")
        return load_file(path)

    monkeypatch.setattr("vitx.analyze.metrics.trajectory.load_file", read)
    assert run_trajectory(run).steps == [10, 130]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_checkpoint_of_a_training_that_diverged_has_no_place(value: float) -> None:
    """Its radius would be no number, which no JSON holds."""
    places = [state(1, 1, 1), state(2, 1, 1), state(3, 1, 1)]
    for index in range(3):
        states = [*places[:index], state(1, value, 1), *places[index + 1 :]]  # the other one of b is finite
        with pytest.raises(InputError, match=f"^the checkpoint of step {10 * index} has no place: 'b' holds NaN or"):
            polar_trajectory(states, steps=[0, 10, 20])
    assert polar_trajectory([{**each, "c": seq(0, 1) * value} for each in places], names="ab").radius[1] == 0.5


def test_bad_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="1 checkpoint of a training: a trajectory needs the first and the last"):
        polar_trajectory([state(1, 1)])
    with pytest.raises(
        InputError,
        match=r"^the first and the last checkpoint hold the same weights: there is no direction to compare with$",
    ):
        polar_trajectory([state(1, 1), state(2, 1), state(1, 1)])
    for index in range(1, 3):
        states = [state(1, 1), state(2, 1), state(3, 1)]
        states[index] = {"a": states[index]["a"]}
        with pytest.raises(InputError, match="different networks: 'b' is not in all of them in the same shape"):
            polar_trajectory(states)
    with pytest.raises(InputError, match="different networks: 'b' is not in all of them in the same shape"):
        polar_trajectory([state(1, 1), state(2, 1, 3)])
    with pytest.raises(InputError, match="different networks: 'c' is not in all of them in the same shape"):
        polar_trajectory([state(1, 1), {**state(2, 1), "c": seq(0, 2)}, state(3, 1)])
    run = run_with(tmp_path, {1: 0.0})
    with pytest.raises(InputError, match="holds 1 checkpoint: a trajectory needs the weights it began with"):
        run_trajectory(run)
    (run.path / "checkpoints" / "epoch-0001" / "ema.safetensors").write_bytes(b"broken")
    with pytest.raises(InputError, match="is corrupt"):
        run_trajectory(run)
