"""What may change when a run goes on, and which folders it may go on in."""

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cli_fixture import Vitx
from training_jobs import recipe_of
from vitx.core.errors import InputError
from vitx.core.files import write_json
from vitx.core.run import RunFolder
from vitx.data.image_set import ImageSet, evenly_spaced
from vitx.train.loop.distributed.processes import ALONE, Processes
from vitx.train.loop.environment import RunEnvironment
from vitx.train.loop.interruption import TrainingStopped
from vitx.train.loop.resuming import changed_settings, check_processes_agree, check_run_folder


def test_a_folder_that_is_not_there_or_empty_may_begin_a_run(tmp_path: Path) -> None:
    for folder in (tmp_path / "new", tmp_path):
        for resume in (False, True):
            check_run_folder(RunFolder(folder), recipe_of(), resume=resume)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("as_file", [False, True])
def test_what_is_there_is_not_written_over(tmp_path: Path, as_file: bool) -> None:
    place = tmp_path / "run"
    if as_file:
        place.write_text("mine")
    else:
        place.mkdir()
        (place / "notes").write_text("mine")
    with pytest.raises(InputError, match=r"run' exists: pass --resume to go on with it, or another --out$"):
        check_run_folder(RunFolder(place), recipe_of(), resume=False)
    with pytest.raises(InputError, match=r"no run at|it has no run\.json"):
        check_run_folder(RunFolder(place), recipe_of(), resume=True)


def begun(folder: Path, *overrides: str) -> RunFolder:
    """A run folder with what is read of it before training: its description and its recipe."""
    run = RunFolder(folder)
    write_json(folder / "recipe.json", recipe_of(*overrides))
    (folder / "run.json").write_text("{}")
    return run


def test_only_settings_of_how_it_is_computed_may_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = begun(tmp_path)
    opened: list[Path] = []
    monkeypatch.setattr(RunFolder, "open", lambda path: opened.append(path))
    changed = recipe_of("workers=7", "execution.deterministic=true", "execution.grad_checkpointing=true")
    check_run_folder(run, changed, resume=True)
    assert opened == [tmp_path], "the folder's own files are checked first"
    with pytest.raises(InputError) as error:
        check_run_folder(run, recipe_of("optimizer.lr=0.125"), resume=True)
    text = str(error.value)
    assert text.startswith(f"cannot resume '{tmp_path}': ")
    assert "optimizer.lr" in text
    assert "0.125" in text
    assert text.endswith("; leave it as it is, or pass another --out")


@pytest.mark.parametrize("resume", [False, True])
def test_a_command_to_resume_has_what_was_changed(
    vitx: Vitx, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: bool
) -> None:
    """A run under FSDP that one process has gone on with would be refused without the change."""

    def stopped(*_: object, **__: object) -> None:
        raise TrainingStopped(signal.SIGTERM)

    monkeypatch.setattr("vitx.train.train", stopped)
    write_json(tmp_path / "recipe.json", recipe_of("execution.parallel=fsdp"))
    changes = ("--set", "execution.parallel=ddp", "--set", "optimizer.accumulate=2")
    command = ("train", "digits-deepvit", "--out", tmp_path, *["--resume"] * resume, *changes)
    code, _, said = vitx(*command)
    told = f"vitx train digits-deepvit --out {tmp_path} --resume{' ' * resume}{' '.join(changes * resume)}"
    assert (code, said) == (0, f"stopped by SIGTERM, all is saved: resume with `{told}`\n")
    file = tmp_path / "changes.toml"
    file.write_text('execution.parallel = "ddp"\n')
    code, _, said = vitx(*command[:4], *["--resume"] * resume, "--recipe", file, *changes[2:])
    told = f"vitx train digits-deepvit --out {tmp_path} --resume"
    told += f" --recipe {file} {' '.join(changes[2:])}" if resume else ""
    assert (code, said) == (0, f"stopped by SIGTERM, all is saved: resume with `{told}`\n")


