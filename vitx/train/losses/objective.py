"""What is minimised: cross-entropy and the token losses of one batch, by name."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import timm.data
import torch
import torch.nn.functional as F
from timm.data.random_erasing import RandomErasing
from torch import Tensor, nn

from vitx.core.errors import InputError
from vitx.models import TokenOutputs, VisionTransformer
from vitx.train.losses.attention_similarity import projected_similarity, queries_and_keys
from vitx.train.losses.cutmix import Box, MixedBatch, cutmix, sample_box, unmixed
from vitx.train.losses.distillation import Teacher
from vitx.train.losses.over_smoothing import (
    patch_contrastive_loss,
    patch_cosine_loss,
    patch_mixing_loss,
    region_mixing_loss,
)
from vitx.train.randomness import seeded
from vitx.train.recipes.image_groups import CutMix, Losses
from vitx.train.recipes.recipe import Recipe


@dataclass(frozen=True)
class PatchGrid:
    """`side` × `side` patches of `patch_size` pixels."""

    side: int
    patch_size: int


def patch_grid(model: nn.Module) -> PatchGrid | None:
    """The grid of a model with a square patch embedding; None for one that has none, such as a ResNet."""
    embedding: Any = getattr(model, "patch_embed", None)
    sides = getattr(embedding, "grid_size", None)
    if not sides or sides[0] != sides[1]:
        return None
    return PatchGrid(sides[0], embedding.patch_size[0])


def check_model(recipe: Recipe, model: nn.Module) -> None:
    """Refuse a network that cannot compute the recipe's losses; raise InputError naming the setting to change."""
    losses, ours = recipe.losses, isinstance(model, VisionTransformer)
    if losses.need_tokens and not ours:
        raise InputError(
            f"model '{recipe.model.name}' does not give its patch tokens, which the token losses need: set "
            "losses.cosine=0, losses.contrastive=0 and losses.mixing=0, or choose a model of `vitx models`"
        )
    if losses.attention:
        with queries_and_keys(model):
            pass
    if recipe.cutmix.probability and patch_grid(model) is None:
        raise InputError(f"model '{recipe.model.name}' has no square patch grid for CutMix: set cutmix.probability=0")


def mix(
    images: Tensor, labels: Tensor, recipe: Recipe, grid: PatchGrid | None, rng: random.Random, *, classes: int
) -> MixedBatch:
    """Apply the recipe's random erasing, then its mixup or its patch-aligned CutMix, to float (B, 3, S, S) images.

    All randomness comes from `rng`. The images may be changed in place. Raises InputError for mixup of an odd batch.
    """
    if recipe.augmentation.erasing or recipe.mixup.on:
        with seeded(rng.getrandbits(63), images.device):
            images, targets_BC = _erase_and_mixup(images, labels, recipe, classes)
        if targets_BC is not None:
            return unmixed(images, labels, 0, targets_BC)
    if grid is None or not recipe.cutmix.probability:
        return unmixed(images, labels, patches=0 if grid is None else grid.side**2)
    boxes = [_sample_box(recipe.cutmix, grid.side, rng) for _ in range(_boxes(recipe.cutmix, len(images)))]
    if not any(box.area for box in boxes):
        return unmixed(images, labels, patches=grid.side**2)
    return cutmix(images, labels, boxes, grid.patch_size)


def _erase_and_mixup(images: Tensor, labels: Tensor, recipe: Recipe, classes: int) -> tuple[Tensor, Tensor | None]:
    augmentation, mixup = recipe.augmentation, recipe.mixup
    if augmentation.erasing:
        erase: Callable[[Tensor], Tensor] = RandomErasing(  # type: ignore[no-untyped-call]  # timm's
            augmentation.erasing, mode=augmentation.erasing_mode, device=str(images.device)
        )
        images = erase(images)
    if not mixup.on:
        return images, None
    if len(images) % 2:
        raise InputError(f"mixup pairs the images of a batch, and this one has {len(images)}: set an even batch_size")
    blend: Callable[..., tuple[Tensor, Tensor]] = timm.data.Mixup(  # type: ignore[no-untyped-call]  # timm's
        mixup_alpha=mixup.mixup,
        cutmix_alpha=mixup.cutmix,
        prob=mixup.probability,
        switch_prob=mixup.switch_probability,
        mode=mixup.mode,
        label_smoothing=recipe.losses.label_smoothing,
        num_classes=classes,
    )
    return blend(images, labels)


