"""The named networks at full width: every rewrite, every precision, judged on real images against PyTorch.

fp32 is at full depth. Lower precisions are too, except DeepViT-L: 8 of its 32 blocks, 3 of its 12 with Re-Attention.
Images are 64 px, so that calibration on 320 of them takes seconds; test_tensorrt.py exports two networks at 224 px.
"""

import io
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import pytest
import timm
import torch
from PIL import Image
from sklearn.datasets import load_digits, load_sample_images
from torch import nn

from reference import randomize_like_trained
from vitx.core.bundle import SHARE_OF_STD
from vitx.core.preprocess import Preprocessing, UInt8Array
from vitx.export import ALL, onnx_from_model
from vitx.export.acceptance import Bounds, agreement_of
from vitx.export.calibration import logits_of
from vitx.export.half import cpu_twin
from vitx.export.precision import lower_precision
from vitx.export.rewrite import ImageClassifier, applied_rewrites
from vitx.models import AlterNet, image_tensor

SIZE = 64
PREPROCESSING = Preprocessing(image_size=SIZE, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
VIT: dict[str, Any] = {"img_size": SIZE, "num_classes": 10}
NETWORKS: dict[str, dict[str, Any]] = {
    "deit_small_12": VIT,
    "deepvit_s": VIT,
    "deepvit_l": VIT,
    "deit_small_12_talking": VIT,
    "alternet_18": {"num_classes": 10},  # its windows of 7 do not divide the maps of 64 px
}
SHORT_L = {**VIT, "depth": 8, "attention": ["plain"] * 5 + ["re-attention"] * 3}
# How many places each rewrite finds; those that find nothing are left out.
DEIT = {
    "remove-dead-outputs": 50,
    "fold-normalization": 1,
    "fold-attention-scale": 12,
    "fold-layer-norm-affine": 25,
    "fold-value-bias": 12,
    "compute-class-token-only": 1,
    "join-tokens": 12,
}
DEEPVIT_S = {
    "remove-dead-outputs": 66,
    "fold-normalization": 1,
    "fold-head-norm": 5,
    "split-rank-one-bias": 5,
    "fold-attention-scale": 16,
    "fold-residual-scale": 16,
    "fold-layer-norm-affine": 33,
    "drop-row-constants": 16,
    "fold-value-bias": 16,
    "compute-class-token-only": 1,
    "join-tokens": 16,
}
DEEPVIT_L = {
    **{name: 2 * count for name, count in DEEPVIT_S.items()},
    "remove-dead-outputs": 130,
    "fold-normalization": 1,
    "fold-head-norm": 12,
    "split-rank-one-bias": 12,
    "fold-layer-norm-affine": 65,
    "compute-class-token-only": 1,
}
PLACES = {
    "deit_small_12": {**DEIT, "drop-row-constants": 12},
    "deepvit_s": DEEPVIT_S,
    "deepvit_l": DEEPVIT_L,
    "deit_small_12_talking": {**DEIT, "drop-row-constants": 12},
    "alternet_18": {"remove-dead-outputs": 4, "fold-normalization": 1},
}
FIT, OTHER = 320, 32


@cache
def real_images() -> UInt8Array:
    """Crops of two photographs, and every third a handwritten digit, uint8 (FIT + OTHER, SIZE, SIZE, 3)."""
    photos, digits = load_sample_images().images, load_digits().images
    generator = np.random.default_rng(0)
    prepared = []
    for index in range(FIT + OTHER):
        if index % 3 == 2:
            pixels = np.rint(digits[index] * (255 / 16)).astype(np.uint8)
        else:
            photo = photos[index % 3]
            side = int(generator.integers(SIZE, 320))
            top, left = (int(generator.integers(0, length - side + 1)) for length in photo.shape[:2])
            pixels = photo[top : top + side, left : left + side]
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, format="PNG")
        prepared.append(PREPROCESSING.from_bytes(buffer.getvalue()))
    return np.stack(prepared)


