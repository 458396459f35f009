"""What a request to measure loads, refuses and passes on; the measurements are known here."""

import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bundle_fixture import IMAGE_SIZE, NumpySession, colour_image, png
from vitx.bench import request as module
from vitx.bench.open_loop import OpenLoopRun
from vitx.bench.request import BenchRequest, OpenLoopResult, parse_rates
from vitx.bench.scenarios import ScenarioResult, ScenarioSettings
from vitx.core.bundle import Bundle
from vitx.core.console import counted
from vitx.core.errors import InputError
from vitx.core.latency import Setting
from vitx.core.machine import describe_machine, usable_cores
from vitx.core.preprocess import UInt8Array
from vitx.core.run import RunFolder
from vitx.core.tensorrt_plan import Profile
from vitx.serve.batching.latency_curve import LatencyCurve
from vitx.serve.limits import Batching

Calls = list[tuple[Any, ...]]
CURVE = LatencyCurve({1: 0.001})
OFFLINE = ScenarioResult(scenario="offline", value=1, unit="images/s", images=1)
RUN = OpenLoopRun(tuple(number / 1000 for number in range(1, 96)), 5, 0.002, 10)


class Counted(NumpySession):
    """Says what it was called with and when it was closed."""

    def __init__(self, calls: Calls, name: str = "", provider: str = "cpu") -> None:
        super().__init__()
        self.calls, self.name, self.provider = calls, name, provider

    def _infer(self, images: UInt8Array) -> Any:
        self.calls.append(("infer", images.shape, images.dtype))
        return super()._infer(images)

    def _close(self) -> None:
        self.calls.append(("closed", self.name))

    def describe(self) -> dict[str, Any]:
        return {"runtime": self.name, "provider": self.provider, "threads": 1}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    made: Calls = []

    def load(
        bundle: Bundle, runtime: str, *, device: str, threads: int | None, outputs: tuple[str, ...] = ()
    ) -> Counted:
        assert outputs == ()
        made.append(("load", bundle.path, runtime, device, threads))
        return Counted(made, runtime, "CUDA" if runtime == "openvino" else "cpu")

    def instances(load: Any, count: int, threads: int | None) -> Any:
        made.append(("instances", count, threads))
        return load()

    def run_at_rate(infer: Any, images: UInt8Array, rate: float, settings: ScenarioSettings) -> OpenLoopRun:
        made.append(("rate", images.shape, rate, settings))
        return RUN

    def run_scenario(scenario: str, infer: Any, images: UInt8Array, settings: ScenarioSettings) -> ScenarioResult:
        made.append(("scenario", scenario, images.shape, settings))
        return OFFLINE

    def measure_curve(session: Counted, shape: tuple[int, ...], batching: Batching) -> LatencyCurve:
        made.append(("curve", session.name, shape, batching.instances))
        return CURVE

    for name, value in (
        ("load_session", load),
        ("measure_curve", measure_curve),
        ("run_at_rate", run_at_rate),
        ("run_scenario", run_scenario),
    ):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr("vitx.serve.models.loading.load_session", load)
    monkeypatch.setattr("vitx.runtimes.instances.load_instances", instances)
    return made


def request_of(bundle: Bundle, **changes: Any) -> BenchRequest:
    given = {"run": None, "runtimes": "onnxruntime", "device": "cpu", "threads": None, **changes}
    return BenchRequest(bundle, **given)


def test_percentiles_are_milliseconds_and_null_on_a_refused_request() -> None:
    result = OpenLoopResult.of(10, RUN)
    assert result == OpenLoopResult(
        rate=10, answered_per_second=9.5, refused=5, p50_ms=50, p90_ms=90, p95_ms=95, p99_ms=None, late_ms=2
    )


def test_few_requests_have_no_percentiles_of_the_tail() -> None:
    result = OpenLoopResult.of(10, OpenLoopRun((0.25, 0.5), 0, None, 1))
    assert result == OpenLoopResult(
        rate=10, answered_per_second=2, refused=0, p50_ms=250, p90_ms=None, p95_ms=None, p99_ms=None, late_ms=None
    )


def test_the_machine_is_its_processor_and_cores(tiny_bundle: Bundle) -> None:
    machine = describe_machine()
    request = request_of(tiny_bundle)
    assert request.machine == f"{machine['processor']}, {counted(int(machine['cores']), 'core')}"
    with pytest.raises(AttributeError):
        request.threads = 1  # type: ignore[misc]  # what was asked for stays


