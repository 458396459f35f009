"""The closed loop with times that are known: what is called, and the numbers that are made of the times."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from bundle_fixture import IMAGE_SIZE, PREPROCESSING, Float32Array, colour_image, png
from vitx.bench import closed_loop
from vitx.bench.closed_loop import bench, bench_bundle, bench_together, checked_sizes, device_of, point, random_images
from vitx.bench.timing import Lane, Probe
from vitx.core.bundle import Bundle
from vitx.core.errors import CheckFailed, InputError
from vitx.core.latency import GraphCost, Latency, LatencyPoint, Roof, Setting, Tuning
from vitx.core.machine import describe_machine, usable_cores
from vitx.core.preprocess import UInt8Array
from vitx.runtimes import Session

SHAPE = (IMAGE_SIZE, IMAGE_SIZE, 3)
COST = GraphCost(flops=1000, activation_bytes=100, weight_bytes=5000)
IMAGE = png(colour_image(1, np.random.default_rng(0)))
Seen = list[tuple[Any, ...]]


class Known(Session):
    """Takes `fixed` + `each` milliseconds an image, by the fake clock of `turns`."""

    def __init__(self, seen: Seen, fixed: float, each: float, name: str = "a", **described: Any) -> None:
        super().__init__()
        self.seen, self.fixed, self.each, self.name = seen, fixed, each, name
        self.described = {"runtime": "known", "provider": "cpu", "threads": 2} | described

    def _infer(self, images: UInt8Array) -> Float32Array:
        self.seen.append((self.name, images.tobytes(), self.fixed + self.each * len(images)))
        return np.zeros((len(images), 4), dtype=np.float32)

    def describe(self) -> dict[str, Any]:
        return {key: value for key, value in self.described.items() if value is not None}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Each lane has two turns of a hundred calls, of 0.5 % to 50 % more milliseconds than its session says."""
    told: Seen = []

    def turns(lanes: Sequence[Lane], seconds: float, probes: Sequence[Probe] = (), *, quiet: bool) -> None:
        told.append(("turns", [lane.title for lane in lanes], seconds, [probe.lane.title for probe in probes], quiet))
        for lane in lanes:
            lane.call()
            times = [told[-1][-1] / 1000 * (1 + number / 200) for number in range(101)]
            lane.times += [*times, *times]
            lane.turn_medians += [times[50], times[50]]
            lane.joules = 20.2
        for probe in probes:
            probe.lane.call()
            probe.lane.times += [told[-1][-1] / 1000]
            probe.lane.turn_medians += [told[-1][-1] / 1000] * 3

    def warm_up(lanes: Sequence[Lane], *, quiet: bool) -> None:
        told.append(("warm-up", [lane.title for lane in lanes], quiet))

    def probe(name: str, work: float, milliseconds: float) -> Callable[..., Probe]:
        def make(*arguments: Any) -> Probe:
            told.append((name, *arguments))
            return Probe(work, Lane(name, lambda: told.append(("called", name, milliseconds))))

        return make

    def empty_call(bundle: Bundle, load: Any, opened: ExitStack) -> Lane | None:
        told.append(("empty call", bundle.path, load))
        opened.callback(told.append, ("closed",))
        return load and Lane("empty", lambda: told.append(("called", "empty", 0.5)))

    monkeypatch.setattr(closed_loop, "take_turns", turns)
    monkeypatch.setattr(closed_loop, "warm_up", warm_up)
    monkeypatch.setattr(closed_loop, "count_cost", lambda bundle: COST)
    monkeypatch.setattr(closed_loop, "product_probe", probe("product", 4e6, 2.0))
    monkeypatch.setattr(closed_loop, "copy_probe", probe("copy", 2e6, 1.0))
    monkeypatch.setattr(closed_loop, "empty_call", empty_call)
    return told


def point_of(size: int, milliseconds: float, **known: Any) -> LatencyPoint:
    return LatencyPoint(
        batch_size=size,
        median_ms=1.25 * milliseconds,
        p90_ms=1.45 * milliseconds,
        p95_ms=1.475 * milliseconds,
        p99_ms=1.495 * milliseconds,
        images_per_second=size / (1.25e-3 * milliseconds),
        **known,
    )


