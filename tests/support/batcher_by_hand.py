"""A batcher whose instances a test runs by hand, in virtual time."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from unittest.mock import patch

import numpy as np

from virtual_time import run_virtually
from vitx.core.preprocess import UInt8Array
from vitx.runtimes.session import Float32Array
from vitx.serve.batching.batcher import Batcher, Submission
from vitx.serve.batching.latency_curve import LatencyCurve
from vitx.serve.batching.request_queue import Batch, ignore
from vitx.serve.errors import RequestError
from vitx.serve.limits import Batching
from vitx.serve.observe.model_statistics import BatchTimes


def run(test: Callable[[], Awaitable[None]]) -> None:
    run_virtually(test, "vitx.serve.batching.batcher")


def images(*numbers: int) -> UInt8Array:
    return np.array(numbers, dtype=np.uint8).reshape(-1, 1, 1, 1).repeat(3, axis=3)


def numbers(batch: Batch) -> list[int]:
    return [int(number) for part in batch.parts for read in part.read() for number in read[:, 0, 0, 0]]


class Instances:
    """Takes the place of InstanceThreads: batches wait until the test runs them.

    made_for: how many there are, and the rows of the largest batch.
    """

    made_for = 0, 0

    def __init__(self) -> None:
        self.batches: list[Batch] = []
        self.closed = False
        self.on_result: Callable[[Batch], None] = ignore

    def put(self, batch: Batch) -> None:
        assert not self.closed
        self.batches.append(batch)

    async def close(self) -> None:
        self.closed = True

    async def run(
        self, seconds: float = 0.1, *, gather: float = 0, lag: float = 0, error: BaseException | None = None
    ) -> list[int]:
        """Run the oldest batch; return the numbers of its images. `lag`: until the event loop has the result."""
        batch = self.batches.pop(0)
        loop = asyncio.get_running_loop()
        batch.started = loop.time()
        batch.parts = [part for part in batch.parts if not part.done]
        given = numbers(batch)
        await asyncio.sleep(gather)
        batch.gathered = loop.time()
        await asyncio.sleep(seconds)
        batch.computed = loop.time()
        await asyncio.sleep(lag)
        batch.error, batch.died = error, error is not None and not isinstance(error, Exception)
        if error is None and given:
            batch.logits = np.array(given, dtype=np.float32)[:, None]
        self.on_result(batch)
        return given


def made(
    curve: dict[int, float] | None = None, *, on_batch: Callable[[BatchTimes], None] = ignore, **settings: Any
) -> tuple[Batcher, Instances]:
    instances = Instances()

    def replaced(count: int, max_rows: int, on_result: Callable[[Batch], None]) -> Instances:
        instances.made_for, instances.on_result = (count, max_rows), on_result
        return instances

    defaults: dict[str, Any] = {"max_batch": 8, "max_delay": 0.0, "queue": 100, "instances": 1, "timeout": None}
    batching = Batching(**{**defaults, **settings})
    with patch("vitx.serve.batching.batcher.InstanceThreads", replaced):
        known = LatencyCurve(curve) if curve else None
        return Batcher(lambda rows: np.zeros((1, 1), np.float32), batching, curve=known, on_batch=on_batch), instances


def now() -> float:
    return asyncio.get_running_loop().time()


def pending() -> int:
    """Timers of the event loop that would still fire."""
    return sum(not handle.cancelled() for handle in asyncio.get_running_loop()._scheduled)  # type: ignore[attr-defined]


async def seven_together(ask: "Asked", instances: Instances) -> None:
    """From then on a request alone waits for company."""
    ask("first", 0)
    for number in range(1, 7):
        ask(f"{number}", number)
    await instances.run()
    await instances.run()


class Asked:
    """Requests with their replies: numbers, or the error."""

    def __init__(self, batcher: Batcher) -> None:
        self.batcher = batcher
        self.replies: dict[str, list[float] | Exception] = {}

    def __call__(self, name: str, *given: int, allowed: float | None = None, priority: int = 0) -> Submission | None:
        def on_logits(logits: Float32Array | Exception) -> None:
            assert name not in self.replies
            self.replies[name] = logits if isinstance(logits, Exception) else [float(row[0]) for row in logits]

        deadline = None if allowed is None else now() + allowed
        try:
            return self.batcher.enqueue(images(*given), on_logits, priority=priority, deadline=deadline)
        except RequestError as error:
            self.replies[name] = error
            return None


def counts(batcher: Batcher) -> tuple[int, int]:
    stats = batcher.statistics.as_json("m", "1")["inference_stats"]
    return stats["success"]["count"], stats["fail"]["count"]
