"""BatchNorm's statistics, measured on data again; and those of Re-Attention that follow from the weights alone.

A softmax row sums to one, so the mean of a mixed map over N keys needs no data: μ_h = Σ_g W[h,g]/N + b_h
(docs/maths.md §3.1). With the mean of another N, the trained rows no longer sum to N·β_h; the variance has no closed
form and is measured again. Averaged (EMA) weights need measured statistics too: running ones lag behind by some steps,
and as the variance of the maps (about 1e-4) is near BatchNorm's eps, a small error of the mean becomes a large one in
all N entries of a row.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vitx.core.errors import InputError
from vitx.models.attention import ReAttention


def normalized_re_attentions(model: nn.Module) -> list[tuple[ReAttention, _BatchNorm]]:
    """Every Re-Attention whose norm over heads is a BatchNorm (or SyncBatchNorm), with that norm."""
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
    averaged copy `ema`, stays as it is; momentum and modes are restored. The mean is set to its closed form at
    `num_tokens` (default: the network's own). Returns the number of batches. Raises InputError when there is none.
    """
    models = [model] if ema is None else [model, ema]
    norms = [norm for one in models for _, norm in normalized_re_attentions(one)]
    batches = measure_batch_norm(models, loader, norms)
    for one in models:
        set_closed_form_means(one, num_tokens or _tokens_of(one))
    return batches


def measure_batch_norm(
    models: Sequence[nn.Module], loader: Iterable[Any], norms: Sequence[_BatchNorm] | None = None
) -> int:
    """Set the running statistics of `norms` (default: every BatchNorm of `models`) to their mean over `loader`.

    Batches as in `recalibrate`. Dropout and drop path are off; modes and momentum are restored, on failure the old
    statistics too. Returns the number of batches: 0, without reading any, when there is no BatchNorm. Raises InputError
    when the loader is empty.
    """
    if norms is None:
        norms = [module for one in models for module in one.modules() if isinstance(module, _BatchNorm)]
    if not norms:
        return 0
    batches = 0
    with _measuring(models, norms), torch.no_grad():
        for batch in loader:
            images: Tensor = batch[0] if isinstance(batch, tuple | list) else batch
            batches += 1
            for one in models:
                one(images.to(next(one.parameters()).device))
        if not batches:
            raise InputError("no batch to measure the statistics of BatchNorm on: the loader is empty")
    return batches


def _tokens_of(model: nn.Module) -> int:
    position = getattr(model, "pos_embed", None)
    if not isinstance(position, Tensor):
        raise InputError(f"{type(model).__name__} has no position embeddings to count tokens by: pass num_tokens")
    return position.shape[1]


@contextmanager
def _measuring(models: Sequence[nn.Module], norms: Sequence[_BatchNorm]) -> Iterator[None]:
    """`norms` accumulate batch statistics, everything else is in evaluation mode; undone afterwards, see above."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    kept = [(norm, norm.momentum, {key: value.clone() for key, value in norm.state_dict().items()}) for norm in norms]
    try:
        for model in models:
            model.eval()
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # PyTorch then takes the mean of all batches, instead of a moving average
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