@pytest.mark.parametrize(
    ("runtimes", "run", "names"),
    [
        ("onnxruntime", None, ("onnxruntime",)),
        (" openvino, onnxruntime,openvino", None, ("openvino", "onnxruntime")),
        ("onnxruntime", Path("run"), ("onnxruntime", "torch")),
        ("torch,onnxruntime", Path("run"), ("torch", "onnxruntime")),
        ("onnxruntime,torch", None, ("onnxruntime", "torch")),
    ],
)
def test_torch_is_measured_too_where_a_run_is_given(
    tiny_bundle: Bundle, runtimes: str, run: Path | None, names: tuple[str, ...]
) -> None:
    assert request_of(tiny_bundle, runtimes=runtimes, run=run).names == names


def test_every_runtime_is_loaded_and_closed(
    tiny_bundle: Bundle, calls: Calls, tiny_run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_run(run: RunFolder, *, device: str, threads: int | None, compiled: bool) -> tuple[Counted, None]:
        calls.append(("run", run.path, device, threads, compiled))
        return Counted(calls, "compiled" if compiled else "plain"), None

    monkeypatch.setattr("vitx.runtimes.torch.load_run", load_run)
    monkeypatch.setattr(module, "require", lambda name: SimpleNamespace(source="run" if "torch" in name else "bundle"))
    request = request_of(tiny_bundle, runtimes="openvino,torch,torch-compile", run=tiny_run.path, threads=3)
    with request.sessions() as sessions:
        assert [*sessions] == ["openvino", "torch", "torch-compile"]
        assert not any(call[0] == "closed" for call in calls)
    assert calls == [
        ("load", tiny_bundle.path, "openvino", "cpu", 3),
        ("run", tiny_run.path, "cpu", 3, False),
        ("run", tiny_run.path, "cpu", 3, True),
        *(("closed", name) for name in ("compiled", "plain", "openvino")),
    ]
    calls.clear()
    (load,) = request.loaders().values()
    assert isinstance(load, partial)
    load(tiny_bundle)
    assert calls == [("load", tiny_bundle.path, "openvino", "cpu", 3)]
    with pytest.raises(InputError) as refused, request_of(tiny_bundle, runtimes="torch").sessions():
        pass
    assert str(refused.value) == "runtime torch runs a checkpoint, not a bundle: give its run with --run"


def test_tuning_is_for_one_runtime_on_the_processor(
    tiny_bundle: Bundle, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tune(bundle: Bundle, load: Any, *, cores: int, quiet: bool) -> str:
        calls.append(("tune", bundle.path, cores, quiet))
        load(5)
        return "tuned"

    monkeypatch.setattr(module, "tune", tune)
    assert request_of(tiny_bundle, threads=2).tune(quiet=True) == "tuned"  # type: ignore[comparison-overlap]
    assert calls == [
        ("load", tiny_bundle.path, "onnxruntime", "cpu", 2),
        ("closed", "onnxruntime"),
        ("tune", tiny_bundle.path, usable_cores(), True),
        ("load", tiny_bundle.path, "onnxruntime", "cpu", 5),
    ]
    for runtimes, message in (
        ("openvino", "--tune is for a processor, and openvino would use a GPU: give --device cpu"),
        ("torch", "--tune: expected one runtime that runs bundles, not torch"),
        ("onnxruntime,openvino", "--tune: expected one runtime that runs bundles, not onnxruntime, openvino"),
    ):
        calls.clear()
        with pytest.raises(InputError) as refused:
            request_of(tiny_bundle, runtimes=runtimes).tune(quiet=True)
        assert str(refused.value) == message
        assert calls[-1:] == ([("closed", "openvino")] if runtimes == "openvino" else [])


LOAD: dict[str, Any] = {"rates": (), "scenarios": (), "max_batch": 4, "instances": None, "seconds": 2.0, "p99": 0.1}


def test_batches_are_of_the_best_sizes_of_a_plan(
    tiny_bundle: Bundle, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    profiles = (Profile(minimum=1, optimum=6, maximum=8), Profile(minimum=1, optimum=3, maximum=4))
    monkeypatch.setattr(Counted, "profiles", profiles)
    request_of(tiny_bundle, threads=1).load_test(**LOAD | {"rates": (10.0,)})
    assert calls[5][-1].batching.preferred == (3, 6)  # as in the server


def test_rates_and_scenarios_go_through_the_servers_batcher(tiny_bundle: Bundle, calls: Calls) -> None:
    asked = LOAD | {"rates": (10.0, 20.0), "scenarios": ("offline", "server"), "max_batch": 100, "instances": 3}
    report = request_of(tiny_bundle, threads=2).load_test(**asked)
    images, settings = (100, IMAGE_SIZE, IMAGE_SIZE, 3), calls[5][-1]
    assert calls == [
        ("instances", 3, 2),
        ("load", tiny_bundle.path, "onnxruntime", "cpu", 2),
        # As the server does: what is timed first would count the first call, as long as a hundred where it compiles.
        *[("infer", (rows, *images[1:]), np.uint8) for rows in (1, 2)],
        ("curve", "onnxruntime", images[1:], 3),
        ("rate", images, 10.0, settings),
        ("rate", images, 20.0, settings),
        ("scenario", "offline", images, settings),
        ("scenario", "server", images, settings),
        ("closed", "onnxruntime"),
    ]
    assert (settings.batching, settings.seconds, settings.p99) == (Batching(100, 0.002, 1024, 3, None), 2.0, 0.1)
    assert settings.curve is CURVE
    assert (report.runtime["runtime"], report.machine) == ("onnxruntime", describe_machine())
    assert (report.instances, report.max_batch, report.max_delay_ms) == (3, 100, 2)
    assert report.open_loop == (OpenLoopResult.of(10, RUN), OpenLoopResult.of(20, RUN))
    assert report.scenarios == (OFFLINE, OFFLINE)


@pytest.mark.parametrize(
    ("threads", "instances", "found"),
    [(None, None, (5, 7)), (2, None, (1, 2)), (2, 3, (3, 2))],
)
def test_what_was_tuned_is_taken_where_nothing_is_asked_for(
    tiny_bundle: Bundle,
    calls: Calls,
    monkeypatch: pytest.MonkeyPatch,
    threads: int | None,
    instances: int | None,
    found: tuple[int, int | None],
) -> None:
    tuned = Setting(instances=5, threads=7, batch_size=1, images_per_second=1, median_ms=1)
    known = {"onnxruntime": tuned}
    monkeypatch.setattr("vitx.runtimes.instances.tuned_setting", lambda bundle, name: known.get(name))
    monkeypatch.setattr("vitx.runtimes.instances.usable_cores", lambda: 1)
    request_of(tiny_bundle, threads=threads).load_test(**LOAD | {"instances": instances})
    assert calls[:2] == [("instances", *found), ("load", tiny_bundle.path, "onnxruntime", "cpu", found[1])]
    known.clear()
    calls.clear()
    request_of(tiny_bundle).load_test(**LOAD | {"scenarios": ("offline",)})
    assert calls[0] == ("instances", 1, None)
    assert calls[5][2] == (64, IMAGE_SIZE, IMAGE_SIZE, 3)  # so that not every query is of the same ones


@pytest.mark.parametrize(
    ("asked", "runtimes", "message"),
    [
        ({"seconds": 0.0}, "onnxruntime", "seconds 0 and p99 0.1 s: expected more than 0, and finite seconds"),
        ({"seconds": math.inf}, "onnxruntime", "seconds inf and p99 0.1 s: expected more than 0, and finite seconds"),
        ({"seconds": math.nan}, "onnxruntime", "seconds nan and p99 0.1 s: expected more than 0, and finite seconds"),
        ({"p99": 0.0}, "onnxruntime", "seconds 2 and p99 0 s: expected more than 0, and finite seconds"),
        ({"rates": (1.0, 0.1)}, "onnxruntime", "rate 0.1 a second for 2 s: expected at least one arrival, give a long"),
        ({}, "torch", "--rate and --scenario: expected one runtime that runs bundles, not torch"),
        (
            {},
            "onnxruntime,openvino",
            "--rate and --scenario: expected one runtime that runs bundles, not onnxruntime, ",
        ),
    ],
)
def test_a_load_that_cannot_be_is_refused_before_anything_is_loaded(
    tiny_bundle: Bundle, calls: Calls, asked: dict[str, Any], runtimes: str, message: str
) -> None:
    with pytest.raises(InputError) as refused:
        request_of(tiny_bundle, runtimes=runtimes).load_test(**LOAD | asked)
    assert str(refused.value).startswith(message)
    assert calls == []


def test_an_image_is_read_whole_if_it_is_one(tiny_bundle: Bundle, tmp_path: Path) -> None:
    request, image, other = request_of(tiny_bundle), tmp_path / "image.png", tmp_path / "other.png"
    image.write_bytes(data := png(colour_image(1, np.random.default_rng(0))))
    assert request.read_image(image) == data
    other.write_bytes(data[:60])
    for path, message in ((tmp_path, f"no image at '{tmp_path}'"), (other, f"--image '{other}': ")):
        with pytest.raises(InputError) as refused:
            request.read_image(path)
        assert str(refused.value).startswith(message)


def test_rates_are_positive_numbers() -> None:
    assert parse_rates("10, 25.5,1e2") == (10, 25.5, 100)
    for text in ("", "0", "1,-1", "1,,2", "a", "nan", "inf", "1e400"):
        with pytest.raises(InputError) as refused:
            parse_rates(text)
        assert str(refused.value) == f"rates '{text}': expected positive numbers with commas between, such as 10,25.5"
