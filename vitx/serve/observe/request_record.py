"""The record of one request for access log and traces, filled in by whoever handles the request."""

import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(slots=True)
class RequestRecord:
    """One request, made when it arrives. Durations in seconds, moments as time.monotonic(); None: it did not happen."""

    id: str
    traceparent: str | None = None  # the client's, see W3C Trace Context
    tracestate: str | None = None
    client: str | None = None  # its address
    sent: int | None = None  # bytes of the reply's body
    model: str | None = None
    images: int = 0
    decode_started: float | None = None
    decode: float | None = None  # of all its images
    queue_entered: float | None = None
    queue: float | None = None  # until its first batch started
    compute: float | None = None  # from then until its last batch was computed
    started: float = field(default_factory=time.monotonic)

    def phases(self) -> list[tuple[str, float, float]]:
        """(name, start, end) of the phases that happened."""
        found = []
        if self.decode_started is not None and self.decode is not None:
            found.append(("decode", self.decode_started, self.decode_started + self.decode))
        if self.queue_entered is not None and self.queue is not None and self.compute is not None:
            left = self.queue_entered + self.queue
            found += [("queue", self.queue_entered, left), ("compute", left, left + self.compute)]
        return found


class RequestObserver(Protocol):
    """Its `write` is called for every request that has ended; `seconds`: its whole time."""

    def write(self, record: RequestRecord, method: str, path: str, status: int, seconds: float) -> None: ...
    def close(self) -> None: ...


# The record of the request that the present task handles.
CURRENT_RECORD: ContextVar[RequestRecord | None] = ContextVar("CURRENT_RECORD", default=None)
