"""One training batch: mixing its images, and the losses that are minimised on it (docs/maths.md §2).

Shape letters: B batch, S image size in pixels, n patches, D width, C classes.
"""

import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import timm.data
import torch
import torch.nn.functional as F
from timm.data.random_erasing import RandomErasing
from timm.models.vision_transformer import VisionTransformer as TimmVisionTransformer
from torch import Tensor, nn

from vitx.core.errors import InputError
from vitx.models import TokenOutputs, VisionTransformer, forward_with_tokens
from vitx.models.attention import HeadMixAttention, TalkingHeadsAttention
from vitx.models.attention_maps import attention_layers
from vitx.models.window_attention import LocalAttention
from vitx.train.losses.attention_similarity import attention_loss, check_pairs, record_qkv
from vitx.train.losses.cutmix import Box, MixedBatch, cutmix, sample_box, unmixed
from vitx.train.losses.distillation import Teacher
from vitx.train.losses.patch_losses import (
    patch_contrastive_loss,
    patch_cosine_loss,
    patch_mixing_loss,
    region_mixing_loss,
)
from vitx.train.randomness import seeded
from vitx.train.recipes.image_and_loss_settings import Augmentation, CutMix, Losses
from vitx.train.recipes.recipe import Recipe


@dataclass(frozen=True)
class PatchGrid:
    """`size` × `size` patches of `patch_size` pixels."""

    size: int
    patch_size: int


def patch_grid(model: nn.Module) -> PatchGrid | None:
    """The patch grid of a model; None for one without a square patch embedding, or whose patches overlap, as PiT's.

    Behind convolutions (DeepViT's embedding, a hybrid's backbone) a patch is the square in its middle: it sees more.
    """
    embedding: Any = getattr(model, "patch_embed", None)
    grid_size = getattr(embedding, "grid_size", None)  # (rows, columns), timm's name
    if not grid_size or grid_size[0] != grid_size[1]:
        return None
    size = getattr(embedding, "img_size", None)
    if not size:
        return PatchGrid(grid_size[0], embedding.patch_size[0])
    # A hybrid's patch_size is in features of its backbone, each of several pixels.
    patch = size[0] // grid_size[0] if hasattr(embedding, "backbone") else embedding.patch_size[0]
    return PatchGrid(grid_size[0], patch) if grid_size[0] * patch == size[0] else None


def check_model(recipe: Recipe, model: nn.Module) -> None:
    """Refuse a network that cannot compute the recipe's losses; raise InputError naming the setting to change."""
    losses, no_boxes = recipe.losses, bool(recipe.cutmix.probability) and patch_grid(model) is None
    if losses.need_tokens and not isinstance(model, TimmVisionTransformer):
        raise InputError(
            f"model '{recipe.model.name}' does not give its patch tokens, which the token losses need: set "
            f"losses.cosine=0, losses.contrastive=0 and losses.mixing=0{', and cutmix.probability=0' * no_boxes}, or "
            "choose a ViT of `vitx models`"
        )
    if losses.mixing and not isinstance(model, VisionTransformer):
        raise InputError(
            f"model '{recipe.model.name}' has no classifier of patches, which losses.mixing needs: set "
            "losses.mixing=0, or choose a ViT of `vitx models`, which load the weights of timm's"
        )
    if losses.need_tokens and not isinstance(getattr(model, "patch_drop", nn.Identity()), nn.Identity):
        raise InputError(
            "the token losses compare or label every patch: set model.kwargs.patch_drop_rate=0, or losses.cosine=0, "
            "losses.contrastive=0 and losses.mixing=0"
        )
    official = losses.contrastive and losses.contrastive_variant == "official"
    if (losses.cosine or official) and getattr(model.patch_embed, "num_patches", 0) == 1:
        raise InputError(
            f"model '{recipe.model.name}' has one patch, and losses.cosine and the official losses.contrastive compare "
            "patches: set a smaller model.kwargs.patch_size, or losses.cosine=0 and losses.contrastive=0"
        )
    if losses.attention:
        with record_qkv(model):  # refuses a network without attention layers to compare
            check_pairs(losses.attention_pairs, len(attention_layers(model)) - 1)
        _check_softmax_maps(losses, model)
        # The maps are computed after their block, whose weights are then split again: only this attention needs them.
        splits = recipe.execution.parallel == "fsdp" and losses.attention_maps == "softmax"
        if splits and any(isinstance(layer, TalkingHeadsAttention) for layer in model.modules()):
            raise InputError(
                "execution.parallel=fsdp does not go with losses.attention of softmax maps of talking heads: set "
                "losses.attention_maps=mixed, or execution.parallel=ddp"
            )
    if no_boxes:
        raise InputError(f"model '{recipe.model.name}' has no square patch grid for CutMix: set cutmix.probability=0")


