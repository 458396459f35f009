"""Sharpness-aware minimisation, SAM (Foret et al., arXiv 2010.01412; docs/maths.md §2.7).

The step at w uses the gradient at w + ρ·g/‖g‖, about the worst point within the radius ρ.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


@contextmanager
def perturbed(parameters: Sequence[nn.Parameter], rho: float) -> Iterator[None]:
    """Move the parameters by `rho`·g/‖g‖ (eq. 2 with p = 2) while the block runs; then restore their exact values.

    They are restored from a copy: adding and subtracting the same number does not give back the same bits.
    """
    moved = [parameter for parameter in parameters if parameter.grad is not None]
    kept = [parameter.detach().clone() for parameter in moved]
    gradients: list[Tensor] = [parameter.grad for parameter in moved if parameter.grad is not None]
    scale = rho / (nn.utils.get_total_norm(gradients) + 1e-12)  # ‖g‖ over all parameters together
    with torch.no_grad():
        for parameter, gradient in zip(moved, gradients, strict=True):
            parameter.add_(gradient * scale)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(moved, kept, strict=True):
                parameter.copy_(value)


@contextmanager
def untracked_batch_norm(network: nn.Module) -> Iterator[None]:
    """Leave the running statistics of BatchNorm as they are; batches are normalised by their own, as in training.

    SAM's second pass, and blocks that are computed again, would count every batch twice. Restored from copies: a
    momentum of 0 would still count batches.
    """
    norms = [module for module in network.modules() if isinstance(module, _BatchNorm)]
    kept = [[buffer.clone() for buffer in norm.buffers()] for norm in norms]
    try:
        yield
    finally:
        for norm, buffers in zip(norms, kept, strict=True):
            for buffer, value in zip(norm.buffers(), buffers, strict=True):
                buffer.copy_(value)
