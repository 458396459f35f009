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

import pytest

from vitx.core.errors import InputError
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
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
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


def test_a_study_in_use_is_refused(tmp_path: Path) -> None:
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="is in use: another study trains there"):
            list(Commands(tmp_path, 1).run(trials("any")))
