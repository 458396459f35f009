"""Dynamic batching: one collector a model, driven by arrivals, completions and one deadline. Nothing polls.

When a batch leaves
-------------------
* A full batch (`max_batch` rows) leaves at once, even while every instance is busy: each instance has one full batch
  standing by, so it never waits for the event loop between two batches.
* A part-filled batch leaves only to an idle instance, and there as soon as waiting longer would gain nothing: when
  it holds its share of the rows that have lately been in the server together. A lone client is served without any
  delay; eight clients that answer each reply with the next request travel as one batch of eight.
* It leaves at the latest `max_delay` after its oldest request arrived, if an instance is idle.

"Lately together" is the peak of rows queued and running, forgotten by a quarter with every batch.
"""

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue

import numpy as np

from vitx.core.preprocess import UInt8Array
from vitx.serve.errors import InferenceFailed, QueueFull, unavailable
from vitx.serve.limits import Batching
from vitx.serve.runtimes import Float32Array

Infer = Callable[[UInt8Array], Float32Array]


@dataclass(frozen=True, slots=True)
class BatchTimes:
    """What one batch took; every time in seconds."""

    rows: int
    compute: float
    queue: tuple[float, ...]  # one a request


@dataclass(eq=False, slots=True)
class _Ticket:
    """Rows that travel in one batch: a request, or a part of one that is larger than a batch."""

    images: UInt8Array
    reply: asyncio.Future[Float32Array]
    arrived: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a worker hands back to the event loop."""

    batch: Sequence[_Ticket]
    live: Sequence[_Ticket]  # those of the batch that nobody had cancelled when it ran
    logits: Float32Array | None
    error: Exception | None
    started: float
    ended: float


class Batcher:
    """Collects the requests of one model into batches. Create it, and call its methods, on a running event loop."""

    def __init__(
        self, infer: Infer, batching: Batching | None = None, *, on_batch: Callable[[BatchTimes], None] | None = None
    ) -> None:
        self.batching = batching or Batching()
        self._infer = infer
        self._on_batch = on_batch
        self._loop = asyncio.get_running_loop()
        self._queue: deque[_Ticket] = deque()
        self._queued = 0
        self._running_batches = 0
        self._running_rows = 0
        self._together = 1.0
        self._rows_per_second = 0.0
        self._deadline: asyncio.TimerHandle | None = None
        self._closed = False
        self._drained = asyncio.Event()
        self._work: SimpleQueue[Sequence[_Ticket] | None] = SimpleQueue()
        self._workers = [
            threading.Thread(target=self._run_worker, name=f"infer-{index}", daemon=True)
            for index in range(self.batching.instances)
        ]
        for worker in self._workers:
            worker.start()

    @property
    def queued(self) -> int:
        """Rows that wait for a batch."""
        return self._queued

    @property
    def running(self) -> int:
        """Rows in batches that were handed to an instance."""
        return self._running_rows

    async def submit(self, images: UInt8Array) -> Float32Array:
        """Return logits float32 (N, C) of images uint8 (N, S, S, 3), N ≥ 1.

        The rows stay together, unless they are more than a batch. Cancelling the caller takes rows that do not run
        yet out of the queue. Raises QueueFull, InferenceFailed, or RequestError (503) once closed.
        """
        if self._closed:
            raise unavailable("the model is being unloaded", "draining")
        rows, step = len(images), self.batching.max_batch
        if self._queued + rows > self.batching.queue:
            raise QueueFull(self._queued, self.batching.queue, self._retry_after())
        parts = [images] if rows <= step else [images[start : start + step] for start in range(0, rows, step)]
        tickets = [self._enqueue(part) for part in parts]
        self._collect()
        try:
            logits = [await ticket.reply for ticket in tickets]
        except BaseException:
            self._drop(tickets)
            raise
        return logits[0] if len(logits) == 1 else np.concatenate(logits)

    async def close(self) -> None:
        """Finish what was accepted, refuse the rest, and end the worker threads."""
        self._closed = True
        self._collect()
        self._note_drained()
        await self._drained.wait()
        for _ in self._workers:
            self._work.put(None)
        for worker in self._workers:
            await asyncio.to_thread(worker.join)

    def _enqueue(self, images: UInt8Array) -> _Ticket:
        ticket = _Ticket(images, self._loop.create_future())
        self._queue.append(ticket)
        self._queued += len(images)
        return ticket

    def _drop(self, tickets: Sequence[_Ticket]) -> None:
        """Forget what was cancelled, or belongs to a request of which another part failed."""
        for ticket in tickets:
            if ticket in self._queue:
                self._queue.remove(ticket)
                self._queued -= len(ticket.images)
            if not ticket.reply.cancel() and not ticket.reply.cancelled():
                ticket.reply.exception()  # asyncio reports a failure that nobody looked at
        self._collect()
        self._note_drained()

    def _collect(self, *, deadline_passed: bool = False) -> None:
        """Send every batch that is due; else see to it that the oldest request's deadline is kept."""
        while self._queue and self._running_batches < 2 * self.batching.instances:
            idle = self._running_batches < self.batching.instances
            if self._queued < self.batching.max_batch and not (idle and (deadline_passed or self._worth_sending())):
                if idle:
                    self._set_deadline()
                return
            self._send_batch()
            deadline_passed = False

    def _worth_sending(self) -> bool:
        """Whether a part-filled batch holds its share of the rows that are likely to come, or has waited enough."""
        if self._closed or time.monotonic() >= self._queue[0].arrived + self.batching.max_delay:
            return True
        share = math.ceil(self._together / self.batching.instances)
        return self._queued >= min(share, round(self._together) - self._running_rows)

    def _set_deadline(self) -> None:
        if self._deadline is None:
            left = self._queue[0].arrived + self.batching.max_delay - time.monotonic()
            self._deadline = self._loop.call_later(max(left, 0), self._on_deadline, self._queue[0])

    def _on_deadline(self, oldest: _Ticket) -> None:
        self._deadline = None
        self._collect(deadline_passed=bool(self._queue) and self._queue[0] is oldest)

    def _send_batch(self) -> None:
        """Hand the oldest requests that fit into one batch to the workers."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        seen = float(self._queued + self._running_rows)
        self._together = seen if seen > self._together else self._together + (seen - self._together) / 4
        batch = [self._queue.popleft()]
        rows = len(batch[0].images)
        while self._queue and rows + len(self._queue[0].images) <= self.batching.max_batch:
            batch.append(self._queue.popleft())
            rows += len(batch[-1].images)
        self._queued -= rows
        self._running_rows += rows
        self._running_batches += 1
        self._work.put(batch)

    def _run_worker(self) -> None:
        """One instance: the body of a worker thread."""
        while (batch := self._work.get()) is not None:
            outcome = self._run_batch(batch)
            try:
                self._loop.call_soon_threadsafe(self._finish, outcome)
            except RuntimeError:  # the loop was closed by a second signal
                return

    def _run_batch(self, batch: Sequence[_Ticket]) -> _Outcome:
        started = time.monotonic()
        live = [ticket for ticket in batch if not ticket.reply.done()]
        logits: Float32Array | None = None
        error: Exception | None = None
        try:
            if live:
                logits = self._infer_rows([ticket.images for ticket in live])
        except Exception as failure:  # noqa: BLE001 - whatever the runtime raises belongs to this batch alone
            error = failure
        return _Outcome(batch, live, logits, error, started, time.monotonic())

    def _infer_rows(self, images: Sequence[UInt8Array]) -> Float32Array:
        rows = images[0] if len(images) == 1 else np.concatenate(images)
        logits = self._infer(rows)
        if logits.ndim != 2 or len(logits) != len(rows):
            raise ValueError(f"the model returned {logits.shape} for {len(rows)} images")
        return logits

    def _finish(self, outcome: _Outcome) -> None:
        """Back on the event loop: first the next batch, then the replies."""
        self._running_batches -= 1
        self._running_rows -= sum(len(ticket.images) for ticket in outcome.batch)
        self._collect()
        self._answer(outcome)
        self._note_drained()

    def _answer(self, outcome: _Outcome) -> None:
        start = 0
        for ticket in outcome.live:
            stop = start + len(ticket.images)
            if ticket.reply.done():
                pass  # cancelled while it ran
            elif outcome.logits is None:
                ticket.reply.set_exception(InferenceFailed(f"inference failed: {outcome.error}"))
            else:
                ticket.reply.set_result(outcome.logits[start:stop])
            start = stop
        if outcome.live and outcome.logits is not None:
            self._measure(outcome, rows=start)

    def _measure(self, outcome: _Outcome, rows: int) -> None:
        compute = outcome.ended - outcome.started
        rate = rows / max(compute, 1e-6) * self.batching.instances
        self._rows_per_second = rate if not self._rows_per_second else 0.9 * self._rows_per_second + 0.1 * rate
        if self._on_batch is not None:
            waited = tuple(outcome.started - ticket.arrived for ticket in outcome.live)
            self._on_batch(BatchTimes(rows, compute, waited))

    def _retry_after(self) -> int:
        """Seconds until the queue of now will have been served, at the pace of late."""
        return max(1, math.ceil(self._queued / self._rows_per_second)) if self._rows_per_second else 1

    def _note_drained(self) -> None:
        if self._closed and not self._queue and not self._running_batches:
            self._drained.set()
