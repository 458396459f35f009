"""From a checkpoint to a bundle: exact rewrites, the ONNX graph."""

from vitx.export.bundle import ExportOptions, export_bundle
from vitx.export.graph import onnx_from_model
from vitx.export.rewrite import ALL, ImageClassifier, rewrite_for_export
from vitx.export.source import Source, SourceRequest

__all__ = [
    "ALL",
    "ExportOptions",
    "ImageClassifier",
    "Source",
    "SourceRequest",
    "export_bundle",
    "onnx_from_model",
    "rewrite_for_export",
]
