"""The access log without a server: what a line says, which lines one write has, rotation, and files that take less."""

import errno
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from server_process import wait_until
from vitx.core.console import counted
from vitx.serve.observe import access_log
from vitx.serve.observe.access_log import AccessLog
from vitx.serve.observe.request_record import RequestRecord


class Clock:
    """In the place of the module `time`: it stands until it is moved, and sleeps not."""

    def __init__(self) -> None:
        self.now = 1_764_322_221.4029

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds < 1


class File:
    """Takes `room` bytes, and then says what is in `full`: an error, or None as a pipe does that would wait."""

    def __init__(self, room: int = 10**6, full: OSError | None = None) -> None:
        self.writes: list[bytes] = []
        self.room, self.full, self.closed = room, full, False

    def write(self, data: bytes) -> int | None:
        if not self.room:
            if self.full is None:
                return None
            raise self.full
        self.writes.append(data[: self.room])
        self.room -= len(self.writes[-1])
        return len(self.writes[-1])

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(access_log, "time", made := Clock())
    return made


def log_to(file: File, monkeypatch: pytest.MonkeyPatch) -> AccessLog:
    monkeypatch.setattr(AccessLog, "_open", lambda self: file)
    return AccessLog("log")


def write(log: AccessLog, *ids: str) -> None:
    for each in ids:
        log.write(RequestRecord(each), "GET", "/", 200, 0.001)


def ids_in(data: bytes) -> list[Any]:
    return [json.loads(line)["id"] for line in data.splitlines()]


def test_a_line_says_all_that_is_known(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_to(file := File(), monkeypatch)
    record = RequestRecord("abc-1", client="10.0.0.7", sent=231, model="digits", images=2)
    record.phases |= {"decode": (5.0, 5.0009), "queue": (6.0, 6.25)}
    log.write(record, "POST", '/a\n"\u2028' + "x" * 300, 503, 0.0041)
    log.write(RequestRecord("", sent=0), "GET", "/", 200, 12.0)
    log.close()
    path = '/a\\n\\"\\u2028' + "x" * 195
    assert b"".join(file.writes).decode() == (
        '{"time": "2025-11-28T09:30:21.402+00:00", "id": "abc-1", "method": "POST", "path": "' + path + '", '
        '"status": 503, "total_ms": 4.100, "decode_ms": 0.900, "queue_ms": 250.000, "client": "10.0.0.7", '
        '"bytes": 231, "model": "digits", "images": 2}\n'
        '{"time": "2025-11-28T09:30:21.402+00:00", "id": "", "method": "GET", "path": "/", "status": 200, '
        '"total_ms": 12000.000, "bytes": 0}\n'
    )
    assert file.closed
    assert not log._thread.is_alive()


def test_one_write_has_several_lines_and_none_is_longer_than_a_pipe_keeps_together(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = log_to(file := File(), monkeypatch)
    ids, paused = [str(number) for number in range(200)], list[float]()

    def sleep(seconds: float) -> None:
        paused.append(seconds)
        wait_until(lambda: len(log._lines) == 200)

    clock.sleep = sleep  # type: ignore[method-assign]
    write(log, ids[0])
    wait_until(lambda: paused)
    write(log, *ids[1:])
    wait_until(lambda: not (log._lines or log._work_to_do.is_set()))  # it waits, and takes no core
    log.close()
    assert paused == [access_log._GATHER_SECONDS]
    assert ids_in(b"".join(file.writes)) == ids
    assert max(map(len, file.writes)) <= 4096
    assert min(map(len, file.writes[:-1])) > 2048
    assert all(each.endswith(b"}\n") for each in file.writes)


def test_lines_before_a_rotation_are_in_the_old_file_and_later_ones_in_the_new(tmp_path: Path, clock: Clock) -> None:
    path = tmp_path / "log"
    log = AccessLog(str(path))
    write(log, "1", "2")
    wait_until(lambda: path.read_bytes().count(b"\n") == 2)
    path.rename(old := tmp_path / "old")
    log.reopen()  # which needs no further line
    wait_until(path.exists)
    write(log, "3")
    log.close()
    assert (ids_in(old.read_bytes()), ids_in(path.read_bytes())) == (["1", "2"], ["3"])


def test_lines_that_wait_when_the_file_is_moved_are_in_it(tmp_path: Path, clock: Clock) -> None:
    path, goes_on = tmp_path / "log", threading.Event()

    def sleep(seconds: float) -> None:
        goes_on.wait()

    clock.sleep = sleep  # type: ignore[method-assign]
    log = AccessLog(str(path))
    write(log, "1", "2")
    path.rename(old := tmp_path / "old")
    log.reopen()
    write(log, "3")
    goes_on.set()
    log.close()
    assert (ids_in(old.read_bytes()), ids_in(path.read_bytes())) == (["1", "2"], ["3"])


def test_standard_output_is_not_opened_again(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    log = AccessLog("-")
    write(log, "1")
    log.reopen()
    write(log, "2")
    log.close()
    assert ids_in(capfd.readouterr().out.encode()) == ["1", "2"]
    assert [*tmp_path.iterdir()] == []


def test_a_rotation_of_standard_output_ends_no_broken_line(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    file = File(room=20, full=OSError(errno.ENOSPC, "No space left"))
    monkeypatch.setattr(AccessLog, "_open", lambda self: file)
    log = AccessLog("-")
    write(log, "1")
    wait_until(lambda: log._failed)
    log.reopen()
    wait_until(lambda: not log._lines)
    file.room = 10**6
    write(log, "2")
    log.close()
    broken, line = b"".join(file.writes).splitlines()
    assert (len(broken), json.loads(line)["id"]) == (20, "2")


def test_a_file_that_cannot_be_opened_again_leaves_the_old_one(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "folder" / "log"
    path.parent.mkdir()
    log = AccessLog(str(path))
    path.parent.rename(tmp_path / "old")
    log.reopen()
    write(log, "1")
    log.close()
    assert ids_in((tmp_path / "old" / "log").read_bytes()) == ["1"]
    text = f"vitx: the access log stays in the old file: cannot open '{path}': No such file or directory\n"
    assert capsys.readouterr().err == text


@pytest.mark.parametrize(
    ("full", "why"),
    [(OSError(errno.ENOSPC, "No space left"), "No space left"), (None, "write could not complete without blocking")],
)
def test_what_a_file_takes_in_part_breaks_one_line_and_is_reported_once_a_minute(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], full: OSError | None, why: str
) -> None:
    log = log_to(file := File(room=20, full=full), monkeypatch)
    reported = ""
    for number, (after, lost) in enumerate([(0, 1), (59.9, 0), (0.1, 1)], 1):
        clock.now += after
        write(log, str(number))
        wait_until(lambda number=number: log._failed == number)
        reported += f"vitx: cannot write the access log 'log': {why}; {counted(number, 'line')} lost\n" * lost
    file.room = 10**6
    write(log, "4")
    log.close()
    assert capsys.readouterr().err == reported
    broken, line = b"".join(file.writes).splitlines()
    assert broken == b'{"time": "2025-11-28'
    assert json.loads(line)["lines_dropped"] == 3


def test_the_process_ends_while_the_disk_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access_log, "_CLOSE_SECONDS", 0.01)
    hung, goes_on = SimpleNamespace(), threading.Event()
    hung.write = lambda data: goes_on.wait() and len(data)
    hung.close = lambda: None
    monkeypatch.setattr(AccessLog, "_open", lambda self: hung)
    log = AccessLog("log")
    write(log, "1")
    log.close()  # returns
    assert log._thread.is_alive()
    assert log._thread.daemon
    goes_on.set()
    log._thread.join()
