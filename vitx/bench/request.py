"""What `vitx bench` was asked to measure. Every runtime is loaded, or refused, before anything is measured."""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vitx.bench.autotune import tune
from vitx.bench.closed_loop import Loader, device_of, random_images
from vitx.bench.open_loop import OpenLoopRun, check_arrivals
from vitx.bench.scenarios import Scenario, ScenarioResult, ScenarioSettings, run_at_rate, run_scenario
from vitx.core.bundle import Bundle, timestamp
from vitx.core.console import counted
from vitx.core.errors import InputError, VitxError
from vitx.core.files import Record
from vitx.core.latency import Tuning
from vitx.core.machine import describe_machine, usable_cores
from vitx.core.options import device_name
from vitx.core.preprocess import ImageError
from vitx.core.run import RunFolder
from vitx.runtimes import load_session
from vitx.runtimes.instances import serving_setting
from vitx.runtimes.requirements import require
from vitx.runtimes.session import Session, image_shape
from vitx.serve.models.loading import fitted, load_warm, measure_curve
from vitx.serve.options import ServeOptions


class OpenLoopResult(Record):
    """One offered rate, as JSON. A percentile is null of too few requests, or where it falls on a refused one."""

    rate: float
    answered_per_second: float
    refused: int
    p50_ms: float | None
    p90_ms: float | None
    p95_ms: float | None
    p99_ms: float | None
    late_ms: float | None

    @classmethod
    def of(cls, rate: float, result: OpenLoopRun) -> "OpenLoopResult":
        return cls(
            rate=rate,
            answered_per_second=result.images_per_second,
            refused=result.refused,
            **result.percentiles_ms(),
            late_ms=None if result.late is None else 1e3 * result.late,
        )


class LoadTestReport(Record):
    """What `vitx bench` with --rate or --scenario prints as JSON."""

    runtime: dict[str, Any]
    machine: dict[str, Any]
    instances: int
    max_batch: int
    max_delay_ms: float
    open_loop: tuple[OpenLoopResult, ...]
    scenarios: tuple[ScenarioResult, ...]
    created: str


