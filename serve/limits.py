"""What one request, and the server, may use. Every limit has a default, and an error of its own."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Limits of the server; see docs/serving.md for the status each one answers with."""

    body_bytes: int = 64 * 2**20
    images: int = 256  # in one request
    pixels: int = 50_000_000  # of one image, before it is decoded
    drain_seconds: float = 30.0  # what requests in flight get after the first signal


@dataclass(frozen=True)
class Batching:
    """How requests of one model become batches. `max_delay` is in seconds, `queue` counts images."""

    max_batch: int = 32
    max_delay: float = 0.002
    queue: int = 1024
    instances: int = 1
