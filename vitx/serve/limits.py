"""What one request, and the server, may use. Every limit has a default, and an error of its own."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of the server; see docs/serving.md for the status each one answers with."""

    body_bytes: int = 64 * 2**20  # as sent, and once more when decompressed
    images: int = 256  # in one request
    pixels: int = 50_000_000  # of one image, before it is decoded
    header_bytes: int = 32 * 2**10  # request line and headers
    json_depth: int = 16  # of objects and lists in one another
    header_seconds: float = 10.0  # from a request's first byte, or the connection, to the end of its headers
    body_seconds: float = 20.0  # for the body, and a second more for every `body_rate` bytes of it
    body_rate: int = 16 * 2**10
    message_seconds: float = 60.0  # for the message of a gRPC call; how far it has come is not seen
    connections: int = 1000
    drain_seconds: float = 30.0  # what requests in flight get after the first signal


@dataclass(frozen=True)
class Batching:
    """How requests of one model become batches. Times are in seconds, `queue` counts images.

    timeout: what a request without a deadline of its own gets; None: it waits as long as it takes. preferred: the only
    sizes that a batch is cut to, such as the optima of an engine's profiles; by default what the latency curve says.
    """

    max_batch: int = 32
    max_delay: float = 0.002
    queue: int = 1024
    instances: int = 1
    timeout: float | None = None
    preferred: tuple[int, ...] = ()
