"""Files that appear whole: written under a temporary name, flushed to the disk, renamed, and the folder flushed.

All that must outlive a power cut is written by these functions: no other file calls os.fsync, os.replace or os.rename.
"""

import ctypes
import errno
import glob
import hashlib
import json
import os
import re
import shutil
import stat
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vitx.core.console import log
from vitx.core.errors import FULL_DISK, CheckFailed, EnvironmentMissing, InputError
from vitx.core.page import fields

_UMASK = threading.Lock()
_ESCAPED_BYTE = re.compile(r"\\x[0-9a-f]{2}")
_JSON_PIECE = 4096  # entries of a list: `json.dumps` of a million numbers holds all other threads up for 0.8 s


class Record(BaseModel):
    """Base of every schema that vitx writes to a file: immutable, and a field it does not know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    def _repr_html_(self) -> str:
        """For notebooks: a row for each field."""
        return fields((name, getattr(self, name)) for name in type(self).model_fields)


RecordT = TypeVar("RecordT", bound=Record)


def sha256_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Flush a file or a folder entry to the disk, where the platform can."""
    if path.is_dir() and sys.platform == "win32":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(temporary: Path, path: Path) -> None:
    """Put a flushed file, or a link, in the place of `path` in one step; it stays there after a power cut."""
    os.replace(temporary, path)
    sync(path.parent)


def make_folder(path: Path) -> None:
    """Make a folder, and those above it, unless they exist; a power cut does not take a new one away."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    with _made(path):
        path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync(folder.parent)


def is_made_of_url(path: Path | str) -> bool:
    """Whether a path was a URL, before a Path made one slash of two; a drive has one letter."""
    return re.match("[A-Za-z][A-Za-z0-9+.-]+:/", str(path)) is not None


def refuse_url(path: Path, remedy: str = "copy it to the store afterwards") -> None:
    """Raise InputError for a URL, which would be, or become, a folder called `s3:` here."""
    if is_made_of_url(path):
        given = str(path).replace(":/", "://", 1)
        raise InputError(f"'{given}' is a URL: expected a path of this machine; {remedy}")


@contextmanager
def _made(path: Path) -> Iterator[None]:
    """Name `path` in an OSError, not a temporary file beside it; below /proc the system says that this is missing."""
    try:
        yield
    except FileNotFoundError as error:
        raise PermissionError(errno.EACCES, "nothing can be made there", str(path)) from error
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def check_folder(path: Path) -> None:
    """Raise InputError where no folder can be at `path`: it is a URL, or something else is there or above it."""
    refuse_url(path)
    real = Path(os.path.realpath(path))  # unlike resolve it takes a link that leads to itself
    found = next(place for place in (real, *real.parents) if os.path.lexists(place))
    if not found.is_dir():
        raise InputError(f"'{path}' cannot be a folder: '{found}' is none")


def is_utf8(name: str) -> bool:
    """Whether a name is one in UTF-8; of another encoding Python has surrogates in the place of its bytes."""
    return not any("\ud800" <= letter <= "\udfff" for letter in name)


def escape_invalid_utf8(name: str) -> str:
    """A file name with bytes that are not UTF-8 as \\xNN; one that then has a \\xNN has its own backslashes doubled."""
    if name.isascii() and "\\x" not in name:  # most names, a million times
        return name
    doubled = name.replace("\\", "\\\\").encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return doubled if _ESCAPED_BYTE.search(doubled) else name


def unescape_invalid_utf8(text: str) -> str:
    """The file name of which `escape_invalid_utf8` made this text."""
    if not _ESCAPED_BYTE.search(text):
        return text
    single = re.sub(rb"\\(\\|x([0-9a-f]{2}))", lambda m: bytes.fromhex(m[2].decode()) if m[2] else b"\\", text.encode())
    return single.decode("utf-8", "surrogateescape")


def check_file(path: Path, example: str) -> None:
    """Raise InputError or OSError where no file can be written to `path`, before minutes are spent on its content."""
    if path.is_dir():
        raise InputError(f"'{path}' is a folder: expected a file name, such as {path / example}")
    check_folder(path.parent)
    real = Path(os.path.realpath(path))
    if real.exists() and not real.is_file():  # a device or a pipe is written to, and no other file made beside it
        return
    with _made(path):
        tempfile.TemporaryFile(dir=next(folder for folder in real.parents if folder.exists())).close()


def write_bytes(path: Path, data: bytes) -> None:
    """Write a whole file or leave the old one untouched; a link stays, and a device or a pipe is written to."""
    if path.exists() and not (path.is_file() or path.is_dir()):  # else root's `--report /dev/null` takes its place
        path.write_bytes(data)
        return
    if path.is_symlink():
        path = Path(os.path.realpath(path))
    make_folder(path.parent)
    with _made(path):
        descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        apply_umask(Path(temporary))
        rename(Path(temporary), path)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None:  # as on a full disk
            error.filename = str(path)
        Path(temporary).unlink(missing_ok=True)
        raise


def write_bytes_once(path: Path, data: bytes) -> None:
    """Write a whole file unless it is there: of writers on any machines that share a folder one is first."""
    first = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    write_bytes(first, data)
    try:
        with suppress(FileExistsError):
            os.link(first, path)
    finally:
        first.unlink()
    sync(path.parent)


def remove_unfinished(path: Path) -> None:
    """Remove the temporary files that killed writers of `path` left beside it. Nobody may be writing `path` now."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*"):
        left.unlink(missing_ok=True)


