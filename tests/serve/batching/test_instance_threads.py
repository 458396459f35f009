"""The threads alone: what they give to the model, what they report, and that a dead one is replaced."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from server_process import HANG
from vitx.core.preprocess import UInt8Array
from vitx.runtimes.session import Float32Array
from vitx.serve.batching.instance_threads import InstanceThreads
from vitx.serve.batching.request_queue import Batch, Infer, RequestPart


def part(*numbers: int) -> RequestPart:
    pixels = np.array(numbers, dtype=np.uint8).reshape(-1, 1, 1, 1).repeat(3, axis=3)
    return RequestPart(pixels, lambda done: None)


def batch(infer: Infer, *parts: RequestPart) -> Batch:
    return Batch([*parts], sum(each.rows for each in parts), infer)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(test(), HANG)

    asyncio.run(bounded())


def logits_of(images: UInt8Array) -> Float32Array:
    return images[:, 0, 0, :1].astype(np.float32)


def test_a_request_alone_is_not_copied_and_several_share_one_buffer() -> None:
    async def test() -> None:
        given: list[UInt8Array] = []
        seen: list[list[int]] = []
        results: asyncio.Queue[Batch] = asyncio.Queue()

        def infer(images: UInt8Array) -> Float32Array:
            given.append(images)
            seen.append(images[:, 0, 0, 0].tolist())
            return logits_of(images)

        threads = InstanceThreads(1, 4, results.put_nowait)
        alone = part(7, 8)
        for parts in ([alone], [part(1), part(2, 3)], [part(4, 5), part(6, 7)]):
            threads.put(batch(infer, *parts))
            result = await results.get()
            assert result.logits is not None
            assert result.logits[:, 0].tolist() == [row for each in parts for row in each.read()[0][:, 0, 0, 0]]
            assert (result.parts, result.error, result.died) == (parts, None, False)
        assert seen == [[7, 8], [1, 2, 3], [4, 5, 6, 7]]
        assert given[0] is alone.images
        assert np.shares_memory(given[1], given[2])
        await threads.close()

    run(test)


def test_cancelled_parts_are_left_out_and_a_batch_without_any_does_not_run() -> None:
    async def test() -> None:
        calls: list[int] = []
        results: asyncio.Queue[Batch] = asyncio.Queue()

        def infer(images: UInt8Array) -> Float32Array:
            calls.append(len(images))
            return logits_of(images)

        threads = InstanceThreads(1, 8, results.put_nowait)
        gone, kept, last = part(1, 2), part(3), part(4)
        gone.release()
        threads.put(batch(infer, gone, kept, last))
        result = await results.get()
        assert result.parts == [kept, last]
        assert result.logits is not None
        assert result.logits[:, 0].tolist() == [3, 4]
        threads.put(batch(infer, gone))
        result = await results.get()
        assert (result.parts, result.logits, result.error, result.died) == ([], None, None, False)
        assert calls == [2]
        await threads.close()

    run(test)


def test_the_moments_of_a_batch_are_in_order_and_around_the_model() -> None:
    async def test() -> None:
        moments: list[float] = []
        results: asyncio.Queue[Batch] = asyncio.Queue()

        def infer(images: UInt8Array) -> Float32Array:
            moments.append(time.monotonic())
            while time.monotonic() < moments[0] + 0.01:
                pass
            moments.append(time.monotonic())
            return logits_of(images)

        threads = InstanceThreads(1, 8, results.put_nowait)
        before = time.monotonic()
        sent = batch(infer, part(1), part(2))
        threads.put(sent)
        result = await results.get()
        assert sent.started is not None
        assert before <= sent.started <= result.gathered <= moments[0]
        assert moments[1] <= result.computed <= time.monotonic()
        assert result is sent
        await threads.close()

    run(test)


@pytest.mark.parametrize("logits", [np.zeros((3, 2)), np.zeros((2, 1, 1)), np.zeros(2)])
def test_logits_that_are_not_one_row_for_each_image_are_an_error(logits: Float32Array) -> None:
    async def test() -> None:
        results: asyncio.Queue[Batch] = asyncio.Queue()
        threads = InstanceThreads(1, 8, results.put_nowait)
        threads.put(batch(lambda rows: logits, part(1, 2)))
        result = await results.get()
        assert (result.logits, result.died) == (None, False)
        assert str(result.error) == f"the model returned {logits.shape} for 2 images"
        await threads.close()

    run(test)


def test_an_exception_leaves_the_thread_and_anything_else_replaces_it() -> None:
    async def test() -> None:
        failures: list[BaseException] = [ValueError("once"), SystemExit("killed"), KeyboardInterrupt()]
        results: asyncio.Queue[Batch] = asyncio.Queue()
        ran_on: list[threading.Thread] = []

        def infer(images: UInt8Array) -> Float32Array:
            ran_on.append(threading.current_thread())
            if failures:
                raise failures.pop(0)
            return logits_of(images)

        threads = InstanceThreads(1, 8, results.put_nowait)
        reported = []
        for number in range(4):
            threads.put(batch(infer, part(number)))
            result = await results.get()
            reported.append((type(result.error), result.died, result.logits is None))
        assert reported == [
            (ValueError, False, True),
            (SystemExit, True, True),
            (KeyboardInterrupt, True, True),
            (type(None), False, False),
        ]
        assert [ran_on.index(thread) for thread in ran_on] == [0, 0, 2, 3]
        assert len({id(thread) for thread in ran_on}) == 3
        assert all(thread.daemon for thread in ran_on), "a model that hangs must not keep the server from ending"
        await threads.close()
        for thread in ran_on:  # one that died has told so before its last instruction
            await asyncio.to_thread(thread.join, HANG)
        assert not any(thread.is_alive() for thread in ran_on)

    run(test)


def test_closing_runs_what_is_queued_on_every_instance_first() -> None:
    async def test() -> None:
        gate = threading.Event()
        started = threading.Semaphore(0)
        results: list[Batch] = []

        def infer(images: UInt8Array) -> Float32Array:
            started.release()
            assert gate.wait(HANG)
            return logits_of(images)

        threads = InstanceThreads(2, 8, results.append)
        for number in range(5):
            threads.put(batch(infer, part(number)))
        for _ in range(2):  # two at once
            await asyncio.to_thread(started.acquire)
        assert not started.acquire(blocking=False)
        closing = asyncio.ensure_future(threads.close())
        gate.set()
        await closing
        await asyncio.sleep(0)
        assert sorted(float(result.logits[0, 0]) for result in results if result.logits is not None) == [0, 1, 2, 3, 4]
        assert not [thread for thread in threads._threads.values() if thread.is_alive()]

    run(test)
