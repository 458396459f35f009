"""Time and memory of other processes: of a command with all its descendants, of functions run at once."""

import multiprocessing
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

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


def require_running(process: "subprocess.Popen[str]", name: str) -> None:
    """Raise RuntimeError if it has ended, or is about to: its sockets are closed and its memory is gone before that."""
    with suppress(subprocess.TimeoutExpired):
        raise RuntimeError(f"{name} ended with {process.wait(0.2)} while it was measured")


def family(pid: int) -> list[int]:
    """A process and its descendants, those of them that still live."""
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.NoSuchProcess:
        return [pid]


def resident_bytes(pid: int) -> int:
    """0 for a process that is gone."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def processor_seconds(pid: int) -> float:
    """User and system time of a process, its ended children's included; 0 for a process that is gone."""
    try:
        return float(sum(psutil.Process(pid).cpu_times()[:4]))
    except psutil.NoSuchProcess:
        return 0.0


def own_peak_bytes() -> int:
    """The largest resident size of this process, which psutil does not tell.

    Not getrusage's: that one survives exec, so a child begins with its parent's peak.
    """
    return 1024 * int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])


def together(function: Callable[..., Any], count: int, *arguments: Any) -> list[Any]:
    """Call function(number, …, barrier) in `count` processes at once."""
    context = multiprocessing.get_context("spawn")
    with multiprocessing.Manager() as manager, ProcessPoolExecutor(count, mp_context=context) as pool:
        ready = manager.Barrier(count)
        calls = [pool.submit(function, number, *arguments, ready) for number in range(count)]
        return [call.result() for call in calls]
