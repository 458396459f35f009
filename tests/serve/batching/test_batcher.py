"""The batcher alone: when batches are sent, what is in them, and what a failure or a cancellation affects."""

import asyncio
import gc
import sys
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from server_process import HANG
from vitx.core.preprocess import UInt8Array
from vitx.runtimes.session import Float32Array
from vitx.serve.batching.batcher import Batcher
from vitx.serve.batching.latency_curve import LatencyCurve
from vitx.serve.batching.request_queue import PATIENCE, RequestPart, RequestQueue
from vitx.serve.errors import DeadlineMissed, QueueFull, RequestError
from vitx.serve.observe.model_statistics import BatchTimes
from vitx.serve.options import ServeOptions


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
        assert self.gate.wait(HANG)
        number = images[:, 0, 0, 0].astype(np.float32)
        if (number == 13).any():
            raise RuntimeError("unlucky")
        return np.stack([number, 2 * number], axis=1)


def images(*numbers: int) -> UInt8Array:
    return np.array(numbers, dtype=np.uint8).reshape(-1, 1, 1, 1).repeat(3, axis=3)


LOOPS = [asyncio.new_event_loop]
if sys.platform != "win32":
    import uvloop

    LOOPS.append(uvloop.new_event_loop)  # the server's


def run(test: Callable[[], Coroutine[None, None, None]]) -> None:
    """Run a test on each event loop that a server may have."""

    async def limited() -> None:
        await asyncio.wait_for(test(), HANG)

    for new_loop in LOOPS:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(limited())


async def busy(model: Model, batcher: Batcher) -> asyncio.Task[Float32Array]:
    """Occupy the only instance with a batch of one that waits for the gate."""
    model.gate.clear()
    task = asyncio.create_task(batcher.submit(images(0)))
    await asyncio.to_thread(model.started.acquire)
    return task


async def submitted(batcher: Batcher, *requests: UInt8Array, **given: Any) -> list[asyncio.Task[Float32Array]]:
    tasks = [asyncio.create_task(batcher.submit(request, **given)) for request in requests]
    await asyncio.sleep(0)
    return tasks


async def answer(task: Awaitable[Float32Array]) -> list[float]:
    return [float(value) for value in (await task)[:, 0]]


def test_a_single_request_does_not_wait_for_others() -> None:
    async def test() -> None:
        model = Model()
        # Waiting for the delay would exceed the test's limit.
        batcher = Batcher(model, ServeOptions(max_delay_ms=1000 * HANG).batching)
        assert await answer(batcher.submit(images(3))) == [3]
        assert await answer(batcher.submit(images(4, 5))) == [4, 5]
        await batcher.close()
        assert model.batches == [1, 2]

    run(test)


def test_a_lone_client_and_several_have_sessions_of_their_own() -> None:
    async def ask(batcher: Batcher, times: int) -> None:
        for number in range(times):
            assert await answer(batcher.submit(images(number))) == [number]

    async def test() -> None:
        alone, beside = Model(), Model()
        batcher = Batcher(alone, ServeOptions(max_batch=4, instances=2).batching, under_load=beside)
        await ask(batcher, 3)
        await batcher.submit(images(1, 2))  # a part for each instance
        assert (alone.batches, beside.batches) == ([1, 1, 1], [1, 1])
        clients = [asyncio.create_task(ask(batcher, 6)) for _ in range(2)]
        await asyncio.wait(clients, return_when=asyncio.FIRST_COMPLETED)
        assert len(alone.batches) == 3  # also for a batch that begins while no other runs
        await asyncio.gather(*clients)
        await ask(batcher, 9)  # the load is forgotten
        assert len(alone.batches) > 3
        await batcher.close()

    run(test)


