"""The threads that run a model, one for each instance: they take batches and hand results to the event loop."""

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from queue import SimpleQueue

import numpy as np

from vitx.core.preprocess import UInt8Array
from vitx.runtimes.session import Float32Array
from vitx.serve.batching.request_queue import Batch, RequestPart


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The logits of a batch, or the error it raised.

    live: its parts that were not cancelled before it ran. gathered: time.monotonic() when their images were in one
    array; computed: when the model had returned. died: the error ended the thread.
    """

    batch: Batch
    live: list[RequestPart]
    logits: Float32Array | None
    error: BaseException | None
    gathered: float
    computed: float
    died: bool = False


class InstanceThreads:
    """`count` threads over one queue. A thread that dies of a BaseException, such as SystemExit, is replaced."""

    def __init__(self, count: int, max_rows: int, on_result: Callable[[BatchResult], None]) -> None:
        """`on_result` is called on the running event loop."""
        self._max_rows = max_rows
        self._on_result = on_result
        self._loop = asyncio.get_running_loop()
        self._batches: SimpleQueue[Batch | None] = SimpleQueue()
        self.put = self._batches.put
        self._started = 0
        self._threads = [self._start() for _ in range(count)]
        self.replaced = 0

    async def close(self) -> None:
        """Run every queued batch, then end the threads."""
        for _ in self._threads:
            self.put(None)
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
        # One array for all batches: the pages of a new one of this size would be mapped each time.
        buffer = cache(lambda shape: np.empty((self._max_rows, *shape), np.uint8))
        try:
            while (batch := self._batches.get()) is not None:
                result = self._run(batch, buffer)
                if result.died:
                    self._loop.call_soon_threadsafe(self._replace, threading.current_thread())
                self._loop.call_soon_threadsafe(self._on_result, result)
                if result.died:
                    return
        except RuntimeError:  # a second signal closed the event loop
            return

    def _run(self, batch: Batch, buffer: Callable[[tuple[int, ...]], UInt8Array]) -> BatchResult:
        batch.started = gathered = time.monotonic()
        live = [part for part in batch.parts if not part.done]
        logits: Float32Array | None = None
        error: BaseException | None = None
        try:
            if live:
                images = live[0].images
                if len(live) > 1:
                    rows = buffer(images.shape[1:])[: sum(part.rows for part in live)]
                    images = np.concatenate([part.images for part in live], out=rows)
                gathered = time.monotonic()
                logits = _checked(batch.infer(images), len(images))
        except BaseException as failure:  # noqa: BLE001 - the edge of one batch; its thread may die of it
            error = failure
        died = error is not None and not isinstance(error, Exception)
        batch.computed = time.monotonic()
        return BatchResult(batch, live, logits, error, gathered, batch.computed, died)


def _checked(logits: Float32Array, rows: int) -> Float32Array:
    if logits.ndim != 2 or len(logits) != rows:
        raise ValueError(f"the model returned {logits.shape} for {rows} images")
    return logits
