"""The batcher with instances that a test runs by hand, in virtual time: exact moments, counts and texts."""

import asyncio

import pytest
from batcher_by_hand import Asked, counts, images, made, now, numbers, pending, run, seven_together

from vitx.serve.errors import DeadlineMissed, QueueFull
from vitx.serve.observe.model_statistics import BatchTimes
from vitx.serve.observe.request_record import CURRENT_RECORD, RequestRecord


def test_a_request_that_can_just_be_done_in_time_runs_and_one_that_cannot_is_refused_before_it_runs() -> None:
    async def test() -> None:
        batcher, instances = made({1: 0.1}, max_batch=1)
        ask = Asked(batcher)
        ask("too short", 1, allowed=0.1 / 0.95 - 0.0002)  # a twentieth of the time is for the network
        refusal = ask.replies["too short"]
        assert isinstance(refusal, DeadlineMissed)
        assert str(refusal) == "the deadline is in 100 ms, and the answer is expected in 100 ms; try again in 1 s"
        assert instances.batches == []
        ask("just", 2, allowed=0.1 / 0.95 + 0.0002)
        assert await instances.run(0.1) == [2]
        assert ask.replies["just"] == [2]
        ask("first", 3)
        ask("waits", 4, allowed=0.2 / 0.95 + 0.0002)  # behind .1 s
        ask("is late", 5, allowed=0.2 / 0.95 + 0.0002)  # behind both
        assert isinstance(ask.replies["is late"], DeadlineMissed)
        assert "waits" not in ask.replies
        assert await instances.run(0.1) == [3]
        assert await instances.run(0.1) == [4]
        assert counts(batcher) == (3, 2)

    run(test)


def test_a_queued_request_is_refused_at_the_moment_from_which_it_would_be_late() -> None:
    async def test() -> None:
        batcher, instances = made({1: 0.1, 8: 0.4})
        ask = Asked(batcher)
        ask("slow", 1)
        ask("waits", 2, allowed=1)  # .95 s, of which .1 s are for its batch
        running = asyncio.ensure_future(instances.run(2))
        await asyncio.sleep(0.849)
        assert "waits" not in ask.replies
        assert batcher.queued == 1
        await asyncio.sleep(0.002)
        text = "the deadline is in 100 ms, and the answer is expected in 100 ms; try again in 1 s"
        assert str(ask.replies["waits"]) == text
        assert batcher.queued == 0
        await running
        assert instances.batches == []
        assert counts(batcher) == (1, 1)

    run(test)


def test_the_deadline_of_an_urgent_request_is_not_measured_by_the_queue_behind_it() -> None:
    async def test() -> None:
        batcher, instances = made({1: 0.1, 8: 0.4})
        ask = Asked(batcher)
        ask("first", 0)
        for number in range(1, 7):
            ask(f"later {number}", number, priority=3)
        ask("urgent", 9, allowed=0.3, priority=1)
        await asyncio.sleep(0)  # a timer that is due would fire
        assert await instances.run(0.1) == [0]
        assert (await instances.run(0.1))[0] == 9
        assert ask.replies["urgent"] == [9]

    run(test)


def test_the_time_from_the_end_of_a_batch_to_its_replies_is_planned_for() -> None:
    async def test() -> None:
        batcher, instances = made({1: 0.1})
        ask = Asked(batcher)
        for _ in range(2):
            ask(f"{now()}", 1)
            await instances.run(0.1, lag=1)  # the mean moves by a tenth: to .1 s, then to .19 s
        ask("runs", 1)
        for allowed, refused in ((0.389, True), (0.391, False)):
            ask(f"allowed {allowed}", 1, allowed=allowed / 0.95)
            assert (f"allowed {allowed}" in ask.replies) == refused

    run(test)


def test_a_time_of_slow_batches_ends_for_clients_with_deadlines_too() -> None:
    """Only a batch that runs can show it: where nothing runs, the least time decides, and the request is the probe."""

    async def test() -> None:
        batcher, instances = made({1: 0.1, 8: 0.4})
        ask = Asked(batcher)
        for _ in range(20):
            ask(f"slow {now()}", 1)
            await instances.run(0.5)
        assert batcher.curve.at_most(1) > 0.4
        ask("impossible", 1, allowed=0.09)
        assert "impossible" in ask.replies
        for _ in range(60):
            ask(f"possible {now()}", 1, allowed=0.2)
            assert await instances.run(0.1) == [1]
        assert batcher.curve.at_most(1) < 0.2
        assert batcher._expected_answer(9, 2, 7.0) == 7.8  # two batches of .4 s

    run(test)


