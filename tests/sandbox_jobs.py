"""What test_sandbox.py runs in other processes, which import it by name."""

import os
import time

from vitx.core.errors import InputError


def add(a: int, b: int) -> tuple[int, int]:
    return a + b, os.getpid()


def complain() -> None:
    raise InputError("the graph has no input")


def stumble() -> None:
    raise ZeroDivisionError("a bug")


def kill_self(number: int) -> None:
    os.kill(os.getpid(), number)


def leave() -> None:
    os._exit(7)


def hog() -> None:
    held = [bytearray(b"x" * 2**20) for _ in range(700)]
    time.sleep(60)
    del held
