"""Signals while a network trains: the first asks it to stop, and a later one interrupts it."""

import os
import signal
import threading
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import pytest

from vitx.train.loop import interruption
from vitx.train.loop.interruption import StopRequest, TrainingStopped, signals_to


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    found = SimpleNamespace(now=100.0)
    monkeypatch.setattr(interruption, "time", SimpleNamespace(monotonic=lambda: found.now))
    return found


def test_signals_within_a_second_are_one_request_and_a_later_one_interrupts(clock: SimpleNamespace) -> None:
    request = StopRequest()
    assert (request.signal, request.received_at) == (0, 0.0)
    request.receive(signal.SIGINT, None)
    assert (request.signal, request.received_at) == (signal.SIGINT, 100.0)
    clock.now = 101.0
    request.receive(signal.SIGTERM, None)
    assert (request.signal, request.received_at) == (signal.SIGINT, 100.0), "the first counts"
    clock.now = 101.01
    with pytest.raises(KeyboardInterrupt):
        request.receive(signal.SIGTERM, None)


def test_a_third_signal_ends_what_cannot_unwind(clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    request = StopRequest()
    for seconds, interrupts in ((0.0, False), (2.0, True), (2.5, False)):  # the last is the second one, again
        clock.now = 100.0 + seconds
        with pytest.raises(KeyboardInterrupt) if interrupts else nullcontext():
            request.receive(signal.SIGINT, None)
    assert ended == []
    clock.now = 104.0
    with suppress(KeyboardInterrupt):  # which the end of the process leaves no time for
        request.receive(signal.SIGINT, None)
    assert ended == [128 + signal.SIGINT]


def test_any_number_of_sighups_is_one_request(clock: SimpleNamespace) -> None:
    request = StopRequest()
    for seconds in (0.0, 2.0, 4.0):
        clock.now = 100.0 + seconds
        request.receive(signal.SIGHUP, None)
    assert (request.signal, request.interrupted) == (signal.SIGHUP, False)
    with pytest.raises(KeyboardInterrupt):
        request.receive(signal.SIGTERM, None)


def test_an_ignored_sighup_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_to((request := StopRequest()).receive):
            os.kill(os.getpid(), signal.SIGHUP)
            assert request.signal == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_is_recorded_inside_the_block_and_the_handlers_come_back(number: signal.Signals) -> None:
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests run under nohup
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)]
    try:
        with signals_to((request := StopRequest()).receive):
            assert request.signal == 0
            os.kill(os.getpid(), number)
            assert request.signal == number
            raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)] == before


def test_another_thread_than_the_main_one_has_no_signals() -> None:
    found: list[int] = []

    def work() -> None:
        with signals_to((request := StopRequest()).receive):
            found.append(request.signal)

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [0]
    assert signal.getsignal(signal.SIGTERM) == before


def test_the_error_says_by_what_training_was_stopped() -> None:
    stopped = TrainingStopped(int(signal.SIGTERM))
    assert (str(stopped), stopped.signal) == ("stopped by SIGTERM", signal.SIGTERM)
