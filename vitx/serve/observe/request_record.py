"""What is known of the request that the present task answers, gathered where it is known; for log and traces."""

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True)
class RequestRecord:
    """One request. Durations in seconds, moments by time.monotonic(); None for what did not happen."""

    id: str
    traceparent: str | None = None  # the client's, of W3C Trace Context
    tracestate: str | None = None
    model: str | None = None
    images: int = 0
    decode_started: float | None = None
    decode: float | None = None  # of all its images
    queue_entered: float | None = None
    queue: float | None = None  # until its first batch began
    compute: float | None = None  # from there until its last batch was computed

    def phases(self) -> list[tuple[str, float, float]]:
        """Name, begin and end of what it spent its time on."""
        found = []
        if self.decode_started is not None and self.decode is not None:
            found.append(("decode", self.decode_started, self.decode_started + self.decode))
        if self.queue_entered is not None and self.queue is not None and self.compute is not None:
            left = self.queue_entered + self.queue
            found += [("queue", self.queue_entered, left), ("compute", left, left + self.compute)]
        return found


class RequestObserver(Protocol):
    """What is told of every request that has ended; `seconds` is its whole time."""

    def write(self, record: RequestRecord, method: str, path: str, status: int, seconds: float) -> None: ...


# None where nobody will read it.
CURRENT: ContextVar[RequestRecord | None] = ContextVar("CURRENT", default=None)
