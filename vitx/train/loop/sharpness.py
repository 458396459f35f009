"""Sharpness-aware minimisation (Foret et al., arXiv 2010.01412): the gradient at the worst point nearby."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


@contextmanager
def perturbed(parameters: Sequence[nn.Parameter], rho: float) -> Iterator[None]:
    """Move the parameters by `rho`·g/‖g‖ (eq. 2, p = 2) along their gradients; bring back the same bits at the end."""
    moved = [parameter for parameter in parameters if parameter.grad is not None]
    kept = [parameter.detach().clone() for parameter in moved]
    gradients: list[Tensor] = [parameter.grad for parameter in moved if parameter.grad is not None]
    scale = rho / (nn.utils.get_total_norm(gradients) + 1e-12)
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
    """Batches are normalised as in training, and the running statistics do not move."""
    norms = [module for module in network.modules() if isinstance(module, _BatchNorm)]
    kept = [[buffer.clone() for buffer in norm.buffers()] for norm in norms]
    try:
        yield
    finally:
        for norm, buffers in zip(norms, kept, strict=True):
            for buffer, value in zip(norm.buffers(), buffers, strict=True):
                buffer.copy_(value)
