"""From a source to a bundle. Each conversion runs in a process of its own; the folder appears whole or not at all."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from vitx.core.bundle import MANIFEST, Bundle, FileEntry, Manifest, Precision, Provenance, TensorSpec, timestamp
from vitx.core.console import log
from vitx.core.errors import InputError
from vitx.core.files import sha256_file, staged_folder, write_json
from vitx.core.machine import installed_versions
from vitx.core.sandbox import MEMORY_GIB, SECONDS, run_limited
from vitx.export.engines.openvino import IR_FOLDER, openvino_from_onnx
from vitx.export.engines.targets import (
    EngineRequest,
    LoweredFile,
    PrecisionRequest,
    build_engine,
    convert_limited,
    lower_file,
)
from vitx.export.graph.from_model import INPUT, OUTPUT, onnx_from_model, opset_for, opset_of
from vitx.export.precision.acceptance import SamplingPlan
from vitx.export.precision.qdq import Target
from vitx.export.rewrite.rewrites import ALL, ImageClassifier, rewrite_checked
from vitx.models.source import PREFIX, Source, SourceInfo, SourceRequest, untrained_norms

GRAPH = "model.onnx"


@dataclass(frozen=True)
class ExportOptions:
    """What to make of a source.

    calibration: the image set whose training split judges a lower precision; default: the source's own.
    target: what int8 is written for; default: "tensorrt" where engines are built, else "cpu".
    plan: the certificate that a lower precision will have to pass.
    Limits are of each conversion: `seconds`, and `memory_gib` of resident memory.
    """

    rewrites: Sequence[str] = ALL
    precision: Precision = "fp32"
    calibration: str | None = None
    target: Target | None = None
    plan: SamplingPlan | None = None
    engines: tuple[EngineRequest, ...] = ()
    openvino: bool = False
    seconds: float = SECONDS
    memory_gib: float = MEMORY_GIB
    quiet: bool = False

    def calibration_data(self, source_data: str) -> str:
        """The set that judges a lower precision; raise InputError when there is none."""
        data = self.calibration or source_data
        if not data:
            raise InputError(f"{self.precision} is judged on real images: give --data or --calibration-data")
        return data


@dataclass(frozen=True)
class Traced:
    """What is known of a graph that was written: its source, rewrites that found something, and the operator set.

    untrained: the BatchNorm layers that never saw a batch.
    """

    source: SourceInfo
    untrained: tuple[str, ...]
    rewrites: tuple[str, ...]
    opset: int


def export_bundle(
    request: SourceRequest,
    out: Path,
    options: ExportOptions | None = None,
    *,
    accept: Callable[[Bundle], None] = lambda bundle: None,
) -> Bundle:
    """Export `request` to the bundle `out`.

    `accept` sees the finished bundle before it is put in place (and certifies it, say); if it raises, `out` stays as
    it was. Raises InputError when `out` exists and is no bundle, or when a lower precision has no images to be judged
    on; ConversionCrashed when a conversion died (a compiler's crash leaves OUT.failed/ behind); CheckFailed when no
    graph of the precision agrees with the network.
    """
    options = options or ExportOptions()
    check_target(out)
    request.require_known()
    for engine in options.engines:
        engine.check()
    if options.precision != "fp32" and request.target.startswith(PREFIX):
        options.calibration_data(request.data or "")
    with staged_folder(out) as stage:
        graph = stage / GRAPH
        traced = run_limited(
            *("tracing", trace_to_file, request, tuple(options.rewrites), graph, opset_for(options.precision)),
            seconds=options.seconds,
            memory_gib=options.memory_gib,
        )
        _warn_untrained(traced)
        lowered = _lower(graph, traced.source, options)
        _build_targets(graph, out, options)
        manifest = _manifest(bundle_name(out), traced, options.precision, lowered, stage)
        write_json(stage / MANIFEST, manifest)
        accept(Bundle(stage, manifest))
    return Bundle.open(out)


def trace_to_file(request: SourceRequest, rewrites: Sequence[str], path: Path, opset: int) -> Traced:
    """Load the source, rewrite it and write its graph. Only this process holds the network's weights."""
    source = request.load()
    untrained = tuple(untrained_norms(source.model))
    classifier = _classifier(source)
    applied = rewrite_checked(
        classifier, rewrites, source.preprocessing.image_size, rebuild=lambda: _classifier(request.load())
    )
    graph: onnx.ModelProto = onnx_from_model(classifier, source.preprocessing, source.class_names, path, opset=opset)
    found = tuple(name for name, count in applied.items() if count)
    return Traced(source.info(), untrained, found, opset_of(graph))


def _classifier(source: Source) -> ImageClassifier:
    return ImageClassifier(source.model, source.preprocessing).eval()


def _lower(graph: Path, source: SourceInfo, options: ExportOptions) -> LoweredFile:
    if options.precision == "fp32":
        return LoweredFile((), {})
    target = options.target or ("tensorrt" if options.engines else "cpu")
    data = options.calibration_data(source.data)
    request = PrecisionRequest(options.precision, data, target, options.plan, options.quiet)
    return run_limited(
        *(f"lowering to {options.precision}", lower_file, graph, request, source.preprocessing),
        seconds=options.seconds,
        memory_gib=options.memory_gib,
    )


def _build_targets(graph: Path, out: Path, options: ExportOptions) -> None:
    limits = {"seconds": options.seconds, "memory_gib": options.memory_gib}
    failed = out.with_name(f"{out.name}.failed")
    for engine in options.engines:
        plan = graph.parent / "engines" / f"{engine.flavor}.plan"
        plan.parent.mkdir(exist_ok=True)
        convert_limited(engine.flavor, build_engine, graph, plan, engine, options.quiet, failed=failed, **limits)
    if options.openvino:
        convert_limited("openvino", openvino_from_onnx, graph, graph.parent / IR_FOLDER, failed=failed, **limits)


def _manifest(name: str, traced: Traced, precision: Precision, lowered: LoweredFile, stage: Path) -> Manifest:
    source = traced.source
    size = source.preprocessing.image_size
    files = sorted(path for path in stage.rglob("*") if path.is_file())
    return Manifest(
        name=name,
        model=source.spec,
        labels=source.class_names,
        preprocessing=source.preprocessing,
        input=TensorSpec(name=INPUT, dtype="uint8", shape=("N", size, size, 3)),
        output=TensorSpec(name=OUTPUT, dtype="float32", shape=("N", len(source.class_names))),
        precision=precision,
        islands=lowered.islands,
        lowering=lowered.details,
        rewrites=traced.rewrites,
        opset=traced.opset,
        data=source.data,
        files={
            path.relative_to(stage).as_posix(): FileEntry(sha256=sha256_file(path), size=path.stat().st_size)
            for path in files
        },
        provenance=Provenance(
            source=source.name,
            checkpoint=source.checkpoint,
            checkpoint_sha256=source.checkpoint_sha256,
            recipe=source.recipe,
            versions=installed_versions(),
            created=timestamp(),
        ),
        training_metrics=source.metrics,
    )


def _warn_untrained(traced: Traced) -> None:
    if traced.untrained:
        log(
            f"warning: {len(traced.untrained)} BatchNorm layers never saw a batch, the first is "
            f"'{traced.untrained[0]}': "
            "their initial statistics are folded as they are"
        )


def bundle_name(out: Path) -> str:
    """The model's name on a server: the folder's name without `.vitx`; raise InputError if it cannot be a name."""
    name = out.name.removesuffix(".vitx")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise InputError(f"'{out.name}' cannot be a bundle's name: use letters, digits, '.', '_' and '-'")
    return name


def check_target(out: Path) -> None:
    """Raise InputError when `out` cannot become a bundle: its name, or what is there already."""
    bundle_name(out)
    if out.exists() and not (out / MANIFEST).is_file() and not (out.is_dir() and not any(out.iterdir())):
        raise InputError(f"'{out}' exists and is no bundle: choose another --out")
