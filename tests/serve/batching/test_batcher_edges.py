"""The batcher by hand where two things meet: timers that move, deadlines to the bit, replies, the end."""

import asyncio
import math

import pytest
from batcher_by_hand import Asked, counts, images, made, now, numbers, pending, run, seven_together

from vitx.serve.batching.request_queue import Batch
from vitx.serve.errors import DeadlineMissed, RequestError
from vitx.serve.observe.request_record import CURRENT_RECORD, RequestRecord


def test_an_urgent_request_moves_the_timer_of_those_that_wait() -> None:
    async def test() -> None:
        batcher, instances = made({1: 0.1, 2: 0.15, 3: 0.2, 8: 0.4}, max_delay=10.0)
        ask = Asked(batcher)
        await seven_together(ask, instances)
        ask("patient", 7)
        await asyncio.sleep(1)
        ask("urgent", 8, allowed=2)
        ask("later", 9)  # does not put it off
        await asyncio.sleep(1.9 - batcher.curve.at_most(4) - 0.005 - 0.001)
        assert instances.batches == []
        await asyncio.sleep(0.002)
        assert await instances.run() == [7, 8, 9]
        assert pending() == 0

    run(test)


def test_a_request_that_leaves_may_make_the_others_due() -> None:
    """A curve may fall: here a batch of two takes longer than one of three, so what is left has less time to wait."""

    async def test() -> None:
        batcher, instances = made({1: 0.1, 2: 0.4, 3: 0.2, 8: 0.3}, max_delay=10.0)
        ask = Asked(batcher)
        await seven_together(ask, instances)
        ask("urgent", 7, allowed=2)  # 1.9 s, less .2 s for a batch of three when there are two, less 5 ms
        leaves = ask("leaves", 8)
        await asyncio.sleep(1.6)
        assert instances.batches == []
        assert leaves is not None
        leaves.cancel()  # less .4 s, for a batch of two: that was .1 s ago
        assert [numbers(batch) for batch in instances.batches] == [[7]]

    run(test)


def test_what_is_answered_or_refused_leaves_no_timer() -> None:
    async def test() -> None:
        batcher, instances = made({1: 0.1}, max_batch=1)
        ask = Asked(batcher)
        ask("answered", 1, allowed=9)
        await instances.run()
        assert pending() == 0
        ask("dies once", 2, allowed=9)
        await instances.run(error=SystemExit("killed"))
        assert pending() == 1  # of its second run
        await instances.run()
        assert pending() == 0
        assert ask.replies == {"answered": [1], "dies once": [2]}

    run(test)


def test_a_deadline_that_passes_in_the_queue_is_told_with_the_time_there() -> None:
    async def test() -> None:
        batcher, instances = made(max_batch=1)  # nothing is known of the model's speed
        ask = Asked(batcher)
        ask("runs", 1)
        await asyncio.sleep(0.5)
        ask("waits", 2, allowed=2.0)
        await instances.run(5)
        assert str(ask.replies["waits"]) == "the deadline passed after 1900 ms in the queue; try again in 1 s"
        assert ask.replies["runs"] == [1]

    run(test)


def test_a_refusal_names_what_is_needed_by_now() -> None:
    async def test() -> None:
        batcher, instances = made({1: 0.1}, max_batch=1)
        ask = Asked(batcher)
        ask("lags", 1)
        ask("stands by", 2)
        ask("waits", 3, allowed=4)  # 3.8 s, of which .1 s are for its batch, when it is asked
        await instances.run(0.1, lag=1)  # replies take .1 s more in the mean
        running = asyncio.ensure_future(instances.run(9))
        await asyncio.sleep(3)
        refusal = ask.replies["waits"]
        assert str(refusal).startswith("the deadline is in 100 ms, and the answer is expected in 200 ms; try again in")
        await running

    run(test)


def test_a_caller_that_awaits_gets_logits_or_the_error() -> None:
    async def test() -> None:
        batcher, instances = made({1: 0.1, 8: 0.4})
        reply = asyncio.ensure_future(batcher.submit(images(4)))
        await asyncio.sleep(0)
        await instances.run()
        assert (await reply).tolist() == [[4]]
        reply = asyncio.ensure_future(batcher.submit(images(5)))
        await asyncio.sleep(0)
        await instances.run(error=ValueError("unlucky"))
        with pytest.raises(RequestError, match=r"^inference failed: unlucky$"):
            await reply
        with pytest.raises(DeadlineMissed) as refusal:
            await batcher.submit(images(6), deadline=now() + 0.01)
        assert not refusal.value.passed
        with pytest.raises(DeadlineMissed, match=r"^the deadline passed while the request was read; try") as refusal:
            await batcher.submit(images(7), deadline=now() - 0.01)
        assert refusal.value.passed

    run(test)


