"""Every block against its plain formula, written out as matrix products, in float64; and its gradients."""

import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from reference import randomize
from vitx.core.errors import InputError
from vitx.models import PlainAttention, ReAttention, TalkingHeadsAttention, VisionTransformer
from vitx.models.alternet import AttentionUnit, BasicUnit, BottleneckUnit
from vitx.models.patch_embedding import ConvPatchEmbed


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def layer_norm(x: Tensor, norm: nn.LayerNorm) -> Any:
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + norm.eps) * norm.weight + norm.bias


def batch_norm(x: Tensor, norm: Any) -> Any:
    """Evaluation mode, over channels at 1."""
    shape = (1, -1, 1, 1)
    scale = norm.weight / torch.sqrt(norm.running_var + norm.eps)
    return (x - norm.running_mean.view(shape)) * scale.view(shape) + norm.bias.view(shape)


def attention(layer: Any, x: Tensor) -> Any:
    """softmax(QKᵀ/√d), the mixes before and after it, V, and the output projection."""
    B, N, D = x.shape
    H = layer.num_heads
    q, k, v = (
        part.reshape(B, N, H, D // H).transpose(1, 2)
        for part in (x @ layer.qkv.weight.T + layer.qkv.bias).chunk(3, dim=-1)
    )
    scores = torch.einsum("bhik,bhjk->bhij", q, k) / (D // H) ** 0.5
    if isinstance(layer, TalkingHeadsAttention):
        scores = torch.einsum("hg,bgij->bhij", layer.proj_pre.weight, scores) + layer.proj_pre.bias.view(-1, 1, 1)
    maps = scores.exp() / scores.exp().sum(-1, keepdim=True)
    if isinstance(layer, TalkingHeadsAttention):
        maps = torch.einsum("hg,bgij->bhij", layer.proj_post.weight, maps) + layer.proj_post.bias.view(-1, 1, 1)
    if isinstance(layer, ReAttention):
        assert layer.reatten_matrix.bias is not None
        maps = torch.einsum("hg,bgij->bhij", layer.reatten_matrix.weight[:, :, 0, 0], maps)
        maps = maps + layer.reatten_matrix.bias.view(-1, 1, 1)
        if isinstance(layer.var_norm, nn.LayerNorm):
            maps = layer_norm(maps.movedim(1, -1), layer.var_norm).movedim(-1, 1)
        elif isinstance(layer.var_norm, nn.BatchNorm2d):
            maps = batch_norm(maps, layer.var_norm)
        maps = maps * layer.reatten_scale
    out = torch.einsum("bhij,bhjk->bihk", maps, v).reshape(B, N, D)
    return out @ layer.proj.weight.T + layer.proj.bias


DROPS: dict[str, Any] = {"attn_drop": 0.4, "proj_drop": 0.3}  # of training alone
LAYERS: dict[str, nn.Module] = {
    "plain": PlainAttention(12, 3, **DROPS),
    "talking-heads": TalkingHeadsAttention(12, 3, mix_bias=True, **DROPS),
    "re-attention": ReAttention(12, 3, reatten_scale=0.7, **DROPS),
    "re-attention-layer": ReAttention(12, 3, norm="layer", reatten_scale=0.7, **DROPS),
    "re-attention-none": ReAttention(12, 3, norm="none", **DROPS),
}


@pytest.mark.parametrize("name", LAYERS)
def test_attention_equals_its_formula(name: str) -> None:
    layer = randomize(LAYERS[name].double()).eval()
    x = random(2, 5, 12)
    torch.testing.assert_close(layer(x), attention(layer, x), atol=1e-10, rtol=0)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", [PlainAttention, TalkingHeadsAttention])
def test_training_drops_maps_and_outputs_at_their_own_rates(kind: Any, fused: bool) -> None:
    """Dropped maps are scaled up for what is left, so their mean over many draws is the output of evaluation."""
    x = random(1, 5, 12)
    layer: Any = randomize(kind(12, 3, attn_drop=0.4).double()).train()
    layer.fused_attn = fused
    torch.manual_seed(0)
    outputs = layer(x.expand(3000, -1, -1))
    assert outputs.std(0).min() > 1e-3
    allowed = 5 * outputs.std(0).max().item() / 3000**0.5
    torch.testing.assert_close(outputs.mean(0), layer.eval()(x)[0], rtol=0, atol=allowed)
    dropped = randomize(kind(12, 3, proj_drop=0.3).double()).train()(x.repeat(100, 1, 1))
    assert (dropped == 0).double().mean().item() == pytest.approx(0.3, abs=0.02)


@settings(max_examples=25)
@given(
    heads=st.sampled_from([1, 2, 3, 4, 6, 12]),
    width=st.integers(1, 5),
    tokens=st.integers(1, 19),
    seed=st.integers(0, 9),
)
def test_re_attention_equals_its_formula_at_any_size(heads: int, width: int, tokens: int, seed: int) -> None:
    layer = randomize(ReAttention(heads * width, heads, reatten_scale=0.5).double(), seed).eval()
    x = random(2, tokens, heads * width, seed=seed)
    expected = attention(layer, x)
    torch.testing.assert_close(layer(x), expected, atol=1e-10 * max(1.0, expected.abs().max().item()), rtol=0)


@settings(max_examples=25)
@given(heads=st.integers(1, 8), tokens=st.integers(2, 19), seed=st.integers(0, 9))
def test_training_rows_sum_to_tokens_times_beta(heads: int, tokens: int, seed: int) -> None:
    """The mean is taken out of every entry, so a row keeps N·β_h on average over the batch and the rows."""
    layer: Any = randomize(ReAttention(heads * 2, heads).double(), seed).train()
    maps = random(3, heads, tokens, tokens, seed=seed).softmax(-1)
    sums = layer.after_softmax(maps).sum(-1)
    expected = tokens * layer.var_norm.bias.view(1, -1, 1).expand_as(sums)
    torch.testing.assert_close(sums, expected, atol=1e-7, rtol=1e-7)


def mlp(block: Any, x: Tensor) -> Any:
    hidden = x @ block.mlp.fc1.weight.T + block.mlp.fc1.bias
    hidden = hidden * (1 + torch.erf(hidden / 2**0.5)) / 2
    return hidden @ block.mlp.fc2.weight.T + block.mlp.fc2.bias


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("kind", ["plain", "talking-heads", "re-attention"])
def test_a_transformer_block_equals_its_formula(kind: str, scale: float) -> None:
    options: dict[str, Any] = {"attention": kind, "residual_scale": scale, "talking_heads_bias": True}
    model = VisionTransformer(img_size=8, patch_size=4, embed_dim=12, depth=1, num_heads=3, num_classes=2, **options)
    network: Any = randomize(model.double()).eval()
    block = network.blocks[0]
    x = random(2, 5, 12)
    middle = x + attention(block.attn, layer_norm(scale * x, block.norm1)) / scale
    expected = middle + mlp(block, layer_norm(scale * middle, block.norm2)) / scale
    torch.testing.assert_close(block(x), expected, atol=1e-10, rtol=0)
    assert torch.autograd.gradcheck(block, (random(1, 3, 12).requires_grad_(),))


def test_the_convolutional_embedding_equals_its_formula() -> None:
    embed: Any = randomize(ConvPatchEmbed(16, 8, 3, 12).double()).eval()
    x = random(2, 3, 16, 16)
    stem = F.conv2d(x, embed.conv1.weight, stride=2, padding=3)
    stem = batch_norm(stem, embed.bn1).clamp_min(0)
    stem = batch_norm(F.conv2d(stem, embed.conv2.weight, padding=1), embed.bn2).clamp_min(0)
    patches = stem.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
    expected = patches @ embed.proj.weight.flatten(1).T + embed.proj.bias
    torch.testing.assert_close(embed(x), expected, atol=1e-10, rtol=0)


def pre_activation(unit: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """The activated input and the skip: the raw input, or a projection of the activated one."""
    activated = batch_norm(x, unit.norm)
    activated = F.gelu(activated) if isinstance(unit, AttentionUnit) else activated.clamp_min(0)
    if unit.shortcut is None:
        return activated, x
    return activated, F.conv2d(activated, unit.shortcut.weight, stride=unit.shortcut.stride)


def conv(sequence: Any, x: Tensor) -> Tensor:
    norm, _, convolution = sequence
    return F.conv2d(batch_norm(x, norm).clamp_min(0), convolution.weight, None, convolution.stride, convolution.padding)


@pytest.mark.parametrize(("dim", "stride"), [(4, 1), (6, 1), (4, 2)])
def test_a_basic_unit_equals_its_formula(dim: int, stride: int) -> None:
    unit: Any = randomize(BasicUnit(dim, 4, stride=stride, drop_path=0.0).double()).eval()
    x = random(2, dim, 6, 6)
    activated, skip = pre_activation(unit, x)
    expected = conv(unit.conv2, F.conv2d(activated, unit.conv1.weight, None, stride, 1)) + skip
    torch.testing.assert_close(unit(x), expected, atol=1e-10, rtol=0)
    assert torch.autograd.gradcheck(unit, (random(1, dim, 3, 3).requires_grad_(),))


@pytest.mark.parametrize(("dim", "stride"), [(8, 1), (6, 1), (8, 2)])
def test_a_bottleneck_unit_equals_its_formula(dim: int, stride: int) -> None:
    unit: Any = randomize(BottleneckUnit(dim, 2, stride=stride, drop_path=0.0).double()).eval()
    x = random(2, dim, 6, 6)
    activated, skip = pre_activation(unit, x)
    expected = conv(unit.conv3, conv(unit.conv2, F.conv2d(activated, unit.conv1.weight))) + skip
    torch.testing.assert_close(unit(x), expected, atol=1e-10, rtol=0)
    assert torch.autograd.gradcheck(unit, (random(1, dim, 3, 3).requires_grad_(),))


@pytest.mark.parametrize("dim", [8, 12])
def test_an_attention_unit_equals_its_formula(dim: int) -> None:
    """Its window attention has a slow formula of its own, in test_window_attention.py."""
    made = AttentionUnit(dim, 2, expansion=4, num_heads=2, head_dim=3, window_size=2, drop_path=0.0)
    unit: Any = randomize(made.double()).eval()
    x = random(2, dim, 4, 4)
    activated, skip = pre_activation(unit, x)
    expected = unit.attn(batch_norm(F.conv2d(activated, unit.conv.weight), unit.inner_norm)) + skip
    torch.testing.assert_close(unit(x), expected, atol=1e-10, rtol=0)
    assert torch.autograd.gradcheck(unit, (random(1, dim, 2, 2).requires_grad_(),))


def test_an_embedding_by_convolutions_is_the_public_code_s() -> None:
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


def test_an_embedding_s_defaults_are_those_of_224_pixels() -> None:
    embed: Any = ConvPatchEmbed(device="meta")
    assert (embed.img_size, embed.num_patches) == ((224, 224), 196)
    assert tuple(embed.proj.weight.shape) == (768, 64, 8, 8)
    assert tuple(embed.conv1.weight.shape) == (64, 3, 7, 7)


def test_bias_norm_device_and_type_reach_the_embedding() -> None:
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


@pytest.mark.parametrize("size", [7, 1, (8, 7)])
def test_an_odd_patch_is_refused(size: int | tuple[int, int]) -> None:
    with pytest.raises(
        InputError, match=rf"^patch_size {re.escape(str(size))} of a CNN embedding must be even: its first convolution"
    ):
        ConvPatchEmbed(14, size, 3, 12)


@pytest.mark.parametrize(
    ("dynamic", "size", "message"),
    [
        (False, (17, 16), r"images of \(17, 16\) px for a network of \(16, 16\) px"),
        (False, (16, 18), r"images of \(16, 18\) px for a network of \(16, 16\) px"),
        (True, (20, 24), r"images of \(20, 24\) px are not divisible by patch_size \(8, 4\)"),
        (True, (24, 22), r"images of \(24, 22\) px are not divisible by patch_size \(8, 4\)"),
    ],
)
def test_an_embedding_by_convolutions_cuts_no_image(dynamic: bool, size: tuple[int, int], message: str) -> None:
    """As timm's: the convolutions themselves would leave out the last rows and columns."""
    options: dict[str, Any] = {"img_size": 16, "patch_size": (8, 4), "embed_dim": 12, "strict_img_size": not dynamic}
    embed = randomize(ConvPatchEmbed(**options)).eval()
    images = torch.rand(2, 3, *size)
    with pytest.raises(InputError, match=message):
        embed(images)
    padding = ConvPatchEmbed(**options | {"strict_img_size": False}, dynamic_img_pad=True).eval()
    padding.load_state_dict(embed.state_dict())
    whole = F.pad(images, (0, -size[1] % 4, 0, -size[0] % 8))
    torch.testing.assert_close(padding(images), padding(whole))
    assert padding(images).shape == (2, -(-size[0] // 8) * -(-size[1] // 4), 12)


def test_an_embedding_by_convolutions_may_keep_the_map() -> None:
    """timm's `dynamic_img_size` wants (B, rows, columns, D), of which its positions are then interpolated."""
    options: dict[str, Any] = {"img_size": 16, "patch_size": (8, 4), "embed_dim": 12}
    embed = randomize(ConvPatchEmbed(**options)).eval()
    mapped = ConvPatchEmbed(**options, flatten=False).eval()
    mapped.load_state_dict(embed.state_dict())
    images = torch.rand(2, 3, 16, 16)
    torch.testing.assert_close(mapped(images), embed(images).reshape(2, 2, 4, 12))


def test_an_embedding_by_convolutions_keeps_its_patch_size() -> None:
    embed = ConvPatchEmbed(16, 8, 3, 12)
    with pytest.raises(InputError, match=r"^patch_size 4: a CNN embedding keeps its own, \(8, 8\)$"):
        embed.set_input_size(patch_size=4)
    embed.set_input_size((32, 16), 8)
    assert embed(torch.zeros(2, 3, 32, 16)).shape == (2, 8, 12)
