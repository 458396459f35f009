"""What waits for a batch: one first-in-first-out queue a priority level, served in order, but never starved.

Level 1 leaves first, then 2, then 3; a request without a priority is of level 2. So that a busy level 1 does not hold
the others for ever, every second batch begins with the request that has waited longest, once that is more than
`PATIENCE` seconds: a request behind k others of its level leaves at the latest after `PATIENCE` and 2(k + 1) batches.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from vitx.core.preprocess import UInt8Array
from vitx.runtimes.session import Float32Array
from vitx.serve.errors import RequestError

PRIORITY_LEVELS = 3
DEFAULT_PRIORITY = 2
PATIENCE = 1.0


def priority_level(priority: int) -> int:
    """Triton's `priority` as a level: 0 is the default, 1 the highest; raise RequestError for a level there is not."""
    if not 0 <= priority <= PRIORITY_LEVELS:
        raise RequestError(
            f"priority is {str(priority)[:20]}: expected 0 (the default) or 1 (the highest) to {PRIORITY_LEVELS}"
        )
    return priority or DEFAULT_PRIORITY


@dataclass(eq=False, slots=True)
class Ticket:
    """Rows that travel in one batch: a request, or a part of one that is larger than a batch.

    `answer(ticket)` is called on the event loop when it has `logits` (rows, C) or an `error`.
    """

    images: UInt8Array
    answer: Callable[["Ticket"], None]
    level: int = DEFAULT_PRIORITY
    deadline: float | None = None  # time.monotonic() seconds
    arrived: float = field(default_factory=time.monotonic)
    rows: int = field(init=False)
    batch: "Batch | None" = None
    timer: asyncio.TimerHandle | None = None
    retried: bool = False
    done: bool = False  # answered, or given up
    logits: Float32Array | None = None
    error: Exception | None = None

    def __post_init__(self) -> None:
        self.rows = len(self.images)

    def settle(self, logits: Float32Array | None = None, error: Exception | None = None) -> None:
        """Answer it, with one of the two."""
        answer = self.answer
        self.forget()
        self.logits, self.error = logits, error
        answer(self)

    def forget(self) -> None:
        """Answer nobody any more, and hold nobody: what refers to itself waits for the garbage collector."""
        self.done, self.answer = True, _nobody


def _nobody(ticket: Ticket) -> None:
    """Whom a ticket tells that was answered or given up."""


@dataclass(eq=False, slots=True)
class Batch:
    """Tickets that were handed to an instance, which writes when it `started` and had `computed` (time.monotonic())."""

    tickets: list[Ticket]
    rows: int
    started: float | None = None
    computed: float | None = None


class RequestQueue:
    """The levels of one model. `rows` is the number of images that wait."""

    def __init__(self) -> None:
        self._levels: tuple[deque[Ticket], ...] = tuple(deque() for _ in range(PRIORITY_LEVELS))
        self.rows = 0
        self._rows_by_level = [0] * PRIORITY_LEVELS
        self._with_deadline = 0
        self._was_patient = False

    def __iter__(self) -> Iterator[Ticket]:
        return (ticket for level in self._levels for ticket in level)

    def push(self, ticket: Ticket, *, first: bool = False) -> None:
        level = self._levels[ticket.level - 1]
        if first:
            level.appendleft(ticket)
        else:
            level.append(ticket)
        self._count(ticket, 1)

    def remove(self, ticket: Ticket) -> bool:
        """Take a ticket out; False if it does not wait here."""
        try:
            self._levels[ticket.level - 1].remove(ticket)
        except ValueError:
            return False
        self._count(ticket, -1)
        return True

    def take(self, size: int, now: float) -> list[Ticket]:
        """Take the next tickets of at most `size` rows together; the first whatever its size."""
        first = self._impatient(now) or self._next_level()
        assert first is not None, "the queue is empty"
        tickets = [self._pop(first)]
        left = size - tickets[0].rows
        while (level := self._next_level()) and level[0].rows <= left:
            ticket = self._pop(level)
            left -= ticket.rows
            tickets.append(ticket)
        return tickets

    def rows_before(self, level: int) -> int:
        """Images that leave before a new request of this level."""
        return sum(self._rows_by_level[:level])

    def oldest_arrival(self) -> float:
        return min(level[0].arrived for level in self._levels if level)

    def earliest_deadline(self) -> float | None:
        """The first deadline of all that wait."""
        if not self._with_deadline:
            return None
        return min(ticket.deadline for ticket in self if ticket.deadline is not None)

    def _next_level(self) -> deque[Ticket] | None:
        for level in self._levels:
            if level:
                return level
        return None

    def _impatient(self, now: float) -> deque[Ticket] | None:
        """The level whose first request has waited longest, if that is too long; for every second batch."""
        if self._was_patient or not any(self._levels[1:]):
            self._was_patient = False
            return None
        waiting = min((level for level in self._levels if level), key=lambda level: level[0].arrived)
        self._was_patient = waiting[0].arrived + PATIENCE < now
        return waiting if self._was_patient else None

    def _pop(self, level: deque[Ticket]) -> Ticket:
        ticket = level.popleft()
        self._count(ticket, -1)
        return ticket

    def _count(self, ticket: Ticket, sign: int) -> None:
        rows = sign * ticket.rows
        self.rows += rows
        self._rows_by_level[ticket.level - 1] += rows
        if ticket.deadline is not None:
            self._with_deadline += sign
