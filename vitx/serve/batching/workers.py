"""The threads that run a model, one for each instance: a batch in, its logits or its failure back on the event loop."""

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np

from vitx.core.preprocess import UInt8Array
from vitx.runtimes.session import Float32Array
from vitx.serve.batching.request_queue import Batch, Ticket

Infer = Callable[[UInt8Array], Float32Array]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a batch. Times by time.monotonic(): gathered (rows in one array), computed, ended.

    `live` are the tickets that nobody had given up when it ran. `died` says that the thread ended with it.
    """

    batch: Batch
    live: list[Ticket]
    logits: Float32Array | None
    error: BaseException | None
    gathered: float
    computed: float
    died: bool = False


class Workers:
    """`count` threads over one queue. A thread that ends by anything but an Exception is replaced."""

    def __init__(self, infer: Infer, count: int, max_rows: int, on_outcome: Callable[[Outcome], None]) -> None:
        """`on_outcome` is called on the running event loop."""
        self._infer = infer
        self._max_rows = max_rows
        self._on_outcome = on_outcome
        self._loop = asyncio.get_running_loop()
        self._batches: SimpleQueue[Batch | None] = SimpleQueue()
        self._started = 0
        self._threads = [self._start() for _ in range(count)]
        self.replaced = 0

    def put(self, batch: Batch) -> None:
        self._batches.put(batch)

    async def close(self) -> None:
        """End the threads once every batch has run."""
        for _ in self._threads:
            self._batches.put(None)
        for thread in self._threads:
            await asyncio.to_thread(thread.join)

    def _start(self) -> threading.Thread:
        self._started += 1
        thread = threading.Thread(target=self._work, name=f"infer-{self._started}", daemon=True)
        thread.start()
        return thread

    def _replace(self, dead: threading.Thread) -> None:
        self.replaced += 1
        self._threads[self._threads.index(dead)] = self._start()

    def _work(self) -> None:
        rows = _RowBuffer(self._max_rows)
        try:
            while (batch := self._batches.get()) is not None:
                outcome = self._run(batch, rows)
                if outcome.died:
                    self._loop.call_soon_threadsafe(self._replace, threading.current_thread())
                self._loop.call_soon_threadsafe(self._on_outcome, outcome)
                if outcome.died:
                    return
        except RuntimeError:  # the loop was closed by a second signal
            return

    def _run(self, batch: Batch, rows: "_RowBuffer") -> Outcome:
        batch.started = gathered = time.monotonic()
        live = [ticket for ticket in batch.tickets if not ticket.done]
        logits: Float32Array | None = None
        error: BaseException | None = None
        try:
            if live:
                images = rows.gather([ticket.images for ticket in live])
                gathered = time.monotonic()
                logits = _checked(self._infer(images), len(images))
        except BaseException as failure:  # noqa: BLE001 - it belongs to this batch, and to this thread, alone
            error = failure
        died = error is not None and not isinstance(error, Exception)
        batch.computed = time.monotonic()
        return Outcome(batch, live, logits, error, gathered, batch.computed, died)


class _RowBuffer:
    """One array that every batch of a thread is gathered in: a fresh one of this size would be paged in each time."""

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._buffer: UInt8Array | None = None

    def gather(self, images: list[UInt8Array]) -> UInt8Array:
        """The rows of all in one array; a view that holds until the next call."""
        if len(images) == 1:
            return images[0]
        if self._buffer is None:
            self._buffer = np.empty((self._max_rows, *images[0].shape[1:]), dtype=np.uint8)
        rows = sum(map(len, images))
        return np.concatenate(images, out=self._buffer[:rows])


def _checked(logits: Float32Array, rows: int) -> Float32Array:
    if logits.ndim != 2 or len(logits) != rows:
        raise ValueError(f"the model returned {logits.shape} for {rows} images")
    return logits
