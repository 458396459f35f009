"""The batcher against a slow model of its documented rules: any arrivals, priorities, deadlines, deaths, cancellations.

Both run in virtual time. The batcher is the real one, on an event loop whose clock jumps from timer to timer, with
instances that take exactly the time of the latency curve. The model knows docs/serving.md only: it keeps plain lists
and computes everything anew at every event. Where two moments of a scenario are closer than rounding, it is skipped.
"""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from virtual_time import VirtualLoop
from vitx.core.preprocess import UInt8Array
from vitx.runtimes.session import Float32Array
from vitx.serve.batching.batcher import Batcher, Submission
from vitx.serve.batching.latency_curve import LatencyCurve
from vitx.serve.batching.request_queue import Batch
from vitx.serve.errors import RequestError
from vitx.serve.limits import Batching

SAME = 2e-6  # seconds


@dataclass(frozen=True)
class Request:
    at: float
    rows: int
    priority: int
    allowed: float | None  # seconds to the deadline
    cancelled_at: float | None


@dataclass(frozen=True)
class Scenario:
    requests: tuple[Request, ...]
    close_at: float
    batching: Batching
    seconds: dict[int, float]  # of a batch of each size
    fates: tuple[str, ...]  # of the batches in the order in which they start, "ok" beyond these

    def fate(self, batch: int) -> str:
        return self.fates[batch] if batch < len(self.fates) else "ok"

    def duration(self, batch: int, rows: int) -> float:
        """No two batches end at exactly the same moment: the event loop does not order equal timers."""
        return self.seconds[rows] + 4e-9 * batch + 1e-10 * batch**2


@dataclass
class Outcome:
    """ends: of each request, what became of it and when. batches: start, and the (request, row)s that ran."""

    ends: dict[int, tuple[str, float]] = field(default_factory=dict)
    batches: list[tuple[float, list[tuple[int, int]]]] = field(default_factory=list)
    replaced: int = 0


# The slow model.


@dataclass(eq=False)
class Piece:
    request: int
    rows: list[int]
    level: int
    arrived: float
    deadline: float
    refused_at: float
    retried: bool = False
    done: bool = False


@dataclass(eq=False)
class Sent:
    pieces: list[Piece]
    rows: int
    started: float | None = None
    ends: float = math.inf
    live: list[Piece] = field(default_factory=list)
    fate: str = "ok"


