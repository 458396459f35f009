"""The queue of one model: first in, first out for each priority; docs/serving.md (Batching) says which is next."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from vitx.core.preprocess import UInt8Array
from vitx.runtimes.session import Float32Array

Infer = Callable[[UInt8Array], Float32Array]
# Uint8 (N, S, S, 3), or (1, S, S, 3) each; or one that the thread of its batch decodes: to (1, S, S, 3), or why not.
Images = UInt8Array | tuple[UInt8Array, ...] | list[Callable[[], UInt8Array | Exception]]
PRIORITY_LEVELS = 3
DEFAULT_PRIORITY = 2
PATIENCE = 1.0


@dataclass(eq=False, slots=True)
class RequestPart:
    """Images of one request that run in the same batch: all of them, unless the request is larger than a batch.

    `on_done(part)` is called on the event loop when the part has `logits` float32 (rows, C) or an `error`.
    """

    images: Images
    on_done: Callable[["RequestPart"], None]
    level: int = DEFAULT_PRIORITY
    deadline: float | None = None  # time.monotonic() seconds
    arrived: float = field(default_factory=time.monotonic)
    rows: int = field(init=False)
    batch: "Batch | None" = None
    timer: asyncio.TimerHandle | None = None
    retried: bool = False
    done: bool = False  # has a result or was cancelled
    unread: Exception | None = None  # why the image could not be decoded: it has no row in the batch
    logits: Float32Array | None = None
    error: Exception | None = None

    def __post_init__(self) -> None:
        self.rows = len(self.images)

    def read(self) -> list[UInt8Array]:
        """The pixels, in one array or one of each image; none if they cannot be decoded."""
        if isinstance(self.images, list):
            pixels = self.images[0]()
            if isinstance(pixels, Exception):
                self.unread = pixels
                return []
            self.images = pixels
        return [*self.images] if isinstance(self.images, tuple) else [self.images]

    def settle(self, logits: Float32Array | None = None, error: Exception | None = None) -> None:
        """Set the logits or the error, and call `on_done`."""
        on_done = self.on_done
        self.release()
        self.logits, self.error = logits, error
        on_done(self)

    def release(self) -> None:
        self.done, self.on_done = True, ignore
        if self.timer is not None:
            self.timer.cancel()


def ignore(result: object) -> None:
    """The callback of what is done: its own refers to it, a cycle that would wait for the garbage collector."""


@dataclass(eq=False, slots=True)
class Batch:
    """Parts that were handed to an instance. It takes out those that are done, and sets the fields below `infer`.

    Moments are seconds of time.monotonic(). gathered: when the images were in one array; computed: when the model had
    returned. died: the error ended the thread.
    """

    parts: list[RequestPart]
    rows: int  # that were handed over
    infer: Infer
    started: float | None = None
    gathered: float = 0.0
    computed: float = 0.0
    logits: Float32Array | None = None
    error: BaseException | None = None
    died: bool = False


class RequestQueue:
    """All levels of one model. `rows` is the number of queued images."""

    def __init__(self) -> None:
        self._levels: tuple[deque[RequestPart], ...] = tuple(deque() for _ in range(PRIORITY_LEVELS))
        self.rows, self._rows_by_level, self._with_deadline = 0, [0] * PRIORITY_LEVELS, 0
        self._oldest_first = False  # whether the last batch started with the oldest request

    def push(self, part: RequestPart, *, first: bool = False) -> None:
        level = self._levels[part.level - 1]
        (level.appendleft if first else level.append)(part)
        self._count(part, 1)

    def remove(self, part: RequestPart) -> None:
        """Remove a part if it is in the queue."""
        with suppress(ValueError):
            self._levels[part.level - 1].remove(part)
            self._count(part, -1)

    def take(self, size: int, now: float) -> list[RequestPart]:
        """Remove and return the next parts, at most `size` rows in all; the first one whatever its size."""
        first = self._starving_level(now) or self._next_level()
        assert first is not None, "the queue is empty"
        parts = [first.popleft()]
        left = size - parts[0].rows
        while (level := self._next_level()) and level[0].rows <= left:
            parts.append(level.popleft())
            left -= parts[-1].rows
        for part in parts:
            self._count(part, -1)
        return parts

    def rows_before(self, level: int) -> int:
        """Queued images that are taken before a new request of this level."""
        return sum(self._rows_by_level[:level])

    def oldest_arrival(self) -> float:
        return min(level[0].arrived for level in self._levels if level)

    def earliest_deadline(self) -> float | None:
        """The earliest deadline in the queue, if any request has one."""
        if not self._with_deadline:
            return None
        return min(part.deadline for level in self._levels for part in level if part.deadline is not None)

    def _next_level(self) -> deque[RequestPart] | None:
        return next(filter(None, self._levels), None)

    def _starving_level(self, now: float) -> deque[RequestPart] | None:
        """The level with the oldest request if that has waited too long; None for every second batch."""
        if self._oldest_first or not any(self._levels[1:]):
            self._oldest_first = False
            return None
        oldest = min((level for level in self._levels if level), key=lambda level: level[0].arrived)
        self._oldest_first = oldest[0].arrived + PATIENCE < now
        return oldest if self._oldest_first else None

    def _count(self, part: RequestPart, sign: int) -> None:
        rows = sign * part.rows
        self.rows += rows
        self._rows_by_level[part.level - 1] += rows
        if part.deadline is not None:
            self._with_deadline += sign
