"""What `vitx parity --trace` composes: error by layer, the nodes that add most of it, islands that repair it."""

import math
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx
    from torch import nn

    from vitx.core.bundle import Bundle
    from vitx.core.certificate import TokenSimilarity
    from vitx.core.images import ImageSet
    from vitx.core.preprocess import Preprocessing, UInt8Array
    from vitx.core.run import Checkpoint, RunFolder
    from vitx.export.divergence import NodeError, Repair, Trace
    from vitx.export.qdq import Target
    from vitx.serve.parity.report import LayerPlot
    from vitx.serve.parity.sides import Side

# Layers are compared on so many evenly spaced images; nodes on fewer, they only order.
TRACE_IMAGES, NODE_IMAGES = 64, 8


@dataclass(frozen=True)
class TraceResult:
    """layers: None between two bundles, which have no network that could run layer by layer.

    exact: the float32 graph that a run's bundle of lower precision was made of.
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

    def plots(self) -> tuple["LayerPlot", ...]:
        from vitx.serve.parity.report import LayerPlot, Series

        if self.layers is None:
            return ()
        layers = self.layers.layers
        names = [layer.name for layer in layers]
        return (
            LayerPlot(
                "Relative error by layer",
                names,
                (
                    Series("of what the layer hands on", [layer.error for layer in layers]),
                    Series("made by the layer itself", [layer.own for layer in layers]),
                ),
                logarithmic=True,
            ),
            LayerPlot(
                "CosSim of the patch tokens by layer",
                names,
                (
                    Series("reference", [layer.similarity_reference for layer in layers]),
                    Series("candidate", [layer.similarity_candidate for layer in layers]),
                ),
            ),
        )


def token_similarity(
    model: "nn.Module", preprocessing: "Preprocessing", bundle: "Bundle", images: "ImageSet", *, quiet: bool
) -> "TokenSimilarity | None":
    """CosSim by layer of a checkpoint's network and a bundle's graph on 64 images.

    None for a network without blocks, and, which is logged, for a graph that names none of its layers.
    """
    import onnx

    from vitx.core.console import log
    from vitx.core.errors import InputError
    from vitx.export.divergence import compare_token_similarity, has_blocks, require_names

    if not has_blocks(model):
        return None
    graph = onnx.load(str(bundle.model_path))
    try:
        require_names(graph, model)
    except InputError as reason:
        log(f"parity: CosSim by layer is left out: {reason}", quiet=quiet)
        return None
    return compare_token_similarity(
        model, preprocessing, graph, _pixels(images, preprocessing), precision=bundle.manifest.precision
    )


def trace(
    reference: "Side", candidate: "Side", which: "Checkpoint", images: "ImageSet", *, repair: bool, quiet: bool
) -> TraceResult:
    """Compare a bundle's graph layer by layer with a run's network, or node by node with another bundle's graph.

    With `repair` the float32 islands are searched that make a lower precision pass.

    Raises InputError when the candidate is no bundle, or names none of its layers.
    """
    import onnx

    from vitx.core.errors import InputError

    if candidate.bundle is None:
        raise InputError("--trace looks into a bundle's graph: give a bundle as the candidate")
    graph = onnx.load(str(candidate.bundle.model_path))
    pixels = _pixels(images, reference.preprocessing)
    if reference.run is not None:
        found = _trace_run(reference.run, which, candidate.bundle, graph, pixels)
        if not repair or found.exact is None:
            return found
        repaired = _repair(found.exact, graph, candidate.bundle, pixels, images, quiet=quiet)
        return replace(found, notes=(*found.notes, repaired))
    assert reference.bundle is not None
    exact = onnx.load(str(reference.bundle.model_path))
    return _trace_nodes(exact, graph, candidate.bundle, pixels)


def _trace_run(
    run: "RunFolder",
    which: "Checkpoint",
    bundle: "Bundle",
    graph: "onnx.ModelProto",
    pixels: "UInt8Array",
) -> TraceResult:
    from vitx.export.divergence import trace_layers
    from vitx.models import load_run_model

    precision = bundle.manifest.precision
    model, _ = load_run_model(run, which)
    layers = trace_layers(model, run.info.preprocessing, graph, pixels, precision=precision)
    if precision == "fp32":
        return TraceResult(layers, (), (str(layers),))
    exact = _float_graph(run, which, bundle)
    nodes = _trace_nodes(exact, graph, bundle, pixels)
    return TraceResult(layers, nodes.nodes, (str(layers), *nodes.notes), exact)


def _trace_nodes(
    exact: "onnx.ModelProto", graph: "onnx.ModelProto", bundle: "Bundle", pixels: "UInt8Array"
) -> TraceResult:
    from vitx.export.divergence import node_errors, overflow_text

    precision = bundle.manifest.precision
    nodes = node_errors(exact, graph, pixels[:NODE_IMAGES], precision)
    notes = []
    if nodes:
        worst = nodes[0]
        notes.append(f"node '{worst.name}' adds most error: {worst.growth:.3g} of its result '{worst.tensor}'")
        overflow = overflow_text(exact, worst.tensor, pixels[:NODE_IMAGES], precision)
        notes += [overflow] if overflow else []
    return TraceResult(None, nodes, tuple(notes))


def _float_graph(run: "RunFolder", which: "Checkpoint", bundle: "Bundle") -> "onnx.ModelProto":
    """The float32 graph that the bundle's was made of: the same rewrites, so the same names."""
    import onnx

    from vitx.export.bundle import trace_to_file
    from vitx.export.source import SourceRequest

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        trace_to_file(SourceRequest(str(run.path), which=which), bundle.manifest.rewrites, path)
        return onnx.load(str(path))


def _repair(
    exact: "onnx.ModelProto",
    graph: "onnx.ModelProto",
    bundle: "Bundle",
    pixels: "UInt8Array",
    images: "ImageSet",
    *,
    quiet: bool,
) -> str:
    """Which float32 islands make the precision pass on the traced images, as a sentence."""
    from vitx.core.images import open_images
    from vitx.export.calibration import calibration_images
    from vitx.export.divergence import repair

    manifest = bundle.manifest
    assert manifest.precision != "fp32"
    training = calibration_images(open_images(images.name, "train"), manifest.preprocessing)
    target: Target = "tensorrt" if manifest.lowering.get("target") == "tensorrt" else "cpu"
    found = repair(exact, graph, manifest.precision, training, pixels, target=target, quiet=quiet)
    return _repair_text(found, manifest.precision)


def _repair_text(found: "Repair", precision: str) -> str:
    names = ", ".join(found.islands[:8]) + (f" and {len(found.islands) - 8} more" if len(found.islands) > 8 else "")
    islands = f"{len(found.islands)} float32 islands ({names})" if found.islands else "no float32 island"
    return f"{precision} passes with {islands}: {found.after}; this bundle: {found.before}"


def _pixels(images: "ImageSet", preprocessing: "Preprocessing") -> "UInt8Array":
    import numpy as np

    from vitx.serve.parity.comparison import subset

    return np.concatenate(list(subset(images, TRACE_IMAGES).batches(preprocessing, TRACE_IMAGES)))


def _finite(value: Any) -> Any:
    """The same with numbers that JSON lacks as text."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
