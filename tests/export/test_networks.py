"""The named networks: every rewrite at full depth; every precision, against PyTorch on real images, at 32 px.

They are exported with their full width and few blocks, since blocks repeat; test_tensorrt_engine.py exports one at
224 px.
"""

import io
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx
import pytest
import timm
import torch
from flash_definitions import with_definitions
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

PREPROCESSING = Preprocessing(image_size=32, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
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
# Its mean is of all tokens, which the last block therefore computes.
FEATSCALE = {**DEIT, "drop-row-constants": 12}
del FEATSCALE["compute-class-token-only"]
PLACES = {
    "deit_small_12": {**DEIT, "drop-row-constants": 12},
    "deepvit_s": DEEPVIT_S,
    "deepvit_l": DEEPVIT_L,
    "deit_small_12_talking": {**DEIT, "drop-row-constants": 12},
    "attnscale_small_12": {**DEIT, "drop-row-constants": 12},
    "featscale_small_12": FEATSCALE,
    # The first block's values keep their bias: the others read them.
    "deit_tiny_neutreno_patch16_224": {**DEIT, "drop-row-constants": 12, "fold-value-bias": 11},
    "alternet_18": {"remove-dead-outputs": 4, "fold-normalization": 1},
}
# DeepViT-L's blocks are DeepViT-S's, wider. AlterNet's windows of 7 do not divide the maps of 32 px.
EXPORTED: dict[str, dict[str, Any]] = {
    "deit_small_12": {"depth": 2},
    "deepvit_s": {"depth": 3, "attention": ["plain", "re-attention", "re-attention"]},
    "deit_small_12_talking": {"depth": 2},
    "attnscale_small_12": {"depth": 2},
    "featscale_small_12": {"depth": 2},
    "deit_small_12 with ContraNorm": {"depth": 2, "contranorm_scale": 0.5},
    "deit_tiny_neutreno_patch16_224": {"depth": 3},
    "alternet_18": {"depths": (1, 2, 1, 1), "attention_depths": (0, 1, 0, 0)},
}
# Blocks whose attention over all tokens has a mix over heads; the last block computes the class token alone.
FUSED = {"deepvit_s": 1, "deit_small_12_talking": 1}
FIT, OTHER = 320, 32
LABELS = tuple("0123456789")


def create(name: str, **options: Any) -> nn.Module:
    """A network for 10 classes and the images of PREPROCESSING; AlterNet takes images of any size."""
    size: dict[str, Any] = {} if name == "alternet_18" else {"img_size": PREPROCESSING.image_size}
    model: nn.Module = timm.create_model(name.split()[0], num_classes=10, **size, **options).eval()
    return model


def real_images() -> UInt8Array:
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
        Image.fromarray(pixels).save(buffer, format="PNG", compress_level=0)
        prepared.append(PREPROCESSING.from_bytes(buffer.getvalue()))
    return np.stack(prepared)


def reference_logits(model: nn.Module, images: UInt8Array) -> npt.NDArray[np.float32]:
    with torch.inference_mode():
        logits: npt.NDArray[np.float32] = model(image_tensor(images, PREPROCESSING.mean, PREPROCESSING.std)).numpy()
    return logits


class Exported(NamedTuple):
    name: str
    logits: npt.NDArray[np.float32]  # of the network on every real image
    classifier: nn.Module  # rewritten
    graph: onnx.ModelProto
    images: UInt8Array


@pytest.fixture(scope="module")
def export_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Exported]:
    """Each network is exported once, in whatever order the tests ask for them."""
    images = real_images()

    @cache
    def export(name: str) -> Exported:
        model = randomize_like_trained(create(name, **EXPORTED[name]))
        logits = reference_logits(model, images)
        classifier = ImageClassifier(model, PREPROCESSING).eval()
        applied_rewrites(classifier, ALL)
        graph = onnx_from_model(classifier, PREPROCESSING, LABELS, tmp_path_factory.mktemp(name) / "model.onnx")
        return Exported(name, logits, classifier, graph, images)

    return export


@pytest.fixture(params=EXPORTED)
def exported(request: pytest.FixtureRequest, export_of: Callable[[str], Exported]) -> Exported:
    return export_of(request.param)


@pytest.mark.parametrize("name", PLACES)
def test_every_rewrite_finds_its_places(name: str) -> None:
    """In the whole network; places depend on its modules alone, so its weights need no memory, but for the scales."""
    with torch.device("cpu" if "scale" in name else "meta"):
        classifier = ImageClassifier(create(name), PREPROCESSING).eval()
    places = applied_rewrites(classifier, ALL)
    assert {rewrite: count for rewrite, count in places.items() if count} == PLACES[name]


def in_precisions(first: str, second: str) -> pytest.MarkDecorator:
    """Every network in the first; in the second, which differs by its types, those with convolutions."""
    pairs = [(name, first) for name in EXPORTED] + [(name, second) for name in ("deepvit_s", "alternet_18")]
    return pytest.mark.parametrize(("exported", "precision"), pairs, indirect=["exported"])


def test_float32_equals_the_network(exported: Exported) -> None:
    """At batches that were never traced; writing the graph included ONNX's full check."""
    norms = sum(node.op_type == "BatchNormalization" for node in exported.graph.graph.node)
    # AlterNet keeps those before an activation; in attention and stems all are folded.
    assert norms == (6 if exported.name == "alternet_18" else 0)
    images, expected = exported.images[:33], exported.logits[:33]
    for batch in (1, 7, 32):
        found = logits_of(exported.graph, images, batch)
        assert np.abs(found - expected).max() < 1e-4
        assert np.array_equal(found.argmax(axis=1), expected.argmax(axis=1))


def test_attention_with_a_head_mix_as_one_node(exported: Exported) -> None:
    """ONNX Runtime runs the node by a definition of ours."""
    fused = fuse_reattention(exported.graph)
    assert len(fused.fused) == FUSED.get(exported.name, 0)
    assert bool(fused.skipped) == (exported.name == "alternet_18")  # relative positions are added to its scores
    found = logits_of(with_definitions(fused.model), exported.images[:8], batch=7)
    assert np.abs(found - exported.logits[:8]).max() < 1e-4


@in_precisions("fp16", "bf16")
def test_half_precision(exported: Exported, precision: Any, tmp_path: Path) -> None:
    """Islands are searched on some images; the certificate's tolerance is checked on others, by the float32 twin."""
    graph, opset = exported.graph, opset_for(precision)
    if opset != opset_of(graph):
        path = tmp_path / "model.onnx"
        graph = onnx_from_model(exported.classifier, PREPROCESSING, LABELS, path, opset=opset, check=False)
    lowered = lower_precision(graph, precision, exported.images[:OTHER], quiet=True)
    onnx.checker.check_model(lowered.graph, full_check=True)
    assert lowered.islands == ()
    assert lowered.graph.ByteSize() < 0.6 * graph.ByteSize()
    found = logits_of(cpu_twin(lowered.graph), exported.images[FIT:], batch=7)
    agreement = agreement_of(exported.logits[FIT:], found)
    assert agreement.within(Bounds(SHARE_OF_STD[precision], 0.95)), agreement


@in_precisions("int8", "fp8")
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
