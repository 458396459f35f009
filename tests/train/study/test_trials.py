"""How a study starts and stops its runs: the command, the environment, the log, and what a failure is called."""

import fcntl
import json
import os
import signal
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from epoch_row import epoch_row
from vitx.core.errors import InputError
from vitx.core.files import link_atomically, write_json
from vitx.core.run import CheckpointState, ModelSpec, RunFolder, RunInfo
from vitx.data.open import open_splits
from vitx.train.loop.checkpoint import write_metrics
from vitx.train.loop.environment import DataRecord, RunEnvironment
from vitx.train.loop.interruption import TrainingStopped
from vitx.train.study.trials import Runner, Trial

# Prints what it was started with as a line of its log, and ends as a run that failed.
PROGRAM = """
import json, os, sys
names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONUNBUFFERED", "KEPT")
print(json.dumps([sys.argv[1:], {name: os.environ.get(name) for name in names}]))
print("the reason", file=sys.stderr)
sys.exit(3)
"""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitx.train.study.trials.verb_command", lambda *words: [sys.executable, "-c", PROGRAM, *words])
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "PYTHONUNBUFFERED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("KEPT", "yes")


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize(("jobs", "threads"), [(1, None), (2, "1"), (3, "1")])
def test_runs_at_a_time_have_one_thread_each(tmp_path: Path, jobs: int, threads: str | None) -> None:
    trials = [Trial("plain", seed, "digits-deit", None, ()) for seed in range(3)]
    ended = {trial.seed: reason for trial, reason in Runner(tmp_path, jobs).run(trials)}
    assert ended == dict.fromkeys(range(3), "exit code 3: the reason")
    for seed in range(3):
        _, environment = json.loads((tmp_path / f"logs/plain-seed{seed}.log").read_text().splitlines()[0])
        assert environment == {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "PYTHONUNBUFFERED": "1",  # else the reason might come before what was printed
            "KEPT": "yes",
        }


@pytest.mark.usefixtures("started")
@pytest.mark.parametrize("data", [None, "folder"])
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("skip_bad", [False, True])
def test_the_command_of_a_run(tmp_path: Path, data: str | None, begun: bool, skip_bad: bool) -> None:
    trial = Trial("mixed", 7, "digits-deit", data, ("epochs=2", "a.b=c d"), device="cpu")
    folder = tmp_path / "runs" / "mixed-seed7"
    if begun:
        folder.mkdir(parents=True)
        (folder / "run.json").write_text("{}")
    log = tmp_path / "logs" / "mixed-seed7.log"
    log.parent.mkdir()
    log.write_text("what an earlier try said\n")
    assert [*Runner(tmp_path, 1, skip_bad).run([trial])] == [(trial, "exit code 3: the reason")]
    kept, line, *_ = log.read_text().splitlines()
    assert kept == "what an earlier try said"
    assert json.loads(line)[0] == [
        *("train", "digits-deit", "--out", str(folder), "--device", "cpu"),
        *(() if data is None else ("--data", "folder")),
        *("--set", "epochs=2", "--set", "a.b=c d", "--set", "seed=7"),
        *(("--skip-bad",) if skip_bad else ()),
        *(("--resume",) if begun else ()),
    ]
    assert os.listdir(tmp_path / "logs") == ["mixed-seed7.log"]


class Commands(Runner):
    """Trials whose processes run Python code, by name."""

    codes: dict[str, str]

    def _command(self, trial: Trial) -> list[str]:
        return [sys.executable, "-c", self.codes[trial.variant], str(self.study)]


def trials(*names: str) -> list[Trial]:
    return [Trial(name, 0, "digits-deit", None, ()) for name in names]


