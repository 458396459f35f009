"""Families of timm's networks, small: their graphs equal them, and other simplifiers find nothing to remove."""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
import timm
import torch
from onnx import numpy_helper
from torch import nn

from reference import randomize_like_trained
from support.simplifiers import SIMPLIFIERS, removed_by
from vitx.core.preprocess import Preprocessing
from vitx.export import ALL, onnx_from_model
from vitx.export.graph import from_model
from vitx.export.graph.execution import logits_of
from vitx.export.graph.simplify import simplify
from vitx.export.rewrite.rewrites import ImageClassifier, applied_rewrites

pytestmark = pytest.mark.usefixtures("one_thread")

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Family(NamedTuple):
    """A network, and in how many places the rewrites and the folds of its graph apply (those that do)."""

    network: str
    options: dict[str, Any]
    rewrites: dict[str, int]
    folds: dict[str, int]
    size: int = 32

    @property
    def preprocessing(self) -> Preprocessing:
        return Preprocessing(image_size=self.size, mean=MEAN, std=STD)


VIT: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "num_heads": 3, "depth": 2}
ONE: dict[str, Any] = {**VIT, "depth": 1}
SWIN: dict[str, Any] = {"img_size": 32, "window_size": 4, "depths": (2, 1), "num_heads": (2, 4), "embed_dim": 16}
ALTERNET: dict[str, Any] = {"depths": (1, 2, 1, 1), "attention_depths": (0, 1, 0, 0), "window_size": 5}

# Rewrites of blocks with plain attention; LayerScale adds `fold-residual-scale`.
BLOCK = {"remove-dead-outputs": 6, "fold-normalization": 1, "fold-attention-scale": 1, "fold-layer-norm-affine": 3}
BLOCK |= {"drop-row-constants": 1, "fold-value-bias": 1, "compute-class-token-only": 1, "join-tokens": 1}
TWO = {name: 2 * count for name, count in BLOCK.items()}
TWO |= {"remove-dead-outputs": 10, "fold-normalization": 1, "fold-layer-norm-affine": 5, "compute-class-token-only": 1}