def _check_softmax_maps(losses: Losses, model: nn.Module) -> None:
    """Refuse softmax maps of local attention among the layers that are compared: it computes no scores of far keys."""
    compared = losses.attention_pairs + 1 if losses.attention_pairs else None
    layers = [layer for layer in model.modules() if isinstance(layer, HeadMixAttention)][:compared]
    if losses.attention_maps == "softmax" and any(isinstance(layer, LocalAttention) for layer in layers):
        raise InputError("local attention has no map of all tokens: set losses.attention_maps=mixed")


def mix_batch(
    images: Tensor,
    labels: Tensor,
    recipe: Recipe,
    grid: PatchGrid | None,
    rng: random.Random,
    image_rng: random.Random | None = None,
    *,
    classes: int,
) -> MixedBatch:
    """Apply the recipe's random erasing, then its mixup or its patch-aligned CutMix.

    `images` are normalised floats (B, 3, S, S) and may be changed in place, `labels` int64 (B,). Draws for the whole
    batch come from `rng`, draws for each image from `image_rng`, by default the same. Raises InputError for mixup of an
    odd batch.
    """
    image_rng = image_rng or rng
    # timm's erasing and mixup draw from the global generators: seed those.
    if recipe.augmentation.erasing:
        with seeded(image_rng.getrandbits(63), images.device):
            images = _erase(images, recipe.augmentation)
    if recipe.mixup.on:
        with seeded((rng if recipe.mixup.mode == "batch" else image_rng).getrandbits(63), images.device):
            images, targets_BC = _mixup(images, labels, recipe, classes)
        return unmixed(images, labels, 0, targets_BC)
    if grid is None or not recipe.cutmix.probability:
        return unmixed(images, labels, patches=0 if grid is None else grid.size**2)
    count, box_rng = (len(images), image_rng) if recipe.cutmix.box == "sample" else (1, rng)
    boxes = [_sample_box(recipe.cutmix, grid.size, box_rng) for _ in range(count)]
    if not any(box.area for box in boxes):
        return unmixed(images, labels, patches=grid.size**2)
    return cutmix(images, labels, boxes, grid.patch_size)


def _erase(images: Tensor, augmentation: Augmentation) -> Tensor:
    erase: Callable[[Tensor], Tensor] = RandomErasing(  # type: ignore[no-untyped-call]  # timm's
        augmentation.erasing, mode=augmentation.erasing_mode, device=str(images.device)
    )
    return erase(images)


def check_even(images: int) -> None:
    """Raise InputError for a batch that mixup cannot pair."""
    if images % 2:
        raise InputError(
            f"mixup pairs the images of a batch, and this one has {images}: set an even batch_size, of no more images "
            "than there are"
        )


def _mixup(images: Tensor, labels: Tensor, recipe: Recipe, classes: int) -> tuple[Tensor, Tensor]:
    """The images, and mixup's soft labels (B, C)."""
    mixup = recipe.mixup
    check_even(len(images))
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