def assert_equal(found: Sequence[LatencyPoint], expected: Sequence[LatencyPoint]) -> None:
    for one, other in zip(found, expected, strict=True):
        for name, value in other:
            same = value if value is None or isinstance(value, str) else pytest.approx(value, rel=1e-9)
            assert getattr(one, name) == same, name


def test_percentiles_of_sessions_that_take_turns(seen: Seen) -> None:
    sessions = {"a": Known(seen, 1, 0.5), "b": Known(seen, 2, 0, "b")}
    found = bench_together(sessions, SHAPE, batch_sizes=(4, 1, 4), seconds=0.25)
    assert_equal(found["a"], [point_of(1, 1.5), point_of(4, 3)])
    assert_equal(found["b"], [point_of(1, 2), point_of(4, 2)])
    titles = ["a batch 1", "a batch 4", "b batch 1", "b batch 4"]
    assert seen[:2] == [("warm-up", titles, True), ("turns", titles, 0.25, [], True)]
    images = random_images(4, SHAPE)
    assert [called[1] for called in seen[2:]] == [images[:1].tobytes(), images.tobytes()] * 2
    assert bench_together(sessions, SHAPE, quiet=False).keys() == {"a", "b"}
    assert [told[-1] for told in seen if told[0] in ("warm-up", "turns")] == [True, True, False, False]


def test_one_session_has_no_name(seen: Seen) -> None:
    assert_equal(bench(Known(seen, 1, 0.5), SHAPE, batch_sizes=(2,), seconds=0.25, quiet=False), [point_of(2, 2)])
    assert seen[:2] == [("warm-up", ["batch 2"], False), ("turns", ["batch 2"], 0.25, [], False)]
    seen.clear()
    assert [one.batch_size for one in bench(Known(seen, 1, 0.5), SHAPE)] == [1, 8, 32]
    assert seen[1][2:] == (2.0, [], True)


def test_images_are_the_same_at_every_call() -> None:
    images = random_images(3, SHAPE)
    assert (images.dtype.name, images.shape) == ("uint8", (3, *SHAPE))
    assert (int(images.min()), int(images.max())) == (0, 255)
    np.testing.assert_array_equal(images, random_images(3, SHAPE))


def test_sizes_are_in_order_and_each_once() -> None:
    assert checked_sizes([8, 1, 8], 0.001) == (1, 8)
    for sizes, seconds, message in (
        ([], 1, "batch sizes (): expected one or more, each at least 1"),
        ([4, 0], 1, "batch sizes (4, 0): expected one or more, each at least 1"),
        ([1], 0, "seconds 0: expected a finite number above 0"),
        ([1], math.inf, "seconds inf: expected a finite number above 0"),
    ):
        with pytest.raises(InputError) as refused:
            checked_sizes(sizes, seconds)
        assert str(refused.value) == message


@pytest.mark.parametrize(("joules", "found"), [(20.2, 0.025), (math.nan, None)])
def test_energy_is_of_an_image_where_it_was_read(joules: float, found: float | None) -> None:
    lane = Lane("x", lambda: None, lambda: 0.0, times=[0.001] * 202, joules=joules)
    assert point(lane, 4).joules_per_image == (None if found is None else pytest.approx(found))
    lane.energy = None
    assert point(lane, 4).joules_per_image is None


@pytest.mark.parametrize(("provider", "counted"), [("cpu", False), ("CUDA", True)])
def test_energy_is_read_on_a_gpu(seen: Seen, monkeypatch: pytest.MonkeyPatch, provider: str, counted: bool) -> None:
    monkeypatch.setattr(closed_loop, "gpu_energy", lambda: lambda: 0.0)
    (found,) = bench(Known(seen, 1, 0.5, provider=provider), SHAPE, batch_sizes=(2,))
    assert found.joules_per_image == (pytest.approx(20.2 / 202 / 2) if counted else None)


