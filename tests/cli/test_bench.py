"""What `vitx bench` measures, prints and refuses, with measurements that are known here."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bundle_fixture import colour_image, png
from cli_fixture import Vitx
from vitx.bench.options import BenchOptions
from vitx.bench.request import BenchRequest, LoadTestReport, OpenLoopResult
from vitx.bench.scenarios import ScenarioResult
from vitx.cli import bench
from vitx.core.bundle import Bundle
from vitx.core.latency import Latency, LatencyPoint, Roof, Setting, Tuning

ROOF = Roof(dtype="fp32", threads=2, flops_per_second=2.5e11, bytes_per_second=3e10, call_ms=0.0125)
POINT = LatencyPoint(
    batch_size=8,
    median_ms=2,
    p90_ms=3,
    p95_ms=4,
    p99_ms=5,
    images_per_second=4000,
    compute_share=0.504,
    memory_share=0.25,
    limit="compute",
)
SLOWEST, FASTEST = (
    Setting(instances=count, threads=3 - count, batch_size=4, images_per_second=100 * count, median_ms=7)
    for count in (1, 2)
)
TUNING = Tuning(best=FASTEST, tried=(SLOWEST, FASTEST), runtime={"runtime": "x"}, created="2026-01-01")
OPEN_LOOP = OpenLoopResult(
    rate=10, answered_per_second=9, refused=1, p50_ms=1, p90_ms=2, p95_ms=3, p99_ms=None, late_ms=0.5
)
OFFLINE = ScenarioResult(scenario="offline", value=123, unit="images/s", images=64)
SWEEP = ("runtime", "threads", "batch", "median ms", "p95 ms", "p99 ms", "images/s", "compute", "memory", "limit")
Calls = list[tuple[Any, ...]]


def latency_of(threads: int, roof: Roof | None, *points: LatencyPoint) -> Latency:
    runtime = {"threads": threads, "provider": "P"}
    return Latency(runtime=runtime, machine={}, roof=roof, points=points, created="2026-01-01")


MEASURED = {
    "own": latency_of(2, ROOF, POINT),
    "other": latency_of(
        1, ROOF.model_copy(update={"call_ms": None, "threads": 1}), POINT.model_copy(update={"p99_ms": 6})
    ),
    "bare": latency_of(1, None, LatencyPoint(batch_size=1, median_ms=1, p95_ms=1, images_per_second=1000)),
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What was asked for and printed, each by its name."""
    made: Calls = []

    @contextmanager
    def sessions(request: BenchRequest) -> Iterator[str]:
        made.append(("sessions", request.run, request.runtimes, request.device, request.threads))
        yield "sessions"
        made.append(("closed",))

    def bench_bundle(*arguments: Any, **options: Any) -> dict[str, Latency]:
        made.append(("bench", *arguments[1:], options))
        return MEASURED

    def tune(request: BenchRequest, *, quiet: bool) -> Tuning:
        made.append(("tune", request.runtimes, quiet))
        return TUNING

    def load_test(request: BenchRequest, **options: Any) -> LoadTestReport:
        del options["on_failure"]
        made.append(("load", request.threads, options))
        return LoadTestReport(
            runtime={"threads": 2},
            machine={},
            instances=3,
            max_batch=4,
            max_delay_ms=1,
            open_loop=(OPEN_LOOP,) if options["rates"] else (),
            scenarios=(OFFLINE,) if options["scenarios"] else (),
            created="2026-01-01",
        )

    monkeypatch.setattr(BenchRequest, "machine", property(lambda request: "a machine"))
    monkeypatch.setattr(BenchRequest, "sessions", sessions)
    monkeypatch.setattr(BenchRequest, "loaders", lambda request: "loaders")
    monkeypatch.setattr(BenchRequest, "tune", tune)
    monkeypatch.setattr(BenchRequest, "load_test", load_test)
    monkeypatch.setattr("vitx.bench.bench_bundle", bench_bundle)
    monkeypatch.setattr("vitx.bench.plot.save_plot", lambda *arguments: made.append(("plot", *arguments)))
    monkeypatch.setattr(bench, "print_table", lambda *table: made.append(("table", *table)))
    return made


