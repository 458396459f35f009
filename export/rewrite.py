"""Exact rewrites of a trained network before it is traced (MATHS §4).

Each is an identity in exact arithmetic, changes a copy of the model in place, and can be left out by its name.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from timm.layers import DropPath
from torch import Tensor, nn

from vitx.core.errors import unknown_name
from vitx.core.preprocess import Preprocessing
from vitx.models import ReAttention, VisionTransformer, fold_head_mix
from vitx.models.attention import HeadMixAttention, mix_heads


class FoldedReAttention(HeadMixAttention):
    """Re-Attention in evaluation mode with BatchNorm and scale folded into the head mix."""

    weight_HH: Tensor
    bias_H: Tensor

    def __init__(self, trained: ReAttention) -> None:
        nn.Module.__init__(self)  # takes the trained layers over instead of making its own
        self.num_heads, self.head_dim, self.scale = trained.num_heads, trained.head_dim, trained.scale
        self.qkv, self.proj = trained.qkv, trained.proj
        self.attn_drop, self.proj_drop = trained.attn_drop, trained.proj_drop
        weight_HH, bias_H = fold_head_mix(trained)
        self.register_buffer("weight_HH", weight_HH)
        self.register_buffer("bias_H", bias_H)

    def after_softmax(self, maps_BHNN: Tensor) -> Tensor:
        return mix_heads(maps_BHNN, self.weight_HH, self.bias_H)


class ImageClassifier(nn.Module):
    """The graph that is exported: images uint8 (N, S, S, 3) → logits (N, C), normalisation inside."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, preprocessing: Preprocessing) -> None:
        super().__init__()
        self.model = model
        self.normalize = True
        reference = next(model.parameters())
        for name, values in (("mean", preprocessing.mean), ("std", preprocessing.std)):
            on_pixels = 255 * torch.tensor(values, dtype=torch.float64)
            self.register_buffer(name, on_pixels.to(reference).view(1, 3, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        pixels = images.permute(0, 3, 1, 2).to(self.mean.dtype)
        if self.normalize:
            pixels = (pixels - self.mean) / self.std
        logits: Tensor = self.model(pixels)
        return logits


def fold_head_norm(classifier: ImageClassifier) -> int:
    """1. Fold BatchNorm and `reatten_scale` of every Re-Attention into its head mix; return how many.

    A Re-Attention with a LayerNorm over heads is not linear in the maps and stays as it is.
    """
    foldable = [
        (name, module)
        for name, module in classifier.named_modules()
        if isinstance(module, ReAttention) and not isinstance(module.var_norm, nn.LayerNorm)
    ]
    for name, module in foldable:
        _replace(classifier, name, FoldedReAttention(module))
    return len(foldable)


def fold_normalization(classifier: ImageClassifier) -> int:
    """6. Fold (x/255 − mean)/std into the first convolution: W' = W/(255·std), b' = b − Σ W·mean/std.

    Exact only where the convolution sees no padding: zero padding is put in after normalisation, so a padded stem
    keeps the explicit normalisation. Returns 1 if folded, 0 if kept.
    """
    convolution = first_convolution(classifier.model)
    if convolution is None or any(convolution.padding) or convolution.groups != 1:
        return 0
    weight = convolution.weight.detach()
    scaled = weight / classifier.std
    shift = -(scaled * classifier.mean).sum(dim=(1, 2, 3))
    bias = shift if convolution.bias is None else convolution.bias.detach() + shift
    convolution.weight = nn.Parameter(scaled)
    convolution.bias = nn.Parameter(bias)
    classifier.normalize = False
    return 1


def remove_dead_outputs(classifier: ImageClassifier) -> int:
    """9. Remove what evaluation does not use: the patch head, dropout, drop path; return how many."""
    dead = [(name, module) for name, module in classifier.named_modules() if isinstance(module, nn.Dropout | DropPath)]
    for name, _ in dead:
        _replace(classifier, name, nn.Identity())
    if isinstance(classifier.model, VisionTransformer) and classifier.model.patch_head is not None:
        classifier.model.patch_head = None
        return len(dead) + 1
    return len(dead)


REWRITES: dict[str, Callable[[ImageClassifier], int]] = {
    "fold-head-norm": fold_head_norm,
    "fold-normalization": fold_normalization,
    "remove-dead-outputs": remove_dead_outputs,
}
ALL = tuple(REWRITES)


def rewrite_for_export(
    model: nn.Module,
    preprocessing: Preprocessing | None = None,
    *,
    rewrites: Sequence[str] = ALL,
    images: Literal["uint8", "float"] = "uint8",
) -> nn.Module:
    """Return a rewritten copy of `model` in evaluation mode, same dtype, same function.

    With `images="uint8"` the copy takes uint8 (N, S, S, 3) and needs `preprocessing`; with "float" it takes what the
    model takes, normalised (N, 3, S, S), and the normalisation fold does not apply.
    Raises InputError for an unknown rewrite.
    """
    classifier = ImageClassifier(copy.deepcopy(model).eval(), preprocessing or Preprocessing(image_size=1)).eval()
    applied_rewrites(classifier, [name for name in rewrites if images == "uint8" or name != "fold-normalization"])
    if images == "float":
        return classifier.model
    if preprocessing is None:
        raise ValueError("images='uint8' needs the preprocessing whose normalisation goes into the graph")
    return classifier


def applied_rewrites(classifier: ImageClassifier, rewrites: Sequence[str]) -> dict[str, int]:
    """Apply the named rewrites in order; return how often each found something to do."""
    for name in rewrites:
        if name not in REWRITES:
            raise unknown_name("rewrite", name, REWRITES)
    with torch.no_grad():
        return {name: REWRITES[name](classifier) for name in rewrites}


def first_convolution(model: nn.Module) -> nn.Conv2d | None:
    """The convolution that sees the pixels: the one timm's configuration names, if it is one."""
    configuration: dict[str, Any] = getattr(model, "pretrained_cfg", None) or {}
    name = configuration.get("first_conv")
    if not isinstance(name, str):
        return None
    module = model.get_submodule(name)
    return module if isinstance(module, nn.Conv2d) else None


def _replace(root: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(root.get_submodule(parent), child, module.train(root.training))