@pytest.mark.parametrize(
    ("description", "device"),
    [
        ({"provider": "CPUExecutionProvider", "runtime": "onnxruntime"}, "cpu"),
        ({"provider": "cuda:0", "runtime": "torch"}, "cuda"),
        ({"provider": "NVIDIA L4", "runtime": "TensorRT"}, "cuda"),
        ({"provider": "GPU.0", "runtime": "openvino"}, "cuda"),
        ({}, "cpu"),
    ],
)
def test_a_session_says_where_it_is(description: Mapping[str, str], device: str) -> None:
    assert device_of(description) == device


def test_shares_and_limits_are_of_the_probes(seen: Seen, tiny_bundle: Bundle) -> None:
    """A product of 2 GFLOP/s and a copy of 2 GB/s; calls of 1000 FLOPs, 5000 bytes and 100 more an image."""
    sessions = {"a": Known(seen, 1, 0.5), "b": Known(seen, 0, 0.5, "b", threads=None)}
    measured = bench_bundle(tiny_bundle, sessions, {"a": "load"}, batch_sizes=(1, 4), seconds=0.5, quiet=False)  # type: ignore[dict-item]
    threads = max(2, usable_cores())
    titles = ["a batch 1", "a batch 4", "b batch 1", "b batch 4"]
    asked = [told for told in seen if told[0] in ("product", "copy", "empty call", "warm-up", "turns", "closed")]
    assert asked == [
        ("product", "cpu", "fp32", threads),
        ("copy", "cpu", threads),
        ("empty call", tiny_bundle.path, "load"),
        ("warm-up", titles, False),
        ("turns", titles, 0.5, ["product", "copy", "empty"], False),
        ("closed",),
    ]
    own, other = measured["a"], measured["b"]

    def shares(size: int, seconds: float) -> dict[str, float]:
        moved = 5000 + 100 * size
        return {"compute_share": 1000 * size / seconds / 2e9, "memory_share": moved / seconds / 2e9}

    assert_equal(
        own.points,
        [
            point_of(1, 1.5, **shares(1, 1.875e-3), limit="launch"),
            point_of(4, 3, **shares(4, 3.75e-3), limit="memory"),
        ],
    )
    assert_equal(
        other.points,
        [
            point_of(1, 0.5, **shares(1, 0.625e-3), limit="memory"),
            point_of(4, 2, **shares(4, 2.5e-3), limit="memory"),
        ],
    )
    roof = Roof(dtype="fp32", threads=threads, flops_per_second=2e9, bytes_per_second=2e9, call_ms=0.5)
    assert (own.roof, other.roof) == (roof, roof.model_copy(update={"call_ms": None}))
    assert (own.cost, own.machine, own.runtime) == (COST, describe_machine(), sessions["a"].describe())
    assert other.runtime == sessions["b"].describe()
    assert own.created == other.created
    assert tiny_bundle.latency() == own


@pytest.mark.parametrize(("size", "second"), [(1, 2), (2, 1), (3, 1), (9, 4)])
def test_a_second_size_is_measured_and_not_told(seen: Seen, tiny_bundle: Bundle, size: int, second: int) -> None:
    measured = bench_bundle(tiny_bundle, {"a": Known(seen, 1, 0.5)}, batch_sizes=(size,))
    assert [one.batch_size for one in measured["a"].points] == [size]
    turns = next(told for told in seen if told[0] == "turns")
    assert turns == ("turns", [f"a batch {each}" for each in sorted((size, second))], 2.0, ["product", "copy"], False)
    assert next(len(told[1]) for told in seen if told[0] == "a") == min(size, second) * math.prod(SHAPE)


