"""Patch-aligned CutMix: a box of whole patches comes from another image, so every patch has exactly one label.

Source: Gong et al. (arXiv 2104.12753, §4.3) after Yun et al., CutMix. Shape letters: B batch, S image side, n patches.
"""

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from vitx.core.errors import InputError


@dataclass(frozen=True)
class Box:
    """Rows top:bottom and columns left:right of the patch grid."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def area(self) -> int:
        return (self.bottom - self.top) * (self.right - self.left)


@dataclass(frozen=True)
class MixedBatch:
    """A batch after CutMix: `partner_n` says which patches came from the partner image, `weight` their share."""

    images_B3SS: Tensor
    labels_B: Tensor
    partner_labels_B: Tensor
    partner_n: Tensor
    weight: float

    @property
    def patch_labels_Bn(self) -> Tensor:
        """The class index of the image that each patch came from; int64 (B, n), row-major over the grid."""
        return torch.where(self.partner_n, self.partner_labels_B[:, None], self.labels_B[:, None])


def sample_box(grid: int, rate: float, rng: random.Random) -> Box:
    """Draw a box of about `rate` of a grid × grid patch grid: `generate_mask(g, rate)` of the paper's code.

    Its area is never more than ⌊grid²·rate⌋ patches, and may be 0.
    """
    area = int(grid * grid * rate)
    rows = rng.randint(1, max(1, min(grid, area) - 1))
    columns = area // rows
    if columns > grid:
        columns = grid
        rows = area // columns
    top, left = rng.randint(0, grid - rows), rng.randint(0, grid - columns)
    return Box(top, top + rows, left, left + columns)


def cutmix(images_B3SS: Tensor, labels_B: Tensor, box: Box, patch_size: int) -> MixedBatch:
    """Paste `box` from the batch in reverse order into every image; the label weight is the box's real area.

    Raises InputError when the image is not a square of whole patches.
    """
    height, width = images_B3SS.shape[-2:]
    if height != width or height % patch_size:
        raise InputError(f"CutMix needs square images of whole {patch_size} px patches, got {height}×{width}")
    grid = height // patch_size
    partner = torch.zeros(grid, grid, dtype=torch.bool, device=images_B3SS.device)
    partner[box.top : box.bottom, box.left : box.right] = True
    pixels = partner.repeat_interleave(patch_size, 0).repeat_interleave(patch_size, 1)
    return MixedBatch(
        images_B3SS=torch.where(pixels, images_B3SS.flip(0), images_B3SS),
        labels_B=labels_B,
        partner_labels_B=labels_B.flip(0),
        partner_n=partner.flatten(),
        weight=box.area / (grid * grid),
    )


def unmixed(images_B3SS: Tensor, labels_B: Tensor, patches: int) -> MixedBatch:
    """The same batch with no box: every patch is the image's own."""
    nothing = torch.zeros(patches, dtype=torch.bool, device=images_B3SS.device)
    return MixedBatch(images_B3SS, labels_B, labels_B, nothing, 0.0)