def _boxes(cutmix: CutMix, batch: int) -> int:
    return batch if cutmix.box == "sample" else 1


def _sample_box(settings: CutMix, side: int, rng: random.Random) -> Box:
    """A box of a share ~ Beta(alpha, alpha) of the grid, or an empty one."""
    if rng.random() >= settings.probability:
        return Box(0, 0, 0, 0)
    return sample_box(side, rng.betavariate(settings.alpha, settings.alpha), rng)


def losses_of(
    model: nn.Module, batch: MixedBatch, recipe: Recipe, classes: int, *, teacher: Teacher | None = None
) -> dict[str, Tensor]:
    """Return the unweighted losses by name, and their weighted sum as "total"; scalars.

    With a `teacher` a network that returns two logits (DeiT's distilled ones) learns the labels with the first and
    the teacher's predictions with the second; one that returns logits alone learns both with them.
    """
    weights, smoothing = recipe.losses, recipe.losses.label_smoothing
    with queries_and_keys(model, compared=bool(weights.attention)) as blocks:
        tokens, output = _forward(model, batch.images_B3SS, weights)
    logits_BC, distilled_BC = output if isinstance(output, tuple) else (output, output)
    losses = {"classification": F.cross_entropy(logits_BC.float(), image_targets(batch, classes, smoothing))}
    if tokens is not None:
        losses |= _token_losses(model, tokens, batch, weights, classes)
    if weights.attention:
        losses["attention"] = projected_similarity(blocks, over=weights.attention_over, pairs=weights.attention_pairs)
    total = losses["classification"]
    for name, loss in losses.items():
        if name != "classification":
            total = total + getattr(weights, name) * loss
    if teacher is not None:
        losses["distillation"] = teacher.loss(distilled_BC, batch.images_B3SS)
        total = total + teacher.settings.weight * (losses["distillation"] - losses["classification"])
    return {**losses, "total": total}


def _forward(
    model: nn.Module, images: Tensor, weights: Losses
) -> tuple[TokenOutputs | None, Tensor | tuple[Tensor, Tensor]]:
    if not weights.need_tokens:
        return None, model(images)
    assert isinstance(model, VisionTransformer)
    tokens = model.forward_with_tokens(images, classify_patches=weights.mixing_variant == "paper")
    return tokens, tokens.logits_BC


def _token_losses(
    model: nn.Module, tokens: TokenOutputs, batch: MixedBatch, weights: Losses, classes: int
) -> dict[str, Tensor]:
    losses = {}
    if weights.cosine:
        losses["cosine"] = patch_cosine_loss(tokens.late_BnD)
    if weights.contrastive:
        variant = weights.contrastive_variant
        early_BnD = tokens.early_BnD if variant == "paper" else tokens.embedding_BnD
        losses["contrastive"] = patch_contrastive_loss(early_BnD, tokens.late_BnD, variant=variant)
    if weights.mixing and weights.mixing_variant == "official":
        assert isinstance(model, VisionTransformer)
        labels = (batch.labels_B, batch.partner_labels_B)
        own_BC, partner_BC = (smooth_one_hot(each, classes, weights.label_smoothing) for each in labels)
        losses["mixing"] = region_mixing_loss(
            tokens.late_BnD, model.classify_patches, batch.partner_Bn, own_BC, partner_BC
        )
    elif weights.mixing:
        assert tokens.patch_logits_BnC is not None
        losses["mixing"] = patch_mixing_loss(
            tokens.patch_logits_BnC, batch.patch_labels_Bn, label_smoothing=weights.label_smoothing
        )
    return losses


def image_targets(batch: MixedBatch, classes: int, smoothing: float) -> Tensor:
    """The images' soft labels (B, C): those of mixup, or own and partner's weighted with the box's area."""
    if batch.targets_BC is not None:
        return batch.targets_BC
    own_BC = smooth_one_hot(batch.labels_B, classes, smoothing)
    partner_BC = smooth_one_hot(batch.partner_labels_B, classes, smoothing)
    return torch.lerp(own_BC, partner_BC, batch.weight_B.unsqueeze(-1))


def smooth_one_hot(labels: Tensor, classes: int, smoothing: float) -> Tensor:
    """Return probabilities, one axis more than `labels`: 1−ε+ε/C at the label and ε/C elsewhere."""
    return F.one_hot(labels, classes).float() * (1 - smoothing) + smoothing / classes
