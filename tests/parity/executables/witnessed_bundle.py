"""A bundle with model.onnx, OpenVINO IR and a witness set, certified as `vitx export --openvino` does it."""

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import openvino

from bundle_fixture import BIAS, LABELS, PREPROCESSING, WEIGHT, Fault, NumpySession, colour_images, tiny_graph
from vitx.core.bundle import CERTIFICATE, LATENCY, MANIFEST, Bundle, FileEntry, Manifest
from vitx.core.certificate import Certificate
from vitx.core.files import read_record, sha256_file, write_json
from vitx.core.preprocess import UInt8Array
from vitx.core.probabilities import Float64Array
from vitx.parity import certify_models
from vitx.parity.comparison import Comparison
from vitx.parity.executables.witness_set import add_witness
from vitx.parity.loaded_model import LoadedModel, model_from_bundle

IMAGES = colour_images(360)
WITNESS_IMAGES = 340  # of them, 85 those of smallest margin: without a flip they prove a flip rate of .0183


def logits_float64(images: UInt8Array) -> Float64Array:
    """The checkpoint: the function of `tiny_graph`, written independently."""
    return reference_float64(images)["logits"]


def reference_float64(images: UInt8Array) -> dict[str, Float64Array]:
    """The same, with the embedding: the mean colour, normalised."""
    normal = (images.astype(np.float64) / 255 - PREPROCESSING.mean) / PREPROCESSING.std
    features = np.asarray(normal.mean(axis=(1, 2)))
    return {"logits": np.asarray(features @ WEIGHT.astype(np.float64) + BIAS), "embedding": features}


def evidence(margins: Float64Array, flips: Iterable[str] = ()) -> tuple[Any, Any]:
    """What `add_witness` reads of a comparison and of its certificate."""
    found = SimpleNamespace(margins=margins, logit_std=1.0, flips=[SimpleNamespace(key=key) for key in flips])
    return found, SimpleNamespace(reference="", reference_sha256="", data_sha256="7" * 64)


def write_ir(folder: Path, fault: Fault | None = None) -> None:
    """The IR of a bundle: of its own graph, or of another with a fault."""
    graph = folder.with_name("graph of the ir.onnx")
    graph.write_bytes(tiny_graph(fault).SerializeToString())
    model = openvino.convert_model(str(graph))
    openvino.save_model(model, str(folder / "openvino" / "model.xml"), compress_to_fp16=False)


def seal_manifest(folder: Path) -> Bundle:
    """List the files of the folder as they are now, as whoever may write them can."""
    later = (MANIFEST, CERTIFICATE, LATENCY)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in later)
    entries = {
        path.relative_to(folder).as_posix(): FileEntry(sha256=sha256_file(path), size=path.stat().st_size)
        for path in files
    }
    manifest = read_record(folder / MANIFEST, Manifest)
    write_json(folder / MANIFEST, manifest.model_copy(update={"files": entries}))
    return Bundle.open(folder)


def seal_certificate(bundle: Bundle, **changes: object) -> None:
    """Write the certificate with these fields, bound to the files as they are now, as whoever may write it can."""
    certificate = read_record(bundle.path / CERTIFICATE, Certificate)
    changed = certificate.model_copy(update={"subject": bundle.subject(), **changes})
    write_json(bundle.path / CERTIFICATE, changed.sealed())


def certify_bundle(bundle: Bundle, witness_images: int = WITNESS_IMAGES) -> Certificate:
    """As an export does; `witness_images` 0 for no witness set."""
    reference = LoadedModel("numpy", NumpySession(), PREPROCESSING, LABELS, "colours", "5" * 64)

    def add_evidence(bundle: Bundle, comparison: Comparison, certificate: Certificate) -> Bundle:
        return add_witness(
            *(bundle, IMAGES, comparison, certificate, reference_float64), count=witness_images, quiet=True
        )

    with model_from_bundle(bundle, device="cpu", threads=1) as candidate:
        return certify_models(
            *(reference, candidate, IMAGES),
            device="cpu",
            write=True,
            add_evidence=add_evidence if witness_images else None,
            quiet=True,
        )
