"""The size of a full batch under load, where the start measured something else, in virtual time."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from unittest.mock import patch

import numpy as np
import pytest

from virtual_time import run_virtually
from vitx.runtimes.session import Float32Array
from vitx.serve.batching.batcher import Batcher
from vitx.serve.batching.latency_curve import LatencyCurve
from vitx.serve.batching.request_queue import Batch
from vitx.serve.limits import Batching

SIZES = (1, 2, 4, 8, 16, 32)
ROUND_TRIP = 0.001  # seconds from a reply to the client's next request


class TimedInstances:
    """Takes the place of InstanceThreads; a batch takes `seconds(rows)`."""

    def __init__(self, count: int, seconds: Callable[[int], float], on_result: Callable[[Batch], None]) -> None:
        self.idle, self.seconds, self.on_result = count, seconds, on_result
        self.waiting: list[Batch] = []
        self.ran: list[int] = []

    def put(self, batch: Batch) -> None:
        self.waiting.append(batch)
        self.start()

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        while self.idle and self.waiting:
            batch = self.waiting.pop(0)
            rows = sum(part.rows for part in batch.parts)
            self.idle -= 1
            self.ran.append(rows)
            batch.started = batch.gathered = loop.time()
            batch.computed = batch.started + self.seconds(rows)
            batch.logits = np.zeros((rows, 2), np.float32)
            loop.call_at(batch.computed, self.finish, batch)

    def finish(self, batch: Batch) -> None:
        self.idle += 1
        self.start()
        self.on_result(batch)


def chosen(
    start: Mapping[int, float],
    truth: Callable[[int, float], float],
    clients: int = 64,
    seconds: float = 60.0,
    preferred: Sequence[int] = (),
) -> tuple[int, list[int]]:
    """The full batch after this load of one-image requests, and the rows of every batch. truth: of rows and time."""
    found: list[tuple[int, list[int]]] = []

    async def test() -> None:
        loop = asyncio.get_running_loop()
        made: list[TimedInstances] = []

        def instances(count: int, max_rows: int, on_result: Callable[[Batch], None]) -> TimedInstances:
            made.append(TimedInstances(count, lambda rows: truth(rows, loop.time()), on_result))
            return made[0]

        with patch("vitx.serve.batching.batcher.InstanceThreads", instances):
            batching = Batching(32, 0.002, queue=1024, instances=2, timeout=None, preferred=tuple(preferred))
            batcher = Batcher(lambda images: images[:, 0, 0, :2], batching, curve=LatencyCurve(start))  # type: ignore[arg-type,return-value]
        image = np.zeros((1, 1, 1, 3), np.uint8)

        def ask(answer: Float32Array | Exception | None = None) -> None:
            loop.call_later(ROUND_TRIP, batcher.enqueue, image, ask)

        for _ in range(clients):
            ask()
        await asyncio.sleep(seconds)
        found.append((batcher.full_batch, made[0].ran))

    run_virtually(test, "vitx.serve.batching.batcher")
    return found[0]


def usual(rows: int, now: float = 0.0) -> float:
    """8 is best: a batch costs .5 ms, and beyond 8 the caches are too small."""
    return 0.0005 + 0.0017 * rows * (1.0 if rows <= 8 else 1.06)


@pytest.mark.parametrize("disturbed", [(1,), (4, 8, 16, 32), (8,), (2, 4), (8, 16, 32)])
def test_a_start_that_was_disturbed_is_corrected(disturbed: tuple[int, ...]) -> None:
    start = {rows: usual(rows) * (1.4 if rows in disturbed else 1.0) for rows in SIZES}
    size, _ = chosen(start, usual)
    assert size == 8


def test_of_sizes_as_fast_as_each_other_the_smaller_answers_sooner() -> None:
    """16 has 0.4 % more images a second than 8, and each waits for twice as many."""

    def alike(rows: int, now: float = 0.0) -> float:
        return usual(8) * 2 / 1.004 if rows == 16 else usual(rows)

    size, _ = chosen({rows: alike(rows) * (1.4 if rows == 8 else 1.0) for rows in SIZES}, alike)
    assert size == 8


def test_a_start_that_was_right_stays_and_trials_become_rare() -> None:
    start = {rows: usual(rows) for rows in SIZES}
    size, ran = chosen(start, lambda rows, now: usual(rows) * (2.0 if 20 < now < 60 else 1.0), seconds=240)
    assert size == 8
    assert {4, 16} < set(ran)  # both neighbours are tried
    late = ran[len(ran) // 2 :]
    assert late.count(8) > 0.95 * len(late)


def test_few_requests_try_nothing() -> None:
    start = {rows: usual(rows) for rows in SIZES}
    _, ran = chosen(start, usual, clients=1)
    assert set(ran) == {1}
    _, ran = chosen(start, usual, clients=2)
    assert set(ran) <= {1, 2}


def test_only_the_optima_of_an_engine_are_tried() -> None:
    start = {rows: usual(rows) * (3.0 if rows == 8 else 1.0) for rows in (*SIZES, 12)}
    size, ran = chosen(start, usual, preferred=(2, 8, 12))
    assert size == 8
    assert set(ran[8:]) <= {2, 8, 12}