def test_a_caller_that_awaits_may_be_urgent() -> None:
    async def test() -> None:
        batcher, instances = made({1: 0.1, 8: 0.4}, max_batch=1)
        ask = Asked(batcher)
        for number in range(3):
            ask(f"{number}", number)
        urgent = asyncio.ensure_future(batcher.submit(images(9), priority=1))
        await asyncio.sleep(0)
        assert [await instances.run() for _ in range(4)] == [[0], [1], [9], [2]]
        assert (await urgent).tolist() == [[9]]

    run(test)


def test_a_record_of_one_batch() -> None:
    async def test() -> None:
        batcher, instances = made({1: 0.1, 8: 0.4})
        record = RequestRecord("id")
        CURRENT_RECORD.set(record)
        await asyncio.sleep(0.25)
        reply = asyncio.ensure_future(batcher.submit(images(1, 2)))
        await asyncio.sleep(0.5)
        await instances.run(2)
        await reply
        assert (record.images, record.phases) == (2, {"queue": (0.25, 0.75), "compute": (0.75, 2.75)})

    run(test)


def test_closing_refuses_what_comes_and_ends_the_threads_last() -> None:
    async def test() -> None:
        batcher, instances = made({1: 0.1, 8: 0.4})
        ask = Asked(batcher)
        ask("accepted", 1)
        closing = asyncio.ensure_future(batcher.close())
        await asyncio.sleep(0)
        ask("late", 2)
        refusal = ask.replies["late"]
        assert isinstance(refusal, RequestError)
        assert (str(refusal), refusal.reason, refusal.status) == ("the model is being unloaded", "draining", 503)
        assert not instances.closed
        assert await instances.run() == [1]
        await closing
        assert instances.closed
        assert counts(batcher) == (1, 1)

    run(test)


def test_an_idle_batcher_closes_at_once() -> None:
    async def test() -> None:
        batcher, instances = made()
        await batcher.close()
        assert instances.closed

    run(test)


def test_all_instances_work_on_what_is_queued() -> None:
    async def test() -> None:
        batcher, instances = made({1: 1.0, 8: 2.0}, instances=2, queue=5, max_batch=1)
        ask = Asked(batcher)
        ask("first", 0)
        await instances.run(1.0)
        for number in range(4):  # two run and two stand by
            ask(f"{number}", number)
        ask("fits", 1, 2, 3, 4, 5)
        ask("does not", 8)
        assert str(ask.replies["does not"]) == "queue full: 5 of 5 images are waiting; try again in 5 s"  # 9 / 2

    run(test)


def allowed_for(planned: float) -> float:
    """Seconds to a deadline of which exactly `planned` are planned with, after the twentieth that is not."""
    start = planned / 0.95
    around = [start + step * math.ulp(start) for step in range(-8, 9)]
    return next(each for each in around if each - 0.05 * max(0.0, each) == planned)


def test_a_batch_that_ends_exactly_at_the_deadline_is_whole() -> None:
    async def test() -> None:
        batcher, instances = made({1: 0.25, 2: 0.5, 4: 0.75})
        ask = Asked(batcher)
        ask("just", 1, 2, 3, 4, allowed=allowed_for(0.75))
        assert numbers(instances.batches[0]) == [1, 2, 3, 4]
        await asyncio.sleep(0.01)  # it has an instance, which is about to start: nobody refuses it now
        assert ask.replies == {}
        assert await instances.run() == [1, 2, 3, 4]

    run(test)


def test_a_batch_that_no_size_could_end_in_time_is_whole() -> None:
    """The requests were accepted when there was time; now the batch is late whatever its size."""

    async def test() -> None:
        batcher, instances = made({1: 0.25, 2: 0.5, 4: 0.75}, max_batch=4)
        ask = Asked(batcher)
        ask("runs", 0)
        for number in range(1, 4):
            ask(f"{number}", number)
        ask("urgent", 4, allowed=1.1, priority=1)  # 1.045 s: it leaves the queue at .795 s or never
        await instances.run(0.25)
        assert len(numbers(instances.batches[0])) == 4

    run(test)


