"""BatchNorm over the batch of all processes. torch's SyncBatchNorm runs on GPUs only; this computes the same on a CPU.

docs/maths.md §3.1 says why Re-Attention needs it: its BatchNorm is over attention maps, of all images of a batch.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vitx.core.errors import InputError


class _Average(torch.autograd.Function):
    """The mean of a tensor over all processes.

    Every process's loss depends on every process's input, so the gradient is averaged over the processes as well.
    """

    @staticmethod
    def forward(_context: Any, tensor: Tensor) -> Tensor:
        return _averaged(tensor)

    @staticmethod
    def backward(_context: Any, *gradients: Any) -> Tensor:
        return _averaged(gradients[0])


def _averaged(tensor: Tensor) -> Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total)
    return total / dist.get_world_size()


class SynchronizedBatchNorm(_BatchNorm):
    """BatchNorm whose training statistics are over all processes, which must hold equally many values each.

    The variance is computed in two passes, about the common mean. E[x²] − E[x]² would lose digits: attention maps have
    a variance of about 1e-4.
    """

    def _check_input_dim(self, input: Tensor) -> None:  # torch's name of the argument
        if input.ndim < 2:
            raise ValueError(f"expected (B, C, …), got {input.ndim} axes")

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        if not self.training:
            return super().forward(input)
        values = input.float() if input.dtype in (torch.bfloat16, torch.float16) else input
        axes = [0, *range(2, values.ndim)]  # all but the channels
        shape = (1, -1, *[1] * (values.ndim - 2))  # (C,) broadcast over (B, C, …)
        mean: Tensor = _Average.apply(values.mean(axes))
        centred = values - mean.view(shape)
        variance: Tensor = _Average.apply(centred.square().mean(axes))
        self._track(mean.detach(), variance.detach(), values.numel() // values.shape[1] * dist.get_world_size())
        normed = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            normed = normed * self.weight.view(shape) + self.bias.view(shape)
        return normed.to(input.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor, count: int) -> None:
        """Move the running statistics, as torch's BatchNorm does; `count` values were averaged for each channel."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        factor = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        # torch normalises with the biased variance and tracks the unbiased one.
        self.running_var.lerp_((variance * count / (count - 1)).to(self.running_var.dtype), factor)


def synchronize_batch_norm(network: nn.Module, device: torch.device) -> nn.Module:
    """Synchronise every BatchNorm of `network` over all processes; parameters and their names stay.

    Raises InputError for a kind of BatchNorm that cannot be synchronised on this device.
    """
    if device.type == "cuda":
        from timm.layers import convert_sync_batchnorm  # knows timm's norms with an activation too

        converted: nn.Module = convert_sync_batchnorm(network)  # type: ignore[no-untyped-call]  # timm's
        return converted
    for name, module in network.named_modules():
        if type(module) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
            module.__class__ = SynchronizedBatchNorm  # keeps parameters and buffers, replaces `forward`
        elif isinstance(module, _BatchNorm):
            raise InputError(
                f"'{name}' is a {type(module).__name__}, which cannot be synchronised on a CPU: set "
                "execution.sync_batch_norm=false"
            )
    return network
