"""Open loop, scenarios and tuning: arrivals, where a latency begins, bisection, the choice of a setting."""

import asyncio
import gc
import math
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from bundle_fixture import Float32Array
from server_process import HANG
from vitx.bench import autotune, scenarios
from vitx.bench.autotune import best_setting, core_splits, tune
from vitx.bench.open_loop import OpenLoopRun, _OpenLoop, poisson_arrivals, run_open_loop
from vitx.bench.scenarios import RATE_TOLERANCE, ScenarioSettings, largest_passing, parse_scenarios, run_scenario
from vitx.bench.timing import Lane
from vitx.core.bundle import LATENCY, Bundle
from vitx.core.errors import CheckFailed, InputError
from vitx.core.latency import Setting
from vitx.core.preprocess import UInt8Array
from vitx.runtimes import load_session
from vitx.runtimes.instances import SessionPool, load_instances
from vitx.runtimes.session import Session
from vitx.serve.batching.batcher import Batcher
from vitx.serve.options import ServeOptions

IMAGES = np.zeros((8, 16, 16, 3), dtype=np.uint8)


def answer(images: UInt8Array) -> Float32Array:
    return np.zeros((len(images), 4), dtype=np.float32)


def test_arrivals_are_poisson_and_the_same_at_every_call() -> None:
    arrivals = poisson_arrivals(50, 400)
    np.testing.assert_array_equal(arrivals, poisson_arrivals(50, 400))
    assert np.all(np.diff(arrivals) > 0)
    assert arrivals[0] > 0
    assert arrivals[-1] < 400
    # 20,000 expected, with a standard deviation of 141; as many in each half; gaps are exponential: mean = deviation.
    assert abs(len(arrivals) - 20_000) < 5 * 141
    assert abs(np.sum(arrivals < 200) - 10_000) < 5 * 100
    gaps = np.diff(arrivals)
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.04)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.04)


@pytest.mark.parametrize("rate", [0.0, 0.5, -1.0, math.nan])
def test_a_rate_without_arrivals_is_refused(rate: float) -> None:
    said = f"rate {rate:g} a second for 1.5 s: expected at least one arrival, give a longer time"
    with pytest.raises(InputError, match=f"^{said}$"):
        poisson_arrivals(rate, 1.5)


def test_a_refused_request_is_infinitely_late() -> None:
    result = OpenLoopRun((0.3, 0.1, 0.2), refused=1, late=0.0, elapsed=1.0)
    assert [result.percentile(share) for share in (0.25, 0.5, 0.75)] == [0.1, 0.2, 0.3]
    assert result.percentile(0.99) == math.inf
    assert result.images_per_second == 3


def test_latency_counts_from_the_schedule_through_a_stall() -> None:
    """One stall of 0.2 s while ten more requests fall due: each of them waited for the rest of the stall."""
    stalled = threading.Event()

    def stalling(images: UInt8Array) -> Float32Array:
        if not stalled.is_set():
            stalled.set()
            time.sleep(0.2)
        return answer(images)

    arrivals = [index * 0.01 for index in range(11)]
    result = run_open_loop(stalling, IMAGES, arrivals, ServeOptions(max_batch=1).batching)
    assert result.refused == 0
    ordered = sorted(result.latencies, reverse=True)
    # Request i is due at 10·i ms and is answered after 200 ms at the earliest. The clock can only be late.
    for index, latency in enumerate(ordered):
        assert latency >= 0.2 - 0.01 * index - 1e-3


def test_refused_requests_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    send, sent = _OpenLoop._send, list[int]()

    def noted(self: _OpenLoop, batcher: Batcher, index: int, due: float) -> None:
        send(self, batcher, index, due)
        sent.append(index)
        if len(sent) == 8:  # each of them has asked, in a task that runs before this call
            asyncio.get_running_loop().call_soon(release.set)

    def held(images: UInt8Array) -> Float32Array:
        assert release.wait(HANG)
        return answer(images)

    monkeypatch.setattr(_OpenLoop, "_send", noted)
    result = run_open_loop(held, IMAGES, [0.0] * 8, ServeOptions(max_batch=1, queue=2).batching)
    assert result.refused + len(result.latencies) == 8
    assert result.refused >= 4
    assert result.percentile(0.99) == math.inf


