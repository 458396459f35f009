"""Means a layer over batches of different sizes, by hand."""

from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import vitx.models  # noqa: F401  # registers deit_digits
from vitx.models import attention_std, token_similarity
from vitx.models.attention_maps import attention_maps
from vitx.models.layer_metrics import LayerMeans, layer_metrics, tokens_before_patches


def test_a_mean_counts_images_and_not_batches() -> None:
    means = LayerMeans()
    assert means.means() == {}
    for layer, value, images in (("b", 1.0, 3), ("a", 5.0, 1), ("b", 2.0, 1)):
        means.add(layer, value, images)
    assert means.means() == {"b": 1.25, "a": 5.0}
    assert list(means.means()) == ["b", "a"]


class Tokens(nn.Module):
    """A network whose blocks give the tokens they are made with."""

    def __init__(self, *tokens: Tensor, prefix: int = 1) -> None:
        super().__init__()
        self.num_prefix_tokens = prefix
        self.blocks = nn.ModuleList(nn.Identity() for _ in tokens)
        self.tokens = tokens

    def forward(self, images: int) -> None:
        for block, tokens in zip(self.blocks, self.tokens, strict=True):
            block(tokens[:images])


def test_patches_alone_are_compared() -> None:
    prefix = torch.tensor([[[9.0, 9.0]], [[9.0, 9.0]]])
    same = torch.tensor([[[1.0, 0.0], [2.0, 0.0]], [[0.0, 1.0], [0.0, 3.0]]])
    mixed = torch.tensor([[[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [-1.0, 0.0]]])
    one_patch = same[:, :1]
    network = Tokens(*(torch.cat([prefix, each], 1) for each in (same, mixed, one_patch)), torch.ones(2, 3))
    with layer_metrics(network) as metrics:
        network(2)  # blocks.1: 0 and −1, a mean of −.5
        network(1)  # and 0 again
    assert metrics.cos_sim.means() == {"blocks.0": pytest.approx(1.0), "blocks.1": pytest.approx(-1 / 3)}
    assert metrics.attention_std.means() == {}
    assert not any(block._forward_hooks for block in network.blocks)


def test_blocks_before_the_class_token_have_patches_alone() -> None:
    """CaiT's, XCiT's and ConViT's: no patch is taken for the class token that they get later."""
    patches = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]]])
    network = Tokens(patches, torch.cat([torch.ones(1, 1, 2), patches], 1))
    network.patch_embed = nn.Module()
    network.patch_embed.num_patches = 3  # type: ignore[assignment]
    with layer_metrics(network) as metrics:
        network(1)
    assert metrics.cos_sim.means() == {f"blocks.{index}": pytest.approx(1 / 3) for index in (0, 1)}


def test_blocks_that_give_two_streams_and_maps_of_one_key() -> None:
    """TNT's blocks, whose output is no tensor; at 32 px the last windows of some networks have one key."""
    network = timm.create_model("tnt_s_patch16_224", img_size=32, depth=2, num_classes=10).eval()
    with layer_metrics(network) as metrics, torch.inference_mode():
        network(torch.zeros(2, 3, 32, 32))
    assert metrics.cos_sim.means() == {}
    assert len(metrics.attention_std.means()) == 4
    assert attention_std(torch.ones(2, 3, 1, 1)).item() == 0


def test_two_patches_without_a_prefix_are_enough() -> None:
    network = Tokens(torch.tensor([[[1.0, 0.0], [1.0, 0.0]]]), prefix=0)
    del network.num_prefix_tokens
    with layer_metrics(network) as metrics:
        network(1)
    assert metrics.cos_sim.means() == {"blocks.0": pytest.approx(1.0)}


def test_a_transformers_maps_are_measured_in_the_same_pass() -> None:
    torch.manual_seed(0)
    model: Any = timm.create_model("deit_digits", depth=2).eval()
    images = torch.randn(3, 3, 32, 32)
    with torch.no_grad(), layer_metrics(model) as metrics:
        model(images[:2])
        model(images[2:])
    stds: dict[str, float] = {}
    with torch.no_grad(), attention_maps(model, of=lambda maps: maps) as maps:
        model(images)
        stds = {layer: attention_std(each).item() for layer, each in maps.items()}
    assert metrics.attention_std.means() == pytest.approx(stds, rel=1e-5)
    assert list(metrics.attention_std.means()) == ["blocks.0.attn", "blocks.1.attn"]
    with torch.no_grad():
        tokens = model.blocks[0](model._pos_embed(model.patch_embed(images)))[:, 1:]
    assert metrics.cos_sim.means()["blocks.0"] == pytest.approx(token_similarity(tokens).item(), rel=1e-5)
    assert not any(module._forward_hooks for module in model.modules())


def test_other_networks_have_no_layers() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    with layer_metrics(model) as metrics:
        model(torch.zeros(1, 2))
    assert (metrics.cos_sim.means(), metrics.attention_std.means()) == ({}, {})


def test_each_branch_of_crossvit_has_a_class_token_before_its_patches() -> None:
    model: Any = timm.create_model("crossvit_tiny_240", num_classes=10).eval()
    for patches, width in ((400, 96), (196, 192)):
        assert tokens_before_patches(model, torch.zeros(1, 1 + patches, width)) == 1