def test_each_device_has_its_probes(seen: Seen, tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closed_loop, "gpu_energy", lambda: None)
    monkeypatch.setattr(closed_loop, "probe_dtype", lambda precision, device: f"{precision} on {device}")
    sessions = {"a": Known(seen, 1, 0.5, threads=3), "b": Known(seen, 1, 0.5, "b", provider="CUDA", threads=1)}
    measured = bench_bundle(tiny_bundle, sessions, batch_sizes=(1, 2))
    assert [told for told in seen if told[0] in ("product", "copy")] == [
        ("product", "cpu", "fp32 on cpu", 3),
        ("copy", "cpu", 3),
        ("product", "cuda", "fp32 on cuda", 3),
        ("copy", "cuda", 3),
    ]
    roofs = {name: latency.roof and latency.roof.dtype for name, latency in measured.items()}
    assert roofs == {"a": "fp32 on cpu", "b": "fp32 on cuda"}


def test_a_graph_that_was_not_counted_has_times_alone(
    seen: Seen, tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(closed_loop, "count_cost", lambda bundle: None)
    measured = bench_bundle(tiny_bundle, {"a": Known(seen, 1, 0.5)}, batch_sizes=(1, 4))["a"]
    assert_equal(measured.points, [point_of(1, 1.5), point_of(4, 3)])
    assert (measured.cost, measured.points[0].limit, measured.roof is None) == (None, None, False)
    assert capsys.readouterr().err == (
        "bench: ONNX Runtime lacks kernels for the graph of 'tiny' on a CPU, where FLOPs and bytes are counted: "
        "no shares and no limits\n"
    )
    bench_bundle(tiny_bundle, {"a": Known(seen, 1, 0.5)}, quiet=True)
    assert capsys.readouterr().err == ""


def test_decoding_is_a_part_of_each_call(seen: Seen, tiny_bundle: Bundle) -> None:
    session = Known(seen, 1, 0.5)
    measured = bench_bundle(tiny_bundle, {"a": session}, batch_sizes=(1, 2), image=IMAGE)
    assert measured["a"].runtime == {**session.describe(), "input": "encoded images"}
    turns = next(told for told in seen if told[0] == "turns")
    assert turns[3] == ["product", "copy", "probe: decode"]
    pixels = PREPROCESSING.from_bytes(IMAGE).tobytes()
    assert [told[1] for told in seen if told[0] == "a"] == [pixels, 2 * pixels]
    assert measured["a"].roof is not None
    assert measured["a"].roof.decode_ms == 1  # by this clock as long as the copy, which was called before it


def test_the_tuning_stays_and_a_damaged_record_is_found_first(
    seen: Seen, tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(bundle: Bundle) -> None:
        raise CheckFailed("damaged")

    setting = Setting(instances=1, threads=1, batch_size=1, images_per_second=1, median_ms=1)
    tuning = Tuning(best=setting, tried=(setting,), runtime={}, created="2026-01-01")
    measured = bench_bundle(tiny_bundle, {"a": Known(seen, 1, 0.5)}, batch_sizes=(1,))
    tiny_bundle.record_latency(measured["a"].model_copy(update={"tuning": tuning}))
    again = bench_bundle(tiny_bundle, {"a": Known(seen, 1, 0.5)}, batch_sizes=(1,))
    assert (measured["a"].tuning, again["a"].tuning) == (None, tuning)
    seen.clear()
    monkeypatch.setattr(Bundle, "latency", refuse)
    with pytest.raises(CheckFailed, match="damaged"):
        bench_bundle(tiny_bundle, {"a": Known(seen, 1, 0.5)})
    assert seen == []


def test_a_tuning_that_ends_during_a_sweep_stays(
    seen: Seen, tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = Setting(instances=1, threads=1, batch_size=1, images_per_second=1, median_ms=1)
    tuning = Tuning(best=setting, tried=(setting,), runtime={}, created="2026-01-01")

    def tuned_meanwhile(lanes: list[Lane], *, quiet: bool) -> None:
        tiny_bundle.record_latency(
            Latency(runtime={}, machine=describe_machine(), points=(), tuning=tuning, created="")
        )

    monkeypatch.setattr(closed_loop, "warm_up", tuned_meanwhile)
    measured = bench_bundle(tiny_bundle, {"a": Known(seen, 1, 0.5)}, batch_sizes=(1,))["a"]
    kept = tiny_bundle.latency()
    assert kept == measured
    assert measured.tuning == tuning