def test_a_batch_is_cut_for_the_time_to_its_replies_too() -> None:
    async def test() -> None:
        batcher, instances = made({1: 0.1, 4: 0.13, 8: 0.15})
        ask = Asked(batcher)
        ask("lags", 1)
        await instances.run(0.1, lag=1)  # .1 s is added
        ask("runs", 1)
        for number in range(2, 8):
            ask(f"{number}", number)
        ask("urgent", 1, priority=1, allowed=0.345 / 0.95)  # .1 s wait, .1 s for the reply: .145 s for the batch
        await instances.run(0.1)
        assert len(numbers(instances.batches[0])) in (3, 4)

    run(test)


def test_a_partial_batch_leaves_in_time_for_a_deadline_and_otherwise_after_the_delay() -> None:
    async def test() -> None:
        batcher, instances = made({1: 0.1, 2: 0.15, 8: 0.4}, max_delay=10.0)
        ask = Asked(batcher)
        await seven_together(ask, instances)
        ask("alone", 7)
        await asyncio.sleep(9.99)
        assert instances.batches == []
        await asyncio.sleep(0.011)
        assert await instances.run() == [7]
        started = now()
        ask("urgent", 8, allowed=2)  # 1.9 s; a batch of two would take .15 s, and waking up 5 ms
        lag = batcher._reply_lag
        while not instances.batches:
            await asyncio.sleep(0.001)
        assert now() - started == pytest.approx(1.9 - batcher.curve.at_most(2) - 0.005 - lag, abs=0.0015)
        assert lag == 0

    run(test)


def test_parts_of_an_instance_that_died_go_first_and_in_their_old_order() -> None:
    async def test() -> None:
        batcher, instances = made({1: 0.1, 4: 0.2}, max_batch=4)
        ask = Asked(batcher)
        ask("first", 0)
        for number in (1, 2, 3, 4, 5, 6):
            ask(f"{number}", number)
        assert await instances.run() == [0]
        assert await instances.run(error=SystemExit("killed")) == [1, 2, 3, 4]
        assert await instances.run() == [1, 2, 3, 4]
        assert await instances.run() == [5, 6]
        assert all(ask.replies[f"{number}"] == [number] for number in range(1, 7))
        assert counts(batcher) == (7, 0)

    run(test)


def test_when_a_part_dies_twice_those_with_it_run_again_together_even_while_the_batcher_closes() -> None:
    async def test() -> None:
        batcher, instances = made({1: 0.1, 3: 0.2}, max_batch=3)
        ask = Asked(batcher)
        ask("fails", 0)
        ask("stands by", 7, 8, 9)
        assert await instances.run(error=SystemExit("killed")) == [0]
        ask("before", 1, priority=1)
        ask("behind", 2, priority=3)
        assert await instances.run() == [7, 8, 9]
        assert numbers(instances.batches[0]) == [1, 0, 2]
        closing = asyncio.ensure_future(batcher.close())
        await asyncio.sleep(0)
        await instances.run(error=SystemExit("again"))
        assert str(ask.replies["fails"]) == "inference failed: the instance ended: SystemExit('again')"
        await asyncio.sleep(0)
        assert not closing.done()
        assert await instances.run() == [1, 2]
        await closing
        assert (ask.replies["before"], ask.replies["behind"]) == ([1], [2])
        assert counts(batcher) == (3, 1)

    run(test)


def test_a_part_that_can_no_longer_be_done_in_time_is_not_run_a_second_time() -> None:
    async def test() -> None:
        batcher, instances = made({1: 0.1})
        ask = Asked(batcher)
        ask("late", 1, allowed=0.2)
        await instances.run(0.15, error=SystemExit("killed"))  # .19 s are planned, and another try takes .1 s
        assert str(ask.replies["late"]) == "inference failed: the instance ended: SystemExit('killed')"
        ask("in time", 2, allowed=0.4)
        await instances.run(0.15, error=SystemExit("killed"))
        assert await instances.run() == [2]
        assert counts(batcher) == (1, 1)

    run(test)


