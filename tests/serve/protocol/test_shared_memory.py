"""Regions of POSIX shared memory: bounds, names, memory of others, and memory that changes under the server."""

import errno
import os
import socket
import sys
import uuid
from collections.abc import Iterator
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import pytest

from server_process import open_files
from vitx.core.errors import EnvironmentMissing
from vitx.serve.errors import RequestError
from vitx.serve.protocol.shared_memory import SharedMemory

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="shared memory is offered on Linux only")


@pytest.fixture
def block() -> Iterator[shared_memory.SharedMemory]:
    """4,096 bytes of POSIX shared memory, as `tritonclient.utils.shared_memory` creates it."""
    made = shared_memory.SharedMemory(f"vitx-{uuid.uuid4().hex}", create=True, size=4096)
    yield made
    made.close()
    made.unlink()


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    made = SharedMemory(enabled=True, max_regions=3)
    yield made
    made.unregister()


def content(block: shared_memory.SharedMemory) -> memoryview:
    assert block.buf is not None
    return block.buf


def path_of(block: shared_memory.SharedMemory) -> Path:
    return Path("/dev/shm", block.name)


def refusal(call: Any, *arguments: object) -> tuple[int, str]:
    with pytest.raises(RequestError) as error:
        call(*arguments)
    assert error.value.reason == "shared_memory"
    return error.value.status, str(error.value)


def write(memory: SharedMemory, name: str, offset: int, data: bytes) -> None:
    memory.check(name, offset, len(data)).write(offset, data)


@linux_only
@pytest.mark.parametrize("slash", ["", "/"])
def test_bytes_go_in_and_out(block: shared_memory.SharedMemory, memory: SharedMemory, slash: str) -> None:
    content(block)[110:114] = b"abcd"
    memory.register("input", slash + block.name, 100, 50)
    assert memory.status() == memory.status("input")
    assert memory.status() == [{"name": "input", "key": slash + block.name, "offset": 100, "byte_size": 50}]
    assert bytes(memory.read("input", 10, 4)) == b"abcd"
    write(memory, "input", 46, b"wxyz")
    assert bytes(content(block)[145:151]) == b"\0wxyz\0"


@linux_only
def test_what_was_read_stays_when_the_client_writes(block: shared_memory.SharedMemory, memory: SharedMemory) -> None:
    memory.register("input", block.name, 0, 8)
    copy = memory.read("input", 0, 8)
    content(block)[:8] = b"changed!"
    assert bytes(copy) == bytes(8)


@linux_only
def test_names_are_unique_and_can_be_given_back(block: shared_memory.SharedMemory, memory: SharedMemory) -> None:
    memory.register("a", block.name, 0, 10)
    assert refusal(memory.register, "a", block.name, 0, 10) == (409, "shared memory region 'a' already in manager")
    memory.unregister("a")
    memory.unregister("a")  # no error, as in Triton
    memory.register("a", block.name, 0, 10)
    memory.register("b", block.name, 10, 10)
    memory.unregister()
    assert memory.status() == []
    assert refusal(memory.status, "a") == (404, "unable to find system shared memory region 'a'")
    assert refusal(memory.read, "a", 0, 1)[0] == 404


@linux_only
def test_regions_are_limited_and_leave_no_file_open(block: shared_memory.SharedMemory, memory: SharedMemory) -> None:
    before = open_files(block.name)
    for name in "abc":
        memory.register(name, block.name, 0, 10)
    status, text = refusal(memory.register, "d", block.name, 0, 10)
    assert (status, text) == (429, "3 regions are registered, no more are allowed: unregister some")
    held = memory.check("a", 0, 10)  # as a request in flight does
    memory.unregister()
    for name in "de":
        memory.register(name, block.name, 0, 10)
    assert refusal(memory.register, "f", block.name, 0, 10)[0] == 429
    del held
    memory.register("f", block.name, 0, 10)
    memory.unregister()
    assert refusal(memory.register, "d", block.name, 0, 4097)[0] == 400
    assert open_files(block.name) == before


