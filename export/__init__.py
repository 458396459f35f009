"""From a checkpoint to a bundle: exact rewrites, the ONNX graph."""

from vitx.export.bundle import bundle_from_run
from vitx.export.graph import onnx_from_model
from vitx.export.rewrite import ALL, ImageClassifier, rewrite_for_export

__all__ = ["ALL", "ImageClassifier", "bundle_from_run", "onnx_from_model", "rewrite_for_export"]
