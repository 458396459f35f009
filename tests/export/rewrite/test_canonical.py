"""CaiT's blocks in canonical form, and attention as the one node that ONNX has for it."""

from typing import Any

import pytest
import timm
import torch
from torch import nn

from reference import randomize
from vitx.core.preprocess import Preprocessing
from vitx.export.rewrite.canonical import ExportBlock, canonical_blocks, fixed_tokens
from vitx.export.rewrite.rewrites import ImageClassifier
from vitx.models import VisionTransformer

SMALL: dict[str, Any] = {"img_size": 8, "patch_size": 4, "embed_dim": 12, "depth": 2, "num_heads": 3, "num_classes": 4}


@pytest.mark.parametrize("name", ["cait_xxs24_224", "attnscale_cait_s24_224", "featscale_cait_s24_224"])
def test_the_blocks_of_cait_before_its_class_attention_compute_the_same(name: str) -> None:
    model: Any = timm.create_model(name, **SMALL, depth_token_only=1, qkv_bias=True)
    randomize(model.double()).eval()
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = ImageClassifier(model, Preprocessing(image_size=8))
    assert fixed_tokens(model) == fixed_tokens(whole) == 4
    mixes = [block.attn.proj_l for block in model.blocks]
    with torch.no_grad():
        expected = model(images)
        found = canonical_blocks(model)
        torch.testing.assert_close(model(images), expected, rtol=1e-10, atol=1e-10)
    assert found == list(model.blocks)
    assert not any(isinstance(block, ExportBlock) for block in model.blocks_token_only)
    for block, mix in zip(found, mixes, strict=True):
        before: Any = block.attn.before
        assert torch.equal(before.weight_HH, mix.weight)
        assert torch.equal(before.bias_H, mix.bias)


def test_a_network_that_only_holds_a_cait_keeps_the_blocks_that_need_the_number_of_tokens() -> None:
    small = {**SMALL, "depth_token_only": 1}
    for name, replaced in (("cait_xxs24_224", 2), ("attnscale_cait_s24_224", 0)):
        around = nn.Sequential(timm.create_model(name, **small))
        assert fixed_tokens(around) is None
        assert len(canonical_blocks(around)) == replaced, name


@pytest.mark.parametrize("attention", ["plain", "attn-scale", "neutreno"])
def test_the_one_node_of_attention_computes_the_two_products(attention: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = randomize(VisionTransformer(**SMALL, attention=attention).double()).eval()
    attn: Any = canonical_blocks(model)[0].attn
    x = torch.randn(2, 5, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = attn(x, 5)
        nodes: list[tuple[int, ...]] = []
        whole = torch.onnx.ops.attention

        def attention_node(query: Any, *rest: Any, **options: Any) -> Any:
            nodes.append(tuple(query.shape))
            return whole(query, *rest, **options)

        monkeypatch.setattr(torch.onnx.ops, "attention", attention_node)
        monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
        torch.testing.assert_close(attn(x, 5), expected, rtol=1e-10, atol=1e-10)
        assert nodes == []
        attn.fused = True
        torch.testing.assert_close(attn(x, 5), expected, rtol=1e-10, atol=1e-10)
    assert nodes == [(2, 5, 12)]
