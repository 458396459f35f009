"""Functions that tests run in other processes, which import them by name."""

import errno
import multiprocessing
import os
import signal
import time
from pathlib import Path

import onnx

from vitx.core.errors import InputError


def add(a: int, b: int) -> tuple[int, int]:
    return a + b, os.getpid()


def raise_input_error() -> None:
    raise InputError("the graph has no input")


def raise_disk_full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "graph.onnx")


def divide_by_zero() -> None:
    raise ZeroDivisionError("a bug")


def kill_self(number: int) -> None:
    os.kill(os.getpid(), number)


def exit_at_once() -> None:
    os._exit(7)


def return_function() -> object:
    return lambda: 0


class Unreadable(OSError):
    """As some libraries' errors: it is made of more than the message that pickle gives it."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


def raise_unreadable() -> None:
    raise Unreadable("the server said no", status=404)


def hang(path: Path) -> None:
    time.sleep(300)


def hang_with_a_semaphore() -> None:
    with multiprocessing.get_context("spawn").RLock():
        time.sleep(300)


def fill_memory() -> None:
    held = [bytearray(b"x" * 2**20) for _ in range(700)]
    time.sleep(60)
    del held


def sleep_and_tell(path: str) -> None:
    Path(path).write_text(str(os.getpid()))
    time.sleep(300)


def crash_on_gelu(path: Path) -> None:
    """A compiler with a bug: it crashes on a Gelu that follows a matrix product or a sum."""
    graph = onnx.load(str(path)).graph
    products = {name for node in graph.node if node.op_type in ("MatMul", "Gemm", "Add") for name in node.output}
    if any(node.op_type == "Gelu" and node.input[0] in products for node in graph.node):
        os.kill(os.getpid(), signal.SIGSEGV)
