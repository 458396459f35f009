"""The three patch losses of Gong et al. (arXiv 2104.12753, §4) against over-smoothing; formulas in docs/maths.md §2.

For two of them the authors' code computes something else than the paper says; both forms are here. Each is computed in
float32 or wider, also inside autocast. Shape letters: B batch, n patches, D width, C classes, S = √n.
"""

import math
from collections.abc import Callable
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from vitx.core.errors import InputError, unknown_name
from vitx.models.similarity import SHORTEST, at_least_float32, token_similarity
from vitx.train.recipes.image_and_loss_settings import LossVariant

# The epsilons of the authors' code: added before each logarithm, and to the number of patches of a region.
LOG_EPS, POOL_EPS = 1e-8, 1e-4


def patch_cosine_loss(patches_BnD: Tensor, *, absolute: bool = False) -> Tensor:
    """Return ℓ_cos (docs/maths.md §2.1), the mean cosine of all pairs of different patch tokens; a scalar.

    `patches_BnD` are the last layer's patch tokens after the final LayerNorm, without the class token. `absolute`
    averages |cos| instead, which needs the n×n matrix. Raises InputError for fewer than two patches.
    """
    _check_three_axes(patches_BnD, "patches (B, n, D)")
    if patches_BnD.shape[1] < 2:
        raise InputError(f"patch_cosine_loss needs at least 2 patches, got {patches_BnD.shape[1]}")
    with _no_autocast(patches_BnD):
        if absolute:
            return token_similarity(at_least_float32(patches_BnD), absolute=True)
        similarity: Tensor = _MeanCosine.apply(at_least_float32(patches_BnD))
        return similarity


class _MeanCosine(torch.autograd.Function):
    """Mean cosine of different tokens, value and gradient in closed form (docs/maths.md §1.1 and §2.1).

    With s = Σ_i ĥ_i the value is (‖s‖² − n)/(n(n−1)) and its gradient by h_i is 2(s − (ĥ_i·s) ĥ_i)/(‖h_i‖ n(n−1)).
    A token of zeros is similar to none, itself included: n in the numerator counts the others, and its gradient is 0.
    Autograd would save the normalised tokens as well; here nothing of the tokens' size is saved but the tokens.
    """

    @staticmethod
    def forward(ctx: Any, h_BnD: Tensor) -> Tensor:
        n = h_BnD.shape[1]
        inverse_norm_Bn, sum_BD = _inverse_norms_and_sum(h_BnD)
        ctx.save_for_backward(h_BnD, inverse_norm_Bn, sum_BD)
        tokens_B = (inverse_norm_Bn > 0).sum(dim=-1)
        return ((sum_BD.square().sum(dim=-1) - tokens_B) / (n * (n - 1))).mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        h_BnD, inverse_norm_Bn, sum_BD = ctx.saved_tensors
        if torch.is_grad_enabled():  # for a second derivative they are made again, as functions of h
            inverse_norm_Bn, sum_BD = _inverse_norms_and_sum(h_BnD)
        B, n, _ = h_BnD.shape
        weight_Bn = inverse_norm_Bn * (2 * gradient / (B * n * (n - 1)))  # the factor before the bracket, mean over B
        # (ĥ_i·s)/‖h_i‖, so that its product with h_i is the part of s along ĥ_i.
        along_Bn = torch.bmm(h_BnD, sum_BD.unsqueeze(-1)).squeeze(-1) * inverse_norm_Bn.square()
        gradient_BnD = torch.bmm(weight_Bn.unsqueeze(-1), sum_BD.unsqueeze(1))
        return gradient_BnD.addcmul_(h_BnD, (weight_Bn * along_Bn).unsqueeze(-1), value=-1)


