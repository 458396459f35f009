"""The ONNX graph: equal to the network at batches that were never traced, and what it must not contain."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import timm
import torch

from reference import randomize
from vitx.core.preprocess import Preprocessing
from vitx.export import onnx_from_model, rewrite_for_export
from vitx.export.graph import opset_of
from vitx.models import image_tensor

PREPROCESSING = Preprocessing(image_size=32)
LABELS = tuple(f"klasse {i} é" for i in range(10))


@pytest.fixture(scope="module", params=["deit_digits", "deepvit_digits"])
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path]:
    model = randomize(timm.create_model(request.param)).eval()
    path = tmp_path_factory.mktemp("graph") / "model.onnx"
    onnx_from_model(rewrite_for_export(model, PREPROCESSING), PREPROCESSING, LABELS, path)
    return model, path


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 32])
def test_equal_at_every_batch_size(exported: tuple[torch.nn.Module, Path], batch: int) -> None:
    model, path = exported
    images = np.random.default_rng(batch).integers(0, 256, (batch, 32, 32, 3), dtype=np.uint8)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], {"images": images})
    with torch.inference_mode():
        expected = model(image_tensor(images, PREPROCESSING.mean, PREPROCESSING.std)).numpy()
    scale = np.abs(expected).max()
    np.testing.assert_allclose(logits / scale, expected / scale, atol=1e-5, rtol=0)


def test_graph_contents(exported: tuple[torch.nn.Module, Path]) -> None:
    _, path = exported
    graph = onnx.load(str(path))
    operators = Counter(node.op_type for node in graph.graph.node)
    assert "BatchNormalization" not in operators
    assert operators["LayerNormalization"] == 13
    assert operators["Softmax"] == 6
    assert operators["Gelu"] == 6
    assert operators["Cast"] == 1
    assert opset_of(graph) >= 20
    metadata = {entry.key: entry.value for entry in graph.metadata_props}
    assert tuple(json.loads(metadata["vitx.labels"])) == LABELS
    assert Preprocessing.model_validate_json(metadata["vitx.preprocessing"]) == PREPROCESSING
