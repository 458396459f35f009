"""Turns and warm-up of what is timed, on a clock that only the timed calls move."""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import chain, cycle, repeat
from unittest.mock import Mock, call

import pytest

from vitx.bench.closed_loop import point
from vitx.bench.timing import (
    MIN_CALLS,
    WARM_UP_SECONDS,
    WARM_UP_WINDOWS,
    Lane,
    Probe,
    percentiles_ms,
    take_turns,
    warm_up,
)


class Machine:
    """A clock, and calls that take the seconds of a schedule."""

    def __init__(self) -> None:
        self.now, self.order = 100.0, list[str]()

    def lane(self, title: str, seconds: Iterator[float], energy: Callable[[], float] | None = None) -> Lane:
        def call() -> None:
            self.order.append(title)
            self.now += next(seconds)

        return Lane(title, call, energy=energy, clock=lambda: self.now)


def test_a_turn_leaves_the_first_call_out() -> None:
    """And reads the energy around those that it times."""
    machine = Machine()
    lane = machine.lane("a", chain([5.0], cycle([0.25, 0.75])), energy=lambda: 3 * machine.now)
    lane.take_turn(2.0)
    assert lane.times == [0.25, 0.75, 0.25, 0.75]
    assert (lane.turn_medians, lane.measured, lane.joules) == ([0.5], 2.0, 6.0)
    lane.take_turn(0.1)  # the first again untimed, then one that is longer than the turn
    assert lane.times[4:] == [0.75]
    assert (lane.turn_medians, lane.measured, lane.joules) == ([0.5, 0.75], 2.75, 8.25)
    assert lane.median == 0.75


def test_a_turn_that_is_too_short_for_the_clock_has_one_call() -> None:
    """`vitx bench --seconds 1e-20` ended in a traceback: the clock's next number is later than that."""
    machine = Machine()
    lane = machine.lane("a", repeat(0.5))
    lane.take_turn(1e-20)
    assert (lane.times, machine.order) == ([0.5], ["a", "a"])


def test_without_a_counter_there_is_no_energy() -> None:
    lane = Machine().lane("a", repeat(0.5))
    lane.take_turn(1.0)
    assert lane.joules == 0.0
    assert point(lane, 2).joules_per_image is None


def test_a_counter_that_fails_in_the_middle_costs_the_energy_alone() -> None:
    """It reads NaN then, which no JSON holds: writing latency.json ended in a traceback, and all else was lost."""
    machine, counter = Machine(), iter([1.0, 9.0, 9.0, math.nan])
    lane = machine.lane("a", repeat(0.5), energy=lambda: next(counter))
    lane.take_turn(1.0)
    assert point(lane, 2).joules_per_image == 8 / 2 / 2
    lane.take_turn(1.0)
    measured = point(lane, 2)
    assert measured.joules_per_image is None
    assert measured.images_per_second == 4


@pytest.mark.parametrize(
    ("second", "settles", "windows"), [(1.02, True, 2), (0.98, True, 2), (1.05, True, 3), (0.9, True, 3)]
)
def test_warmed_up_are_two_windows_that_agree_within_three_percent(second: float, settles: bool, windows: int) -> None:
    machine = Machine()
    first = WARM_UP_SECONDS / 2
    lane = machine.lane("a", chain(repeat(first, 2), repeat(first * second)))
    assert lane.warm_up() is settles
    took = machine.now - 100
    assert windows - 0.1 < took / WARM_UP_SECONDS < windows + 0.8
    assert lane.times == []


def test_what_never_settles_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    machine = Machine()
    restless = machine.lane("restless", (0.2 * 1.1**k for k in range(1000)))  # each window is one call
    warm_up([restless, machine.lane("calm", repeat(0.2))], quiet=False)
    said = capsys.readouterr().err
    assert "restless did not settle in 20 windows" in said
    assert "calm" not in said
    assert machine.order.count("restless") == WARM_UP_WINDOWS + 1
    assert machine.order.count("calm") == 2
    warm_up([restless], quiet=True)
    assert capsys.readouterr().err == ""


def test_lanes_take_turns_until_each_has_its_seconds_and_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe before each round and after the last; a lane that is done waits no more for the others."""
    machine, bar = Machine(), Mock()
    progress = Mock(return_value=nullcontext(bar))
    monkeypatch.setattr("vitx.bench.timing.progress", progress)
    quick, slow = machine.lane("quick", repeat(0.024)), machine.lane("slow", repeat(0.125))
    probe = Probe(4.0, machine.lane("probe", repeat(0.05)))
    take_turns([quick, slow], 0.5, [probe], quiet=True)
    assert len(slow.times) == MIN_CALLS  # of .125 s: a turn has one
    assert quick.measured == pytest.approx(0.6)  # five turns of five calls
    assert len(quick.times) >= MIN_CALLS
    assert probe.rates == pytest.approx([80.0] * (MIN_CALLS + 1))
    rounds = [title for title, before in zip(machine.order, [None, *machine.order], strict=False) if title != before]
    assert rounds[:6] == ["probe", "quick", "slow"] * 2
    assert rounds[-3:] == ["probe", "slow", "probe"]
    shown = [update.args for update in bar.update.call_args_list]
    assert progress.call_args_list == [call("bench", 200, quiet=True)]
    assert shown[-1] == (200, "slow")
    assert all(done < 200 for done, _ in shown[:-1])  # slow has its seconds after four of its twenty calls


def test_percentiles_are_linear_between_times() -> None:
    lane = Lane("", lambda: None, times=[4.0, 1.0, 2.0])
    assert [lane.percentile(share) for share in (0.25, 0.5, 0.9, 1.0)] == pytest.approx([1.5, 2.0, 3.6, 4.0])


@pytest.mark.parametrize(
    ("count", "told"), [(1, ()), (2, (50,)), (9, (50,)), (10, (50, 90)), (20, (50, 90, 95)), (99, (50, 90, 95))]
)
def test_a_percentile_is_told_where_times_may_lie_beyond(count: int, told: tuple[int, ...]) -> None:
    """The 99th percentile of one call was that call."""
    expected = {f"p{percent}_ms": 10.0 * percent if percent in told else None for percent in (50, 90, 95, 99)}
    assert percentiles_ms(count, lambda share: share) == pytest.approx(expected)


def test_an_infinite_percentile_is_not_told() -> None:
    found = percentiles_ms(100, lambda share: share if share < 0.95 else math.inf)
    assert found == {"p50_ms": 500, "p90_ms": 900, "p95_ms": None, "p99_ms": None}