def _inverse_norms_and_sum(h_BnD: Tensor) -> tuple[Tensor, Tensor]:
    """1/‖h_i‖ (B, n), 0 for a token of zeros or up to SHORTEST, and s (B, D)."""
    norm_Bn = torch.linalg.vector_norm(h_BnD, dim=-1)
    inverse_norm_Bn = torch.where(norm_Bn > SHORTEST, norm_Bn, torch.inf).reciprocal()
    # s as one product (B, 1, n) @ (B, n, D), without writing out the unit vectors ĥ.
    return inverse_norm_Bn, torch.bmm(inverse_norm_Bn.unsqueeze(1), h_BnD).squeeze(1)


def patch_contrastive_loss(
    early_BnD: Tensor,
    late_BnD: Tensor,
    *,
    variant: LossVariant = "paper",
    exclude_self: bool = False,
    window: int = 7,
) -> Tensor:
    """Return ℓ_cons: each late patch should be nearer to its own early patch than the mean late patch is; a scalar.

    "paper" (docs/maths.md §2.2): `−1/n Σ_i log[exp(e_i·h_i) / (exp(e_i·h_i) + exp(e_i·h̄))]`. e are the patches after
    the first block, h those after the last block and the final LayerNorm, h̄ the mean of h over the patches of an
    image; `exclude_self` leaves h_i out of its own h̄.
    "official" (the authors' code, §2.5): e is the patch embedding before positions are added. There are two negatives:
    the mean of all other patches, and the mean of the other patches in a `window` × `window` neighbourhood with zeros
    around the image; `−mean log(softmax([pos, neg, neg_local])_0 + 1e-8)`. Patches are row-major over a square grid.
    No gradient flows into e. Raises InputError for an unknown variant, for two shapes, for a grid that is not square,
    and where a single patch would be compared with the mean of no others.
    """
    if variant not in get_args(LossVariant):
        raise unknown_name("variant of patch_contrastive_loss", variant, get_args(LossVariant))
    _check_three_axes(late_BnD, "late patches (B, n, D)")
    if early_BnD.shape != late_BnD.shape:
        raise InputError(f"early and late patches must have one shape, got {_shape(early_BnD)} and {_shape(late_BnD)}")
    with _no_autocast(late_BnD):
        e_BnD, h_BnD = at_least_float32(early_BnD).detach(), at_least_float32(late_BnD)
        positive_Bn = torch.linalg.vecdot(e_BnD, h_BnD)  # e_i·h_i
        n = h_BnD.shape[1]
        if n < 2 and (exclude_self or variant == "official"):
            raise InputError(f"patch_contrastive_loss without the patch itself needs at least 2 patches, got {n}")
        negative_Bn = (e_BnD @ h_BnD.mean(dim=1).unsqueeze(-1)).squeeze(-1)  # e_i·h̄
        if exclude_self or variant == "official":
            negative_Bn = (n * negative_Bn - positive_Bn) / (n - 1)  # e_i·h̄ without h_i in h̄
        if variant == "paper":
            # −log of a two-way softmax; softplus does not overflow where exp(e_i·h_i) would.
            return F.softplus(negative_Bn - positive_Bn).mean()
        local_Bn = torch.linalg.vecdot(e_BnD, _neighbourhood_mean(h_BnD, window))
        scores_Bn3 = torch.stack([positive_Bn, negative_Bn, local_Bn], dim=-1)
        return -(scores_Bn3.softmax(dim=-1)[..., 0] + LOG_EPS).log().mean()


