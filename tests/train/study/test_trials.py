"""How a study starts its runs: the words of the command, the environment, the log, and what a failure is called."""

import json
import os
import sys
from pathlib import Path

import pytest

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