@linux_only
@pytest.mark.parametrize(
    ("offset", "byte_size", "expected"),
    [
        (0, 4097, "bytes 0 to 4097 are not all within"),
        (4096, 1, "bytes 4096 to 4097 are not all within"),
        (2**62, 2**62, f"bytes {2**62} to {2**63} are not all within"),
        (-1, 4, "expected an offset of 0 or more bytes"),
        (0, 0, "expected a size of 1 or more bytes"),
        (0, -1, "expected a size of 1 or more bytes"),
        (2**63, 1, "expected an offset of 0 or more bytes"),
        (0, 2**63, "expected a size of 1 or more bytes"),
        (10**4300 - 1, 1, "expected an offset of 0 or more bytes"),  # their sum has more digits than Python writes
        (True, 4, "expected an offset of 0 or more bytes"),
        ("0", 4, "expected an offset of 0 or more bytes"),
        (0, 4.0, "expected a size of 1 or more bytes"),
    ],
    ids=str,
)
def test_ranges_outside_the_memory_are_refused(
    block: shared_memory.SharedMemory, memory: SharedMemory, offset: Any, byte_size: Any, expected: str
) -> None:
    status, text = refusal(memory.register, "a", block.name, offset, byte_size)
    assert status == 400
    assert text.startswith(f"failed to register shared memory region 'a': invalid args: {expected}")
    memory.register("a", block.name, 0, 4096)
    for call in (memory.read, memory.check):
        status, text = refusal(call, "a", offset, byte_size)
        assert status == 400
        assert expected in text


@linux_only
def test_a_range_ends_with_its_region(block: shared_memory.SharedMemory, memory: SharedMemory) -> None:
    memory.register("a", block.name, 0, 100)
    text = "bytes 96 to 101 are not all within shared memory region 'a', which has 100"
    assert refusal(memory.read, "a", 96, 5) == (400, text)
    assert refusal(write, memory, "a", 96, b"12345") == (400, text)


@linux_only
@pytest.mark.parametrize(
    "key", ["", "/", ".", "..", "/..", "//etc/passwd", "../etc/passwd", "a/b", "/a/b", "a\0b", "x" * 300, 7, None]
)
def test_malformed_keys_are_refused(memory: SharedMemory, key: Any) -> None:
    status, text = refusal(memory.register, "a", key, 0, 1)
    assert status == 400
    if len(str(key)) < 80:
        assert text.startswith(f"cannot register shared memory region 'a' - invalid shm key {str(key)!r}")


@linux_only
@pytest.mark.parametrize("slashes", ["", "/", "///"])
def test_the_memory_of_a_triton_server_is_not_a_clients(memory: SharedMemory, slashes: str) -> None:
    key = slashes + "triton_python_backend_shm_region_0"
    text = f"cannot register shared memory region 'a' with key '{key}' as the key contains the reserved prefix "
    assert refusal(memory.register, "a", key, 0, 1) == (400, text + "'triton_python_backend_shm_region_'")


@linux_only
@pytest.mark.parametrize("key", ["/vitx-missing", "\ud800"])
def test_an_unknown_key_is_404(memory: SharedMemory, key: str) -> None:
    assert refusal(memory.register, "a", key, 0, 1)[0] == 404


@linux_only
@pytest.mark.parametrize("kind", ["folder", "link", "pipe", "socket"])
def test_what_is_no_shared_memory_is_refused(memory: SharedMemory, kind: str) -> None:
    path = Path("/dev/shm", f"vitx-{uuid.uuid4().hex}")
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to("/etc/passwd")
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    why = {"folder": "Is a directory", "pipe": "it is not shared memory", "socket": "No such device or address"}
    text = f"unable to open shared memory region '{path.name}': {why.get(kind, 'Too many levels of symbolic links')}"
    try:
        assert refusal(memory.register, "a", path.name, 0, 1) == (400, text)
    finally:
        path.rmdir() if kind == "folder" else path.unlink()


@linux_only
def test_memory_of_another_user_is_refused(block: shared_memory.SharedMemory, memory: SharedMemory) -> None:
    """To root the kernel refuses nothing, so the server itself must; to others the kernel refuses mode 0."""
    if os.geteuid() == 0:
        os.chown(path_of(block), 54321, 54321)
    else:
        path_of(block).chmod(0)
    text = f"unable to open shared memory region '/{block.name}': it belongs to another user"
    assert refusal(memory.register, "a", "/" + block.name, 0, 1) == (403, text)
    if os.geteuid() == 0:
        path_of(block).chmod(0o606)  # its owner has opened it to everyone
        memory.register("a", block.name, 0, 1)


