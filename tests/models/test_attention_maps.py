"""Attention maps of our networks and of timm's; afterwards everything is as it was."""

from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

from reference import randomize
from vitx.core.errors import InputError
from vitx.models import attention_maps, attention_std, fold_head_mix
from vitx.models.attention import ReAttention
from vitx.models.attention_maps import attention_layers
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


def both_stages(model: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        with attention_maps(model) as softmax:
            model(images)
        with attention_maps(model, stage="mixed") as mixed:
            model(images)
    return softmax, mixed


def test_mixed_maps_meet_v() -> None:
    model = randomize(timm.create_model("deepvit_16b", **VIT)).eval()
    softmax, mixed = both_stages(model)
    for name, maps in softmax.items():
        attention = model.get_submodule(name)
        assert isinstance(attention, ReAttention)
        torch.testing.assert_close(mixed[name], mix_heads(maps, *fold_head_mix(attention)), atol=1e-4, rtol=1e-4)


def test_the_maps_of_attn_scale_meet_v() -> None:
    model: Any = randomize(timm.create_model("attnscale_small_12", **VIT)).eval()
    softmax, mixed = both_stages(model)
    for name, maps in softmax.items():
        scale = 1 + model.get_submodule(name).lamb.view(-1, 1, 1)
        torch.testing.assert_close(mixed[name], scale * maps + (1 - scale) / maps.shape[-1])
        torch.testing.assert_close(mixed[name].sum(-1), torch.ones_like(maps[..., 0]))


def test_a_layer_that_was_not_fused_stays_so() -> None:
    model: Any = timm.create_model("deit_tiny_12", **VIT).eval()
    model.blocks[1].attn.fused_attn = False
    with attention_maps(model):
        assert not any(block.attn.fused_attn for block in model.blocks)
    assert [block.attn.fused_attn for block in model.blocks] == [True, False]


def test_layers_are_told_by_their_dropout() -> None:
    model = timm.create_model("deit_tiny_12", **VIT)
    assert [*attention_layers(model)] == ["blocks.0.attn", "blocks.1.attn"]
    model.get_submodule("blocks.0.attn").attn_drop = nn.Identity()
    assert [*attention_layers(model)] == ["blocks.1.attn"]


def test_maps_are_those_before_dropout() -> None:
    model = timm.create_model("deit_tiny_12", attn_drop_rate=0.9, **VIT).train()
    with torch.no_grad(), attention_maps(model) as maps:
        model(torch.randn(2, 3, 32, 32))
    for found in maps.values():
        torch.testing.assert_close(found.sum(-1), torch.ones_like(found.sum(-1)))


@pytest.mark.parametrize("name", ["cait_xxs24_224", "attnscale_cait_s24_224"])
@pytest.mark.parametrize("stage", ["softmax", "mixed"])
def test_both_stages_of_timms_talking_heads(name: str, stage: Any) -> None:
    """By its own formula: scores mixed over heads, softmax, mixed again; AttnScale changes what is not 1/N."""
    model: Any = randomize(timm.create_model(name, **VIT, depth_token_only=1)).eval()
    layer = model.blocks[0].attn
    seen: list[Any] = []
    layer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        with attention_maps(model, stage=stage) as maps:
            model(torch.randn(2, 3, 32, 32))
        B, N, D = seen[0].shape
        q, k, _ = layer.qkv(seen[0]).reshape(B, N, 3, 3, D // 3).permute(2, 0, 3, 1, 4)
        scores = torch.einsum("bhik,bhjk->bhij", q, k) * layer.scale
        expected = torch.einsum("hg,bgij->bhij", layer.proj_l.weight, scores) + layer.proj_l.bias.view(-1, 1, 1)
        expected = expected.softmax(-1)
        if stage == "mixed":
            expected = torch.einsum("hg,bgij->bhij", layer.proj_w.weight, expected) + layer.proj_w.bias.view(-1, 1, 1)
            if name.startswith("attnscale"):
                expected = 1 / N + (1 + layer.lamb.view(-1, 1, 1)) * (expected - 1 / N)
    torch.testing.assert_close(maps["blocks.0.attn"], expected, atol=1e-5, rtol=1e-5)


def test_a_factor_that_is_applied_to_v_is_in_the_mixed_maps() -> None:
    """Re-Attention's scale: V has fewer numbers than the maps."""
    model: Any = randomize(timm.create_model("deepvit_16b", **VIT, reatten_scale=0.25)).eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        with attention_maps(model, stage="mixed") as maps:
            model(images)
        scaled = maps["blocks.0.attn"]
        model.blocks[0].attn.value_scale = 1.0
        with attention_maps(model, stage="mixed") as maps:
            model(images)
    torch.testing.assert_close(scaled, maps["blocks.0.attn"] * 0.25, rtol=0, atol=0)


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
