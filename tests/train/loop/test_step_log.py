"""Single steps in TensorBoard and beside the bar; a dry run; a run on photographs goes on with its own split."""

import json
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

from cli_fixture import Vitx
from training_jobs import TINY, metrics_of, recipe_of
from vitx.core.files import read_record, write_json
from vitx.train.loop import step_log as module
from vitx.train.loop.step_log import StepLog, lacks_end
from vitx.train.loop.trainer import Trainer, train
from vitx.train.progress import PROGRESS_FILE, RunProgress, duration


def test_every_tenth_step_is_written_with_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = count(0.0, 2.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    log = StepLog(tmp_path, steps=300, epochs=3, done=100, batch_size=8, device=torch.device("cpu"))
    with log:
        for step in range(100, 115):
            log(step, {"total": torch.tensor(step / 100)}, 0.5, torch.tensor(3.0))
    assert log.note == "loss 1.100, 4 images/s, 6 min of the run left"
    events = EventAccumulator(str(tmp_path / "tensorboard" / "steps")).Reload()
    assert {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]} == {
        "step/loss/total": [(101, 1.0), (111, pytest.approx(1.1))],
        "step/lr": [(101, 0.5), (111, 0.5)],
        "step/images_per_second": [(101, 4.0), (111, 4.0)],
        "step/gradient_norm": [(101, 3.0), (111, 3.0)],
    }
    ended = read_record(tmp_path / PROGRESS_FILE, RunProgress)
    assert (ended.step, ended.steps, ended.epochs, round(ended.loss or 0, 4)) == (115, 300, 3, 1.1)
    assert (ended.images_per_second, ended.seconds_left, ended.ended) == (4.0, 378.0, True)


def test_an_evaluation_is_no_step_and_the_last_one_is_still_to_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    log, notes = StepLog(tmp_path, steps=30, epochs=3, done=0, batch_size=8, device=torch.device("cpu")), []
    for epoch in range(3):
        log.begin_epoch()
        for step in range(10 * epoch, 10 * epoch + 10):
            now += 2.0
            log(step, {"total": torch.tensor(1.0)}, 0.5, None)
        notes.append(log.note)
        now += 15.0
    with log:
        now += 1.0
    # The first epoch does not know of evaluations; of the second two are left, of the third its own.
    assert notes == [f"loss 1.000, 4 images/s, {left} s of the run left" for left in (58, 38 + 2 * 15, 18 + 15)]


def test_what_a_resumed_run_does_before_its_first_step_is_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    with StepLog(tmp_path, steps=30, epochs=3, done=10, batch_size=8, device=torch.device("cpu")) as log:
        now += 60.0  # the last epoch before is analysed
        log.begin_epoch()
        now += 2.0
        log(10, {"total": torch.tensor(1.0)}, 0.5, None)
    assert log.note == "loss 1.000, 4 images/s, 38 s of the run left"


def test_progress_is_flushed_seldom_and_a_loss_that_is_not_finite_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * 2**29)
    log, seen = StepLog(tmp_path, steps=100, epochs=1, done=0, batch_size=1, device=torch.device("cuda")), []
    for step, loss in ((0, 1.0), (10, 2.0), (20, 3.0), (30, float("inf"))):
        log.first, now = step, now + 1.0
        log(step, {"total": torch.tensor(loss)}, 0.5, None)
        found = read_record(tmp_path / PROGRESS_FILE, RunProgress)
        seen.append((found.step, found.loss, found.ended))
    assert seen == [(0, None, False), (0, None, False), (21, 3.0, False), (21, 3.0, False)]
    with log:
        pass
    assert read_record(tmp_path / PROGRESS_FILE, RunProgress).loss == 3.0
    events = EventAccumulator(str(tmp_path / "tensorboard" / "steps")).Reload()
    assert {event.value for event in events.Scalars("step/memory_gib")} == {1.5}
    assert "step/gradient_norm" not in events.Tags()["scalars"]


@pytest.mark.parametrize(
    ("error", "said"), [(ValueError("no room"), "no room"), (KeyboardInterrupt(), "KeyboardInterrupt")]
)
def test_a_failure_is_written_with_the_end(tmp_path: Path, error: BaseException, said: str) -> None:
    log = StepLog(tmp_path, steps=30, epochs=3, done=7, batch_size=8, device=torch.device("cpu"))
    with pytest.raises(type(error)), log:
        raise error
    ended = read_record(tmp_path / PROGRESS_FILE, RunProgress)
    assert (ended.step, ended.ended, ended.failure) == (7, True, said)
    assert (log.note, log.writer.all_writers) == ("", None), "nothing beside the bar, and no open file"


def test_whether_a_run_lacks_its_end(tmp_path: Path) -> None:
    assert not lacks_end(tmp_path), "it has not begun"
    for ended, failure, lacks in ((False, "", True), (True, "no room", True), (True, "", False)):
        progress = RunProgress(step=1, steps=2, epochs=1, ended=ended, failure=failure)
        write_json(tmp_path / PROGRESS_FILE, progress)
        assert lacks_end(tmp_path) is lacks


