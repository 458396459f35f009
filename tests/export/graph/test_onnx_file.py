"""A file written tensor by tensor has the same contents as one from onnx_ir's own writer."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
import pytest

from vitx.export.graph.onnx_file import _varint, write_onnx


def scaled_images(rng: np.random.Generator) -> onnx_ir.Model:
    """images (N, 300) → images · weight + bias, with a scalar and a tensor without elements beside them."""
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "weight": rng.standard_normal((300, 70)).astype(np.float32),
        "bias": rng.standard_normal(70).astype(np.float16),
        "empty": np.zeros((0, 4), np.int64),
        "scalar": np.array(7, np.int64),
    }
    images = onnx_ir.val("images", dtype=onnx_ir.DataType.FLOAT, shape=("N", 300))
    initializers = [onnx_ir.val(name, const_value=onnx_ir.tensor(value)) for name, value in arrays.items()]
    product = onnx_ir.node("MatMul", [images, initializers[0]])
    graph = onnx_ir.Graph(
        [images], product.outputs, nodes=[product], initializers=initializers, opset_imports={"": 20}, name="scaled"
    )
    return onnx_ir.Model(graph, ir_version=10, metadata_props={"vitx.labels": '["é"]'})


def test_equal_to_the_librarys_own_file(tmp_path: Path) -> None:
    model = scaled_images(np.random.default_rng(0))
    onnx_ir.save(model, tmp_path / "whole.onnx")
    write_onnx(model, tmp_path / "by_tensor.onnx")
    whole, by_tensor = onnx.load(tmp_path / "whole.onnx"), onnx.load(tmp_path / "by_tensor.onnx")
    assert len(by_tensor.graph.initializer) == 4
    del whole.graph.value_info[:], by_tensor.graph.value_info[:]  # the library repeats the initializers' shapes there
    assert by_tensor == whole


@pytest.mark.parametrize(
    ("number", "encoded"),
    [(0, b"\x00"), (127, b"\x7f"), (128, b"\x80\x01"), (300, b"\xac\x02"), (2**28, b"\x80" * 4 + b"\x01")],
)
def test_varint(number: int, encoded: bytes) -> None:
    assert _varint(number) == encoded
