"""`vitx export`: a run, or a network with weights, becomes a certified bundle, with engines where asked for."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from vitx.cli.options import Json, Quiet, from_records, require_effect
from vitx.core.console import log_next, print_json, print_result, print_table
from vitx.core.errors import InputError
from vitx.export.options import ExportOptions

_DEFAULTS = ExportOptions()


@from_records("export")
def command(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A run folder, model:NAME or model:timm/NAME.")],
    out: Annotated[Path | None, typer.Option("--out", help="The bundle. Default: RUN.vitx, or NAME.vitx.")] = None,
    weights: Annotated[
        str, typer.Option("--weights", help="Of a model: a checkpoint file, 'pretrained' (timm's) or 'random'.")
    ] = "pretrained",
    model_arg: Annotated[
        list[str] | None,
        typer.Option("--model-arg", metavar="KEY=VALUE", help="Of a model: img_size=384, say; may be repeated."),
    ] = None,
    options: ExportOptions = _DEFAULTS,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Rewrite a network, trace it to ONNX, and prove on real images that it is the same classifier.

    A bundle that fails its parity is not written: exit code 1, with the numbers.
    """
    if model_arg:
        from vitx.models.source import with_arguments

        source = with_arguments(source, model_arg)
    if options.explain:
        if out is not None:
            raise InputError(f"--explain only prints what rewrites remove: leave --out {out} out")
        applied = {"explain", "with_", "without", "checkpoint", *(("data",) if source.startswith("model:") else ())}
        require_effect(options, applied, "with --explain, which only prints what rewrites remove: leave it out")
        _explain(source, weights, options, as_json=as_json)
        return
    from vitx.parity.exported import export_certified

    bundle = export_certified(source, out, options, weights=weights, quiet=quiet)
    print_result(f"bundle {bundle.manifest.name}", bundle.summary(), as_json=as_json)
    if bundle.certificate() is not None:
        log_next("vitx", "parity", "--verify", bundle.path, *["--skip-bad"] * options.skip_bad, quiet=quiet)


def _explain(target: str, weights: str, options: ExportOptions, *, as_json: bool) -> None:
    from vitx.export import explain
    from vitx.export.rewrite.rewrites import select_rewrites
    from vitx.parity.exported import source_request

    rewrites = select_rewrites(options.with_, options.without)
    source = source_request(target, options, weights).load()
    rows = explain(source.model, source.preprocessing, rewrites)
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    print_table(
        f"what each rewrite removes from {source.spec.name}, for one image",
        ("rewrite", "places", "nodes", "parameters", "MFLOPs", "MB written", "identity"),
        [
            (
                row.name,
                row.places,
                row.removed.nodes,
                row.removed.parameters,
                row.removed.flops / 1e6,
                row.removed.activation_bytes / 1e6,
                row.identity,
            )
            for row in rows
        ],
    )
