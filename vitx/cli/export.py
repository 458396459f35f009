"""`vitx export`: a run, or a network with weights, becomes a certified bundle, with engines where asked for."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from vitx.cli.options import Data, DeviceOption, Json, MaxFlipRate, Quiet, Which, batch_sizes

if TYPE_CHECKING:
    from vitx.core.bundle import Bundle
    from vitx.export import SourceRequest


def command(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A run folder, model:NAME or model:timm/NAME.")],
    out: Annotated[Path | None, typer.Option("--out", help="The bundle. Default: RUN.vitx, or NAME.vitx.")] = None,
    weights: Annotated[
        str, typer.Option("--weights", help="Of a model: a checkpoint file, 'pretrained' (timm's) or 'random'.")
    ] = "pretrained",
    precision: Annotated[
        Literal["fp32", "fp16", "bf16", "int8", "fp8"], typer.Option("--precision", help="Written into the graph.")
    ] = "fp32",
    calibration: Annotated[
        str | None, typer.Option("--calibration-data", help="Judges a lower precision. Default: the training images.")
    ] = None,
    target: Annotated[
        Literal["cpu", "tensorrt"] | None,
        typer.Option("--quantize-for", help="What int8 is written for. Default: tensorrt with a plan, else cpu."),
    ] = None,
    without: Annotated[
        list[str] | None, typer.Option("--without", metavar="REWRITE", help="Leave a rewrite out; may be repeated.")
    ] = None,
    with_: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="REWRITE", help="Add a rewrite that is off by default; may be repeated."),
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Only print what each rewrite removes.")] = False,
    trt: Annotated[bool, typer.Option("--trt", help="Build a TensorRT plan for this machine's GPU.")] = False,
    trt_rtx: Annotated[bool, typer.Option("--trt-rtx", help="Build a TensorRT for RTX plan; needs no GPU.")] = False,
    arch: Annotated[str | None, typer.Option("--arch", help="With --trt-rtx: sm86,sm89,sm120.")] = None,
    profiles: Annotated[str, typer.Option("--profiles", help="Batch sizes a plan is made for.")] = "1,8,32,128",
    builder_level: Annotated[int, typer.Option("--builder-level", help="0 (fast to build) to 5 (fast to run).")] = 3,
    timing_cache: Annotated[
        Path | None, typer.Option("--timing-cache", help="With --trt: read if there, and written back.")
    ] = None,
    version_compatible: Annotated[
        bool, typer.Option("--version-compatible", help="Plan loads in newer TensorRT.")
    ] = False,
    hardware_compatible: Annotated[
        bool, typer.Option("--hardware-compatible", help="Plan runs on all since Ampere.")
    ] = False,
    weight_stripped: Annotated[
        bool, typer.Option("--weight-stripped", help="Plan without weights, to be refitted.")
    ] = False,
    plugin: Annotated[
        Literal["flash"] | None,
        typer.Option("--plugin", help="With --trt: Re-Attention through our kernels. Not run on a GPU yet."),
    ] = None,
    openvino: Annotated[bool, typer.Option("--openvino", help="Add OpenVINO IR.")] = False,
    triton: Annotated[
        Path | None, typer.Option("--triton", metavar="DIR", help="Also write a Triton model repository.")
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
    from vitx.core.errors import InputError
    from vitx.export import EngineRequest, ExportOptions, SourceRequest, export_bundle, triton_repository
    from vitx.parity.exported import certify_export, sampling_plan

    rewrites = _rewrites(with_ or (), without or ())
    is_model = source.startswith("model:")
    request = SourceRequest(source, which=checkpoint, weights=weights, data=data if is_model else None)
    if explain:
        _explain(request, rewrites, as_json=as_json)
        return
    if is_model and data is None and not uncertified:
        raise InputError(f"'{source}' brings no images to certify on: give --data, or say --uncertified")
    if arch is not None and not trt_rtx:
        raise InputError(f"--arch {arch} goes with --trt-rtx: --trt builds for this machine's GPU")
    if plugin is not None and not trt:
        raise InputError(f"--plugin {plugin} goes with --trt: TensorRT alone takes it")
    batches = batch_sizes("--profiles", profiles)
    engines: list[EngineRequest] = []
    if trt:
        engines.append(
            EngineRequest(
                "tensorrt",
                batches=batches,
                builder_level=builder_level,
                version_compatible=version_compatible,
                hardware_compatible=hardware_compatible,
                weight_stripped=weight_stripped,
                timing_cache=timing_cache,
                plugin=plugin,
            )
        )
    if trt_rtx:
        names = tuple(name.strip() for name in arch.split(",")) if arch else ()
        engines.append(EngineRequest("tensorrt-rtx", names, batches, builder_level, weight_stripped=weight_stripped))
    _check_precision(precision, calibration, target)
    bundle_path = out or Path(
        f"{source.rpartition('/')[2].removeprefix('model:')}.vitx" if is_model else f"{source}.vitx"
    )

    def accept(bundle: "Bundle") -> None:
        if not uncertified:
            certify_export(bundle, request, data, max_flip_rate=max_flip_rate, device=device, quiet=quiet)

    log(f"export: {source} to {bundle_path}", quiet=quiet)
    options = ExportOptions(
        rewrites=rewrites,
        precision=precision,
        calibration=calibration or data,
        target=target,
        plan=None if uncertified else sampling_plan(request, data, max_flip_rate),
        engines=tuple(engines),
        openvino=openvino,
        seconds=seconds,
        memory_gib=memory_gib,
        quiet=quiet,
    )
    bundle = export_bundle(request, bundle_path, options, accept=accept)
    if triton is not None:
        triton_repository(bundle_path, triton, allow_uncertified=uncertified)
    _print(bundle, as_json=as_json)


def _rewrites(added: Sequence[str], left_out: Sequence[str]) -> tuple[str, ...]:
    """The rewrites to apply: those on by default, with some added and some left out."""
    from vitx.core.errors import InputError, unknown_name
    from vitx.export.rewrite.rewrites import ALL, REWRITES

    for name in (*added, *left_out):
        if name not in REWRITES:
            raise unknown_name("rewrite", name, REWRITES)
    if both := sorted(set(added) & set(left_out)):
        raise InputError(f"--with {both[0]} --without {both[0]}: choose one")
    return tuple(name for name in REWRITES if (name in ALL or name in added) and name not in left_out)


def _check_precision(precision: str, calibration: str | None, target: str | None) -> None:
    """Raise InputError for an option that this precision has no use for."""
    from vitx.core.errors import InputError

    if calibration is not None and precision == "fp32":
        raise InputError(f"--calibration-data {calibration} goes with a --precision below fp32: leave it out")
    if target is not None and precision != "int8":
        raise InputError(f"--quantize-for {target} is of int8, and {precision} has one form: leave it out")


def _explain(request: "SourceRequest", rewrites: tuple[str, ...], *, as_json: bool) -> None:
    from dataclasses import asdict

    from vitx.core.console import print_json, print_table
    from vitx.export import explain

    source = request.load()
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


def _print(bundle: "Bundle", *, as_json: bool) -> None:
    from vitx.core.console import print_fields, print_json

    manifest, certificate = bundle.manifest, bundle.certificate()
    summary: dict[str, object] = {
        "bundle": str(bundle.path),
        "model": manifest.model.name,
        "size_mb": round(sum(entry.size for entry in manifest.files.values()) / 1e6, 2),
        "precision": manifest.precision,
        "islands": len(manifest.islands),
        "opset": manifest.opset,
        "rewrites": ", ".join(manifest.rewrites),
        "files": ", ".join(manifest.files),
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
