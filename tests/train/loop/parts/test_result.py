"""What a training has come to, in numbers, in words and in pictures."""

from pathlib import Path
from typing import Any

import pytest

from training_jobs import recipe_of
from vitx.core.files import write_json
from vitx.core.page import table
from vitx.core.probabilities import wilson_interval
from vitx.core.run import RunFolder
from vitx.train import report_figures
from vitx.train.loop import result as module
from vitx.train.loop.result import TrainingResult, describe_epoch
from vitx.train.recipes.recipe import RECIPE_FILE

ROW: dict[str, Any] = {"top1": 0.5, "nll": 1.25, "ece": 0.125, "cos_sim": [0.25, 0.5, 0.75], "attention_std": [0.5]}
HISTORY = [
    {**ROW, "epoch": 1, "top1": 0.75, "nll": 2.0, "seconds": 1.26},
    {**ROW, "epoch": 2, "nll": 1.0, "seconds": 2.03},
]


@pytest.fixture
def result(tmp_path: Path) -> TrainingResult:
    write_json(tmp_path / RECIPE_FILE, recipe_of("selection.metric=nll"))
    return TrainingResult(RunFolder(tmp_path), HISTORY, 0, 40)


def test_the_best_epoch_by_its_metric(result: TrainingResult) -> None:
    assert result.summary("top1") == {
        "run": str(result.run.path),
        "epochs": 2,
        "best_epoch": 1,
        "top1": 0.75,
        "nll": 2.0,
        "ece": 0.125,
        "cos_sim": [0.25, 0.5, 0.75],
        "attention_std": [0.5],
        "images": 40,
        "top1_interval": wilson_interval(30, 40),
        "last_top1": 0.5,
        "seconds": 3.3,
    }
    assert result.summary("nll")["best_epoch"] == 2
    assert "0.75" not in repr(result), "a long history is not printed"


def test_the_same_in_words(result: TrainingResult) -> None:
    shown = result.shown("top1")
    assert shown == {
        "top-1 (averaged weights, best epoch)": "75.00%",
        "95 % interval": "59.8% to 85.8%, of 40 images (Wilson)",
        "NLL": "2.0000",
        "ECE": "0.1250",
        "best epoch": "1 of 2",
        "top-1 of the last epoch": "50.00%",
        "CosSim of first and last block": "0.250, 0.750",
        "seconds": 3.3,
    }
    assert result._repr_html_() == table(result.shown("nll").items())
    bare = TrainingResult(result.run, [{**HISTORY[0], "cos_sim": []}], 0, 40)
    assert bare.shown("top1")["CosSim of first and last block"] == "no blocks"


@pytest.mark.parametrize("name", ["curves", "layers"])
def test_pictures_show_the_best_epoch_by_the_runs_metric(
    result: TrainingResult, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(report_figures, f"draw_{name}", lambda *given: given)
    monkeypatch.setattr(module, "png", lambda figure, *, pixel_ratio: (figure, pixel_ratio))
    assert getattr(result, name)() == ((HISTORY, 2), 1)


def test_the_line_of_an_epoch() -> None:
    row = {**HISTORY[0], "losses": {"classification": 1.5, "total": 2.25}, "lr": 0.001234}
    assert describe_epoch(row, 12) == (
        "epoch 1/12: top-1 75.00% NLL 2.0000 (classification 1.500 total 2.250) lr 0.0012 1.3 s"
    )
