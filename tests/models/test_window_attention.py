"""Windowed and local attention against slow formulas."""

import pytest
import torch
from torch import Tensor

from reference import randomize
from vitx.core.errors import InputError
from vitx.models import LocalAttention, PlainAttention, WindowAttention, attention_maps
from vitx.models.alternet import AlterNet, attention_sequence


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
        assert maps[""].shape == (1, 2, 16, 9)
        torch.testing.assert_close(maps[""].sum(dim=-1), torch.ones(1, 2, 16))


def test_local_attention_gradients() -> None:
    attention = LocalAttention(4, 2).double()
    x = torch.randn(1, 9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    assert torch.autograd.gradcheck(attention, (x,))


def test_impossible_arguments_are_named() -> None:
    with pytest.raises(InputError, match="kernel_size 4 of local attention must be odd"):
        LocalAttention(6, 2, kernel_size=4)
    with pytest.raises(InputError, match="17 is no square"):
        LocalAttention(6, 2)(torch.zeros(1, 17, 6))
    with pytest.raises(InputError, match="stage 1 has 3 units and 2 of attention"):
        AlterNet(depths=(2, 3, 2, 2), attention_depths=(0, 2, 0, 0))


def test_stages_end_in_attention() -> None:
    assert attention_sequence(6, 3) == [False, True] * 3
    assert attention_sequence(23, 3) == [False] * 17 + [False, True] * 3
    assert attention_sequence(3, 0) == [False] * 3