def test_a_failed_run_does_not_stop_the_others(tmp_path: Path) -> None:
    runner = Commands(tmp_path, 1)
    runner.codes = {
        "refused": "import sys; print('epoch 1'); sys.exit('error: no disk')",
        "stopped": "print('stopped by SIGTERM')",
    }
    found = {trial.variant: reason for trial, reason in runner.run(trials("refused", "stopped"))}
    assert found == {"refused": "exit code 1: no disk", "stopped": "exit code 0: stopped by SIGTERM"}
    assert "epoch 1" in (tmp_path / "logs" / "refused-seed0.log").read_text()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_stops_the_runs_under_way_and_begins_no_other(tmp_path: Path, number: signal.Signals) -> None:
    assert threading.current_thread() is threading.main_thread()
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests run under nohup
    code = """
import signal, sys, time
from pathlib import Path
study = Path(sys.argv[1])
def saved(*_):
    (study / "saved").touch()
    sys.exit(0)
signal.signal(signal.SIGTERM, saved)
(study / "ready").touch()
while True:
    time.sleep(0.1)  # a signal that comes just before a long sleep would wait for its end
"""
    runner = Commands(tmp_path, 1)
    runner.codes = {"sleeps": code, "waits": "open('begun', 'w')"}

    def interrupt() -> None:
        while not (tmp_path / "ready").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(TrainingStopped, match=number.name), closing(runner.run(trials("sleeps", "waits"))) as outcomes:
        list(outcomes)
    thread.join()
    assert (tmp_path / "saved").exists()
    assert not (tmp_path / "logs" / "waits-seed0.log").read_text()
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("finished", [False, True])
def test_a_study_in_use_is_refused(tmp_path: Path, finished: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where runs have finished: study.json, which is written for each, is that of the study that trains."""
    if finished:
        monkeypatch.setattr(Trial, "history", lambda _trial, _study: [])
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="is in use: another study trains there"):
            next(Commands(tmp_path, 1).run(trials("any")))


def write_epochs(run: RunFolder, history: list[dict[str, Any]]) -> None:
    """As much of a run as says how far it is: the link `last` is switched when the metrics are written."""
    folder = run.path / "checkpoints" / f"epoch-{len(history):04}"
    folder.mkdir(parents=True)
    state = CheckpointState(epoch=len(history), step=1, best_metric=0.5, best_epoch=1, sha256={"ema.safetensors": "0"})
    write_json(folder / "state.json", state)
    write_metrics(run, history)
    link_atomically(run.checkpoint_path("last"), folder.name)


def test_a_run_is_finished_after_its_epochs_or_when_its_patience_ends(tmp_path: Path) -> None:
    trial = Trial("plain", 0, "digits-deit", None, ("epochs=3", "schedule.warmup_epochs=0"))
    patient = Trial("plain", 0, "digits-deit", None, (*trial.overrides, "selection.patience=1"))
    run = RunFolder(tmp_path / "runs" / "plain-seed0")
    rows = [epoch_row(1, top1=0.5), epoch_row(2, top1=0.25), epoch_row(3, top1=0.75)]
    assert trial.history(tmp_path) is None
    write_epochs(run, rows[:1])
    assert trial.history(tmp_path) is patient.history(tmp_path) is None
    write_epochs(run, rows[:2])
    assert trial.history(tmp_path) is None
    assert patient.history(tmp_path) == rows[:2]
    write_metrics(run, rows)  # and killed before the link was switched
    assert trial.history(tmp_path) is None
    write_epochs(run, rows)
    assert trial.history(tmp_path) == rows


def test_a_run_that_was_begun_otherwise_or_is_damaged_is_refused(tmp_path: Path) -> None:
    train, val = open_splits("digits")
    found = {"train": DataRecord.of(train), "val": DataRecord.of(val)}
    trial = Trial("plain", 0, "digits-deit", None, ("epochs=3",))
    trial.check_begun(tmp_path, train, found)
    recipe, folder = trial.resolved(), trial.folder(tmp_path)
    folder.mkdir(parents=True)
    info = RunInfo(
        name="plain",
        recipe="digits-deit",
        model=ModelSpec(name="deit_digits", num_classes=10),
        class_names=train.class_names,
        preprocessing=recipe.preprocessing,
        data="digits",
        seed=0,
    )
    write_json(folder / "run.json", info)
    write_json(folder / "recipe.json", recipe)
    environment = RunEnvironment.now(torch.device("cpu"), train, val)
    write_json(folder / "environment.json", environment)
    trial.check_begun(tmp_path, train, found)

    def refused(other: Trial = trial) -> str:
        with pytest.raises(InputError) as error:
            other.check_begun(tmp_path, train, found)
        return str(error.value)

    longer = Trial("plain", 0, "digits-deit", None, ("epochs=4",))
    assert refused(longer) == (
        f"cannot go on with '{folder}': epochs is 3 in the run but 4 was asked for; choose another --out"
    )
    other_images = (
        f"cannot go on with '{folder}': it was begun on {len(train)} images of 10 classes, and this study on other "
        f"ones of 'digits' ({len(train)} of 10); choose another --out"
    )
    for split in ("train", "val"):
        fewer = environment.data[split].model_copy(update={"names_sha256": "0"})
        changed = environment.model_copy(update={"data": {**environment.data, split: fewer}})
        write_json(folder / "environment.json", changed)
        assert refused() == other_images
    write_json(folder / "environment.json", environment)
    write_json(folder / "run.json", info.model_copy(update={"class_names": (*train.class_names[:9], "other")}))
    assert refused() == other_images
    write_json(folder / "run.json", info)
    write_epochs(RunFolder(folder), [epoch_row(1)])
    missing = folder / "checkpoints" / "epoch-0001" / "ema.safetensors"
    assert refused() == (
        f"{missing} is missing: the folder is incomplete, make or copy it again; without the folder '{folder}' that "
        "run is trained again"
    )
