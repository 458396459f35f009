"""Collecting attention maps during forward passes, which fused kernels otherwise never write."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

from timm.models.cait import TalkingHeadAttn
from timm.models.edgenext import CrossCovarianceAttn
from timm.models.mobilevit import LinearSelfAttention
from timm.models.xcit import XCA
from torch import Tensor, nn

from vitx.core.errors import InputError
from vitx.models.attention import AttnScaleAttention, HeadMixAttention, ReAttention, TalkingHeadsAttention


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The attention layers of a network by name: every module with an `attn_drop` layer, as timm's have.

    XCiT's and EdgeNeXt's are no such layers: their maps are of channels, not of tokens. Nor are MobileViT-v2's, which
    have one score a token.
    """
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(getattr(module, "attn_drop", None), nn.Dropout)
        and not isinstance(module, XCA | CrossCovarianceAttn | LinearSelfAttention)
    }


def mixes_heads(layer: nn.Module) -> bool:
    """Whether an attention layer mixes or scales its softmax maps, so that other maps meet V."""
    return isinstance(layer, ReAttention | TalkingHeadsAttention | AttnScaleAttention | TalkingHeadAttn)


@contextmanager
def attention_maps(
    model: nn.Module,
    *,
    of: Callable[[Tensor], Any] = Tensor.detach,
    stage: Literal["softmax", "mixed"] = "softmax",
) -> Iterator[dict[str, Any]]:
    """Collect the attention maps of every layer during forward passes of `model`.

    Yields a dictionary from layer name to `of(maps)` of the latest pass, maps (B, H, N, N) as they are before dropout
    (for windowed attention B counts windows). `stage="mixed"` takes the maps that meet V: after the head mix of
    Re-Attention and talking heads, timm's CaiT included, and after AttnScale.
    Fused kernels are off inside the block; everything is restored after it. Works on vitx's networks and on timm's
    ViT, DeiT, CaiT, Swin and PiT. Raises InputError for a network without such layers (`attention_layers`).
    """
    layers = attention_layers(model)
    if not layers:
        raise InputError(f"{type(model).__name__} has no attention whose maps can be observed")
    collected: dict[str, Any] = {}
    with ExitStack() as restore:
        for name, layer in layers.items():
            _unfuse(layer, restore)
            if stage == "mixed" and isinstance(layer, HeadMixAttention):
                _watch_mixed(name, layer, of, collected, restore)
            elif stage == "softmax" and isinstance(layer, TalkingHeadAttn):
                # What enters its mix, with heads last: (B, N, N, H).
                _watch_input(name, layer.proj_w, lambda maps: of(maps.movedim(-1, 1)), collected, restore)
            elif isinstance(layer, HeadMixAttention):
                _watch_input(name, layer.attn_drop, _over_tokens(layer, of), collected, restore)
            else:  # before the dropout, which in timm's CaiT stands behind the mix
                _watch_input(name, layer.attn_drop, of, collected, restore)
        yield collected


def _unfuse(layer: Any, restore: ExitStack) -> None:
    if getattr(layer, "fused_attn", False):
        layer.fused_attn = False
        restore.callback(setattr, layer, "fused_attn", True)


def _over_tokens(layer: HeadMixAttention, of: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    return lambda maps: of(layer.over_tokens(maps))


def _watch_input(
    name: str, module: Any, of: Callable[[Tensor], Any], collected: dict[str, Any], restore: ExitStack
) -> None:
    def keep(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        collected[name] = of(inputs[0])

    restore.callback(module.register_forward_pre_hook(keep).remove)


def _watch_mixed(
    name: str, layer: HeadMixAttention, of: Callable[[Tensor], Any], collected: dict[str, Any], restore: ExitStack
) -> None:
    """The mixed maps, by wrapping `after_softmax` on this one layer; × `value_scale`, which the layer applies to V."""
    mix = layer.after_softmax

    def keep(maps_BHNN: Tensor) -> Tensor:
        mixed_BHNN = mix(maps_BHNN)
        whole_BHNN = layer.over_tokens(mixed_BHNN)
        collected[name] = of(whole_BHNN if layer.value_scale == 1.0 else whole_BHNN * layer.value_scale)
        return mixed_BHNN

    layer.after_softmax = keep  # type: ignore[method-assign]
    restore.callback(delattr, layer, "after_softmax")
