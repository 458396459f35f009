"""Inputs of the reference numbers of docs/maths.md, which need no random generator; and random weights for networks."""

import math
from collections.abc import Iterable
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from vitx.models.similarity import Over, map_similarity

# docs/maths.md §5.2: p and y of the reference numbers of calibration.
PROBABILITIES = np.array(
    [
        [0.95, 0.03, 0.02],
        [0.55, 0.40, 0.05],
        [0.20, 0.45, 0.35],
        [0.10, 0.15, 0.75],
        [0.34, 0.33, 0.33],
        [0.02, 0.96, 0.02],
    ]
)
LABELS = np.array([0, 1, 1, 2, 0, 0])


def seq(k: float, *shape: int) -> Tensor:
    """`sin(0.7·i + k)`, i row-major from 0, float64."""
    index = torch.arange(math.prod(shape), dtype=torch.float64)
    return torch.sin(0.7 * index + k).reshape(shape)


def attention_similarity_loss(maps: Iterable[Tensor], *, over: Over = "heads", pairs: int = 0) -> Tensor:
    """DeepViT's regulariser of maps (B, H, N, N) in memory, of the first `pairs` adjacent ones (0: all)."""
    return torch.stack([map_similarity(*pair, over) for pair in pairwise(maps)][: pairs or None]).mean()


def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Random weights and random normalisation statistics, so that no fold is proved on zeros and ones."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            for parameter in module.parameters(recurse=False):
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                assert module.running_mean is not None
                assert module.running_var is not None
                shape = module.running_mean.shape
                module.running_mean.copy_(torch.randn(shape, generator=generator, dtype=torch.float64))
                module.running_var.copy_(0.3 + torch.rand(shape, generator=generator, dtype=torch.float64))
            if isinstance(module, nn.BatchNorm2d | nn.LayerNorm):
                module.weight.add_(1.0)
    return model


def randomize_like_trained(model: nn.Module, seed: int = 0) -> nn.Module:
    """Random weights of gain 0.8, biases and normalisation statistics: no attention saturates, nothing explodes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                weight = name == "weight" and parameter.ndim > 1
                gain = 0.8 / math.sqrt(parameter[0].numel()) if weight else 0.1 if parameter.ndim < 2 else 0.3
                parameter.copy_(gain * torch.randn(parameter.shape, generator=generator))
            if isinstance(module, nn.LayerNorm | nn.BatchNorm1d | nn.BatchNorm2d):
                module.weight.add_(1.0)
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                assert module.running_mean is not None
                assert module.running_var is not None
                variance = 1e-3 if path.endswith("var_norm") else 1.0  # of attention maps, and of features
                noise = torch.rand(2, module.num_features, generator=generator)
                module.running_mean.copy_(0.2 * math.sqrt(variance) * (noise[0] - 0.5))
                module.running_var.copy_(variance * (0.5 + noise[1]))
    return model
