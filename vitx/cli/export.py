"""`vitx export`: a run, or a network with weights, becomes a certified bundle."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitx.cli.options import Data, DeviceOption, Json, MaxFlipRate, Quiet, Which

if TYPE_CHECKING:
    from vitx.core.bundle import Bundle
    from vitx.export import Source


def command(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A run folder, model:NAME or model:timm/NAME.")],
    out: Annotated[Path | None, typer.Option("--out", help="The bundle. Default: RUN.vitx, or NAME.vitx.")] = None,
    weights: Annotated[
        str, typer.Option("--weights", help="Of a model: a checkpoint file, 'pretrained' (timm's) or 'random'.")
    ] = "pretrained",
    without: Annotated[
        list[str] | None, typer.Option("--without", metavar="REWRITE", help="Leave a rewrite out; may be repeated.")
    ] = None,
    data: Data = None,
    max_flip_rate: MaxFlipRate = 0.01,
    checkpoint: Which = "best",
    uncertified: Annotated[
        bool, typer.Option("--uncertified", help="Write the bundle without comparing it with the checkpoint.")
    ] = False,
    device: DeviceOption = "auto",
    seconds: Annotated[float, typer.Option("--seconds", min=1, help="Time limit of one conversion.")] = 3600,
    memory_gib: Annotated[float, typer.Option("--memory-gib", min=0.1, help="Memory limit of one conversion.")] = 64,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Rewrite a network, trace it to ONNX, and prove on real images that it is the same classifier.

    A bundle that fails its parity is not written: exit code 1, with the numbers.
    """
    from vitx.core.console import log
    from vitx.core.errors import InputError, unknown_name
    from vitx.export import ALL, ExportOptions, SourceRequest, export_bundle

    for name in without or ():
        if name not in ALL:
            raise unknown_name("rewrite", name, ALL)
    is_model = source.startswith("model:")
    if is_model and data is None and not uncertified:
        raise InputError(f"'{source}' brings no images to certify on: give --data, or say --uncertified")
    request = SourceRequest(source, which=checkpoint, weights=weights, data=data if is_model else None)
    target = out or Path(f"{source.rpartition('/')[2].removeprefix('model:')}.vitx" if is_model else f"{source}.vitx")

    def accept(bundle: "Bundle", loaded: "Source") -> None:
        if not uncertified:
            _certify(bundle, loaded, data, max_flip_rate=max_flip_rate, device=device, quiet=quiet)

    log(f"export: tracing {source} to {target}", quiet=quiet)
    options = ExportOptions(
        rewrites=tuple(name for name in ALL if name not in (without or ())), seconds=seconds, memory_gib=memory_gib
    )
    _print(export_bundle(request, target, options, accept=accept), as_json=as_json)


def _certify(
    bundle: "Bundle", source: "Source", data: str | None, *, max_flip_rate: float, device: str, quiet: bool
) -> None:
    from vitx.core.console import log
    from vitx.core.errors import CheckFailed
    from vitx.core.images import open_images
    from vitx.serve.parity import certify_against
    from vitx.serve.runtimes.torch import TorchSession

    log("export: certifying the graph against the checkpoint", quiet=quiet)
    certificate = certify_against(
        TorchSession(source.model, source.preprocessing, device=device),  # type: ignore[arg-type]  # typer checked it
        source.preprocessing,
        bundle,
        open_images(data or source.data, "val"),
        reference_name=f"{source.name}, checkpoint {source.checkpoint}",
        reference_sha256=source.checkpoint_sha256,
        max_flip_rate=max_flip_rate,
        device=device,
        quiet=quiet,
    )
    if certificate.verdict != "pass":
        reasons = "; ".join(certificate.reasons)
        raise CheckFailed(f"the graph is not the checkpoint's equal, no bundle written: {reasons}")


def _print(bundle: "Bundle", *, as_json: bool) -> None:
    from vitx.core.console import print_fields, print_json

    manifest, certificate = bundle.manifest, bundle.certificate()
    summary: dict[str, object] = {
        "bundle": str(bundle.path),
        "model": manifest.model.name,
        "size_mb": round(sum(entry.size for entry in manifest.files.values()) / 1e6, 2),
        "precision": manifest.precision,
        "opset": manifest.opset,
        "rewrites": ", ".join(manifest.rewrites),
        "verdict": certificate.verdict if certificate else "not certified",
    }
    if certificate:
        summary |= {
            "images": certificate.images,
            "flips": len(certificate.flips),
            "flip_rate_bound": certificate.flip_rate_bound,
            "max_logit_error": certificate.max_logit_error,
        }
    if as_json:
        print_json(summary)
    else:
        print_fields(f"bundle {manifest.name}", summary)
