"""From a checkpoint to a bundle. Each conversion runs in a process of its own; the bundle appears whole or never."""

import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from vitx.core.bundle import (
    INT8_MODEL,
    MANIFEST,
    MODEL,
    Bundle,
    FileEntry,
    Manifest,
    OutputSpec,
    Precision,
    Provenance,
    TensorSpec,
    read_manifest,
    timestamp,
)
from vitx.core.console import counted, log
from vitx.core.errors import InputError, VitxError
from vitx.core.files import sha256_file, staged_folder, write_json
from vitx.core.machine import installed_versions
from vitx.core.sandbox import run_limited
from vitx.core.tensorrt_plan import ENGINES_FOLDER, Flavor
from vitx.export.engines.openvino_ir import IR_FOLDER, openvino_from_onnx
from vitx.export.engines.targets import (
    EngineRequest,
    LoweredFile,
    PrecisionRequest,
    build_engine,
    convert_limited,
    lower_file,
)
from vitx.export.graph.dataflow import opset_of
from vitx.export.graph.from_model import INPUT, OUTPUT, onnx_from_model, opset_for
from vitx.export.options import ExportOptions, Target
from vitx.export.outputs import plan_outputs, write_outputs
from vitx.export.precision.acceptance import SamplingPlan
from vitx.export.precision.lower import LowerPrecision
from vitx.export.rewrite.rewrites import ImageClassifier, rewrite_checked, select_rewrites
from vitx.models.source import Source, SourceInfo, SourceRequest, untrained_norms

# For the int8 graph that --for cpu tries: the search is long where much of a network must stay in float32.
CANDIDATE_SECONDS = 600.0


@dataclass(frozen=True)
class Traced:
    """What the tracing process reports of the graph it wrote: only this crosses the process boundary, no weights.

    untrained: the BatchNorm layers that never saw a batch. rewrites: the names of those that changed something.
    outputs: what it wrote files of, beside the graph.
    """

    source: SourceInfo
    untrained: tuple[str, ...]
    rewrites: tuple[str, ...]
    opset: int
    outputs: tuple[OutputSpec, ...] = ()


def export_bundle(
    request: SourceRequest,
    out: Path,
    options: ExportOptions | None = None,
    *,
    plan: SamplingPlan | None = None,
    quiet: bool = False,
    accept: Callable[[Bundle], None] = lambda bundle: None,
) -> Bundle:
    """Export `request` to the bundle `out`.

    plan: the certificate that a lower precision will have to pass. `accept` sees the finished bundle before it is put
    in place (and certifies it, say); if it raises, `out` stays as it was. Raises InputError when `out` exists and is no
    bundle, or when a lower precision has no images to be judged on; ConversionCrashed when a conversion died (a
    compiler's crash leaves OUT.failed/ behind); CheckFailed when no graph of the precision agrees with the network.
    """
    options = options or ExportOptions()
    check_output(out)
    request.require_known()
    rewrites = select_rewrites(options.with_, options.without)
    engines = _engines(options)
    for engine in engines:
        engine.check(options.precision, options.base_type())
    if options.precision != "fp32" and request.is_model:
        _calibration_data(options, request.data or "", options.precision)
    with staged_folder(out) as stage:
        graph = stage / MODEL
        traced = run_limited(
            *("tracing", trace_to_file, request, rewrites, graph, _opset(options), options.outputs),
            seconds=options.seconds,
            memory_gib=options.memory_gib,
        )
        _check_trained(traced, certified=plan is not None)
        lowered, target = LoweredFile((), {}), options.quantize_for()
        if options.precision != "fp32":
            lowered = _lower(graph, traced.source, options, options.precision, target, plan, quiet=quiet)
        if options.for_ == "cpu":
            lowered = _with_int8_candidate(graph, lowered, traced.source, options, plan, quiet=quiet)
        _build_targets(graph, out, options, engines, quiet=quiet)
        manifest = _manifest(bundle_name(out), traced, options, lowered, stage)
        write_json(stage / MANIFEST, manifest)
        accept(Bundle(stage, manifest))
        check_output(out)  # once more: what another program wrote there since would be removed
    return Bundle.open(out)


def trace_to_file(
    request: SourceRequest, rewrites: Sequence[str], path: Path, opset: int, outputs: Sequence[str] = ()
) -> Traced:
    """Load the source, rewrite it and write its graph to `path`, and files of `outputs` beside it.

    Only this process holds the network's weights.
    """
    source = request.load()
    untrained = tuple(untrained_norms(source.model))
    classifier = _classifier(source)
    planned = plan_outputs(classifier, outputs, source.preprocessing.image_size)
    applied = rewrite_checked(
        classifier, rewrites, source.preprocessing.image_size, rebuild=lambda: _classifier(request.load())
    )
    graph: onnx.ModelProto = onnx_from_model(classifier, source.preprocessing, source.class_names, path, opset=opset)
    found = tuple(name for name, count in applied.items() if count)
    specs = write_outputs(planned, classifier.model, graph, path.parent)
    return Traced(source.info(), untrained, found, opset_of(graph), specs)


