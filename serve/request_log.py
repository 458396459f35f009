"""What is known of the request that the present task answers, gathered where it is known; for the access log."""

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(slots=True)
class RequestRecord:
    """One request. Times in seconds; None for what did not happen."""

    id: str
    model: str | None = None
    images: int = 0
    decode: float | None = None  # of all its images
    queue: float | None = None  # until its first batch began
    compute: float | None = None  # from there until its last batch was computed


# None where nobody will read it.
CURRENT: ContextVar[RequestRecord | None] = ContextVar("CURRENT", default=None)
