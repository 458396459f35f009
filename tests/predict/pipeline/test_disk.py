"""A disk that is full or gone: which errors say so, and that one error names the remedy."""

import errno
import os
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bundle_fixture import NumpySession, colour_image, png
from vitx.core.bundle import Bundle
from vitx.core.errors import EnvironmentMissing
from vitx.core.preprocess import UInt8Array
from vitx.predict import predict
from vitx.predict.ledger import Ledger
from vitx.predict.options import PredictOptions
from vitx.predict.pipeline.disk import full_disk_explained, is_full, lost_disk_explained
from vitx.predict.state import LEDGER, open_ledger

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
        (sqlite3.OperationalError("raised by Python, with no code"), False),
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
    # SQLite sorts in files of its own, perhaps on another disk.
    others = ", or that of SQLite's temporary files ($SQLITE_TMPDIR), or a file may not grow (ulimit -f)"
    others = others if isinstance(error, sqlite3.Error) else ""
    assert str(raised.value) == (
        f"the disk of '{tmp_path}' is full ({error}){others}: make room and run the same command again; "
        "finished shards are kept"
    )


def test_a_full_disk_is_no_lost_one(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left") as raised, lost_disk_explained(tmp_path):
        raise FULL
    assert raised.value is FULL


@pytest.mark.parametrize("predicted", [1, 6])
def test_a_folder_that_is_gone_is_one_error(tiny_bundle: Bundle, tmp_path: Path, predicted: int) -> None:
    """While a part is begun, and when the last one is to get its name."""
    images, out = tmp_path / "images", tmp_path / "out"
    images.mkdir()
    for number in range(6):
        (images / f"{number}.png").write_bytes(png(colour_image(0, np.random.default_rng(number))))

    class Removing(NumpySession):
        calls = 0

        def _infer(self, images: UInt8Array) -> Any:
            self.calls += 1
            if self.calls == predicted:
                out.rename(out.with_name("moved"))
            return super()._infer(images)

    options = PredictOptions(shard_size=1, batch_size=1)
    with pytest.raises(EnvironmentMissing, match=rf"^cannot write to '{out}' any more \(.*finished shards are kept$"):
        predict(tiny_bundle, Removing(), images, out, options, quiet=True)


@pytest.mark.parametrize("suffix", [".png", ".tar", ".parquet"])
def test_too_many_open_files_are_no_fault_of_an_image(
    tiny_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    """They would be rows with an error in an output that is finished."""
    (tmp_path / f"a{suffix}").write_bytes(b"")
    before = os.open

    def full(path: Any, *given: Any, **options: Any) -> int:
        if str(path).endswith(suffix):
            raise OSError(errno.EMFILE, "Too many open files")
        return before(path, *given, **options)

    monkeypatch.setattr(os, "open", full)
    with pytest.raises(EnvironmentMissing, match=rf"a\{suffix}': Too many open files; raise the limit \(ulimit -n\)$"):
        predict(tiny_bundle, NumpySession(), tmp_path / f"a{suffix}", tmp_path / "out", quiet=True)


def test_a_file_that_may_not_grow_is_no_lost_disk(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentMissing) as raised, lost_disk_explained(tmp_path):
        raise OSError(errno.EFBIG, "File too large")
    again = "raise the limit of a file's size (ulimit -f), and run the same command again; finished shards are kept"
    assert str(raised.value) == f"cannot write to '{tmp_path}' any more ([Errno 27] File too large): {again}"


def test_too_many_open_files_are_no_lost_disk(tmp_path: Path) -> None:
    many = OSError(errno.EMFILE, "Too many open files")
    with pytest.raises(OSError, match="Too many") as raised, lost_disk_explained(tmp_path):
        raise many
    assert raised.value is many


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("reason", [errno.EDQUOT, errno.ENOSPC])
def test_no_room_for_the_files_beside_the_ledger_is_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: int, begun: bool
) -> None:
    """Of a limit of the number of files SQLite says what it says of too many open ones."""
    out = tmp_path / "out"
    if begun:
        with open_ledger(out, PredictOptions()) as ledger:
            ledger.create({}, [])

    def refused(*given: Any) -> None:
        raise sqlite_error(sqlite3.SQLITE_CANTOPEN)

    def full(path: Path, *given: Any) -> None:
        raise OSError(reason, os.strerror(reason), os.fspath(path))

    monkeypatch.setattr(Ledger, "_connect", refused)
    with pytest.raises(EnvironmentMissing, match=r"ulimit -n"):
        open_ledger(out, PredictOptions()).__enter__()
    monkeypatch.setattr(Path, "touch", full)
    with pytest.raises(OSError, match=f"{os.strerror(reason)}: '.*{LEDGER}'$"):
        open_ledger(out, PredictOptions()).__enter__()
    assert out.exists() == begun
    assert not list(tmp_path.rglob("images-*"))