def _classifier(source: Source) -> ImageClassifier:
    return ImageClassifier(source.model, source.preprocessing).eval()


def _engines(options: ExportOptions) -> tuple[EngineRequest, ...]:
    flavors: list[tuple[Flavor, bool, tuple[str, ...]]] = [
        ("tensorrt", options.trt, ()),
        ("tensorrt-rtx", options.trt_rtx, options.arch),
    ]
    return tuple(EngineRequest(flavor, options.engine, targets) for flavor, wanted, targets in flavors if wanted)


def _calibration_data(options: ExportOptions, source_data: str, precision: Precision) -> str:
    """The set that judges a lower precision; raise InputError when there is none."""
    data = options.calibration or options.data or source_data
    if not data:
        raise InputError(f"{precision} is judged on real images: give --data or --calibration-data")
    return data


def _lower(
    graph: Path,
    source: SourceInfo,
    options: ExportOptions,
    precision: LowerPrecision,
    target: Target,
    plan: SamplingPlan | None,
    *,
    quiet: bool,
) -> LoweredFile:
    request = PrecisionRequest(
        precision=precision,
        data=_calibration_data(options, source.data, precision),
        target=target,
        base=options.base_type(),
        sampling_plan=plan,
        quiet=quiet,
        skip_bad=options.skip_bad,
    )
    return run_limited(
        *(f"lowering to {precision}", lower_file, graph, request, source.preprocessing),
        seconds=options.seconds,
        memory_gib=options.memory_gib,
    )


def _with_int8_candidate(
    graph: Path,
    lowered: LoweredFile,
    source: SourceInfo,
    options: ExportOptions,
    plan: SamplingPlan | None,
    *,
    quiet: bool,
) -> LoweredFile:
    """Write an int8 graph beside the float32 one, if there can be one: a candidate is no reason to fail an export.

    The manifest's `lowering` says how it was found, or why there is none.
    """
    candidate = graph.parent / INT8_MODEL
    try:
        if options.precision != "fp32" or options.witness == 0:
            why = f"the graph is {options.precision}" if options.witness != 0 else "no witness set would judge it"
            raise InputError(f"{why}: it is made beside a float32 graph that has a witness set")
        candidate.parent.mkdir()
        shutil.copyfile(graph, candidate)
        limited = options.model_copy(update={"seconds": min(options.seconds, CANDIDATE_SECONDS)})
        found = _lower(candidate, source, limited, "int8", "cpu", plan, quiet=quiet).details
    except VitxError as reason:
        shutil.rmtree(candidate.parent, ignore_errors=True)
        log(f"export: no int8 candidate: {reason}", quiet=quiet)
        found = {"left_out": str(reason)}
    return LoweredFile(lowered.islands, {**lowered.details, "int8_candidate": found})


def _build_targets(
    graph: Path, out: Path, options: ExportOptions, engines: Sequence[EngineRequest], *, quiet: bool
) -> None:
    limits = {"seconds": options.seconds, "memory_gib": options.memory_gib}
    failed = out.with_name(f"{out.name}.failed")
    for engine in engines:
        plan = graph.parent / ENGINES_FOLDER / f"{engine.flavor}.plan"
        plan.parent.mkdir(exist_ok=True)
        convert_limited(engine.flavor, build_engine, graph, plan, engine, quiet, failed=failed, **limits)
    if options.openvino or options.for_ == "cpu":
        convert_limited("openvino", openvino_from_onnx, graph, graph.parent / IR_FOLDER, failed=failed, **limits)


def _opset(options: ExportOptions) -> int:
    return max(map(opset_for, (options.precision, options.base_type())))


def _manifest(name: str, traced: Traced, options: ExportOptions, lowered: LoweredFile, stage: Path) -> Manifest:
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
        outputs=traced.outputs,
        precision=options.precision,
        base=options.base_type(),
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


def _check_trained(traced: Traced, *, certified: bool) -> None:
    """Warn of layers that were never trained; raise InputError where a random classifier would get a certificate."""
    if lacks := traced.source.lacks:
        if certified:
            raise InputError(f"{lacks}; train it first, or say --uncertified if only its features are wanted")
        log(f"warning: {lacks}")
    if traced.untrained:
        log(
            f"warning: {counted(len(traced.untrained), 'BatchNorm layer')} never saw a batch, the first is "
            f"'{traced.untrained[0]}': their initial statistics are folded as they are"
        )


def bundle_name(out: Path) -> str:
    """The model's name on a server: the folder's name without `.vitx`; raise InputError for a name unfit for a URL."""
    name = out.name.removesuffix(".vitx")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise InputError(f"'{out.name}' cannot be a bundle's name: use letters, digits, '.', '_' and '-'")
    if name == "stats":
        raise InputError(
            "no server could offer a model of the name 'stats': /v2/models/stats are the statistics of all"
        )
    return name


def check_output(out: Path) -> None:
    """Raise InputError when `out` is no name for a bundle, or holds something else than one: all of it is replaced."""
    bundle_name(out)
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    try:
        read_manifest(out)
    except InputError as reason:
        raise InputError(f"'{out}' exists and is no bundle: choose another --out ({reason})") from None
