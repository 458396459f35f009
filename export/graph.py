"""From a rewritten network to an ONNX graph, checked."""

import json
import warnings
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import nn

from vitx.core.errors import CheckFailed
from vitx.core.preprocess import Preprocessing

INPUT, OUTPUT = "images", "logits"

# Traced with two images: a batch of one would be taken for a constant.
EXAMPLE_BATCH = 2


def onnx_from_model(
    classifier: nn.Module, preprocessing: Preprocessing, labels: tuple[str, ...], path: Path
) -> onnx.ModelProto:
    """Write the graph of `classifier` to `path`: uint8 (N, S, S, 3) → float32 (N, C), N dynamic.

    Labels and preprocessing go into the metadata properties. The file passes ONNX's full check. Raises CheckFailed
    when the traced graph does not keep the batch dynamic.
    """
    size = preprocessing.image_size
    device = next(classifier.parameters()).device
    example = torch.zeros(EXAMPLE_BATCH, size, size, 3, dtype=torch.uint8, device=device)
    with warnings.catch_warnings():
        # The exporter deprecates its own internals; nothing of it concerns the caller.
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        program: Any = torch.onnx.export(
            classifier,
            (example,),
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("N")},),
            input_names=[INPUT],
            output_names=[OUTPUT],
            verbose=False,
        )
    program.model.metadata_props.update(
        {
            "vitx.labels": json.dumps(labels, ensure_ascii=False),
            "vitx.preprocessing": preprocessing.model_dump_json(),
        }
    )
    program.save(str(path), external_data=False)
    onnx.checker.check_model(str(path), full_check=True)
    graph = onnx.load(str(path))
    _require_dynamic_batch(graph)
    return graph


def _require_dynamic_batch(graph: onnx.ModelProto) -> None:
    for value in (*graph.graph.input, *graph.graph.output):
        first = value.type.tensor_type.shape.dim[0]
        if not first.dim_param:
            raise CheckFailed(f"the traced graph fixed the batch of '{value.name}' to {first.dim_value}")


def opset_of(graph: onnx.ModelProto) -> int:
    """The version of the standard operator set."""
    return next(int(entry.version) for entry in graph.opset_import if entry.domain in ("", "ai.onnx"))
