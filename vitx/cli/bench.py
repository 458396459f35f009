"""`vitx bench`: how fast a bundle is on this machine, and what binds it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitx.cli.options import BundleArgument, DeviceOption, Json, Quiet, Threads, batch_sizes

if TYPE_CHECKING:
    from vitx.bench.requests import Choices
    from vitx.core.latency import Latency


def command(
    bundle: BundleArgument,
    run: Annotated[
        Path | None, typer.Option("--run", help="Measure this run's checkpoint in torch too, in the same minutes.")
    ] = None,
    runtime: Annotated[
        str, typer.Option("--runtime", help="Runtimes with commas between, measured in turns.")
    ] = "onnxruntime",
    batch: Annotated[str, typer.Option("--batch", help="Batch sizes.")] = "1,8,32",
    seconds: Annotated[float, typer.Option("--seconds", help="Measured time of each batch size, rate or trial.")] = 2.0,
    image: Annotated[
        Path | None, typer.Option("--image", help="Start every call from the bytes of this image file.")
    ] = None,
    rate: Annotated[
        str | None, typer.Option("--rate", help="Open loop: Poisson arrivals at these rates, images a second.")
    ] = None,
    scenario: Annotated[
        str | None, typer.Option("--scenario", help="offline, server, single-stream, with commas between.")
    ] = None,
    p99: Annotated[float, typer.Option("--p99", help="Bound of the server scenario in milliseconds.")] = 100.0,
    tune: Annotated[
        bool, typer.Option("--tune", help="Find the instances, threads and batch for this machine's processor.")
    ] = False,
    instances: Annotated[
        int | None, typer.Option("--instances", min=1, help="Batches at the same time, with --rate and --scenario.")
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Throughput against latency, to a .png or .svg.")] = None,
    threads: Threads = None,
    device: DeviceOption = "auto",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure latency and throughput by batch size, name the limit, and write latency.json into the bundle.

    One caller, the next batch when the last is back. --rate, --scenario and --tune measure that instead.
    """
    from vitx.bench.requests import Choices
    from vitx.core.bundle import Bundle
    from vitx.core.errors import InputError

    sizes = batch_sizes("--batch", batch)
    choices = Choices(Bundle.open(bundle), run, runtime, device, threads)
    if tune or rate or scenario:
        if plot or image or (tune and (rate or scenario or threads or instances)):
            raise InputError("--plot and --image go with the batch sweep; --tune goes with --runtime and --json alone")
        if tune:
            _tune(choices, as_json=as_json, quiet=quiet)
        else:
            _load(choices, rate, scenario, sizes[-1], instances, seconds, p99 / 1000, as_json=as_json)
        return
    _sweep(choices, sizes, seconds, image, plot, as_json=as_json, quiet=quiet)


def _sweep(
    choices: "Choices",
    sizes: Sequence[int],
    seconds: float,
    image: Path | None,
    plot: Path | None,
    *,
    as_json: bool,
    quiet: bool,
) -> None:
    from vitx.bench import bench_bundle
    from vitx.bench.plot import check_plot, save_plot
    from vitx.core.console import print_json

    if plot:
        check_plot(plot)
    data = choices.read_image(image) if image else None
    sessions, bundle = choices.sessions(), choices.bundle
    loaders = choices.loaders()
    measured = bench_bundle(bundle, sessions, loaders, batch_sizes=sizes, seconds=seconds, image=data, quiet=quiet)
    if plot:
        save_plot(f"{bundle.manifest.name} on {choices.machine}", measured, plot)
    (_, own), *others = measured.items()
    if as_json:
        beside = {name: other.model_dump(mode="json") for name, other in others}
        print_json({**own.model_dump(mode="json"), "beside": beside})
        return
    _print_points(f"{bundle.manifest.name} on {choices.machine}", measured)


def _print_points(title: str, measured: Mapping[str, "Latency"]) -> None:
    from vitx.core.console import print_table

    columns = ("runtime", "threads", "batch", "median ms", "p95 ms", "p99 ms", "images/s", "compute", "memory", "limit")
    rows = [
        (
            name,
            str(latency.runtime["threads"]),
            point.batch_size,
            point.median_ms,
            point.p95_ms,
            point.p99_ms,
            point.images_per_second,
            f"{100 * (point.compute_share or 0):.0f} %",
            f"{100 * (point.memory_share or 0):.0f} %",
            point.limit,
        )
        for name, latency in measured.items()
        for point in latency.points
    ]
    print_table(title, columns, rows)
    for name, latency in measured.items():
        if roof := latency.roof:
            call = "" if roof.call_ms is None else f", an empty call {roof.call_ms:.3g} ms"
            print(
                f"100 % for {name} ({latency.runtime['provider']}): "
                f"{roof.flops_per_second / 1e9:.4g} GFLOP/s ({roof.dtype}), "
                f"{roof.bytes_per_second / 1e9:.3g} GB/s, {roof.threads} threads{call}"
            )


def _tune(choices: "Choices", *, as_json: bool, quiet: bool) -> None:
    from vitx.core.console import print_json, print_table

    tuning = choices.tune(quiet=quiet)
    if as_json:
        print_json(tuning.model_dump(mode="json"))
        return
    best = tuning.best
    print_table(
        f"{choices.bundle.manifest.name} on {choices.machine}",
        ("instances", "threads", "batch", "images/s", "median ms", ""),
        [(*one.model_dump().values(), "best" if one == best else "") for one in tuning.tried],
    )


def _load(
    choices: "Choices",
    rates: str | None,
    scenarios: str | None,
    max_batch: int,
    instances: int | None,
    seconds: float,
    p99: float,
    *,
    as_json: bool,
) -> None:
    from vitx.bench.requests import parse_rates
    from vitx.bench.scenarios import parse_scenarios
    from vitx.core.console import print_json, print_table

    report = choices.load_test(
        rates=parse_rates(rates) if rates else (),
        scenarios=parse_scenarios(scenarios) if scenarios else (),
        max_batch=max_batch,
        instances=instances,
        seconds=seconds,
        p99=p99,
    )
    if as_json:
        print_json(report.model_dump(mode="json"))
        return
    title = (
        f"{choices.bundle.manifest.name} on {choices.machine}: {report.instances} × {report.runtime['threads']} threads"
    )
    percentiles = ("p50 ms", "p90 ms", "p95 ms", "p99 ms")
    for columns, results in (
        (("images/s asked", "answered/s", "refused", *percentiles, "late ms"), report.open_loop),
        (("scenario", "result", "unit", "images", *percentiles, "p99 bound ms"), report.scenarios),
    ):
        if results:
            rows = [["–" if cell is None else cell for cell in one.model_dump().values()] for one in results]
            print_table(title, columns, rows)