def _sample_box(settings: CutMix, grid_size: int, rng: random.Random) -> Box:
    """A box of a share ~ Beta(alpha, alpha) of the grid; with probability 1 − p an empty one."""
    if rng.random() >= settings.probability:
        return Box(0, 0, 0, 0)
    return sample_box(grid_size, rng.betavariate(settings.alpha, settings.alpha), rng)


def compute_losses(
    model: nn.Module, batch: MixedBatch, recipe: Recipe, classes: int, *, teacher: Teacher | None = None
) -> dict[str, Tensor]:
    """Return the unweighted losses by name, and their weighted sum as "total"; scalars.

    total = CE + Σ weight·loss (docs/maths.md §2). With a `teacher`, CE becomes (1−w)·CE + w·distillation (§2.7).
    A network that returns two logits (DeiT's distilled networks) learns the labels with the first and the teacher's
    predictions with the second; a network with one logits tensor learns both with it.
    """
    weights, smoothing = recipe.losses, recipe.losses.label_smoothing
    compared: Any = {"over": weights.attention_over, "pairs": weights.attention_pairs}
    with ExitStack() as watched:
        if weights.attention:
            attention = watched.enter_context(attention_loss(model, weights.attention_maps, **compared))
        tokens, output = _forward(model, batch.images_B3SS, weights)
    logits_BC, distilled_BC = output if isinstance(output, tuple) else (output, output)
    # Cross-entropy in float32: under autocast the logits are in half precision.
    losses = {"classification": F.cross_entropy(logits_BC.float(), image_targets(batch, classes, smoothing))}
    if tokens is not None:
        losses |= _token_losses(model, tokens, batch, weights, classes)
    if weights.attention:
        losses["attention"] = attention()
    total = losses["classification"]
    for name, loss in losses.items():
        if name != "classification":
            total = total + getattr(weights, name) * loss
    if teacher is not None:
        losses["distillation"] = teacher.loss(distilled_BC, batch.images_B3SS)
        # CE has weight 1 in `total` so far, and CE + w·(distillation − CE) = (1−w)·CE + w·distillation.
        total = total + teacher.settings.weight * (losses["distillation"] - losses["classification"])
    return {**losses, "total": total}


def _forward(
    model: nn.Module, images: Tensor, weights: Losses
) -> tuple[TokenOutputs | None, Tensor | tuple[Tensor, Tensor]]:
    """The patch tokens, where a loss needs them, and the network's output: logits (B, C), or two of them."""
    if not weights.need_tokens:
        return None, model(images)
    assert isinstance(model, TimmVisionTransformer)
    # The official mixing loss classifies pooled regions, so it does not need the logits of every patch.
    tokens = forward_with_tokens(model, images, classify_patches=weights.mixing_variant == "paper")
    return tokens, tokens.logits_BC


def _token_losses(
    model: nn.Module, tokens: TokenOutputs, batch: MixedBatch, weights: Losses, classes: int
) -> dict[str, Tensor]:
    losses = {}
    if weights.cosine:
        losses["cosine"] = patch_cosine_loss(tokens.late_BnD)
    if weights.contrastive:
        variant = weights.contrastive_variant
        # After the first block, or the patch embedding before positions are added (docs/maths.md §2.2 and §2.5).
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
    """The images' soft labels (B, C): mixup's, or (1 − a)·own + a·partner's with a the box's share of the image."""
    if batch.targets_BC is not None:
        return batch.targets_BC
    own_BC = smooth_one_hot(batch.labels_B, classes, smoothing)
    partner_BC = smooth_one_hot(batch.partner_labels_B, classes, smoothing)
    return torch.lerp(own_BC, partner_BC, batch.weight_B.unsqueeze(-1))


def smooth_one_hot(labels: Tensor, classes: int, smoothing: float) -> Tensor:
    """Return probabilities, one axis more than `labels`: 1−ε+ε/C at the label and ε/C elsewhere."""
    return F.one_hot(labels, classes).float() * (1 - smoothing) + smoothing / classes
