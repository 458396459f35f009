"""From a checkpoint to a bundle: exact rewrites, the ONNX graph, precision, engines."""

from vitx.export.bundle import ExportOptions, export_bundle
from vitx.export.engines.targets import EngineRequest
from vitx.export.engines.tensorrt import engine_from_onnx
from vitx.export.explain import explain
from vitx.export.graph.from_model import onnx_from_model
from vitx.export.precision.acceptance import SamplingPlan
from vitx.export.precision.lower import lower_precision
from vitx.export.rewrite.rewrites import ALL, ImageClassifier, rewrite_for_export
from vitx.export.triton import triton_repository
from vitx.models.source import Source, SourceRequest

__all__ = [
    "ALL",
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
