"""The closed loop on sessions whose speed is known and on a bundle, and the command."""

import errno
import json
import math
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from bundle_fixture import IMAGE_SIZE, Float32Array, colour_image, png
from cli_fixture import Vitx
from vitx.bench import autotune, bench, bench_bundle, bench_together, device_of, request
from vitx.bench.options import BenchOptions
from vitx.bench.plot import save_plot
from vitx.bench.timing import MIN_CALLS, Lane
from vitx.core.bundle import LATENCY, Bundle, timestamp
from vitx.core.errors import CheckFailed, InputError
from vitx.core.latency import Latency, LatencyPoint, Setting, Tuning
from vitx.core.machine import Gpu, describe_machine
from vitx.core.preprocess import Preprocessing, UInt8Array
from vitx.core.run import RunFolder
from vitx.runtimes import Session, load_session
from vitx.runtimes.requirements import RUNTIMES

SHAPE = (IMAGE_SIZE, IMAGE_SIZE, 3)
LaneOf = tuple[str, int]


class Sleeper(Session):
    """Takes a known time for a batch: a fixed part and a part for each image, in seconds."""

    def __init__(self, fixed: float, each: float = 0.0, name: str = "", calls: list[LaneOf] | None = None) -> None:
        super().__init__()
        self.fixed, self.each, self.name = fixed, each, name
        self.calls: list[LaneOf] = [] if calls is None else calls

    def _infer(self, images: UInt8Array) -> Float32Array:
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
    for point, least in zip(points, (1.5, 3.0), strict=True):
        assert point.p90_ms is not None
        # The clock can only be late. A machine that is busy leaves too few calls for a 99th percentile.
        assert least <= point.median_ms <= point.p90_ms <= point.p95_ms <= (point.p99_ms or math.inf)
        assert point.images_per_second == pytest.approx(1000 * point.batch_size / point.median_ms)


def test_slow_calls_are_still_enough_for_a_percentile() -> None:
    session = Sleeper(0.02)
    (point,) = bench(session, SHAPE, batch_sizes=(2,), seconds=0.05)
    assert len(session.calls) >= MIN_CALLS
    assert point.p90_ms is not None
    assert point.p99_ms is None


def test_batch_sizes_and_sessions_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of their own: on a busy machine one turn may take the time of all."""
    calls: list[LaneOf] = []
    sessions = {name: Sleeper(0, name=name, calls=calls) for name in ("first", "second")}
    monkeypatch.setattr("vitx.bench.closed_loop.Lane", partial(Lane, clock=lambda: 0.002 * len(calls)))
    bench_together(sessions, SHAPE, batch_sizes=(1, 2), seconds=0.3)
    turns = [lane for lane, before in zip(calls, [None, *calls], strict=False) if lane != before]
    lanes = [("first", 1), ("first", 2), ("second", 1), ("second", 2)]
    assert turns[:4] == lanes  # warm-up
    assert turns[4:8] == lanes
    assert turns[8:12] == lanes


@pytest.mark.parametrize(
    ("sizes", "seconds"), [((), 1.0), ((0,), 1.0), ((1,), 0.0), ((1,), math.nan), ((1,), math.inf), ((1,), -1.0)]
)
def test_impossible_settings_are_refused(sizes: tuple[int, ...], seconds: float) -> None:
    with pytest.raises(InputError, match="expected"):
        bench(Sleeper(0.001), SHAPE, batch_sizes=sizes, seconds=seconds)


def test_batch_sizes_are_read_from_text() -> None:
    assert BenchOptions(batch="1, 8,32").batch == (1, 8, 32)  # type: ignore[arg-type]  # a text, as on the command line
    for text in ("", "1,,2", "0", "a", "1.5", "-1"):
        with pytest.raises(ValidationError, match="expected batch sizes such as 1,8,32"):
            BenchOptions(batch=text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("provider", "runtime", "device"),
    [
        ("CPUExecutionProvider", "onnxruntime", "cpu"),
        ("cpu", "torch", "cpu"),
        ("CUDAExecutionProvider", "onnxruntime", "cuda"),
        ("cuda:0", "torch", "cuda"),
        ("NVIDIA L4", "tensorrt", "cuda"),
        ("CPU", "openvino", "cpu"),
    ],
)
def test_a_session_says_where_it_runs(provider: str, runtime: str, device: str) -> None:
    assert device_of({"provider": provider, "runtime": runtime}) == device


def test_every_line_names_its_share_and_its_limit(tiny_bundle: Bundle) -> None:
    load = partial(load_session, device="cpu", threads=1)
    sessions = {"onnxruntime": load(tiny_bundle), "sleeper": Sleeper(0.004)}
    measured = bench_bundle(tiny_bundle, sessions, {"onnxruntime": load}, seconds=0.05, quiet=True)
    own, sleeper = measured["onnxruntime"], measured["sleeper"]
    assert tiny_bundle.latency() == own
    assert [point.batch_size for point in own.points] == [1, 8, 32]
    assert own.runtime["provider"] == "CPUExecutionProvider"
    assert own.cost is not None
    assert own.cost.flops == 2 * 3 * 4
    assert own.roof is not None
    assert own.roof.threads == 1
    assert own.roof.call_ms is not None
    point = sleeper.points[0]
    # The sleeper's time does not grow with the batch, and it has no empty call.
    assert point.limit is not None
    assert sleeper.roof is not None
    assert sleeper.roof.call_ms is None
    assert point.compute_share is not None
    assert 0 < point.compute_share < own.cost.flops / 0.004 / 1e9
    # The certificate does not speak of latency.json, so a bench never invalidates it.
    assert Bundle.open(tiny_bundle.path).require_certificate().verdict == "pass"


def test_one_batch_size_is_enough_for_a_limit(tiny_bundle: Bundle) -> None:
    session = Sleeper(0.004)
    measured = bench_bundle(tiny_bundle, {"sleeper": session}, batch_sizes=(4,), seconds=0.02, quiet=True)
    assert {size for _, size in session.calls} == {2, 4}
    (point,) = measured["sleeper"].points
    assert point.batch_size == 4
    assert point.limit is not None


def test_decoding_is_in_the_time_when_an_image_is_given(tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding that takes 20 ms at least, whatever else the machine does."""
    decode = Preprocessing.from_bytes

    def slow(preprocessing: Preprocessing, data: bytes) -> UInt8Array:
        time.sleep(0.02)
        return decode(preprocessing, data)

    monkeypatch.setattr(Preprocessing, "from_bytes", slow)
    image = png(colour_image(1, np.random.default_rng(0)))
    sessions = {"onnxruntime": load_session(tiny_bundle, device="cpu", threads=1)}
    measured = bench_bundle(tiny_bundle, sessions, batch_sizes=(1, 2), seconds=0.02, image=image, quiet=True)
    latency = measured["onnxruntime"]
    assert latency.runtime["input"] == "encoded images"
    assert latency.roof is not None
    assert latency.roof.decode_ms is not None
    assert latency.roof.decode_ms >= 20
    assert all(point.median_ms >= 20 * point.batch_size for point in latency.points)


