"""The three over-smoothing losses of Gong et al. (arXiv 2104.12753, §4): as the paper states them, and as its code has
them, which is another thing for two of the three.

Each computes in float32 or wider, also inside autocast. Shape letters: B batch, n patches, D width, C classes, S = √n.
"""

import math
from collections.abc import Callable
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from vitx.core.errors import InputError, unknown_name
from vitx.models.similarity import token_similarity
from vitx.train.recipes.image_groups import LossVariant

# The epsilons of the papers' code: under its logarithms, and in its mean over a region.
LOG_EPS, POOL_EPS = 1e-8, 1e-4


def patch_cosine_loss(patches_BnD: Tensor, *, absolute: bool = False) -> Tensor:
    """Return ℓ_cos, the mean cosine of all pairs of different patch tokens; a scalar (eq. 1 of the paper as a loss).

    `patches_BnD` are the last layer's patch tokens after the final LayerNorm, class token left out. `absolute` takes
    |cos|. Raises InputError for fewer than two patches.
    """
    _expect(patches_BnD, 3, "patches (B, n, D)")
    if patches_BnD.shape[1] < 2:
        raise InputError(f"patch_cosine_loss needs at least 2 patches, got {patches_BnD.shape[1]}")
    with _full_precision(patches_BnD):
        if absolute:
            return token_similarity(_widened(patches_BnD), absolute=True)
        similarity: Tensor = _MeanCosine.apply(_widened(patches_BnD))
        return similarity


class _MeanCosine(torch.autograd.Function):
    """`token_similarity` in closed form, with a gradient in closed form: neither keeps a copy of the tokens.

    s = Σ_i ĥ_i: the value is (‖s‖² − n)/(n(n−1)), its gradient by h_i is 2(s − (ĥ_i·s) ĥ_i)/(‖h_i‖ n(n−1)).
    """

    @staticmethod
    def forward(ctx: Any, h_BnD: Tensor) -> Tensor:
        n = h_BnD.shape[1]
        inverse_Bn = torch.linalg.vector_norm(h_BnD, dim=-1).clamp_min(1e-12).reciprocal()
        sum_BD = torch.bmm(inverse_Bn.unsqueeze(1), h_BnD).squeeze(1)
        ctx.save_for_backward(h_BnD, inverse_Bn, sum_BD)
        return ((sum_BD.square().sum(dim=-1) - n) / (n * (n - 1))).mean()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        h_BnD, inverse_Bn, sum_BD = ctx.saved_tensors
        B, n, _ = h_BnD.shape
        weight_Bn = inverse_Bn * (2 * gradient / (B * n * (n - 1)))
        along_Bn = torch.bmm(h_BnD, sum_BD.unsqueeze(-1)).squeeze(-1) * inverse_Bn.square()
        gradient_BnD = torch.bmm(weight_Bn.unsqueeze(-1), sum_BD.unsqueeze(1))
        return gradient_BnD.addcmul_(h_BnD, (weight_Bn * along_Bn).unsqueeze(-1), value=-1)


def patch_contrastive_loss(
    early_BnD: Tensor,
    late_BnD: Tensor,
    *,
    variant: LossVariant = "paper",
    exclude_self: bool = False,
    window: int = 7,
) -> Tensor:
    """Return ℓ_cons: each late patch should be nearer to its own early patch than the mean late patch is; a scalar.

    "paper": `−1/n Σ_i log[exp(e_i·h_i) / (exp(e_i·h_i) + exp(e_i·h̄))]`, computed as softplus(e_i·h̄ − e_i·h_i). e are
    the first layer's patches, h the last layer's after the final LayerNorm, h̄ their mean over the patches of an image;
    `exclude_self` leaves h_i out of it.
    "official" (the papers' code): e is the patch embedding before the position is added, and there are two negatives,
    the mean of all other patches and the mean of the other patches in a `window` × `window` neighbourhood, zeros around
    the image; `−mean log(softmax([pos, neg, neg_local])_0 + 1e-8)`. Patches are row-major over a square grid.
    No gradient flows into e. Raises InputError for an unknown variant, shapes that differ, or no square grid.
    """
    if variant not in get_args(LossVariant):
        raise unknown_name("variant of patch_contrastive_loss", variant, get_args(LossVariant))
    _expect(late_BnD, 3, "late patches (B, n, D)")
    if early_BnD.shape != late_BnD.shape:
        raise InputError(f"early and late patches must have one shape, got {_shape(early_BnD)} and {_shape(late_BnD)}")
    with _full_precision(late_BnD):
        e_BnD, h_BnD = _widened(early_BnD).detach(), _widened(late_BnD)
        positive_Bn = torch.linalg.vecdot(e_BnD, h_BnD)
        n = h_BnD.shape[1]
        negative_Bn = (e_BnD @ h_BnD.mean(dim=1).unsqueeze(-1)).squeeze(-1)
        if exclude_self or variant == "official":
            negative_Bn = (n * negative_Bn - positive_Bn) / (n - 1)
        if variant == "paper":
            return F.softplus(negative_Bn - positive_Bn).mean()
        local_Bn = torch.linalg.vecdot(e_BnD, _neighbourhood_mean(h_BnD, window))
        scores_Bn3 = torch.stack([positive_Bn, negative_Bn, local_Bn], dim=-1)
        return -(scores_Bn3.softmax(dim=-1)[..., 0] + LOG_EPS).log().mean()