def test_a_model_that_fails_on_one_image_of_many_is_one_error(caplog: pytest.LogCaptureFixture) -> None:
    """Percentiles of the others would be those of another load."""
    calls = list[int]()

    def broken(images: UInt8Array) -> Float32Array:
        calls.append(len(images))
        if len(calls) == 2:
            raise CheckFailed("the plan fails on a batch of 1")
        return answer(images)

    batching = ServeOptions(max_batch=1).batching
    with pytest.raises(CheckFailed, match=r"^inference failed: the plan fails on a batch of 1$"):
        run_open_loop(broken, IMAGES, [0.01 * index for index in range(6)], batching)
    calls.clear()
    with pytest.raises(CheckFailed, match=r"^inference failed: the plan fails on a batch of 1$"):
        run_scenario("offline", broken, IMAGES, ScenarioSettings(batching, seconds=0.1, p99=1))
    assert not caplog.records, "what nobody waited for"


def test_a_model_that_fails_ends_the_run_at_once() -> None:
    calls = list[int]()

    def broken(images: UInt8Array) -> Float32Array:
        calls.append(len(images))
        raise CheckFailed("no")

    with pytest.raises(CheckFailed, match=r"^inference failed: no$"):
        run_open_loop(broken, IMAGES, [0.0, HANG], ServeOptions(max_batch=1).batching)
    assert calls == [1]


def test_an_interrupted_run_leaves_no_arrivals_behind(caplog: pytest.LogCaptureFixture) -> None:
    def arriving() -> bool:
        return "arrivals" in {thread.name for thread in threading.enumerate()}

    seen = list[bool]()

    def interrupting(images: UInt8Array) -> Float32Array:
        seen.append(arriving())
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)
        return answer(images)

    with pytest.raises(KeyboardInterrupt):
        run_open_loop(interrupting, IMAGES, [0.0, 0.0, 0.01, HANG], ServeOptions(max_batch=1).batching)
    assert seen[0]
    assert not arriving()
    gc.collect()
    assert not caplog.records, "what nobody waited for"


def test_requests_are_due_when_they_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    send, due = _OpenLoop._send, list[float]()

    def noted(self: _OpenLoop, batcher: Batcher, index: int, moment: float) -> None:
        due.append(moment)
        send(self, batcher, index, moment)

    monkeypatch.setattr(_OpenLoop, "_send", noted)
    arrivals = [0.0, 0.01, 0.05]
    result = run_open_loop(answer, IMAGES, arrivals, ServeOptions().batching)
    assert [moment - due[0] for moment in due] == pytest.approx(arrivals)
    assert len(result.latencies) == 3
    assert result.late is None  # three have no 99th percentile
    result = run_open_loop(answer, IMAGES, [0.0] * 100, ServeOptions().batching)
    assert result.late is not None
    assert 0 <= result.late <= result.elapsed


@pytest.mark.parametrize("limit", [3.0, 17.3, 99.9])
def test_bisection_ends_at_the_largest_rate_that_passed(limit: float) -> None:
    tried: list[float] = []

    def passes(rate: float) -> bool:
        tried.append(rate)
        return rate <= limit

    found = largest_passing(passes, 2.0, 100.0)
    assert found is not None
    assert found in tried
    assert found <= limit <= found + RATE_TOLERANCE * 100
    assert limit - found <= RATE_TOLERANCE * limit / (1 - RATE_TOLERANCE)
    assert len(tried) < 16


def test_bisection_at_its_ends() -> None:
    assert largest_passing(lambda rate: True, 1.0, 8.0) == 8.0
    assert largest_passing(lambda rate: False, 1.0, 8.0) is None


def test_scenarios_ask_through_the_batcher(tiny_bundle: Bundle) -> None:
    session = load_session(tiny_bundle, device="cpu", threads=1)
    sizes: set[int] = set()

    def infer(images: UInt8Array) -> Float32Array:
        sizes.add(len(images))
        return session.infer(images)

    settings = ScenarioSettings(ServeOptions(max_batch=4).batching, seconds=0.5, p99=5.0)
    offline = run_scenario("offline", infer, IMAGES, settings)
    assert sizes <= {1, 2, 3, 4}
    assert 4 in sizes
    assert offline.value > 0
    server = run_scenario("server", infer, IMAGES, settings)
    assert server.p99_ms is not None
    assert server.p99_ms <= 5000 == server.p99_bound_ms
    sizes.clear()
    single = run_scenario("single-stream", infer, IMAGES, settings)
    assert sizes == {1}
    assert single.value == single.p90_ms