def latency_of(processor: str, median: float) -> Latency:
    points = (LatencyPoint(batch_size=1, median_ms=median, p95_ms=median, images_per_second=1000 / median),)
    machine = {"processor": processor, "cores": 4, "system": "Linux x86_64"}
    return Latency(runtime={}, machine=machine, points=points, created="2026-01-01T00:00:00+00:00")


def test_a_bundle_keeps_what_other_machines_measured(tiny_bundle: Bundle) -> None:
    first, second = latency_of("one", 1.0), latency_of("two", 2.0)
    for latency in (first, second, first):
        tiny_bundle.record_latency(latency)
    assert tiny_bundle.latency() is None  # neither is this machine
    file = tiny_bundle.latency_file()
    assert file.machines == {"one, 4 cores, Linux x86_64": first, "two, 4 cores, Linux x86_64": second}


@pytest.mark.parametrize(
    ("number", "reason", "remedy"),
    [
        (errno.EROFS, "[Errno 30] Read-only file system: ", "): bench a copy that can be written\n"),
        (errno.ENOSPC, "[Errno 28] No space left on device: ", "): free some space, and bench it again\n"),
    ],
)
def test_what_was_measured_is_told_where_the_bundle_cannot_be_written(
    tiny_bundle: Bundle, vitx: Vitx, monkeypatch: pytest.MonkeyPatch, number: int, reason: str, remedy: str
) -> None:
    """Images of containers and volumes of clusters are mounted for reading alone."""

    def refuse(path: Path, value: object) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr("vitx.core.bundle.write_json", refuse)
    code, out, err = vitx("bench", tiny_bundle.path, "--seconds", "0.05", "--batch", "1", "--device", "cpu", "--json")
    assert (code, len(json.loads(out)["points"])) == (0, 1)
    assert f"what was measured is not kept in the bundle ({reason}" in err
    assert remedy in err


def test_a_damaged_file_is_found_before_anything_is_measured(tiny_bundle: Bundle) -> None:
    (tiny_bundle.path / LATENCY).write_text("{}")
    session = Sleeper(0.001)
    with pytest.raises((CheckFailed, InputError)):
        bench_bundle(tiny_bundle, {"sleeper": session}, batch_sizes=(1,), seconds=0.01, quiet=True)
    assert session.calls == []