def test_what_arrives_while_the_model_runs_becomes_one_batch() -> None:
    async def test() -> None:
        model = Model()
        batcher = Batcher(model, ServeOptions(max_batch=8).batching)
        first = await busy(model, batcher)
        others = await submitted(batcher, images(1), images(2, 3), images(4))
        assert (batcher.queued, batcher.running) == (4, 1)
        model.gate.set()
        assert [await answer(task) for task in others] == [[1], [2, 3], [4]]
        assert await answer(first) == [0]
        assert model.batches == [1, 4]
        await batcher.close()

    run(test)


def test_max_delay_is_kept_when_the_expected_requests_do_not_come() -> None:
    async def test() -> None:
        model = Model()
        batcher = Batcher(model, ServeOptions(max_batch=8, max_delay_ms=30).batching)
        first = await busy(model, batcher)
        rest = await submitted(batcher, *(images(number) for number in range(1, 7)))
        model.gate.set()
        await asyncio.gather(first, *rest)  # seven were together: a lone request now waits, but not for ever
        started = time.monotonic()
        assert await answer(batcher.submit(images(9))) == [9]
        assert time.monotonic() - started > 0.02
        await batcher.close()

    run(test)


def test_rows_of_a_request_stay_together_and_a_large_request_is_split_and_joined() -> None:
    async def test() -> None:
        model = Model()
        batcher = Batcher(model, ServeOptions(max_batch=4).batching)
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
        batcher = Batcher(model, ServeOptions(max_batch=2).batching)
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
        batcher = Batcher(model, ServeOptions(max_batch=4, queue=3).batching)
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
        batcher = Batcher(model, ServeOptions(max_batch=2).batching)
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


def test_a_failure_affects_only_its_batch() -> None:
    async def test() -> None:
        model = Model()
        batcher = Batcher(model, ServeOptions(max_batch=2).batching)
        first = await busy(model, batcher)
        tasks = await submitted(batcher, images(1, 2), images(13), images(3), images(4, 5), images(6, 7, 13))
        model.gate.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for index in (1, 2, 4):
            failure = results[index]
            assert isinstance(failure, RequestError)
            assert (str(failure), failure.status) == ("inference failed: unlucky", 500)
        assert [await answer(tasks[index]) for index in (0, 3)] == [[1, 2], [4, 5]]
        assert await answer(first) == [0]
        assert await answer(batcher.submit(images(8))) == [8]
        await batcher.close()

    run(test)


def test_a_model_that_returns_too_few_rows_fails_clearly() -> None:
    async def test() -> None:
        batcher = Batcher(lambda rows: np.zeros((1, 2), dtype=np.float32), ServeOptions().batching)
        with pytest.raises(RequestError, match=r"^inference failed: the model returned \(1, 2\) for 2 images$"):
            await batcher.submit(images(1, 2))
        await batcher.close()

    run(test)


def test_closing_finishes_what_was_accepted_and_refuses_the_rest() -> None:
    async def test() -> None:
        model = Model()
        batcher = Batcher(model, ServeOptions(max_batch=2, max_delay_ms=1000 * HANG).batching)
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
        batcher = Batcher(model, ServeOptions(max_batch=4, instances=2).batching, on_batch=times.append)
        tasks = await submitted(batcher, *(images(number) for number in range(20, 120)))
        for _ in range(2):
            await asyncio.to_thread(model.started.acquire)
        model.gate.set()
        assert [await answer(task) for task in tasks] == [[number] for number in range(20, 120)]
        await batcher.close()
        assert sum(batch.rows for batch in times) == 100

    run(test)


def curve(seconds: float, full: int) -> LatencyCurve:
    """Each image takes the same time, and in a batch of `full` images a little less."""
    return LatencyCurve({1: 1.1 * seconds, full: full * seconds})


def test_a_higher_priority_leaves_first_and_the_default_is_the_middle() -> None:
    async def test() -> None:
        model = Model()
        batcher = Batcher(model, ServeOptions(max_batch=1).batching)
        first, standing_by = await busy(model, batcher), asyncio.create_task(batcher.submit(images(0)))
        await asyncio.sleep(0)
        order: list[int] = []

        async def ask(number: int, priority: int) -> None:
            await batcher.submit(images(number), priority=priority)
            order.append(number)

        tasks = [asyncio.create_task(ask(number, priority)) for number, priority in ((3, 3), (2, 0), (1, 1), (4, 2))]
        await asyncio.sleep(0)
        model.gate.set()
        await asyncio.gather(first, standing_by, *tasks)
        assert order == [1, 2, 4, 3]
        await batcher.close()

    run(test)


