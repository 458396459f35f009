"""Windowed and local attention against slow formulas."""

from typing import Any

import pytest
import torch
from torch import Tensor

from reference import randomize
from vitx.core.errors import InputError
from vitx.models import LocalAttention, PlainAttention, VisionTransformer, WindowAttention, attention_maps
from vitx.models.alternet import AlterNet, attention_sequence
from vitx.models.outputs import pooled_tokens
from vitx.models.window_attention import _from_windows, _padding_mask, _to_windows, relative_position_index


def slow_window_attention(attention: WindowAttention, x: Tensor) -> Tensor:
    """One window, one head, one query at a time."""
    p, H, K = attention.window_size, attention.num_heads, attention.head_dim
    B, _, h, w = x.shape
    qkv = attention.qkv(x).view(B, 3, H, K, h, w)
    out = torch.zeros(B, H * K, h, w, dtype=x.dtype)
    for b in range(B):
        for head in range(H):
            for row in range(h):
                for column in range(w):
                    keys = [
                        (i, j)
                        for i in range(row // p * p, min(row // p * p + p, h))
                        for j in range(column // p * p, min(column // p * p + p, w))
                    ]
                    q = qkv[b, 0, head, :, row, column]
                    scores = torch.stack(
                        [
                            q @ qkv[b, 1, head, :, i, j] / K**0.5
                            + attention.relative_position[i - row + p - 1, j - column + p - 1]
                            for i, j in keys
                        ]
                    )
                    values = torch.stack([qkv[b, 2, head, :, i, j] for i, j in keys])
                    out[b, head * K : (head + 1) * K, row, column] = scores.softmax(0) @ values
    result: Tensor = attention.proj(out)
    return result


@pytest.mark.parametrize("size", [(4, 4), (3, 5), (2, 1)])
@pytest.mark.parametrize("fused", [True, False])
def test_window_attention_equals_the_slow_formula(size: tuple[int, int], fused: bool) -> None:
    """Sizes that the window does not divide are padded, and the padding is masked."""
    attention = WindowAttention(6, 5, num_heads=2, head_dim=3, window_size=2).double()
    randomize(attention)
    attention.fused_attn = fused
    x = torch.randn(2, 6, *size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(attention(x), slow_window_attention(attention, x), atol=1e-10, rtol=0)


def test_padded_keys_are_masked_for_every_window() -> None:
    """A 2×3 map in windows of 2: the second window has its right column outside."""
    mask = _padding_mask(2, 3, 2, 2, torch.zeros((), dtype=torch.float64))
    assert (mask.shape, mask.dtype) == ((4, 1, 1, 4), torch.float64)
    assert mask.squeeze().tolist() == [[0, 0, 0, 0], [0, -1e4, 0, -1e4]] * 2
    below = _padding_mask(1, 2, 2, 1, torch.zeros(()))
    assert below.squeeze().tolist() == [0, 0, -1e4, -1e4]


def test_windows_are_read_row_by_row_and_put_back() -> None:
    x = torch.arange(2 * 6 * 4 * 6).view(2, 6, 4, 6)
    windows = _to_windows(x, 2, 3)
    assert windows.shape == (2 * 2 * 3, 3, 4, 2)
    for image, row, column, head, channel, inside in ((0, 0, 0, 0, 0, 1), (1, 1, 2, 2, 1, 2), (0, 1, 0, 1, 0, 3)):
        found = windows[(image * 2 + row) * 3 + column, head, inside, channel]
        assert found == x[image, head * 2 + channel, row * 2 + inside // 2, column * 2 + inside % 2]
    assert torch.equal(_from_windows(windows, 2, 4, 6), x)


def test_the_parts_of_a_window_attention() -> None:
    layer = WindowAttention(6, 5, num_heads=2)
    assert (layer.head_dim, layer.window_size, layer.scale, layer.fused_attn) == (64, 7, 0.125, True)
    assert layer.relative_position.shape == (13, 13)
    assert layer.relative_position.std().item() == pytest.approx(0.02, rel=0.3)
    assert (layer.qkv.weight.shape, layer.qkv.bias) == ((384, 6, 1, 1), None)
    assert layer.proj.weight.shape == (5, 128, 1, 1)
    assert layer.proj.bias is not None
    assert "position_index" not in layer.state_dict()
    for parameter in WindowAttention(6, 5, num_heads=2, dtype=torch.float64).parameters():
        assert parameter.dtype == torch.float64
    on_meta = WindowAttention(6, 5, num_heads=2, device="meta")
    assert {parameter.device.type for parameter in on_meta.parameters()} == {"meta"}
    index = relative_position_index(3)
    assert (index.dtype, index.shape) == (torch.int64, (9, 9))
    assert [index[i, j].item() for i, j in ((0, 0), (0, 8), (8, 0), (1, 3))] == [12, 24, 0, 16]


def test_window_attention_gradients() -> None:
    attention = WindowAttention(4, 3, num_heads=2, head_dim=2, window_size=2).double()
    x = torch.randn(1, 4, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    assert torch.autograd.gradcheck(attention, (x,))


def slow_local_attention(attention: LocalAttention, x: Tensor) -> Tensor:
    B, N, D = x.shape
    side, H, K, reach = round(N**0.5), attention.num_heads, attention.head_dim, attention.kernel_size // 2
    q, k, v = attention.qkv(x).view(B, N, 3, H, K).unbind(2)
    out = torch.zeros(B, N, H, K, dtype=x.dtype)
    for b in range(B):
        for head in range(H):
            for i in range(N):
                near = [
                    j for j in range(N) if abs(i // side - j // side) <= reach and abs(i % side - j % side) <= reach
                ]
                scores = torch.stack([q[b, i, head] @ k[b, j, head] / K**0.5 for j in near])
                out[b, i, head] = scores.softmax(0) @ torch.stack([v[b, j, head] for j in near])
    result: Tensor = attention.proj(out.view(B, N, D))
    return result


@pytest.mark.parametrize("kernel_size", [1, 3, 5])
def test_local_attention_equals_the_slow_formula(kernel_size: int) -> None:
    attention = LocalAttention(6, 2, kernel_size=kernel_size).double()
    randomize(attention)
    x = torch.randn(2, 16, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(attention(x), slow_local_attention(attention, x), atol=1e-10, rtol=0)


def test_local_attention_over_everything_is_plain_attention() -> None:
    local, plain = LocalAttention(6, 2, kernel_size=7).double(), PlainAttention(6, 2).double()
    randomize(plain)
    local.load_state_dict(plain.state_dict())
    x = torch.randn(2, 16, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(local(x), plain(x), atol=1e-12, rtol=0)


def test_local_attention_does_not_mix_heads() -> None:
    attention = LocalAttention(6, 2)
    for stage in ("softmax", "mixed"):
        with attention_maps(attention, stage=stage) as maps:
            attention(torch.ones(1, 16, 6))
        assert [*maps] == [""]
        assert maps[""].shape == (1, 2, 16, 16)
        torch.testing.assert_close(maps[""].sum(dim=-1), torch.ones(1, 2, 16))


@pytest.mark.parametrize("kernel_size", [3, 7])
def test_maps_of_local_attention_have_a_column_for_each_token(kernel_size: int) -> None:
    """With their values they are its output; over everything they are those of plain attention."""
    local, plain = LocalAttention(6, 2, kernel_size=kernel_size).double(), PlainAttention(6, 2).double()
    randomize(plain)
    local.load_state_dict(plain.state_dict())
    x = torch.randn(2, 16, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with attention_maps(local) as of_local, attention_maps(plain) as of_plain:
        out = local(x)
        plain(x)
    values = local.split_heads(local.qkv(x))[2]
    torch.testing.assert_close(local.proj((of_local[""] @ values).transpose(1, 2).reshape(x.shape)), out)
    if kernel_size == 7:
        torch.testing.assert_close(of_local[""], of_plain[""])


def test_local_attention_has_no_rollout_where_a_neighbourhood_has_as_many_places_as_there_are_tokens() -> None:
    """49 of each: a map over neighbours was taken for one over tokens."""
    size: dict[str, Any] = {"img_size": 28, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3}
    network = VisionTransformer(**size, attention="local", local_kernel_size=7, global_pool="avg", num_classes=5)
    with pytest.raises(InputError, match="has no attention and no rollout"):
        pooled_tokens(network)


def test_local_attention_gradients() -> None:
    attention = LocalAttention(4, 2).double()
    x = torch.randn(1, 9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    assert torch.autograd.gradcheck(attention, (x,))


def test_impossible_arguments_are_named() -> None:
    with pytest.raises(InputError, match="kernel_size 4 of local attention must be odd"):
        LocalAttention(6, 2, kernel_size=4)
    with pytest.raises(InputError, match="17 is no square"):
        LocalAttention(6, 2)(torch.zeros(1, 17, 6))
    size: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
    with pytest.raises(InputError, match=r"^attention 'local' needs a map of patches .*: set global_pool=avg$"):
        VisionTransformer(**size, attention=["plain", "local"])


def test_a_network_of_local_attention_sees_all_when_its_neighbourhood_does() -> None:
    size: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3}
    plain = randomize(VisionTransformer(**size, global_pool="avg", num_classes=5)).eval()
    images = torch.randn(2, 3, 32, 32)
    for kernel_size, same in ((3, False), (7, True)):
        local = VisionTransformer(
            **size, global_pool="avg", num_classes=5, attention="local", local_kernel_size=kernel_size
        ).eval()
        local.load_state_dict(plain.state_dict())
        assert torch.allclose(local(images), plain(images), atol=1e-5) == same
    with pytest.raises(InputError, match="stage 1 has 3 units and 2 of attention"):
        AlterNet(depths=(2, 3, 2, 2), attention_depths=(0, 2, 0, 0))


def test_stages_end_in_attention() -> None:
    assert attention_sequence(6, 3) == [False, True] * 3
    assert attention_sequence(23, 3) == [False] * 17 + [False, True] * 3
    assert attention_sequence(3, 0) == [False] * 3
