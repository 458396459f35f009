"""Two processes never train into one folder."""

import errno
import fcntl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from server_process import HANG
from training_jobs import TINY, holder_of, recipe_of, train_one
from vitx.core.errors import InputError
from vitx.core.run import RunFolder
from vitx.train.loop.run_lock import RunLock, is_held, timeout_under_torchrun

HOLDER = """
import fcntl, sys
file = open(sys.argv[1], "a")
fcntl.lockf(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""

LOOK = """
import fcntl, sys
try:
    fcntl.lockf(open(sys.argv[1], "a"), fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    sys.exit(7)
"""


def run_in(folder: Path) -> RunFolder:
    (folder / "run.json").write_text("{}")
    return RunFolder(folder)


@contextmanager
def held(run: RunFolder) -> Iterator[subprocess.Popen[str]]:
    """Another process holds the lock of `run` until its input ends."""
    command = [sys.executable, "-I", "-S", "-c", HOLDER, str(run.path / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process


def test_a_second_process_is_refused_until_the_first_is_killed(tmp_path: Path, image_folder: Path) -> None:
    recipe, run = recipe_of(*TINY, "epochs=1").on_data(str(image_folder)), tmp_path / "run"
    train_one(recipe, run, {})
    holder = holder_of(run)
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


def test_a_run_that_is_held_is_refused_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_in(tmp_path)
    slept: list[float] = []
    clock = iter([10.0, 10.5, 12.0, 12.1])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(time, "sleep", slept.append)
    refused = pytest.raises(InputError, match=r"another process trains into '.*': wait for its end, or stop it")
    with held(run), refused, RunLock(run) as lock:
        lock.acquire(timeout=2.0)
    assert slept == [0.2, 0.2]
    said = capsys.readouterr().err
    assert said == f"another process still trains into '{tmp_path}': waiting for 2 s\n"


def test_a_run_is_waited_for_and_the_lock_is_taken_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_in(tmp_path)
    with held(run) as holder:
        monkeypatch.setattr(time, "sleep", lambda seconds: holder.communicate())
        with RunLock(run) as lock:
            lock.acquire(timeout=HANG)
            file = lock._file
            lock.acquire()
            assert lock._file is file
            assert file is not None
            assert not file.closed
            asked = [sys.executable, "-I", "-S", "-c", LOOK, str(tmp_path / "lock")]
            assert subprocess.run(asked, check=False).returncode == 7
        assert file.closed


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EIO])
def test_where_there_are_no_locks_nothing_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    run = run_in(tmp_path)

    def refuse(*_: object) -> None:
        raise OSError(error, "refused")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with RunLock(run) as lock:
        if error == errno.EIO:
            with pytest.raises(OSError, match="refused"):
                lock.acquire()
        else:
            lock.acquire()
    assert is_held(run) is None


def test_whether_a_run_is_held(tmp_path: Path) -> None:
    run = run_in(tmp_path)
    assert is_held(run) is None, "it has no lock"
    with held(run):
        assert is_held(run) is True
    assert is_held(run) is False
    (tmp_path / "lock").unlink()
    (tmp_path / "lock").symlink_to("lock")
    assert is_held(run) is None, "it cannot be opened"


def test_on_windows_nothing_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_in(tmp_path)
    monkeypatch.setattr(sys, "platform", "win32")
    with RunLock(run) as lock:
        lock.acquire()
    assert not (tmp_path / "lock").exists()
    (tmp_path / "lock").touch()
    assert is_held(run) is None, "nobody knows"


def test_only_torchrun_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert timeout_under_torchrun(5.0) == 0.0
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert timeout_under_torchrun(5.0) == 5.0