def test_a_sweep_is_a_table_and_what_is_a_hundred_percent(
    tiny_bundle: Bundle, vitx: Vitx, calls: Calls, tmp_path: Path
) -> None:
    plot, image = tmp_path / "plot.png", tmp_path / "image.png"
    image.write_bytes(png(colour_image(1, np.random.default_rng(0))))
    given = (
        "--run",
        "r",
        "--runtime",
        "a,b",
        "--batch",
        "1,8",
        "--seconds",
        "0.5",
        "--threads",
        "2",
        "--device",
        "cpu",
    )
    code, out, err = vitx("bench", tiny_bundle.path, *given, "--plot", plot, "--image", image)
    assert (code, err) == (0, "")
    title = "tiny on a machine"
    options = {"batch_sizes": (1, 8), "seconds": 0.5, "image": image.read_bytes(), "quiet": False}
    assert calls == [
        ("sessions", Path("r"), "a,b", "cpu", 2),
        ("bench", "sessions", "loaders", options),
        ("closed",),
        ("plot", title, MEASURED, plot),
        (
            "table",
            title,
            SWEEP,
            [
                ("own", "2", 8, 2.0, 4.0, 5.0, 4000.0, "50 %", "25 %", "compute"),
                ("other", "1", 8, 2.0, 4.0, 6.0, 4000.0, "50 %", "25 %", "compute"),
                ("bare", "1", 1, 1.0, 1.0, "–", 1000.0, "–", "–", "–"),
            ],
        ),
    ]
    assert out.splitlines() == [
        "100 % for own (P): 250 GFLOP/s (fp32), 30 GB/s, 2 threads, an empty call 0.0125 ms",
        "100 % for other (P): 250 GFLOP/s (fp32), 30 GB/s, 1 thread",
    ]


def test_a_sweep_as_json_has_the_first_runtime_and_the_others_beside_it(
    tiny_bundle: Bundle, vitx: Vitx, calls: Calls
) -> None:
    code, out, _ = vitx("bench", tiny_bundle.path, "--json", "--quiet")
    assert code == 0
    own, *others = (latency.model_dump(mode="json") for latency in MEASURED.values())
    assert json.loads(out) == own | {"beside": dict(zip(("other", "bare"), others, strict=True))}
    options = {"batch_sizes": (1, 8, 32), "seconds": 2.0, "image": None, "quiet": True}
    assert calls == [
        ("sessions", None, "onnxruntime", "auto", None),
        ("bench", "sessions", "loaders", options),
        ("closed",),
    ]


def test_a_setting_that_was_tuned_is_marked(tiny_bundle: Bundle, vitx: Vitx, calls: Calls) -> None:
    assert vitx("bench", tiny_bundle.path, "--tune", "--runtime", "x", "--device", "cpu")[0] == 0
    columns = ("instances", "threads", "batch", "images/s", "median ms", "")
    rows = [(1, 2, 4, 100.0, 7.0, ""), (2, 1, 4, 200.0, 7.0, "best")]
    assert calls == [("tune", "x", False), ("table", "tiny on a machine", columns, rows)]
    calls.clear()
    code, out, _ = vitx("bench", tiny_bundle.path, "--tune", "--json", "--quiet")
    assert (code, json.loads(out)) == (0, TUNING.model_dump(mode="json"))
    assert calls == [("tune", "onnxruntime", True)]


def test_rates_and_scenarios_are_tables_of_their_own(tiny_bundle: Bundle, vitx: Vitx, calls: Calls) -> None:
    percentiles = ("p50 ms", "p90 ms", "p95 ms", "p99 ms")
    title = "tiny on a machine: 3 × 2 threads"
    rates = (
        ("images/s asked", "answered/s", "refused", *percentiles, "late ms"),
        [[10.0, 9.0, 1, 1.0, 2.0, 3.0, "–", 0.5]],
    )
    scenarios = (
        ("scenario", "result", "unit", "images", *percentiles, "p99 bound ms"),
        [["offline", 123.0, "images/s", 64, "–", "–", "–", "–", "–"]],
    )
    common = {"max_batch": 32, "instances": None, "seconds": 2.0, "p99": 0.1}
    assert vitx("bench", tiny_bundle.path, "--rate", "10,20")[0] == 0
    asked: dict[str, Any] = {"rates": (10.0, 20.0), "scenarios": (), **common}
    assert calls == [("load", None, asked), ("table", title, *rates)]
    calls.clear()
    assert vitx("bench", tiny_bundle.path, "--scenario", "offline", "--threads", "2")[0] == 0
    asked = {"rates": (), "scenarios": ("offline",), **common}
    assert calls == [("load", 2, asked), ("table", title, *scenarios)]
    calls.clear()
    given = ("--batch", "4,2", "--instances", "3", "--seconds", "1", "--p99", "50")
    assert vitx("bench", tiny_bundle.path, "--rate", "1", "--scenario", "server,offline", *given)[0] == 0
    asked = {"rates": (1.0,), "scenarios": ("offline", "server")}
    asked |= {"max_batch": 4, "instances": 3, "seconds": 1.0, "p99": 0.05}
    assert calls == [("load", None, asked), ("table", title, *rates), ("table", title, *scenarios)]
    calls.clear()
    code, out, _ = vitx("bench", tiny_bundle.path, "--rate", "1", "--json")
    assert (code, len(calls)) == (0, 1)
    assert LoadTestReport.model_validate_json(out).open_loop == (OPEN_LOOP,)


