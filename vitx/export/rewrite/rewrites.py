"""Exact rewrites of a trained network before it is traced (docs/maths.md §4): their names, order and check.

Each is an identity in exact arithmetic, changes the network in place, and can be left out by its name.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from timm.layers import DropPath
from timm.utils import reparameterize_model
from torch import Tensor, nn

from vitx.core.errors import CheckFailed, InputError, first_line, unknown_name
from vitx.core.preprocess import Preprocessing
from vitx.export.graph.tracing import any_tensor, failure_of
from vitx.export.rewrite.canonical import has_hooks, is_plain
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

# Relative to the largest logit: a rewrite may change the order of float32 sums, and nothing else.
TOLERANCE = 1e-4


class ImageClassifier(nn.Module):
    """What is exported: images uint8 (N, S, S, 3) → logits (N, C), the normalisation `(x/255 − mean)/std` inside."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, preprocessing: Preprocessing) -> None:
        super().__init__()
        self.model = model
        self.subtract_mean = self.divide_by_std = True
        reference = any_tensor(model)
        for name, values in (("mean", preprocessing.mean), ("std", preprocessing.std)):
            # In units of pixel values: (x/255 − m)/s = (x − 255·m)/(255·s), which needs no division by 255.
            on_pixels = 255 * torch.tensor(values, dtype=torch.float64)
            self.register_buffer(name, on_pixels.to(reference).view(1, 3, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        # Contiguous: traced with the strides of channels-last images, pooling would become a gather.
        pixels = images.permute(0, 3, 1, 2).to(self.mean.dtype, memory_format=torch.contiguous_format)
        if self.subtract_mean:
            pixels = pixels - self.mean
        if self.divide_by_std:
            pixels = pixels / self.std
        logits: Tensor = self.model(pixels)
        return logits


def fold_normalization(classifier: ImageClassifier) -> int:
    """6. Fold (x/255 − mean)/std into the first convolution: W' = W/(255·std), b' = b − Σ W·mean/std.

    W (out, 3, h, w), std and mean for each input channel, the sum over channel, row and column. The mean goes in only
    where the convolution has no padding: the zeros of a padded border stand for normalised pixels, and a bias would
    subtract a mean from them too. A padded stem keeps the subtraction (of 255·mean) and loses the division. Where the
    stem has branches, each of their convolutions takes it. Returns 1 if it folded something, 0 if not.
    """
    convolutions = first_convolutions(classifier.model)
    if not convolutions or not classifier.divide_by_std:
        return 0
    for convolution in convolutions:
        convolution.weight = nn.Parameter(convolution.weight.detach() / classifier.std)
    classifier.divide_by_std = False
    padded = any(getattr(module, "dynamic_img_pad", False) for module in classifier.model.modules())
    if not padded and not any(map(_is_padded, convolutions)):
        for convolution in convolutions:
            shift = -(convolution.weight * classifier.mean).sum(dim=(1, 2, 3))
            convolution.bias = nn.Parameter(shift if convolution.bias is None else convolution.bias.detach() + shift)
        classifier.subtract_mean = False
    return 1


def reparameterize(classifier: ImageClassifier) -> int:
    """13. Parallel layers with their norms as one, where the network can make it: `Σ_i s_i⊙(W_i x) + t_i`.

    RepVGG's blocks (arXiv 2101.03697, §3.3), and those of timm's networks that know how to merge theirs: MobileOne,
    FastViT, RepViT, LeViT and others. Returns how many modules. A network that was built merged (inference_mode=True)
    stays as it is, and so does one with a hook or a layer of another library in a module that would be merged.
    """
    known = ("fuse", "reparameterize", "switch_to_deploy")
    _, *below = classifier.model.modules()
    modules = [module for module in below if any(hasattr(module, name) for name in known)]
    parts = [part for module in modules for part in module.modules()]
    # timm takes the weights as they are, and some modules of FastViT cannot be asked twice.
    merged = any(getattr(part, "reparam_conv", None) is not None for part in parts)
    of_timm = all(type(module).__module__.startswith("timm.") for module in (classifier.model, *modules))
    known_parts = all(type(part).__module__.startswith(("timm.", "torch.nn.modules.")) for part in parts)
    if not modules or merged or not of_timm or not known_parts or not all(is_plain(part, type(part)) for part in parts):
        return 0
    default = torch.get_default_dtype()
    torch.set_default_dtype(classifier.mean.dtype)  # some make their new layers of no other, on the CPU
    try:
        reparameterize_model(classifier.model, inplace=True)
    finally:
        torch.set_default_dtype(default)
    classifier.to(classifier.mean.device)
    return len(modules)


def remove_dead_outputs(classifier: ImageClassifier) -> int:
    """9. Remove what evaluation does not use: the patch head, dropout, drop path; return how many."""
    dead = [(name, module) for name, module in classifier.named_modules() if is_plain(module, nn.Dropout, DropPath)]
    for name, _ in dead:
        parent, _, child = name.rpartition(".")
        setattr(classifier.get_submodule(parent), child, nn.Identity().train(classifier.training))
    if isinstance(classifier.model, VisionTransformer) and classifier.model.patch_head is not None:
        classifier.model.patch_head = None
        return len(dead) + 1
    return len(dead)


# In the order in which they are applied: a later rewrite finds more where an earlier one has simplified.
REWRITES: dict[str, Callable[[ImageClassifier], int]] = {
    "remove-dead-outputs": remove_dead_outputs,
    "fold-normalization": fold_normalization,
    "reparameterize": reparameterize,
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
# pad-head-dim is slower on a CPU (docs/export.md).
ALL = tuple(name for name in REWRITES if name != "pad-head-dim")


def select_rewrites(added: Sequence[str] = (), without: Sequence[str] = ()) -> tuple[str, ...]:
    """The rewrites that are on by default, with some added and some left out, in the order in which they apply.

    Raises InputError for an unknown name, and for one that is added and left out.
    """
    require_known((*added, *without))
    if both := sorted(set(added) & set(without)):
        raise InputError(f"--with {both[0]} --without {both[0]}: choose one")
    return tuple(name for name in REWRITES if (name in ALL or name in added) and name not in without)


def rewrite_for_export(
    model: nn.Module,
    preprocessing: Preprocessing | None = None,
    *,
    rewrites: Sequence[str] = ALL,
    images: Literal["uint8", "float"] = "uint8",
) -> nn.Module:
    """Return a rewritten copy of `model` in evaluation mode: same dtype, same function.

    With `images="uint8"` the copy takes uint8 (N, S, S, 3) and needs `preprocessing`; with "float" it takes the model's
    own input, normalised (N, 3, S, S), and the normalisation fold does not apply.
    `model` may be any classifier of timm's: the blocks of vision transformers are rewritten, and a rewrite that finds
    nothing changes nothing. Raises InputError for an unknown rewrite, and for weights that PyTorch does not copy.
    """
    try:
        copied = copy.deepcopy(model).eval()
    except RuntimeError as reason:  # of weights that a hook computes of others
        raise InputError(
            f"the network cannot be copied: {first_line(reason)} Make pruning or weight normalisation permanent before "
            "(torch.nn.utils.prune.remove, remove_weight_norm)"
        ) from None
    classifier = ImageClassifier(copied, preprocessing or Preprocessing(image_size=1)).eval()
    applied_rewrites(classifier, [name for name in rewrites if images == "uint8" or name != "fold-normalization"])
    if images == "float":
        return classifier.model
    if preprocessing is None:
        raise ValueError("images='uint8' needs the preprocessing whose normalisation goes into the graph")
    return classifier


def rewrite_checked(
    classifier: ImageClassifier, rewrites: Sequence[str], image_size: int, *, rebuild: Callable[[], ImageClassifier]
) -> dict[str, int]:
    """Apply the named rewrites and return in how many places each applied; `rebuild` builds the classifier anew.

    Raises InputError where the network cannot run on images of this size, and CheckFailed naming the first rewrite that
    changed the logits of random images: the rewrites assume that a layer is used in one place only, and that no code
    but the layer's reads its weights. CheckFailed too where rounding alone changes them as much.
    """
    images = torch.randint(0, 256, (2, image_size, image_size, 3), dtype=torch.uint8, generator=_seeded())
    expected = logits_of_network(classifier, images)
    applied = applied_rewrites(classifier, rewrites)
    if _change(expected, _logits(classifier, images)) <= TOLERANCE:
        return applied
    # Rewritten weights cannot be restored, so the search for the culprit starts from a fresh network.
    classifier = rebuild()
    noise = _change(_logits(copy.deepcopy(classifier).double(), images), expected)
    if noise > TOLERANCE:
        raise CheckFailed(
            f"this network's logits in float32 are {noise:.2g} of the largest away from those in float64: they are "
            "noise, and no export of them could be checked; look at its weights"
        )
    for name in REWRITES:
        if name in rewrites:
            applied_rewrites(classifier, [name])
            change = _change(expected, _logits(classifier, images))
            if not change <= TOLERANCE:  # NaN too
                raise CheckFailed(
                    f"the rewrite '{name}' changes this network, by {change:.2g} of its largest logit: it uses a layer "
                    f"in two places, or a weight on its own; leave it out with --without {name}"
                )
    raise CheckFailed("the rewrites together change this network, none of them alone: please report it")


def logits_of_network(classifier: ImageClassifier, images: Tensor) -> Tensor:
    """Logits float64 (N, C) of images uint8 (N, S, S, 3); raise InputError where the network cannot classify them."""
    try:
        return _logits(classifier, images)
    # A network checks its input by whatever raises; the message says in which of its modules.
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        place, reason = failure_of(error, classifier)
        size = images.shape[1]
        raise InputError(
            f"this network cannot classify images of {size} × {size} pixels, {place}: {reason}; give it "
            "other arguments with --model-arg, or take another network of its family"
        ) from None


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


def require_known(rewrites: Sequence[str]) -> None:
    """Raise InputError for an unknown rewrite."""
    for name in rewrites:
        if name not in REWRITES:
            raise unknown_name("rewrite", name, REWRITES)


def applied_rewrites(classifier: ImageClassifier, rewrites: Sequence[str]) -> dict[str, int]:
    """Apply the named rewrites in the order of REWRITES; return in how many places each applied."""
    require_known(rewrites)
    with torch.no_grad():
        return {name: REWRITES[name](classifier) for name in REWRITES if name in rewrites}


def first_convolutions(model: nn.Module) -> list[nn.Conv2d]:
    """The convolutions of three channels that read the pixels, by timm's configuration; none unless all are plain.

    The configuration is of the network as it is registered: with arguments of its own it may lack what it names. Of a
    stem with branches it names several.
    """
    configuration: dict[str, Any] = getattr(model, "pretrained_cfg", None) or {}
    names = configuration.get("first_conv") or ()
    modules = dict(model.named_modules())
    found = [modules.get(name) for name in ([names] if isinstance(names, str) else names)]
    # A subclass may pad or standardise its weights in its own forward pass.
    plain = [each for each in found if isinstance(each, nn.Conv2d) and is_plain(each, nn.Conv2d)]
    of_pixels = [each for each in plain if each.groups == 1 and each.in_channels == 3]
    # A hook on a module around them may change the pixels first.
    return of_pixels if len(of_pixels) == len(found) and not any(map(has_hooks, modules.values())) else []


def _is_padded(convolution: nn.Conv2d) -> bool:
    return convolution.padding == "same" or (not isinstance(convolution.padding, str) and any(convolution.padding))
