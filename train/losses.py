"""The three over-smoothing losses of Gong et al. (arXiv 2104.12753, §4), in the form the paper states.

Each computes in float32 or wider, also inside autocast. Shape letters: B batch, n patches, D width, C classes.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitx.core.errors import InputError, unknown_name
from vitx.models.similarity import token_similarity

ContrastiveVariant = Literal["paper"]


def patch_cosine_loss(patches_BnD: Tensor, *, absolute: bool = False) -> Tensor:
    """Return ℓ_cos, the mean cosine of all pairs of different patch tokens; a scalar (eq. 1 of the paper as a loss).

    `patches_BnD` are the last layer's patch tokens after the final LayerNorm, class token left out. `absolute` takes
    |cos|. Raises InputError for fewer than two patches.
    """
    _expect(patches_BnD, 3, "patches (B, n, D)")
    if patches_BnD.shape[1] < 2:
        raise InputError(f"patch_cosine_loss needs at least 2 patches, got {patches_BnD.shape[1]}")
    with _full_precision(patches_BnD):
        return token_similarity(_widened(patches_BnD), absolute=absolute)


def patch_contrastive_loss(
    early_BnD: Tensor,
    late_BnD: Tensor,
    *,
    variant: ContrastiveVariant = "paper",
    exclude_self: bool = False,
) -> Tensor:
    """Return ℓ_cons: each late patch should be nearer to its own early patch than the mean late patch is; a scalar.

    `−1/n Σ_i log[exp(e_i·h_i) / (exp(e_i·h_i) + exp(e_i·h̄))]`, computed as softplus(e_i·h̄ − e_i·h_i). e are the
    first layer's patches, h the last layer's after the final LayerNorm, h̄ their mean over the patches of an image.
    No gradient flows into e. `exclude_self` leaves h_i out of the mean that it is compared with.
    Raises InputError for an unknown variant or shapes that differ.
    """
    if variant != "paper":
        raise unknown_name("variant of patch_contrastive_loss", variant, ("paper",))
    _expect(late_BnD, 3, "late patches (B, n, D)")
    if early_BnD.shape != late_BnD.shape:
        raise InputError(f"early and late patches must have one shape, got {_shape(early_BnD)} and {_shape(late_BnD)}")
    with _full_precision(late_BnD):
        e_BnD, h_BnD = _widened(early_BnD).detach(), _widened(late_BnD)
        positive_Bn = (e_BnD * h_BnD).sum(dim=-1)
        n = h_BnD.shape[1]
        negative_Bn = (e_BnD @ h_BnD.mean(dim=1).unsqueeze(-1)).squeeze(-1)
        if exclude_self:
            negative_Bn = (n * negative_Bn - positive_Bn) / (n - 1)
        return F.softplus(negative_Bn - positive_Bn).mean()


def patch_mixing_loss(logits_BnC: Tensor, targets: Tensor) -> Tensor:
    """Return ℓ_token, the mean cross-entropy of every patch with the label of the image it came from; a scalar.

    `logits_BnC` come from a linear head of their own on the last layer's patches. `targets` are class indices (B, n),
    integer, or probabilities (B, n, C), floating. Raises InputError for other shapes.
    """
    _expect(logits_BnC, 3, "patch logits (B, n, C)")
    wanted = logits_BnC.shape if targets.is_floating_point() else logits_BnC.shape[:2]
    if targets.shape != wanted:
        raise InputError(f"targets of patch logits {_shape(logits_BnC)} must be {tuple(wanted)}, got {_shape(targets)}")
    with _full_precision(logits_BnC):
        log_probability_BnC = F.log_softmax(_widened(logits_BnC), dim=-1)
        if targets.is_floating_point():
            return -(targets.to(log_probability_BnC.dtype) * log_probability_BnC).sum(dim=-1).mean()
        return -log_probability_BnC.gather(-1, targets.unsqueeze(-1)).mean()


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
