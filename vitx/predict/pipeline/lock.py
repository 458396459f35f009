"""One process works on a run: it holds a lock of the system, which ends with the process, however that ends."""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from weakref import WeakSet

from vitx.core.errors import InputError
from vitx.core.files import make_folder

LOCK = "lock"
# Open in this process. A process that is forked from it closes them, or it would hold the locks on after a SIGKILL of
# this one; programs that are started do not get them (O_CLOEXEC, as Python opens all files).
_files = WeakSet[FileIO]()


def _close_all() -> None:
    for file in _files:
        file.close()


if sys.platform != "win32":
    os.register_at_fork(after_in_child=_close_all)


@contextmanager
def locked(folder: Path, out: Path) -> Iterator[None]:
    """Make `folder` and hold its lock within the block: an `flock` on its file `lock`, which says who holds it.

    On Windows nothing is locked. Raises InputError at once if another process, or a thread of this one, holds it.
    """
    if sys.platform == "win32":
        make_folder(folder)
        yield
        return
    path = folder / LOCK
    while True:
        make_folder(folder)
        with path.open("ab+", buffering=0) as file:
            _files.add(file)
            _take(file, out)
            # If a process that made nothing has removed its folder meanwhile, others lock a new file.
            if not _is_at(file, path):
                continue
            with suppress(OSError):  # a full disk: this only says who it is
                file.truncate(0)
                file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
            yield
            return


def _take(file: FileIO, out: Path) -> None:
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().decode(errors="replace") or "another process"
        raise InputError(
            f"{holder} is writing to '{out}': wait until it has ended, or stop it; for several processes give each a "
            "part of the input, by --shard I/N"
        ) from None
    except OSError as error:
        raise InputError(
            f"the file system of '{out}' has no locks ({error.strerror}), and a second process would not be noticed: "
            "choose a folder on another one"
        ) from None


def _is_at(file: FileIO, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False
