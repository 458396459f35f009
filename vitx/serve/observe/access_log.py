"""The access log: one JSON object a line and request. The event loop only queues; a thread formats and writes.

The handlers of `logging` are not used: a write for each line costs half as much again (32 µs a line against 20), their
queue's thread cannot be given up on a disk that hangs, and with both mended they take more lines than this.
"""

import json
import os
import re
import sys
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, BinaryIO

from vitx.core.console import log
from vitx.core.errors import InputError
from vitx.serve.observe.request_record import RequestRecord

_WAITING = 65_536  # entries in the queue; when the disk hangs, later ones are dropped, so that memory stays bounded
_LINES_A_WRITE = 256
_GATHER_SECONDS = 0.05  # between two writes: to be woken by each line would cost the event loop more than the lines
_REPEAT_SECONDS = 60.0  # between two reports of a disk that takes no lines
_CLOSE_SECONDS = 5.0  # for the last lines, when the disk hangs
_ID = re.compile(r"[!-~]{1,128}")
CLIENT_GONE = 499  # nginx's status for a client that hung up before the answer
_PATH_LENGTH = 200

Entry = dict[str, Any]


class AccessLog:
    """Writes one line for each request to a file, or to standard output when the target is "-"."""

    def __init__(self, target: str) -> None:
        """Open the file for appending; raise InputError if it cannot be opened."""
        self._target = target
        try:
            self._file = self._open()
        except OSError as error:
            raise InputError(f"cannot write the access log '{target}': {error.strerror}") from None
        self._entries: SimpleQueue[Entry | str] = SimpleQueue()  # or a command: "reopen", "close"
        self._dropped = 0
        self._failed = 0  # lines that could not be written since the last that could
        self._report_due = 0.0  # time.monotonic()
        self._thread = threading.Thread(target=self._work, name="access-log", daemon=True)
        self._thread.start()

    def write(self, record: RequestRecord, method: str, path: str, status: int, seconds: float) -> None:
        """Queue the line of a request that has ended after `seconds`."""
        if self._entries.qsize() >= _WAITING:
            self._dropped += 1
            return
        entry = {"time": time.time(), "id": record.id, "method": method, "path": path[:_PATH_LENGTH], "status": status}
        times = {"total": seconds, "decode": record.decode, "queue": record.queue, "compute": record.compute}
        entry |= {f"{name}_ms": round(1e3 * value, 3) for name, value in times.items() if value is not None}
        if record.client is not None:
            entry["client"] = record.client
        if record.sent is not None:
            entry["bytes"] = record.sent
        if record.model is not None:
            entry |= {"model": record.model, "images": record.images}
        if self._dropped:
            entry["lines_dropped"], self._dropped = self._dropped, 0
        self._entries.put(entry)

    def reopen(self) -> None:
        """Open the file again by its name, after the old one was moved away."""
        self._entries.put("reopen")

    def close(self) -> None:
        """Write the queued lines and close the file."""
        self._entries.put("close")
        self._thread.join(_CLOSE_SECONDS)

    def _open(self) -> BinaryIO:
        """Unbuffered: one write is one system call, so the lines of several workers do not mix."""
        return sys.stdout.buffer if self._target == "-" else Path(self._target).open("ab", buffering=0)

    def _work(self) -> None:
        while True:
            entries = [self._entries.get()]
            with suppress(Empty):
                while len(entries) < _LINES_A_WRITE and isinstance(entries[-1], dict):
                    entries.append(self._entries.get_nowait())
            full = len(entries) == _LINES_A_WRITE
            command = entries.pop() if isinstance(entries[-1], str) else None
            self._write_lines([entry for entry in entries if isinstance(entry, dict)])
            if command == "reopen":
                self._reopen()
            elif command == "close":
                if self._target != "-":
                    self._file.close()
                return
            if not full:
                time.sleep(_GATHER_SECONDS)

    def _write_lines(self, entries: list[Entry]) -> None:
        if entries and self._failed:
            entries[0]["lines_dropped"] = entries[0].get("lines_dropped", 0) + self._failed
        try:
            self._file.write(b"".join(_line(entry) for entry in entries))
            self._file.flush()
            self._failed = 0
        except OSError as error:
            self._failed += len(entries)
            if time.monotonic() >= self._report_due:
                self._report_due = time.monotonic() + _REPEAT_SECONDS
                lost = f"{error.strerror}; {self._failed} lines are lost"
                log(f"vitx: cannot write the access log '{self._target}': {lost}")

    def _reopen(self) -> None:
        if self._target == "-":
            return
        try:
            fresh = self._open()
        except OSError as error:
            log(f"vitx: the access log stays in the old file: cannot open '{self._target}': {error.strerror}")
            return
        self._file.close()
        self._file = fresh


def request_id(given: str | None) -> str:
    """The client's id if it is 1 to 128 visible ASCII characters, else a new one."""
    return given if given is not None and _ID.fullmatch(given) else os.urandom(16).hex()


def _line(entry: Entry) -> bytes:
    moment = datetime.fromtimestamp(entry["time"], UTC).isoformat(timespec="milliseconds")
    return json.dumps({**entry, "time": moment}).encode() + b"\n"
