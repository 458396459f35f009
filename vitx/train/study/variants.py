"""The rows of each study, the numbers that its paper prints for them, and what the paper trained.

Gong et al. is arXiv 2104.12753, DeepViT Zhou et al., arXiv 2103.11886, Park & Kim arXiv 2202.06709.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vitx.core.errors import InputError
from vitx.train.options import StudyKind
from vitx.train.recipes.recipe import Recipe
from vitx.train.study.result import Variant

LOSSES = ("cosine", "contrastive", "mixing")
ATTENTIONS = ("plain", "talking-heads", "re-attention")
METHODS = ("talking-heads", "re-attention", "attn-scale", "neutreno")  # the kinds of attention among them
DEPTHS = (6, 12, 24, 32)
KERNEL_SIZES = (3, 5, 7)
# ImageNet top-1 (%) of DeiT-B with these losses: Gong et al., Table 1. It has no row for all three.
PUBLISHED = {
    ("cosine",): 82.0,
    ("mixing",): 82.4,
    ("contrastive",): 82.3,
    ("cosine", "mixing"): 82.3,
    ("cosine", "contrastive"): 82.3,
    ("contrastive", "mixing"): 82.6,
}
# DeepViT's depth table: blocks and attention → top-1 (%).
DEEPVIT = {
    (16, "plain"): 78.88,
    (16, "re-attention"): 79.10,
    (24, "plain"): 79.35,
    (24, "re-attention"): 79.99,
    (32, "plain"): 79.27,
    (32, "re-attention"): 80.90,
}
# The losses of Gong et al. at the weights of their recipe.
WITH_LOSSES = ("losses.contrastive=1", "losses.mixing=1", "losses.cosine=0")
# Without the losses of patches and their CutMix; DeiT, the baseline, mixes pixels instead.
WITHOUT_LOSSES = (*(f"losses.{name}=0" for name in LOSSES), "cutmix.probability=0")
BASELINE = (*WITHOUT_LOSSES, "mixup.mixup=0.8", "mixup.cutmix=1.0")
# The network without any of the methods, of which that of a recipe may have one.
PLAIN = ("model.kwargs.attention=plain", "model.kwargs.feat_scale=false", "model.kwargs.contranorm_scale=0")


@dataclass(frozen=True)
class Published:
    """A study beside its paper: its rows, what the paper's numbers are of, and the recipe it varies by default."""

    variants: Callable[[Recipe], list[Variant]]
    paper: str
    recipe: str = "digits-deit"


def _weights(recipe: Recipe) -> dict[str, float]:
    """Of each loss where it is on: the recipe's, or 1 where the recipe has 0."""
    return {name: getattr(recipe.losses, name) or 1.0 for name in LOSSES}


def ablation_variants(recipe: Recipe) -> list[Variant]:
    """Table 1 of Gong et al.: DeiT's baseline, then cosine × contrastive × mixing with the recipe's weight, or 1."""
    off = dict.fromkeys(LOSSES, 0.0)
    variants = [Variant("baseline", BASELINE, {"mixed": "pixels", **off}, 81.8)]
    for count in range(len(LOSSES) + 1):
        for on in itertools.combinations(LOSSES, count):
            weights = {name: weight if name in on else 0.0 for name, weight in _weights(recipe).items()}
            overrides = tuple(f"losses.{name}={weight}" for name, weight in weights.items())
            factors = {"mixed": "patches", **weights}
            variants.append(Variant("+".join(on) or "none", overrides, factors, PUBLISHED.get(on)))
    return variants


def depth_variants(depths: Sequence[int]) -> list[Variant]:
    """Every depth with every kind of attention in all its blocks."""
    return [
        Variant(
            f"{depth}-{attention}",
            (f"model.kwargs.depth={depth}", f"model.kwargs.attention={attention}"),
            {"depth": depth, "attention": attention},
            DEEPVIT.get((depth, attention)),
        )
        for depth in depths
        for attention in ATTENTIONS
    ]


def _losses(depth: int, attention: str, on: bool, published: float | None) -> Variant:
    """A network of Gong et al. with their contrastive and mixing losses, or as DeiT trains it."""
    network = (f"model.kwargs.depth={depth}", f"model.kwargs.attention={attention}")
    name = f"{depth}-{attention}-{'losses' if on else 'baseline'}"
    factors = {"depth": depth, "attention": attention, "losses": "on" if on else 0}
    return Variant(name, (*network, *(WITH_LOSSES if on else BASELINE)), factors, published)


def losses_variants(_recipe: Recipe) -> list[Variant]:
    """What the losses give at 12 and at 24 blocks (DeiT-B in the paper)."""
    return [
        _losses(12, "plain", False, 81.8),
        _losses(12, "plain", True, 82.6),
        _losses(24, "plain", False, 81.4),
        _losses(24, "plain", True, None),
        _losses(24, "talking-heads", True, 83.3),
    ]