@pytest.mark.parametrize(("seconds", "said"), [(99.4, "99 s"), (100, "2 min"), (5900, "98 min"), (9000, "2.5 h")])
def test_a_duration_in_words(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_a_run_on_photographs_is_tried_trained_and_resumed_with_its_split(
    image_folder: Path, tmp_path: Path, vitx: Vitx
) -> None:
    run, photos = tmp_path / "run", image_folder / "train"
    settings = ("model.kwargs.depth=1", "workers=0", "losses.attention_pairs=1", "epochs=2")
    small = [word for setting in settings for word in ("--set", setting)]
    command = ("train", "photos", "--data", photos, "--out", run, "--device", "cpu", *small)
    code, out, said = vitx(*command, "--dry-run", "--json")
    assert code == 0, said
    found = json.loads(out)
    assert (found["images to train on"], found["images to evaluate on"]) == (15, 3)
    assert (found["classes"], found["a batch"]) == ("class-0, class-1, class-2", "8 × 3 × 32 × 32")
    assert found["steps"] == "1 an epoch, 2 in 2 epochs"
    assert found["seconds a step"] > 0
    assert found["without effect"] == "losses.attention_pairs=1, as losses.attention=0.0"
    assert not run.exists()
    code, _, said = vitx(*command, "--set", "epochs=1")
    assert (code, said.count("without effect: losses.attention_pairs=1, as losses.attention=0.0\n")) == (0, 1)
    assert vitx(*command)[0] == 2
    code, _, said = vitx(*command, "--dry-run", "--out", photos / "runs")
    assert (code, "would take it for a class of images: pass another --out" in said) == (2, True), said
    before = (run / "split.json").read_bytes()
    (photos / "class-0" / "new.png").write_bytes((photos / "class-0" / "0.png").read_bytes())
    code, out, said = vitx(*command[:-2], "--set", "epochs=1", "--resume")
    assert code == 0, said
    assert "nothing is left to train" in said
    assert f"next: vitx report {run}" in said
    assert (run / "split.json").read_bytes() == before
    assert json.loads((run / "run.json").read_text())["data"] == str(run / "split.json")
    code, out, said = vitx("eval", run, "--json")
    assert (code, json.loads(out)["images"]) == (0, 3), said


def test_predictions_that_are_not_finite_stop_the_run_before_anything_is_saved(
    image_folder: Path, tmp_path: Path, vitx: Vitx
) -> None:
    one_step = ("epochs=1", "batch_size=18", "schedule.warmup_epochs=0", "optimizer.lr=1e30")
    changes = ("model.kwargs.depth=1", "workers=0", *one_step)
    settings = [word for change in changes for word in ("--set", change)]
    code, _, said = vitx("train", "photos", "--data", image_folder, "--out", tmp_path / "run", *settings)
    assert (code, "predictions after epoch 1 are not finite: lower optimizer.lr" in said) == (1, True), said
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_resuming_writes_the_end_that_a_kill_after_the_last_checkpoint_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, run = recipe_of(*TINY, "epochs=1"), tmp_path / "run"
    save = Trainer._save

    def save_and_die(self: Trainer) -> None:
        save(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "_save", save_and_die)
    with pytest.raises(KeyboardInterrupt):
        train(recipe, run, device="cpu", quiet=True)
    monkeypatch.setattr(Trainer, "_save", save)
    killed = read_record(run / PROGRESS_FILE, RunProgress).model_copy(update={"ended": False, "failure": ""})
    write_json(run / PROGRESS_FILE, killed)
    assert lacks_end(run)
    rows = metrics_of(run)
    assert train(recipe, run, resume=True, device="cpu", quiet=True).resumed_from == 1
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("top1")] == [(1, pytest.approx(rows[0]["top1"]))]
    ended = read_record(run / PROGRESS_FILE, RunProgress)
    assert (ended.step, ended.ended, ended.failure) == (rows[0]["step"], True, "")
    files = sorted(run.rglob("*"))
    train(recipe, run, resume=True, device="cpu", quiet=True)
    assert (sorted(run.rglob("*")), metrics_of(run)) == (files, rows), "a run that has its end is left alone"


@pytest.mark.parametrize("setting", ["optimizer.lr=1e9", "losses.cosine=1e308"])
def test_a_dry_run_does_not_pass_where_its_steps_are_not_finite(tmp_path: Path, vitx: Vitx, setting: str) -> None:
    small = ("model.kwargs.depth=1", "batch_size=8", "workers=0", "schedule.warmup_epochs=0", setting)
    settings = [word for change in small for word in ("--set", change)]
    code, out, said = vitx("train", "digits-deit", "--out", tmp_path / "run", "--dry-run", *settings)
    assert (code, out, [*tmp_path.iterdir()]) == (1, "", [])
    assert said.startswith("error: the loss or its gradient is not finite at step ")
