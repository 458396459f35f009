"""The named networks at full width and depth: every rewrite and every precision, against PyTorch on real images.

Images are 64 px (DeepViT-L: 32 px), so that a search that runs 320 of them several times takes seconds;
test_tensorrt_engine.py exports two networks at 224 px.
"""

import io
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

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
from vitx.core.preprocess import Preprocessing, UInt8Array
from vitx.core.tolerance import SHARE_OF_STD
from vitx.export import ALL, onnx_from_model
from vitx.export.engines.flash_nodes import fuse_reattention
from vitx.export.graph.dataflow import opset_of
from vitx.export.graph.execution import logits_of
from vitx.export.graph.from_model import opset_for
from vitx.export.precision.acceptance import Bounds, agreement_of
from vitx.export.precision.half import cpu_twin
from vitx.export.precision.lower import lower_precision
from vitx.export.rewrite.rewrites import ImageClassifier, applied_rewrites
from vitx.models import image_tensor

SIZES = {  # px
    "deit_small_12": 64,
    "deepvit_s": 64,
    "deepvit_l": 32,
    "deit_small_12_talking": 64,
    "alternet_18": 64,  # its windows of 7 do not divide the maps of 64 px
}
# In how many places each rewrite applies; rewrites that apply nowhere are not listed.
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
# Blocks whose attention over all tokens has a mix over heads; the last block computes the class token alone.
FUSED = {"deepvit_s": 4, "deepvit_l": 11, "deit_small_12_talking": 11}
FIT, OTHER = 320, 32
LABELS = tuple("0123456789")


def preprocessing_of(name: str) -> Preprocessing:
    return Preprocessing(image_size=SIZES[name], mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


@cache
def real_images(name: str) -> UInt8Array:
    """Crops of two photographs, every third image a handwritten digit: uint8 (FIT + OTHER, px, px, 3)."""
    photos, digits = load_sample_images().images, load_digits().images
    generator = np.random.default_rng(0)
    prepared = []
    for index in range(FIT + OTHER):
        if index % 3 == 2:
            pixels = np.rint(digits[index] * (255 / 16)).astype(np.uint8)
        else:
            photo = photos[index % 3]
            side = int(generator.integers(64, 320))
            top, left = (int(generator.integers(0, length - side + 1)) for length in photo.shape[:2])
            pixels = photo[top : top + side, left : left + side]
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, format="PNG")
        prepared.append(preprocessing_of(name).from_bytes(buffer.getvalue()))
    return np.stack(prepared)


def reference_logits(model: nn.Module, images: UInt8Array, preprocessing: Preprocessing) -> npt.NDArray[np.float32]:
    with torch.inference_mode():
        logits: npt.NDArray[np.float32] = model(image_tensor(images, preprocessing.mean, preprocessing.std)).numpy()
    return logits


class Exported(NamedTuple):
    name: str
    logits: npt.NDArray[np.float32]  # of the network on every real image
    places: dict[str, int]  # that each rewrite found
    classifier: nn.Module  # rewritten
    graph: onnx.ModelProto
    images: UInt8Array


@pytest.fixture(scope="module", params=SIZES)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    name, preprocessing = request.param, preprocessing_of(request.param)
    kwargs: dict[str, Any] = {"num_classes": 10} | ({} if name == "alternet_18" else {"img_size": SIZES[name]})
    images = real_images(name)
    model = randomize_like_trained(timm.create_model(name, **kwargs)).eval()
    logits = reference_logits(model, images, preprocessing)
    classifier = ImageClassifier(model, preprocessing).eval()
    places = applied_rewrites(classifier, ALL)
    graph = onnx_from_model(classifier, preprocessing, LABELS, tmp_path_factory.mktemp(name) / "model.onnx")
    return Exported(name, logits, places, classifier, graph, images)


def test_every_rewrite_finds_its_places(exported: Exported) -> None:
    assert {rewrite: count for rewrite, count in exported.places.items() if count} == PLACES[exported.name]
    norms = sum(node.op_type == "BatchNormalization" for node in exported.graph.graph.node)
    # AlterNet keeps those before an activation; in attention and stems all are folded.
    assert norms == (9 if exported.name == "alternet_18" else 0)


def test_float32_equals_the_network(exported: Exported) -> None:
    """At batches that were never traced; writing the graph included ONNX's full check."""
    images, expected = exported.images[:33], exported.logits[:33]
    for batch in (1, 7, 32):
        found = logits_of(exported.graph, images, batch)
        assert np.abs(found - expected).max() < 1e-4
        assert np.array_equal(found.argmax(axis=1), expected.argmax(axis=1))


def test_attention_with_a_head_mix_as_one_node(exported: Exported) -> None:
    """ONNX Runtime runs the node through its definition."""
    fused = fuse_reattention(exported.graph)
    assert len(fused.fused) == FUSED.get(exported.name, 0)
    assert bool(fused.skipped) == (exported.name == "alternet_18")  # relative positions are added to its scores
    found = logits_of(fused.model, exported.images[:8], batch=7)
    assert np.abs(found - exported.logits[:8]).max() < 1e-4


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision(exported: Exported, precision: Any, tmp_path: Path) -> None:
    """Islands are searched on some images; the certificate's tolerance is checked on others, by the float32 twin."""
    graph, opset = exported.graph, opset_for(precision)
    if opset != opset_of(graph):
        path = tmp_path / "model.onnx"
        preprocessing = preprocessing_of(exported.name)
        graph = onnx_from_model(exported.classifier, preprocessing, LABELS, path, opset=opset, check=False)
    lowered = lower_precision(graph, precision, exported.images[:OTHER], quiet=True)
    onnx.checker.check_model(lowered.graph, full_check=True)
    assert lowered.islands == ()
    assert lowered.graph.ByteSize() < 0.6 * graph.ByteSize()
    found = logits_of(cpu_twin(lowered.graph), exported.images[FIT:], batch=7)
    agreement = agreement_of(exported.logits[FIT:], found)
    assert agreement.within(Bounds(SHARE_OF_STD[precision], 0.95)), agreement


@pytest.mark.parametrize("precision", ["int8", "fp8"])
def test_eight_bits(exported: Exported, precision: Any) -> None:
    """The classes of a random network are so close that 8 bits flip some images: only clear margins are compared."""
    bounds = Bounds(SHARE_OF_STD[precision], 0.8)
    lowered = lower_precision(exported.graph, precision, exported.images[:FIT], bounds=bounds, quiet=True)
    onnx.checker.check_model(lowered.graph, full_check=True)
    assert lowered.details["quantized"] >= lowered.details["layers"] - 2
    expected = exported.logits[FIT:]
    found = logits_of(lowered.graph, exported.images[FIT:], batch=7, fused=precision == "int8")
    agreement = agreement_of(expected, found)
    assert agreement.within(bounds), agreement
    second, first = np.sort(expected, axis=1)[:, -2:].T
    clear = first - second > 0.6 * SHARE_OF_STD[precision] * expected.std()
    assert clear.sum() >= 8
    assert np.array_equal(found.argmax(axis=1)[clear], expected.argmax(axis=1)[clear])
