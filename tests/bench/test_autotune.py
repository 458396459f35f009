"""The parts of `vitx bench --tune` that need no machine to be measured: what is tried, what is said, what counts."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from bundle_fixture import NumpySession
from vitx.bench import autotune
from vitx.bench.autotune import best_setting, core_splits, tune
from vitx.bench.closed_loop import random_images
from vitx.core.bundle import Bundle
from vitx.core.latency import Setting


def test_nine_copies_of_the_weights_are_too_many() -> None:
    assert core_splits(16) == [(16, 1), (8, 2), (4, 4), (2, 8), (1, 16)]
    assert core_splits(18) == [(18, 1), (6, 3), (3, 6), (2, 9), (1, 18)]


def test_a_setting_at_the_limit_of_what_counts_as_equal_is_equal() -> None:
    settings = [
        Setting(instances=instances, threads=1, batch_size=1, images_per_second=rate, median_ms=median)
        for instances, rate, median in ((1, 100 * (1 - autotune.EQUAL_WITHIN), 5), (2, 100, 20))
    ]
    assert best_setting(settings).instances == 1


@pytest.mark.parametrize("quiet", [False, True])
def test_what_is_tried_is_said(
    quiet: bool, tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(autotune._Trial, "take_turn", lambda trial, seconds: trial._times.append(seconds))
    tune(tiny_bundle, lambda threads: NumpySession(), cores=2, quiet=quiet)
    assert capsys.readouterr().err == ("" if quiet else "tune: 6 settings on 2 cores\n")


def test_a_setting_is_of_all_its_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: Iterator[list[float]] = iter([[0.1, 0.1], [0.3, 0.3, 0.3]])

    def lane(title: str, call: Any) -> Any:
        return SimpleNamespace(times=next(turns), take_turn=lambda seconds: None)

    monkeypatch.setattr(autotune, "Lane", lane)
    trial = autotune._Trial(NumpySession(), 1, 1, random_images(4, (16, 16, 3)))
    trial.take_turn(0.1)
    assert trial.setting().median_ms == pytest.approx(100)
    trial.take_turn(0.1)
    assert trial.setting().median_ms == pytest.approx(300)
    assert trial.setting().images_per_second == pytest.approx(4 / 0.3)
    assert len(trial._times) == 5
