"""The recipe for one's own photographs: its size, batch and epochs follow from the images and the machine."""

import math
from typing import NamedTuple

from vitx.train.recipes.image_and_loss_settings import Augmentation, Losses
from vitx.train.recipes.imagenet import PIXELS
from vitx.train.recipes.optimization_settings import Optimizer, Schedule
from vitx.train.recipes.recipe import ModelChoice, Recipe

# A network without pretrained weights gets the largest size that the photographs have; on a CPU larger ones take days.
IMAGE_SIZES, LARGEST_ON_CPU = (32, 48, 64, 96, 128, 160, 192, 224), 128
# A quarter of DeiT-Ti's work, which would take a CPU hours.
ON_CPU = {"embed_dim": 128, "depth": 6, "num_heads": 4}
LARGEST_PATCH, PATCHES_A_SIDE = 16, 8
# Images that a run sees in all, more or less: a small set gets more epochs.
SEEN_FROM_SCRATCH, SEEN_PRETRAINED = 40_000, 8_000
EPOCHS_FROM_SCRATCH, EPOCHS_PRETRAINED = (20, 100), (5, 30)
# AdamW's rates at RATE_BATCH images a step; they grow with the root of the batch.
RATE_FROM_SCRATCH, RATE_PRETRAINED, RATE_BATCH = 5e-4, 1e-4, 64
STEPS_OF_AN_EPOCH = 8  # at least, or there are too few steps for the averages of the weights
LARGEST_BATCH_ON_CPU, LARGEST_BATCH, PIXELS_OF_LARGEST_BATCH = 32, 128, 224 * 224


class Photographs(NamedTuple):
    """What the recipe is fitted to. shorter_side: in pixels, of the median image; on_gpu: where the run will be."""

    images: int
    shorter_side: int
    on_gpu: bool
    cores: int


def photos() -> Recipe:
    """Your own photographs: one folder of images for each class is enough.

    Command: vitx train photos --data FOLDER
    Hardware: any; size, batch and epochs are chosen from the images and the machine, and printed.
    Time: `vitx train photos --data FOLDER --dry-run` measures it before you begin.
    Result: depends on your images; 99.5 % top-1 of 600 MR images of heads, after three epochs on 2,400 from DINOv2's
        ViT-S/14 (docs/benchmarks.md). The settings are DeiT's, weakened for small sets, and not the best of several
        that were measured. With fewer than some thousand images begin with published weights: --from
        model:timm/vit_tiny_patch16_224 (lower rate, rate by layer, fewer epochs).
    """
    return Recipe(
        name="photos",
        data="",
        model=ModelChoice(name="deit_tiny_12", kwargs={"drop_path_rate": 0.1}),
        preprocessing=PIXELS,
        augmentation=Augmentation(smallest_crop=0.35, flip=0.5, auto_augment="rand-m6-mstd0.5-inc1", erasing=0.1),
        losses=Losses(label_smoothing=0.1),
        optimizer=Optimizer(lr=RATE_FROM_SCRATCH, weight_decay=0.05),
        schedule=Schedule(warmup_epochs=3, min_lr=1e-6),
        epochs=30,
        batch_size=64,
    )


def fitted(recipe: Recipe, photographs: Photographs) -> Recipe:
    """The recipe with what follows from the images and the machine; less is changed of a network with weights."""
    pretrained = bool(recipe.model.initial_checkpoint)
    if not pretrained:
        recipe = _with_size(recipe, photographs)
    else:
        lighter = {"smallest_crop": 0.5, "auto_augment": "rand-m4-n1-mstd0.5-inc1", "erasing": 0.0}
        recipe = recipe.changed({f"augmentation.{name}": value for name, value in lighter.items()})
    seen, (fewest, most) = (
        (SEEN_PRETRAINED, EPOCHS_PRETRAINED) if pretrained else (SEEN_FROM_SCRATCH, EPOCHS_FROM_SCRATCH)
    )
    epochs = min(most, max(fewest, round(seen / photographs.images)))
    batch_size = _batch_size(recipe.preprocessing.image_size, photographs)
    rate = (RATE_PRETRAINED if pretrained else RATE_FROM_SCRATCH) * math.sqrt(batch_size / RATE_BATCH)
    return recipe.changed(
        {
            "optimizer.lr": float(f"{rate:.2g}"),
            "optimizer.layer_decay": 0.75 if pretrained else 1.0,
            "epochs": epochs,
            "batch_size": batch_size,
            "schedule.warmup_epochs": epochs / 10,
            "workers": min(8, photographs.cores),
        }
    )


def _with_size(recipe: Recipe, photographs: Photographs) -> Recipe:
    largest = IMAGE_SIZES[-1] if photographs.on_gpu else LARGEST_ON_CPU
    fitting = [size for size in IMAGE_SIZES if size <= min(largest, photographs.shorter_side)]
    size = max(fitting, default=IMAGE_SIZES[0])
    smaller = {} if photographs.on_gpu else ON_CPU
    arguments = {**recipe.model.kwargs, **smaller, "patch_size": min(LARGEST_PATCH, size // PATCHES_A_SIDE)}
    return recipe.changed({"model.kwargs": arguments, "preprocessing.image_size": size})


def _batch_size(image_size: int, photographs: Photographs) -> int:
    """A power of two from 8 on: what memory surely has room for, but enough steps in an epoch."""
    room = LARGEST_BATCH * min(1.0, PIXELS_OF_LARGEST_BATCH / image_size**2) if photographs.on_gpu else 1.0
    most = min(max(room, LARGEST_BATCH_ON_CPU), photographs.images / STEPS_OF_AN_EPOCH)
    return 1 << max(3, int(most).bit_length() - 1)
