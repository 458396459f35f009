"""How similar a layer's tokens are, and two layers' attention maps (docs/maths.md §1).

Shape letters: B batch, n patches, D width, H heads, N tokens.
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from vitx.core.errors import unknown_name

Over = Literal["rows", "heads"]
_AXIS = {"rows": -2, "heads": 1}
# Vectors that are no longer have no direction: they are similar to none. Gradients grow with 1/length.
SHORTEST = 1e-12


def token_similarity(tokens_BnD: Tensor, *, absolute: bool = False) -> Tensor:
    """Return the mean cosine of all pairs of different tokens, averaged over the batch; a scalar."""
    return token_similarities(tokens_BnD, absolute=absolute).mean()


def token_similarities(tokens_BnD: Tensor, *, absolute: bool = False) -> Tensor:
    """Return the mean cosine of all pairs of different tokens of each image, (B,).

    `CosSim(h) = 1/(n(n−1)) Σ_{i≠j} ĥ_i·ĥ_j`, ĥ = h/‖h‖ (Gong et al., arXiv 2104.12753, §3). The signed form equals
    (‖Σ_i ĥ_i‖² − Σ_i ‖ĥ_i‖²)/(n(n−1)) and needs no n×n matrix; `absolute` takes |cos| and does.
    """
    n = tokens_BnD.shape[-2]
    unit_BnD = tokens_BnD * inverse_norm(tokens_BnD, -1).unsqueeze(-1)
    if absolute:
        total_B = (unit_BnD @ unit_BnD.transpose(-2, -1)).abs().sum(dim=(-2, -1))
    else:
        total_B = unit_BnD.sum(dim=-2).square().sum(dim=-1)
    # The sums include each token with itself: a cosine of 1, unless it is all zeros, which is similar to none.
    own_B = unit_BnD.square().sum(dim=(-2, -1))
    similarities_B: Tensor = (total_B - own_B) / (n * (n - 1))
    return similarities_B


def dc_shares(tokens_BnD: Tensor) -> Tensor:
    """Return the share of the tokens' energy in their direct-current component, their mean, of each image: (B,).

    `n‖h̄‖² / Σ_i ‖h_i‖²` (Wang et al., arXiv 2203.05962): 0 where the mean is 0, 1 where all tokens are the same. Where
    all are equally long it is (1 + (n − 1)·CosSim)/n.
    """
    tokens_BnD = at_least_float32(tokens_BnD)
    squared_B = tokens_BnD.square().sum(dim=(-2, -1))
    mean_BD = tokens_BnD.mean(dim=-2)
    shares_B: Tensor = tokens_BnD.shape[-2] * mean_BD.square().sum(dim=-1) / squared_B.clamp_min(SHORTEST**2)
    return shares_B


def longest_tokens(tokens_BnD: Tensor) -> Tensor:
    """Return ‖h‖ of the longest token of each image over that of the median one: (B,); 0 of zeros alone.

    The median is that of the tokens longer than SHORTEST: of the others, where half of them are zeros, it would be 0.
    Long patches where the image shows little are registers of trained networks (Darcet et al., arXiv 2309.16588).
    """
    lengths_Bn = torch.linalg.vector_norm(at_least_float32(tokens_BnD), dim=-1)
    longest_B = lengths_Bn.amax(dim=-1)
    median_B = lengths_Bn.where(lengths_Bn > SHORTEST, math.nan).nanquantile(0.5, dim=-1)
    ratios_B: Tensor = torch.where(longest_B <= SHORTEST, 0.0, longest_B / median_B)
    return ratios_B


def at_least_float32(tensor: Tensor) -> Tensor:
    """float16 and bfloat16 become float32; wider types stay."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def inverse_norm(vectors: Tensor, axis: int) -> Tensor:
    """Return 1/‖v‖ along `axis`, without it, in float32 or wider.

    It is 0 for vectors up to SHORTEST, with derivatives of 0 of every order.
    """
    squared = at_least_float32(vectors).square().sum(dim=axis)
    has_direction = squared > SHORTEST**2
    # The root of 0 has no derivative, and what is not chosen below would multiply it by 0: it is taken of 1 there.
    return torch.where(has_direction, torch.where(has_direction, squared, 1.0).rsqrt(), 0.0)


def attention_std(maps_BHNN: Tensor) -> Tensor:
    """Return the standard deviation (unbiased) over keys of each softmax row, averaged over rows, heads and batch."""
    return attention_stds(maps_BHNN).mean()


def attention_stds(maps_BHNN: Tensor) -> Tensor:
    """Return the standard deviation (unbiased) over keys of each softmax row, averaged over rows and heads: (B,).

    0 for a single key, to which every query attends.
    """
    centred_BHNN = maps_BHNN - maps_BHNN.mean(dim=-1, keepdim=True)
    # Half the time of torch.std, which updates mean and variance value by value.
    spread_B: Tensor = torch.linalg.vector_norm(centred_BHNN, dim=-1).mean(dim=(-2, -1)) / math.sqrt(
        max(maps_BHNN.shape[-1] - 1, 1)
    )
    return spread_B


def map_similarity(first_BHNN: Tensor, second_BHNN: Tensor, over: Over = "rows") -> Tensor:
    """Return the mean cosine of two attention maps; a scalar.

    "rows" compares the same column of each head's two maps, a vector over the N rows (Zhou et al., arXiv 2103.11886,
    eq. 2); "heads" compares one entry over the H heads, as the public code does, and is near 1 for any softmax maps.
    A vector of zeros counts as similar to none.
    """
    if over not in _AXIS:
        raise unknown_name("axis of the attention similarity", over, get_args(Over))
    axis = _AXIS[over]
    first_BHNN, second_BHNN = at_least_float32(first_BHNN), at_least_float32(second_BHNN)
    dots = (first_BHNN * second_BHNN).sum(dim=axis)  # vecdot is a product that autocast takes in half precision
    similarity: Tensor = (dots * inverse_norm(first_BHNN, axis) * inverse_norm(second_BHNN, axis)).mean()
    return similarity


attention_similarity = map_similarity  # its name in vitx.analyze
