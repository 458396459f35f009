"""What a dry run says, with a stand-in for the trainer and its clock."""

import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from training_jobs import recipe_of
from vitx.core.errors import CheckFailed, InputError
from vitx.core.run import RunFolder
from vitx.train.loop import dry_run as module
from vitx.train.loop.dry_run import dry_run

CPU = torch.device("cpu")


class Images(SimpleNamespace):
    def __len__(self) -> int:
        return int(self.count)


def stand_in(monkeypatch: pytest.MonkeyPatch, *, batches: int = 9, not_finite: int | None = None) -> list[Any]:
    """Steps take 8, 4, 1, 3, 2.5, 2.5 … seconds; returns what was asked, in order."""
    asked: list[Any] = []
    now, seconds = [0.0], iter([8.0, 4.0, 1.0, 3.0, 2.5, 2.5, 50.0, 50.0, 50.0])

    class Stand:
        def __init__(self, recipe: Any, run: RunFolder, device: torch.device, processes: Any, **named: Any) -> None:
            asked.append(("trainer", run.path, device, named))
            self.recipe, self.device, self.processes = recipe, device, processes
            self.data = SimpleNamespace(steps=10, batch_size=5)
            self.train_images = Images(count=53, name="photos", class_names=("a", "b"))
            self.val_images = Images(count=15)
            self.model = nn.Linear(20_000, 2, bias=False)
            self.log = SimpleNamespace(first_not_finite=lambda found: not_finite if found is processes else "others")

        def batches(self, epoch: int) -> Iterator[int]:
            asked.append(("batches of epoch", epoch))
            yield from range(batches)

        def step(self, epoch: int, batch: int) -> None:
            asked.append((epoch, batch))
            now[0] += next(seconds)

    monkeypatch.setattr(module, "Trainer", Stand)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(resource, "getrusage", lambda who: SimpleNamespace(ru_maxrss=3 * 2**19 + 2**12))
    return asked


def test_data_shapes_steps_and_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = stand_in(monkeypatch)
    recipe = recipe_of("epochs=3", "losses.attention_pairs=1")
    assert dry_run(recipe, tmp_path / "run", skip_bad=True, device="cpu") == {
        "data": "photos",
        "classes": "a, b",
        "images to train on": 53,
        "images to evaluate on": 15,
        "network": f"{recipe.model.name}, 0.04 M parameters",
        "begins from": "random weights",
        "a batch": "5 × 3 × 32 × 32",
        "steps": "10 an epoch, 30 in 3 epochs",
        "learning rate": recipe.optimizer.rate(5),
        "without effect": "losses.attention_pairs=1, as losses.attention=0.0",
        "memory (GiB)": 1.5,
        "seconds a step": 2.5,
        # Ten steps of 2.5 s, and twice three batches at a third of a step.
        "minutes in all, about": round(3 * (25 + 5) / 60, 1),
    }
    named = {"skip_bad": True, "quiet": True, "initial_weights": True}
    steps = [(1, batch) for batch in range(6)]
    assert asked == [("trainer", tmp_path / "run", CPU, named), ("batches of epoch", 1), *steps]


@pytest.mark.parametrize(("batches", "seconds"), [(1, 8.0), (2, 4.0)])
def test_of_too_few_steps_the_last_is_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, batches: int, seconds: float
) -> None:
    stand_in(monkeypatch, batches=batches)
    found = dry_run(recipe_of("model.initial_checkpoint=a.pth"), tmp_path, device="cpu")
    assert (found["seconds a step"], found["begins from"]) == (seconds, "a.pth")
    assert "without effect" not in found


def test_a_run_that_is_there_begins_from_its_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = stand_in(monkeypatch)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="exists: pass --resume"):
        dry_run(recipe_of(), tmp_path, device="cpu")
    checked = []
    monkeypatch.setattr(module, "check_run_folder", lambda run, recipe, *, resume: checked.append((run.path, resume)))
    saved = tmp_path / "checkpoints" / "epoch-0004"
    monkeypatch.setattr(module, "newest_checkpoint", lambda run: (saved, "state") if run.path == tmp_path else None)
    found = dry_run(recipe_of("model.initial_checkpoint=a.pth"), tmp_path, resume=True, device="cpu")
    assert found["begins from"] == str(saved)
    assert checked == [(tmp_path, True)]
    assert asked[0][3] == {"skip_bad": False, "quiet": True, "initial_weights": False}


def test_a_loss_that_is_not_finite_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stand_in(monkeypatch, not_finite=0)
    with pytest.raises(CheckFailed) as failed:
        dry_run(recipe_of("optimizer.lr=0.5"), tmp_path, device="cpu")
    assert str(failed.value) == (
        "the loss or its gradient is not finite at step 1: look at optimizer.lr (0.5), the losses' weights and the "
        "other settings"
    )


def test_a_gpu_is_waited_for_and_its_memory_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    waited: list[Any] = []
    stand_in(monkeypatch)
    made: Any = vars(module)["Trainer"]
    trainer = made(recipe_of(), RunFolder(tmp_path), torch.device("cuda"), None)
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 5 * 2**29)
    assert module._seconds_of_a_step(trainer) == 2.5
    assert waited == [torch.device("cuda")] * 6
    assert module._memory(torch.device("cuda")) == {"memory (GiB)": 2.5}


@pytest.mark.parametrize(
    ("system", "memory"),
    [("linux", {"memory (GiB)": 1.5}), ("darwin", {"memory (GiB)": 0.0}), ("win32", {})],
)
def test_each_system_tells_memory_in_its_own_way(
    monkeypatch: pytest.MonkeyPatch, system: str, memory: dict[str, float]
) -> None:
    """macOS counts bytes, and on Windows there is no module `resource`."""
    stand_in(monkeypatch)
    monkeypatch.setattr(module, "sys", SimpleNamespace(platform=system))
    if system == "win32":
        monkeypatch.setitem(sys.modules, "resource", None)
    assert module._memory(CPU) == memory
