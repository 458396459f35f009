"""The queue alone: its order, its counts, and parts that are equal in all they hold and yet two."""

import numpy as np

from vitx.core.preprocess import UInt8Array
from vitx.serve.batching.request_queue import Batch, RequestPart, RequestQueue

IMAGES: UInt8Array = np.zeros((2, 1, 1, 3), np.uint8)


def part(level: int = 2, *, rows: int = 1, arrived: float = 0.0, deadline: float | None = None) -> RequestPart:
    return RequestPart(np.zeros((rows, 1, 1, 3), np.uint8), lambda done: None, level, deadline, arrived)


def filled(*parts: RequestPart) -> RequestQueue:
    queue = RequestQueue()
    for each in parts:
        queue.push(each)
    return queue


def test_a_new_part_waits_and_a_settled_one_has_called_back_once() -> None:
    called: list[RequestPart] = []
    one = RequestPart(IMAGES, called.append)
    assert (one.level, one.deadline, one.rows, one.batch, one.timer) == (2, None, 2, None, None)
    assert (one.retried, one.done, one.logits, one.error) == (False, False, None, None)
    logits = np.ones((2, 4), np.float32)
    one.settle(logits)
    assert called == [one]
    assert one.done
    assert one.logits is logits
    one.settle(error=ValueError("late"))  # its callback is gone, and what refers to the request with it
    assert called == [one]


def test_images_of_their_own_are_not_copied_before_their_batch() -> None:
    """A form of 256 images held up the event loop while they became one array: for 0.4 s at 512 px."""
    images = tuple(IMAGES[:1] + number for number in range(5))
    one = RequestPart(images[1:4], lambda done: None)
    assert one.rows == 3
    assert [found is given for found, given in zip(one.read(), images[1:4], strict=True)] == [True] * 3


def test_a_failed_part_has_its_error_and_no_logits() -> None:
    one, failure = part(), ValueError("unlucky")
    one.settle(error=failure)
    assert (one.done, one.logits, one.error) == (True, None, failure)


def test_a_batch_has_no_moments_before_it_runs() -> None:
    batch = Batch([part()], 1, np.asarray)
    assert (batch.started, batch.logits, batch.error, batch.died) == (None, None, None, False)
    assert batch != Batch(batch.parts, 1, np.asarray), "a batch is equal to itself alone"


def test_levels_leave_in_their_order_and_rows_are_counted_by_level() -> None:
    low, middle, high, first = part(3, rows=4), part(2, rows=2), part(1), part(2)
    queue = filled(low, middle, high)
    queue.push(first, first=True)
    assert queue.rows == 8
    assert [queue.rows_before(level) for level in (1, 2, 3)] == [1, 4, 8]
    assert queue.take(4, now=0.5) == [high, first, middle]  # low has four rows, and none are left
    assert (queue.rows, [queue.rows_before(level) for level in (1, 2, 3)]) == (4, [0, 0, 4])
    assert queue.take(1, now=0.5) == [low]  # the first whatever its size
    assert queue.rows == 0


def test_a_part_that_does_not_fit_holds_up_those_behind_it() -> None:
    one, large, small = part(), part(rows=3), part()
    queue = filled(one, large, small)
    assert queue.take(3, now=0) == [one]
    assert queue.take(4, now=0) == [large, small]


def test_only_the_part_that_is_meant_is_removed() -> None:
    twin, other = part(deadline=5.0), part(deadline=5.0)
    queue = filled(twin, other)
    for _ in range(2):  # the second time it is not there
        queue.remove(other)
        assert (queue.rows, queue.rows_before(2), queue.earliest_deadline()) == (1, 1, 5.0)
    assert queue.take(2, now=0)[0] is twin
    queue.push(twin)
    queue.remove(twin)
    assert (queue.rows, queue.earliest_deadline()) == (0, None)


def test_the_earliest_deadline_and_the_oldest_arrival_are_of_all_levels() -> None:
    queue = filled(part(1, arrived=3), part(2, arrived=2, deadline=9.0), part(2, arrived=2.5), part(3, arrived=4))
    assert (queue.oldest_arrival(), queue.earliest_deadline()) == (2, 9.0)
    queue.push(part(3, arrived=5, deadline=8.0))
    assert queue.earliest_deadline() == 8.0
    queue.take(1, now=0)
    queue.take(1, now=0)
    assert (queue.oldest_arrival(), queue.earliest_deadline()) == (2.5, 8.0)
    assert filled(part(1)).earliest_deadline() is None


def test_what_has_waited_for_more_than_a_second_starts_every_second_batch() -> None:
    low, middle = part(3, arrived=0.0), part(2, arrived=0.25)
    high = [part(1, arrived=0.5) for _ in range(4)]
    queue = filled(low, middle, *high)
    assert queue.take(1, now=1.0) == [high[0]]  # a second, and not more
    assert queue.take(1, now=1.01) == [low]
    assert queue.take(1, now=1.5) == [high[1]]
    assert queue.take(1, now=1.5) == [middle]
    assert queue.take(2, now=9.0) == [high[2], high[3]]  # the others are gone: none starves


def test_the_oldest_of_the_first_level_may_start_a_batch_as_well() -> None:
    high, low = part(1, arrived=0.0), part(3, arrived=1.0)
    queue = filled(low, high)
    assert queue.take(1, now=5.0) == [high]
    assert queue.take(1, now=5.0) == [low]
