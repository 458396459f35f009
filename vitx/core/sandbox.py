"""Runs a conversion in its own process: a compiler that crashes, hangs or eats memory ends that process, not ours.

Verbs that other verbs start are processes too, which end with the one that started them.
"""

import ctypes
import math
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from vitx.core.errors import VitxError
from vitx.core.preprocess import ignore_image_warnings

ResultT = TypeVar("ResultT")

_POLL_SECONDS = 0.1
_PR_SET_PDEATHSIG = 1  # of Linux's prctl(2)
# In this process's own search path: by itself the command would look into the working folder first.
_VERB = (
    "import sys; sys.path[:] = {path!r}; sys.argv[0] = 'vitx'; from vitx.core import sandbox; "
    "sandbox.end_with_parent({parent}); sandbox.forget_options(sys.argv[1]); from vitx.cli import main; main()"
)


class ConversionCrashed(VitxError):
    """The process of a conversion died, exceeded a limit, or raised an unexpected exception."""


class LimitExceeded(ConversionCrashed):
    """The process of a conversion was ended, because it took longer or held more memory than it may."""


def run_limited(
    title: str,
    function: Callable[..., ResultT],
    *arguments: Any,
    seconds: float = math.inf,
    memory_gib: float = math.inf,
) -> ResultT:
    """Return `function(*arguments)`, computed in a fresh process; function, arguments and result must be picklable.

    VitxError and OSError are raised here as they were there. Raises ConversionCrashed, with the reason, when the
    process dies or raises anything else; LimitExceeded, which is one too, when it takes longer than `seconds` or has
    more than `memory_gib` resident (on Linux).
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_child, args=(theirs, function, arguments), daemon=False)
    try:
        with _environment_of_processes(), _interrupts_held():
            process.start()
        theirs.close()
        answer = _wait(title, process, ours, seconds, memory_gib)
    finally:
        if process.is_alive():
            process.kill()
        if process.pid is not None:
            process.join()
        ours.close()
    kind, value = answer
    if kind == "result":
        result: ResultT = value
        return result
    if isinstance(value, VitxError | OSError):
        raise value
    raise ConversionCrashed(f"{title} failed: {value}")


@contextmanager
def _environment_of_processes() -> Iterator[None]:
    """A process that starts within the block finds no `random.py` in the working folder, before it is given our path.

    And multiprocessing's tracker, which removes what a process that was ended leaves, such as the semaphore that tqdm
    holds while torch traces, does not warn of it when the verb is over.
    """
    filters = filter(None, (os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker"))
    given = {"PYTHONSAFEPATH": "1", "PYTHONWARNINGS": ",".join(filters)}
    before = {name: os.environ.get(name) for name in given}
    os.environ.update(given)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """A process that starts within the block has SIGINT blocked, for it imports for seconds before it can ignore it."""
    if not hasattr(signal, "pthread_sigmask"):  # on Windows
        yield
        return
    resource_tracker.ensure_running()  # multiprocessing's, whose start unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _child(connection: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    ignore_image_warnings()
    if parent := multiprocessing.parent_process():
        with suppress(OSError):  # a compiler may print past its logger, and standard output is the verb's: perhaps JSON
            os.dup2(2, 1)
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    try:
        try:
            answer = ("result", function(*arguments))
        except (VitxError, OSError) as error:  # the user's mistake, or the disk's failure
            answer = ("error", error)
        pickled = pickle.dumps(answer)
        pickle.loads(pickled)  # some libraries' errors can be pickled and not be read
    except BaseException:  # noqa: BLE001 - the edge of the process: the parent gets the traceback
        pickled = pickle.dumps(("error", traceback.format_exc().strip()))
    connection.send_bytes(pickled)
    connection.close()


def _end_with(parent: Any) -> None:
    """Of a parent that was killed, nobody takes the answer or holds the limits of time and memory."""
    parent.join()
    os._exit(1)


def _wait(title: str, process: Any, connection: Connection, seconds: float, memory_gib: float) -> tuple[str, Any]:
    deadline = time.monotonic() + seconds
    while True:
        if connection.poll(_POLL_SECONDS):
            try:
                answer: tuple[str, Any] = connection.recv()
            except (EOFError, OSError):  # the second of an answer that is cut in its middle
                process.join()
                raise ConversionCrashed(f"{title} died{_cause(process.exitcode)}") from None
            process.join()
            return answer
        if time.monotonic() > deadline:
            raise LimitExceeded(f"{title} took longer than its limit of {seconds:g} s and was ended")
        held = resident_gib(process.pid)
        if held > memory_gib:
            raise LimitExceeded(f"{title} held {held:.1f} GiB, more than its limit of {memory_gib:g}, and was ended")


def resident_gib(pid: int) -> float:
    """Resident memory of a process in GiB; 0 on a system without /proc, or when the process is gone."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]  # proc(5): size, resident, …
    except OSError:
        return 0.0
    return int(pages) * os.sysconf("SC_PAGE_SIZE") / 2**30


def _cause(exit_code: int | None) -> str:
    if exit_code == 1:  # Python's, for an error before `_child`, which sends every other
        return (
            ' at its start: a program that calls vitx stands under `if __name__ == "__main__":`, because this process '
            "imports its file again"
        )
    if exit_code is None or exit_code >= 0:
        return f" with exit code {exit_code}"
    try:
        return f" of {signal.Signals(-exit_code).name}"
    except ValueError:
        return f" of signal {-exit_code}"


def verb_command(*words: str) -> list[str]:
    """The command that runs a verb, such as `serve`, with these options alone, in a process that ends with this one."""
    code = _VERB.format(path=list(map(str, sys.path)), parent=os.getpid())
    return [sys.executable, "-c", code, *words]


def end_with_parent(parent: int) -> None:
    """Ask Linux to send this process SIGTERM when its `parent` ends, in whatever way; elsewhere do nothing.

    The kernel takes the thread that started this process for the parent.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it has ended before the call
        os.kill(os.getpid(), signal.SIGTERM)


def forget_options(verb: str) -> None:
    """Take the options of `verb` out of this process's environment: who started it has given all that it is to have."""
    for name in [name for name in os.environ if name.startswith(f"VITX_{verb.upper()}_")]:
        del os.environ[name]
