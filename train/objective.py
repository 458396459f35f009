"""What is minimised: cross-entropy and the token losses of one batch, by name."""

import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitx.core.errors import InputError
from vitx.models import TokenOutputs, VisionTransformer
from vitx.train.cutmix import MixedBatch, cutmix, sample_box, unmixed
from vitx.train.losses import patch_contrastive_loss, patch_cosine_loss, patch_mixing_loss
from vitx.train.recipe import Recipe


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
    if recipe.losses.need_tokens and not isinstance(model, VisionTransformer):
        raise InputError(
            f"model '{recipe.model.name}' does not give its patch tokens, which the token losses need: set "
            "losses.cosine=0, losses.contrastive=0 and losses.mixing=0, or choose a model of `vitx models`"
        )
    if recipe.cutmix.probability and patch_grid(model) is None:
        raise InputError(f"model '{recipe.model.name}' has no square patch grid for CutMix: set cutmix.probability=0")


def mix(images: Tensor, labels: Tensor, recipe: Recipe, grid: PatchGrid | None, rng: random.Random) -> MixedBatch:
    """Apply the recipe's CutMix to float (B, 3, S, S) images, or none of it."""
    if grid is None:
        return unmixed(images, labels, patches=0)
    if rng.random() >= recipe.cutmix.probability:
        return unmixed(images, labels, patches=grid.side**2)
    share = rng.betavariate(recipe.cutmix.alpha, recipe.cutmix.alpha)
    return cutmix(images, labels, sample_box(grid.side, share, rng), grid.patch_size)


def losses_of(model: nn.Module, batch: MixedBatch, recipe: Recipe, classes: int) -> dict[str, Tensor]:
    """Return the unweighted losses by name, and their weighted sum as "total"; scalars."""
    weights, smoothing = recipe.losses, recipe.losses.label_smoothing
    tokens: TokenOutputs | None = None
    if weights.need_tokens:
        assert isinstance(model, VisionTransformer)
        tokens = model.forward_with_tokens(batch.images_B3SS)
    logits_BC = model(batch.images_B3SS) if tokens is None else tokens.logits_BC
    own_BC = smooth_one_hot(batch.labels_B, classes, smoothing)
    partner_BC = smooth_one_hot(batch.partner_labels_B, classes, smoothing)
    targets_BC = torch.lerp(own_BC, partner_BC, batch.weight)
    losses = {"classification": F.cross_entropy(logits_BC.float(), targets_BC)}
    total = losses["classification"]
    for name, weight, loss in _token_losses(tokens, batch, recipe, classes):
        losses[name] = loss
        total = total + weight * loss
    return {**losses, "total": total}


def _token_losses(
    tokens: TokenOutputs | None, batch: MixedBatch, recipe: Recipe, classes: int
) -> list[tuple[str, float, Tensor]]:
    if tokens is None:
        return []
    weights, losses = recipe.losses, []
    if weights.cosine:
        losses.append(("cosine", weights.cosine, patch_cosine_loss(tokens.late_BnD)))
    if weights.contrastive:
        losses.append(("contrastive", weights.contrastive, patch_contrastive_loss(tokens.early_BnD, tokens.late_BnD)))
    if weights.mixing:
        assert tokens.patch_logits_BnC is not None
        targets_BnC = smooth_one_hot(batch.patch_labels_Bn, classes, weights.label_smoothing)
        losses.append(("mixing", weights.mixing, patch_mixing_loss(tokens.patch_logits_BnC, targets_BnC)))
    return losses


def smooth_one_hot(labels: Tensor, classes: int, smoothing: float) -> Tensor:
    """Return probabilities, one axis more than `labels`: 1−ε+ε/C at the label and ε/C elsewhere."""
    return F.one_hot(labels, classes).float() * (1 - smoothing) + smoothing / classes
