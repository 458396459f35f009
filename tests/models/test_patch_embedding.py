"""DeepViT's convolutional embedding: what it is made of; test_blocks.py has its formula."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from vitx.core.errors import InputError
from vitx.models.patch_embedding import ConvPatchEmbed


def test_it_is_made_as_the_public_code_s() -> None:
    embed: Any = ConvPatchEmbed((16, 32), 8, 2, 12)
    norm = {"weight": (64,), "bias": (64,), "running_mean": (64,), "running_var": (64,), "num_batches_tracked": ()}
    expected = {
        "conv1.weight": (64, 2, 7, 7),
        "conv2.weight": (64, 64, 3, 3),
        "proj.weight": (12, 64, 4, 4),
        "proj.bias": (12,),
        **{f"bn{index}.{name}": shape for index in (1, 2) for name, shape in norm.items()},
    }
    assert {name: tuple(value.shape) for name, value in embed.state_dict().items()} == expected
    steps = [(each.stride, each.padding) for each in (embed.conv1, embed.conv2, embed.proj)]
    assert steps == [((2, 2), (3, 3)), ((1, 1), (1, 1)), ((4, 4), (0, 0))]
    assert (embed.img_size, embed.grid_size, embed.num_patches) == ((16, 32), (2, 4), 8)
    assert embed(torch.zeros(3, 2, 16, 32)).shape == (3, 8, 12)


def test_defaults_are_those_of_224_pixels() -> None:
    embed: Any = ConvPatchEmbed(device="meta")
    assert (embed.img_size, embed.num_patches) == ((224, 224), 196)
    assert tuple(embed.proj.weight.shape) == (768, 64, 8, 8)
    assert tuple(embed.conv1.weight.shape) == (64, 3, 7, 7)


def test_bias_norm_device_and_type_are_passed_on() -> None:
    norm = partial(nn.LayerNorm, eps=0.5)
    embed: Any = ConvPatchEmbed(16, 8, 3, 12, bias=False, norm_layer=norm, device="meta", dtype=torch.float64)
    assert embed.proj.bias is None
    assert (type(embed.norm), embed.norm.eps, embed.norm.normalized_shape) == (nn.LayerNorm, 0.5, (12,))
    tensors = {name: (value.device.type, value.dtype) for name, value in embed.state_dict().items()}
    counts = [tensors.pop(f"bn{index}.num_batches_tracked") for index in (1, 2)]
    assert {*tensors.values()} == {("meta", torch.float64)}
    assert counts == [("meta", torch.int64)] * 2
    assert isinstance(ConvPatchEmbed(16, 8, 3, 12).norm, nn.Identity)


def test_patches_are_counted_row_by_row() -> None:
    """A bright pixel moves the token of its patch more than any other."""
    torch.manual_seed(0)
    embed = ConvPatchEmbed(32, 8, 3, 12).eval()
    images = torch.zeros(1, 3, 32, 32)
    dark = embed(images)
    images[0, :, 12, 20] = 100.0  # row 1, column 2 of four by four patches
    assert int((embed(images) - dark).norm(dim=-1).argmax()) == 6


@pytest.mark.parametrize("size", [7, 1])
def test_an_odd_patch_is_refused(size: int) -> None:
    with pytest.raises(
        InputError, match=rf"^patch_size {size} of a CNN embedding must be even: its first convolution h"
    ):
        ConvPatchEmbed(14, size, 3, 12)
