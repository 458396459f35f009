"""A full or lost disk is one error at once: what was recorded stays, and the same command goes on from there."""

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vitx.core.errors import NO_SPACE, TOO_LARGE, TOO_MANY_FILES, EnvironmentMissing


def is_full(error: BaseException) -> bool:
    """Whether the error says that the disk, or the user's share of it, is full."""
    if isinstance(error, sqlite3.OperationalError):
        # A write that fails for want of room is often SQLITE_IOERR only.
        return getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)
    return isinstance(error, OSError) and error.errno in NO_SPACE


@contextmanager
def full_disk_explained(out: Path) -> Iterator[None]:
    """Raise EnvironmentMissing, which says how to go on, where the block fails because the disk is full."""
    try:
        yield
    except (OSError, sqlite3.OperationalError) as error:
        if not is_full(error):
            raise
        others = ""
        if isinstance(error, sqlite3.Error):  # which does not tell one from the other
            others = ", or that of SQLite's temporary files ($SQLITE_TMPDIR), or a file may not grow (ulimit -f)"
        raise EnvironmentMissing(
            f"the disk of '{out}' is full ({error}){others}: make room and run the same command again; "
            "finished shards are kept"
        ) from error


@contextmanager
def lost_disk_explained(out: Path) -> Iterator[None]:
    """Raise EnvironmentMissing, which says how to go on, where the block cannot write to `out` for any other reason."""
    try:
        yield
    except OSError as error:
        if is_full(error) or error.errno in TOO_MANY_FILES:
            raise
        back = "when the folder is there again, and can be written, run"
        remedy = f"{TOO_LARGE}, and run" if error.errno == errno.EFBIG else back
        raise EnvironmentMissing(
            f"cannot write to '{out}' any more ({error}): {remedy} the same command again; finished shards are kept"
        ) from error