def test_a_part_that_waits_for_its_second_run_is_refused_when_it_would_be_late() -> None:
    async def test() -> None:
        batcher, instances = made({1: 0.1}, max_batch=1)
        ask = Asked(batcher)
        ask("retried", 1, allowed=2)
        ask("stands by", 2)
        await instances.run(error=SystemExit("killed"))
        running = asyncio.ensure_future(instances.run(5))
        await asyncio.sleep(1.69)  # 1.9 s are planned, .1 s have passed, .1 s are needed
        assert "retried" not in ask.replies
        await asyncio.sleep(0.02)
        assert isinstance(ask.replies["retried"], DeadlineMissed)
        await running
        assert await instances.run() == []  # it stood by

    run(test)


def test_a_failed_part_ends_its_request_once_and_its_other_parts_never_run() -> None:
    async def test() -> None:
        batcher, instances = made({1: 0.1, 2: 0.15}, max_batch=2)
        ask = Asked(batcher)
        ask("split", 1, 2, 3, 4, 5, 6, 7)
        ask("other", 8)
        assert await instances.run(error=ValueError("unlucky")) == [1, 2]
        assert str(ask.replies["split"]) == "inference failed: unlucky"
        assert counts(batcher) == (0, 1)
        ran = []
        while instances.batches:
            ran += await instances.run()
        assert 8 in ran
        assert not {5, 6, 7} & set(ran)
        assert (batcher.queued, batcher.running) == (0, 0)
        assert counts(batcher) == (1, 1)
        assert pending() == 0

    run(test)


def test_refusals_count_the_queue_and_say_when_it_will_be_served() -> None:
    async def test() -> None:
        batcher, instances = made({1: 1.0, 8: 2.0}, queue=5)
        ask = Asked(batcher)
        ask("first", 0)
        await instances.run(1.0)
        ask("runs", 0)
        for number in range(1, 4):
            ask(f"{number}", number)
        ask("fits", 4, 5)
        assert "fits" not in ask.replies
        ask("does not", 8)
        refusal = ask.replies["does not"]
        assert isinstance(refusal, QueueFull)
        assert str(refusal) == "queue full: 5 of 5 images are waiting; try again in 3 s"  # 1 s, then a batch of 2 s
        assert (refusal.retry_after, refusal.status, refusal.reason) == (3, 429, "queue_full")

    run(test)


def test_the_times_of_a_batch_are_exact() -> None:
    async def test() -> None:
        times: list[BatchTimes] = []
        batcher, instances = made({1: 0.1, 8: 0.8}, on_batch=times.append)
        ask = Asked(batcher)
        await asyncio.sleep(3)  # moments are not durations
        ask("runs", 1)
        await asyncio.sleep(0.25)
        await instances.run(1, gather=0.5, lag=0.125)
        (only,) = times
        assert only.rows == 1
        measured = (only.gather, only.compute, only.output, *only.queue)
        assert measured == pytest.approx((0.5, 1, 0.125, 0.25))
        assert batcher.curve.seconds(1) == pytest.approx(0.1 * 1.05)  # the image ran for 1 s: cut to twice the mean
        inference = batcher.statistics.as_json("m", "1")["inference_stats"]
        assert inference["success"] == {"count": 1, "ns": pytest.approx(1.875e9)}
        assert inference["queue"] == {"count": 1, "ns": pytest.approx(0.25e9)}
        ask("fails", 2)
        await instances.run(1, error=ValueError("unlucky"))
        inference = batcher.statistics.as_json("m", "1")["inference_stats"]
        assert inference["fail"] == {"count": 1, "ns": pytest.approx(1e9)}

    run(test)


def test_a_record_gets_the_times_of_all_parts_of_its_request() -> None:
    async def test() -> None:
        batcher, instances = made({1: 0.1, 2: 0.15}, max_batch=2)
        record = RequestRecord("id")
        CURRENT_RECORD.set(record)
        reply = asyncio.ensure_future(batcher.submit(images(1, 2, 3)))
        await asyncio.sleep(0.5)
        await instances.run(1)
        await instances.run(2)
        assert (await reply)[:, 0].tolist() == [1, 2, 3]
        assert (record.images, record.phases) == (3, {"queue": (0, 0.5), "compute": (0.5, 3.5)})

    run(test)


def test_cancelling_the_caller_cancels_what_has_not_run_and_is_counted() -> None:
    async def test() -> None:
        batcher, instances = made({1: 0.1, 8: 0.4})
        Asked(batcher)("first", 1)
        waits = asyncio.ensure_future(batcher.submit(images(2)))
        await asyncio.sleep(0)
        assert batcher.queued == 1
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        assert batcher.queued == 0
        await instances.run()
        assert instances.batches == []
        assert counts(batcher) == (1, 1)

    run(test)
