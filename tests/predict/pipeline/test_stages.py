"""The threads of the pipeline: order kept, queues bounded, and an error of any stage reaches the caller."""

import threading
import time
from collections.abc import Generator
from contextlib import closing, suppress
from typing import Any

import pytest

from server_process import wait_until
from vitx.predict.pipeline.stages import BackgroundGenerator, StageTimer, busiest


class Stopped(Exception):
    pass


@pytest.mark.parametrize("depth", [1, 3])
def test_a_background_generator_is_ahead_by_its_depth_and_the_one_in_hand(depth: int) -> None:
    produced, consumed, ahead = 0, 0, 0

    def values() -> Generator[int, None, None]:
        nonlocal produced, ahead
        for value in range(30):
            produced += 1
            ahead = max(ahead, produced - consumed)
            yield value

    background = BackgroundGenerator(values(), depth, "values")
    found: list[int] = []
    for value in background:
        wait_until(lambda: produced >= min(30, len(found) + 1 + depth + 1))
        found.append(value)
        consumed += 1
    assert found == list(range(30))
    assert ahead <= depth + 2  # one taken from the queue and not counted yet, one made for it
    background.close()


def test_any_value_is_passed_on() -> None:
    """None and an exception too: they are values here, neither an end nor an error."""
    error = ValueError("a value")
    given: list[Any] = [None, error, 0, ()]
    with closing(BackgroundGenerator((value for value in given), 2, "values")) as background:
        assert list(background) == given


@pytest.mark.parametrize("kind", [Stopped, KeyboardInterrupt])
def test_the_error_of_a_background_generator_comes_after_its_values(kind: type[BaseException]) -> None:
    def values() -> Generator[int, None, None]:
        yield 1
        yield 2
        raise kind

    background = BackgroundGenerator(values(), 5, "values")
    found = iter(background)
    assert [next(found), next(found)] == [1, 2]
    with pytest.raises(kind):
        next(found)
    background.close()


def test_closing_ends_a_generator_that_waits_for_room_in_its_own_thread() -> None:
    closed_by: list[threading.Thread] = []
    produced: list[int] = []

    def values() -> Generator[int, None, None]:
        try:
            for value in range(1000):
                produced.append(value)
                yield value
        finally:
            closed_by.append(threading.current_thread())

    background = BackgroundGenerator(values(), 1, "its-thread")
    assert next(iter(background)) == 0
    wait_until(lambda: len(produced) == 3)
    background.close()
    # A daemon: if it waits for a store, the process can end nevertheless.
    assert [(thread.name, thread.daemon) for thread in closed_by] == [("its-thread", True)]
    assert not background._thread.is_alive()
    assert len(produced) <= 5
    background.close()


def test_nothing_is_made_before_somebody_asks_nor_after_it_is_closed() -> None:
    """A signal between building a pipeline and running it must leave nothing claimed."""
    produced: list[int] = []

    def values() -> Generator[int, None, None]:
        produced.append(1)
        yield 1

    background = BackgroundGenerator(values(), 1, "values")
    assert not background._thread.is_alive()
    background.close()
    assert list(background) == []
    assert produced == []


def test_shares_are_of_the_time_of_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 13.0, 20.0, 21.0, 30.0, 34.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    timer = StageTimer({"read": 2, "infer": 1, "write": 1})
    with timer.busy("read"):
        pass
    with suppress(Stopped), timer.busy("read"):
        raise Stopped
    with timer.busy("infer"):
        pass
    assert timer.shares(8.0) == {"read": 4 / 16, "infer": 4 / 8, "write": 0.0}


def test_the_busiest_stage_has_the_largest_share() -> None:
    assert busiest({"read": 0.1, "decode": 0.9, "infer": 0.5}) == "decode"
