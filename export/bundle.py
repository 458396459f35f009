"""From a source to a bundle. Each conversion runs in a process of its own; the folder appears whole or not at all."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from vitx.core.bundle import MANIFEST, Bundle, FileEntry, Manifest, Precision, Provenance, TensorSpec, timestamp
from vitx.core.console import log
from vitx.core.errors import InputError
from vitx.core.files import sha256_file, staged_folder, write_json
from vitx.core.machine import installed_versions
from vitx.core.sandbox import MEMORY_GIB, SECONDS, run_limited
from vitx.export.graph import INPUT, OUTPUT, onnx_from_model, opset_of
from vitx.export.rewrite import ALL, ImageClassifier, applied_rewrites
from vitx.export.source import Source, SourceRequest, untrained_norms


@dataclass(frozen=True)
class ExportOptions:
    """What to make of a source. Limits are of each conversion: `seconds`, and `memory_gib` of resident memory."""

    rewrites: Sequence[str] = ALL
    precision: Precision = "fp32"
    seconds: float = SECONDS
    memory_gib: float = MEMORY_GIB


@dataclass(frozen=True)
class Traced:
    """What is known of a graph that was written: rewrites that found something, and the operator set."""

    rewrites: tuple[str, ...]
    opset: int


def export_bundle(
    request: SourceRequest,
    out: Path,
    options: ExportOptions | None = None,
    *,
    accept: Callable[[Bundle, Source], None] = lambda bundle, source: None,
) -> Bundle:
    """Export `request` to the bundle `out`.

    `accept` sees the finished bundle before it is put in place (and certifies it, say); if it raises, `out` stays as
    it was. Raises InputError when `out` exists and is no bundle, ConversionCrashed when a conversion died.
    """
    options = options or ExportOptions()
    check_target(out)
    source = request.load()
    never_trained = untrained_norms(source.model)
    if never_trained:
        log(
            f"warning: {len(never_trained)} BatchNorm layers never saw a batch, the first is '{never_trained[0]}': "
            "their initial statistics are folded as they are"
        )
    with staged_folder(out) as stage:
        limits = {"seconds": options.seconds, "memory_gib": options.memory_gib}
        path = stage / "model.onnx"
        traced = run_limited("tracing", trace_to_file, request, tuple(options.rewrites), path, **limits)
        manifest = _manifest(source, bundle_name(out), traced, stage, ("model.onnx",))
        write_json(stage / MANIFEST, manifest)
        accept(Bundle(stage, manifest), source)
    return Bundle.open(out)


def trace_to_file(request: SourceRequest, rewrites: Sequence[str], path: Path) -> Traced:
    """Load the source, rewrite it and write its graph."""
    source = request.load()
    classifier = ImageClassifier(source.model, source.preprocessing).eval()
    applied = applied_rewrites(classifier, rewrites)
    graph: onnx.ModelProto = onnx_from_model(classifier, source.preprocessing, source.class_names, path)
    return Traced(tuple(name for name, count in applied.items() if count), opset_of(graph))


def _manifest(source: Source, name: str, traced: Traced, stage: Path, files: Sequence[str], **details: Any) -> Manifest:
    size = source.preprocessing.image_size
    return Manifest(
        name=name,
        model=source.spec,
        labels=source.class_names,
        preprocessing=source.preprocessing,
        input=TensorSpec(name=INPUT, dtype="uint8", shape=("N", size, size, 3)),
        output=TensorSpec(name=OUTPUT, dtype="float32", shape=("N", len(source.class_names))),
        precision=details.pop("precision", "fp32"),
        rewrites=traced.rewrites,
        opset=traced.opset,
        data=source.data,
        files={file: FileEntry(sha256=sha256_file(stage / file), size=(stage / file).stat().st_size) for file in files},
        provenance=Provenance(
            source=source.name,
            checkpoint=source.checkpoint,
            checkpoint_sha256=source.checkpoint_sha256,
            recipe=source.recipe,
            versions=installed_versions(),
            created=timestamp(),
        ),
        training_metrics=source.metrics,
        **details,
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
