"""Two processes never train into one folder."""

import threading
import time
from pathlib import Path

import pytest

from server_process import HANG
from training_jobs import TINY, context, hold_run, recipe_of, train_one
from vitx.core.errors import InputError
from vitx.core.run import RunFolder
from vitx.train.loop.run_lock import RunLock


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path: Path, image_folder: Path) -> None:
    recipe, run = recipe_of(*TINY, "epochs=1").on_data(str(image_folder)), tmp_path / "run"
    train_one(recipe, run, {})
    here, there = context().Pipe()
    holder = context().Process(target=hold_run, args=(run, there))
    holder.start()
    assert here.poll(HANG), "the holder has not begun"
    with pytest.raises(InputError, match=r"another process trains into '.*run': wait for its end, or stop it"):
        train_one(recipe, run, {}, resume=True)
    killer = threading.Timer(0.5, holder.kill)
    start = time.monotonic()
    killer.start()
    with RunLock(RunFolder(run)) as lock:
        lock.acquire(timeout=HANG)
        assert time.monotonic() - start > 0.3
    killer.join()
    holder.join()
    train_one(recipe, run, {}, resume=True)


def test_a_folder_that_is_no_run_is_left_as_it_is(tmp_path: Path) -> None:
    with RunLock(RunFolder(tmp_path)) as lock:
        lock.acquire()
    assert not list(tmp_path.iterdir())
