"""`vitx watch`: a run that trains, ends, or dies, without a clock."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli_fixture import Vitx
from epoch_row import epoch_row
from server_process import wait_until
from vitx.core.errors import CheckFailed, InputError
from vitx.core.files import write_json
from vitx.core.run import RunFolder
from vitx.train.progress import PROGRESS_FILE, RunProgress
from vitx.train.watch import RunState, states, watch

BEGUN = RunProgress(step=0, steps=40, epochs=2)
HALF = BEGUN.model_copy(update={"step": 21, "loss": 1.25, "images_per_second": 99.6, "seconds_left": 7200.0})
ENDED = HALF.model_copy(update={"step": 40, "ended": True})
ROWS = [epoch_row(1, top1=0.75)]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    write_json(tmp_path / PROGRESS_FILE, BEGUN)
    return RunFolder(tmp_path)


def advance(run: RunFolder, progress: RunProgress, rows: int) -> None:
    run.metrics_path.write_text("".join(json.dumps(row) + "\n" for row in ROWS[:rows]))
    write_json(run.path / PROGRESS_FILE, progress)


def test_a_line_for_each_epoch_until_the_end(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    moments = iter([(HALF, 1), (HALF, 1), (ENDED, 1)])
    watch(run, lambda: advance(run, *next(moments)))
    assert capsys.readouterr().out.splitlines() == [
        "epochs done 0 of 2, steps 0 of 40",
        "epochs done 1 of 2, steps 21 of 40, loss 1.2500, images/s 100, left 2.0 h, top-1 75.00%, highest 75.00% after "
        "epoch 1",
        "epochs done 1 of 2, steps 40 of 40, loss 1.2500, images/s 100, top-1 75.00%, highest 75.00% after epoch 1",
    ]
    assert next(moments, None) is None


def test_a_run_whose_process_was_killed(run: RunFolder) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    advance(run, HALF.model_copy(update={"pid": dead.pid}), 1)
    found = states(run, lambda: None)
    assert next(found) == RunState(HALF.model_copy(update={"pid": dead.pid}), ROWS[:1])
    with pytest.raises(CheckFailed, match=r"is gone after 1 of 2 epochs: resume with"):
        next(found)
    elsewhere = HALF.model_copy(update={"pid": dead.pid, "host": "another"})
    assert not elsewhere.process_is_gone()
    assert not HALF.model_copy(update={"pid": os.getpid()}).process_is_gone()
    zombie = subprocess.Popen([sys.executable, "-c", ""])
    wait_until(lambda: HALF.model_copy(update={"pid": zombie.pid}).process_is_gone())  # nobody has asked for its end
    zombie.wait()


def test_a_run_that_ended_early_says_why(run: RunFolder) -> None:
    advance(run, ENDED.model_copy(update={"failure": "stopped by SIGINT"}), 1)
    found = states(run, lambda: None)
    assert next(found).progress.ended
    with pytest.raises(CheckFailed, match=r"ended before its last epoch: stopped by SIGINT$"):
        next(found)


def test_a_run_that_has_not_begun_and_one_that_ended(run: RunFolder, tmp_path: Path, vitx: Vitx) -> None:
    with pytest.raises(InputError, match="expected a run whose training has begun"):
        next(states(RunFolder(tmp_path / "nothing"), lambda: None))
    code, _, said = vitx("watch", tmp_path / "nothing")
    assert (code, said.startswith("error: no run at")) == (2, True)
    for interval in ("inf", "1e10", "nan"):  # more than time.sleep takes
        code, _, said = vitx("watch", run.path, "--interval", interval)
        assert code == 2
        assert "less than or equal to 86400" in said
