"""The record of one request for access log and traces, filled in by whoever handles the request."""

import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(slots=True)
class RequestRecord:
    """One request, made when it arrives. Moments are seconds of time.monotonic().

    phases: start and end of "decode" (all its images), "queue" (until its first batch started) and "compute" (until its
    last batch was computed), of those that happened.
    """

    id: str
    traceparent: str | None = None  # the client's, see W3C Trace Context
    tracestate: str | None = None
    client: str | None = None  # its address
    sent: int | None = None  # bytes of the reply's body
    model: str | None = None
    images: int = 0
    phases: dict[str, tuple[float, float]] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)


class RequestObserver(Protocol):
    """Its `write` is called for every request that has ended; `seconds`: its whole time."""

    def write(self, record: RequestRecord, method: str, path: str, status: int, seconds: float) -> None: ...
    def close(self) -> None: ...


# The record of the request that the present task handles.
CURRENT_RECORD: ContextVar[RequestRecord | None] = ContextVar("CURRENT_RECORD", default=None)