@linux_only
def test_what_the_system_refuses_is_the_clients_error(
    block: shared_memory.SharedMemory, memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*given: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    memory.register("a", block.name, 0, 8)
    for name in ("open", "pread", "pwrite"):
        monkeypatch.setattr(os, name, refused)
    text = f"unable to open shared memory region '{block.name}': it belongs to another user"
    assert refusal(memory.register, "b", block.name, 0, 1) == (403, text)
    assert refusal(memory.read, "a", 0, 8) == (400, "cannot read shared memory region 'a': Permission denied")
    assert refusal(write, memory, "a", 0, b"x") == (400, "cannot write shared memory region 'a': Permission denied")


@linux_only
@pytest.mark.skipif(sys.platform != "win32" and os.geteuid() != 0, reason="only root can give a file away")
@pytest.mark.parametrize(("mode", "allowed"), [(0o660, True), (0o640, False), (0o620, False), (0o606, False)])
def test_memory_of_another_user_in_the_servers_group_is_the_groups(
    block: shared_memory.SharedMemory, memory: SharedMemory, mode: int, allowed: bool
) -> None:
    os.chown(path_of(block), 54321, os.getegid())
    path_of(block).chmod(mode)
    if allowed:
        memory.register("a", block.name, 0, 1)
    else:
        assert refusal(memory.register, "a", block.name, 0, 1)[0] == 403


@linux_only
def test_a_name_has_1_to_255_characters(block: shared_memory.SharedMemory, memory: SharedMemory) -> None:
    memory.register("n" * 255, block.name, 0, 1)
    for name in ("", "n" * 256):
        text = f"a region's name has 1 to 255 characters, this one {len(name)}"
        assert refusal(memory.register, name, block.name, 0, 1) == (400, text)


@linux_only
def test_a_key_that_is_not_unicode_is_unknown(memory: SharedMemory) -> None:
    """Else the status of all regions would hold a text that no reply can carry."""
    path = Path(os.fsdecode(b"/dev/shm/vitx-\x80"))
    path.write_bytes(bytes(8))
    try:
        assert refusal(memory.register, "a", path.name, 0, 8)[0] == 404
    finally:
        path.unlink()


@linux_only
def test_a_write_may_end_with_the_memory_and_must_be_whole(
    block: shared_memory.SharedMemory, memory: SharedMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.register("a", block.name, 4000, 96)
    write(memory, "a", 92, b"last")
    assert bytes(content(block)[4092:]) == b"last"
    assert bytes(memory.read("a", 92, 4)) == b"last"
    monkeypatch.setattr(os, "pwrite", lambda file, data, begin: len(data) - 1)
    text = "shared memory region 'a' took 3 of 4 bytes: /dev/shm is full"
    assert refusal(write, memory, "a", 92, b"last") == (400, text)


@linux_only
def test_memory_that_shrinks_is_an_error_and_no_crash(block: shared_memory.SharedMemory, memory: SharedMemory) -> None:
    memory.register("a", block.name, 0, 4096)
    os.truncate(path_of(block), 100)
    text = "shared memory region 'a' was shrunk after it was registered"
    assert refusal(memory.read, "a", 0, 4096) == (400, text)
    assert refusal(write, memory, "a", 99, b"ab") == (400, text)
    assert path_of(block).stat().st_size == 100  # the refused write did not make it grow
    assert bytes(memory.read("a", 0, 100)) == bytes(100)
    os.truncate(path_of(block), 4096)


@linux_only
def test_memory_that_was_unlinked_can_still_be_used(memory: SharedMemory) -> None:
    made = shared_memory.SharedMemory(create=True, size=16)
    memory.register("a", made.name, 0, 16)
    made.unlink()
    write(memory, "a", 0, b"still")
    assert bytes(content(made)[:5]) == b"still"
    made.close()


def test_it_is_off_unless_enabled() -> None:
    memory = SharedMemory(enabled=False)
    expected = (501, "Client shared memory is disabled: start the server with --shared-memory")
    for call, arguments in (
        (memory.register, ("a", "/a", 0, 1)),
        (memory.unregister, ()),
        (memory.read, ("a", 0, 1)),
    ):
        assert refusal(call, *arguments) == expected
    assert memory.status() == []  # as in Triton: a client may ask


def test_other_systems_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "win32")
    SharedMemory(enabled=False)
    with pytest.raises(EnvironmentMissing, match="offered on Linux only, this is win32"):
        SharedMemory(enabled=True)
