"""Stopping between two steps: the first signal asks training to stop, a second one interrupts it, a third ends it."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from vitx.core.console import ending_signals

# Ctrl-C reaches the processes from the terminal, and again from torchrun: signals this close together are one request.
SAME_REQUEST_SECONDS = 1.0


class TrainingStopped(Exception):
    """Training was stopped by `signal`, with a checkpoint saved to resume from."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")
        self.signal = signal_number


class StopRequest:
    """`signal` is the number of the signal that asked training to stop, 0 before one has."""

    def __init__(self) -> None:
        self.signal, self.received_at, self.interrupted = 0, 0.0, False

    def receive(self, number: int, _frame: FrameType | None) -> None:
        if not self.signal:
            self.signal, self.received_at = number, time.monotonic()
        # Of SIGHUPs there may be any number: for one closed terminal the system, the shell and torchrun each send some.
        elif number in (signal.SIGTERM, signal.SIGINT) and time.monotonic() - self.received_at > SAME_REQUEST_SECONDS:
            if self.interrupted:  # what was to unwind waits for something
                os._exit(128 + number)
            self.received_at, self.interrupted = time.monotonic(), True
            raise KeyboardInterrupt


@contextmanager
def signals_to(receive: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Let `receive` handle `ending_signals` and SIGINT while the block runs, then restore the handlers.

    Python delivers signals to the main thread alone: in another thread nothing is received.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, receive) for number in (*ending_signals(), signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
