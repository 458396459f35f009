"""What one request, and the server, may use, in the units of the code. Defaults are those of `ServeOptions`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of the server; see docs/serving.md for the status each one answers with."""

    body_bytes: int  # as sent, and once more when decompressed
    images: int  # in one request
    pixels: int  # of one image, before it is decoded
    header_bytes: int  # request line and headers
    json_depth: int  # nesting of objects and lists
    connections: int
    header_seconds: float  # from a request's first byte, or the connection, to the end of its headers
    body_seconds: float  # for the body, and a second more for every `body_rate` bytes of it
    message_seconds: float  # for the message of a gRPC call; how far it has come is not seen
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
