"""What the server changes for its whole process."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from server_process import HANG
from vitx.serve.process import process_settings
from vitx.serve.process.process_settings import return_freed_memory

MIB = 2**20
FIRST_IMAGES = """
import sys
from vitx.serve.process.process_settings import configure_process
configure_process()
from vitx.core.preprocess import ImageError, decode
before = {*sys.modules}
for start in (b"RIFF....WEBP", b"II*\\0", b"\\xff\\xd8\\xff", b"no image"):
    try:
        decode(start)
    except ImageError:
        pass
print({*sys.modules} - before)
"""


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def freed_below_a_kept_one() -> bytes:
    """Free 100 MiB of the heap, and return what lies above them, so that the C library keeps them."""
    freed = [bytes(100_000) for _ in range(1000)]
    kept = bytes(100_000)
    del freed
    return kept


@pytest.mark.skipif(sys.platform != "linux", reason="malloc_trim is glibc's")
@pytest.mark.parametrize("busy", [False, True])
def test_freed_memory_goes_back_to_the_system_at_once_or_under_load_later(
    monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    monkeypatch.setattr(process_settings, "_TRIM_SECONDS", 0.001)

    async def trimmed() -> int:
        kept, task = freed_below_a_kept_one(), asyncio.create_task(return_freed_memory(lambda: busy))
        before = resident()
        while resident() > before - 50 * MIB:
            await asyncio.sleep(0.001)
        task.cancel()
        return len(kept)

    assert asyncio.run(asyncio.wait_for(trimmed(), HANG)) == 100_000


def test_under_load_it_is_not_every_second(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    asked: list[bool] = []

    async def nothing(seconds: float) -> None:
        if len(asked) == 90:
            raise asyncio.CancelledError

    async def called(work: object, *arguments: int) -> None:
        calls.append(len(asked))

    monkeypatch.setattr(asyncio, "sleep", nothing)
    monkeypatch.setattr(asyncio, "to_thread", called)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(return_freed_memory(lambda: not asked.append(True)))  # type: ignore[func-returns-value]
    assert calls == [30, 60, 90]


def test_the_first_image_imports_nothing() -> None:
    """Pillow imports its formats when it first needs them: the first image of a warm server waited for that."""
    done = subprocess.run([sys.executable, "-c", FIRST_IMAGES], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
