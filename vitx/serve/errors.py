"""The errors of requests: each has an HTTP status, a reason for the metrics, and a text for the client."""

from typing import NoReturn

NO_CUDA = "CUDA shared memory is not offered: use system shared memory"


class RequestError(Exception):
    """A refused request. `reason`: its label in `vitx_rejections_total`. `retry_after`: whole seconds."""

    def __init__(
        self, message: str, *, status: int = 400, reason: str = "bad_request", retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.reason, self.retry_after = status, reason, retry_after


class QueueFull(RequestError):
    """The queue has no room for the images of this request."""

    def __init__(self, queued: int, capacity: int, retry_after: int) -> None:
        text = f"queue full: {queued} of {capacity} images are waiting; try again in {retry_after} s"
        super().__init__(text, status=429, reason="queue_full", retry_after=retry_after)


class DeadlineMissed(RequestError):
    """A request that missed its deadline (`passed`), or is expected to miss it."""

    def __init__(self, allowed: float, needed: float | None, retry_after: int) -> None:
        """`allowed`: seconds to the deadline, or in the queue until it passed; `needed`: seconds to the answer."""
        self.passed = needed is None
        if needed is None:
            when = f"after {1000 * allowed:.0f} ms in the queue" if allowed else "while the request was read"
            text = f"the deadline passed {when}"
        else:
            text = f"the deadline is in {1000 * allowed:.0f} ms, and the answer is expected in {1000 * needed:.0f} ms"
        text += f"; try again in {retry_after} s"
        super().__init__(text, status=503, reason="deadline", retry_after=retry_after)


def inference_failed(why: object) -> RequestError:
    return RequestError(f"inference failed: {why}", status=500, reason="inference_failed")


def too_large(message: str) -> RequestError:
    return RequestError(message, status=413, reason="too_large")


def unsupported(message: str) -> RequestError:
    return RequestError(message, status=415, reason="unsupported_media")


def unavailable(message: str, reason: str) -> RequestError:
    return RequestError(message, status=503, reason=reason, retry_after=1)


def not_offered(what: str) -> NoReturn:
    raise RequestError(what, status=501, reason="not_offered")
