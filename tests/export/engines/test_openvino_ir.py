"""OpenVINO IR computes what the ONNX graph computes."""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import timm

from reference import randomize
from vitx.core.preprocess import Preprocessing
from vitx.export import onnx_from_model, rewrite_for_export
from vitx.export.engines.openvino_ir import openvino_from_onnx

openvino = pytest.importorskip("openvino", reason="an optional target")


def test_ir_equals_the_graph(tmp_path: Path) -> None:
    preprocessing = Preprocessing(image_size=32)
    model = randomize(timm.create_model("deepvit_digits", depth=2, attention=["plain", "re-attention"])).eval()
    graph = tmp_path / "model.onnx"
    onnx_from_model(rewrite_for_export(model, preprocessing), preprocessing, tuple("0123456789"), graph)
    files = openvino_from_onnx(graph, tmp_path / "openvino")
    assert [path.name for path in files] == ["model.bin", "model.xml"]
    session = onnxruntime.InferenceSession(str(graph), providers=["CPUExecutionProvider"])
    options = {"INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.compile_model(str(tmp_path / "openvino" / "model.xml"), "CPU", options)
    for batch in (1, 5):
        images = np.random.default_rng(0).integers(0, 256, (batch, 32, 32, 3), dtype=np.uint8)
        (expected,) = session.run(None, {"images": images})
        scale = np.abs(expected).max()
        np.testing.assert_allclose(compiled([images])[0] / scale, expected / scale, atol=1e-4, rtol=0)