FAMILIES: dict[str, Family] = {
    "vit": Family("vit_tiny_patch16_224", VIT, TWO, {"merge_views": 1}),
    "deit": Family("deit_tiny_patch16_224", ONE, BLOCK, {"merge_views": 1}),
    "deit3": Family("deit3_small_patch16_224", ONE, {**BLOCK, "fold-residual-scale": 2}, {"merge_views": 1}),
    "registers": Family("vit_small_patch14_reg4_dinov2", ONE, {**BLOCK, "fold-residual-scale": 2}, {"merge_views": 1}),
    # A layer of two tokens is no Gemm before the fold.
    "distilled": Family("deit_tiny_distilled_patch16_224", VIT, TWO, {"linears_as_gemm": 1, "merge_views": 1}),
    # Its 1/√d, and LayerScale behind attention and MLP.
    "beit": Family(
        "beit_base_patch16_224",
        ONE,
        {"remove-dead-outputs": 6, "fold-normalization": 1},
        {
            "split_joint_projections": 1,
            "fold_scales": 3,
            "merge_transposes": 1,
            "linears_as_gemm": 6,
            "view_after_elementwise": 1,
            "merge_views": 5,
        },
    ),
    # Sines and cosines of the rotation are one constant; queries are turned before they are scaled.
    "eva02": Family(
        "eva02_tiny_patch14_224",
        ONE,
        {"remove-dead-outputs": 6, "fold-normalization": 1},
        {"split_constants": 1, "split_joint_projections": 1, "linears_as_gemm": 6, "merge_views": 4},
    ),
    # One of its three blocks has windows with a mask.
    "swin": Family(
        "swin_tiny_patch4_window7_224",
        SWIN,
        {"remove-dead-outputs": 17, "fold-normalization": 1},
        {
            "drop_empty_pads": 4,
            "split_joint_projections": 3,
            "fold_scales": 3,
            "merge_transposes": 3,
            "view_transposes": 2,
            "join_added_constants": 1,
            "linears_as_gemm": 18,
            "view_after_elementwise": 3,
            "merge_views": 23,
        },
    ),
    "convnext": Family(
        "convnext_atto",
        {"depths": (1, 1, 1, 1), "dims": (16, 16, 32, 32)},
        {"remove-dead-outputs": 9, "fold-normalization": 1},
        {"fold_scales": 4, "view_transposes": 2, "merge_views": 1},
        64,
    ),
    # Its queries are scaled once they are split from keys and values.
    "coatnet": Family(
        "test_coatnet",
        {"img_size": 64},
        {"remove-dead-outputs": 10, "fold-normalization": 1},
        {"fold_scales": 3},
        64,
    ),
    "resnet": Family("test_resnet", {}, {"fold-normalization": 1}, {}, 64),
    "efficientnet": Family("test_efficientnet", {}, {"fold-normalization": 1}, {}, 64),
    # Not of the twelve: talking heads, whose mixes have biases, before an attention of the class token.
    "cait": Family(
        "cait_xxs24_224",
        {**ONE, "depth_token_only": 1},
        {
            "remove-dead-outputs": 10,
            "fold-normalization": 1,
            "split-rank-one-bias": 1,
            "fold-attention-scale": 1,
            "fold-residual-scale": 2,
            "fold-layer-norm-affine": 2,
            "drop-row-constants": 2,
            "fold-value-bias": 1,
            "join-tokens": 1,
        },
        {"fold_scales": 3, "view_transposes": 2, "linears_as_gemm": 5, "view_after_elementwise": 1, "merge_views": 7},
    ),
    # Every layer of its tokens has a BatchNorm, and so has its classifier, before it.
    "levit": Family(
        "levit_128s",
        {"img_size": 128, "embed_dim": (16, 24, 32), "key_dim": 8, "depth": (1, 1, 1), "num_heads": (2, 2, 2)},
        {"remove-dead-outputs": 7, "fold-normalization": 1, "reparameterize": 28},
        {
            "merge_slices": 2,
            "fold_scales": 5,
            "linears_as_gemm": 22,
            "view_after_elementwise": 10,
            "merge_views": 14,
        },
        128,
    ),
    # Branches, in its stem too.
    "fastvit": Family(
        "fastvit_t8",
        {},
        {"remove-dead-outputs": 11, "fold-normalization": 1, "reparameterize": 40},
        {"fold_scales": 10},
        64,
    ),
    # A BatchNorm before each of its first convolutions, which are of pixels alone.
    "maxvit": Family(
        "test_maxvit",
        {"img_size": 64},
        {"remove-dead-outputs": 33, "fold-normalization": 1},
        {
            "fold_norms_ahead": 4,
            "fold_scales": 8,
            "view_transposes": 8,
            "linears_as_gemm": 32,
            "view_after_elementwise": 8,
            "merge_views": 50,
        },
        64,
    ),
    # Normalised queries and keys, here and in SwinV2; LayerScale behind a convolution of pixels.
    "xcit": Family(
        "xcit_nano_12_p16_224",
        {"img_size": 32, "embed_dim": 32, "depth": 1, "cls_attn_layers": 1, "num_heads": 2},
        {"remove-dead-outputs": 10, "fold-normalization": 1},
        {
            "drop_expands": 2,
            "split_joint_projections": 1,
            "fold_scales": 5,
            "view_transposes": 2,
            "linears_as_gemm": 11,
            "view_after_elementwise": 2,
            "merge_views": 12,
        },
    ),
    "swinv2": Family(
        "swinv2_tiny_window8_256",
        SWIN,
        {"remove-dead-outputs": 17, "fold-normalization": 1},
        {
            "drop_empty_pads": 4,
            "drop_expands": 6,
            "split_joint_projections": 3,
            "view_transposes": 2,
            "join_added_constants": 1,
            "linears_as_gemm": 18,
            "view_after_elementwise": 3,
            "merge_views": 23,
        },
    ),
    # With what was left in the twelve: windows that do not divide.
    "alternet": Family(
        "alternet_18_cifar", ALTERNET, {"remove-dead-outputs": 2, "fold-normalization": 1}, {"merge_slices": 1}
    ),
}


