"""`vitx watch`: a run that trains, ends, or dies, without a clock."""

import json
import os
from pathlib import Path

import pytest

from cli_fixture import Vitx
from epoch_row import epoch_row
from training_jobs import holder_of
from vitx.core.errors import CheckFailed, InputError
from vitx.core.files import write_json
from vitx.core.run import RunFolder
from vitx.train.loop.run_lock import LOCK_FILE
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
    """The lock tells, not the pid: that may be of another process by now, as pid 1 of a restarted container is."""
    advance(run, HALF, 1)
    assert HALF.pid == os.getpid()
    run.info_path.touch()
    holder = holder_of(run.path)
    found = states(run, lambda: None)
    assert [next(found), next(found)] == [RunState(HALF, ROWS[:1])] * 2
    holder.kill()
    holder.join()
    assert next(found) == RunState(HALF, ROWS[:1])
    with pytest.raises(CheckFailed, match=r"is gone after 1 of 2 epochs: resume with"):
        next(found)


def test_a_stopped_run_that_another_process_resumes_has_not_ended(run: RunFolder) -> None:
    """It holds the lock long before it writes: first it looks at all images."""
    advance(run, HALF.model_copy(update={"ended": True, "failure": "stopped by SIGTERM", "host": "another"}), 1)
    run.info_path.touch()
    holder = holder_of(run.path)
    found = states(run, lambda: None)
    goes_on = RunState(HALF.model_copy(update={"host": "another"}), ROWS[:1])
    assert [next(found), next(found)] == [goes_on] * 2
    holder.kill()
    holder.join()
    assert next(found).progress.ended
    with pytest.raises(CheckFailed, match=r"ended before its last epoch: stopped by SIGTERM$"):
        next(found)


def test_of_another_host_and_without_a_lock_nothing_is_known(run: RunFolder) -> None:
    found = states(run, lambda: None)
    assert next(found) == next(found)
    (run.path / LOCK_FILE).touch()
    advance(run, HALF.model_copy(update={"host": "another"}), 1)
    assert next(found) == next(found)


def test_a_run_that_ended_early_says_why(run: RunFolder) -> None:
    advance(run, ENDED.model_copy(update={"step": 30, "failure": "stopped by SIGINT"}), 1)
    found = states(run, lambda: None)
    state = next(found)
    assert state.progress.ended
    assert state.fields()["epochs done"] == "1 of 2", "it was stopped, and did not run out of patience"
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