def talking_heads_variants(_recipe: Recipe) -> list[Variant]:
    """Plain attention and talking heads of 12 blocks, with the losses and without."""
    return [
        _losses(12, "plain", False, 81.8),
        _losses(12, "talking-heads", False, None),
        _losses(12, "plain", True, 82.6),
        _losses(12, "talking-heads", True, 82.9),
    ]


def finetune_variants(recipe: Recipe) -> list[Variant]:
    """At 12/7 of the recipe's image size (224 → 384), a hundredth of its rate, constant: with the losses and without.

    Raises InputError without weights to begin with.
    """
    if not recipe.model.initial_checkpoint:
        raise InputError("a study of fine-tuning begins with weights: give --set model.initial_checkpoint=RUN")
    size = 16 * round(recipe.preprocessing.image_size * 12 / 7 / 16)
    rate = recipe.optimizer.lr / 100
    common = (f"preprocessing.image_size={size}", f"optimizer.lr={rate:g}", "optimizer.weight_decay=1e-8")
    # A constant rate has no end, at which a recipe may stay for some epochs.
    constant = (*common, "schedule.name=constant", "schedule.min_lr=0", "schedule.cooldown_epochs=0")
    return [
        Variant(f"{size}px-{name}", (*constant, *overrides), {"image size": size, "losses": factor}, published)
        for name, overrides, factor, published in (("baseline", BASELINE, 0, 83.1), ("losses", WITH_LOSSES, "on", 84.2))
    ]


def methods_variants(recipe: Recipe) -> list[Variant]:
    """Each method against over-smoothing alone beside the plain network, in all blocks; the mixing loss mixes patches.

    A loss has the recipe's weight, or 1 where the recipe has 0.
    """
    methods: dict[str, tuple[str, ...]] = {
        "plain": (),
        **{f"{name}-loss": (f"losses.{name}={weight}",) for name, weight in _weights(recipe).items()},
        **{name: (f"model.kwargs.attention={name}",) for name in METHODS},
        "feat-scale": ("model.kwargs.feat_scale=true",),
        "contranorm": ("model.kwargs.contranorm_scale=0.2",),
    }
    methods["mixing-loss"] += ("cutmix.probability=1",)
    common = (*PLAIN, *WITHOUT_LOSSES, "losses.attention=0")
    return [Variant(name, (*common, *overrides), {"method": name}) for name, overrides in methods.items()]


def kernel_size_variants(_recipe: Recipe) -> list[Variant]:
    """Attention within k×k neighbourhoods, and among all patches; no class token in either."""
    pooled = "model.kwargs.global_pool=avg"
    local = [
        Variant(
            f"{size}x{size}",
            (pooled, "model.kwargs.attention=local", f"model.kwargs.local_kernel_size={size}"),
            {"neighbourhood": f"{size}x{size}"},
        )
        for size in KERNEL_SIZES
    ]
    return [*local, Variant("all", (pooled, "model.kwargs.attention=plain"), {"neighbourhood": "all"})]


def precision_variants(_recipe: Recipe) -> list[Variant]:
    """Re-Attention in 16 blocks, as in DeepViT-16B, in float32 and with autocast to each of the halves."""
    network = ("model.kwargs.depth=16", "model.kwargs.attention=re-attention")
    return [
        Variant(name, (*network, f"execution.precision={name}"), {"precision": name})
        for name in ("float32", "bfloat16", "float16")
    ]


STUDIES: dict[StudyKind, Published] = {
    "ablation": Published(
        ablation_variants,
        "Gong et al., Table 1: DeiT-B of 12 blocks x 768, ImageNet, 224 px, 300 epochs",
    ),
    "losses": Published(
        losses_variants,
        "Gong et al.: DeiT-B of 12 and 24 blocks x 768, ImageNet, 224 px, 300 to 400 epochs",
    ),
    "depth": Published(
        lambda recipe: depth_variants(DEPTHS),
        "DeepViT's depth table: 12 heads, width 384, ImageNet, 224 px; layers that repeat their maps at 16, 24, 32 "
        "blocks: 5, 11, 15 plain, none with Re-Attention",
    ),
    "talking-heads": Published(
        talking_heads_variants,
        "Gong et al.: DeiT-B of 12 blocks x 768, ImageNet, 224 px, 300 to 400 epochs",
    ),
    "finetune": Published(
        finetune_variants,
        "Gong et al.: DeiT-B of 12 blocks x 768 from 224 to 384 px, ImageNet, 30 epochs",
    ),
    "methods": Published(methods_variants, "no paper has all of them; each compares its own with the plain network"),
    "kernel-size": Published(
        kernel_size_variants, "Park & Kim draw accuracies of a ViT on CIFAR-100 and print no numbers"
    ),
    "precision": Published(precision_variants, "DeepViT's configurations train in float32"),
    "alternet": Published(
        lambda recipe: [], "Park & Kim draw the build-up on CIFAR-100 and print no numbers", "digits-alternet"
    ),
}
