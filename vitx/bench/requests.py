"""What `vitx bench` was asked for, as sessions: every runtime is loaded, or refused, before anything is measured."""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vitx.bench.autotune import tune
from vitx.bench.closed_loop import Loader, device_of, random_images
from vitx.bench.load import LoadResult
from vitx.bench.roofline import usable_cores
from vitx.bench.scenarios import Scenario, ScenarioResult, ScenarioSettings, offer, run_scenario
from vitx.core.bundle import Bundle, timestamp
from vitx.core.errors import InputError
from vitx.core.files import Record
from vitx.core.latency import Tuning
from vitx.core.machine import describe_machine
from vitx.core.run import RunFolder
from vitx.runtimes import load_session
from vitx.runtimes.requirements import require
from vitx.runtimes.session import Session, image_shape
from vitx.serve.limits import Batching
from vitx.serve.models.instances import load_instances, tuned_setting


class OpenLoopResult(Record):
    """One offered rate. Percentiles are null where a refused request is among them."""

    rate: float
    answered_per_second: float
    refused: int
    p50_ms: float | None
    p90_ms: float | None
    p95_ms: float | None
    p99_ms: float | None
    late_ms: float

    @classmethod
    def of(cls, rate: float, result: LoadResult) -> "OpenLoopResult":
        found = {share: 1e3 * result.percentile(share / 100) for share in (50, 90, 95, 99)}
        return cls(
            rate=rate,
            answered_per_second=result.images_per_second,
            refused=result.refused,
            **{f"p{share}_ms": value if math.isfinite(value) else None for share, value in found.items()},
            late_ms=1e3 * result.late,
        )


class LoadReport(Record):
    """What `vitx bench --rate --scenario` prints as JSON."""

    runtime: dict[str, Any]
    machine: dict[str, Any]
    instances: int
    max_batch: int
    max_delay_ms: float
    open_loop: tuple[OpenLoopResult, ...]
    scenarios: tuple[ScenarioResult, ...]
    created: str


@dataclass(frozen=True)
class Choices:
    """A bundle, the run beside it, and how to load them. `runtimes` are names with commas between."""

    bundle: Bundle
    run: Path | None
    runtimes: str
    device: str
    threads: int | None

    @property
    def machine(self) -> str:
        machine = describe_machine()
        return f"{machine['processor']}, {machine['cores']} cores"

    @property
    def names(self) -> tuple[str, ...]:
        """The runtimes in the order given; the run in torch is among them when a run is."""
        names = tuple(dict.fromkeys(name.strip() for name in self.runtimes.split(",")))
        given = self.run is not None and not any(map(_runs_a_run, names))
        return (*names, "torch") if given else names

    def sessions(self) -> dict[str, Session]:
        """Load every runtime. Raises InputError for an unknown one, EnvironmentMissing for one that cannot be had."""
        return {name: self._load_run(name) if _runs_a_run(name) else self._load(name) for name in self.names}

    def loaders(self) -> dict[str, Loader]:
        """How another bundle is loaded into each runtime that takes bundles."""
        return {
            name: partial(load_session, runtime=name, device=self.device, threads=self.threads)
            for name in self.names
            if not _runs_a_run(name)
        }

    def tune(self, *, quiet: bool) -> Tuning:
        """Tune for this machine's processor. Raises InputError for several runtimes, a GPU, or a run in torch."""
        name = self._only("--tune")
        session = self._load(name)
        if device_of(session.describe()) != "cpu":
            raise InputError(f"--tune is for a processor, and {name} would use a GPU: give --device cpu")

        def load(threads: int) -> Session:
            return load_session(self.bundle, name, device=self.device, threads=threads)

        return tune(self.bundle, load, cores=usable_cores(), quiet=quiet)

    def load_test(
        self,
        *,
        rates: tuple[float, ...],
        scenarios: tuple[Scenario, ...],
        max_batch: int,
        instances: int | None,
        seconds: float,
        p99: float,
    ) -> LoadReport:
        """Offer rates and ask scenarios, in `seconds` each, through the server's batcher. p99: seconds.

        Without instances and threads they are what `--tune` found for this machine, else one session on all cores.
        """
        if not (seconds > 0 and p99 > 0):
            raise InputError(f"seconds {seconds:g} and p99 {p99:g} s: expected more than 0")
        tuned = tuned_setting(self.bundle) if instances is None and self.threads is None else None
        count = tuned.instances if tuned else instances or 1
        threads = tuned.threads if tuned else self.threads
        name = self._only("--rate and --scenario")
        load = partial(load_session, self.bundle, name, device=self.device, threads=threads)
        session = load_instances(load, count, threads)
        batching = Batching(max_batch=max_batch, instances=count)
        shape = image_shape(self.bundle)
        images = random_images(max(max_batch, 64), shape)
        for rows in (1, max_batch):
            session.infer(images[:rows])
        settings = ScenarioSettings(batching, seconds, p99)
        return LoadReport(
            runtime=session.describe(),
            machine=describe_machine(),
            instances=count,
            max_batch=max_batch,
            max_delay_ms=1e3 * batching.max_delay,
            open_loop=tuple(OpenLoopResult.of(rate, offer(session.infer, images, rate, settings)) for rate in rates),
            scenarios=tuple(run_scenario(scenario, session.infer, images, settings) for scenario in scenarios),
            created=timestamp(),
        )

    def read_image(self, path: Path) -> bytes:
        """The bytes of an image file that can be decoded; raise InputError for one that cannot."""
        if not path.is_file():
            raise InputError(f"no image at '{path}'")
        data = path.read_bytes()
        self.bundle.manifest.preprocessing.from_bytes(data)
        return data

    def _only(self, option: str) -> str:
        if len(self.names) > 1 or _runs_a_run(self.names[0]):
            raise InputError(f"{option} take one runtime of bundles, and {', '.join(self.names)} were given")
        return self.names[0]

    def _load(self, name: str) -> Session:
        return load_session(self.bundle, name, device=self.device, threads=self.threads)

    def _load_run(self, name: str) -> Session:
        if self.run is None:
            raise InputError(f"runtime {name} runs a checkpoint, not a bundle: give its run with --run")
        from vitx.runtimes.torch import load_run_session

        return load_run_session(
            RunFolder.open(self.run), device=self.device, threads=self.threads, compiled=name == "torch-compile"
        )


def _runs_a_run(name: str) -> bool:
    """Whether a runtime loads a run. Raises InputError for an unknown one, EnvironmentMissing for one not had."""
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
