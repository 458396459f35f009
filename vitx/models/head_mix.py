"""The mix over heads on attention maps that are in memory; flash/kernels.py does it without them.

Shape letters: B batch, H heads, N tokens, M = N² entries of a map.
"""

import torch
from torch import Tensor


def mix_heads(maps_BHNN: Tensor, weight_HH: Tensor, bias_H: Tensor | None = None) -> Tensor:
    """Mix maps (B, H, N, N) over the heads: `out[h] = Σ_g weight[h, g] · maps[g] + bias[h]`, of the same shape.

    Talking heads (arXiv 2003.02436) and Re-Attention (arXiv 2103.11886, eq. 3, weight = Θᵀ) both do this: a 1×1
    convolution over heads, here one matrix product. On a CPU the batched product with the bias inside took 0.6 of the
    convolution's time, forward and backward, because it reads and writes the maps once; einsum and a broadcast matmul
    took as long as the convolution (benchmarks/models/training_step.py).
    """
    maps_BHM = maps_BHNN.flatten(2)
    if torch.compiler.is_exporting():
        # A broadcast matmul: `expand` below would write the traced batch into the weight's shape.
        mixed_BHM = torch.matmul(weight_HH, maps_BHM)
        mixed_BHM = mixed_BHM if bias_H is None else mixed_BHM + bias_H[:, None]
    elif bias_H is None:
        mixed_BHM = torch.bmm(weight_HH.expand(len(maps_BHM), -1, -1), maps_BHM)
    else:
        mixed_BHM = torch.baddbmm(bias_H[:, None], weight_HH.expand(len(maps_BHM), -1, -1), maps_BHM)
    return mixed_BHM.view_as(maps_BHNN)
