"""System shared memory (Triton's extension): tensors in POSIX shared memory of a client on the same machine.

A region is an open file of /dev/shm. Tensors are copied with `pread` and `pwrite` and never mapped: if a client
shrinks its memory, access to a mapping would kill the server with SIGBUS, while a read just returns fewer bytes. So a
region costs one file descriptor and no memory. Source: Triton's docs/protocol/extension_shared_memory.md.
"""

import os
import stat
import sys
import weakref
from dataclasses import dataclass
from typing import Any

from vitx.core.errors import EnvironmentMissing
from vitx.serve.errors import RequestError

_FOLDER = "/dev/shm"  # of Linux's shm_open
_OFFSETS = 2**63  # the kernel's file offsets are below it
_LONGEST_NAME = 255
_RESERVED = "triton_python_backend_shm_region_"  # of a Triton server on this machine


@dataclass(frozen=True, slots=True, weakref_slot=True)
class MemoryRegion:
    """A registered region. Its file is closed when it is unregistered and no request that was accepted needs it."""

    name: str
    key: str
    offset: int
    byte_size: int
    file: int

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Copy bytes to `offset`, a range that `SharedMemory.check` allowed; raise RequestError 400 if that fails."""
        begin = self.offset + offset
        try:
            if os.fstat(self.file).st_size < begin + len(data):  # a write would make it grow again
                raise _refused(f"shared memory region '{self.name}' was shrunk after it was registered")
            count = os.pwrite(self.file, data, begin)
        except OSError as error:
            raise _refused(f"cannot write shared memory region '{self.name}': {error.strerror}") from None
        if count != len(data):
            raise _refused(f"shared memory region '{self.name}' took {count} of {len(data)} bytes: /dev/shm is full")


class SharedMemory:
    """The regions that clients have registered. Not thread-safe: use it on the event loop.

    Every method raises RequestError: 400 for malformed or out-of-bounds arguments, 403 where the operating system
    forbids it, 404 for an unknown region or key, 409 for a name in use, 429 for too many regions, 501 where it is off.
    """

    def __init__(self, *, enabled: bool, max_regions: int = 128) -> None:
        """Raise EnvironmentMissing if `enabled` on another system than Linux."""
        if enabled and sys.platform != "linux":
            raise EnvironmentMissing(f"shared memory is offered on Linux only, this is {sys.platform}")
        self.enabled, self._max_regions = enabled, max_regions
        self._regions: dict[str, MemoryRegion] = {}
        self._open = weakref.WeakSet[MemoryRegion]()  # with those that only requests in flight still have

    def register(self, name: str, key: str, offset: int, byte_size: int) -> None:
        """Register bytes [offset, offset + byte_size) of the POSIX shared memory `key` as the region `name`."""
        self.check_enabled()
        if not 1 <= len(name) <= _LONGEST_NAME:
            raise _refused(f"a region's name has 1 to {_LONGEST_NAME} characters, this one {len(name)}")
        if name in self._regions:
            raise _refused(f"shared memory region '{name}' already in manager", status=409)
        if len(self._open) >= self._max_regions:
            raise _refused(f"{self._max_regions} regions are registered, no more are allowed: unregister some", 429)
        refusal = f"failed to register shared memory region '{name}': invalid args"
        _check_range(refusal, offset, byte_size)
        file = _open(key, name)
        try:
            _check_file(file, key)
            if offset + byte_size > (size := os.fstat(file).st_size):
                where = f"bytes {offset} to {offset + byte_size} are not all within '{key}', which has {size}"
                raise _refused(f"{refusal}: {where}")
        except BaseException:
            os.close(file)
            raise
        region = self._regions[name] = MemoryRegion(name, key, offset, byte_size, file)
        weakref.finalize(region, os.close, file)
        self._open.add(region)

    def unregister(self, name: str | None = None) -> None:
        """Unregister a region, or all with None. An unknown name is not an error, as in Triton."""
        self.check_enabled()
        for known in [*self._regions] if name is None else self._regions.keys() & {name}:
            del self._regions[known]

    def status(self, name: str | None = None) -> list[dict[str, Any]]:
        """The `name`, `key`, `offset` and `byte_size` of a region, or of all with None; none where memory is off."""
        regions = list(self._regions.values()) if name is None else [self._find(name)]
        return [{name: getattr(region, name) for name in ("name", "key", "offset", "byte_size")} for region in regions]

    def read(self, name: str, offset: int, byte_size: int) -> bytes:
        """Return a copy of `byte_size` bytes from `offset` in a region."""
        region = self.check(name, offset, byte_size)
        try:
            data = os.pread(region.file, byte_size, region.offset + offset)
        except OSError as error:
            raise _refused(f"cannot read shared memory region '{name}': {error.strerror}") from None
        if len(data) != byte_size:
            raise _refused(f"shared memory region '{name}' was shrunk after it was registered")
        return data

    def check_enabled(self) -> None:
        if not self.enabled:
            raise _refused("Client shared memory is disabled: start the server with --shared-memory", status=501)

    def _find(self, name: str) -> MemoryRegion:
        if (region := self._regions.get(name)) is None:
            raise _refused(f"unable to find system shared memory region '{name[:_LONGEST_NAME]}'", status=404)
        return region

    def check(self, name: str, offset: int, byte_size: int) -> MemoryRegion:
        """The region, which is open for as long as it is kept; raise RequestError for another range."""
        self.check_enabled()
        region = self._find(name)
        _check_range(f"shared memory region '{name[:80]}'", offset, byte_size)
        if offset + byte_size > region.byte_size:
            where = f"shared memory region '{name}', which has {region.byte_size}"
            raise _refused(f"bytes {offset} to {offset + byte_size} are not all within {where}")
        return region


def _open(key: str, region: str) -> int:
    """Open POSIX shared memory by its key, which may start with a slash, as for shm_open."""
    refusal = f"cannot register shared memory region '{region}'"
    if isinstance(key, str) and key.lstrip("/").startswith(_RESERVED):
        raise _refused(f"{refusal} with key '{key[:80]}' as the key contains the reserved prefix '{_RESERVED}'")
    file_name = key.removeprefix("/") if isinstance(key, str) else ""
    if not file_name or file_name in (".", "..") or "/" in file_name or "\0" in file_name:
        raise _refused(f"{refusal} - invalid shm key {str(key)[:80]!r}: expected a name, which may start with a slash")
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(f"{_FOLDER}/{file_name}".encode(), flags)
    except (FileNotFoundError, UnicodeEncodeError):
        raise _refused(f"unable to open shared memory region '{key[:80]}': it does not exist", status=404) from None
    except PermissionError:
        raise _foreign(key) from None
    except OSError as error:  # a directory, a link, a socket, a name that is too long
        raise _refused(f"unable to open shared memory region '{key[:80]}': {error.strerror}") from None


def _check_file(file: int, key: str) -> None:
    """Refuse a file that is not shared memory, or that its owner does not let the server's user read and write.

    The kernel checks the permissions too, but not for root: without this a client of a server that runs as root could
    read and overwrite the memory of every user.
    """
    info = os.fstat(file)
    if not stat.S_ISREG(info.st_mode):
        raise _refused(f"unable to open shared memory region '{key[:80]}': it is not shared memory")
    if info.st_uid == os.geteuid():
        return
    shift = 3 if info.st_gid in {os.getegid(), *os.getgroups()} else 0
    if info.st_mode >> shift & 0o6 != 0o6:
        raise _foreign(key)


def _check_range(refusal: str, offset: int, byte_size: int) -> None:
    for what, value, least in (("an offset", offset, 0), ("a size", byte_size, 1)):
        if type(value) is not int or not least <= value < _OFFSETS:
            raise _refused(f"{refusal}: expected {what} of {least} or more bytes")


def _refused(message: str, status: int = 400) -> RequestError:
    return RequestError(message, status=status, reason="shared_memory")


def _foreign(key: str) -> RequestError:
    return _refused(f"unable to open shared memory region '{key[:80]}': it belongs to another user", status=403)
