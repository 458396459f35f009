"""Patch-aligned CutMix: a box of whole patches comes from another image, so every patch has exactly one label.

Source: Gong et al. (arXiv 2104.12753, §4.3) after Yun et al., CutMix (arXiv 1905.04899); docs/maths.md §2.4.
Shape letters: B batch, S image size in pixels, n patches.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vitx.core.errors import InputError


@dataclass(frozen=True)
class Box:
    """Rows top:bottom and columns left:right of the patch grid, in patches."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def area(self) -> int:
        return (self.bottom - self.top) * (self.right - self.left)


@dataclass(frozen=True)
class MixedBatch:
    """A batch after mixing, with the labels that follow from it; all tensors are on one device.

    `partner_Bn` is True for patches that came from the partner image, `weight_B` is their share of the image. After
    mixup a pixel has two sources: then `targets_BC` are the soft labels, and the other label fields are not used.
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
    """Draw a box of about the share `rate` of a grid × grid patch grid: `generate_mask(g, rate)` of the authors' code.

    Its area is at most ⌊grid²·rate⌋ patches, and may be 0. docs/maths.md §2.4 has reference boxes.
    """
    area = int(grid * grid * rate)
    rows = rng.randint(1, max(1, min(grid, area) - 1))  # inclusive at both ends
    columns = area // rows
    if columns > grid:  # too few rows for this area: as wide as the grid, and as many rows as the area fills
        columns = grid
        rows = area // columns
    top, left = rng.randint(0, grid - rows), rng.randint(0, grid - columns)
    return Box(top, top + rows, left, left + columns)


def cutmix(images_B3SS: Tensor, labels_B: Tensor, boxes: Box | Sequence[Box], patch_size: int) -> MixedBatch:
    """Paste into each image the box of its partner, the image at the mirrored place of the batch (i ↔ B − 1 − i).

    The label weight is the share of patches that the box really covers. `boxes` is one box for the batch, or one for
    each image. Raises InputError for another number of boxes, and when the image is not a square of whole patches.
    """
    height, width = images_B3SS.shape[-2:]
    if height != width or height % patch_size:
        raise InputError(f"CutMix needs square images of whole {patch_size} px patches, got {height}×{width}")
    boxes = [boxes] if isinstance(boxes, Box) else list(boxes)
    batch = len(images_B3SS)
    if len(boxes) not in (1, batch):
        raise InputError(f"{len(boxes)} boxes for {batch} images: give one for the batch, or one for each image")
    # (number of boxes, grid, grid), filled on the CPU: an assignment a box on a GPU would be a kernel each.
    masks = torch.zeros(len(boxes), height // patch_size, height // patch_size, dtype=torch.bool)
    for mask, box in zip(masks, boxes, strict=True):
        mask[box.top : box.bottom, box.left : box.right] = True
    masks = masks.to(images_B3SS.device, non_blocking=True)
    # From patches to pixels: (number of boxes, 1, S, S), broadcast over the channels, and over the batch if one box.
    pixels = masks.repeat_interleave(patch_size, 1).repeat_interleave(patch_size, 2).unsqueeze(1)
    return MixedBatch(
        images_B3SS=torch.where(pixels, images_B3SS.flip(0), images_B3SS),
        labels_B=labels_B,
        partner_labels_B=labels_B.flip(0),
        partner_Bn=masks.flatten(1).expand(batch, -1),
        weight_B=masks.flatten(1).float().mean(dim=1).expand(batch),
    )


def unmixed(images_B3SS: Tensor, labels_B: Tensor, patches: int, targets_BC: Tensor | None = None) -> MixedBatch:
    """The batch without a box: each of the `patches` patches of an image is the image's own."""
    no_patch_Bn = torch.zeros(len(images_B3SS), patches, dtype=torch.bool, device=images_B3SS.device)
    return MixedBatch(images_B3SS, labels_B, labels_B, no_patch_Bn, torch.zeros_like(labels_B).float(), targets_BC)