def test_a_millisecond_before_the_deadline_is_not_after_it() -> None:
    async def test() -> None:
        batcher, instances = made({1: 0.001}, max_batch=1)
        ask = Asked(batcher)
        ask("runs", 1)
        running = asyncio.ensure_future(instances.run(1))
        await asyncio.sleep(0.001)
        around = [0.002 + 0.001 * 0.05 / 0.95 + step * 2e-19 for step in range(-400, 400)]
        deadline = next(each for each in around if each - 0.05 * (each - 0.001) - 0.001 == 0.001)
        ask("waits", 2, allowed=deadline - now())
        await asyncio.sleep(0.0001)
        text = "the deadline is in 1 ms, and the answer is expected in 1 ms; try again in 1 s"
        assert str(ask.replies.get("waits")) == text
        await running

    run(test)


def test_a_batch_that_stands_by_is_cut_for_what_runs_before_it() -> None:
    async def test() -> None:
        batcher, instances = made({1: 0.2, 2: 0.3, 4: 0.4}, max_batch=4)
        ask = Asked(batcher)
        ask("runs", 0)
        ask("urgent", 1, allowed=0.55 / 0.95, priority=1)  # .2 s for what runs: .35 s are left, and two take .3 s
        for number in range(2, 5):
            ask(f"{number}", number)
        assert [numbers(batch) for batch in instances.batches] == [[0], [1, 2]]

    run(test)


def test_a_batch_is_cut_to_whole_halves() -> None:
    async def test() -> None:
        batcher, instances = made({1: 0.2, 3: 0.5, 4: 0.8, 7: 0.9}, max_batch=7)
        ask = Asked(batcher)
        ask("runs", 0)
        ask("urgent", 1, allowed=0.75 / 0.95, priority=1)  # .2 s for what runs: .55 s are left, and three take .5 s
        for number in range(2, 8):
            ask(f"{number}", number)
        assert [numbers(batch) for batch in instances.batches] == [[0], [1, 2, 3]]

    run(test)


def test_a_client_that_hangs_up_while_its_batch_ends_takes_nobody_elses_answer() -> None:
    """Its future was cancelled, and its task had not run: giving it its logits failed, and the others got none."""

    async def test() -> None:
        batcher, instances = made({1: 0.1, 8: 0.4})
        Asked(batcher)("runs", 0)
        leaves, stays = (asyncio.ensure_future(batcher.submit(images(number))) for number in (1, 2))
        await asyncio.sleep(0)
        await instances.run()
        assert numbers(instances.batches[0]) == [1, 2]
        deliver = instances.on_result

        def hang_up_first(batch: Batch) -> None:
            leaves.cancel()
            deliver(batch)

        instances.on_result = hang_up_first
        await instances.run()
        assert (await asyncio.wait_for(stays, 1)).tolist() == [[2]]
        with pytest.raises(asyncio.CancelledError):
            await leaves

    run(test)


def test_an_image_that_cannot_be_read_has_no_row_and_those_behind_it_keep_theirs() -> None:
    async def test() -> None:
        batcher, instances = made({1: 0.1, 8: 0.4}, instances=1)
        assert instances.made_for == (1, 8)
        ask = Asked(batcher)
        unread, told = ValueError("no image"), list[object]()
        ask("first", 0)
        batcher.enqueue([lambda: unread], told.append)
        ask("behind", 5, 6)
        assert await instances.run() == [0]
        assert await instances.run() == [5, 6]
        assert (told, ask.replies["behind"]) == ([unread], [5, 6])
        assert counts(batcher) == (2, 0)

    run(test)


def test_an_instance_that_died_is_counted_and_logged_with_what_it_died_of(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        batcher, instances = made({1: 0.1}, instances=3)
        assert instances.made_for == (3, 8)
        Asked(batcher)("dies", 1)
        await instances.run(error=SystemExit("killed"))
        assert batcher.replaced_instances == 1
        await instances.run()
        assert batcher.replaced_instances == 1

    run(test)
    assert caplog.messages == ["an instance ended with SystemExit('killed') and was replaced"]
