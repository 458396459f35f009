"""`vitx bench`: how fast a bundle is on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from vitx.cli.options import BundleArgument, DeviceOption, Json, Quiet, Threads


def command(
    bundle: BundleArgument,
    run: Annotated[
        Path | None, typer.Option("--run", help="Measure this run's checkpoint in torch too, in the same minutes.")
    ] = None,
    batch: Annotated[str, typer.Option("--batch", help="Batch sizes.")] = "1,8,32",
    seconds: Annotated[float, typer.Option("--seconds", help="Measured time of each batch size.")] = 2.0,
    threads: Threads = None,
    device: DeviceOption = "auto",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure latency and throughput by batch size, and write latency.json into the bundle.

    One caller, the next batch when the last is back; median and 95th percentile; images per second are the batch size
    over the median. Decoding is not in it.
    """
    from vitx.core.bundle import Bundle
    from vitx.core.console import print_json, print_table
    from vitx.serve.bench import bench_bundle, parse_batch_sizes
    from vitx.serve.runtimes import Session, load_session

    sizes = parse_batch_sizes(batch)
    opened = Bundle.open(bundle)
    others: dict[str, Session] = {}
    if run is not None:
        from vitx.core.run import RunFolder
        from vitx.serve.runtimes.torch import load_run_session

        others["torch"] = load_run_session(RunFolder.open(run), device=device, threads=threads)
    session = load_session(opened, device=device, threads=threads)
    latency, measured = bench_bundle(opened, session, others, batch_sizes=sizes, seconds=seconds, quiet=quiet)
    if as_json:
        beside = {name: other.model_dump(mode="json") for name, other in measured.items()}
        print_json({**latency.model_dump(mode="json"), "beside": beside})
        return
    machine = latency.machine
    print_table(
        f"{opened.manifest.name} on {machine['processor']}, {machine['cores']} cores",
        ("runtime", "provider", "threads", "batch", "median ms", "p95 ms", "images/s"),
        [
            (
                each.runtime["runtime"],
                each.runtime["provider"],
                str(each.runtime["threads"]),
                point.batch_size,
                point.median_ms,
                point.p95_ms,
                point.images_per_second,
            )
            for each in (latency, *measured.values())
            for point in each.points
        ],
    )
