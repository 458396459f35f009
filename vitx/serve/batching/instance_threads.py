"""The threads that run a model, one for each instance: they take batches and hand results to the event loop."""

import asyncio
import threading
import time
from collections.abc import Callable
from functools import cache
from queue import SimpleQueue

import numpy as np

from vitx.core.preprocess import UInt8Array
from vitx.serve.batching.request_queue import Batch


class InstanceThreads:
    """`count` threads over one queue. A thread that dies of a BaseException, such as SystemExit, is replaced."""

    def __init__(self, count: int, max_rows: int, on_result: Callable[[Batch], None]) -> None:
        """`on_result` is called with a batch that has run, on the running event loop."""
        self._max_rows, self._on_result = max_rows, on_result
        self._loop = asyncio.get_running_loop()
        self._batches: SimpleQueue[Batch | None] = SimpleQueue()
        self.put = self._batches.put
        self._threads: dict[int, threading.Thread] = {}
        for place in range(count):
            self._start(place)

    async def close(self) -> None:
        """Run every queued batch, then end the threads."""
        for _ in self._threads:
            self.put(None)
        for thread in self._threads.values():
            await asyncio.to_thread(thread.join)

    def _start(self, place: int) -> None:
        name = f"infer-{place + 1}"
        self._threads[place] = threading.Thread(target=self._work, args=(place,), name=name, daemon=True)
        self._threads[place].start()

    def _work(self, place: int) -> None:
        # One array for all batches: the pages of a new one of this size would be mapped each time.
        buffer = cache(lambda shape: np.empty((self._max_rows, *shape), np.uint8))
        try:
            while (batch := self._batches.get()) is not None:
                self._run(batch, buffer)
                self._loop.call_soon_threadsafe(self._on_result, batch)
                if batch.died:
                    self._start(place)
                    return
        except RuntimeError:  # a second signal closed the event loop
            return

    def _run(self, batch: Batch, buffer: Callable[[tuple[int, ...]], UInt8Array]) -> None:
        batch.started = time.monotonic()
        batch.parts = parts = [part for part in batch.parts if not part.done]
        try:
            if pixels := [images for part in parts for images in part.read()]:
                images = pixels[0]
                if len(pixels) > 1:
                    images = np.concatenate(pixels, out=buffer(images.shape[1:])[: sum(map(len, pixels))])
                batch.gathered = time.monotonic()
                logits = batch.infer(images)
                if logits.ndim != 2 or len(logits) != len(images):
                    raise ValueError(f"the model returned {logits.shape} for {len(images)} images")
                batch.logits = logits
        except BaseException as failure:  # noqa: BLE001 - the edge of one batch; its thread may die of it
            batch.error, batch.died = failure, not isinstance(failure, Exception)
        batch.computed = time.monotonic()
