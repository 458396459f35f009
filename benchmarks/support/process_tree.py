"""Time and memory of a command with all its processes, on Linux: for benchmarks of whole commands."""

import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

SAMPLING_SECONDS = 0.02
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
# glibc gives freed memory back at once, so that resident memory is what is held and not what once was.
TRIMMED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}


def seconds_of(command: Sequence[str]) -> float:
    """Wall seconds of a command that succeeds, one thread each; raises RuntimeError with its errors."""
    start = time.perf_counter()
    finished = subprocess.run(
        command, env={**os.environ, **ONE_THREAD}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    seconds = time.perf_counter() - start
    if finished.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{finished.stderr}")
    return seconds


def peak_resident_bytes(command: Sequence[str]) -> int:
    """The largest sum of the resident memory of a command and its descendants, sampled every 20 ms.

    Pages that processes share count once in each, so it is an upper bound. Raises RuntimeError as `seconds_of`.
    """
    peak = 0
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, env={**os.environ, **ONE_THREAD, **TRIMMED}, stdout=subprocess.DEVNULL, stderr=errors
        )
        while process.poll() is None:
            peak = max(peak, sum(map(resident_bytes, family(process.pid))))
            time.sleep(SAMPLING_SECONDS)
        if process.returncode:
            errors.seek(0)
            raise RuntimeError(f"{' '.join(command)} failed:\n{errors.read()}")
    return peak


def family(pid: int) -> list[int]:
    """A process and its descendants, those of them that still live."""
    children = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children += [int(child) for child in path.read_text().split()]
        except OSError:
            continue
    return [pid, *(descendant for child in children for descendant in family(child))]


def resident_bytes(pid: int) -> int:
    """0 for a process that is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")
