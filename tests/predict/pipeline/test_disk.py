"""A full disk: which errors say so, and that one error names the remedy."""

import errno
import sqlite3
from pathlib import Path

import pytest

from vitx.core.errors import EnvironmentMissing
from vitx.predict.pipeline.disk import full_disk_explained, is_full

FULL = OSError(errno.ENOSPC, "No space left on device")


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
def test_errors_of_a_full_disk(error: Exception, full: bool, tmp_path: Path) -> None:
    assert is_full(error) is full
    with pytest.raises(type(error) if not full else EnvironmentMissing) as raised, full_disk_explained(tmp_path):
        raise error
    if not full:
        assert raised.value is error
        return
    assert raised.value.__cause__ is error
    assert str(raised.value) == (
        f"the disk of '{tmp_path}' is full ({error}): make room and run the same command again; "
        "finished shards are kept"
    )
