"""Conversions in a process of their own: results, errors, and every way to die."""

import errno
import multiprocessing
import os
import signal
import time

import pytest

from sandbox_jobs import add, divide_by_zero, exit_at_once, fill_memory, kill_self, raise_disk_full, raise_input_error
from vitx.core.errors import InputError
from vitx.core.sandbox import ConversionCrashed, resident_gib, run_limited


def test_a_result_comes_back_from_another_process() -> None:
    total, pid = run_limited("adding", add, 2, 3)
    assert total == 5
    assert pid != os.getpid()


def test_the_users_error_stays_the_users() -> None:
    with pytest.raises(InputError, match="the graph has no input"):
        run_limited("converting", raise_input_error)


def test_a_full_disk_is_told_as_it_was() -> None:
    with pytest.raises(OSError, match=r"No space left on device: 'graph\.onnx'") as caught:
        run_limited("converting", raise_disk_full)
    assert caught.value.errno == errno.ENOSPC


def test_no_process_is_left_of_a_hang() -> None:
    with pytest.raises(ConversionCrashed, match=r"^converting took longer than its limit of 0\.2 s and was ended$"):
        run_limited("converting", time.sleep, 60, seconds=0.2)
    assert multiprocessing.active_children() == []


def test_resident_memory_is_of_the_process() -> None:
    assert 0.01 < resident_gib(os.getpid()) < 64
    assert resident_gib(2**30) == 0.0  # no such process


def test_any_other_error_is_a_crash_with_its_traceback() -> None:
    with pytest.raises(ConversionCrashed, match=r"(?s)converting failed: .*divide_by_zero.*ZeroDivisionError: a bug"):
        run_limited("converting", divide_by_zero)


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL, signal.SIGABRT])
def test_death_by_signal_is_named(number: signal.Signals) -> None:
    with pytest.raises(ConversionCrashed, match=f"converting died of {number.name}"):
        run_limited("converting", kill_self, number)


def test_a_silent_exit_is_a_crash() -> None:
    with pytest.raises(ConversionCrashed, match="converting died with exit code 7"):
        run_limited("converting", exit_at_once)


def test_a_hang_is_ended() -> None:
    start = time.monotonic()
    with pytest.raises(ConversionCrashed, match=r"longer than its limit of 0\.5 s"):
        run_limited("converting", time.sleep, 60, seconds=0.5)
    assert time.monotonic() - start < 30


def test_a_memory_hog_is_ended() -> None:
    with pytest.raises(ConversionCrashed, match=r"more than its limit of 0\.5, and was ended"):
        run_limited("converting", fill_memory, memory_gib=0.5, seconds=60)
