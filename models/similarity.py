"""How similar a layer's tokens are: the over-smoothing metrics (Gong et al., arXiv 2104.12753, §3)."""

import torch.nn.functional as F
from torch import Tensor


def token_similarity(tokens_BnD: Tensor, *, absolute: bool = False) -> Tensor:
    """Return the mean cosine of all pairs of different tokens, averaged over the batch; a scalar.

    `CosSim(h) = 1/(n(n−1)) Σ_{i≠j} ĥ_i·ĥ_j`, ĥ = h/‖h‖. The signed form is (‖Σ_i ĥ_i‖² − n)/(n(n−1)) and needs no
    n×n matrix; `absolute` takes |cos| and does.
    """
    n = tokens_BnD.shape[-2]
    unit_BnD = F.normalize(tokens_BnD, dim=-1)
    if absolute:
        total_B = (unit_BnD @ unit_BnD.transpose(-2, -1)).abs().sum(dim=(-2, -1))
    else:
        total_B = unit_BnD.sum(dim=-2).square().sum(dim=-1)
    return ((total_B - n) / (n * (n - 1))).mean()


def attention_std(maps_BHNN: Tensor) -> Tensor:
    """Return the standard deviation (unbiased) over keys of each softmax row, averaged over rows, heads and batch."""
    return maps_BHNN.std(dim=-1).mean()
