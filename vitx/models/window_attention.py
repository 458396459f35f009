"""Attention over a neighbourhood of a feature map: windows (AlterNet) and k×k neighbourhoods (local MSA).

Shape letters: B batch, C channels, h×w the feature map, p the window's side, H heads, K head width; in LocalAttention
also N = S² tokens, D width, W = k² neighbours of a token.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitx.core.errors import InputError
from vitx.models.attention import HeadMixAttention

# Added to the scores of masked keys: exp(-10,000) is zero in every type, and unlike -inf it is a constant that a graph
# of lower precision can hold.
MASKED = -1e4


class WindowAttention(nn.Module):
    """Multi-head self-attention in p×p windows with relative positions: (B, C, h, w) → (B, C', h, w).

    The MSA of AlterNet (Park & Kim, arXiv 2202.06709): 1×1 projections, without bias for queries, keys and values, with
    bias for the output; one table of relative positions for all heads. A map that the window does not divide is padded
    below and to the right, and padded keys are masked.
    """

    position_index: Tensor

    def __init__(
        self,
        dim: int,
        dim_out: int,
        *,
        num_heads: int,
        head_dim: int = 64,
        window_size: int = 7,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self.num_heads, self.head_dim, self.window_size = num_heads, head_dim, window_size
        self.scale = head_dim**-0.5
        self.fused_attn = True
        self.qkv = nn.Conv2d(dim, 3 * num_heads * head_dim, 1, bias=False, **factory)
        self.attn_drop = nn.Dropout(0.0)
        self.proj = nn.Conv2d(num_heads * head_dim, dim_out, 1, **factory)
        self.relative_position = nn.Parameter(torch.empty(2 * window_size - 1, 2 * window_size - 1, **factory))
        self.register_buffer("position_index", relative_position_index(window_size), persistent=False)
        nn.init.normal_(self.relative_position, std=0.02)

    def forward(self, x_BChw: Tensor) -> Tensor:
        B, _, h, w = x_BChw.shape
        p, H = self.window_size, self.num_heads
        qkv = self.qkv(x_BChw)  # (B, 3·H·K, h, w)
        below, right = -h % p, -w % p
        if below or right:
            qkv = F.pad(qkv, (0, right, 0, below))
        q, k, v = _to_windows(qkv, p, 3 * H).chunk(3, dim=1)  # each (B·windows, H, p², K)
        # (p², p²), the same for all heads and windows.
        bias = self.relative_position.flatten()[self.position_index].to(q.dtype)
        if below or right:
            # B of `shape`, not len(x): len() would write the traced batch into an exported graph.
            bias = bias + _padding_mask(h, w, p, B, q)
        if self.fused_attn:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        else:
            # Maps (B·windows, H, p², p²), for `attention_maps`.
            out = self.attn_drop((q * self.scale @ k.transpose(-2, -1) + bias).softmax(dim=-1)) @ v
        mixed: Tensor = self.proj(_from_windows(out, p, h + below, w + right)[:, :, :h, :w])
        return mixed


def relative_position_index(window_size: int) -> Tensor:
    """Index int64 (p², p²) into the flattened (2p−1)×(2p−1) table: entry i, j is for position j − position i."""
    side = torch.arange(window_size)
    at = torch.stack(torch.meshgrid(side, side, indexing="ij"), dim=-1).flatten(0, 1)
    # Differences reach from −(p−1) to p−1; p−1 more makes them indices.
    row, column = (at[None] - at[:, None] + window_size - 1).unbind(-1)
    return row * (2 * window_size - 1) + column


def _to_windows(x: Tensor, p: int, heads: int) -> Tensor:
    """(B, heads·K, h, w) → (B·windows, heads, p², K)."""
    B, C, h, w = x.shape
    x = x.view(B, heads, C // heads, h // p, p, w // p, p)
    return x.permute(0, 3, 5, 1, 4, 6, 2).reshape(-1, heads, p * p, C // heads)


def _from_windows(x: Tensor, p: int, h: int, w: int) -> Tensor:
    """The inverse of `_to_windows`."""
    _, heads, _, K = x.shape
    x = x.view(-1, h // p, w // p, heads, p, p, K)
    return x.permute(0, 3, 6, 1, 4, 2, 5).reshape(-1, heads * K, h, w)


def _padding_mask(h: int, w: int, p: int, batch: int, like: Tensor) -> Tensor:
    """Additive mask (B·windows, 1, 1, p²): MASKED for keys outside the h×w map."""
    row, column = (torch.arange(-(-size // p) * p, device=like.device) for size in (h, w))
    outside = ((row[:, None] >= h) | (column >= w)).to(like.dtype)[None, None] * MASKED
    return _to_windows(outside, p, 1).transpose(-2, -1).repeat(batch, 1, 1, 1)


class LocalAttention(HeadMixAttention):
    """Multi-head self-attention of each token over its k×k neighbourhood (Park & Kim, arXiv 2202.06709, local MSA).

    (B, N, D) → (B, N, D) for a square map of N = S² tokens without class token; keys outside the map are masked. With
    k ≥ 2S − 1 it is plain attention. Children as in timm's attention: qkv, attn_drop, proj.
    """

    def __init__(self, dim: int, num_heads: int, *, kernel_size: int = 3, **kwargs: Any) -> None:
        super().__init__(dim, num_heads, **kwargs)
        if kernel_size % 2 == 0:
            raise InputError(f"kernel_size {kernel_size} of local attention must be odd: a token is its own centre")
        self.kernel_size = kernel_size

    def forward(self, x_BND: Tensor) -> Tensor:
        B, N, D = x_BND.shape
        side = round(N**0.5)
        if side * side != N:
            raise InputError(f"local attention needs a square map of tokens without class token: {N} is no square")
        q_BHNK, k_BHNK, v_BHNK = self.split_heads(self.qkv(x_BND))
        keys_BHNWK, values_BHNWK = (self._neighbours(part, side) for part in (k_BHNK, v_BHNK))
        # One query by its own W keys: (B, H, N, 1, K) @ (B, H, N, K, W).
        scores_BHNW = (q_BHNK.unsqueeze(3) * self.scale @ keys_BHNWK.transpose(-2, -1)).squeeze(3)
        scores_BHNW = scores_BHNW.masked_fill(self._outside(side, x_BND), MASKED)
        maps_BHNW = self.after_softmax(self.attn_drop(scores_BHNW.softmax(dim=-1)))
        out_BHNK = (maps_BHNW.unsqueeze(3) @ values_BHNWK).squeeze(3)
        out: Tensor = self.proj_drop(self.proj(out_BHNK.transpose(1, 2).reshape(B, N, D)))
        return out

    def softmax_maps(self, q_BHNK: Tensor, k_BHNK: Tensor) -> Tensor:
        raise InputError("local attention has no map of all tokens: set losses.attention_maps=mixed")

    def over_tokens(self, maps_BHNW: Tensor) -> Tensor:
        """(B, H, N, W) → (B, H, N, N), 0 for keys outside the neighbourhood."""
        B, H, N, _ = maps_BHNW.shape
        side = round(N**0.5)
        tokens = torch.arange(N, dtype=torch.float32, device=maps_BHNW.device).view(1, 1, side, side)
        key_NW = F.unfold(tokens, self.kernel_size, padding=self.kernel_size // 2)[0].T.long()
        # A neighbour outside the map is padding, of the number 0; its weight is 0, and nothing is added to token 0.
        return maps_BHNW.new_zeros(B, H, N, N).scatter_add(-1, key_NW.expand_as(maps_BHNW), maps_BHNW)

    def _neighbours(self, x_BHNK: Tensor, side: int) -> Tensor:
        """The keys or values of each token's neighbours, (B, H, N, K) → (B, H, N, W, K), zero outside the map."""
        B, H, N, K = x_BHNK.shape
        maps = x_BHNK.transpose(-2, -1).reshape(B, H * K, side, side)
        patches = F.unfold(maps, self.kernel_size, padding=self.kernel_size // 2)
        return patches.view(B, H, K, self.kernel_size**2, N).permute(0, 1, 4, 3, 2)

    def _outside(self, side: int, like: Tensor) -> Tensor:
        """(N, W), true for neighbours outside the map: where a map of ones, unfolded with zero padding, is zero."""
        inside = F.unfold(like.new_ones(1, 1, side, side), self.kernel_size, padding=self.kernel_size // 2)
        return inside[0].T < 0.5