def cache_folder() -> Path:
    """`$VITX_CACHE`, else `vitx` in the user's cache folder of this system.

    Raises EnvironmentMissing for a user without a home: a container may run as one that the system does not know.
    """
    if given := os.environ.get("VITX_CACHE"):
        return Path(os.path.expanduser(given))  # in a file of variables no shell does
    try:
        if sys.platform == "win32":
            return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData/Local")) / "vitx"
        if sys.platform == "darwin":
            return Path.home() / "Library/Caches/vitx"
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vitx"
    except RuntimeError:
        raise EnvironmentMissing("no home folder: set VITX_CACHE to a folder that can be written") from None


def apply_umask(path: Path) -> None:
    """Give a file the mode of any new one: mkstemp and safetensors write for the owner alone."""
    path.chmod(0o666 & ~_umask())


def _umask() -> int:
    """The process's umask, which the system tells only when it is set: by one thread at a time, or 0 would stay."""
    with _UMASK:
        mask = os.umask(0)
        os.umask(mask)
    return mask


def write_json(path: Path, value: Any) -> None:
    """Write JSON (a `Record` or plain values), whole or not at all."""
    write_bytes(path, json_bytes(value.model_dump(mode="json") if isinstance(value, BaseModel) else value))


def json_bytes(plain: Any) -> bytes:
    """Plain values as `write_json` writes them."""
    return (json.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()


def compact_json(value: Any) -> bytes:
    """JSON without white space, lists in dicts and in lists of these in pieces; raise ValueError where not finite."""
    if isinstance(value, dict):
        return b"{%b}" % b",".join(b"%b:%b" % (_dumps(name), compact_json(entry)) for name, entry in value.items())
    if not isinstance(value, list):
        return _dumps(value)
    if value and isinstance(value[0], dict) and any(isinstance(entry, list) for entry in value[0].values()):
        return b"[%b]" % b",".join(map(compact_json, value))
    pieces = (value[start : start + _JSON_PIECE] for start in range(0, len(value), _JSON_PIECE))
    return b"[%b]" % b",".join(_dumps(piece)[1:-1] for piece in pieces)


def _dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def read_record(path: Path, schema: type[RecordT]) -> RecordT:
    """Read a JSON file into `schema`; raise InputError naming the file and the field that is wrong."""
    if not path.is_file():
        raise InputError(f"{path} does not exist")
    try:
        return schema.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise InputError(f"{path} is not a valid {schema.__name__}: {first_fault(error, 'the file')}") from None


def first_fault(error: ValidationError, whole: str) -> str:
    """The field that is wrong, or `whole` where none can be named, and why."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or whole}: {first['msg']}"


class SealedRecord(Record):
    """A record whose `sha256` is that of its own file with the field empty: a changed byte is found by itself."""

    sha256: str = Field(default="", description="of this file's bytes with this field empty")

    def sealed(self) -> Self:
        """The same record with its own digest."""
        return self.model_copy(update={"sha256": self.digest()})

    def digest(self) -> str:
        return sha256_bytes(self.model_copy(update={"sha256": ""}).file_bytes())

    def file_bytes(self) -> bytes:
        """As `write_json` writes it."""
        return json_bytes(self.model_dump(mode="json"))


SealedT = TypeVar("SealedT", bound=SealedRecord)


def read_sealed(path: Path, schema: type[SealedT], *, remedy: str) -> SealedT:
    """Read a sealed record; raise InputError for any other file, CheckFailed for one that was changed."""
    return require_seal(path, read_record(path, schema), remedy=remedy)


def require_seal(path: Path, record: SealedT, *, remedy: str) -> SealedT:
    """Return a record that was read from a file; raise CheckFailed unless the file is sealed, and still that record.

    Every byte counts, blanks too: the file must be what `write_json` makes of its content. The digest finds damage and
    careless edits. It is not a signature: who can write the file can compute the digest.
    """
    with suppress(ValueError):  # a number with a changed exponent may be infinite, which no JSON can hold
        if path.read_bytes() == record.file_bytes() and record.sha256 == record.digest():
            return record
    raise CheckFailed(f"{path} was changed after it was written (its own digest differs): {remedy}")


@contextmanager
def staged_folder(target: Path, *, replaces: bool = True) -> Iterator[Path]:
    """Yield an empty folder; when the block ends it becomes `target`, and if the block raises it is removed.

    Of a link that is what it leads to: the link stays. Raises InputError where no folder can be, at a mount point, and
    unless it `replaces` the old one, where another process has made one in the meantime. Of a full disk the error names
    `target`.
    """
    check_folder(target)
    target = target.resolve()
    if os.path.ismount(target):  # such as a container's volume: the system lets nothing be renamed to it
        raise InputError(f"'{target}' is a mount point, which cannot be replaced: give a folder below it")
    make_folder(target.parent)
    with _made(target):
        stage = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        group = stage.stat().st_mode & stat.S_ISGID  # within a folder of a group all that is new is the group's
        stage.chmod(0o777 & ~_umask() | group)
        yield stage
        for path in (*stage.rglob("*"), stage):
            if path.is_file() or path.is_dir():  # a folder too: its files' names are in it
                sync(path)
        if replaces:
            replace_folder(stage, target)
        else:
            _place_folder(stage, target)
    except OSError as error:
        if error.errno in FULL_DISK and Path(error.filename2 or error.filename or stage).is_relative_to(stage):
            raise OSError(error.errno, error.strerror, str(target)) from None  # the stage is gone when this is read
        raise
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _place_folder(new: Path, target: Path) -> None:
    with suppress(OSError):
        target.rmdir()  # an empty one, which Windows does not replace
    if not _renamed(new, target):
        raise InputError(f"'{target}' was made by another process in the meantime: choose another folder")
    sync(target.parent)


def _renamed(new: Path, target: Path) -> bool:
    """Rename a folder; return False where `target` is one that is not empty, perhaps since a moment ago."""
    try:
        os.rename(new, target)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        return False
    return True


def replace_folder(new: Path, target: Path) -> None:
    """Put the folder `new` in the place of `target`; on Linux in one step, so that `target` always exists."""
    old: Path | None
    if not target.exists() and _renamed(new, target):
        old = None
    elif _exchange(new, target):
        old = new
    else:
        old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
        try:
            os.rename(target, old / target.name)
            os.rename(new, target)
        except BaseException:  # Ctrl-C too: between the two there is no target
            with suppress(OSError):
                if not target.exists():
                    os.rename(old / target.name, target)
                old.rmdir()
            raise
    sync(target.parent)  # before the old folder goes: a power cut may undo a rename that is not on the disk
    if old is not None:
        try:
            shutil.rmtree(old)
        except PermissionError as error:  # another user's, in a folder of a group
            log(f"what was at '{target}' is left in '{old}': {error.strerror}")


def _exchange(first: Path, second: Path) -> bool:
    """Swap two folders atomically; return False where the platform or the file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None) if sys.platform.startswith("linux") else None
    at_fdcwd, rename_exchange = -100, 2
    given = at_fdcwd, os.fsencode(first), at_fdcwd, os.fsencode(second), rename_exchange
    return renameat2 is not None and bool(renameat2(*given) == 0)


def link_atomically(link: Path, target: str) -> None:
    """Make `link` a symbolic link to `target` (relative to it), replacing an older link in one step."""
    temporary = link.with_name(f".{link.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    rename(temporary, link)