def test_a_changed_byte_of_the_file_is_found(tiny_bundle: Bundle) -> None:
    tiny_bundle.record_latency(latency_of("old", 3.0))
    path = tiny_bundle.path / LATENCY
    whole = path.read_bytes()
    for changed in (whole.replace(b"3.0", b"1.0", 1), whole + b" ", whole.replace(b'"old"', b'"odd"')):
        path.write_bytes(changed)
        with pytest.raises(CheckFailed, match="was changed after it was written"):
            tiny_bundle.latency()


def test_the_name_of_a_bundle_is_no_formula_in_the_plot(tmp_path: Path) -> None:
    points = (LatencyPoint(batch_size=1, median_ms=1.0, p95_ms=1.5, images_per_second=1000.0),)
    latency = Latency(runtime={}, machine={}, points=points, created="2026-01-01")
    save_plot("bundle$a_$ on a machine", {"onnxruntime": latency}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_bench_command(tiny_bundle: Bundle, tiny_run: RunFolder, tmp_path: Path, vitx: Vitx) -> None:
    arguments = (tiny_bundle.path, "--seconds", "0.05", "--batch", "1,4", "--threads", "1", "--device", "cpu")
    plot = tmp_path / "plot.png"
    code, out, err = vitx("bench", *arguments, "--json", "--run", tiny_run.path, "--plot", plot)
    assert code == 0, err
    printed = json.loads(out)
    assert printed["beside"]["torch"]["runtime"]["runtime"] == "torch"
    assert [point["batch_size"] for point in printed["points"]] == [1, 4]
    beside = printed.pop("beside")
    assert Latency.model_validate_json(json.dumps(printed)) == tiny_bundle.latency()
    assert Latency.model_validate_json(json.dumps(beside["torch"]))
    assert plot.read_bytes().startswith(b"\x89PNG")
    code, out, _ = vitx("bench", *arguments, "--quiet")
    assert code == 0
    assert "median ms" in out
    assert "100 % for onnxruntime (CPUExecutionProvider): " in out


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--batch", "one"), 2, "--batch one: expected batch sizes such as 1,8,32"),
        (("--runtime", "onnxruntime,cudart"), 2, "unknown runtime 'cudart'"),
        (("--runtime", "torch"), 2, "--run"),
        (("--rate", "0"), 2, "rates '0'"),
        (("--scenario", "of-line"), 2, "did you mean offline"),
        (("--plot", "plot.pdf"), 2, "expected a name that ends in .png or .svg"),
        (("--image", "nowhere.png"), 2, "no image at 'nowhere.png'"),
        (("--image", __file__), 2, f"--image '{__file__}': not an image in a format that can be read"),
        (("--batch", "99999999999"), 2, "--batch 99999999999: expected batch sizes such as 1,8,32, at most 65,536"),
        (("--rate", "1e12"), 2, "rate 1e+12 a second for 2 s: expected at most 1,000,000 arrivals"),
        (("--rate", ""), 2, "rates '': expected positive numbers"),
        (("--scenario", ""), 2, "unknown scenario ''"),
        (("--plot", "/dev/null/x.png"), 2, "/dev/null"),
        (("--tune", "--rate", "10"), 2, "--rate has no effect on --tune: leave it out"),
        (("--tune", "--batch", "4"), 2, "--batch has no effect on --tune: leave it out"),
        (("--p99", "50"), 2, "--p99 has no effect without --rate or --scenario: leave it out, or give one of them"),
        (("--instances", "2"), 2, "--instances has no effect without --rate or --scenario"),
        (("--rate", "10", "--plot", "x.png"), 2, "--plot has no effect on --rate and --scenario: leave it out"),
        (("--scenario", "server", "--p99", "0"), 2, "--p99 0: Input should be greater than or equal to 0.001"),
        (("--rate", "10", "--p99", "50"), 2, "--p99 has no effect without --scenario server: leave it out"),
        (("--tune", "--runtime", "onnxruntime,onnxruntime-cpu"), 2, "--tune: expected one runtime that runs bundles"),
    ],
)
def test_bench_command_refuses(
    tiny_bundle: Bundle, vitx: Vitx, arguments: tuple[str, ...], code: int, message: str
) -> None:
    found, _, err = vitx("bench", tiny_bundle.path, *arguments)
    assert found == code
    assert message in err
    assert not (tiny_bundle.path / LATENCY).exists()  # nothing was measured