class SlowModel:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.limits, self.seconds = scenario, scenario.batching, scenario.seconds
        rates = {size: size / (seconds + 0.001) for size, seconds in self.seconds.items()}
        alone, best = rates.get(1, 0.0), max((rate for size, rate in rates.items() if size > 1), default=0.0)
        larger = [size for size, rate in rates.items() if size > 1 and rate >= best / 1.03]
        self.full = self.enough = min(larger) if larger and alone < 1.03 * best else 1
        self.queue: list[Piece] = []  # in order of arrival, retried ones in front; priorities are sorted out by `take`
        self.sent: list[Sent] = []
        self.pieces: dict[int, list[Piece]] = {}
        self.outcome = Outcome()
        self.now = 0.0
        self.alarm = math.inf
        self.peak = 1.0
        self.favoured = False
        self.closed = False

    def run(self) -> Outcome:
        outside: list[tuple[float, Callable[[], None]]] = [(self.scenario.close_at, self.close)]
        for number, request in enumerate(self.scenario.requests):
            outside.append((request.at, partial(self.arrive, number)))
            if request.cancelled_at is not None:
                outside.append((request.cancelled_at, partial(self.end, number, "cancelled")))
        while True:
            moments = [*outside, (self.alarm, self.wake)]
            ending = min(
                (batch for batch in self.sent if batch.started is not None), key=lambda b: b.ends, default=None
            )
            moments += [(piece.refused_at, partial(self.end, piece.request, "deadline")) for piece in self.waiting()]
            if ending is not None:
                moments.append((ending.ends, partial(self.finish, ending)))
            self.now, act = min(moments, key=lambda moment: moment[0])
            if self.now == math.inf:
                return self.outcome
            if sum(abs(moment - self.now) < SAME for moment, _ in moments) > 1 and not self.same_refusals(moments):
                reject()
            outside = [entry for entry in outside if entry[1] is not act]
            act()

    def same_refusals(self, moments: list[tuple[float, Callable[[], None]]]) -> bool:
        """Whether only parts of one request share this moment: the first ends them all."""
        near = [piece for piece in self.waiting() if abs(piece.refused_at - self.now) < SAME]
        together = sum(abs(moment - self.now) < SAME for moment, _ in moments)
        return together == len(near) and len({piece.request for piece in near}) == 1

    def waiting(self) -> list[Piece]:
        """Pieces that no instance has, so that they may be refused."""
        standing = [piece for batch in self.sent if batch.started is None for piece in batch.pieces]
        return [piece for piece in self.queue + standing if not piece.done]

    def later(self, first: float, second: float) -> bool:
        if abs(first - second) < SAME and first != second:
            reject()
        return first > second

    @property
    def rows(self) -> int:
        return sum(len(piece.rows) for piece in self.queue)

    def wait(self, full_batches: int) -> float:
        if len(self.sent) + full_batches < self.limits.instances:
            return 0.0
        left = [
            self.seconds[batch.rows] - (0.0 if batch.started is None else self.now - batch.started)
            for batch in self.sent
        ]
        return (full_batches * self.seconds[self.full] + sum(max(0.0, each) for each in left)) / self.limits.instances

    def arrive(self, number: int) -> None:
        request, now = self.scenario.requests[number], self.now
        level, rows = request.priority or 2, request.rows
        deadline = math.inf if request.allowed is None else now + 0.95 * request.allowed
        before = rows + sum(len(piece.rows) for piece in self.queue if piece.level <= level)
        answered = now + self.wait((before - 1) // self.full) + self.seconds[min(self.full, before)]
        refusal = "draining" if self.closed else "queue_full" if self.rows + rows > self.limits.queue else ""
        if refusal or self.later(answered, deadline):
            self.outcome.ends[number] = (refusal or "deadline", now)
            return
        step = self.full if self.queue else self.share(rows)
        self.pieces[number] = []
        for start in range(0, rows, step):
            part = list(range(start, min(start + step, rows)))
            before = len(part) + sum(len(piece.rows) for piece in self.queue if piece.level <= level)
            piece = Piece(number, part, level, now, deadline, deadline - self.seconds[min(self.full, before)])
            self.queue.append(piece)
            self.pieces[number].append(piece)
        self.send()

    def share(self, rows: int) -> int:
        return min(self.full, math.ceil(rows / max(1, self.limits.instances - len(self.sent))))

    def latest(self) -> float:
        """How long a partial batch may wait for company."""
        needed = self.seconds[min(self.rows + 1, max(self.seconds))] + 0.005
        earliest = min(piece.deadline for piece in self.queue)
        return min(min(piece.arrived for piece in self.queue) + self.limits.max_delay, earliest - needed)

    def wake(self) -> None:
        self.alarm = math.inf
        self.send(waited=bool(self.queue) and not self.later(self.latest(), self.now + 0.001))

    def send(self, *, waited: bool = False) -> None:
        while self.queue and len(self.sent) < 2 * self.limits.instances:
            if self.rows < self.enough:
                running = sum(batch.rows for batch in self.sent)
                company = min(math.ceil(self.peak / self.limits.instances), round(self.peak) - running)
                if len(self.sent) >= self.limits.instances:
                    return
                if not (waited or self.closed or self.rows >= company) and self.later(self.latest(), self.now):
                    self.alarm = min(self.alarm, self.latest())
                    return
            waited, self.alarm = False, math.inf
            total = self.rows + sum(batch.rows for batch in self.sent)
            self.peak = max(total, self.peak + (total - self.peak) / 4)
            self.enough = self.sent_at_once(round(self.peak))
            pieces = self.take()
            batch = Sent(pieces, sum(len(piece.rows) for piece in pieces))
            self.queue = [piece for piece in self.queue if piece not in pieces]
            self.sent.append(batch)
            self.start()

    def sent_at_once(self, rows: int) -> int:
        """One batch more than there are instances, unless without it the instances, idle between two, are faster."""
        batches = self.limits.instances + 1
        small = max((size for size in self.seconds if size <= self.full and size * batches <= 1.1 * rows), default=None)
        if small is None:
            return self.full
        large = min(self.full, max(small, rows // self.limits.instances))
        idle = 0.00015
        return small if self.seconds[small] / small <= 1.03 * self.seconds[large] / large + idle else self.full

    def size(self) -> int:
        whole = min(self.enough, self.share(self.rows))
        left = min(piece.deadline for piece in self.queue) - self.now - self.wait(0)
        sizes = [whole >> halvings for halvings in range(whole.bit_length())]
        return next((size for size in sizes if not self.later(self.seconds[size], left)), whole)

    def take(self) -> list[Piece]:
        order = sorted(self.queue, key=lambda piece: piece.level)  # stable
        heads = [next(piece for piece in order if piece.level == level) for level in {p.level for p in order}]
        oldest = min(heads, key=lambda piece: (piece.arrived, piece.level))
        others = any(piece.level > 1 for piece in order)
        self.favoured = others and not self.favoured and self.later(self.now, oldest.arrived + 1.0)
        first = oldest if self.favoured else order[0]
        size = self.size()
        taken, room = [first], size - len(first.rows)
        for piece in order:
            if piece is not first:
                if len(piece.rows) > room:
                    break
                taken.append(piece)
                room -= len(piece.rows)
        return taken

    def start(self) -> None:
        """Idle instances start the batches that stand by."""
        while sum(batch.started is not None for batch in self.sent) < self.limits.instances:
            batch = next((batch for batch in self.sent if batch.started is None), None)
            if batch is None:
                return
            batch.started, batch.live = self.now, [piece for piece in batch.pieces if not piece.done]
            rows = [(piece.request, row) for piece in batch.live for row in piece.rows]
            batch.ends = self.now
            if rows:
                number = len(self.outcome.batches)
                batch.fate = self.scenario.fate(number)
                batch.ends += self.scenario.duration(number, len(rows))
                self.outcome.batches.append((self.now, rows))

    def finish(self, batch: Sent) -> None:
        self.sent.remove(batch)
        self.start()
        dead = [piece for piece in batch.live if not piece.done and batch.fate == "die"]
        for piece in dead:
            piece.refused_at = piece.deadline - self.seconds[len(piece.rows)]
        again = [piece for piece in dead if not piece.retried and not self.later(self.now, piece.refused_at)]
        for piece in again:
            piece.retried = True
        self.queue[:0] = again
        for piece in dead:
            if piece not in again:
                self.end(piece.request, "inference_failed")
        self.outcome.replaced += batch.fate == "die"
        self.send()
        for piece in batch.live:
            if batch.fate == "raise":
                self.end(piece.request, "inference_failed")
            elif batch.fate == "ok" and not piece.done:
                piece.done = True
                if all(other.done for other in self.pieces[piece.request]):
                    self.outcome.ends[piece.request] = ("answered", self.now)

    def end(self, number: int, reason: str) -> None:
        if number in self.outcome.ends or number not in self.pieces:
            return
        self.outcome.ends[number] = (reason, self.now)
        for piece in self.pieces[number]:
            piece.done = True
            if piece in self.queue:
                self.queue.remove(piece)
        self.send()

    def close(self) -> None:
        self.closed = True
        self.send()


# The batcher in virtual time.


class VirtualInstances:
    """Takes the place of InstanceThreads."""

    def __init__(self, outcome: Outcome, scenario: Scenario, on_result: Callable[[Batch], None]) -> None:
        self.outcome, self.scenario, self.on_result = outcome, scenario, on_result
        self.loop = asyncio.get_running_loop()
        self.standing_by: list[Batch] = []
        self.idle = scenario.batching.instances

    def put(self, batch: Batch) -> None:
        self.standing_by.append(batch)
        self.start()

    def start(self) -> None:
        while self.idle and self.standing_by:
            self.idle -= 1
            batch = self.standing_by.pop(0)
            batch.started = self.loop.time()
            batch.parts = [part for part in batch.parts if not part.done]
            if not batch.parts:
                self.loop.call_soon(self.finish, batch)
                continue
            images: UInt8Array = np.concatenate([part.images for part in batch.parts])
            number = len(self.outcome.batches)
            self.outcome.batches.append((batch.started, [(int(a), int(b)) for a, b in images[:, 0, 0, :2]]))
            batch.gathered, batch.computed = batch.started, batch.started + self.scenario.seconds[len(images)]
            fate = self.scenario.fate(number)
            if fate == "ok":
                batch.logits = images[:, 0, 0, :2].astype(np.float32)
            batch.error = {"ok": None, "raise": ValueError("unlucky"), "die": SystemExit("killed")}[fate]
            batch.died = fate == "die"
            self.loop.call_later(self.scenario.duration(number, len(images)), self.finish, batch)

    def finish(self, batch: Batch) -> None:
        self.idle += 1
        self.start()
        self.on_result(batch)

    async def close(self) -> None:
        assert not self.standing_by
        assert self.idle == self.scenario.batching.instances


def reason_of(error: Exception) -> str:
    if isinstance(error, RequestError):
        return error.reason
    raise error


async def simulated(scenario: Scenario) -> tuple[Outcome, dict[str, Any], int]:
    """What the batcher did; its statistics; and the rows that are left in it."""
    loop, outcome = asyncio.get_running_loop(), Outcome()
    submissions: dict[int, Submission] = {}

    def instances(count: int, max_rows: int, on_result: Callable[[Batch], None]) -> object:
        return VirtualInstances(outcome, scenario, on_result)

    with (
        patch("vitx.serve.batching.batcher.InstanceThreads", instances),
        patch("vitx.serve.batching.batcher.time", SimpleNamespace(monotonic=loop.time)),
    ):
        batcher = Batcher(lambda rows: rows, scenario.batching, curve=LatencyCurve(scenario.seconds))  # type: ignore[arg-type,return-value]

        def end(number: int, logits: Float32Array | Exception) -> None:
            assert number not in outcome.ends, "answered twice"
            reason = "answered"
            if isinstance(logits, Exception):
                reason = reason_of(logits)
            else:
                rows = scenario.requests[number].rows
                np.testing.assert_array_equal(logits, [[number, row] for row in range(rows)])
            outcome.ends[number] = (reason, loop.time())

        def arrive(number: int, request: Request) -> None:
            pixels = np.zeros((request.rows, 1, 1, 3), dtype=np.uint8)
            pixels[:, 0, 0, 0], pixels[:, 0, 0, 1] = number, range(request.rows)
            deadline = None if request.allowed is None else loop.time() + request.allowed
            try:
                submissions[number] = batcher.enqueue(
                    pixels, lambda logits: end(number, logits), priority=request.priority, deadline=deadline
                )
            except RequestError as error:
                end(number, error)

        def cancel(number: int) -> None:
            if number in submissions and number not in outcome.ends:
                outcome.ends[number] = ("cancelled", loop.time())
                submissions[number].cancel()

        for number, request in enumerate(scenario.requests):
            loop.call_at(request.at, arrive, number, request)
            if request.cancelled_at is not None:
                loop.call_at(request.cancelled_at, cancel, number)
        await asyncio.sleep(scenario.close_at)
        await batcher.close()
        await asyncio.sleep(100)  # for what would arrive or fire later
        outcome.replaced = batcher.replaced_instances
        return outcome, batcher.statistics.as_json("m", "1"), batcher.queued + batcher.running


def any_scenario(seed: int, requests: int) -> Scenario:
    """Drawn by a generator of its own: hypothesis would spend ten times as long on drawing as the test takes."""
    choose = Random(seed)
    max_batch, base, each = (
        choose.randint(1, 8),
        choose.choice([0.00003, 0.003, 0.043, 0.31]),
        choose.choice([0.0007, 0.019, 0.11]),
    )
    batching = Batching(
        max_batch=max_batch,
        max_delay=choose.choice([0.0, 0.0023, 0.057]),
        queue=choose.choice([6, 16, 60]),
        instances=choose.randint(1, 3),
        timeout=None,
    )
    drawn, at = [], 0.0
    for number in range(requests):
        at += choose.choice([0.0, 0.0, 0.0, 0.0101, 0.0505, 0.4])
        own = at + 0.00001371 * (number + 1)  # no two events at one moment
        cancelled_at = own + 0.00000517 + 0.0101 * choose.randint(0, 120)
        drawn.append(
            Request(
                own,
                choose.choice([1, 1, 1, 2, 3, 5, 11]),
                choose.randint(0, 3),
                choose.choice([None, 0.0101 * choose.randint(1, 40), 0.0101 * choose.randint(1, 300)]),
                choose.choice([None, None, None, cancelled_at]),
            )
        )
    return Scenario(
        tuple(drawn),
        close_at=choose.choice([0.0303, 0.5, 60.0]) + 0.000004,
        batching=batching,
        seconds={rows: base + each * rows for rows in range(1, max_batch + 1)},
        fates=tuple(choose.choices(["ok", "raise", "die"], [5, 1, 2], k=choose.randint(0, 12))),
    )


@settings(max_examples=200, derandomize=True, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), requests=st.integers(1, 24))
def test_any_scenario_goes_as_in_the_slow_model(seed: int, requests: int) -> None:
    scenario = any_scenario(seed, requests)
    expected = SlowModel(scenario).run()
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        outcome, statistics, left = runner.run(simulated(scenario))
    assert [rows for _, rows in outcome.batches] == [rows for _, rows in expected.batches]
    np.testing.assert_allclose([at for at, _ in outcome.batches], [at for at, _ in expected.batches], rtol=0, atol=SAME)
    assert set(outcome.ends) == set(range(len(scenario.requests)))
    assert {number: reason for number, (reason, _) in outcome.ends.items()} == {
        number: reason for number, (reason, _) in expected.ends.items()
    }
    for number, (_, at) in outcome.ends.items():
        assert abs(at - expected.ends[number][1]) < SAME
    answered = sum(reason == "answered" for reason, _ in outcome.ends.values())
    counts = statistics["inference_stats"]
    assert counts["success"]["count"] == answered
    assert counts["fail"]["count"] == len(scenario.requests) - answered
    assert outcome.replaced == expected.replaced
    assert all(len(rows) <= scenario.batching.max_batch for _, rows in outcome.batches)
    ran = [len(rows) for number, (_, rows) in enumerate(expected.batches) if scenario.fate(number) == "ok"]
    assert statistics["inference_count"] == sum(ran)
    assert {entry["batch_size"]: entry["compute_infer"]["count"] for entry in statistics["batch_stats"]} == {
        size: ran.count(size) for size in set(ran)
    }
    assert left == 0