@dataclass(frozen=True)
class BenchRequest:
    """A bundle, the run to compare it with, and how to load them. `runtimes` are names, separated by commas."""

    bundle: Bundle
    run: Path | None
    runtimes: str
    device: str
    threads: int | None

    @property
    def machine(self) -> str:
        machine = describe_machine()
        return f"{machine['processor']}, {counted(int(machine['cores']), 'core')}"

    @property
    def names(self) -> tuple[str, ...]:
        """The runtimes in the order given, each once; torch is added for a run that none of them would load."""
        names = tuple(dict.fromkeys(name.strip() for name in self.runtimes.split(",")))
        given = self.run is not None and not any(map(_runs_a_run, names))
        return (*names, "torch") if given else names

    @contextmanager
    def sessions(self) -> Iterator[dict[str, Session]]:
        """Load every runtime. Raises InputError for an unknown one, EnvironmentMissing for one that cannot run here."""
        with ExitStack() as opened:
            yield {
                name: opened.enter_context(
                    self._load_run(name) if _runs_a_run(name) else self._load(name, self.threads)
                )
                for name in self.names
            }

    def loaders(self) -> dict[str, Loader]:
        """For each runtime of bundles, the function that loads another bundle into it."""
        return {
            name: partial(load_session, runtime=name, device=self.device, threads=self.threads)
            for name in self.names
            if not _runs_a_run(name)
        }

    def tune(self, *, quiet: bool) -> Tuning:
        """Tune for this machine's processor. Raises InputError for several runtimes, a GPU, or a run in torch."""
        name = self._only("--tune")
        with self._load(name, self.threads) as session:
            if device_of(session.describe()) != "cpu":
                raise InputError(f"--tune is for a processor, and {name} would use a GPU: give --device cpu")
        return tune(self.bundle, partial(self._load, name), cores=usable_cores(), quiet=quiet)

    def load_test(
        self,
        *,
        rates: tuple[float, ...],
        scenarios: tuple[Scenario, ...],
        max_batch: int,
        instances: int | None,
        seconds: float,
        p99: float,
        on_failure: Callable[[LoadTestReport], None] = lambda measured: None,
    ) -> LoadTestReport:
        """Measure rates and scenarios through the server's batcher, for `seconds` each. p99: the bound, in seconds.

        instances: as many as `vitx serve` takes with these instances and threads, which share the cores as there.
        on_failure: called with what was measured before an error that ends it, if anything was.
        """
        if not (0 < seconds < math.inf and p99 > 0):
            raise InputError(f"seconds {seconds:g} and p99 {p99:g} s: expected more than 0, and finite seconds")
        for rate in rates:
            check_arrivals(rate, seconds)  # before anything is loaded
        name = self._only("--rate and --scenario")
        device = device_name(self.device)
        count, threads = serving_setting(self.bundle, name, device, instances, self.threads)
        batching = ServeOptions(max_batch=max_batch, instances=count).batching
        shape = image_shape(self.bundle)
        images = random_images(max(max_batch, 64), shape)
        with ExitStack() as opened:
            session = load_warm(self.bundle, batching, opened, device=device, threads=threads, runtime=name)
            batching = fitted(batching, session)
            curve = measure_curve(session, shape, batching)
            settings = ScenarioSettings(batching, seconds, p99, curve, session.under_load.infer)
            open_loop, answers = list[OpenLoopResult](), list[ScenarioResult]()

            def report() -> LoadTestReport:
                return LoadTestReport(
                    runtime=session.describe(),
                    machine=describe_machine(),
                    instances=count,
                    max_batch=max_batch,
                    max_delay_ms=1e3 * batching.max_delay,
                    open_loop=tuple(open_loop),
                    scenarios=tuple(answers),
                    created=timestamp(),
                )

            try:
                for rate in rates:
                    open_loop.append(OpenLoopResult.of(rate, run_at_rate(session.infer, images, rate, settings)))
                for scenario in scenarios:
                    answers.append(run_scenario(scenario, session.infer, images, settings))
            except VitxError:
                if open_loop or answers:
                    on_failure(report())
                raise
            return report()

    def read_image(self, path: Path) -> bytes:
        """The bytes of an image file that can be decoded; raise InputError for one that cannot."""
        if not path.is_file():
            raise InputError(f"no image at '{path}'")
        data = path.read_bytes()
        try:
            self.bundle.manifest.preprocessing.from_bytes(data)
        except ImageError as error:
            raise InputError(f"--image '{path}': {error}") from None
        return data

    def _only(self, option: str) -> str:
        if len(self.names) > 1 or _runs_a_run(self.names[0]):
            raise InputError(f"{option}: expected one runtime that runs bundles, not {', '.join(self.names)}")
        return self.names[0]

    def _load(self, name: str, threads: int | None) -> Session:
        return load_session(self.bundle, name, device=self.device, threads=threads)

    def _load_run(self, name: str) -> Session:
        if self.run is None:
            raise InputError(f"runtime {name} runs a checkpoint, not a bundle: give its run with --run")
        from vitx.runtimes.torch import load_run

        run, compiled = RunFolder.open(self.run), name == "torch-compile"
        return load_run(run, device=self.device, threads=self.threads, compiled=compiled)[0]


def _runs_a_run(name: str) -> bool:
    """Whether a runtime loads a run. Raises InputError for an unknown one, EnvironmentMissing if it cannot run here."""
    return require(name).source == "run"


def parse_rates(text: str) -> tuple[float, ...]:
    """'10,25.5' → (10.0, 25.5); raise InputError for anything but positive numbers."""
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(0 < rate < math.inf for rate in rates):
        raise InputError(f"rates '{text}': expected positive numbers with commas between, such as 10,25.5")
    return rates