def test_a_runtime_that_cannot_run_here_is_refused_before_anything_is_measured(
    tiny_bundle: Bundle, vitx: Vitx, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vitx.runtimes import requirements

    monkeypatch.setattr(requirements, "local_gpus", lambda: ())
    code, _, err = vitx("bench", tiny_bundle.path, "--runtime", "onnxruntime-cpu,onnxruntime-cuda")
    assert code == 3
    assert "GPU" in err
    assert not (tiny_bundle.path / LATENCY).exists()


def test_load_and_tune_commands(tiny_bundle: Bundle, vitx: Vitx, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "TRIAL_SECONDS", 0.02)
    arguments = (tiny_bundle.path, "--device", "cpu", "--json")
    code, out, err = vitx("bench", *arguments, "--tune", "--quiet")
    assert code == 0, err
    best = json.loads(out)["best"]
    kept = tiny_bundle.latency()
    assert kept is not None
    assert kept.tuning is not None
    assert kept.tuning.best.model_dump() == best
    code, out, err = vitx(
        *("bench", *arguments, "--rate", "200", "--scenario", "single-stream,offline", "--seconds", "0.2")
    )
    assert code == 0, err
    report = json.loads(out)
    assert report["instances"] == best["instances"]
    assert report["runtime"]["threads"] == best["threads"]
    assert report["open_loop"][0]["rate"] == 200
    assert [one["scenario"] for one in report["scenarios"]] == ["offline", "single-stream"]
    # A sweep afterwards leaves the tuning in the file.
    code, _, err = vitx("bench", *arguments, "--quiet", "--batch", "1", "--seconds", "0.02")
    assert code == 0, err
    again = tiny_bundle.latency()
    assert again is not None
    assert again.tuning == kept.tuning
    assert again.points


@pytest.mark.parametrize(
    ("runtime", "device", "gpus", "instances"),
    [
        ("onnxruntime", "auto", 0, 2),
        ("onnxruntime", "cpu", 1, 2),
        ("onnxruntime-cpu", "auto", 1, 2),
        ("onnxruntime", "auto", 1, 1),
        ("onnxruntime-cuda", "auto", 1, 1),
    ],
)
def test_what_was_tuned_for_the_processor_is_not_taken_on_a_gpu(
    tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch, runtime: str, device: str, gpus: int, instances: int
) -> None:
    best = Setting(instances=2, threads=3, batch_size=4, images_per_second=1.0, median_ms=1.0)
    tuning = Tuning(best=best, tried=(best,), runtime={"runtime": "onnxruntime"}, created=timestamp())
    tiny_bundle.record_latency(
        Latency(runtime={}, machine=describe_machine(), points=(), tuning=tuning, created=timestamp())
    )
    monkeypatch.setattr("vitx.runtimes.session.local_gpus", lambda: (Gpu("A", "sm89"),) * gpus)
    monkeypatch.setattr(request, "require", lambda name: RUNTIMES[name])
    asked: list[int | None] = []

    def load(*_: object, threads: int | None, **__: object) -> Session:
        asked.append(threads)
        return Sleeper(0.0)

    monkeypatch.setattr("vitx.serve.models.loading.load_session", load)
    found = request.BenchRequest(tiny_bundle, None, runtime, device, None).load_test(
        rates=(), scenarios=(), max_batch=2, instances=None, seconds=1, p99=1
    )
    assert (found.instances, asked) == (instances, [3, 3] if instances == 2 else [None])


@pytest.mark.parametrize(
    ("device", "instances", "threads", "loaded"),
    [
        ("cpu", 3, None, [None, 2, 2, 2]),  # one for a batch that is alone, three that share seven cores
        ("cpu", 3, 5, [5, 5, 5]),
        ("cpu", 1, None, [None]),
        ("cuda", 3, None, [None, None, None]),
    ],
)
def test_instances_share_the_cores_as_they_do_in_the_server(
    tiny_bundle: Bundle,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    instances: int,
    threads: int | None,
    loaded: list[int | None],
) -> None:
    asked: list[int | None] = []

    def load(*_: object, threads: int | None, **__: object) -> Session:
        asked.append(threads)
        return Sleeper(0.0)

    monkeypatch.setattr("vitx.serve.models.loading.load_session", load)
    tuned = Setting(instances=5, threads=7, batch_size=1, images_per_second=1, median_ms=1)
    monkeypatch.setattr("vitx.runtimes.instances.tuned_setting", lambda bundle, name: tuned)  # and is not asked for
    monkeypatch.setattr("vitx.runtimes.instances.usable_cores", lambda: 7)
    monkeypatch.setattr("vitx.runtimes.session.local_gpus", lambda: (Gpu("A", "sm89"),))
    request.BenchRequest(tiny_bundle, None, "onnxruntime", device, threads).load_test(
        rates=(), scenarios=(), max_batch=2, instances=instances, seconds=1, p99=1
    )
    assert asked == loaded
