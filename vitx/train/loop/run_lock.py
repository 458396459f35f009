"""The lock of a run folder: a second training, started by mistake or by a scheduler, must not write into it."""

import errno
import os
import sys
import time
from typing import IO

from vitx.core.console import log
from vitx.core.errors import InputError
from vitx.core.run import RunFolder

LOCK_FILE = "lock"
SECONDS_BETWEEN_TRIES = 0.2
# The errors of file systems without locks.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
HELD = (errno.EACCES, errno.EAGAIN)  # by another process


class RunLock:
    """Held from `acquire` to the end of the `with` block; the system releases the lock of a killed process.

    It is a POSIX lock (`fcntl.lockf`) on the file `lock`, which no other code opens. Such a lock belongs to one process
    and is not inherited by the workers that it forks, and NFS supports it. On a file system without locks, and on
    Windows, nothing is locked.
    """

    def __init__(self, run: RunFolder) -> None:
        self._run, self._path = run, run.path / LOCK_FILE
        self._file: IO[str] | None = None

    def __enter__(self) -> "RunLock":
        return self

    def acquire(self, timeout: float = 0.0) -> None:
        """Lock the folder if it is a run; raise InputError if another process still holds it after `timeout` seconds.

        Acquiring it a second time does nothing.
        """
        if self._file is not None or not self._run.exists() or sys.platform == "win32":
            return
        import fcntl

        self._file = self._path.open("a")
        deadline, logged = time.monotonic() + timeout, False
        while True:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                if error.errno in NO_LOCKS:
                    return
                if error.errno not in HELD:
                    raise
            if time.monotonic() > deadline:
                raise InputError(f"another process trains into '{self._run.path}': wait for its end, or stop it")
            if not logged:
                log(f"another process still trains into '{self._run.path}': waiting for {timeout:.0f} s")
                logged = True
            time.sleep(SECONDS_BETWEEN_TRIES)

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()


def is_held(run: RunFolder) -> bool | None:
    """Whether a process trains into `run`: its lock is asked for, for a moment. None where that cannot be known.

    Not for a process that holds the lock: to it the lock seems free, and looking would release it.
    """
    if sys.platform == "win32":
        return None
    import fcntl

    try:
        file = (run.path / LOCK_FILE).open()
    except OSError:  # it is not there, or another user's
        return None
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return True if error.errno in HELD else None
    return False


def timeout_under_torchrun(seconds: float) -> float:
    """How long to wait for the lock: `seconds` under torchrun, 0 without it.

    The processes that torchrun replaces may need a while to end; a second run started by hand is refused at once.
    """
    return seconds if "WORLD_SIZE" in os.environ else 0.0
