"""Exact rewrites of a trained network before it is traced (docs/maths.md §4).

Each is an identity in exact arithmetic, changes a copy of the model in place, and can be left out by its name.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from timm.layers import DropPath
from torch import Tensor, nn

from vitx.core.errors import CheckFailed, unknown_name
from vitx.core.preprocess import Preprocessing
from vitx.export.rewrite.folds import (
    compute_class_token_only,
    drop_row_constants,
    fold_attention_scale,
    fold_head_norm,
    fold_layer_norm_affine,
    fold_residual_scale,
    fold_value_bias,
    join_tokens,
    pad_head_dim,
    split_rank_one_bias,
)
from vitx.models import VisionTransformer

# Of the largest logit: in float32 a rewrite reorders sums, and no more.
TOLERANCE = 1e-4


class ImageClassifier(nn.Module):
    """The graph that is exported: images uint8 (N, S, S, 3) → logits (N, C), normalisation inside."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, preprocessing: Preprocessing) -> None:
        super().__init__()
        self.model = model
        self.subtract_mean = self.divide_by_std = True
        reference = next(model.parameters())
        for name, values in (("mean", preprocessing.mean), ("std", preprocessing.std)):
            on_pixels = 255 * torch.tensor(values, dtype=torch.float64)
            self.register_buffer(name, on_pixels.to(reference).view(1, 3, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        # Contiguous, or the network is traced in channels-last strides and pooling becomes a gather.
        pixels = images.permute(0, 3, 1, 2).to(self.mean.dtype, memory_format=torch.contiguous_format)
        if self.subtract_mean:
            pixels = pixels - self.mean
        if self.divide_by_std:
            pixels = pixels / self.std
        logits: Tensor = self.model(pixels)
        return logits


def fold_normalization(classifier: ImageClassifier) -> int:
    """6. Fold (x/255 − mean)/std into the first convolution: W' = W/(255·std), b' = b − Σ W·mean/std.

    The mean goes in only where the convolution sees no padding: zeros are put in after normalisation, so a padded stem
    keeps the subtraction (of 255·mean) and loses the division. Returns 1 if it folded something, 0 if not.
    """
    convolution = first_convolution(classifier.model)
    if convolution is None or convolution.groups != 1 or convolution.in_channels != 3 or not classifier.divide_by_std:
        return 0
    scaled = convolution.weight.detach() / classifier.std
    convolution.weight = nn.Parameter(scaled)
    classifier.divide_by_std = False
    padded = any(getattr(module, "dynamic_img_pad", False) for module in classifier.model.modules())
    if not padded and not _is_padded(convolution):
        shift = -(scaled * classifier.mean).sum(dim=(1, 2, 3))
        convolution.bias = nn.Parameter(shift if convolution.bias is None else convolution.bias.detach() + shift)
        classifier.subtract_mean = False
    return 1


def remove_dead_outputs(classifier: ImageClassifier) -> int:
    """9. Remove what evaluation does not use: the patch head, dropout, drop path; return how many."""
    dead = [(name, module) for name, module in classifier.named_modules() if isinstance(module, nn.Dropout | DropPath)]
    for name, _ in dead:
        parent, _, child = name.rpartition(".")
        setattr(classifier.get_submodule(parent), child, nn.Identity().train(classifier.training))
    if isinstance(classifier.model, VisionTransformer) and classifier.model.patch_head is not None:
        classifier.model.patch_head = None
        return len(dead) + 1
    return len(dead)


# In the order in which they are applied: what a later one reads, an earlier one has simplified.
REWRITES: dict[str, Callable[[ImageClassifier], int]] = {
    "remove-dead-outputs": remove_dead_outputs,
    "fold-normalization": fold_normalization,
    "fold-head-norm": fold_head_norm,
    "split-rank-one-bias": split_rank_one_bias,
    "fold-attention-scale": fold_attention_scale,
    "fold-residual-scale": fold_residual_scale,
    "fold-layer-norm-affine": fold_layer_norm_affine,
    "drop-row-constants": drop_row_constants,
    "fold-value-bias": fold_value_bias,
    "compute-class-token-only": compute_class_token_only,
    "join-tokens": join_tokens,
    "pad-head-dim": pad_head_dim,
}
ALL = tuple(name for name in REWRITES if name != "pad-head-dim")


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
    Any classifier of timm's will do: blocks of its vision transformers are rewritten, and where a rewrite finds nothing
    it changes nothing. Raises InputError for an unknown rewrite.
    """
    classifier = ImageClassifier(copy.deepcopy(model).eval(), preprocessing or Preprocessing(image_size=1)).eval()
    applied_rewrites(classifier, [name for name in rewrites if images == "uint8" or name != "fold-normalization"])
    if images == "float":
        return classifier.model
    if preprocessing is None:
        raise ValueError("images='uint8' needs the preprocessing whose normalisation goes into the graph")
    return classifier


def rewrite_checked(
    classifier: ImageClassifier, rewrites: Sequence[str], image_size: int, *, rebuild: Callable[[], ImageClassifier]
) -> dict[str, int]:
    """Apply the named rewrites and return how often each found something to do; `rebuild` makes the classifier anew.

    Raises CheckFailed naming the first rewrite that changed the logits of noise: a network that uses one layer in two
    places, or reads a weight on its own, breaks what the rewrites take for granted.
    """
    images = torch.randint(0, 256, (2, image_size, image_size, 3), dtype=torch.uint8, generator=_seeded())
    expected = _logits(classifier, images)
    applied = applied_rewrites(classifier, rewrites)
    if _change(expected, _logits(classifier, images)) <= TOLERANCE:
        return applied
    classifier = rebuild()
    for name in REWRITES:
        if name in rewrites:
            applied_rewrites(classifier, [name])
            change = _change(expected, _logits(classifier, images))
            if change > TOLERANCE:
                raise CheckFailed(
                    f"the rewrite '{name}' changes this network, by {change:.2g} of its largest logit: it uses a layer "
                    f"in two places, or a weight on its own; leave it out with --without {name}"
                )
    raise CheckFailed("the rewrites together change this network, none of them alone: please report it")


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _logits(classifier: ImageClassifier, images: Tensor) -> Tensor:
    with torch.inference_mode():
        logits: Tensor = classifier(images.to(classifier.mean.device)).double().cpu()
    return logits


def _change(expected: Tensor, found: Tensor) -> float:
    """Largest difference over the largest logit; 0 where the network itself gives no finite logits."""
    if not expected.isfinite().all():
        return 0.0
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-6))


def applied_rewrites(classifier: ImageClassifier, rewrites: Sequence[str]) -> dict[str, int]:
    """Apply the named rewrites in the order of REWRITES; return how often each found something to do."""
    for name in rewrites:
        if name not in REWRITES:
            raise unknown_name("rewrite", name, REWRITES)
    with torch.no_grad():
        return {name: REWRITES[name](classifier) for name in REWRITES if name in rewrites}


def first_convolution(model: nn.Module) -> nn.Conv2d | None:
    """The convolution that sees the pixels: the one timm's configuration names, if it is one."""
    configuration: dict[str, Any] = getattr(model, "pretrained_cfg", None) or {}
    name = configuration.get("first_conv")
    if not isinstance(name, str):
        return None
    module = model.get_submodule(name)
    # A subclass may pad on its own or standardise its weights, so only the plain layer is known.
    return module if type(module) is nn.Conv2d else None


def _is_padded(convolution: nn.Conv2d) -> bool:
    return convolution.padding == "same" or (not isinstance(convolution.padding, str) and any(convolution.padding))
