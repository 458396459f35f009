"""Waiting for a full disk: which errors, how long, and what starts the waiting anew."""

import errno
import sqlite3
import threading
import time
from pathlib import Path

import pytest

from vitx.core.errors import EnvironmentMissing
from vitx.predict.pipeline.disk import DiskFullBackoff, is_full

FULL = OSError(errno.ENOSPC, "No space left on device")


class FakeTime(threading.Event):
    """An event whose waits are recorded and take no time; the clock moves on by them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.now = 1000.0
        self.waits: list[float] = []
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.waits.append(timeout)
        self.now += timeout
        return self.is_set()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    return FakeTime(monkeypatch)


def sqlite_error(code: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = code
    return error


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (FULL, True),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), True),
        (OSError(errno.EIO, "Input/output error"), False),
        (PermissionError(errno.EACCES, "Permission denied"), False),
        (sqlite_error(sqlite3.SQLITE_FULL), True),
        (sqlite_error(sqlite3.SQLITE_IOERR), True),
        (sqlite_error(sqlite3.SQLITE_IOERR_WRITE), True),
        (sqlite_error(sqlite3.SQLITE_BUSY), False),
        (ValueError("other"), False),
    ],
)
def test_errors_of_a_full_disk(error: BaseException, full: bool) -> None:
    assert is_full(error) is full


def test_waits_double_up_to_two_seconds_and_end_after_the_patience(clock: FakeTime, tmp_path: Path) -> None:
    backoff = DiskFullBackoff(tmp_path, 10, clock)

    def fail() -> None:
        raise FULL

    with pytest.raises(EnvironmentMissing) as raised:
        backoff.retry(fail)
    assert clock.waits == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0, 2.0]
    assert str(raised.value) == (
        f"the disk of '{tmp_path}' has been full for 11 s ({FULL}): make room and run the same command again; "
        "finished shards are kept"
    )
    assert raised.value.__cause__ is FULL


def test_the_last_moment_of_the_patience_is_an_error(clock: FakeTime, tmp_path: Path) -> None:
    backoff = DiskFullBackoff(tmp_path, 3, clock)
    backoff.wait(FULL)
    clock.now = 1003.0
    with pytest.raises(EnvironmentMissing, match="full for 3 s"):
        backoff.wait(FULL)
    assert clock.waits == [0.05]


def test_what_could_be_written_starts_the_waiting_anew(clock: FakeTime, tmp_path: Path) -> None:
    backoff = DiskFullBackoff(tmp_path, 3, clock)
    for _ in range(3):
        failures = [FULL, sqlite_error(sqlite3.SQLITE_FULL), FULL]

        def operation(failures: list[Exception] = failures) -> str:
            if failures:
                raise failures.pop()
            return "written"

        assert backoff.retry(operation) == "written"
        clock.now += 100
    assert clock.waits == [0.05, 0.1, 0.2] * 3


def test_other_errors_are_raised_at_once(clock: FakeTime, tmp_path: Path) -> None:
    for error in (PermissionError(errno.EACCES, "no"), sqlite_error(sqlite3.SQLITE_BUSY), ValueError("other")):

        def fail(error: Exception = error) -> None:
            raise error

        with pytest.raises(type(error)) as raised:
            DiskFullBackoff(tmp_path, 3, clock).retry(fail)
        assert raised.value is error
    assert clock.waits == []


def test_a_stopped_backoff_waits_no_longer(clock: FakeTime, tmp_path: Path) -> None:
    clock.set()
    with pytest.raises(EnvironmentMissing, match="full for 0 s"):
        DiskFullBackoff(tmp_path, 100, clock).wait(FULL)


def test_backoffs_have_their_own_events(tmp_path: Path) -> None:
    first, second = DiskFullBackoff(tmp_path), DiskFullBackoff(tmp_path)
    first.stopped.set()
    assert not second.stopped.is_set()