def _neighbourhood_mean(h_BnD: Tensor, window: int) -> Tensor:
    """Σ of the other patches in a window around each, over window² − 1; zeros around the image count as patches."""
    side = math.isqrt(h_BnD.shape[1])
    if side * side != h_BnD.shape[1]:
        raise InputError(f"the official contrastive loss needs a square grid of patches, got {h_BnD.shape[1]} patches")
    if window < 3 or window % 2 == 0:
        raise InputError(f"window {window} of the official contrastive loss: expected an odd number of at least 3")
    area = window**2
    maps = h_BnD.transpose(1, 2).reshape(len(h_BnD), -1, side, side)
    means: Tensor = (F.avg_pool2d(maps, window, stride=1, padding=window // 2) - maps / area) * (area / (area - 1))
    return means.flatten(2).transpose(1, 2)


def patch_mixing_loss(logits_BnC: Tensor, targets: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """Return ℓ_token, the mean cross-entropy of every patch with the label of the image it came from; a scalar.

    `logits_BnC` come from a linear head of their own on the last layer's patches. `targets` are class indices (B, n),
    integer, or probabilities (B, n, C), floating. Raises InputError for other shapes.
    """
    _expect(logits_BnC, 3, "patch logits (B, n, C)")
    wanted = logits_BnC.shape if targets.is_floating_point() else logits_BnC.shape[:2]
    if targets.shape != wanted:
        raise InputError(f"targets of patch logits {_shape(logits_BnC)} must be {tuple(wanted)}, got {_shape(targets)}")
    with _full_precision(logits_BnC):
        logits_MC = _widened(logits_BnC).flatten(0, 1)
        targets = targets.to(logits_MC.dtype) if targets.is_floating_point() else targets
        return F.cross_entropy(logits_MC, targets.flatten(0, 1), label_smoothing=label_smoothing)


def region_mixing_loss(
    patches_BnD: Tensor,
    classify: Callable[[Tensor], Tensor],
    partner_Bn: Tensor,
    own_BC: Tensor,
    partner_BC: Tensor,
) -> Tensor:
    """Return ℓ_token as the papers' code has it: the box and the rest are classified whole, from their mean patch.

    `Σ_region area · KL(y_region ‖ softmax(classify(pool_region)))`, area a share of the image, pool the sum of the
    region's patches over their number + 1e-4, the logarithm of softmax + 1e-8; mean over the batch. `classify` maps
    (B, D) to logits (B, C); `partner_Bn` says which patches came from the partner image, whose label is `partner_BC`.
    Raises InputError for shapes that do not fit.
    """
    _expect(patches_BnD, 3, "patches (B, n, D)")
    if partner_Bn.shape != patches_BnD.shape[:2]:
        wanted = tuple(patches_BnD.shape[:2])
        raise InputError(f"partner_Bn must be {wanted} like the patches, got {_shape(partner_Bn)}")
    losses = []
    for region_Bn, labels_BC in ((~partner_Bn, own_BC), (partner_Bn, partner_BC)):
        inside_Bn = region_Bn.to(patches_BnD.dtype)
        count_B = inside_Bn.sum(dim=1)
        pooled_BD = (inside_Bn.unsqueeze(1) @ patches_BnD).squeeze(1) / (count_B + POOL_EPS).unsqueeze(-1)
        logits_BC = classify(pooled_BD)
        with _full_precision(patches_BnD):
            log_probability_BC = (_widened(logits_BC).softmax(dim=-1) + LOG_EPS).log()
            divergence_BC = F.kl_div(log_probability_BC, labels_BC.to(log_probability_BC.dtype), reduction="none")
            losses.append((divergence_BC.sum(dim=-1) * count_B / inside_Bn.shape[1]).mean())
    return losses[0] + losses[1]


def _full_precision(tensor: Tensor) -> torch.autocast:
    return torch.autocast(tensor.device.type, enabled=False)


def _widened(tensor: Tensor) -> Tensor:
    """float16 and bfloat16 become float32; wider types stay."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _expect(tensor: Tensor, dimensions: int, what: str) -> None:
    if tensor.ndim != dimensions:
        raise InputError(f"expected {what}, got a tensor of shape {_shape(tensor)}")


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)
