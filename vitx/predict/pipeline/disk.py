"""Waiting for a full disk: somebody may make room. If nobody does, one error says so."""

import errno
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from vitx.core.errors import EnvironmentMissing

T = TypeVar("T")
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT)
PATIENCE_SECONDS = 60.0
MAX_WAIT_SECONDS = 2.0


def is_full(error: BaseException) -> bool:
    """Whether the error says that the disk, or the user's share of it, is full."""
    if isinstance(error, sqlite3.OperationalError):
        # A write that fails for want of room is often SQLITE_IOERR only.
        return error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
    return isinstance(error, OSError) and error.errno in DISK_ERRORS


class DiskFullBackoff:
    """Growing waits while the disk of `out` is full, and EnvironmentMissing after `seconds`.

    stopped: an event that ends the waiting early, with the same error.
    """

    def __init__(self, out: Path, seconds: float = PATIENCE_SECONDS, stopped: threading.Event | None = None) -> None:
        self._out, self._seconds = out, seconds
        self.stopped = threading.Event() if stopped is None else stopped
        self.reset()

    def reset(self) -> None:
        """Start again with short waits: something could be written."""
        self._since: float | None = None
        self._wait = 0.05

    def wait(self, error: BaseException) -> None:
        """Sleep, or raise EnvironmentMissing if the disk has been full for too long."""
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        if now - self._since >= self._seconds or self.stopped.wait(self._wait):
            raise EnvironmentMissing(
                f"the disk of '{self._out}' has been full for {now - self._since:.0f} s ({error}): make room and run "
                "the same command again; finished shards are kept"
            ) from error
        self._wait = min(2 * self._wait, MAX_WAIT_SECONDS)

    def retry(self, operation: Callable[[], T]) -> T:
        """Return the operation's result, running it again as long as it fails because the disk is full."""
        while True:
            try:
                result = operation()
            except (OSError, sqlite3.OperationalError) as error:
                if not is_full(error):
                    raise
                self.wait(error)
            else:
                self.reset()
                return result
