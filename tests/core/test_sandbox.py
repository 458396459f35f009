"""Conversions in a process of their own: results, errors, and every way to die."""

import contextlib
import errno
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sandbox_jobs import (
    add,
    divide_by_zero,
    exit_at_once,
    fill_memory,
    kill_self,
    raise_disk_full,
    raise_input_error,
    raise_unreadable,
    return_function,
)
from server_process import is_running, wait_until
from vitx.core import sandbox
from vitx.core.errors import InputError
from vitx.core.sandbox import (
    ConversionCrashed,
    LimitExceeded,
    end_with_parent,
    forget_options,
    resident_gib,
    run_limited,
    verb_command,
)


def test_a_result_comes_back_from_another_process() -> None:
    total, pid = run_limited("adding", add, 2, 3)
    assert total == 5
    assert pid != os.getpid()


def test_what_a_compiler_prints_is_no_part_of_the_verb_s_output(capfd: pytest.CaptureFixture[str]) -> None:
    """TensorRT's backend warns on standard output, past every logger: `--json` was no JSON with it."""
    assert run_limited("converting", os.write, 1, b"WARNING: in op clamp\n") == 21
    assert capfd.readouterr() == ("", "WARNING: in op clamp\n")


def test_the_users_error_stays_the_users() -> None:
    with pytest.raises(InputError, match="the graph has no input"):
        run_limited("converting", raise_input_error)


def test_a_full_disk_is_told_as_it_was() -> None:
    with pytest.raises(OSError, match=r"No space left on device: 'graph\.onnx'") as caught:
        run_limited("converting", raise_disk_full)
    assert caught.value.errno == errno.ENOSPC


def test_no_process_is_left_of_a_hang() -> None:
    before = {*multiprocessing.active_children()}  # a loader of another test may still be ending
    with pytest.raises(LimitExceeded, match=r"^converting took longer than its limit of 0\.2 s and was ended$"):
        run_limited("converting", time.sleep, 60, seconds=0.2)
    assert {*multiprocessing.active_children()} <= before


def test_resident_memory_is_of_the_process() -> None:
    assert 0.01 < resident_gib(os.getpid()) < 64
    assert resident_gib(2**30) == 0.0  # no such process


def test_any_other_error_is_a_crash_with_its_traceback() -> None:
    with pytest.raises(ConversionCrashed, match=r"(?s)converting failed: .*divide_by_zero.*ZeroDivisionError: a bug"):
        run_limited("converting", divide_by_zero)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (return_function, "return_function.*lambda"),
        (raise_unreadable, "Unreadable.__init__.*missing 1 required keyword"),
    ],
)
def test_what_cannot_cross_to_this_process_is_said(function: Callable[[], object], reason: str) -> None:
    """It had passed for a program without `if __name__ == "__main__":`, or had been a traceback of multiprocessing."""
    with pytest.raises(ConversionCrashed, match=f"(?s)^converting failed: Traceback .*{reason}"):
        run_limited("converting", function)


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
    assert time.monotonic() - start < 60  # it would sleep for so long


