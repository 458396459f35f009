"""DeepViT's convolutional patch embedding."""

from typing import Any

from timm.layers import PatchEmbed
from torch import Tensor, nn

from vitx.core.errors import InputError

STEM_WIDTH = 64


class ConvPatchEmbed(PatchEmbed):
    """The embedding of DeepViT-S and -L (docs/maths.md §3.4): (B, 3, S, S) → (B, (S/patch)², D).

    conv 7×7, stride 2 → BN → ReLU → conv 3×3 → BN → ReLU → conv, side and stride patch/2. Names are the public code's.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        embed_dim: int = 768,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        **kwargs: Any,
    ) -> None:
        if patch_size % 2:
            raise InputError(f"patch_size {patch_size} of a CNN embedding must be even: its first convolution halves")
        factory = {"device": device, "dtype": dtype}
        super().__init__(img_size, patch_size, in_chans, embed_dim, bias=bias, **factory, **kwargs)
        self.conv1 = nn.Conv2d(in_chans, STEM_WIDTH, 7, stride=2, padding=3, bias=False, **factory)
        self.bn1 = nn.BatchNorm2d(STEM_WIDTH, **factory)
        self.conv2 = nn.Conv2d(STEM_WIDTH, STEM_WIDTH, 3, padding=1, bias=False, **factory)
        self.bn2 = nn.BatchNorm2d(STEM_WIDTH, **factory)
        self.relu = nn.ReLU(inplace=True)
        half = patch_size // 2
        self.proj = nn.Conv2d(STEM_WIDTH, embed_dim, half, stride=half, bias=bias, **factory)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))  # (B, 64, S/2, S/2)
        x = self.relu(self.bn2(self.conv2(x)))
        x = self.proj(x)
        # (B, D, S/patch, S/patch) → (B, n, D), patches row by row; a map of them for timm's dynamic_img_size.
        tokens: Tensor = self.norm(x.flatten(2).transpose(1, 2) if self.flatten else x.permute(0, 2, 3, 1))
        return tokens
