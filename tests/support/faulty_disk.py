"""A disk that records what is done to it and ends or fails a process at any call, for writes that are whole or not.

A kill leaves the folder as it is. A power cut leaves what was flushed: a file has the content of its last fsync, a
folder the names of its last fsync, and what was removed is gone (the disk may keep a removal and lose a rename).
"""

import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from vitx.core import files

# name in a folder → inode, or the target of a symbolic link
Names = dict[str, int | str]


class Killed(BaseException):
    """The process ends here: no later call of the disk does anything, of clean-up neither."""


class Disk:
    """What was done below `root`, from the moment on when everything there was flushed.

    calls: "fsync NAME", "replace NAME" and so on; a random suffix is *, the root is (root). kill_after: the
    number of calls, from 1. fail_at: the call that raises an OSError instead.
    """

    def __init__(self, root: Path, *, kill_after: int | None = None, fail_at: int | None = None) -> None:
        self.calls: list[str] = []
        self._root, self._kill_after, self._fail_at = root, kill_after, fail_at
        self._killed = False
        self._contents: dict[int, bytes] = {}
        self._names: dict[int, Names] = {}
        # Kept open, so that the number of a removed inode is not given to another file.
        self._held: list[int] = []
        for path in (root, *root.rglob("*")):
            if not path.is_symlink():
                self._flush(path)

    def after_power_cut(self, into: Path) -> Path:
        """Write what a power cut leaves now into the new folder `into`."""
        self._write(self._root.stat().st_ino, into)
        return into

    def close(self) -> None:
        for descriptor in self._held:
            os.close(descriptor)

    def call(self, operation: str, path: Any, act: Callable[[], Any]) -> Any:
        if self._killed:
            raise Killed
        if operation == "mkdir" and os.path.isdir(path):
            return act()  # which raises
        if len(self.calls) + 1 == self._fail_at:
            self._fail_at = None
            self.calls.append(f"{operation} {self._name(path)}")
            raise OSError(errno.EIO, os.strerror(errno.EIO), os.fspath(path))
        result = act()
        self.calls.append(f"{operation} {self._name(path)}")
        if len(self.calls) == self._kill_after:
            self._killed = True
            raise Killed
        return result

    def _name(self, path: Any) -> str:
        name = str(os.path.basename(os.fspath(path)))
        if Path(path) == self._root:
            return "(root)"
        return name.rpartition(".")[0] + ".*" if name.startswith(".") else name

    def fsync(self, descriptor: int) -> None:
        inode = os.fstat(descriptor).st_ino
        path = next(one for one in (self._root, *self._root.rglob("*")) if one.lstat().st_ino == inode)
        self.call("fsync", path, lambda: self._flush(path))

    def removing(self, operation: str, remove: Callable[..., None]) -> Callable[..., None]:
        def removed(path: Any, *, dir_fd: int | None = None) -> None:
            folder = os.stat(os.path.dirname(os.fspath(path)) or ".") if dir_fd is None else os.fstat(dir_fd)

            def act() -> None:
                remove(path, dir_fd=dir_fd)
                self._names.get(folder.st_ino, {}).pop(os.path.basename(os.fspath(path)), None)

            self.call(operation, path, act)

        return removed

    def _flush(self, path: Path) -> None:
        """Not a real fsync, which takes a thousand times as long."""
        inode = self._hold(path)
        if not path.is_dir():
            self._contents[inode] = path.read_bytes()
            return
        names: Names = {}
        for one in path.iterdir():
            names[one.name] = os.readlink(one) if one.is_symlink() else self._hold(one)
            if one.is_dir() and not one.is_symlink():
                self._names.setdefault(one.stat().st_ino, {})  # a name without content, unless it is flushed itself
        self._names[inode] = names

    def _hold(self, path: Path) -> int:
        self._held.append(os.open(path, os.O_RDONLY))
        return os.fstat(self._held[-1]).st_ino

    def _write(self, inode: int, path: Path) -> None:
        if inode not in self._names:
            path.write_bytes(self._contents.get(inode, b""))  # a name without content, as of a file never flushed
            return
        path.mkdir()
        for name, found in self._names[inode].items():
            if isinstance(found, str):
                (path / name).symlink_to(found)
            else:
                self._write(found, path / name)