@pytest.mark.parametrize("filters", [None, "error::SyntaxWarning"])
def test_what_an_ended_process_held_is_no_warning(filters: str | None) -> None:
    """tqdm holds a semaphore while torch traces; Python's warning of it came behind "interrupted"."""
    code = """if __name__ == "__main__":
        import os
        from contextlib import suppress
        from sandbox_jobs import hang_with_a_semaphore
        from vitx.core.sandbox import LimitExceeded, run_limited
        with suppress(LimitExceeded):
            run_limited("tracing", hang_with_a_semaphore, seconds=4)
        print(os.environ.get("PYTHONWARNINGS"), os.environ.get("PYTHONSAFEPATH"))"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment |= {"PYTHONWARNINGS": filters} if filters else {}
    told = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert (told.stdout, told.stderr) == (f"{filters} None\n", "")


def test_a_memory_hog_is_ended() -> None:
    with pytest.raises(LimitExceeded, match=r"more than its limit of 0\.5, and was ended"):
        run_limited("converting", fill_memory, memory_gib=0.5, seconds=60)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="/proc")
def test_a_conversion_ends_with_who_asked_for_it(tmp_path: Path) -> None:
    """Killed, the parent can end nothing: its conversion would go on for hours, without limits."""
    program = tmp_path / "program.py"
    program.write_text(
        "from sandbox_jobs import sleep_and_tell\nfrom vitx.core.sandbox import run_limited\n"
        f'if __name__ == "__main__":\n    run_limited("sleeping", sleep_and_tell, {str(tmp_path / "pid")!r})\n'
    )
    parent = subprocess.Popen([sys.executable, program], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    pid = wait_for((tmp_path / "pid").read_text)
    parent.kill()
    parent.wait()
    wait_until(lambda: not is_running(int(pid)))


def wait_for(find: Callable[[], Any], seconds: float = 60) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(FileNotFoundError):
            if found := find():
                return found
        time.sleep(0.05)
    raise AssertionError("it did not come to be")


class Ended:
    """A process as `_wait` sees it: gone, with an exit code."""

    pid = 2**30

    def __init__(self, exitcode: int | None = None) -> None:
        self.exitcode = exitcode
        self.joined = 0

    def join(self) -> None:
        self.joined += 1


GUARD = (
    'a program that calls vitx stands under `if __name__ == "__main__":`, because this process imports its file again'
)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0, "with exit code 0"),
        (1, f"at its start: {GUARD}"),
        (2, "with exit code 2"),
        (None, "with exit code None"),
        (-11, "of SIGSEGV"),
        (-1, "of SIGHUP"),
        (-999, "of signal 999"),
    ],
)
def test_how_a_process_died(code: int | None, text: str) -> None:
    ours, theirs = multiprocessing.Pipe()
    theirs.close()
    process = Ended(code)
    with pytest.raises(ConversionCrashed) as caught:
        sandbox._wait("converting", process, ours, 60, math.inf)
    assert (str(caught.value), caught.value.exit_code, process.joined) == (f"converting died {text}", 1, 1)


@pytest.mark.skipif(sys.platform == "win32", reason="a pipe is no file there")
def test_a_process_may_die_in_the_middle_of_its_answer() -> None:
    """Of this multiprocessing raises an OSError, which passed for one of the conversion's."""
    ours, theirs = multiprocessing.Pipe()
    os.write(theirs.fileno(), (1000).to_bytes(4) + b"the beginning of an answer of 1,000 bytes")
    theirs.close()
    with pytest.raises(ConversionCrashed, match=r"^converting died of SIGKILL$"):
        sandbox._wait("converting", Ended(-signal.SIGKILL), ours, 60, math.inf)


def test_an_answer_is_taken_though_the_time_is_over() -> None:
    ours, theirs = multiprocessing.Pipe()
    theirs.send(("result", 5))
    process = Ended(0)
    assert sandbox._wait("converting", process, ours, -1, math.inf) == ("result", 5)
    assert process.joined == 1


@pytest.mark.parametrize(("held", "ended"), [(2.0, False), (2.04, True), (3.16, True)])
def test_the_limit_of_memory_is_allowed(monkeypatch: pytest.MonkeyPatch, held: float, ended: bool) -> None:
    monkeypatch.setattr(sandbox, "_POLL_SECONDS", 0.001)
    monkeypatch.setattr(sandbox, "resident_gib", lambda pid: {Ended.pid: held}[pid])
    text = f"held {held:.1f} GiB, more than its limit of 2," if ended else "took longer than its limit of 0.01 s"
    ours, theirs = multiprocessing.Pipe()
    with theirs, pytest.raises(ConversionCrashed) as caught:
        sandbox._wait("converting", Ended(), ours, 60 if ended else 0.01, 2.0)
    assert str(caught.value) == f"converting {text} and was ended"


def child_answers(function: Callable[..., object], *arguments: object) -> tuple[str, object]:
    ours, theirs = multiprocessing.Pipe()
    before = signal.getsignal(signal.SIGINT)
    try:
        sandbox._child(theirs, function, arguments)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert theirs.closed
    answer: tuple[str, object] = ours.recv()
    return answer


