"""Dynamic batching: one batcher a model. It acts on arrivals, on completions and on one timer; it never polls.

docs/serving.md (Batching) says when a batch is sent, and how deadlines are planned. `_concurrent_rows` is the peak of
rows queued and running, which decays by a quarter with every batch: of it a partial batch must hold its share. So one
client waits for a few batches after a request of many rows alone, and eight who send after a reply form one of eight.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial

import numpy as np

from vitx.runtimes.session import Float32Array
from vitx.serve.batching.instance_threads import InstanceThreads
from vitx.serve.batching.latency_curve import LatencyCurve
from vitx.serve.batching.request_queue import DEFAULT_PRIORITY, Batch, Images, Infer, RequestPart, RequestQueue, ignore
from vitx.serve.batching.size_search import size_search
from vitx.serve.callbacks import awaited, batch_of_replies, settle
from vitx.serve.errors import DeadlineMissed, QueueFull, RequestError, inference_failed, unavailable
from vitx.serve.limits import Batching
from vitx.serve.observe.model_statistics import BatchTimes, ModelStatistics
from vitx.serve.observe.request_record import CURRENT_RECORD, RequestRecord

_LAG_RATE = 0.1  # weight of the newest batch in the mean time from a batch's end to its replies
_WAKE_UP_SECONDS = 0.005  # of a timer, a thread and a reply together, on a busy machine
_TIMER_GRAIN = 0.001  # seconds: the event loop's timers fire up to this much early
_UNSEEN_SHARE = 0.05  # of the time to a deadline, for the network and the sockets

_log = logging.getLogger("vitx.serve")

# Called with the logits (N, C) or with the error.
OnLogits = Callable[[Float32Array | Exception], None]


class Batcher:
    """Forms batches of the requests of one model. Create it, and call its methods, on a running event loop."""

    def __init__(
        self,
        infer: Infer,
        batching: Batching,
        *,
        curve: LatencyCurve | None = None,
        on_batch: Callable[[BatchTimes], None] = ignore,
        under_load: Infer | None = None,
    ) -> None:
        """`curve`: the model's measured speed, by default empty; it learns from every batch that runs.

        under_load: runs the batches that others are beside, by default `infer` too.
        """
        self.batching = batching
        self.statistics = ModelStatistics()
        self.curve = curve or LatencyCurve()
        self._on_batch = on_batch
        self._loop = asyncio.get_running_loop()
        self._queue = RequestQueue()
        self._running: list[Batch] = []  # handed to the threads, in this order
        self.running = 0  # rows in them
        self.replaced_instances = 0  # so many have died
        self._concurrent_rows, self._reply_lag = 1.0, 0.0
        largest, preferred, instances = self.batching.max_batch, self.batching.preferred, self.batching.instances
        self.full_batch = self.curve.best_size(largest, preferred)
        self._search = size_search(self.curve.sizes(largest, preferred), self.full_batch, instances)
        next(self._search)
        self._enough = self.full_batch  # rows of a batch that is sent at once: full, or so many that one can stand by
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._drained = asyncio.Event()
        self._infer, self._under_load = infer, under_load or infer
        self._threads = InstanceThreads(instances, largest, self._finish)

    @property
    def queued(self) -> int:
        """Rows in the queue."""
        return self._queue.rows

    async def submit(self, images: Images, *, priority: int = 0, deadline: float | None = None) -> Float32Array:
        """Return logits float32 (N, C) of images uint8 (N, S, S, 3), N ≥ 1, or of one that is still to be decoded.

        priority: 1 (highest) to 3, 0 for the default. deadline: time.monotonic() seconds; None: it may take any time.
        Cancelling removes images that do not run yet. Raises QueueFull, DeadlineMissed, why an image cannot be read,
        or RequestError: 500 where the model raises, 503 after `close`.
        """
        reply: asyncio.Future[Float32Array] = self._loop.create_future()
        submission = self.enqueue(images, partial(settle, reply), priority=priority, deadline=deadline)
        answered = await awaited(reply, submission.cancel)
        if (record := CURRENT_RECORD.get()) is not None:
            record_times(record, submission.parts)
        return answered

    def enqueue(
        self, images: Images, on_logits: OnLogits, *, priority: int = 0, deadline: float | None = None
    ) -> "Submission":
        """`submit` with a callback, which runs on the event loop. Raises QueueFull, DeadlineMissed or RequestError."""
        now, rows, level = time.monotonic(), len(images), priority or DEFAULT_PRIORITY
        try:
            deadline = self._admit(rows, level, deadline, now)
        except RequestError:
            self.statistics.add_request(time.monotonic() - now, failed=True)
            raise
        step = self.full_batch if self._queue.rows else self._share(rows)
        pieces = [images[start : start + step] for start in range(0, rows, step)]
        submission = Submission(self, on_logits, now)
        submission.parts = [RequestPart(piece, submission.on_part, level, deadline, now) for piece in pieces]
        for part in submission.parts:
            self._queue.push(part)
            if deadline is not None:
                self._refuse_later(part, self._queue.rows_before(level))
        self._send_due_batches()
        return submission

    async def close(self) -> None:
        """Refuse new requests, finish the accepted ones, and end the threads."""
        self._closed = True
        self._send_due_batches()
        self._note_drained()
        await self._drained.wait()
        await self._threads.close()

    def _admit(self, rows: int, level: int, deadline: float | None, now: float) -> float | None:
        """Return the deadline to plan with; raise if the queue is full or the request could not be answered in time."""
        if deadline is not None:
            deadline -= _UNSEEN_SHARE * max(0.0, deadline - now)
        if self._closed:
            raise unavailable("the model is being unloaded", "draining")
        if self._queue.rows + rows > self.batching.queue:
            raise QueueFull(self._queue.rows, self.batching.queue, self._retry_after())
        if deadline is not None and (late := self._expected_answer(rows, level, now) - deadline) > 0:
            left = max(0.0, deadline - now)
            # None left: it passed while the request was read.
            raise DeadlineMissed(left, left + late if left else None, max(1, math.ceil(late)))
        return deadline

    def _expected_answer(self, rows: int, level: int, now: float) -> float:
        """When (time.monotonic()) a request that arrives now would be answered, by pessimistic batch times.

        By the least ones where nothing runs: only a batch can show that a time of slow ones is over.
        """
        if not self._queue.rows and not self._running:
            rounds = math.ceil(math.ceil(rows / self.full_batch) / self.batching.instances)
            return now + rounds * self.curve.fastest(min(self.full_batch, rows))
        rows += self._queue.rows_before(level)
        return now + self._wait_seconds((rows - 1) // self.full_batch, now) + self._last_batch_seconds(rows)

    def _last_batch_seconds(self, rows: int) -> float:
        """Seconds from the start of the batch with the last of `rows` rows to its answer; others may join the batch."""
        return self.curve.at_most(min(self.full_batch, rows)) + self._reply_lag

    def _wait_seconds(self, full_batches: int, now: float) -> float:
        """Seconds until an instance is free for a batch behind `full_batches` others."""
        if len(self._running) + full_batches < self.batching.instances:
            return 0.0
        busy = full_batches * self.curve.at_most(self.full_batch)
        busy += sum(self._remaining(batch, now) for batch in self._running)
        return busy / self.batching.instances

    def _remaining(self, batch: Batch, now: float) -> float:
        """Seconds until a batch that was handed over has been computed."""
        seconds = self.curve.at_most(batch.rows)
        return seconds if batch.started is None else max(0.0, batch.started + seconds - now)

    def _refuse_later(self, part: RequestPart, rows: int) -> None:
        """Set the timer at which a part cannot be computed in time: the first `rows` rows to be taken end with it."""
        if part.timer is not None:
            part.timer.cancel()
        if part.deadline is not None:
            left = part.deadline - time.monotonic() - self._last_batch_seconds(rows)
            part.timer = self._loop.call_later(max(0.0, left), self._expire, part)

    def _expire(self, part: RequestPart) -> None:
        """Refuse a part that can no longer be answered in time, unless its batch runs or is about to."""
        batch = part.batch
        if part.done or (batch and (batch.started is not None or batch in self._running[: self.batching.instances])):
            return
        assert part.deadline is not None
        left = part.deadline - (now := time.monotonic())
        passed, retry = left < _TIMER_GRAIN, self._retry_after()
        needed = None if passed else max(left, self._last_batch_seconds(part.rows))
        part.settle(error=DeadlineMissed(now - part.arrived if passed else left, needed, retry))  # drops all its parts

    def drop(self, parts: Sequence[RequestPart]) -> None:
        """Remove the parts of a request that was cancelled, or of which another part failed."""
        for part in parts:
            if part.batch is None:
                self._queue.remove(part)
            part.release()
        self._send_due_batches()
        self._note_drained()

    def _send_due_batches(self, *, timer_fired: bool = False) -> None:
        """Send every batch that is due; set the timer for a partial batch that may still wait."""
        while self._queue.rows and len(self._running) < 2 * self.batching.instances:
            if self._queue.rows < self._enough:
                if len(self._running) >= self.batching.instances:  # none is idle
                    return
                if not timer_fired and not self._worth_sending() and (left := self._may_wait()) > 0:
                    self._stop_timer()
                    self._timer = self._loop.call_later(left, self._on_timer)
                    return
            self._send_batch()
            timer_fired = False

    def _worth_sending(self) -> bool:
        """Whether a partial batch holds its share of the recent concurrency, so that waiting would gain nothing."""
        share = math.ceil(self._concurrent_rows / self.batching.instances)
        return self._closed or self._queue.rows >= min(share, round(self._concurrent_rows) - self.running)

    def _may_wait(self) -> float:
        """Seconds that a partial batch may wait from now on for more requests while an instance is idle."""
        start = self._queue.oldest_arrival() + self.batching.max_delay
        if (deadline := self._queue.earliest_deadline()) is not None:
            start = min(start, deadline - self.curve.at_most(self._queue.rows + 1) - self._reply_lag - _WAKE_UP_SECONDS)
        return start - time.monotonic()

    def _share(self, rows: int) -> int:
        """Rows of one batch when `rows` are queued: a full batch, or an equal share for each idle instance."""
        return min(self.full_batch, math.ceil(rows / max(1, self.batching.instances - len(self._running))))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _on_timer(self) -> None:
        self._send_due_batches(timer_fired=not self._queue.rows or self._may_wait() <= _TIMER_GRAIN)

    def _send_batch(self) -> None:
        """Hand the next batch to the threads: a full one, or a smaller one where a deadline needs it."""
        self._stop_timer()
        now = time.monotonic()
        rows_now = float(self._queue.rows + self.running)
        self._concurrent_rows = max(rows_now, self._concurrent_rows + (rows_now - self._concurrent_rows) / 4)
        self._enough = self.curve.size_to_stand_by(
            round(self._concurrent_rows), self.batching.instances, self.full_batch, self.batching.preferred
        )
        parts = self._queue.take(self._size(now), now)
        rows = sum(part.rows for part in parts)
        # Alone by the recent concurrency: a batch that begins alone may soon have others beside it.
        batch = Batch(parts, rows, self._infer if rows >= round(self._concurrent_rows) else self._under_load)
        for part in parts:
            part.batch = batch
        self.running += batch.rows
        self._running.append(batch)
        self._threads.put(batch)

    def _size(self, now: float) -> int:
        """Rows of the next batch: what is enough, halved until it meets the earliest deadline if any size does."""
        whole = size = min(self._enough, self._share(self._queue.rows))
        if (deadline := self._queue.earliest_deadline()) is None:
            return size
        left = deadline - now - self._wait_seconds(0, now) - self._reply_lag
        while size > 1 and self.curve.at_most(size) > left:
            size //= 2
        return size if self.curve.at_most(size) <= left else whole

    def _finish(self, batch: Batch) -> None:
        """Take a batch that has run: first send the next one, then answer the requests of this one."""
        self._running.remove(batch)
        self.running -= batch.rows
        if batch.died:
            self.replaced_instances += 1
            _log.error("an instance ended with %r and was replaced", batch.error)
            self._retry(batch)
        elif batch.logits is not None and batch.started is not None:  # with the time to decode or gather images
            self.curve.observe(len(batch.logits), batch.computed - batch.started)
            self.full_batch = self._search.send((batch.rows, batch.computed))
        self._send_due_batches()
        if not batch.died:
            self._answer(batch)
        batch.parts.clear()  # breaks the reference cycle: each part refers to its batch
        self._note_drained()

    def _retry(self, batch: Batch) -> None:
        """Put the parts of a dead instance back at the front.

        A part fails when a second instance dies of it, or when it can no longer be computed in time.
        """
        now, failed = time.monotonic(), []
        for part in reversed(batch.parts):
            if part.done:
                continue
            if part.retried or (
                part.deadline is not None and part.deadline < now + self._last_batch_seconds(part.rows)
            ):
                failed.append(part)
            else:
                part.retried, part.batch = True, None
                self._queue.push(part, first=True)
                self._refuse_later(part, part.rows)
        for part in failed:  # only now, because this sends batches: the parts above must all be in the queue
            if not part.done:
                part.settle(error=inference_failed(f"the instance ended: {batch.error!r}"))

    def _answer(self, batch: Batch) -> None:
        start = 0
        with batch_of_replies() if len(batch.parts) > 1 else nullcontext():
            for part in batch.parts:  # one that was cancelled while it ran tells nobody
                stop = start + (part.rows if part.unread is None else 0)
                if part.unread is not None:
                    part.settle(error=part.unread)
                elif batch.logits is None:
                    part.settle(error=inference_failed(batch.error))
                else:
                    part.settle(batch.logits[start:stop])
                start = stop
        if batch.logits is not None:
            self._measure(batch, len(batch.logits))

    def _measure(self, batch: Batch, rows: int) -> None:
        now, started = time.monotonic(), batch.started
        assert started is not None
        self._reply_lag += _LAG_RATE * (now - batch.computed - self._reply_lag)
        # Not a tuple: Python keeps 2,000 of each length that a generator makes.
        queue = [started - part.arrived for part in batch.parts if part.unread is None]
        times = BatchTimes(rows, batch.gathered - started, batch.computed - batch.gathered, now - batch.computed, queue)
        self.statistics.add_batch(times)
        self._on_batch(times)

    def _retry_after(self) -> int:
        """Whole seconds until an instance is free for a batch behind the present queue."""
        return max(1, math.ceil(self._wait_seconds(math.ceil(self._queue.rows / self.full_batch), time.monotonic())))

    def _note_drained(self) -> None:
        if self._closed and not self._queue.rows and not self._running:
            self._drained.set()


class Submission:
    """A request in the batcher, in one part or several."""

    __slots__ = ("_arrived", "_batcher", "_on_logits", "parts")

    def __init__(self, batcher: Batcher, on_logits: OnLogits, arrived: float) -> None:
        self._batcher, self._on_logits, self._arrived = batcher, on_logits, arrived
        self.parts: Sequence[RequestPart] = ()

    def on_part(self, part: RequestPart) -> None:
        """Called when a part is done: the first error ends the request, the last logits answer it."""
        if part.error is not None:
            on_logits = self._on_logits
            self.cancel(counted=part.unread is None)
            on_logits(part.error)
        elif len(found := [part.logits for part in self.parts if part.logits is not None]) == len(self.parts):
            self._batcher.statistics.add_request(time.monotonic() - self._arrived)
            on_logits, self._on_logits = self._on_logits, ignore
            on_logits(found[0] if len(found) == 1 else np.concatenate(found))

    def cancel(self, *, counted: bool = True) -> None:
        """Remove rows from the queue that do not run yet; the callback is not called."""
        self._on_logits = ignore
        if counted:
            self._batcher.statistics.add_request(time.monotonic() - self._arrived, failed=True)
        self._batcher.drop(self.parts)


def record_times(record: RequestRecord, parts: Sequence[RequestPart]) -> None:
    """Write the times of a request that ran into its record, for access log and traces."""
    batches = [part.batch for part in parts if part.batch is not None]
    record.images = sum(part.rows for part in parts)
    record.phases["queue"] = parts[0].arrived, min(batch.started or batch.gathered for batch in batches)
    record.phases["compute"] = min(batch.gathered for batch in batches), max(batch.computed for batch in batches)