# Those before an activation or a padded convolution stay.
NORMS = {"alternet": 6, "coatnet": 2, "xcit": 1}


class Exported(NamedTuple):
    family: Family
    network: nn.Module
    graph: onnx.ModelProto
    rewrites: dict[str, int]
    folds: dict[str, int]


@pytest.fixture(scope="module")
def export_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Exported]:
    """Each network is exported once, in whatever order the tests ask for them."""

    @cache
    def export(name: str) -> Exported:
        family = FAMILIES[name]
        network = randomize_like_trained(timm.create_model(family.network, num_classes=10, **family.options)).eval()
        classifier = ImageClassifier(copy.deepcopy(network), family.preprocessing).eval()
        rewrites = applied_rewrites(classifier, ALL)
        with torch.no_grad():  # as the check of an export's rewrites does: LeViT then keeps its biases
            classifier(torch.zeros(1, family.size, family.size, 3, dtype=torch.uint8))
        folds: dict[str, int] = {}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(from_model, "simplify", lambda model: folds.update(simplify(model)))
            path = tmp_path_factory.mktemp(name) / "model.onnx"
            graph = onnx_from_model(classifier, family.preprocessing, (), path, check=False)
        return Exported(family, network, graph, rewrites, folds)

    return export


@pytest.fixture(params=FAMILIES)
def exported(request: pytest.FixtureRequest, export_of: Callable[[str], Exported]) -> Exported:
    return export_of(request.param)


def test_the_graph_equals_the_network(exported: Exported) -> None:
    """Against float64, at batches that were never traced; the bound is far below what images change."""
    size = exported.family.size
    images = np.random.default_rng(0).integers(0, 256, (3, size, size, 3), dtype=np.uint8)
    exact = ImageClassifier(copy.deepcopy(exported.network).double(), exported.family.preprocessing).eval()
    with torch.inference_mode():
        expected = exact(torch.from_numpy(images)).numpy()
    largest, difference = np.abs(expected).max(), np.ptp(expected, axis=0).max()
    for batch in (1, 3):
        found = logits_of(exported.graph, images, batch=batch)
        assert np.abs(found - expected).max() < min(1e-4 * largest, 0.01 * difference)


@pytest.mark.parametrize("name", FAMILIES)
def test_rewrites_and_folds_find_their_places(name: str, export_of: Callable[[str], Exported]) -> None:
    exported, family = export_of(name), FAMILIES[name]
    assert {rewrite: count for rewrite, count in exported.rewrites.items() if count} == family.rewrites
    assert {fold: count for fold, count in exported.folds.items() if count} == family.folds
    norms = sum(node.op_type == "BatchNormalization" for node in exported.graph.graph.node)
    assert norms == NORMS.get(name, 0)


@pytest.mark.parametrize("simplifier", SIMPLIFIERS)
def test_other_simplifiers_find_nothing_that_computes(simplifier: str, exported: Exported) -> None:
    """They may merge views, which cost nothing; a node that they add instead of another counts as removed too."""
    pytest.importorskip(simplifier, reason=f"{simplifier} is not installed")
    assert removed_by(simplifier, exported.graph) == {}


def test_the_count_can_fail(export_of: Callable[[str], Exported]) -> None:
    """A pad by nothing, which both simplifiers drop, put before the classifier's average."""
    pytest.importorskip("onnxslim", reason="onnxslim is not installed")
    graph = onnx.ModelProto()
    graph.CopyFrom(export_of("resnet").graph)
    index, mean = next((i, node) for i, node in enumerate(graph.graph.node) if node.op_type == "ReduceMean")
    graph.graph.initializer.append(numpy_helper.from_array(np.zeros(8, np.int64), "nothing"))
    pad = onnx.helper.make_node("Pad", [mean.input[0], "nothing"], ["padded"])
    mean.input[0] = "padded"
    graph.graph.node.insert(index, pad)
    assert removed_by("onnxslim", graph) == {"Pad": 1}
