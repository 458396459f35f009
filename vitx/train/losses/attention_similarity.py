"""DeepViT's regulariser: the attention maps of adjacent blocks should differ (Zhou et al., arXiv 2103.11886, and its
code; docs/maths.md §2.6).

Either form of a block's maps is compared. *Mixed*, as the authors' code does: what meets V, after Re-Attention's mix
and norm, so that the loss trains Θ; each block writes its maps and keeps them for its backward pass. *Softmax*: the
maps before dropout and mix, of which at most two (B, H, N, N) are in memory at a time, whatever the depth. A forward
hook records the output of each block's `qkv` projection, which the block's own backward pass keeps anyway. The maps of
a pair are computed from it, compared and dropped, and computed again in the backward pass. So the blocks themselves
can keep fused attention.
Shape letters: B batch, H heads, N tokens, K head width, D width.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitx.core.errors import InputError
from vitx.models.attention import HeadMixAttention
from vitx.models.attention_maps import attention_maps
from vitx.models.similarity import Over, at_least_float32, map_similarity


@contextmanager
def attention_loss(
    model: nn.Module, maps: Literal["mixed", "softmax"], *, over: Over = "heads", pairs: int = 0
) -> Iterator[Callable[[], Tensor]]:
    """Watch one forward pass of `model`; after it the function returns the loss of its maps, a scalar.

    It is the mean `map_similarity` of adjacent blocks, of the first `pairs` (0: all). Raises InputError for too few
    pairs, and what `record_qkv` does.
    """
    if maps == "softmax":
        with record_qkv(model) as blocks:
            yield lambda: qkv_similarity_loss(blocks, over=over, pairs=pairs)
        return
    similarities: list[Tensor] = []
    before: list[Tensor] = []

    def compare(maps_BHNN: Tensor) -> None:  # as soon as the second of a pair is there, in float32 or wider
        with torch.autocast(maps_BHNN.device.type, enabled=False):
            wide = at_least_float32(maps_BHNN)
            if before and not 0 < pairs <= len(similarities):
                similarities.append(map_similarity(before[0], wide, over))
        before[:] = [wide]

    with attention_maps(model, of=compare, stage="mixed"):
        yield lambda: _mean(similarities, pairs)


class BlockQkv(NamedTuple):
    """One block's attention layer and the output of its `qkv` projection, (B, N, 3·D)."""

    layer: HeadMixAttention
    qkv_BN3D: Tensor

    def maps(self) -> Tensor:
        """The softmax maps before dropout and before any head mix, in float32 or wider: (B, H, N, N)."""
        q_BHNK, k_BHNK, _ = self.layer.split_heads(at_least_float32(self.qkv_BN3D))
        with torch.autocast(q_BHNK.device.type, enabled=False):
            return self.layer.softmax_maps(q_BHNK, k_BHNK)


@contextmanager
def record_qkv(model: nn.Module) -> Iterator[list[BlockQkv]]:
    """Record the `qkv` output of each attention layer during one forward pass of `model`, first block first.

    Raises InputError for a network with fewer than two of vitx's attention layers.
    """
    layers = [module for module in model.modules() if isinstance(module, HeadMixAttention)]
    if len(layers) < 2:
        raise InputError(
            f"{type(model).__name__} has {len(layers)} of vitx's attention layers, which losses.attention "
            "compares: set losses.attention=0, or choose a model of `vitx models`"
        )
    recorded: list[BlockQkv] = []
    with ExitStack() as hooks:
        for layer in layers:
            # The default argument binds this iteration's layer; a closure would see the last one.
            def keep(_: nn.Module, __: object, output: Tensor, layer: HeadMixAttention = layer) -> None:
                recorded.append(BlockQkv(layer, output))

            hooks.callback(layer.qkv.register_forward_hook(keep).remove)
        yield recorded


def qkv_similarity_loss(blocks: list[BlockQkv], *, over: Over = "heads", pairs: int = 0) -> Tensor:
    """The mean `map_similarity` of adjacent blocks' softmax maps, of the first `pairs` (0: all), from `qkv` outputs.

    Each pair's maps are recomputed in the backward pass. Raises InputError for too few blocks.
    """
    chosen = list(pairwise(blocks))[: pairs or None]
    return _mean([_pair_similarity(first, second, over) for first, second in chosen], pairs)


def _pair_similarity(first: BlockQkv, second: BlockQkv, over: Over) -> Tensor:
    def compare(first_qkv: Tensor, second_qkv: Tensor) -> Tensor:
        maps = BlockQkv(first.layer, first_qkv).maps()
        return map_similarity(maps, BlockQkv(second.layer, second_qkv).maps(), over)

    # `compare` draws nothing, so no random state has to be saved for the second computation.
    operands = (first.qkv_BN3D, second.qkv_BN3D)
    similarity: Tensor = checkpoint(compare, *operands, use_reentrant=False, preserve_rng_state=False)
    return similarity


def check_pairs(asked: int, there: int) -> None:
    """Raise InputError where more pairs of adjacent blocks' maps are asked for than there are; 0: all, at least one."""
    if there < max(asked, 1):
        raise InputError(
            f"{asked or 'all'} adjacent pairs of attention maps were asked for, but there are {there}: "
            "lower losses.attention_pairs, or use more blocks"
        )


def _mean(similarities: list[Tensor], pairs: int) -> Tensor:
    check_pairs(pairs, len(similarities))
    return torch.stack(similarities).mean()
