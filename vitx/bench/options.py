"""What `vitx bench` may be told. Every number has its default here, and nowhere else."""

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator

from vitx.core.options import DeviceOption, Options, Threads, option, parse_batch_sizes


class BenchOptions(Options):
    """Options of a measurement: the batch sweep, or --rate and --scenario, or --tune."""

    run: Path | None = option(None, "Measure this run's checkpoint in torch too, in the same minutes.")
    runtime: str = option("onnxruntime", "Runtimes with commas between, measured in turns.")
    batch: Annotated[tuple[int, ...], BeforeValidator(parse_batch_sizes)] = option(
        (1, 8, 32), "Batch sizes.", text=True
    )
    seconds: float = option(2.0, "Measured time of each batch size, rate or trial.", ge=0.001, le=86_400)
    image: Path | None = option(None, "Start every call from the bytes of this image file.")
    rate: str | None = option(None, "Open loop: Poisson arrivals at these rates, images a second.")
    scenario: str | None = option(None, "offline, server, single-stream, with commas between.")
    p99: float = option(100.0, "Bound of the server scenario in milliseconds.", ge=0.001)
    tune: bool = option(False, "Find the instances, threads and batch for this machine's processor.")
    instances: int | None = option(
        None, "Batches at the same time, with --rate and --scenario. Default: as many as `vitx serve`.", ge=1, le=1024
    )
    plot: Path | None = option(None, "Throughput against latency, to a .png or .svg.")
    threads: Threads = None
    device: DeviceOption = "auto"
