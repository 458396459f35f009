"""Attention maps of our networks and of timm's; afterwards everything is as it was."""

from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F

from reference import randomize
from vitx.core.errors import InputError
from vitx.models import attention_maps, attention_std, fold_head_mix
from vitx.models.attention import ReAttention
from vitx.models.head_mix import mix_heads

VIT: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
NETWORKS: dict[str, tuple[dict[str, Any], int, int]] = {
    "deit_tiny_12": (VIT, 32, 2),
    "deit_tiny_12_talking": (VIT, 32, 2),
    "deepvit_16b": (VIT, 32, 2),
    "alternet_18_cifar": ({"head_dim": 8}, 32, 3),
    "vit_tiny_patch16_224": (VIT, 32, 2),
    "deit_tiny_distilled_patch16_224": (VIT, 32, 2),
    "cait_xxs24_224": ({**VIT, "depth": 2}, 32, 4),
    "swin_tiny_patch4_window7_224": ({"embed_dim": 24, "depths": (1, 1, 1, 1), "num_heads": (1, 2, 3, 4)}, 224, 4),
    "pit_ti_224": ({}, 224, 12),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_maps_of_every_family(name: str) -> None:
    kwargs, size, layers = NETWORKS[name]
    model = timm.create_model(name, **kwargs).eval()
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    hooks_before = sum(len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules())
    with torch.no_grad():
        before = model(images)
        with attention_maps(model) as maps:
            inside = model(images)
        after = model(images)
    assert len(maps) == layers
    for found in maps.values():
        torch.testing.assert_close(found.sum(-1), torch.ones_like(found.sum(-1)))
        assert found.min() >= 0
    torch.testing.assert_close(inside, before, atol=1e-4, rtol=1e-4)
    assert torch.equal(after, before), "the fused path was not restored"
    assert hooks_before == sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())
    assert not any("after_softmax" in vars(module) for module in model.modules())


def test_restored_after_an_error() -> None:
    model: Any = timm.create_model("deit_tiny_12", **VIT).eval()
    with pytest.raises(RuntimeError, match="stop"), attention_maps(model):
        raise RuntimeError("stop")
    assert all(block.attn.fused_attn for block in model.blocks)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_mixed_maps_meet_v() -> None:
    model = randomize(timm.create_model("deepvit_16b", **VIT)).eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        with attention_maps(model) as softmax:
            model(images)
        with attention_maps(model, stage="mixed") as mixed:
            model(images)
    for name, maps in softmax.items():
        attention = model.get_submodule(name)
        assert isinstance(attention, ReAttention)
        torch.testing.assert_close(mixed[name], mix_heads(maps, *fold_head_mix(attention)), atol=1e-4, rtol=1e-4)


def test_reduction_keeps_no_map() -> None:
    model = timm.create_model("deepvit_16b", **VIT).eval()
    with torch.no_grad(), attention_maps(model, of=attention_std) as spread:
        model(torch.randn(2, 3, 32, 32))
    assert [value.shape for value in spread.values()] == [torch.Size([])] * 2


def test_the_maps_are_the_real_ones() -> None:
    model: Any = randomize(timm.create_model("deit_tiny_12", **VIT)).eval()
    block = model.blocks[0]
    images = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        with attention_maps(model) as maps:
            model(images)
        tokens = block.norm1(model._pos_embed(model.patch_embed(images)))
        q, k, v = block.attn.qkv(tokens).view(1, 17, 3, 3, 8).permute(2, 0, 3, 1, 4)
        torch.testing.assert_close(maps["blocks.0.attn"] @ v, F.scaled_dot_product_attention(q, k, v))


def test_a_network_without_attention_says_so() -> None:
    with (
        pytest.raises(InputError, match="ResNet has no attention whose maps can be observed"),
        attention_maps(timm.create_model("resnet18")),
    ):
        pass