def test_a_low_priority_is_not_starved() -> None:
    def part(number: int, level: int, arrived: float) -> RequestPart:
        return RequestPart(images(number), lambda part: None, level, None, arrived)

    queue = RequestQueue()
    queue.push(part(9, 3, arrived=0))
    queue.push(part(8, 3, arrived=0))
    for number in range(4):
        queue.push(part(number, 1, arrived=PATIENCE))
    taken = [queue.take(1, now=PATIENCE + 0.5)[0].read()[0][0, 0, 0, 0] for _ in range(5)]
    assert taken == [9, 0, 8, 1, 2]  # every second batch begins with what waited too long
    assert queue.rows == 1


def test_a_deadline_that_cannot_be_met_is_refused_at_once() -> None:
    async def test() -> None:
        model = Model()
        batcher = Batcher(model, ServeOptions(max_batch=4).batching, curve=curve(50, 4))  # a busy machine takes seconds
        first = await busy(model, batcher)
        others = await submitted(batcher, images(1, 2, 3, 4), images(5, 6, 7, 8))
        now = time.monotonic()
        with pytest.raises(DeadlineMissed) as refusal:  # 55 s run, 400 s are queued, and its own batch of 200 s
            await batcher.submit(images(9), deadline=now + 450)  # when that has passed, the test's time is over
        assert (refusal.value.status, refusal.value.reason) == (503, "deadline")
        assert 200 < (refusal.value.retry_after or 0) <= 255
        assert str(refusal.value).startswith("the deadline is in 4")
        urgent = asyncio.create_task(batcher.submit(images(9), priority=1, deadline=now + 450))  # passes the queue
        model.gate.set()
        assert await answer(urgent) == [9]
        await asyncio.gather(first, *others)
        await batcher.close()

    run(test)


def test_a_deadline_that_passes_in_the_queue_is_answered_then_and_never_runs() -> None:
    async def test() -> None:
        model = Model()
        batcher = Batcher(model, ServeOptions(max_batch=1).batching)
        first = await busy(model, batcher)
        started = time.monotonic()
        standing_by, queued = await submitted(batcher, images(1), images(2), deadline=started + 0.05)
        for task in (standing_by, queued):
            with pytest.raises(DeadlineMissed, match=r"; try again in 1 s$"):  # its time: test_batcher_by_hand.py
                await task
        assert time.monotonic() - started > 0.04  # and while the first one runs
        assert batcher.queued == 0
        model.gate.set()
        assert await answer(first) == [0]  # it ran already, so it is answered, late
        await batcher.close()
        assert model.batches == [1]

    run(test)


def test_a_batch_is_cut_to_the_size_that_is_fastest_an_image() -> None:
    async def test() -> None:
        model = Model()
        batcher = Batcher(model, ServeOptions(max_batch=16).batching, curve=LatencyCurve({1: 2.0, 4: 4.0, 16: 32.0}))
        first = await busy(model, batcher)
        tasks = await submitted(batcher, *(images(number) for number in range(1, 13)))
        model.gate.set()
        await asyncio.gather(first, *tasks)
        await batcher.close()
        assert model.batches == [1, 4, 4, 4]

    run(test)


def test_a_batch_is_cut_where_a_larger_one_would_miss_a_deadline() -> None:
    async def test() -> None:
        model = Model()
        batcher = Batcher(model, ServeOptions(max_batch=8).batching, curve=curve(20, 8))
        first = await busy(model, batcher)
        standing_by = await submitted(batcher, images(*range(8)))
        tasks = await submitted(batcher, *(images(number) for number in range(1, 8)))
        tasks += [asyncio.create_task(batcher.submit(images(8), priority=1, deadline=time.monotonic() + 240))]
        await asyncio.sleep(0)
        model.gate.set()
        await asyncio.gather(first, *standing_by, *tasks)
        await batcher.close()
        assert model.batches[:2] == [1, 8]
        assert model.batches[2] < 8

    run(test)


