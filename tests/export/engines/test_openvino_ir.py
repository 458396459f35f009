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


@pytest.mark.parametrize("batch", [1, 5])
def test_ir_equals_the_graph(tmp_path: Path, batch: int) -> None:
    preprocessing = Preprocessing(image_size=32)
    model = randomize(timm.create_model("deepvit_digits")).eval()
    graph = tmp_path / "model.onnx"
    onnx_from_model(rewrite_for_export(model, preprocessing), preprocessing, tuple("0123456789"), graph)
    files = openvino_from_onnx(graph, tmp_path / "openvino")
    assert [path.name for path in files] == ["model.bin", "model.xml"]
    images = np.random.default_rng(0).integers(0, 256, (batch, 32, 32, 3), dtype=np.uint8)
    (expected,) = onnxruntime.InferenceSession(str(graph), providers=["CPUExecutionProvider"]).run(
        None, {"images": images}
    )
    options = {"INFERENCE_PRECISION_HINT": "f32"}
    found = openvino.compile_model(str(tmp_path / "openvino" / "model.xml"), "CPU", options)([images])[0]
    scale = np.abs(expected).max()
    np.testing.assert_allclose(found / scale, expected / scale, atol=1e-4, rtol=0)
