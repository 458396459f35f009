"""The collector alone: when batches leave, what they hold, and what a failure or a cancellation touches."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine

import numpy as np
import pytest

from vitx.core.preprocess import UInt8Array
from vitx.serve.batcher import Batcher, BatchTimes
from vitx.serve.errors import InferenceFailed, QueueFull, RequestError
from vitx.serve.limits import Batching
from vitx.serve.runtimes import Float32Array


class Model:
    """Logits (N, 2): the image's own number, and that number doubled. Waits for `gate`, records its batches."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.started = threading.Semaphore(0)

    def __call__(self, images: UInt8Array) -> Float32Array:
        self.batches.append(len(images))
        self.started.release()
        assert self.gate.wait(10)
        number = images[:, 0, 0, 0].astype(np.float32)
        if (number == 13).any():
            raise RuntimeError("unlucky")
        return np.stack([number, 2 * number], axis=1)


def images(*numbers: int) -> UInt8Array:
    return np.array(numbers, dtype=np.uint8).reshape(-1, 1, 1, 1).repeat(3, axis=3)


def run(test: Callable[[], Coroutine[None, None, None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test(), 20)

    asyncio.run(limited())


async def busy(model: Model, batcher: Batcher) -> asyncio.Task[Float32Array]:
    """Occupy the only instance with a batch of one that waits for the gate."""
    model.gate.clear()
    task = asyncio.create_task(batcher.submit(images(0)))
    await asyncio.to_thread(model.started.acquire)
    return task


async def submitted(batcher: Batcher, *requests: UInt8Array) -> list[asyncio.Task[Float32Array]]:
    tasks = [asyncio.create_task(batcher.submit(request)) for request in requests]
    await asyncio.sleep(0)
    return tasks


async def answer(task: Awaitable[Float32Array]) -> list[float]:
    return [float(value) for value in (await task)[:, 0]]


def test_a_lone_request_does_not_wait_for_company() -> None:
    async def test() -> None:
        model = Model()
        batcher = Batcher(model, Batching(max_delay=15))  # waiting for it would exceed the test's limit
        assert await answer(batcher.submit(images(3))) == [3]
        assert await answer(batcher.submit(images(4, 5))) == [4, 5]
        await batcher.close()
        assert model.batches == [1, 2]

    run(test)


def test_what_arrives_while_the_model_runs_becomes_one_batch() -> None:
    async def test() -> None:
        model = Model()
        batcher = Batcher(model, Batching(max_batch=8))
        first = await busy(model, batcher)
        others = await submitted(batcher, images(1), images(2, 3), images(4))
        assert (batcher.queued, batcher.running) == (4, 1)
        model.gate.set()
        assert [await answer(task) for task in others] == [[1], [2, 3], [4]]
        assert await answer(first) == [0]
        assert model.batches == [1, 4]
        await batcher.close()

    run(test)


def test_the_deadline_is_kept_when_the_expected_company_stays_away() -> None:
    async def test() -> None:
        model = Model()
        batcher = Batcher(model, Batching(max_batch=8, max_delay=0.03))
        first = await busy(model, batcher)
        rest = await submitted(batcher, *(images(number) for number in range(1, 7)))
        model.gate.set()
        await asyncio.gather(first, *rest)  # seven were together: a lone request now waits, but not for ever
        loop = asyncio.get_running_loop()
        started = loop.time()
        assert await answer(batcher.submit(images(9))) == [9]
        assert 0.02 < loop.time() - started < 2
        await batcher.close()

    run(test)


def test_rows_of_a_request_stay_together_and_a_large_request_is_split_and_joined() -> None:
    async def test() -> None:
        model = Model()
        batcher = Batcher(model, Batching(max_batch=4))
        first = await busy(model, batcher)
        tasks = await submitted(batcher, images(1, 2, 3), images(4, 5), images(*range(20, 30)))
        model.gate.set()
        assert [await answer(task) for task in tasks] == [[1, 2, 3], [4, 5], list(range(20, 30))]
        await first
        assert model.batches == [1, 3, 2, 4, 4, 2]
        await batcher.close()

    run(test)


def test_a_full_batch_stands_by_while_the_model_runs() -> None:
    async def test() -> None:
        model = Model()
        batcher = Batcher(model, Batching(max_batch=2))
        first = await busy(model, batcher)
        tasks = await submitted(batcher, *(images(number) for number in range(5)))
        assert (batcher.queued, batcher.running) == (3, 3)  # one runs, two stand by, three wait
        model.gate.set()
        await asyncio.gather(first, *tasks)
        await batcher.close()

    run(test)


def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    async def test() -> None:
        model = Model()
        batcher = Batcher(model, Batching(max_batch=4, queue=3))
        first = await busy(model, batcher)
        tasks = await submitted(batcher, images(1), images(2, 3))
        with pytest.raises(QueueFull) as refusal:
            await batcher.submit(images(4))
        assert str(refusal.value) == "queue full: 3 of 3 images are waiting; try again in 1 s"
        assert (refusal.value.status, refusal.value.retry_after) == (429, 1)
        model.gate.set()
        await asyncio.gather(first, *tasks)
        assert await answer(batcher.submit(images(4))) == [4]
        await batcher.close()

    run(test)


def test_a_cancelled_request_leaves_the_queue_and_never_runs() -> None:
    async def test() -> None:
        model = Model()
        batcher = Batcher(model, Batching(max_batch=2))
        first = await busy(model, batcher)
        standing_by, waiting, kept = await submitted(batcher, images(1, 1), images(2), images(3))
        for task in (standing_by, waiting):
            task.cancel()
        await asyncio.wait([standing_by, waiting])
        assert batcher.queued == 1
        model.gate.set()
        assert await answer(kept) == [3]
        await first
        await batcher.close()
        assert model.batches == [1, 1]
        assert (batcher.queued, batcher.running) == (0, 0)

    run(test)


def test_a_failure_is_of_its_batch_alone() -> None:
    async def test() -> None:
        model = Model()
        batcher = Batcher(model, Batching(max_batch=2))
        first = await busy(model, batcher)
        tasks = await submitted(batcher, images(1, 2), images(13), images(3), images(4, 5), images(6, 7, 13))
        model.gate.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for index in (1, 2, 4):
            failure = results[index]
            assert isinstance(failure, InferenceFailed)
            assert (str(failure), failure.status) == ("inference failed: unlucky", 500)
        assert [await answer(tasks[index]) for index in (0, 3)] == [[1, 2], [4, 5]]
        assert await answer(first) == [0]
        assert await answer(batcher.submit(images(8))) == [8]
        await batcher.close()

    run(test)


def test_a_model_that_returns_too_few_rows_fails_clearly() -> None:
    async def test() -> None:
        batcher = Batcher(lambda rows: np.zeros((1, 2), dtype=np.float32))
        with pytest.raises(InferenceFailed, match=r"^inference failed: the model returned \(1, 2\) for 2 images$"):
            await batcher.submit(images(1, 2))
        await batcher.close()

    run(test)


def test_closing_finishes_what_was_accepted_and_refuses_the_rest() -> None:
    async def test() -> None:
        model = Model()
        batcher = Batcher(model, Batching(max_batch=2, max_delay=15))
        first = await busy(model, batcher)
        tasks = await submitted(batcher, *(images(number) for number in range(1, 6)))
        closing = asyncio.create_task(batcher.close())
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="the model is being unloaded"):
            await batcher.submit(images(9))
        assert not closing.done()
        model.gate.set()
        await closing
        assert [await answer(task) for task in (first, *tasks)] == [[0], [1], [2], [3], [4], [5]]

    run(test)


def test_every_instance_works_at_once_and_every_reply_is_its_own() -> None:
    async def test() -> None:
        model, times = Model(), list[BatchTimes]()
        model.gate.clear()
        batcher = Batcher(model, Batching(max_batch=4, instances=2), on_batch=times.append)
        tasks = await submitted(batcher, *(images(number) for number in range(20, 120)))
        for _ in range(2):
            await asyncio.to_thread(model.started.acquire)
        model.gate.set()
        assert [await answer(task) for task in tasks] == [[number] for number in range(20, 120)]
        await batcher.close()
        assert sum(batch.rows for batch in times) == 100

    run(test)
