"""Metrics as TensorBoard's events and at Weights & Biases, for which a stand-in is put."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from vitx.core.errors import EnvironmentMissing
from vitx.train.loop.metric_writers import require_wandb, scalars, tensorboard_writer, wandb_writer

ROW: dict[str, Any] = {"epoch": 3, "step": 12, "top1": 0.5, "losses": {"total": 2.0}, "cos_sim": [0.25, 0.75]}
NUMBERS = {"top1": 0.5, "losses/total": 2.0, "cos_sim/layer-01": 0.25, "cos_sim/layer-02": 0.75}


class Refused(Exception):
    pass


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the stand-in was asked for, in order."""
    calls: list[Any] = []
    run = SimpleNamespace(
        id="r1",
        log=lambda *given, **named: calls.append(("log", *given, named)),
        finish=lambda **named: calls.append(("finish", named)),
    )

    def init(**named: Any) -> Any:
        calls.append(("init", named))
        return run

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Error=Refused, init=init))
    return calls


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    found = EventAccumulator(str(folder)).Reload()
    return {name: [(e.step, e.value) for e in found.Scalars(name)] for name in found.Tags()["scalars"]}


def test_metrics_of_an_epoch_as_single_numbers() -> None:
    assert dict(scalars(ROW)) == NUMBERS


def test_events_are_there_at_once_and_those_of_epochs_trained_again_are_hidden(tmp_path: Path) -> None:
    with tensorboard_writer(tmp_path, 1) as write:
        for epoch in (2, 3, 4):
            write({**ROW, "epoch": epoch})
        assert events(tmp_path) == {name: [(2, value), (3, value), (4, value)] for name, value in NUMBERS.items()}
    with tensorboard_writer(tmp_path, 3) as write:
        write({**ROW, "top1": 0.75})
    assert events(tmp_path)["top1"] == [(2, 0.5), (3, 0.75)]


def test_a_run_goes_on_as_the_same_run_there(asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    run = Path()
    for _ in range(2):
        with wandb_writer("project", run, {"seed": 1}) as write:
            write(ROW)
    begun = {"project": "project", "name": "mine", "dir": run, "config": {"seed": 1}}
    rest = [("log", NUMBERS, {"step": 3}), ("finish", {"exit_code": 0})]
    first, again = {**begun, "id": None, "resume": None}, {**begun, "id": "r1", "resume": "allow"}
    assert asked == [("init", first), *rest, ("init", again), *rest]


def test_a_training_that_fails_is_no_success_there(asked: list[Any], tmp_path: Path) -> None:
    with pytest.raises(KeyError), wandb_writer("project", tmp_path, {}):
        raise KeyError("in the training")
    assert asked[1:] == [("finish", {"exit_code": 1})]


def test_a_refusal_is_one_error(asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> None:
        raise Refused("no key")

    monkeypatch.setattr(sys.modules["wandb"], "init", refuse)
    with pytest.raises(EnvironmentMissing) as refused, wandb_writer("project", tmp_path, {}):
        pass
    assert str(refused.value) == "Weights & Biases: no key; WANDB_MODE=offline needs no key and no network"


def test_a_folder_of_the_packages_name_is_not_the_package(
    asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_wandb("project")
    monkeypatch.delitem(sys.modules, "wandb")
    (tmp_path / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(EnvironmentMissing, match=r"needs the package 'wandb'.*pip install 'vitx\[train,wandb\]'"):
        require_wandb("project")
    require_wandb(None)
