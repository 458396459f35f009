"""`vitx train --lr-find` against losses that are known, and on a small network."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cli_fixture import Vitx
from training_jobs import TINY_SETTINGS
from vitx.core.files import write_json
from vitx.data.flat_folder import FolderSplit
from vitx.data.open import open_splits
from vitx.train import lr_find as module
from vitx.train.lr_find import FIRST_RATE, LAST_RATE, STEPS

CURVE = [(1e-3, 2.0), (1e-2, 1.0)]


def curve_of(
    loss: Callable[[float], float], others: Callable[[float], list[float]] = lambda mine: []
) -> list[tuple[float, float]]:
    """The curve of a trainer whose loss depends on the rate alone, and whose epochs have seven batches."""
    groups = [{"lr": 0.0}, {"lr": 0.0, "lr_scale": 0.5}]

    def step(_epoch: int, _batch: object) -> tuple[dict[str, torch.Tensor], None]:
        assert groups[1]["lr"] == groups[0]["lr"] / 2
        return {"total": torch.tensor(loss(groups[0]["lr"]), dtype=torch.float64)}, None

    trainer: Any = SimpleNamespace(
        model=torch.nn.Identity(),
        optimizer=SimpleNamespace(param_groups=groups),
        batches=lambda epoch: iter(range(7)),
        stepper=step,
        processes=SimpleNamespace(gather=lambda mine: [mine, *others(mine)]),
    )
    return [*module._curve(trainer, quiet=True)]


def test_rates_grow_evenly_and_a_constant_loss_is_not_biased() -> None:
    curve = curve_of(lambda rate: 2.0)
    assert len(curve) == STEPS
    assert [curve[0][0], curve[-1][0]] == pytest.approx([FIRST_RATE, LAST_RATE])
    assert curve[50][0] / curve[49][0] == pytest.approx(curve[1][0] / curve[0][0])
    assert [loss for _, loss in curve] == pytest.approx([2.0] * STEPS)


def test_the_loss_is_that_of_all_processes() -> None:
    assert [loss for _, loss in curve_of(lambda rate: 2.0, lambda mine: [2 * mine])] == pytest.approx([3.0] * STEPS)


def test_a_loss_that_diverges_ends_the_test() -> None:
    curve = curve_of(lambda rate: 1.0 if rate < 1e-3 else 1e6)
    assert curve[-1][0] < 1e-3 * (LAST_RATE / FIRST_RATE) ** (1 / (STEPS - 1))
    assert curve_of(lambda rate: 1.0 if rate < 1e-3 else math.nan)[-1][0] < 1e-3


def test_the_rate_of_a_small_network(vitx: Vitx, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEPS", 12)
    options = (*TINY_SETTINGS, "--set", "workers=0", "--set", "optimizer.lr_base_size=512")
    command = ("train", "digits-deepvit", "--out", tmp_path / "run", "--device", "cpu", *options)
    code, out, said = vitx(*command, "--lr-find", "--json")
    assert code == 0, said
    found = json.loads(out)
    rate, loss = min(found["curve"], key=lambda point: point[1])
    assert found["rate of the lowest loss"] == pytest.approx(rate, rel=0.05)
    assert found["suggested optimizer.lr"] == pytest.approx(rate / 10 * 512 / 128, rel=0.05)
    assert found["lowest loss"] == loss < found["curve"][0][1]
    assert not (tmp_path / "run").exists()
    shown = module.rows(found["curve"])
    assert (shown[0][0], len(shown[0][2])) == ("1.0e-06", module.BAR // 2)
    assert [len(bar) for *_, bar in module.rows([(0.1, 2.0), (0.2, 1.0), (0.3, 9.0)])] == [20, 0, 40]


def test_a_run_that_is_there_does_not_choose_the_images(
    vitx: Vitx, image_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run of one folder keeps its split, which a range test on another folder is not of."""
    images, others = image_folder / "train", tmp_path / "others"
    shutil.copytree(images, others)
    write_json(tmp_path / "run" / "split.json", FolderSplit.of(*open_splits(str(images))))
    names: list[str] = []

    def curve(trainer: Any, *, quiet: bool) -> list[tuple[float, float]]:
        names.append(trainer.train_images.name)
        return CURVE

    monkeypatch.setattr(module, "_curve", curve)
    command = ("train", "digits-deit", "--data", others, "--out", tmp_path / "run", *TINY_SETTINGS, "--device", "cpu")
    code, _, said = vitx(*command, "--lr-find", "--json")
    assert (code, names) == (0, [str(others)]), said


def test_a_loss_that_is_not_finite_from_the_first_step_on(vitx: Vitx, tmp_path: Path) -> None:
    options = (*TINY_SETTINGS, "--set", "workers=0", "--set", "losses.cosine=1e39", "--device", "cpu")
    code, _, said = vitx("train", "digits-deepvit", "--out", tmp_path / "run", *options, "--lr-find", "--quiet")
    message = "the first loss is not finite: look at the losses' weights, the initial weights and the data"
    assert (code, said) == (1, f"error: {message}\n")
