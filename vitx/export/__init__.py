"""From a checkpoint to a bundle: exact rewrites, the ONNX graph, precision, engines."""

from typing import TYPE_CHECKING

from vitx.core.lazy import lazy_names

if TYPE_CHECKING:
    from vitx.export.bundling import export_bundle
    from vitx.export.engines.targets import EngineRequest
    from vitx.export.engines.tensorrt_engine import engine_from_onnx
    from vitx.export.graph.from_model import onnx_from_model
    from vitx.export.options import EngineOptions, ExportOptions
    from vitx.export.precision.acceptance import SamplingPlan
    from vitx.export.precision.lower import lower_precision
    from vitx.export.rewrite.cost import explain
    from vitx.export.rewrite.rewrites import ALL, ImageClassifier, rewrite_for_export
    from vitx.export.triton import triton_repository
    from vitx.models.source import Source, SourceRequest

__all__ = [
    "ALL",
    "EngineOptions",
    "EngineRequest",
    "ExportOptions",
    "ImageClassifier",
    "SamplingPlan",
    "Source",
    "SourceRequest",
    "engine_from_onnx",
    "explain",
    "export_bundle",
    "lower_precision",
    "onnx_from_model",
    "rewrite_for_export",
    "triton_repository",
]

__getattr__ = lazy_names(
    __name__,
    {
        "vitx.export.bundling": ("export_bundle",),
        "vitx.export.engines.targets": ("EngineRequest",),
        "vitx.export.engines.tensorrt_engine": ("engine_from_onnx",),
        "vitx.export.graph.from_model": ("onnx_from_model",),
        "vitx.export.options": ("EngineOptions", "ExportOptions"),
        "vitx.export.precision.acceptance": ("SamplingPlan",),
        "vitx.export.precision.lower": ("lower_precision",),
        "vitx.export.rewrite.cost": ("explain",),
        "vitx.export.rewrite.rewrites": ("ALL", "ImageClassifier", "rewrite_for_export"),
        "vitx.export.triton": ("triton_repository",),
        "vitx.models.source": ("Source", "SourceRequest"),
    },
)