def test_an_instance_that_dies_is_replaced_and_its_requests_run_once_more() -> None:
    async def test() -> None:
        model, deaths = Model(), [2]

        def mortal(rows: UInt8Array) -> Float32Array:
            if deaths[0] and rows[0, 0, 0, 0] == 7:
                deaths[0] -= 1
                raise SystemExit("killed")
            return model(rows)

        batcher = Batcher(mortal, ServeOptions(max_batch=2).batching)
        with pytest.raises(RequestError, match=r"^inference failed: the instance ended: SystemExit\('killed'\)$"):
            await batcher.submit(images(7))  # twice
        deaths[0] = 1
        assert await answer(batcher.submit(images(7))) == [7]
        assert await answer(batcher.submit(images(8))) == [8]
        assert batcher.replaced_instances == 3
        await batcher.close()

    run(test)


def test_idle_instances_share_what_is_queued() -> None:
    async def test() -> None:
        model = Model()
        model.gate.clear()
        batcher = Batcher(model, ServeOptions(max_batch=8, instances=2).batching)
        whole = asyncio.create_task(batcher.submit(images(*range(1, 7))))
        for _ in range(2):
            await asyncio.to_thread(model.started.acquire)
        model.gate.set()
        assert await answer(whole) == [1, 2, 3, 4, 5, 6]
        assert model.batches == [3, 3]
        await batcher.close()

    run(test)


def test_a_delay_shorter_than_the_timer_resolution_is_kept_too() -> None:
    async def test() -> None:
        model = Model()
        batcher = Batcher(model, ServeOptions(max_batch=8, max_delay_ms=0.3).batching)
        for _ in range(20):  # seven together, and then fewer: those wait, for less than a millisecond
            await asyncio.gather(*await submitted(batcher, *(images(number) for number in range(7))))
            await asyncio.gather(*await submitted(batcher, images(1), images(2), images(3)))
        await batcher.close()

    run(test)


def test_finished_requests_leave_nothing_to_the_garbage_collector() -> None:
    async def test() -> None:
        model = Model()
        batcher = Batcher(model, ServeOptions(max_batch=4).batching)
        gc.collect()
        gc.disable()
        try:
            for _ in range(20):
                await asyncio.gather(*await submitted(batcher, images(1), images(2, 3), images(*range(10))))
                (cancelled,) = await submitted(batcher, images(4))
                cancelled.cancel()
                await asyncio.wait([cancelled])
            del cancelled
            left = [
                thing for thing in gc.get_objects() if type(thing) is RequestPart
            ]  # isinstance would run code of other objects
            assert len(left) <= 8  # those of the last batch are still referenced by the thread
        finally:
            gc.enable()
        await batcher.close()

    run(test)


def test_a_callback_that_knows_its_request_is_freed_with_it() -> None:
    """Each request was a cycle of 44 objects: collecting them took a fifth of the event loop's time."""

    async def test() -> None:
        batcher = Batcher(Model(), ServeOptions().batching)
        answered = asyncio.Semaphore(0)

        def ask(*, cancelled: bool) -> weakref.ref[Callable[..., None]]:
            def on_logits(_: Float32Array | Exception) -> None:
                assert submission.parts
                answered.release()

            submission = batcher.enqueue(images(1), on_logits)
            if cancelled:
                submission.cancel()
            return weakref.ref(on_logits)

        gc.disable()
        try:
            callbacks = [ask(cancelled=cancelled) for cancelled in (False, True, False)]
            await answered.acquire()
            await answered.acquire()
            await batcher.close()
            assert [callback() for callback in callbacks] == [None] * 3
        finally:
            gc.enable()

    run(test)
