"""What one request, and the server, may use, in the units of the code. Defaults are those of `ServeOptions`."""

from dataclasses import dataclass

from vitx.serve.errors import too_large, unavailable

UNCOUNTED_BYTES = 2**16  # a body of no more is not counted: it costs no more than its connection
# Numbers and classes that a reply says as text: more are written beside the event loop, or refused.
MANY_TEXTS, MOST_TEXTS = 2**12, 2**18
TEXTS = "numbers and classes as text in one reply, where binary ones have no limit"


@dataclass(frozen=True)
class Limits:
    """Limits of the server; see docs/serving.md for the status each one answers with."""

    body_bytes: int  # as sent, and once more when decompressed
    images: int  # in one request
    header_bytes: int  # request line and headers
    json_depth: int  # nesting of objects and lists
    connections: int
    header_seconds: float  # from a request's first byte, or the connection, to the end of its headers
    body_seconds: float  # for the body, and a second more for every `body_rate` bytes of it
    write_seconds: float  # for a client to take its reply, and a second more for every `body_rate` bytes of it
    memory_bytes: int  # of all bodies and untaken replies of a process, beside `UNCOUNTED_BYTES` of each connection
    message_seconds: float  # for the message of a gRPC call; how far it has come is not seen
    idle_seconds: float  # by default longer than connection pools keep a connection, so that the client closes it first
    body_rate: int = 16 * 2**10
    drain_seconds: float = 30.0  # what requests in flight get after the first signal


@dataclass(frozen=True)
class Batching:
    """How requests of one model become batches. Times are in seconds, `queue` counts images.

    timeout: what a request without a deadline of its own gets; None: it waits as long as it takes. preferred: the only
    sizes that a batch is cut to, such as the optima of an engine's profiles; by default what the latency curve says.
    """

    max_batch: int
    max_delay: float
    queue: int
    instances: int
    timeout: float | None
    preferred: tuple[int, ...] = ()


def check_most(found: int, most: int, what: str = "images in one request") -> None:
    if found > most:
        raise too_large(f"{found} {what}: at most {most}")


class MemoryBudget:
    """The bytes of all bodies in flight, and of replies not yet taken. Not thread-safe: use it on the event loop."""

    def __init__(self, limit: int) -> None:
        self._limit, self.used = limit, 0

    def fits(self, size: int) -> bool:
        return self.used + size <= self._limit

    def take(self, size: int) -> None:
        """Count more bytes; raise RequestError 503 if that is too much."""
        if not self.fits(size):
            raise unavailable(f"requests in flight have {self.used} of {self._limit} bytes", "memory")
        self.used += size

    def give(self, size: int, _: object = None) -> None:
        """Also the callback of a future."""
        self.used -= size
