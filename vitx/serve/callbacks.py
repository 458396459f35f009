"""What the event loop is called back with: replies of the batcher, and what the threads beside it have read."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")
# Of large bodies and of others. Reading JSON holds the interpreter: among more threads the event loop has fewer turns.
_READERS = [ThreadPoolExecutor(1, f"read-{which}") for which in ("small", "large")]


def read_on_thread(size: int, read: Callable[[], T]) -> "asyncio.Future[T]":
    """What `read` returns, on the thread for bodies of `size` bytes, which takes them in turn."""
    return asyncio.get_running_loop().run_in_executor(_READERS[size > 2**20], read)


def settle(future: "asyncio.Future[T]", value: T | Exception) -> None:
    """Give `future` its value or exception, unless its task was cancelled and has not run since."""
    if future.cancelled():
        return
    if isinstance(value, Exception):
        future.set_exception(value)
    else:
        future.set_result(value)


async def awaited(reply: "asyncio.Future[T]", cancel: Callable[[], object]) -> T:
    """What `reply` is settled with; `cancel` is called if the caller is cancelled before."""
    try:
        return await reply
    finally:
        if reply.cancelled():
            cancel()
        else:
            reply.exception()  # marks it as retrieved; asyncio would log it otherwise


def start_kept(work: Coroutine[Any, Any, T], tasks: "set[asyncio.Task[T]]") -> "asyncio.Task[T]":
    """Start a task that `tasks` has until it is done: the event loop holds tasks weakly."""
    tasks.add(task := asyncio.create_task(work))
    task.add_done_callback(tasks.discard)
    return task


_held = threading.local()  # of one event loop: what is to be written, None outside of a batch


@contextmanager
def batch_of_replies() -> Iterator[None]:
    """Inside, what `write_with_batch` is given waits: a client that is woken by each reply takes a core each time."""
    writes: list[Callable[[], object]] = []
    _held.writes = writes
    try:
        yield
    finally:
        _held.writes = None
        for write in writes:
            write()


def write_with_batch(write: Callable[[], object]) -> None:
    """Call `write` at the end of the batch whose replies are being made, or now. It must not raise."""
    if (writes := getattr(_held, "writes", None)) is None:
        write()
    else:
        writes.append(write)