def test_a_bound_that_no_rate_keeps_is_an_error(tiny_bundle: Bundle) -> None:
    def slow(images: UInt8Array) -> Float32Array:
        time.sleep(0.002)
        return answer(images)

    with pytest.raises(CheckFailed, match=r"p99 is .* ms at .* images/s, the lowest rate that was offered, and 1 ms"):
        run_scenario("server", slow, IMAGES, ScenarioSettings(ServeOptions().batching, seconds=0.3, p99=0.001))


def by_known_times(monkeypatch: pytest.MonkeyPatch, *seconds: float) -> list[int]:
    """Images that are queued together take `seconds`, one after the other; return how many they were."""
    counts, left = list[int](), [*seconds]

    async def all_at_once(infer: object, images: UInt8Array, count: int, settings: object) -> float:
        counts.append(count)
        return left.pop(0)

    monkeypatch.setattr(scenarios, "_all_at_once", all_at_once)
    return counts


@pytest.mark.parametrize(("pilot", "count"), [(0.008, 2000), (100.0, 8)])
def test_offline_queues_as_many_images_as_the_time_takes(
    monkeypatch: pytest.MonkeyPatch, pilot: float, count: int
) -> None:
    counts = by_known_times(monkeypatch, pilot, 2.5)
    result = run_scenario("offline", answer, IMAGES, ScenarioSettings(ServeOptions().batching, seconds=2, p99=1))
    assert counts == [8, count]
    assert (result.scenario, result.images, result.value, result.unit) == ("offline", count, count / 2.5, "images/s")


def test_a_single_stream_tells_the_percentiles_of_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    warm: list[bool] = []

    class Known(Lane):
        def warm_up(self) -> bool:
            warm.append(True)
            return True

        def take_turn(self, seconds: float) -> None:
            assert (seconds, warm) == (2, [True])
            self.measured, self.times = 2, [number / 1000 for number in range(100)]

    monkeypatch.setattr(scenarios, "Lane", Known)
    result = run_scenario("single-stream", answer, IMAGES, ScenarioSettings(ServeOptions().batching, seconds=2, p99=1))
    found = (result.p50_ms, result.p90_ms, result.p95_ms, result.p99_ms)
    assert found == pytest.approx((49.5, 89.1, 94.05, 98.01))
    assert (result.images, result.value, result.unit) == (100, result.p90_ms, "ms")


def test_a_single_stream_has_calls_enough_for_its_percentile() -> None:
    """Of few seconds there was one call, and every percentile was its time."""
    settings = ScenarioSettings(ServeOptions().batching, seconds=1e-9, p99=1)
    result = run_scenario("single-stream", answer, IMAGES, settings)
    assert (result.images, result.value, result.p99_ms) == (20, result.p90_ms, None)
    assert result.p95_ms is not None


@pytest.mark.parametrize(("seconds", "lowest"), [(1, 120), (0.25, 480), (0.5, 240)])
def test_the_servers_rate_is_the_largest_that_keeps_the_bound(
    monkeypatch: pytest.MonkeyPatch, seconds: float, lowest: float
) -> None:
    """By latencies that grow with the rate: of 600 a second, the 99th percentile is a second."""
    by_known_times(monkeypatch, 1, 8 / 1000)
    asked = list[float]()

    def run(infer: object, images: UInt8Array, rate: float, settings: object) -> OpenLoopRun:
        asked.append(rate)
        return OpenLoopRun(tuple(number / 99 * rate / 600 for number in range(1, 101)), 0, 0.0, 1.0)

    monkeypatch.setattr(scenarios, "run_at_rate", run)
    settings = ScenarioSettings(ServeOptions().batching, seconds=seconds, p99=1)
    result = run_scenario("server", answer, IMAGES, settings)
    assert asked[:3] == [lowest, 1000, (lowest + 1000) / 2]
    assert result.value in asked
    assert 600 * (1 - RATE_TOLERANCE / (1 - RATE_TOLERANCE)) <= result.value <= 600
    found = (result.p50_ms, result.p90_ms, result.p95_ms, result.p99_ms)
    assert found == pytest.approx(tuple(1e3 * share / 99 * result.value / 600 for share in (50, 90, 95, 99)))
    assert (result.images, result.unit, result.p99_bound_ms) == (100, "images/s", 1000)


@pytest.mark.parametrize("seconds", [0.1, 2.0, 60.0])
def test_the_lowest_rate_has_arrivals_enough_for_a_99th_percentile(seconds: float) -> None:
    assert len(poisson_arrivals(scenarios.LEAST_ARRIVALS / seconds, seconds)) == 101


