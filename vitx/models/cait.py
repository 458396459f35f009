"""CaiT (Touvron et al., arXiv 2103.17239) with AttnScale or FeatScale (Wang et al., arXiv 2203.05962), on timm's parts.

Both are of the blocks before the class attention, by their authors' names; they start as timm's own.
"""

from typing import Any

import torch
from timm.models.cait import LayerScaleBlock, TalkingHeadAttn
from torch import Tensor, nn

from vitx.models.attention import scale_maps
from vitx.models.vit import scale_frequencies


class AttnScaleTalkingHeadAttn(TalkingHeadAttn):
    """The mixed maps A of timm's talking heads become `1/N + (1 + ω)(A − 1/N)`, one ω (`lamb`) a head."""

    def __init__(self, dim: int, num_heads: int, *, device: Any = None, dtype: Any = None, **kwargs: Any) -> None:
        super().__init__(dim, num_heads, device=device, dtype=dtype, **kwargs)
        self.lamb = nn.Parameter(torch.zeros(num_heads, device=device, dtype=dtype))

    def forward(self, x_BND: Tensor) -> Tensor:
        qkv = self.qkv(x_BND).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        query_BHNK, key_BHNK, value_BHNK = qkv.unbind()
        scores_BNNH = (self.scale * query_BHNK @ key_BHNK.transpose(-2, -1)).movedim(1, -1)
        maps_BNNH = self.proj_w(self.proj_l(scores_BNNH).softmax(dim=2))
        maps_BHNN = self.attn_drop(scale_maps(maps_BNNH.movedim(-1, 1), self.lamb))
        out: Tensor = self.proj_drop(self.proj((maps_BHNN @ value_BHNK).transpose(1, 2).flatten(2)))
        return out


class FeatScaleBlock(LayerScaleBlock):
    """FeatScale behind the attention of CaiT's block, before its LayerScale, with `lamb1` and `lamb2` (D,).

    The authors' code adds each part once here, and twice in DeiT.
    """

    def __init__(self, dim: int, num_heads: int, *, device: Any = None, dtype: Any = None, **kwargs: Any) -> None:
        super().__init__(dim, num_heads, device=device, dtype=dtype, **kwargs)
        self.lamb1 = nn.Parameter(torch.zeros(dim, device=device, dtype=dtype))
        self.lamb2 = nn.Parameter(torch.zeros(dim, device=device, dtype=dtype))

    def forward(self, x_BND: Tensor) -> Tensor:
        attended_BND = scale_frequencies(self.attn(self.norm1(x_BND)), self.lamb1, self.lamb2, times=1)
        x_BND = x_BND + self.drop_path(self.gamma_1 * attended_BND)
        out_BND: Tensor = x_BND + self.drop_path(self.gamma_2 * self.mlp(self.norm2(x_BND)))
        return out_BND
