"""How similar a layer's tokens are, and two layers' attention maps (docs/maths.md §1).

Shape letters: B batch, n patches, D width, H heads, N tokens.
"""

import math
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from vitx.core.errors import unknown_name

Over = Literal["rows", "heads"]
_AXIS = {"rows": -2, "heads": 1}


def token_similarity(tokens_BnD: Tensor, *, absolute: bool = False) -> Tensor:
    """Return the mean cosine of all pairs of different tokens, averaged over the batch; a scalar.

    `CosSim(h) = 1/(n(n−1)) Σ_{i≠j} ĥ_i·ĥ_j`, ĥ = h/‖h‖ (Gong et al., arXiv 2104.12753, §3). The signed form equals
    (‖Σ_i ĥ_i‖² − Σ_i ‖ĥ_i‖²)/(n(n−1)) and needs no n×n matrix; `absolute` takes |cos| and does.
    """
    n = tokens_BnD.shape[-2]
    unit_BnD = F.normalize(tokens_BnD, dim=-1)
    if absolute:
        total_B = (unit_BnD @ unit_BnD.transpose(-2, -1)).abs().sum(dim=(-2, -1))
    else:
        total_B = unit_BnD.sum(dim=-2).square().sum(dim=-1)
    # The sums include each token with itself: a cosine of 1, unless it is all zeros, which is similar to none.
    own_B = unit_BnD.square().sum(dim=(-2, -1))
    return ((total_B - own_B) / (n * (n - 1))).mean()


def attention_std(maps_BHNN: Tensor) -> Tensor:
    """Return the standard deviation (unbiased) over keys of each softmax row, averaged over rows, heads and batch."""
    centred_BHNN = maps_BHNN - maps_BHNN.mean(dim=-1, keepdim=True)
    # Half the time of torch.std, which updates mean and variance value by value.
    spread: Tensor = torch.linalg.vector_norm(centred_BHNN, dim=-1).mean() / math.sqrt(maps_BHNN.shape[-1] - 1)
    return spread


def map_similarity(first_BHNN: Tensor, second_BHNN: Tensor, over: Over = "rows") -> Tensor:
    """Return the mean cosine of two attention maps; a scalar.

    "rows" compares the same column of each head's two maps, a vector over the N rows (Zhou et al., arXiv 2103.11886,
    eq. 2); "heads" compares one entry over the H heads, as the public code does, and is near 1 for any softmax maps.
    """
    if over not in _AXIS:
        raise unknown_name("axis of the attention similarity", over, get_args(Over))
    axis = _AXIS[over]
    dots = torch.linalg.vecdot(first_BHNN, second_BHNN, dim=axis)
    norms = [torch.linalg.vector_norm(maps, dim=axis).clamp_min(1e-12) for maps in (first_BHNN, second_BHNN)]
    similarity: Tensor = (dots / (norms[0] * norms[1])).mean()
    return similarity


attention_similarity = map_similarity  # its name in vitx.analyze