@pytest.mark.parametrize("as_json", [False, True])
def test_what_was_measured_before_a_scenario_failed_is_printed(tiny_bundle: Bundle, vitx: Vitx, as_json: bool) -> None:
    """It was lost: minutes of rates and scenarios that had their results."""
    given = ("--rate", "50", "--scenario", "offline,server", "--p99", "0.001", "--seconds", "0.3", "--threads", "1")
    code, out, err = vitx("bench", tiny_bundle.path, *given, *(["--json"] if as_json else []))
    assert code == 1
    assert "error: server scenario: p99 is " in err
    if as_json:
        report = LoadTestReport.model_validate_json(out)
        assert [one.rate for one in report.open_loop] == [50]
        assert [one.scenario for one in report.scenarios] == ["offline"]
    else:
        assert "answered/s" in out
        assert "offline" in out
    # Nothing was measured, and nothing is printed.
    code, out, _ = vitx("bench", tiny_bundle.path, "--scenario", "server", *given[4:], *(["--json"] if as_json else []))
    assert (code, out) == (1, "")


@pytest.mark.parametrize(
    ("runtime", "shown"),
    [
        ({"threads": 1}, "3 × 1 thread"),
        ({"threads": "all cores"}, "3 × all cores"),
        ({"threads": "all cores", "side_by_side": {"batches": 3, "threads": 5}}, "3 × 5 threads"),
    ],
)
def test_the_title_of_a_load_test_tells_the_threads_of_an_instance(
    tiny_bundle: Bundle, vitx: Vitx, calls: Calls, monkeypatch: pytest.MonkeyPatch, runtime: Any, shown: str
) -> None:
    measure = BenchRequest.load_test

    def of_runtime(request: BenchRequest, **options: Any) -> LoadTestReport:
        return measure(request, **options).model_copy(update={"runtime": runtime})

    monkeypatch.setattr(BenchRequest, "load_test", of_runtime)
    assert vitx("bench", tiny_bundle.path, "--rate", "10")[0] == 0
    assert calls[-1][1] == f"tiny on a machine: {shown}"


VALUES = {
    "run": "r",
    "runtime": "x",
    "device": "cpu",
    "batch": "4",
    "seconds": "1",
    "image": "i.png",
    "rate": "1",
    "scenario": "server",
    "p99": "50",
    "instances": "2",
    "plot": "p.png",
    "threads": "2",
}


@pytest.mark.parametrize(
    ("mode", "refused", "otherwise"),
    [
        (
            ("--tune",),
            {"batch", "seconds", "image", "rate", "scenario", "p99", "instances", "plot", "threads"},
            "on --tune: leave it out",
        ),
        ((), {"p99", "instances"}, "without --rate or --scenario: leave it out, or give one of them"),
        (("--scenario", "server"), {"image", "plot"}, "on --rate and --scenario: leave it out"),
    ],
)
def test_each_mode_takes_its_options_and_refuses_the_others(
    tiny_bundle: Bundle,
    vitx: Vitx,
    calls: Calls,
    mode: tuple[str, ...],
    refused: set[str],
    otherwise: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert {*VALUES, "tune"} == BenchOptions.model_fields.keys()
    monkeypatch.chdir(tmp_path)
    Path("i.png").write_bytes(png(colour_image(1, np.random.default_rng(0))))
    for name, value in VALUES.items():
        code, _, err = vitx("bench", tiny_bundle.path, *mode, f"--{name}", value)
        assert (code, err) == ((2, f"error: --{name} has no effect {otherwise}\n") if name in refused else (0, "")), (
            name
        )


def test_what_cannot_be_written_or_read_is_found_before_anything_is_loaded(
    tiny_bundle: Bundle, vitx: Vitx, calls: Calls, tmp_path: Path
) -> None:
    for given in (("--plot", "p.pdf"), ("--image", tmp_path / "none.png"), ("--rate", "10", "--p99", "50")):
        assert vitx("bench", tiny_bundle.path, *given)[0] == 2
    code, _, err = vitx("bench", tiny_bundle.path, "--scenario", "offline", "--p99", "50")
    assert (code, err) == (2, "error: --p99 has no effect without --scenario server: leave it out\n")
    assert calls == []
