"""The access log: one JSON object a line and request. The event loop makes the line, a thread writes it.

The lines are made where the requests end: a thread that makes many at once holds the interpreter for milliseconds. The
handlers of `logging` write each line by itself, and their thread cannot be given up on a disk that hangs.
"""

import random
import re
import sys
import threading
import time
from collections import deque
from datetime import UTC, datetime
from errno import EAGAIN
from functools import lru_cache
from io import FileIO
from json.encoder import encode_basestring_ascii as _quoted  # a fourth of the time of json.dumps of the whole line
from pathlib import Path

from vitx.core.console import counted, log
from vitx.core.errors import InputError
from vitx.serve.observe.request_record import RequestRecord

_WAITING = 65_536  # lines to be written; when the disk hangs, later ones are dropped, so that memory stays bounded
_ATOMIC_BYTES = 4096  # PIPE_BUF: no other process writes between those of one write to a pipe
_GATHER_SECONDS = 0.05  # between two writes: to be woken by each line would cost the event loop more than the lines
_REPEAT_SECONDS = 60.0  # between two reports of a disk that takes no lines
_CLOSE_SECONDS = 5.0  # for the last lines, when the disk hangs
_ID = re.compile(r"[!-~]{1,128}")
CLIENT_GONE = 499  # nginx's status for a client that hung up before the answer
_PATH_LENGTH = 200


class AccessLog:
    """Writes one line for each request to a file, or to standard output when the target is "-"."""

    def __init__(self, target: str) -> None:
        """Open the file for appending; raise InputError if it cannot be opened."""
        self._target = target
        try:
            self._file = self._open()
        except OSError as error:
            raise InputError(f"cannot write the access log '{target}': {error.strerror}") from None
        self._lines: deque[str | None] = deque()  # None: open the file again
        self._dropped = self._failed = self._told = 0  # lines: not taken, not written, and how many of both a line says
        self._broken = False  # the file ends within a line: it took only a part of a write, and then no more
        self._report_due = 0.0  # time.monotonic()
        self._work_to_do = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name="access-log", daemon=True)
        self._thread.start()

    def write(self, record: RequestRecord, method: str, path: str, status: int, seconds: float) -> None:
        """Write the line of a request that has ended after `seconds`, soon."""
        if len(self._lines) >= _WAITING:
            self._dropped += 1
            return
        now = int(1e3 * time.time())
        line = f'{{"time": "{_second(now // 1000)}.{now % 1000:03d}+00:00", "id": {_quoted(record.id)}'
        line += f', "method": {_quoted(method)}, "path": {_quoted(path[:_PATH_LENGTH])}, "status": {status}'
        line += f', "total_ms": {1e3 * seconds:.3f}'
        for name, (started, ended) in record.phases.items():
            line += f', "{name}_ms": {1e3 * (ended - started):.3f}'
        if record.client is not None:
            line += f', "client": {_quoted(record.client)}'
        if record.sent is not None:
            line += f', "bytes": {record.sent}'
        if record.model is not None:
            line += f', "model": {_quoted(record.model)}, "images": {record.images}'
        self._lines.append(line)
        if not self._work_to_do.is_set():
            self._work_to_do.set()

    def reopen(self) -> None:
        """Open the file again by its name, after the old one was moved away."""
        self._lines.append(None)
        self._work_to_do.set()

    def close(self) -> None:
        """Write the queued lines and close the file."""
        self._closing = True
        self._work_to_do.set()
        self._thread.join(_CLOSE_SECONDS)

    def _open(self) -> FileIO:
        """Unbuffered: one write is one system call, so the lines of several workers do not mix."""
        if self._target == "-":
            return open(sys.stdout.fileno(), "wb", buffering=0, closefd=False)
        return Path(self._target).open("ab", buffering=0)

    def _work(self) -> None:
        while not self._closing or self._lines:
            self._work_to_do.wait()
            if not self._closing:
                time.sleep(_GATHER_SECONDS)
            self._work_to_do.clear()
            self._write_queued()
        self._file.close()

    def _write_queued(self) -> None:
        lines: list[str] = []
        while self._lines:
            if (line := self._lines.popleft()) is not None:
                lines.append(line)
            if lines and (line is None or not self._lines or sum(map(len, lines)) > _ATOMIC_BYTES // 2):
                self._write(lines)
                lines = []
            if line is None:
                self._reopen()

    def _write(self, lines: list[str]) -> None:
        """Write lines that lack only their closing brace."""
        if lost := self._dropped + self._failed - self._told:
            lines[0] += f', "lines_dropped": {lost}'
        self._told += lost
        rest = b"\n" * self._broken + "}\n".join([*lines, ""]).encode()
        try:
            while rest:
                if not (count := self._file.write(rest)):
                    raise BlockingIOError(EAGAIN, "write could not complete without blocking")
                self._broken, rest = not rest[:count].endswith(b"\n"), rest[count:]
        except OSError as error:
            failed = rest.count(b"}\n")
            self._failed += failed
            if failed == len(lines):  # the first one, which tells of those lost before, too
                self._told -= lost
            if time.monotonic() >= self._report_due:
                self._report_due = time.monotonic() + _REPEAT_SECONDS
                reason = f"{error.strerror}; {counted(lost + failed, 'line')} lost"
                log(f"vitx: cannot write the access log '{self._target}': {reason}")

    def _reopen(self) -> None:
        if self._target == "-":
            return
        try:
            fresh = self._open()
        except OSError as error:
            log(f"vitx: the access log stays in the old file: cannot open '{self._target}': {error.strerror}")
            return
        self._file.close()
        self._file, self._broken = fresh, False


def request_id(given: str | None) -> str:
    """The client's id if it is 1 to 128 visible ASCII characters, else a new one."""
    return given if given is not None and _ID.fullmatch(given) else f"{random.getrandbits(128):032x}"


@lru_cache(1)
def _second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()[:19]
