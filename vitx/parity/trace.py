"""Why a comparison failed: a common export mistake, error by layer, the nodes that add most, islands that repair it.

The verdict depends on none of this but CosSim by layer.
"""

import math
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitx.core.bundle import MODEL, Bundle
from vitx.core.certificate import Certificate, TokenSimilarity
from vitx.core.console import log
from vitx.core.errors import InputError
from vitx.core.preprocess import Preprocessing, UInt8Array
from vitx.core.tolerance import allowed_logit_error, coarser
from vitx.data.image_set import ImageSet
from vitx.data.open import open_images
from vitx.parity.comparison import REFERENCE_BATCH, difference, infer, prepared
from vitx.parity.diagnosis import IMAGES, diagnose
from vitx.parity.executables.layers import first_divergence
from vitx.parity.html_report import LayerPlot
from vitx.parity.loaded_model import LoadedModel
from vitx.parity.verdict import flips_remedy

if TYPE_CHECKING:  # two bundles are compared where there is no torch
    import onnx

    from vitx.export import SourceRequest
    from vitx.export.options import Target
    from vitx.parity.divergence import NodeError, Repair, Trace

# Layers are compared on so many evenly spaced images; nodes on fewer, for their errors are only ranked.
TRACE_IMAGES, NODE_IMAGES = 64, 8


@dataclass(frozen=True)
class TraceResult:
    """Error by layer and by node, and sentences that say what they mean.

    layers: None between two bundles, which have no network that could run layer by layer. nodes: empty for a float32
    graph. exact: the float32 graph that a bundle of lower precision was made of.
    """

    layers: "Trace | None"
    nodes: tuple["NodeError", ...]
    notes: tuple[str, ...]
    exact: "onnx.ModelProto | None" = None

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = _finite(
            {
                "layers": asdict(self.layers) if self.layers else None,
                "nodes": [asdict(node) for node in self.nodes],
                "notes": list(self.notes),
            }
        )
        return found

    def plots(self) -> tuple[LayerPlot, ...]:
        if self.layers is None:
            return ()
        layers = self.layers.layers
        names = [layer.name for layer in layers]
        return (
            LayerPlot(
                "Relative error by layer",
                names,
                {
                    "of the layer output": [layer.error for layer in layers],
                    "made by the layer itself": [layer.own for layer in layers],
                },
                logarithmic=True,
            ),
            LayerPlot(
                "CosSim of the patch tokens by layer",
                names,
                {
                    "reference": [layer.similarity_reference for layer in layers],
                    "candidate": [layer.similarity_candidate for layer in layers],
                },
            ),
        )


def measure_token_similarity(
    reference: LoadedModel, candidate: LoadedModel, images: ImageSet, *, quiet: bool
) -> TokenSimilarity | None:
    """CosSim by layer of the reference's network and the candidate's graph on 64 images.

    None where there is no such network or graph, for a network without blocks or without two patches, and, which is
    logged, for a graph that names none of its layers, for blocks that do not each give one tensor, and for a candidate
    that runs another file of the bundle.
    """
    if reference.network is None or candidate.bundle is None:
        return None
    if not _runs_model(candidate):
        log(f"parity: CosSim by layer is left out: it is of {MODEL}, not of {_runtime(candidate)}", quiet=quiet)
        return None
    from vitx.export.graph.dataflow import read_onnx
    from vitx.parity.divergence import compare_token_similarity, has_blocks

    model, bundle = reference.network(), candidate.bundle
    if not has_blocks(model):
        return None
    graph, pixels = read_onnx(bundle.model_path), _pixels(images, reference.preprocessing)
    precision = bundle.manifest.precision
    try:
        found = compare_token_similarity(model, reference.preprocessing, graph, pixels, precision=precision)
    except InputError as reason:
        log(f"parity: CosSim by layer is left out: {reason}", quiet=quiet)
        return None
    return found if found.layers else None


def failure_notes(
    reference: LoadedModel,
    candidate: LoadedModel,
    images: ImageSet,
    certificate: Certificate,
    request: "SourceRequest",
    *,
    quiet: bool,
) -> tuple[str, ...]:
    """Sentences for a bundle that failed against a network: the mistake, and the layer where the error begins.

    First what can be done where the flips alone are too many. The layer is left out for a network without blocks and
    for a graph that does not name them.
    """
    from vitx.parity.divergence import has_blocks

    notes = (
        *flips_remedy(certificate),
        diagnosis_note(reference, candidate, images, certificate, traced=True),
    )
    if reference.network is None or not has_blocks(reference.network()):
        return notes
    try:
        return notes + trace(reference, candidate, request, images, repair=False, quiet=quiet).notes
    except InputError as reason:
        return (*notes, str(reason))


