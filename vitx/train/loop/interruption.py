"""Stopping between two steps: the first signal asks, the second stops at once."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# torchrun passes on a signal that the terminal has sent to its processes too: what comes together is one request.
SAME_REQUEST_SECONDS = 1.0
SIGNALS = (signal.SIGTERM, signal.SIGINT)


class TrainingStopped(Exception):
    """Training was asked to stop and has saved all there is to go on from. `signal` is what asked."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signal_number).name}")
        self.signal = signal_number


class StopRequest:
    """The signal that asked to stop, or 0."""

    def __init__(self) -> None:
        self.signal, self.received_at = 0, 0.0

    def receive(self, number: int, _frame: FrameType | None) -> None:
        if not self.signal:
            self.signal, self.received_at = number, time.monotonic()
        elif time.monotonic() - self.received_at > SAME_REQUEST_SECONDS:
            raise KeyboardInterrupt


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Yield a record of SIGTERM and SIGINT while the block runs; outside the main thread no signal arrives."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request.receive) for number in SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
