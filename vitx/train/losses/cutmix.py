"""Patch-aligned CutMix: a box of whole patches comes from another image, so every patch has exactly one label.

Source: Gong et al. (arXiv 2104.12753, §4.3) after Yun et al., CutMix. Shape letters: B batch, S image side, n patches.
"""

import random
from collections.abc import Sequence
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
    """A batch after mixing, and what its labels have become.

    `partner_Bn` says which patches came from the partner image, `weight_B` is their share; both are of one device with
    the images. After mixup, where a pixel has two sources, `targets_BC` are the soft labels and the rest does not hold.
    """

    images_B3SS: Tensor
    labels_B: Tensor
    partner_labels_B: Tensor
    partner_Bn: Tensor
    weight_B: Tensor
    targets_BC: Tensor | None = None

    @property
    def patch_labels_Bn(self) -> Tensor:
        """The class index of the image that each patch came from; int64 (B, n), row-major over the grid."""
        return torch.where(self.partner_Bn, self.partner_labels_B[:, None], self.labels_B[:, None])


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


def cutmix(images_B3SS: Tensor, labels_B: Tensor, boxes: Box | Sequence[Box], patch_size: int) -> MixedBatch:
    """Paste boxes from the batch in reverse order; the label weight is the box's real area.

    `boxes` is one for the batch, or one for each image. Raises InputError for another number of boxes, and when the
    image is not a square of whole patches.
    """
    height, width = images_B3SS.shape[-2:]
    if height != width or height % patch_size:
        raise InputError(f"CutMix needs square images of whole {patch_size} px patches, got {height}×{width}")
    boxes = [boxes] if isinstance(boxes, Box) else list(boxes)
    batch = len(images_B3SS)
    if len(boxes) not in (1, batch):
        raise InputError(f"{len(boxes)} boxes for {batch} images: give one for the batch, or one for each image")
    partner = torch.zeros(len(boxes), height // patch_size, height // patch_size, dtype=torch.bool)
    for mask, box in zip(partner, boxes, strict=True):
        mask[box.top : box.bottom, box.left : box.right] = True
    partner = partner.to(images_B3SS.device, non_blocking=True)
    pixels = partner.repeat_interleave(patch_size, 1).repeat_interleave(patch_size, 2).unsqueeze(1)
    return MixedBatch(
        images_B3SS=torch.where(pixels, images_B3SS.flip(0), images_B3SS),
        labels_B=labels_B,
        partner_labels_B=labels_B.flip(0),
        partner_Bn=partner.flatten(1).expand(batch, -1),
        weight_B=partner.flatten(1).float().mean(dim=1).expand(batch),
    )


def unmixed(images_B3SS: Tensor, labels_B: Tensor, patches: int, targets_BC: Tensor | None = None) -> MixedBatch:
    """The same batch with no box: every patch is the image's own."""
    nothing = torch.zeros(len(images_B3SS), patches, dtype=torch.bool, device=images_B3SS.device)
    return MixedBatch(images_B3SS, labels_B, labels_B, nothing, torch.zeros_like(labels_B).float(), targets_BC)