def diagnosis_note(
    reference: LoadedModel, candidate: LoadedModel, images: ImageSet, certificate: Certificate, *, traced: bool
) -> str:
    """The common mistake that explains a failed certificate, as a sentence.

    With `traced` the layers are named elsewhere, or are out of sight: a sentence without a cause does not recommend
    --trace.
    """
    error_by_size = certificate.max_logit_error_by_batch_size
    worst = max(error_by_size, key=lambda size: error_by_size[size])
    among = f" in {IMAGES} of {len(images)} images" if len(images) > IMAGES else ""
    found = diagnose(
        reference.session,
        candidate.session,
        images,
        reference.preprocessing,
        candidate_preprocessing=candidate.preprocessing,
        renormalized=reference.renormalized,
        batch_size=worst if worst > 1 else max(error_by_size),
        allowed=certificate.max_logit_error_allowed,
    )
    return str(replace(found, among=among)) if found.cause or not traced else "no common mistake explains it"


def require_layers(reference: LoadedModel, candidate: LoadedModel, images: ImageSet) -> None:
    """Raise the InputError of a `trace` whose layers cannot be compared, before all images are."""
    if candidate.bundle is None:
        raise InputError("--trace looks into a bundle's graph: give a bundle as the candidate")
    if reference.network is None or not _runs_model(candidate):
        return
    from vitx.export.graph.dataflow import read_onnx
    from vitx.parity.divergence import check_layers

    graph, one = read_onnx(candidate.bundle.model_path), images.evenly_spaced(1)
    check_layers(reference.network(), reference.preprocessing, graph, _pixels(one, reference.preprocessing))


def trace(
    reference: LoadedModel,
    candidate: LoadedModel,
    request: "SourceRequest | None",
    images: ImageSet,
    *,
    repair: bool,
    quiet: bool,
) -> TraceResult:
    """Compare a bundle's graph layer by layer with a network, or node by node with another bundle's graph.

    request: where the reference's network comes from, to export the float32 graph of a bundle of lower precision.
    With `repair`, search the float32 islands that make a lower precision pass. Of a candidate that runs another file,
    such as OpenVINO's, no layer of the graph is named if the graph agrees with the reference.

    The candidate is a bundle. Raises InputError when it names none of its layers.
    """
    from vitx.export.graph.dataflow import read_onnx

    assert candidate.bundle is not None
    graph = read_onnx(candidate.bundle.model_path)
    pixels = _pixels(images, reference.preprocessing)
    if not _runs_model(candidate) and _graph_agrees(reference, candidate, graph, images):
        return TraceResult(None, (), (_runtime_note(candidate.bundle, candidate, images),))
    if reference.network is not None:
        assert request is not None
        found = _trace_network(reference, request, candidate.bundle, graph, pixels)
        if not repair or found.exact is None:
            return found
        repaired = _repair(found.exact, graph, candidate.bundle, pixels, images, quiet=quiet)
        return replace(found, notes=(*found.notes, repaired))
    assert reference.bundle is not None
    exact = read_onnx(reference.bundle.model_path)
    return _trace_nodes(exact, graph, candidate.bundle, pixels)


def _runs_model(candidate: LoadedModel) -> bool:
    """Whether the candidate loaded model.onnx, and not a file that was made of it."""
    return MODEL in candidate.session.artefacts


def _runtime(candidate: LoadedModel) -> str:
    return str(candidate.session.describe()["runtime"])


def _graph_agrees(reference: LoadedModel, candidate: LoadedModel, graph: "onnx.ModelProto", images: ImageSet) -> bool:
    """Whether model.onnx in ONNX Runtime gives the reference's logits, within the limit of their precision."""
    from vitx.export.graph.execution import logits_of
    from vitx.parity.divergence import graph_on_cpu

    assert candidate.bundle is not None
    precision = candidate.bundle.manifest.precision
    expected = infer(reference.session, _pixels(images, reference.preprocessing), REFERENCE_BATCH)
    pixels = _pixels(images, candidate.preprocessing)
    found = logits_of(graph_on_cpu(graph, precision), pixels, fused=precision != "fp8")
    allowed = allowed_logit_error(coarser(reference.precision, precision), float(expected.std()))
    return found.shape == expected.shape and float(difference(expected, found).max()) <= allowed