def test_a_server_whose_arrivals_are_too_few_is_refused_before_the_first_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound on the 99th percentile was kept by the largest of some thirty latencies."""
    by_known_times(monkeypatch, 1, 8 / 119)
    monkeypatch.setattr(scenarios, "run_at_rate", lambda *_: pytest.fail("a rate was tried"))
    said = (
        "server for 1 s at up to 119 images/s: expected at least 120 arrivals for a 99th percentile, give a longer time"
    )
    with pytest.raises(InputError, match=f"^{said}$"):
        run_scenario("server", answer, IMAGES, ScenarioSettings(ServeOptions().batching, seconds=1, p99=1))


@pytest.mark.parametrize("count", [5, 8, 19])
def test_so_many_images_are_queued_and_the_threads_are_closed(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    seen: list[int] = []
    closed: list[Batcher] = []
    close = Batcher.close

    async def noted(batcher: Batcher) -> None:
        closed.append(batcher)
        await close(batcher)

    def infer(images: UInt8Array) -> Float32Array:
        seen.extend(images[:, 0, 0, 0].tolist())
        return answer(images)

    monkeypatch.setattr(Batcher, "close", noted)
    images = IMAGES + np.arange(8, dtype=np.uint8)[:, None, None, None]
    settings = ScenarioSettings(ServeOptions(max_batch=4, queue=8).batching, seconds=1, p99=1)
    seconds = asyncio.run(scenarios._all_at_once(infer, images, count, settings))
    assert seconds > 0
    assert seen == [number % 8 for number in range(count)]
    assert len(closed) == 1


def test_a_server_whose_arrivals_are_too_many_is_refused_before_the_first_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    by_known_times(monkeypatch, 1, 8 / 1000)
    asked = list[float]()

    def run(infer: object, images: UInt8Array, rate: float, settings: object) -> OpenLoopRun:
        asked.append(rate)
        return OpenLoopRun((0.5,) * 9, 0, 0.0, 1.0)

    monkeypatch.setattr(scenarios, "run_at_rate", run)
    monkeypatch.setattr(scenarios, "MOST_ARRIVALS", 3999)
    said = "^server for 2 s at up to 2,000 images/s: expected at most 3,999 arrivals, give a shorter time$"
    with pytest.raises(InputError, match=said):
        run_scenario("server", answer, IMAGES, ScenarioSettings(ServeOptions().batching, seconds=2, p99=1))
    assert asked == []
    by_known_times(monkeypatch, 1, 8 / 1000)
    monkeypatch.setattr(scenarios, "MOST_ARRIVALS", 4000)
    assert run_scenario("server", answer, IMAGES, ScenarioSettings(ServeOptions().batching, seconds=2, p99=1)).value


def test_the_error_of_a_bound_tells_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    by_known_times(monkeypatch, 1, 8 / 1000)
    monkeypatch.setattr(scenarios, "run_at_rate", lambda *_: OpenLoopRun((0.9984,) * 9, 0, 0.0, 1.0))
    said = (
        "server scenario: p99 is 998 ms at 120 images/s, the lowest rate that was offered, and 125 ms were asked for: "
        "give a larger --p99"
    )
    with pytest.raises(CheckFailed, match=f"^{said}$"):
        run_scenario("server", answer, IMAGES, ScenarioSettings(ServeOptions().batching, seconds=1, p99=0.125))


def test_a_percentile_at_the_bound_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    by_known_times(monkeypatch, 1, 8 / 120)  # arrivals just enough for it
    monkeypatch.setattr(scenarios, "run_at_rate", lambda *_: OpenLoopRun((0.25,) * 9, 0, 0.0, 1.0))
    settings = ScenarioSettings(ServeOptions().batching, seconds=1, p99=0.25)
    assert run_scenario("server", answer, IMAGES, settings).value == 120


def test_scenarios_are_read_from_text() -> None:
    assert parse_scenarios("single-stream, offline") == ("offline", "single-stream")
    with pytest.raises(InputError, match="did you mean server"):
        parse_scenarios("sever")


def test_settings_use_every_core() -> None:
    assert core_splits(1) == [(1, 1)]
    assert core_splits(2) == [(2, 1), (1, 2)]
    assert core_splits(6) == [(6, 1), (3, 2), (2, 3), (1, 6)]
    # Never more than eight copies of the weights.
    assert core_splits(32) == [(32, 1), (8, 4), (4, 8), (2, 16), (1, 32)]


def setting(instances: int, rate: float, median: float) -> Setting:
    return Setting(instances=instances, threads=1, batch_size=1, images_per_second=rate, median_ms=median)


def test_the_fastest_wins_and_among_equals_the_shortest_call() -> None:
    assert best_setting([setting(1, 43, 20), setting(2, 74, 27)]).instances == 2
    assert best_setting([setting(1, 98, 10), setting(2, 100, 20), setting(4, 96, 5)]).instances == 1


def test_tuning_finds_that_two_sessions_of_one_thread_are_faster(
    tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session of two threads that gains nothing from the second one: two of one thread each do twice as much."""

    class Machine(Session):
        concurrent = True

        def _infer(self, images: UInt8Array) -> Float32Array:
            sizes.add(len(images))
            time.sleep(0.002 * len(images))
            return answer(images)

        def describe(self) -> dict[str, object]:
            return {"runtime": "sleep", "provider": "cpu", "threads": 1}

    asked, sizes = list[int](), set[int]()

    def load(threads: int) -> Session:
        asked.append(threads)
        return Machine()

    monkeypatch.setattr(autotune, "TRIAL_SECONDS", 0.02)
    tuning = tune(tiny_bundle, load, cores=2, quiet=True)
    assert sizes == {1, 4, 16}
    assert (tuning.best.instances, tuning.best.threads) == (2, 1)
    assert asked == [1, 2]
    kept = tiny_bundle.latency()
    assert kept is not None
    assert kept.tuning == tuning