def test_changed_settings_are_told_in_their_order() -> None:
    before = recipe_of("workers=1", "execution.parallel=ddp", "optimizer.accumulate=1")
    now = recipe_of("workers=3", "execution.parallel=fsdp", "optimizer.accumulate=2", "optimizer.lr=0.5")
    assert list(changed_settings(before, now)) == [
        "with execution.parallel=fsdp, begun with ddp",
        "with optimizer.accumulate=2, begun with 1",
        "with workers=3, begun with 1",
    ]
    assert list(changed_settings(now, now)) == []


class Others(Processes):
    """Two processes of which the other one sees what `others` says."""

    def others(self, mine: object) -> object:
        return mine

    def gather(self, value: Any) -> list[Any]:
        return [value, (self.others(value[0]), value[1])]


def test_processes_with_one_recipe_and_one_view_go_on(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    check_processes_agree(ALONE, run, recipe_of())

    check_processes_agree(Others(0, 2), run, recipe_of())
    assert list(tmp_path.iterdir()) == [], "it only looks"


def test_processes_that_differ_are_told_in_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitx.train.loop.resuming.VISIBILITY_TIMEOUT", -1.0)
    run = RunFolder(tmp_path)

    class OtherRecipe(Others):
        def others(self, mine: object) -> object:
            return "another"

    with pytest.raises(InputError, match=r"^the processes were started with different recipes: give each node"):
        check_processes_agree(OtherRecipe(0, 2), run, recipe_of())

    class OtherView(Others):
        def others(self, mine: object) -> object:
            return (True, None) if isinstance(mine, tuple) else mine

    with pytest.raises(InputError) as error:
        check_processes_agree(OtherView(0, 2), run, recipe_of())
    assert str(error.value) == (
        f"the processes do not see the same checkpoints in '{tmp_path}': --out must be on storage that all nodes share"
    )


def seen(*keys: str, skipped: tuple[str, ...] = (), content: bytes = b"") -> RunEnvironment:
    images = ImageSet("photos", ("a", "b"), keys, np.zeros(len(keys), np.int64), lambda index: content, skipped)
    return RunEnvironment.now(torch.device("cpu"), images, images)


def test_what_was_left_out_may_change_its_words() -> None:
    """A skipped image is noted by its whole path, and by the reason that this version of Pillow gives."""
    begun = seen("a/0.png", "b/0.png", skipped=("/old/a/1.png: truncated",))
    begun.check_same_data(seen("a/0.png", "b/0.png", skipped=("/new/a/1.png: image file is truncated",)))
    message = r"the train images changed since the run began \(2 then, {} now\): restore them, or train into another"
    for keys in (("a/0.png", "b/1.png"), ("a/0.png",)):
        with pytest.raises(InputError, match=message.format(len(keys))):
            begun.check_same_data(seen(*keys, skipped=("/old/a/1.png: truncated",)))


def test_images_that_were_made_anew_under_their_names_are_said_and_not_refused() -> None:
    begun, now = seen("a/0.png", "b/0.png", content=b"224 px"), seen("a/0.png", "b/0.png", content=b"96 px")
    begun.check_same_data(now)
    assert begun.differences(now) == [
        f"on {split} images that are not those it was begun with, though their names are" for split in ("train", "val")
    ]
    assert now.differences(now) == []
    before = {split: record.model_copy(update={"sample_sha256": ""}) for split, record in begun.data.items()}
    assert begun.model_copy(update={"data": before}).differences(now) == []  # a run from before it was written


def test_a_teacher_that_was_trained_on_is_said() -> None:
    begun, now = (seen("a/0.png").model_copy(update={"teacher": digest}) for digest in ("of epoch 5", "of epoch 9"))
    assert begun.differences(now) == ["with a teacher whose weights are not those it was begun with"]
    assert now.differences(now) == []
    assert seen("a/0.png").differences(now) == []  # a run from before it was written


def test_a_large_set_is_not_read_whole_at_the_start() -> None:
    read: list[int] = []

    def content(index: int) -> bytes:
        read.append(index)
        return b""

    images = ImageSet("photos", ("a",), tuple(map(str, range(1000))), np.zeros(1000, np.int64), content)
    RunEnvironment.now(torch.device("cpu"), images, images.first(3))
    assert read == [*evenly_spaced(1000, 32), 0, 1, 2]