def test_what_a_child_sends() -> None:
    with warnings.catch_warnings():
        assert child_answers(divmod, 17, 5) == ("result", (3, 2))
        action, _, category, module, _ = warnings.filters[0]
        assert (action, category, module and module.pattern) == ("ignore", Warning, r"PIL\.")
        kind, error = child_answers(raise_input_error)
        assert (kind, type(error), str(error)) == ("error", InputError, "the graph has no input")
        kind, error = child_answers(raise_disk_full)
        assert (kind, type(error)) == ("error", OSError)
        kind, text = child_answers(divide_by_zero)
    assert kind == "error"
    assert str(text).startswith("Traceback (most recent call last):")
    assert str(text).endswith("ZeroDivisionError: a bug")
    with warnings.catch_warnings():
        assert "return_function" in str(child_answers(return_function))
        assert "Unreadable" in str(child_answers(raise_unreadable))


def test_resident_memory_is_the_second_number_of_statm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "statm").write_text("9000000 786432 5 1 0 7 0\n")
    monkeypatch.setattr(sandbox, "Path", lambda place: tmp_path / "statm" if place == "/proc/7/statm" else Path(place))
    monkeypatch.setattr(os, "sysconf", {"SC_PAGE_SIZE": 4096}.__getitem__)
    assert resident_gib(7) == 3.0


def test_ctrl_c_reaches_no_process_that_still_imports() -> None:
    """It belongs to the terminal's process group, and would print a traceback of the child beside it."""
    blocked = run_limited("asking", signal.pthread_sigmask, signal.SIG_BLOCK, [])
    assert signal.SIGINT in blocked
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's word on a parent's end is Linux's")
def test_a_verb_whose_starter_is_gone_gets_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    code = f"from vitx.core.sandbox import {end_with_parent.__name__} as end; end(1 << 22); input()"
    assert subprocess.run([sys.executable, "-c", code], stdin=subprocess.DEVNULL, check=False).returncode == -15
    monkeypatch.setattr(os, "getpid", lambda: 1 << 22)
    command = verb_command("--version")
    monkeypatch.undo()
    assert subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode == -15


def test_a_verb_reads_no_program_of_the_working_folder(tmp_path: Path) -> None:
    for name in ("statistics.py", "typer.py", "vitx.py"):
        (tmp_path / name).write_text("raise SystemExit(f'{__file__} was imported')")
    told = subprocess.run(verb_command("--version"), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (told.stderr, told.returncode) == ("", 0)
    assert told.stdout.startswith("vitx ")


def test_a_verb_takes_its_options_from_its_words_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the environment are for the commands that the user starts."""
    for name in ("VITX_SERVE_PORT", "VITX_SERVE_CONFIG"):
        monkeypatch.setenv(name, "a")
    for port, told in (("80", "no bundle to serve"), ("b", "--port b")):
        command = verb_command("serve", "--port", port)
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (ended.returncode, told in ended.stderr, "VITX" in ended.stderr) == (2, True, False), ended.stderr
    monkeypatch.setenv("VITX_SERVER", "another program's")
    forget_options("serve")
    assert [name for name in os.environ if name.startswith("VITX_SERVE")] == ["VITX_SERVER"]


def test_a_conversion_reads_no_program_of_the_working_folder(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    for name in ("random.py", "types.py", "multiprocessing.py"):
        (tmp_path / "here" / name).write_text("raise SystemExit(f'{__file__} was imported')")
    program = tmp_path / "program.py"
    program.write_text(
        "import math, os\nfrom vitx.core.sandbox import run_limited\nif __name__ == '__main__':\n"
        "    print(run_limited('a root', math.sqrt, 4), os.environ.get('PYTHONSAFEPATH'))"
    )
    words = ["env", "-u", "PYTHONSAFEPATH", sys.executable, str(program)]
    told = subprocess.run(words, cwd=tmp_path / "here", capture_output=True, text=True, check=False)
    assert (told.stderr, told.stdout) == ("", "2.0 None\n")
