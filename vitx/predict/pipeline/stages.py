"""Parts of a pipeline of threads: bounded read-ahead, and how busy each stage was."""

import threading
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, suppress
from queue import Empty, Queue
from typing import Generic, TypeVar

T = TypeVar("T")


class StageTimer:
    """Adds up the seconds that each stage's threads worked. threads: their number, by stage."""

    def __init__(self, threads: dict[str, int]) -> None:
        self.threads = threads
        self._busy = dict.fromkeys(threads, 0.0)
        self._lock = threading.Lock()

    @contextmanager
    def busy(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._busy[stage] += time.perf_counter() - start

    def shares(self, seconds: float) -> dict[str, float]:
        """The share of `seconds` that each stage's threads worked, 0 to 1."""
        with self._lock:
            return {stage: busy / (seconds * self.threads[stage]) for stage, busy in self._busy.items()}


def busiest(shares: dict[str, float]) -> str:
    """The stage with the largest share: the one that the others wait for."""
    return max(shares, key=lambda stage: shares[stage])


class BackgroundGenerator(Generic[T]):
    """Runs a generator in a thread, at most `depth` values ahead; its error is raised to whoever iterates.

    `close` ends the thread, which closes the generator: a generator must be closed by the thread that runs it.
    """

    def __init__(self, values: Generator[T, None, None], depth: int, name: str) -> None:
        self._values = values
        # A value in a tuple of one, since T may be None or an exception; None ends the queue.
        self._queue: Queue[tuple[T] | BaseException | None] = Queue(depth)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __iter__(self) -> Iterator[T]:
        self._thread.start()
        while (got := self._queue.get()) is not None:
            if isinstance(got, BaseException):
                raise got
            yield got[0]

    def close(self) -> None:
        self._closed = True
        while self._thread.is_alive():
            with suppress(Empty):  # the thread may be waiting for room in the queue
                self._queue.get(timeout=0.05)

    def _run(self) -> None:
        end: BaseException | None = None
        try:
            with closing(self._values):
                for value in () if self._closed else self._values:
                    self._queue.put((value,))
                    if self._closed:
                        break
        # Any error is raised again by __iter__, in the consumer's thread.
        except BaseException as error:  # noqa: BLE001
            end = error
        self._queue.put(end)