def test_settings_near_the_fastest_have_four_turns_more(tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {(2, 1, 1): 79, (2, 1, 4): 80, (2, 1, 16): 100, (1, 2, 1): 10, (1, 2, 4): 10, (1, 2, 16): 10}
    turns: list[tuple[int, int, int]] = []

    def take_turn(trial: autotune._Trial, seconds: float) -> None:
        assert seconds == autotune.TRIAL_SECONDS
        turns.append((trial._instances, trial._threads, len(trial._images)))
        trial._times.append(trial._instances * len(trial._images) / rates[turns[-1]])

    monkeypatch.setattr(autotune._Trial, "take_turn", take_turn)
    tuning = tune(tiny_bundle, lambda threads: load_session(tiny_bundle, threads=threads), cores=2, quiet=True)
    assert turns == [*rates, *[(2, 1, 4), (2, 1, 16)] * 4]
    assert [setting.images_per_second for setting in tuning.tried] == [*rates.values()]
    assert tuning.best.median_ms == pytest.approx(320)


@pytest.mark.parametrize("seconds", [math.inf, 1e12])
def test_an_offline_run_without_an_end_is_refused(seconds: float) -> None:
    """`--scenario offline --seconds inf` ended in a traceback, and of 1e12 s all memory would have been queries."""
    settings = ScenarioSettings(ServeOptions(max_batch=4).batching, seconds, p99=5.0)
    with pytest.raises(InputError) as refused:
        run_scenario("offline", answer, IMAGES, settings)
    assert str(refused.value) == (
        f"offline for {seconds:g} s: expected at most 1,000,000 queries of 8 images, give a shorter time"
    )


def test_nothing_is_tuned_where_a_damaged_record_could_not_take_it(tiny_bundle: Bundle) -> None:
    """It was read when all was measured, and what was found was lost."""
    (tiny_bundle.path / LATENCY).write_text('{"format_version": 1, "machines": {}, "sha256": "0"}')

    def load(threads: int) -> Session:
        raise AssertionError("nothing is loaded")

    with pytest.raises(CheckFailed, match=r"latency\.json was changed after it was written .* remove it, and run"):
        tune(tiny_bundle, load, cores=2, quiet=True)


def test_instances_of_several_threads_have_their_own_sessions() -> None:
    class Busy(Session):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

        def _infer(self, images: UInt8Array) -> Float32Array:
            assert self.lock.acquire(blocking=False), "two callers in one session"
            time.sleep(0.02)
            self.lock.release()
            return answer(images)

        def describe(self) -> dict[str, object]:
            return {"threads": 2}

    pool = load_instances(Busy, 2, 2)
    assert isinstance(pool, SessionPool)
    assert pool.describe() == {"threads": 2, "sessions": 2}
    with ThreadPoolExecutor(6) as callers:
        assert [len(logits) for logits in callers.map(pool.infer, [IMAGES] * 6)] == [8] * 6
    assert load_instances(Busy, 4, 1).describe()["sessions"] == 4

    class Concurrent(Busy):
        concurrent = True

    assert isinstance(load_instances(Concurrent, 4, 1), Concurrent)
    assert isinstance(load_instances(Concurrent, 4, 2), SessionPool)
