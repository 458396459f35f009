"""From a run folder to a bundle."""

import copy
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from vitx.core.bundle import MANIFEST, Bundle, FileEntry, Manifest, Provenance, TensorSpec, timestamp
from vitx.core.errors import InputError
from vitx.core.files import sha256_file, staged_folder, write_json
from vitx.core.machine import installed_versions
from vitx.core.run import Checkpoint, RunFolder
from vitx.export.graph import INPUT, OUTPUT, onnx_from_model, opset_of
from vitx.export.rewrite import ALL, ImageClassifier, applied_rewrites
from vitx.models import load_run_model


def bundle_from_run(
    run: RunFolder,
    out: Path,
    *,
    which: Checkpoint = "best",
    rewrites: Sequence[str] = ALL,
    accept: Callable[[Bundle], None] = lambda bundle: None,
) -> Bundle:
    """Export a run's checkpoint to the bundle `out`.

    `accept` sees the finished bundle before it is put in place (and certifies it, say); if it raises, `out` stays as
    it was. Raises InputError when `out` exists and is no bundle.
    """
    _check_target(out)
    model, state = load_run_model(run, which)
    info = run.info
    classifier = ImageClassifier(copy.deepcopy(model), info.preprocessing).eval()
    applied = [name for name, count in applied_rewrites(classifier, rewrites).items() if count]
    size = info.preprocessing.image_size
    with staged_folder(out) as stage:
        path = stage / "model.onnx"
        graph = onnx_from_model(classifier, info.preprocessing, info.class_names, path)
        weights = "ema.safetensors" if "ema.safetensors" in state.sha256 else "model.safetensors"
        manifest = Manifest(
            name=bundle_name(out),
            model=info.model,
            labels=info.class_names,
            preprocessing=info.preprocessing,
            input=TensorSpec(name=INPUT, dtype="uint8", shape=("N", size, size, 3)),
            output=TensorSpec(name=OUTPUT, dtype="float32", shape=("N", len(info.class_names))),
            precision="fp32",
            rewrites=tuple(applied),
            opset=opset_of(graph),
            data=info.data,
            files={"model.onnx": FileEntry(sha256=sha256_file(path), size=path.stat().st_size)},
            provenance=Provenance(
                source=str(run.path),
                checkpoint=which,
                checkpoint_sha256=state.sha256[weights],
                recipe=info.recipe,
                versions=installed_versions(),
                created=timestamp(),
            ),
            training_metrics=state.metrics,
        )
        write_json(stage / MANIFEST, manifest)
        accept(Bundle(stage, manifest))
    return Bundle.open(out)


def bundle_name(out: Path) -> str:
    """The model's name on a server: the folder's name without `.vitx`; raise InputError if it cannot be a name."""
    name = out.name.removesuffix(".vitx")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise InputError(f"'{out.name}' cannot be a bundle's name: use letters, digits, '.', '_' and '-'")
    return name


def _check_target(out: Path) -> None:
    bundle_name(out)
    if out.exists() and not (out / MANIFEST).is_file() and not (out.is_dir() and not any(out.iterdir())):
        raise InputError(f"'{out}' exists and is no bundle: choose another --out")