def reference_logits(model: nn.Module, images: UInt8Array) -> npt.NDArray[np.float32]:
    with torch.inference_mode():
        logits: npt.NDArray[np.float32] = model(image_tensor(images, PREPROCESSING.mean, PREPROCESSING.std)).numpy()
    return logits


def exported(name: str, path: Path, **kwargs: Any) -> tuple[nn.Module, dict[str, int], onnx.ModelProto]:
    """A random network, the places that each rewrite found in it, and its graph."""
    model = randomize_like_trained(timm.create_model(name, **kwargs)).eval()
    classifier = ImageClassifier(randomize_like_trained(timm.create_model(name, **kwargs)).eval(), PREPROCESSING).eval()
    found = applied_rewrites(classifier, ALL)
    return model, found, onnx_from_model(classifier, PREPROCESSING, tuple("0123456789"), path / "model.onnx")


@pytest.fixture(scope="module", params=NETWORKS)
def float32(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    name: str = request.param
    return name, *exported(name, tmp_path_factory.mktemp("fp32"), **NETWORKS[name])


@pytest.fixture(scope="module")
def to_lower(float32: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(network, graph) for the searches."""
    name, model, _, graph = float32
    if name == "deepvit_l":
        model, _, graph = exported(name, tmp_path_factory.mktemp("short"), **SHORT_L)
    return model, graph


def test_every_rewrite_finds_its_places(float32: Any) -> None:
    name, _, found, graph = float32
    assert {rewrite: count for rewrite, count in found.items() if count} == PLACES[name]
    norms = sum(node.op_type == "BatchNormalization" for node in graph.graph.node)
    assert norms == (9 if name == "alternet_18" else 0)  # those before an activation; attention and stems have none


def test_float32_equals_the_network(float32: Any) -> None:
    """The graph has passed ONNX's full check as it was written, and was traced with two images."""
    _, model, _, graph = float32
    images = real_images()[:33]
    expected = reference_logits(model, images)
    for batch in (1, 7, 32):
        found = logits_of(graph, images, batch)
        assert np.abs(found - expected).max() < 1e-4
        assert np.array_equal(found.argmax(axis=1), expected.argmax(axis=1))


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision(to_lower: Any, precision: Any) -> None:
    """Searched on some images, held to the tolerance of a certificate on others, on the twin that rounds everywhere."""
    model, graph = to_lower
    searched, other = real_images()[:OTHER], real_images()[FIT:]
    lowered = lower_precision(graph, precision, searched, quiet=True)
    onnx.checker.check_model(lowered.graph, full_check=True)
    assert set(lowered.islands) <= set(lowered.details["without_kernel"])
    if not (precision == "bf16" and isinstance(model, AlterNet)):  # opset 20 has no convolution in bfloat16
        assert lowered.graph.ByteSize() < 0.6 * graph.ByteSize()
    agreement = agreement_of(reference_logits(model, other), logits_of(cpu_twin(lowered.graph), other, batch=7))
    assert agreement.within(Bounds(SHARE_OF_STD[precision], 0.95)), agreement


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_eight_bits(to_lower: Any, precision: Any) -> None:
    """Random classes lie so close that 8 bits move some images: classes are compared where they are clear."""
    model, graph = to_lower
    fit, other = real_images()[:FIT], real_images()[FIT:]
    lowered = lower_precision(graph, precision, fit, bounds=Bounds(SHARE_OF_STD[precision], 0.8), quiet=True)
    onnx.checker.check_model(lowered.graph, full_check=True)
    assert lowered.details["quantized"] >= lowered.details["layers"] - 2
    expected = reference_logits(model, other)
    found = logits_of(lowered.graph, other, batch=7, fused=precision == "int8")
    agreement = agreement_of(expected, found)
    assert agreement.within(Bounds(SHARE_OF_STD[precision], 0.8)), agreement
    second, first = np.sort(expected, axis=1)[:, -2:].T
    clear = first - second > 0.6 * SHARE_OF_STD[precision] * expected.std()
    assert clear.sum() >= 8
    assert np.array_equal(found.argmax(axis=1)[clear], expected.argmax(axis=1)[clear])
