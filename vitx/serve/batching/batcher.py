"""Dynamic batching: one collector a model, driven by arrivals, completions and one timer. Nothing polls.

When a batch leaves
-------------------
* A full batch leaves at once, even while every instance is busy: each instance has one full batch standing by, so it
  never waits for the event loop between two batches. Full is the smallest size up to `max_batch` with nearly the most
  images a second by the latency curve: on a CPU 8 images are often as fast, each, as 32, and answered sooner.
* Where several instances are idle each gets its share of what is queued, the rows of one request included.
* A part-filled batch leaves only to an idle instance, and there as soon as waiting longer would gain nothing: when
  it holds its share of the rows that have lately been in the server together. A lone client is served without any
  delay; eight clients that answer each reply with the next request travel as one batch of eight.
* It leaves at the latest `max_delay` after its oldest request arrived, if an instance is idle, and early enough for
  the first deadline among its requests.

"Lately together" is the peak of rows queued and running, forgotten by a quarter with every batch.

Deadlines
---------
A request whose deadline the curve says cannot be met is refused when it arrives; one that waits until it cannot be
computed in time any more is refused then, and never runs. A batch is cut where a larger one would miss the first
deadline in it. All of this is planned with a twentieth of the time less than there is: what a request spends before it
is read and after its answer is written is not seen here.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from vitx.core.preprocess import UInt8Array
from vitx.runtimes.session import Float32Array
from vitx.serve.batching.latency_curve import LatencyCurve
from vitx.serve.batching.request_queue import Batch, RequestQueue, Ticket, priority_level
from vitx.serve.batching.workers import Infer as Infer
from vitx.serve.batching.workers import Outcome, Workers
from vitx.serve.errors import DeadlineMissed, InferenceFailed, QueueFull, RequestError, unavailable
from vitx.serve.limits import Batching
from vitx.serve.observe.model_statistics import BatchTimes, ModelStatistics
from vitx.serve.observe.request_record import CURRENT, RequestRecord

_LAG_RATE = 0.1  # how fast the mean time from a batch's end to its replies forgets
_WAKE_UP_SECONDS = 0.005  # what a timer, a thread and a reply may take together on a busy machine
_TIMER_GRAIN = 0.001  # of the event loop: a timer fires up to this much early
_UNSEEN_SHARE = 0.05  # of the time until a deadline, for the network and the sockets

_log = logging.getLogger("vitx.serve")

# Gets the logits (N, C), or the error.
Answer = Callable[[Float32Array | Exception], None]


class Batcher:
    """Collects the requests of one model into batches. Create it, and call its methods, on a running event loop."""

    def __init__(
        self,
        infer: Infer,
        batching: Batching | None = None,
        *,
        curve: LatencyCurve | None = None,
        on_batch: Callable[[BatchTimes], None] | None = None,
    ) -> None:
        """`curve` is what is known of the model's speed; it follows what is measured live, and is made so if None."""
        self.batching = batching or Batching()
        self.statistics = ModelStatistics()
        self.curve = curve or LatencyCurve()
        self._on_batch = on_batch
        self._loop = asyncio.get_running_loop()
        self._queue = RequestQueue()
        self._running: list[Batch] = []  # in the order in which they were handed over
        self._running_rows = 0
        self._together = 1.0
        self._lag = 0.0
        self._rows_per_second = 0.0
        self._full = self.curve.best_size(self.batching.max_batch, self.batching.preferred)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0  # uvloop's handle of a timer below a millisecond does not know
        self._closed = False
        self._drained = asyncio.Event()
        self._workers = Workers(infer, self.batching.instances, self.batching.max_batch, self._finish)

    @property
    def queued(self) -> int:
        """Rows that wait for a batch."""
        return self._queue.rows

    @property
    def running(self) -> int:
        """Rows in batches that were handed to an instance."""
        return self._running_rows

    @property
    def full_batch(self) -> int:
        """Rows of a batch that leaves at once."""
        return self._full

    @property
    def replaced_instances(self) -> int:
        """Instances that died and were replaced."""
        return self._workers.replaced

    async def submit(self, images: UInt8Array, *, priority: int = 0, deadline: float | None = None) -> Float32Array:
        """Return logits float32 (N, C) of images uint8 (N, S, S, 3), N ≥ 1.

        priority: 1 is the highest, 0 the default. deadline: in seconds by time.monotonic(); by default
        `Batching.timeout` from now, if there is one.

        The rows stay together, unless they are more than a full batch. Cancelling the caller takes rows that do not run
        yet out of the queue. Raises QueueFull, DeadlineMissed, InferenceFailed, or RequestError: 400 for a priority
        that there is not, 503 once closed.
        """
        reply: asyncio.Future[Float32Array] = self._loop.create_future()

        def answer(logits: Float32Array | Exception) -> None:
            if isinstance(logits, Exception):
                reply.set_exception(logits)
            else:
                reply.set_result(logits)

        submission = self.begin(images, answer, priority=priority, deadline=deadline)
        try:
            answered = await reply
        except asyncio.CancelledError:
            if reply.cancelled():
                submission.take_back()
            else:
                reply.exception()  # asyncio reports a failure that nobody looked at
            raise
        if (record := CURRENT.get()) is not None:
            _note(record, submission.tickets)
        return answered

    def begin(
        self, images: UInt8Array, answer: Answer, *, priority: int = 0, deadline: float | None = None
    ) -> "Submission":
        """`submit` without a task: `answer` is called on the event loop. Raises what is known at once."""
        now = time.monotonic()
        try:
            level = priority_level(priority)
            deadline = self._admit(len(images), level, deadline, now)
        except RequestError:
            self.statistics.add_failure(time.monotonic() - now)
            raise
        rows, step = len(images), self._share(len(images)) if not self._queue.rows else self._full
        parts = [images] if rows <= step else [images[start : start + step] for start in range(0, rows, step)]
        submission = Submission(self, answer, now)
        submission.tickets = [Ticket(part, submission.on_ticket, level, deadline, now) for part in parts]
        for ticket in submission.tickets:
            self._enqueue(ticket)
        self._collect()
        return submission

    async def close(self) -> None:
        """Finish what was accepted, refuse the rest, and end the worker threads."""
        self._closed = True
        self._collect()
        self._note_drained()
        await self._drained.wait()
        await self._workers.close()

    def _admit(self, rows: int, level: int, deadline: float | None, now: float) -> float | None:
        """Return the deadline to plan with; raise if the request cannot be queued, or not be answered in time."""
        if deadline is None and self.batching.timeout is not None:
            deadline = now + self.batching.timeout
        if deadline is not None:
            deadline -= _UNSEEN_SHARE * max(0.0, deadline - now)
        if self._closed:
            raise unavailable("the model is being unloaded", "draining")
        if self._queue.rows + rows > self.batching.queue:
            raise QueueFull(self._queue.rows, self.batching.queue, self._retry_after())
        if deadline is not None and (late := self._expected_answer(rows, level, now) - deadline) > 0:
            raise DeadlineMissed(max(0.0, deadline - now), deadline - now + late, max(1, math.ceil(late)))
        return deadline

    def _expected_answer(self, rows: int, level: int, now: float) -> float:
        """When a request that arrives now would have its answer, with allowance for the spread of batch times."""
        rows += self._queue.rows_before(level)
        return now + self._wait((rows - 1) // self._full, now) + self._own_batch(rows)

    def _own_batch(self, rows: int) -> float:
        """Seconds from the start of its batch to the answer of the last of so many rows; others may join it."""
        return self.curve.at_most(min(self._full, rows)) + self._lag

    def _wait(self, full_batches: int, now: float) -> float:
        """Seconds until an instance is free for what comes behind so many full batches; a machine slows all of them."""
        if len(self._running) + full_batches < self.batching.instances:
            return 0.0
        busy = sum(self._left(batch, now) for batch in self._running) + full_batches * self.curve.at_most(self._full)
        return busy / self.batching.instances

    def _left(self, batch: Batch, now: float) -> float:
        """Seconds that a batch handed over still needs."""
        seconds = self.curve.at_most(batch.rows)
        return seconds if batch.started is None else max(0.0, batch.started + seconds - now)

    def _enqueue(self, ticket: Ticket) -> None:
        self._queue.push(ticket)
        if ticket.deadline is not None:
            left = ticket.deadline - time.monotonic() - self._own_batch(self._queue.rows)
            ticket.timer = self._loop.call_later(max(0.0, left), self._expire, ticket)

    def _expire(self, ticket: Ticket) -> None:
        """A ticket cannot be answered in time any more: tell it so, unless an instance has it already."""
        batch = ticket.batch
        if ticket.done or (batch is not None and self._has_instance(batch)):
            return
        assert ticket.deadline is not None
        now = time.monotonic()
        left = ticket.deadline - now
        if left < _TIMER_GRAIN:
            refusal = DeadlineMissed(now - ticket.arrived, None, self._retry_after())
        else:
            refusal = DeadlineMissed(left, max(left, self._own_batch(ticket.rows)), self._retry_after())
        if batch is None:
            self._queue.remove(ticket)
        ticket.settle(error=refusal)
        self._note_drained()

    def _has_instance(self, batch: Batch) -> bool:
        """Whether a batch that was handed over runs, or begins to; if not it stands by."""
        return batch.started is not None or batch in self._running[: self.batching.instances]

    def drop(self, tickets: Sequence[Ticket]) -> None:
        """Forget what was given up, or belongs to a request of which another part failed."""
        for ticket in tickets:
            if ticket.timer is not None:
                ticket.timer.cancel()
            if ticket.batch is None:
                self._queue.remove(ticket)
            ticket.forget()
        self._collect()
        self._note_drained()

    def _collect(self, *, timer_fired: bool = False) -> None:
        """Send every batch that is due; else see to it that the oldest request does not wait too long."""
        while self._queue.rows and len(self._running) < 2 * self.batching.instances:
            idle = len(self._running) < self.batching.instances
            if self._queue.rows < self._full:
                now = time.monotonic()
                if not idle:
                    return
                if not timer_fired and not self._worth_sending() and (left := self._latest_start() - now) > 0:
                    self._set_timer(left)
                    return
            self._send_batch()
            timer_fired = False

    def _worth_sending(self) -> bool:
        """Whether a part-filled batch holds its share of the rows that are likely to come."""
        share = math.ceil(self._together / self.batching.instances)
        return self._closed or self._queue.rows >= min(share, round(self._together) - self._running_rows)

    def _latest_start(self) -> float:
        """Until when a part-filled batch may wait for company beside an idle instance."""
        start = self._queue.oldest_arrival() + self.batching.max_delay
        deadline = self._queue.earliest_deadline()
        if deadline is None:
            return start
        return min(start, deadline - self.curve.at_most(self._queue.rows + 1) - self._lag - _WAKE_UP_SECONDS)

    def _share(self, rows: int) -> int:
        """What of so many rows goes into one batch: a full one, or less where several instances are idle."""
        idle = max(1, self.batching.instances - len(self._running))
        return min(self._full, math.ceil(rows / idle))

    def _set_timer(self, seconds: float) -> None:
        """Look again in `seconds`; a timer that is set stays, for later requests only bring the moment forward."""
        due = self._loop.time() + seconds
        if self._timer is not None:
            if self._timer_due <= due:
                return
            self._timer.cancel()
        self._timer, self._timer_due = self._loop.call_later(seconds, self._on_timer), due

    def _on_timer(self) -> None:
        self._timer = None
        waits = self._queue.rows and self._latest_start() > time.monotonic() + _TIMER_GRAIN
        self._collect(timer_fired=not waits)

    def _send_batch(self) -> None:
        """Hand the next requests to the workers: a full batch, or less where a deadline asks for it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = time.monotonic()
        seen = float(self._queue.rows + self._running_rows)
        self._together = seen if seen > self._together else self._together + (seen - self._together) / 4
        tickets = self._queue.take(self._size(now), now)
        batch = Batch(tickets, sum(ticket.rows for ticket in tickets))
        for ticket in tickets:
            ticket.batch = batch
        self._running_rows += batch.rows
        self._running.append(batch)
        self._workers.put(batch)

    def _size(self, now: float) -> int:
        """The rows of the next batch: the best size, or the largest that keeps the first deadline."""
        whole = size = self._share(self._queue.rows)
        deadline = self._queue.earliest_deadline()
        if deadline is None:
            return size
        left = deadline - now - self._wait(0, now) - self._lag
        while size > 1 and self.curve.at_most(size) > left:
            size //= 2
        return size if self.curve.at_most(size) <= left else whole

    def _finish(self, outcome: Outcome) -> None:
        """Back on the event loop: first the next batch, then the replies."""
        self._running.remove(outcome.batch)
        self._running_rows -= outcome.batch.rows
        if outcome.died:
            _log.error("an instance ended with %r and was replaced", outcome.error)
            self._retry(outcome)
        elif outcome.logits is not None:
            self._learn(outcome)
        self._collect()
        self._answer(outcome)
        outcome.batch.tickets.clear()  # they refer to it
        self._note_drained()

    def _learn(self, outcome: Outcome) -> None:
        rows, seconds = len(outcome.logits) if outcome.logits is not None else 0, outcome.computed - outcome.gathered
        self.curve.observe(rows, seconds)
        rate = rows / max(seconds, 1e-6) * self.batching.instances
        self._rows_per_second = rate if not self._rows_per_second else 0.9 * self._rows_per_second + 0.1 * rate

    def _retry(self, outcome: Outcome) -> None:
        """Put what a dead instance held back in front; what is there for the second time fails."""
        for ticket in reversed(outcome.live):
            if ticket.done:
                continue
            if ticket.retried or (ticket.deadline is not None and ticket.deadline < time.monotonic()):
                ticket.settle(error=InferenceFailed(f"inference failed: the instance ended: {outcome.error!r}"))
            else:
                ticket.retried, ticket.batch = True, None
                self._queue.push(ticket, first=True)

    def _answer(self, outcome: Outcome) -> None:
        if outcome.died:
            return
        start = 0
        for ticket in outcome.live:
            stop = start + ticket.rows
            if ticket.timer is not None:
                ticket.timer.cancel()
            if ticket.done:
                pass  # given up while it ran
            elif outcome.logits is None:
                ticket.settle(error=InferenceFailed(f"inference failed: {outcome.error}"))
            else:
                ticket.settle(outcome.logits[start:stop])
            start = stop
        if outcome.logits is not None:
            self._measure(outcome)

    def _measure(self, outcome: Outcome) -> None:
        now, started = time.monotonic(), outcome.batch.started or outcome.gathered
        self._lag += _LAG_RATE * (now - outcome.computed - self._lag)
        times = BatchTimes(
            rows=sum(ticket.rows for ticket in outcome.live),
            gather=outcome.gathered - started,
            compute=outcome.computed - outcome.gathered,
            output=now - outcome.computed,
            queue=tuple(started - ticket.arrived for ticket in outcome.live),
        )
        self.statistics.add_batch(times)
        if self._on_batch is not None:
            self._on_batch(times)

    def _retry_after(self) -> int:
        """Seconds until the queue of now will have been served, at the pace of late."""
        return max(1, math.ceil(self._queue.rows / self._rows_per_second)) if self._rows_per_second else 1

    def _note_drained(self) -> None:
        if self._closed and not self._queue.rows and not self._running:
            self._drained.set()


class Submission:
    """A request that waits for its logits, in one ticket or several."""

    __slots__ = ("_answer", "_arrived", "_batcher", "tickets")

    def __init__(self, batcher: Batcher, answer: Answer, arrived: float) -> None:
        self._batcher, self._answer, self._arrived = batcher, answer, arrived
        self.tickets: Sequence[Ticket] = ()

    def on_ticket(self, ticket: Ticket) -> None:
        """One of the tickets was answered; the first that fails ends the others."""
        if ticket.error is not None:
            self.take_back()
            self._answer(ticket.error)
        elif (logits := self._together()) is not None:
            self._batcher.statistics.add_success(time.monotonic() - self._arrived)
            self._answer(logits)

    def take_back(self) -> None:
        """Nobody waits any more: rows that do not run yet leave the queue, and nothing is answered."""
        self._batcher.statistics.add_failure(time.monotonic() - self._arrived)
        self._batcher.drop(self.tickets)

    def _together(self) -> Float32Array | None:
        """The logits of all tickets, once all have theirs."""
        if len(self.tickets) == 1:
            return self.tickets[0].logits
        parts = [ticket.logits for ticket in self.tickets if ticket.logits is not None]
        return np.concatenate(parts) if len(parts) == len(self.tickets) else None


def _note(record: RequestRecord, tickets: Sequence[Ticket]) -> None:
    """Tell the access log and traces of a request that ran."""
    batches = [ticket.batch for ticket in tickets if ticket.batch is not None]
    started = min(batch.started for batch in batches if batch.started is not None)
    record.images = sum(ticket.rows for ticket in tickets)
    record.queue_entered, record.queue = tickets[0].arrived, started - tickets[0].arrived
    record.compute = max(batch.computed for batch in batches if batch.computed is not None) - started
