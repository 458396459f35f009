"""What a network gives beside logits, by hooks on its own forward pass: embedding, attention, rollout (maths §7).

Shape letters: B batch, N tokens, P patches, H heads, D width.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from timm.models.deit import VisionTransformerDistilled
from torch import Tensor, nn

from vitx.core.errors import InputError
from vitx.models.attention_maps import attention_layers, attention_maps
from vitx.models.window_attention import LocalAttention


@dataclass(frozen=True)
class PooledTokens:
    """Which tokens of a transformer the classifier reads, as their mean: `start` to `stop`, of the last block.

    prefix: how many tokens stand before the patches. grid: rows and columns of the patches. blocks: how many there are.
    """

    start: int
    stop: int
    prefix: int
    grid: tuple[int, int]
    blocks: int

    @property
    def patches(self) -> int:
        return self.grid[0] * self.grid[1]

    def __str__(self) -> str:
        if self.stop > self.prefix:
            return "the mean of all tokens" if self.start < self.prefix else "the mean of the patches"
        return "the class token" if self.stop == 1 else f"the mean of {self.stop} class tokens"


def pooled_tokens(model: nn.Module) -> PooledTokens:
    """Which tokens the classifier of `model` reads: the class token, both of distilled DeiT, or all patches.

    Raises InputError for a network that is no transformer of one list of blocks, each with one attention over all
    tokens, and for another pooling than these.
    """
    blocks = len(getattr(model, "blocks", ()))
    layers = attention_layers(model)
    local = any(isinstance(layer, LocalAttention) for layer in layers.values())
    grid = getattr(getattr(model, "patch_embed", None), "grid_size", None)
    if not blocks or local or [*layers] != [f"blocks.{index}.attn" for index in range(blocks)] or grid is None:
        raise InputError(
            f"{type(model).__name__} has no attention and no rollout: these are of transformers whose every block has "
            "one attention over all tokens; leave --output attention and --output rollout out"
        )
    rows, columns = grid
    prefix = int(getattr(model, "num_prefix_tokens", 0))
    tokens = prefix + rows * columns
    pooling = getattr(model, "global_pool", "") if getattr(model, "attn_pool", None) is None else "attention"
    if isinstance(model, VisionTransformerDistilled):
        start, stop = 0, 2
    elif pooling == "token" and prefix:
        start, stop = 0, 1
    elif pooling == "avg":
        start, stop = (0 if getattr(model, "pool_include_prefix", False) else prefix), tokens
    else:
        raise InputError(
            f"{type(model).__name__} pools its tokens by '{pooling}': attention and rollout are of the class token, or "
            "of the mean of tokens; leave --output attention and --output rollout out"
        )
    return PooledTokens(start, stop, prefix, (rows, columns), blocks)


def classifiers_of(model: nn.Module) -> list[nn.Linear]:
    """The linear layers that make the logits, two in distilled DeiT; raise InputError where it is something else."""
    getter = getattr(model, "get_classifier", None)
    found = getter() if callable(getter) else None
    layers = list(found) if isinstance(found, tuple) else [found]
    linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
    if len(linear) != len(layers):
        kinds = " and ".join(type(layer).__name__ for layer in layers)
        raise InputError(
            f"{type(model).__name__} has no embedding: its classifier is {kinds}, expected a linear layer of features "
            "(N, D); leave --output embedding out"
        )
    return linear


@contextmanager
def recorded_outputs(model: nn.Module, names: Sequence[str]) -> Iterator[Callable[[], dict[str, Tensor]]]:
    """Yield a function that returns the named outputs of the latest forward pass of `model`: (B, D) or (B, P).

    embedding: what the classifier reads, in distilled DeiT the mean of what the two read. attention: softmax maps of
    the last block, mean over heads and pooled queries. rollout: the pooled row of the product over all blocks of
    ½(A + I), A the mean of the softmax maps over heads (Abnar & Zuidema, arXiv 2005.00928). Raises InputError for what
    this network does not have.
    """
    features: dict[int, Tensor] = {}
    with ExitStack() as restore:
        if "embedding" in names:
            for index, layer in enumerate(classifiers_of(model)):
                restore.callback(layer.register_forward_pre_hook(_keep(features, index)).remove)
        maps: dict[str, Tensor] = {}
        pooled: Any = None
        if any(name != "embedding" for name in names):
            pooled = pooled_tokens(model)
            maps = restore.enter_context(attention_maps(model, stage="softmax"))

        def found() -> dict[str, Tensor]:
            every = [*maps.values()]
            compute: dict[str, Callable[[], Tensor]] = {
                "embedding": lambda: torch.stack([*features.values()]).mean(dim=0),
                "attention": lambda: _attention(every[-1], pooled),
                "rollout": lambda: attention_rollout(every, pooled),
            }
            return {name: compute[name]() for name in names}

        yield found


def _keep(features: dict[int, Tensor], index: int) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
    def keep(_layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        features[index] = inputs[0].detach()

    return keep


def _check_maps(maps: Sequence[Tensor], blocks: int, pooled: PooledTokens, output: str) -> None:
    """Raise InputError unless maps of `blocks` blocks are (B, H, N, N) of all tokens: SAM's are (B·H, N, N)."""
    tokens = pooled.prefix + pooled.patches
    if len(maps) < blocks or any(each.ndim != 4 or each.shape[-2:] != (tokens, tokens) for each in maps):
        raise InputError(
            f"not every block has one attention over all {tokens} tokens, which {output} is made of; leave --output "
            f"{output} out"
        )


def _attention(maps_BHNN: Tensor, pooled: PooledTokens) -> Tensor:
    _check_maps([maps_BHNN], 1, pooled, "attention")
    return maps_BHNN[:, :, pooled.start : pooled.stop].mean(dim=(1, 2))[:, pooled.prefix :]


def attention_rollout(maps: Sequence[Tensor], pooled: PooledTokens) -> Tensor:
    """The rollout (B, P) of every block's softmax maps (B, H, N, N), first block first.

    Raises InputError for maps that are not of all tokens.
    """
    _check_maps(maps, pooled.blocks, pooled, "rollout")
    row_B1N = torch.zeros_like(maps[0][:, 0, :1])
    row_B1N[:, :, pooled.start : pooled.stop] = 1 / (pooled.stop - pooled.start)
    for maps_BHNN in reversed(maps):  # a row times matrices, so that no product of matrices is formed
        row_B1N = (row_B1N + row_B1N @ maps_BHNN.mean(dim=1)) / 2
    return row_B1N[:, 0, pooled.prefix :]
