"""Replies of a batch are written together, after all of them are made; large bodies are read one after the other."""

import asyncio
import threading
from functools import partial

import numpy as np
import pytest

from server_process import HANG
from vitx.serve.batching.batcher import Batcher
from vitx.serve.callbacks import batch_of_replies, read_on_thread, write_with_batch
from vitx.serve.limits import Batching


def test_what_is_written_with_a_batch_waits_for_its_end_in_order() -> None:
    done: list[str] = []
    write_with_batch(lambda: done.append("alone"))
    with batch_of_replies():
        write_with_batch(lambda: done.append("first"))
        write_with_batch(lambda: done.append("second"))
        done.append("made")
    write_with_batch(lambda: done.append("later"))
    assert done == ["alone", "made", "first", "second", "later"]


def test_a_batch_that_fails_writes_what_it_has() -> None:
    done: list[int] = []

    def fail() -> None:
        with batch_of_replies():
            write_with_batch(lambda: done.append(1))
            raise ValueError("unlucky")

    with pytest.raises(ValueError, match="unlucky"):
        fail()
    write_with_batch(lambda: done.append(2))
    assert done == [1, 2]


@pytest.mark.parametrize("images", [3, 4])
def test_the_batcher_answers_all_of_a_batch_before_the_first_is_written(images: int) -> None:
    events: list[str] = []

    def answer(number: int) -> None:
        events.append(f"made {number}")
        write_with_batch(lambda: events.append(f"written {number}"))

    async def ask() -> None:
        batching = Batching(max_batch=4, max_delay=1.0, queue=8, instances=1, timeout=None)
        batcher = Batcher(lambda images: images[:, 0, 0, :2].astype(np.float32), batching)
        for number in range(images):
            image = np.full((1, 1, 1, 3), number, dtype=np.uint8)
            batcher.enqueue(image, lambda logits: answer(int(np.asarray(logits)[0, 0])))
        await batcher.close()

    asyncio.run(ask())
    # The first had the idle instance for itself, the others were a batch.
    assert events[:2] == ["made 0", "written 0"]
    assert events[2:] == [f"{done} {number}" for done in ("made", "written") for number in range(1, images)]


def test_large_bodies_are_read_one_at_a_time_and_small_ones_beside_them() -> None:
    """With as many threads as an executor has, six readers held up the event loop six times as long as one."""
    let_go, first, begun = threading.Event(), threading.Event(), list[int]()

    def read(number: int) -> int:
        begun.append(number)
        if number == 3:
            assert first.wait(HANG)
        else:
            first.set()
            assert let_go.wait(HANG)
        return number

    async def test() -> list[int]:
        large = [read_on_thread(2**24, partial(read, number)) for number in range(3)]
        assert await read_on_thread(2**15, partial(read, 3)) == 3
        assert sorted(begun) == [0, 3]
        let_go.set()
        return await asyncio.gather(*large)

    assert asyncio.run(test()) == [0, 1, 2]
