"""`vitx export`: a run becomes a certified bundle."""

from pathlib import Path
from typing import Annotated

import typer

from vitx.cli.options import Data, DeviceOption, Json, MaxFlipRate, Quiet, RunArgument, Which


def command(
    run: RunArgument,
    out: Annotated[Path | None, typer.Option("--out", help="The bundle. Default: RUN.vitx.")] = None,
    without: Annotated[
        list[str] | None,
        typer.Option("--without", help="Leave a rewrite out (repeatable)."),
    ] = None,
    data: Data = None,
    max_flip_rate: MaxFlipRate = 0.01,
    checkpoint: Which = "best",
    device: DeviceOption = "auto",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Rewrite a run's checkpoint, trace it to ONNX, and prove on real images that it is the same classifier.

    A bundle that fails its parity is not written: exit code 1, with the numbers.
    """
    from vitx.core.bundle import Bundle
    from vitx.core.console import log, print_fields, print_json
    from vitx.core.errors import CheckFailed, unknown_name
    from vitx.core.run import RunFolder
    from vitx.export import ALL, bundle_from_run
    from vitx.serve.parity import certify_bundle

    source = RunFolder.open(run)
    for name in without or ():
        if name not in ALL:
            raise unknown_name("rewrite", name, ALL)

    def accept(bundle: Bundle) -> None:
        log("export: certifying the graph against the checkpoint", quiet=quiet)
        certificate = certify_bundle(
            source, bundle, data=data, max_flip_rate=max_flip_rate, which=checkpoint, device=device, quiet=quiet
        )
        if certificate.verdict != "pass":
            raise CheckFailed(
                f"the graph is not the checkpoint's equal, no bundle written: {'; '.join(certificate.reasons)}"
            )

    target = out or Path(f"{source.path}.vitx")
    log(f"export: tracing {source.path} to {target}", quiet=quiet)
    bundle = bundle_from_run(
        source, target, which=checkpoint, rewrites=[name for name in ALL if name not in (without or ())], accept=accept
    )
    certificate = bundle.require_certificate()
    summary = {
        "bundle": str(bundle.path),
        "model": bundle.manifest.model.name,
        "size_mb": round(sum(entry.size for entry in bundle.manifest.files.values()) / 1e6, 2),
        "precision": bundle.manifest.precision,
        "opset": bundle.manifest.opset,
        "rewrites": ", ".join(bundle.manifest.rewrites),
        "verdict": certificate.verdict,
        "images": certificate.images,
        "flips": len(certificate.flips),
        "flip_rate_bound": certificate.flip_rate_bound,
        "max_logit_error": certificate.max_logit_error,
    }
    if as_json:
        print_json(summary)
    else:
        print_fields(f"bundle {bundle.manifest.name}", summary)
