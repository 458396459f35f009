"""The mix over heads as one matrix product: what the kernels are held against."""

import torch
from torch import Tensor


def mix_heads(maps_BHNN: Tensor, weight_HH: Tensor, bias_H: Tensor | None = None) -> Tensor:
    """Return Σ_g weight[h, g] · maps[:, g] (+ bias[h]): a 1×1 convolution over heads, as one matrix product.

    The batched product with the bias inside reads and writes the maps once: on a CPU it took 0.6 of the convolution's
    time, forward and backward, where einsum and a broadcast matmul took about as long as it (benchmarks/models.py). A
    traced graph gets the broadcast matmul, which keeps the weights free of the batch.
    """
    maps_BHM = maps_BHNN.flatten(2)
    if torch.compiler.is_exporting():
        mixed_BHM = torch.matmul(weight_HH, maps_BHM)
        mixed_BHM = mixed_BHM if bias_H is None else mixed_BHM + bias_H[:, None]
    elif bias_H is None:
        mixed_BHM = torch.bmm(weight_HH.expand(len(maps_BHM), -1, -1), maps_BHM)
    else:
        mixed_BHM = torch.baddbmm(bias_H[:, None], weight_HH.expand(len(maps_BHM), -1, -1), maps_BHM)
    return mixed_BHM.view_as(maps_BHNN)
