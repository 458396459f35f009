"""`vitx bench`: how fast a bundle is on this machine, and what binds it."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from vitx.bench.options import BenchOptions
from vitx.cli.options import BundleArgument, Json, Quiet, from_records, require_effect
from vitx.core.console import counted, print_json, print_table

if TYPE_CHECKING:
    from vitx.bench.request import BenchRequest, LoadTestReport
    from vitx.core.latency import Latency


_DEFAULTS = BenchOptions()


@from_records("bench")
def command(
    bundle: BundleArgument, options: BenchOptions = _DEFAULTS, as_json: Json = False, quiet: Quiet = False
) -> None:
    """Measure latency and throughput by batch size, name the limit, and write latency.json into the bundle.

    One caller, the next batch when the last is back. --rate, --scenario and --tune measure that instead.
    """
    from vitx.bench.request import BenchRequest
    from vitx.core.bundle import Bundle

    request = BenchRequest(Bundle.open(bundle), options.run, options.runtime, options.device, options.threads)
    always = {"run", "runtime", "device"}
    if options.tune:
        require_effect(options, {*always, "tune"}, "on --tune: leave it out")
        _tune(request, as_json=as_json, quiet=quiet)
    elif options.rate is None and options.scenario is None:
        sweep = {*always, "batch", "seconds", "image", "plot", "threads"}
        require_effect(options, sweep, "without --rate or --scenario: leave it out, or give one of them")
        _sweep(request, options, as_json=as_json, quiet=quiet)
    else:
        load = {*always, "batch", "seconds", "rate", "scenario", "p99", "instances", "threads"}
        require_effect(options, load, "on --rate and --scenario: leave it out")
        _load_test(request, options, as_json=as_json)


def _sweep(request: "BenchRequest", options: BenchOptions, *, as_json: bool, quiet: bool) -> None:
    from vitx.bench import bench_bundle
    from vitx.bench.plot import check_plot, save_plot

    if options.plot:
        check_plot(options.plot)
    image = request.read_image(options.image) if options.image else None
    bundle, sizes, seconds = request.bundle, options.batch, options.seconds
    with request.sessions() as sessions:
        loaders = request.loaders()
        measured = bench_bundle(bundle, sessions, loaders, batch_sizes=sizes, seconds=seconds, image=image, quiet=quiet)
    if options.plot:
        save_plot(f"{bundle.manifest.name} on {request.machine}", measured, options.plot)
    (_, own), *others = measured.items()
    if as_json:
        beside = {name: other.model_dump(mode="json") for name, other in others}
        print_json({**own.model_dump(mode="json"), "beside": beside})
        return
    _print_points(f"{bundle.manifest.name} on {request.machine}", measured)


def _print_points(title: str, measured: Mapping[str, "Latency"]) -> None:
    columns = ("runtime", "threads", "batch", "median ms", "p95 ms", "p99 ms", "images/s", "compute", "memory", "limit")
    rows = [
        (
            name,
            str(latency.runtime["threads"]),
            point.batch_size,
            point.median_ms,
            point.p95_ms,
            "–" if point.p99_ms is None else point.p99_ms,
            point.images_per_second,
            _percent(point.compute_share),
            _percent(point.memory_share),
            point.limit or "–",
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
                f"{roof.bytes_per_second / 1e9:.3g} GB/s, {counted(roof.threads, 'thread')}{call}"
            )


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"


def _tune(request: "BenchRequest", *, as_json: bool, quiet: bool) -> None:
    tuning = request.tune(quiet=quiet)
    if as_json:
        print_json(tuning.model_dump(mode="json"))
        return
    best = tuning.best
    print_table(
        f"{request.bundle.manifest.name} on {request.machine}",
        ("instances", "threads", "batch", "images/s", "median ms", ""),
        [(*one.model_dump().values(), "best" if one == best else "") for one in tuning.tried],
    )


def _load_test(request: "BenchRequest", options: BenchOptions, *, as_json: bool) -> None:
    from vitx.bench.request import parse_rates
    from vitx.bench.scenarios import parse_scenarios

    scenarios = () if options.scenario is None else parse_scenarios(options.scenario)
    if "server" not in scenarios:
        require_effect(options, type(options).model_fields.keys() - {"p99"}, "without --scenario server: leave it out")
    show = partial(_print_load_test, request, as_json=as_json)
    report = request.load_test(
        rates=() if options.rate is None else parse_rates(options.rate),
        scenarios=scenarios,
        max_batch=max(options.batch),
        instances=options.instances,
        seconds=options.seconds,
        p99=options.p99 / 1000,
        on_failure=show,
    )
    show(report)


def _print_load_test(request: "BenchRequest", report: "LoadTestReport", *, as_json: bool) -> None:
    if as_json:
        print_json(report.model_dump(mode="json"))
        return
    threads = report.runtime.get("side_by_side", report.runtime)["threads"]
    each = counted(threads, "thread") if isinstance(threads, int) else threads
    title = f"{request.bundle.manifest.name} on {request.machine}: {report.instances} × {each}"
    percentiles = ("p50 ms", "p90 ms", "p95 ms", "p99 ms")
    for columns, results in (
        (("images/s asked", "answered/s", "refused", *percentiles, "late ms"), report.open_loop),
        (("scenario", "result", "unit", "images", *percentiles, "p99 bound ms"), report.scenarios),
    ):
        if results:
            rows = [["–" if cell is None else cell for cell in one.model_dump().values()] for one in results]
            print_table(title, columns, rows)
