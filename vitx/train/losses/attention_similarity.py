"""DeepViT's regulariser: the attention maps of adjacent blocks should not be alike (arXiv 2103.11886, and its code).

Two maps are alive at a time. A block leaves its queries and keys behind, which its own backward pass keeps anyway; the
maps of a pair are made from them, compared and dropped, and made again for the gradient. Fused attention stays fused.
Shape letters: B batch, H heads, N tokens, D width.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitx.core.errors import InputError
from vitx.models.attention import HeadMixAttention
from vitx.models.similarity import Over, map_similarity


def attention_similarity_loss(maps: Iterable[Tensor], *, over: Over = "heads", pairs: int = 0) -> Tensor:
    """Return the mean `map_similarity` of the first `pairs` adjacent pairs (0: all) of (B, H, N, N) maps; a scalar.

    `maps` is read one by one. Raises InputError for fewer than `pairs` + 1 maps, or than two.
    """
    similarities = []
    for first, second in pairwise(maps):
        similarities.append(map_similarity(first, second, over))
        if len(similarities) == pairs:
            break
    return _mean(similarities, pairs)


class Projected(NamedTuple):
    """One block's attention and the output of its `qkv`, (B, N, 3·D)."""

    layer: HeadMixAttention
    qkv_BN3D: Tensor

    def maps(self) -> Tensor:
        """The softmax maps before dropout and before any mix over heads, in float32 or wider: (B, H, N, N)."""
        q_BHNK, k_BHNK, _ = self.layer.split_heads(
            self.qkv_BN3D.to(torch.promote_types(self.qkv_BN3D.dtype, torch.float32))
        )
        with torch.autocast(q_BHNK.device.type, enabled=False):
            return self.layer.softmax_maps(q_BHNK, k_BHNK)


@contextmanager
def queries_and_keys(model: nn.Module, *, compared: bool = True) -> Iterator[list[Projected]]:
    """Collect what each attention layer of `model` projects during one forward pass, first block first.

    Without `compared` it does nothing, so that the caller needs no branch.
    Raises InputError for a network without vitx's attention layers.
    """
    if not compared:
        yield []
        return
    layers = [module for module in model.modules() if isinstance(module, HeadMixAttention)]
    if len(layers) < 2:
        raise InputError(
            f"{type(model).__name__} has {len(layers)} attention layers to compare: set losses.attention=0, or choose "
            "a model of `vitx models`"
        )
    collected: list[Projected] = []
    with ExitStack() as hooks:
        for layer in layers:

            def keep(_: nn.Module, __: object, output: Tensor, layer: HeadMixAttention = layer) -> None:
                collected.append(Projected(layer, output))

            hooks.callback(layer.qkv.register_forward_hook(keep).remove)
        yield collected


def projected_similarity(blocks: list[Projected], *, over: Over = "heads", pairs: int = 0) -> Tensor:
    """`attention_similarity_loss` of the blocks' maps, made pair by pair and made again in the backward pass."""
    chosen = list(pairwise(blocks))[: pairs or None]
    return _mean([_pair_similarity(first, second, over) for first, second in chosen], pairs)


def _pair_similarity(first: Projected, second: Projected, over: Over) -> Tensor:
    def compare(first_qkv: Tensor, second_qkv: Tensor) -> Tensor:
        maps = Projected(first.layer, first_qkv).maps()
        return map_similarity(maps, Projected(second.layer, second_qkv).maps(), over)

    operands = (first.qkv_BN3D, second.qkv_BN3D)
    similarity: Tensor = checkpoint(compare, *operands, use_reentrant=False, preserve_rng_state=False)
    return similarity


def _mean(similarities: list[Tensor], pairs: int) -> Tensor:
    if len(similarities) < max(pairs, 1):
        raise InputError(
            f"{pairs or 'all'} adjacent pairs of attention maps were asked for, but there are {len(similarities)}: "
            "lower losses.attention_pairs, or use more blocks"
        )
    return torch.stack(similarities).mean()
