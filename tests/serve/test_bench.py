"""What the meter measures, on sessions whose speed is known, and on a bundle."""

import json
import time
from typing import Any

import numpy as np
import pytest

from bundle_fixture import IMAGE_SIZE, Float32Array
from cli_fixture import Vitx
from vitx.core.bundle import Bundle, Latency
from vitx.core.errors import InputError
from vitx.core.preprocess import UInt8Array
from vitx.core.run import RunFolder
from vitx.serve import bench, load_session
from vitx.serve.bench import MIN_CALLS, bench_bundle, bench_together, parse_batch_sizes

SHAPE = (IMAGE_SIZE, IMAGE_SIZE, 3)
Lane = tuple[str, int]


class Sleeper:
    """Takes a known time for a batch: a fixed part and a part for each image, in seconds."""

    def __init__(self, fixed: float, each: float = 0.0, name: str = "", calls: list[Lane] | None = None) -> None:
        self.fixed, self.each, self.name = fixed, each, name
        self.calls: list[Lane] = [] if calls is None else calls

    def infer(self, images: UInt8Array) -> Float32Array:
        assert images.dtype == np.uint8
        assert images.shape[1:] == SHAPE
        self.calls.append((self.name, len(images)))
        end = time.perf_counter() + self.fixed + self.each * len(images)
        while time.perf_counter() < end:
            pass
        return np.zeros((len(images), 4), dtype=np.float32)

    def describe(self) -> dict[str, Any]:
        return {"runtime": "sleeper", "provider": "clock", "threads": 1}


def test_points_are_the_known_times() -> None:
    points = bench(Sleeper(0.001, 0.0005), SHAPE, batch_sizes=(1, 4), seconds=0.1)
    assert [point.batch_size for point in points] == [1, 4]
    # The clock can only be late, and on a busy machine it is.
    assert 1.5 <= points[0].median_ms < 3
    assert 3 <= points[1].median_ms < 6
    for point in points:
        assert point.p95_ms >= point.median_ms
        assert point.images_per_second == pytest.approx(1000 * point.batch_size / point.median_ms)


def test_overhead_of_the_meter_is_below_one_percent_of_a_millisecond() -> None:
    (point,) = bench(Sleeper(0.001), SHAPE, batch_sizes=(1,), seconds=0.2)
    assert point.median_ms == pytest.approx(1, rel=0.01)


def test_slow_calls_are_still_enough_for_a_percentile() -> None:
    session = Sleeper(0.02)
    bench(session, SHAPE, batch_sizes=(2,), seconds=0.05)
    assert len(session.calls) >= MIN_CALLS


def test_batch_sizes_and_sessions_take_turns() -> None:
    calls: list[Lane] = []
    sessions = {name: Sleeper(0.002, name=name, calls=calls) for name in ("first", "second")}
    bench_together(sessions, SHAPE, batch_sizes=(1, 2), seconds=0.3)
    turns = [lane for lane, before in zip(calls, [None, *calls], strict=False) if lane != before]
    lanes = [("first", 1), ("first", 2), ("second", 1), ("second", 2)]
    assert turns[:4] == lanes  # warm-up
    assert turns[4:8] == lanes
    assert turns[8:12] == lanes


@pytest.mark.parametrize(("sizes", "seconds"), [((), 1.0), ((0,), 1.0), ((1,), 0.0), ((1,), float("nan"))])
def test_impossible_settings_are_refused(sizes: tuple[int, ...], seconds: float) -> None:
    with pytest.raises(InputError, match="expected"):
        bench(Sleeper(0.001), SHAPE, batch_sizes=sizes, seconds=seconds)


def test_batch_sizes_are_read_from_text() -> None:
    assert parse_batch_sizes("1, 8,32") == (1, 8, 32)
    for text in ("", "1,,2", "0", "a", "1.5", "-1"):
        with pytest.raises(InputError, match=r"expected positive whole numbers with commas between, such as 1,8,32"):
            parse_batch_sizes(text)


def test_latency_of_a_bundle_is_written_and_read_back(tiny_bundle: Bundle) -> None:
    session = load_session(tiny_bundle, device="cpu", threads=1)
    latency, beside = bench_bundle(tiny_bundle, session, {"sleeper": Sleeper(0.001)}, seconds=0.05, quiet=True)
    assert tiny_bundle.latency() == latency
    assert [point.batch_size for point in latency.points] == [1, 8, 32]
    assert latency.runtime["provider"] == "CPUExecutionProvider"
    assert latency.machine["cores"] >= 1
    assert beside["sleeper"].points[0].median_ms == pytest.approx(1, rel=0.5)
    # The certificate does not speak of latency.json, so a bench never invalidates it.
    assert Bundle.open(tiny_bundle.path).require_certificate().verdict == "pass"


def test_bench_command(tiny_bundle: Bundle, tiny_run: RunFolder, vitx: Vitx) -> None:
    arguments = (tiny_bundle.path, "--seconds", "0.05", "--batch", "1,4", "--threads", "1", "--device", "cpu")
    code, out, err = vitx("bench", *arguments, "--json", "--run", tiny_run.path)
    assert code == 0, err
    printed = json.loads(out)
    assert printed["beside"]["torch"]["runtime"]["runtime"] == "torch"
    assert [point["batch_size"] for point in printed["points"]] == [1, 4]
    beside = printed.pop("beside")
    assert Latency.model_validate_json(json.dumps(printed)) == tiny_bundle.latency()
    assert Latency.model_validate_json(json.dumps(beside["torch"]))
    code, out, _ = vitx("bench", *arguments, "--quiet")
    assert code == 0
    assert "median ms" in out


def test_bench_command_names_wrong_batch_sizes(tiny_bundle: Bundle, vitx: Vitx) -> None:
    code, _, err = vitx("bench", tiny_bundle.path, "--batch", "one")
    assert code == 2
    assert "batch sizes 'one'" in err
