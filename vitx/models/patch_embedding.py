"""DeepViT's convolutional patch embedding."""

from typing import Any

import torch.nn.functional as F
from timm.layers import PatchEmbed, to_2tuple
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
        patch_size: int | tuple[int, int] = 16,
        in_chans: int = 3,
        embed_dim: int = 768,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        **kwargs: Any,
    ) -> None:
        if any(side % 2 for side in to_2tuple(patch_size)):
            raise InputError(f"patch_size {patch_size} of a CNN embedding must be even: its first convolution halves")
        factory = {"device": device, "dtype": dtype}
        # timm's embedding takes a pair as well, though its signature says less.
        super().__init__(img_size, patch_size, in_chans, embed_dim, bias=bias, **factory, **kwargs)  # type: ignore[arg-type]
        self.conv1 = nn.Conv2d(in_chans, STEM_WIDTH, 7, stride=2, padding=3, bias=False, **factory)
        self.bn1 = nn.BatchNorm2d(STEM_WIDTH, **factory)
        self.conv2 = nn.Conv2d(STEM_WIDTH, STEM_WIDTH, 3, padding=1, bias=False, **factory)
        self.bn2 = nn.BatchNorm2d(STEM_WIDTH, **factory)
        self.relu = nn.ReLU(inplace=True)
        half = self.patch_size[0] // 2, self.patch_size[1] // 2
        self.proj = nn.Conv2d(STEM_WIDTH, embed_dim, half, stride=half, bias=bias, **factory)

    def set_input_size(self, img_size: Any = None, patch_size: Any = None) -> None:
        """timm's, for another image size; raise InputError for another patch size, which timm makes one convolution."""
        if patch_size is not None and to_2tuple(patch_size) != self.patch_size:
            raise InputError(f"patch_size {patch_size}: a CNN embedding keeps its own, {self.patch_size}")
        super().set_input_size(img_size)

    def forward(self, x: Tensor) -> Tensor:
        size, patch = (x.shape[2], x.shape[3]), self.patch_size
        if self.strict_img_size and size != self.img_size:
            raise InputError(f"images of {size} px for a network of {self.img_size} px: resize them")
        below, right = -size[0] % patch[0], -size[1] % patch[1]
        if below or right:
            if not self.dynamic_img_pad:
                raise InputError(f"images of {size} px are not divisible by patch_size {patch}: resize them")
            x = F.pad(x, (0, right, 0, below))
        x = self.relu(self.bn1(self.conv1(x)))  # (B, 64, S/2, S/2)
        x = self.relu(self.bn2(self.conv2(x)))
        x = self.proj(x)
        # (B, D, S/patch, S/patch) → (B, n, D), patches row by row; a map of them for timm's dynamic_img_size.
        tokens: Tensor = self.norm(x.flatten(2).transpose(1, 2) if self.flatten else x.permute(0, 2, 3, 1))
        return tokens
