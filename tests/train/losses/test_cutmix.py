"""Patch-aligned CutMix: the reference boxes of docs/maths.md §2.4, and what a mixed batch holds."""

import random

import pytest
import torch

from vitx.core.errors import InputError
from vitx.train.losses.cutmix import Box, cutmix, sample_box, unmixed


@pytest.mark.parametrize(
    ("seed", "rate", "box"),
    [
        (0, 0.25, Box(6, 13, 0, 7)),
        (1, 0.5, Box(1, 8, 0, 14)),
        (2, 0.9, Box(0, 12, 0, 14)),
        (3, 0.01, Box(9, 10, 8, 9)),
    ],
)
def test_reference_box(seed: int, rate: float, box: Box) -> None:
    assert sample_box(14, rate, random.Random(seed)) == box


@pytest.mark.parametrize("grid", [1, 2, 3, 7, 14])
def test_boxes_stay_inside_the_grid_and_below_the_rate(grid: int) -> None:
    rng = random.Random(grid)
    for _ in range(2000):
        rate = rng.random()
        box = sample_box(grid, rate, rng)
        assert 0 <= box.top <= box.bottom <= grid
        assert 0 <= box.left <= box.right <= grid
        assert box.area <= int(grid * grid * rate)


def test_every_patch_is_of_one_image_and_carries_its_label() -> None:
    images = torch.arange(3.0).view(3, 1, 1, 1).expand(3, 3, 8, 8).contiguous()
    labels = torch.tensor([5, 6, 7])
    mixed = cutmix(images, labels, Box(0, 1, 1, 4), patch_size=2)
    assert mixed.weight_B.tolist() == [3 / 16] * 3
    patches = mixed.images_B3SS.unfold(2, 2, 2).unfold(3, 2, 2)[:, 0]
    assert (patches == patches[..., :1, :1]).all(), "a patch holds pixels of two images"
    assert torch.equal(patches[..., 0, 0].flatten(1).long() + 5, mixed.patch_labels_Bn)
    assert mixed.patch_labels_Bn[0].tolist() == [5, 7, 7, 7] + [5] * 12
    share = (mixed.patch_labels_Bn[0] == 7).double().mean().item()
    assert share == mixed.weight_B[0]


def test_every_image_may_have_a_box_of_its_own() -> None:
    images = torch.arange(4.0).view(4, 1, 1, 1).expand(4, 3, 8, 8).contiguous()
    boxes = [Box(0, 4, 0, 4), Box(0, 0, 0, 0), Box(1, 2, 1, 3), Box(3, 4, 0, 1)]
    mixed = cutmix(images, torch.arange(4), boxes, patch_size=2)
    assert mixed.weight_B.tolist() == [1, 0, 2 / 16, 1 / 16]
    for sample, box in enumerate(boxes):
        alone = cutmix(images, torch.arange(4), box, patch_size=2)
        assert torch.equal(mixed.images_B3SS[sample], alone.images_B3SS[sample])
        assert torch.equal(mixed.patch_labels_Bn[sample], alone.patch_labels_Bn[sample])
    with pytest.raises(InputError, match="3 boxes for 4 images: give one for the batch, or one for each image"):
        cutmix(images, torch.arange(4), boxes[:3], patch_size=2)


def test_an_empty_box_changes_nothing() -> None:
    images, labels = torch.rand(4, 3, 8, 8), torch.arange(4)
    mixed, same = cutmix(images, labels, Box(2, 2, 1, 1), 4), unmixed(images, labels, 4)
    assert mixed.weight_B.tolist() == same.weight_B.tolist() == [0] * 4
    assert torch.equal(mixed.images_B3SS, images)
    assert torch.equal(mixed.patch_labels_Bn, same.patch_labels_Bn)


def test_global_randomness_is_neither_read_nor_moved() -> None:
    random.seed(0)
    before = random.getstate()
    first = sample_box(14, 0.5, random.Random(4))
    assert random.getstate() == before
    random.seed(1)
    assert sample_box(14, 0.5, random.Random(4)) == first


def test_images_that_are_not_whole_patches_are_refused() -> None:
    with pytest.raises(InputError, match="square images of whole 4 px patches, got 8×10"):
        cutmix(torch.zeros(2, 3, 8, 10), torch.zeros(2, dtype=torch.long), Box(0, 1, 0, 1), 4)