@contextmanager
def _without_real_fsync() -> Iterator[None]:
    """A hundred of them take a second, and no test here cuts the power of this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@contextmanager
def faulty_disk(root: Path, *, kill_after: int | None = None, fail_at: int | None = None) -> Iterator[Disk]:
    """Inside, what this process does to its files goes through a `Disk`, and a kill ends the block."""
    disk = Disk(root, kill_after=kill_after, fail_at=fail_at)

    def through(operation: str, act: Callable[..., Any], which: int) -> Callable[..., Any]:
        """which: the argument that names the path."""
        return lambda *given, **options: disk.call(operation, given[which], lambda: act(*given, **options))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", disk.fsync)
        for operation, which in (
            ("replace", 1),
            ("rename", 1),
            ("link", 1),
            ("symlink", 1),
            ("mkdir", 0),
            ("chmod", 0),
        ):
            patch.setattr(os, operation, through(operation, getattr(os, operation), which))
        for operation in ("unlink", "remove", "rmdir"):
            patch.setattr(os, operation, disk.removing(operation, getattr(os, operation)))
        patch.setattr(files, "_exchange", through("exchange", files._exchange, 1))
        try:
            yield disk
        except Killed:
            pass
        finally:
            disk.close()


@contextmanager
def unlistable(name: str, error: OSError) -> Iterator[None]:
    """Inside, folders of this name raise `error` when they are listed; tests may run as root, who may list all."""
    real = os.scandir

    def guarded(path: Any) -> Any:
        if str(path).rstrip("/").endswith(name):
            raise error
        return real(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "scandir", guarded)
        yield


@_without_real_fsync()
def states_at_every_step(
    folder: Path, prepare: Callable[[Path], object], change: Callable[[Path], object], read: Callable[[Path], Any]
) -> tuple[list[str], list[Any], list[Any]]:
    """Kill `change` after each of its calls: the calls, what `read` finds after each kill, and after a power cut then.

    prepare, change and read: called with a folder; `prepare` once, its result is copied. The first of each list of
    states is of no call at all, so each has one more item than there are calls.
    """
    prepare(folder / "old")
    shutil.copytree(folder / "old", folder / "whole", symlinks=True)
    with faulty_disk(folder / "whole") as whole:
        change(folder / "whole")
    before = read(folder / "old")
    after_kill, after_power_cut = [before], [before]
    for step in range(1, len(whole.calls) + 1):
        here = folder / f"kill-{step}"
        shutil.copytree(folder / "old", here, symlinks=True)
        with faulty_disk(here, kill_after=step) as disk:
            change(here)
            raise AssertionError(f"{len(disk.calls)} calls, and none was the one to kill after: {disk.calls}")
        after_power_cut.append(read(disk.after_power_cut(folder / f"cut-{step}")))
        after_kill.append(read(here))
    return whole.calls, after_kill, after_power_cut


def assert_old_or_new(
    folder: Path, prepare: Callable[[Path], object], change: Callable[[Path], object], read: Callable[[Path], Any]
) -> list[str]:
    """Fail unless a kill or a power cut leaves the old state, or from some call on the new one; return the calls.

    When the last call is done the new state is there, even after a power cut.
    """
    calls, after_kill, after_power_cut = states_at_every_step(folder, prepare, change, read)
    old, new = after_kill[0], read(folder / "whole")
    assert old != new
    for states in (after_kill, after_power_cut):
        switched = states.index(new) if new in states else len(states)
        expected = [old] * switched + [new] * (len(states) - switched)
        assert states == expected, list(zip(["(nothing)", *calls], states, strict=True))
        assert states[-1] == new, f"not on the disk at the end: {calls}"
    return calls


@_without_real_fsync()
def failures_at_every_step(
    folder: Path, prepare: Callable[[Path], object], change: Callable[[Path], object], read: Callable[[Path], Any]
) -> list[tuple[str, Any, list[str]]]:
    """Let each call of `change` fail: the call, what `read` finds then, and the names of hidden files left behind."""
    prepare(folder / "old")
    shutil.copytree(folder / "old", folder / "whole", symlinks=True)
    with faulty_disk(folder / "whole") as whole:
        change(folder / "whole")
    found = []
    for step, call in enumerate(whole.calls, 1):
        here = folder / f"failure-{step}"
        shutil.copytree(folder / "old", here, symlinks=True)
        with faulty_disk(here, fail_at=step), pytest.raises(OSError, match="Input/output error"):
            change(here)
        left = sorted(path.name for path in here.rglob(".*") if not stat.S_ISLNK(path.lstat().st_mode))
        found.append((call, read(here), left))
    return found
