"""Changing the number of tokens of a trained network: the statistics of Re-Attention's BatchNorm follow.

A softmax row sums to one, so the mean of a mixed map over N keys is data-free: μ_h = Σ_g W[h,g]/N + b_h (MATHS §3).
Kept from another N it breaks the zero sum of the trained rows; the variance has no closed form and is measured again.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vitx.core.errors import InputError
from vitx.models.attention import ReAttention


def normalized_re_attentions(model: nn.Module) -> list[tuple[ReAttention, _BatchNorm]]:
    """Every Re-Attention with a BatchNorm (or its synchronised form), and that norm."""
    return [
        (module, module.var_norm)
        for module in model.modules()
        if isinstance(module, ReAttention) and isinstance(module.var_norm, _BatchNorm)
    ]


def set_closed_form_means(model: nn.Module, num_tokens: int) -> int:
    """Set the running mean of every Re-Attention's BatchNorm to its closed form at `num_tokens`; return how many."""
    found = normalized_re_attentions(model)
    with torch.no_grad():
        for attention, norm in found:
            assert norm.running_mean is not None
            assert attention.reatten_matrix.bias is not None
            weight_HH = attention.reatten_matrix.weight.flatten(1)
            norm.running_mean.copy_(weight_HH.sum(dim=1) / num_tokens + attention.reatten_matrix.bias)
    return len(found)


def recalibrate(
    model: nn.Module, loader: Iterable[Any], *, ema: nn.Module | None = None, num_tokens: int | None = None
) -> int:
    """Measure the variance of every Re-Attention's BatchNorm again, as the mean over the batches of `loader`.

    A batch is normalised images (B, 3, S, S), or a tuple that begins with them. Everything else of `model`, and of its
    averaged copy `ema`, stays in evaluation mode and unchanged; momentum and modes are restored. The mean is set to its
    closed form at `num_tokens` (default: the network's position embeddings). Returns the number of batches.
    Raises InputError when the loader is empty.
    """
    models = [model] if ema is None else [model, ema]
    found = [pair for one in models for pair in normalized_re_attentions(one)]
    batches = 0
    with _measuring(models, [norm for _, norm in found]), torch.no_grad():
        for batch in loader:
            images: Tensor = batch[0] if isinstance(batch, tuple | list) else batch
            batches += 1
            for one in models:
                one(images.to(next(one.parameters()).device))
        if not batches:
            raise InputError("recalibrate was given no batch: the variance cannot be measured")
    for one in models:
        set_closed_form_means(one, num_tokens or _tokens_of(one))
    return batches


def _tokens_of(model: nn.Module) -> int:
    position = getattr(model, "pos_embed", None)
    if not isinstance(position, Tensor):
        raise InputError(f"{type(model).__name__} has no position embeddings to count tokens by: pass num_tokens")
    return position.shape[1]


@contextmanager
def _measuring(models: list[nn.Module], norms: list[_BatchNorm]) -> Iterator[None]:
    """Cumulative batch statistics in `norms`; everything else in evaluation mode. On failure the old ones return."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    kept = [(norm, norm.momentum, {k: v.clone() for k, v in norm.state_dict().items()}) for norm in norms]
    try:
        for model in models:
            model.eval()
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # PyTorch's cumulative mean
            norm.train()
        yield
    except BaseException:
        for norm, _, state in kept:
            norm.load_state_dict(state)
        raise
    finally:
        for norm, momentum, _ in kept:
            norm.momentum = momentum
        for module, training in modes:
            module.training = training