def _runtime_note(bundle: Bundle, candidate: LoadedModel, images: ImageSet) -> str:
    """Who made the error where the graph did not, and in which layer if the runtime tells it."""
    made = f"{MODEL} agrees with the reference, so the error is made by {_runtime(candidate)}"
    where = first_divergence(bundle, candidate.session, _pixels(images, candidate.preprocessing))
    return f"{made}: {where}" if where else made


def _trace_network(
    reference: LoadedModel,
    request: "SourceRequest",
    bundle: Bundle,
    graph: "onnx.ModelProto",
    pixels: UInt8Array,
) -> TraceResult:
    from vitx.parity.divergence import trace_layers

    assert reference.network is not None
    precision = bundle.manifest.precision
    layers = trace_layers(reference.network(), reference.preprocessing, graph, pixels, precision=precision)
    if precision == "fp32":
        return TraceResult(layers, (), (str(layers),))
    exact = _float32_graph(request, bundle)
    nodes = _trace_nodes(exact, graph, bundle, pixels)
    return TraceResult(layers, nodes.nodes, (str(layers), *nodes.notes), exact)


def _trace_nodes(exact: "onnx.ModelProto", graph: "onnx.ModelProto", bundle: Bundle, pixels: UInt8Array) -> TraceResult:
    from vitx.parity.divergence import node_errors, overflow_text

    precision = bundle.manifest.precision
    nodes = node_errors(exact, graph, pixels[:NODE_IMAGES], precision)
    notes = []
    if nodes:
        worst = nodes[0]
        notes.append(f"node '{worst.name}' adds most error: {worst.growth:.3g} of its result '{worst.tensor}'")
        overflow = overflow_text(exact, worst.tensor, pixels[:NODE_IMAGES], precision)
        notes += [overflow] if overflow else []
    return TraceResult(None, nodes, tuple(notes))


def _float32_graph(request: "SourceRequest", bundle: Bundle) -> "onnx.ModelProto":
    """The float32 graph that the bundle's was made from: exported with the same rewrites, it has the same names."""
    import onnx

    from vitx.export.bundling import trace_to_file

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        trace_to_file(request, bundle.manifest.rewrites, path, bundle.manifest.opset)
        return onnx.load(str(path))


def _repair(
    exact: "onnx.ModelProto",
    graph: "onnx.ModelProto",
    bundle: Bundle,
    pixels: UInt8Array,
    images: ImageSet,
    *,
    quiet: bool,
) -> str:
    """Which float32 islands, searched on training images, make the precision pass on the traced ones; a sentence."""
    from vitx.export.precision.calibration import sample_images
    from vitx.export.precision.lower import least_images
    from vitx.parity.divergence import repair

    manifest = bundle.manifest
    assert manifest.precision != "fp32"
    target: Target = "tensorrt" if manifest.lowering.get("target") == "tensorrt" else "cpu"
    precision, base = manifest.precision, manifest.base
    preprocessing = manifest.preprocessing
    known = open_images(images.name, "train", skip_bad=True, check_size=preprocessing.check_size)
    training = sample_images(known, preprocessing, least=least_images(precision))
    found = repair(exact, graph, precision, training, pixels, target=target, base=base, quiet=quiet)
    return _repair_text(found, manifest.precision)


def _repair_text(found: "Repair", precision: str) -> str:
    names = ", ".join(found.islands[:8]) + (f" and {len(found.islands) - 8} more" if len(found.islands) > 8 else "")
    islands = f"{len(found.islands)} float32 islands ({names})" if found.islands else "no float32 island"
    return f"{precision} passes with {islands}: {found.after}; this bundle: {found.before}"


def _pixels(images: ImageSet, preprocessing: Preprocessing) -> UInt8Array:
    """The traced images, prepared: uint8 (n, S, S, 3)."""
    return prepared(images.evenly_spaced(TRACE_IMAGES), preprocessing)


def _finite(value: Any) -> Any:
    """The same, with NaN and infinities as text: JSON has none."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
