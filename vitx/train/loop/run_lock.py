"""One writer of a run folder: a second one, started by mistake or by a scheduler, would mix two trainings in it."""

import errno
import os
import sys
import time
from types import TracebackType
from typing import IO

from vitx.core.console import log
from vitx.core.errors import InputError
from vitx.core.run import RunFolder

NAME = "lock"
# File systems that have no locks say one of these.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class RunLock:
    """Held from `take` to the end of the `with` block; the system gives back what a killed process held.

    A POSIX lock on the file `lock`, which nothing else opens: it belongs to the process alone, not to the workers that
    it forks, and NFS has it too. Where the file system has no locks, or on Windows, nothing is held.
    """

    def __init__(self, run: RunFolder) -> None:
        self._run, self._path = run, run.path / NAME
        self._file: IO[str] | None = None

    def __enter__(self) -> "RunLock":
        return self

    def take(self, patience: float = 0.0) -> None:
        """Hold the folder, if it is a run; raise InputError if another still does after `patience` seconds."""
        if self._file is not None or not self._run.info_path.is_file() or sys.platform == "win32":
            return
        import fcntl

        self._file = self._path.open("a")
        deadline, told = time.monotonic() + patience, False
        while True:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno in NO_LOCKS:
                    return
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise
            if time.monotonic() > deadline:
                raise InputError(f"another process trains into '{self._run.path}': wait for its end, or stop it")
            if not told:
                log(f"another process still trains into '{self._run.path}': waiting for {patience:.0f} s")
                told = True
            time.sleep(0.2)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()


def patience_of_torchrun(seconds: float) -> float:
    """A group that torchrun replaces may need a while to end; whoever starts a second run by hand is told at once."""
    return seconds if "WORLD_SIZE" in os.environ else 0.0