def _neighbourhood_mean(h_BnD: Tensor, window: int) -> Tensor:
    """Sum of the other patches in a window around each patch, divided by window² − 1; (B, n, D).

    Places outside the image count as patches of zeros, as in the authors' code, so the divisor is the same everywhere.
    """
    grid_size = math.isqrt(h_BnD.shape[1])
    if grid_size * grid_size != h_BnD.shape[1]:
        raise InputError(f"the official contrastive loss needs a square grid of patches, got {h_BnD.shape[1]} patches")
    if window < 3 or window % 2 == 0:
        raise InputError(f"window {window} of the official contrastive loss: expected an odd number of at least 3")
    area = window**2
    maps_BDSS = h_BnD.transpose(1, 2).reshape(len(h_BnD), -1, grid_size, grid_size)
    means_BDSS = F.avg_pool2d(maps_BDSS, window, stride=1, padding=window // 2)
    # The pool divides by window² and includes the patch itself: take it out, then divide by window² − 1.
    others_BDSS: Tensor = (means_BDSS - maps_BDSS / area) * (area / (area - 1))
    return others_BDSS.flatten(2).transpose(1, 2)


def patch_mixing_loss(logits_BnC: Tensor, targets: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """Return ℓ_token (docs/maths.md §2.3): each patch's cross-entropy with its source image's label; a scalar mean.

    `logits_BnC` come from a separate linear head on the last layer's patches. `targets` are class indices (B, n),
    integer, or probabilities (B, n, C), floating. Raises InputError for other shapes.
    """
    _check_three_axes(logits_BnC, "patch logits (B, n, C)")
    wanted = logits_BnC.shape if targets.is_floating_point() else logits_BnC.shape[:2]
    if targets.shape != wanted:
        raise InputError(f"targets of patch logits {_shape(logits_BnC)} must be {tuple(wanted)}, got {_shape(targets)}")
    with _no_autocast(logits_BnC):
        logits_MC = at_least_float32(logits_BnC).flatten(0, 1)  # M = B·n patches
        targets = targets.to(logits_MC.dtype) if targets.is_floating_point() else targets
        return F.cross_entropy(logits_MC, targets.flatten(0, 1), label_smoothing=label_smoothing)


def region_mixing_loss(
    patches_BnD: Tensor,
    classify: Callable[[Tensor], Tensor],
    partner_Bn: Tensor,
    own_BC: Tensor,
    partner_BC: Tensor,
) -> Tensor:
    """Return ℓ_token as the authors' code computes it (docs/maths.md §2.5); a scalar, the mean over the batch.

    The CutMix box and the rest of the image are each classified once, from their mean patch:
    `Σ_region area · KL(y_region ‖ softmax(classify(pool_region)))`. The area is a share of the image, the pool is the
    sum of the region's patches over their number + 1e-4, and the logarithm is of softmax + 1e-8.
    `classify` maps (B, D) to logits (B, C). `partner_Bn` is True for patches of the partner image, whose soft labels
    are `partner_BC`; the other patches have `own_BC`. Raises InputError for shapes that do not fit.
    """
    _check_three_axes(patches_BnD, "patches (B, n, D)")
    if partner_Bn.shape != patches_BnD.shape[:2]:
        wanted = tuple(patches_BnD.shape[:2])
        raise InputError(f"partner_Bn must be {wanted} like the patches, got {_shape(partner_Bn)}")
    wide_BnD = at_least_float32(patches_BnD)  # the sum of a region may exceed float16
    losses = []
    for region_Bn, labels_BC in ((~partner_Bn, own_BC), (partner_Bn, partner_BC)):
        with _no_autocast(patches_BnD):
            inside_Bn = region_Bn.to(wide_BnD.dtype)  # 1 inside the region, 0 outside
            count_B = inside_Bn.sum(dim=1)
            pooled_BD = (inside_Bn.unsqueeze(1) @ wide_BnD).squeeze(1) / (count_B + POOL_EPS).unsqueeze(-1)
        logits_BC = classify(pooled_BD.to(patches_BnD.dtype))
        with _no_autocast(patches_BnD):
            log_probability_BC = (at_least_float32(logits_BC).softmax(dim=-1) + LOG_EPS).log()
            divergence_BC = F.kl_div(log_probability_BC, labels_BC.to(log_probability_BC.dtype), reduction="none")
            # An empty region (an image without a box) has area 0 and adds nothing.
            losses.append((divergence_BC.sum(dim=-1) * count_B / inside_Bn.shape[1]).mean())
    return losses[0] + losses[1]


def _no_autocast(tensor: Tensor) -> torch.autocast:
    return torch.autocast(tensor.device.type, enabled=False)


def _check_three_axes(tensor: Tensor, expected: str) -> None:
    if tensor.ndim != 3:
        raise InputError(f"expected {expected}, got a tensor of shape {_shape(tensor)}")


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)
