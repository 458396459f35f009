"""Stages of a pipeline: each works ahead of the next by a bounded number of steps, and measures how busy it was."""

import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from queue import Empty, Queue
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Clock:
    """Seconds that each stage worked, over all its threads."""

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
        """The part of `seconds` that each stage's threads worked, 0 to 1."""
        with self._lock:
            return {stage: busy / (seconds * self.threads[stage]) for stage, busy in self._busy.items()}


def busiest(shares: dict[str, float]) -> str:
    """The stage that was busy for the largest part of the time: what the others wait for."""
    return max(shares, key=lambda stage: shares[stage])


def submitted(
    pool: ThreadPoolExecutor, function: Callable[[T], R], values: Iterable[T]
) -> Generator[Future[R], None, None]:
    """Yield the call function(value) of each value, begun in the pool. In a Background, its depth bounds their number.

    Nothing waits here for more values: results that are there must be had while the next value is long in coming.
    """
    for value in values:
        yield pool.submit(function, value)


def results(calls: Iterable[Future[R]]) -> Iterator[R]:
    for call in calls:
        yield call.result()


class Background(Generic[T]):
    """Iterates over a generator in a thread, at most `depth` values ahead; its error is raised here.

    `close` ends the thread and closes the generator, in the thread that ran it.
    """

    def __init__(self, values: Generator[T, None, None], depth: int, name: str) -> None:
        self._values = values
        self._queue: Queue[tuple[T] | BaseException | None] = Queue(depth)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        while (got := self._queue.get()) is not None:
            if isinstance(got, BaseException):
                raise got
            yield got[0]

    def close(self) -> None:
        self._closed = True
        while self._thread.is_alive():
            try:  # room for the value that the thread may be waiting to put
                self._queue.get(timeout=0.05)
            except Empty:
                continue

    def _run(self) -> None:
        end: BaseException | None = None
        try:
            with closing(self._values):
                for value in self._values:
                    self._queue.put((value,))
                    if self._closed:
                        break
        # Whatever it was, it belongs to the thread that reads.
        except BaseException as error:  # noqa: BLE001
            end = error
        self._queue.put(end)


class Sink(Generic[T]):
    """Calls `consume` in a thread of its own, with at most `depth` values waiting; its error is raised by `put`."""

    def __init__(self, consume: Callable[[T], None], depth: int, name: str) -> None:
        self._consume = consume
        self._queue: Queue[tuple[T] | None] = Queue(depth)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, value: T) -> None:
        if self._error is not None:
            raise self._error
        self._queue.put((value,))

    def finish(self) -> None:
        """Wait until everything has been consumed."""
        self._queue.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        """Drop what waits, and end the thread."""
        self._consume = lambda _: None
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (got := self._queue.get()) is not None:
            if self._error is not None:
                continue  # `put` must never wait for a thread that has ended
            try:
                self._consume(got[0])
            # Whatever it was, it belongs to the thread that writes.
            except BaseException as error:  # noqa: BLE001
                self._error = error
