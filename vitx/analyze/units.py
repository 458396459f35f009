"""The residual units of a network: attention, MLPs and convolutions, each beside a shortcut.

Supported are the blocks of vitx, those of timm's ViT, DeiT, CaiT, Swin and PiT and of every network with blocks of the
same attributes, and the units of AlterNet, ResNet and ConvNeXt.
"""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from timm.layers import LayerNorm2d
from timm.models.convnext import ConvNeXtBlock
from timm.models.csatv2 import TransformerBlock as CSATTransformerBlock
from timm.models.davit import ChannelBlock, SpatialBlock
from timm.models.eva import EvaBlockPostNorm
from timm.models.mobilevit import MobileVitBlock, MobileVitV2Block
from timm.models.mvitv2 import MultiScaleBlock
from timm.models.resnet import BasicBlock, Bottleneck
from timm.models.swin_transformer_v2 import SwinTransformerV2Block
from timm.models.swin_transformer_v2_cr import SwinTransformerV2CrBlock
from timm.models.vision_transformer import DiffParallelScalingBlock, ParallelScalingBlock, ResPostBlock
from timm.models.vision_transformer_relpos import ResPostRelPosBlock
from timm.models.volo import ClassBlock
from timm.models.xcit import ClassAttentionBlock, XCABlock
from torch import nn

from vitx.models.alternet import AttentionUnit, PreActivationUnit

Kind = Literal["attention", "mlp", "convolution"]
# Blocks that normalise what a branch gives: x + norm(branch(x)).
_POST_NORM = (SwinTransformerV2Block, SwinTransformerV2CrBlock, ResPostBlock, ResPostRelPosBlock, EvaBlockPostNorm)
# Blocks whose streams are not those of an image's tokens, or not of all: their units are known by what they remove.
_NOT_READ = (MobileVitBlock, MobileVitV2Block, ClassBlock)


class Unit(NamedTuple):
    """A residual unit, x + branch(x), and where the stream after it can be read.

    branch: if its output is zero, only the shortcut is left. stream_module: the residual stream after the unit is the
    `stream_from` of this module, multiplied by `scale`; None where no module has it. layer: the block that ends with
    this unit; None for an attention with an MLP behind it. channels_last: whether the stream, where it is a map, is
    (B, S, S, D) and not (B, D, S, S). block: the module whose input the unit adds to; None where it adds to the stream
    after the unit before it in the same block.
    """

    name: str
    kind: Kind
    branch: nn.Module
    stream_module: nn.Module | None
    stream_from: Literal["input", "output"] = "output"
    layer: str | None = None
    scale: float = 1.0
    channels_last: bool = False
    block: nn.Module | None = None


def residual_units(model: nn.Module) -> list[Unit]:
    """Every unit, in the order of the modules; empty for a network that is not supported."""
    # MobileViT's blocks see every fourth pixel of an image as an image of its own, and MobileViT-v2's as a row of its
    # own. VOLO's last blocks give all tokens and change the class token alone: by the others they would be dead.
    unread = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, _NOT_READ))
    return [
        unit._replace(stream_module=None) if unit.name.startswith(unread) else unit
        for name, module in model.named_modules()
        for unit in _units_of(name, module)
    ]


def units_with_streams(model: nn.Module) -> list[Unit]:
    """The residual units behind which the stream can be read."""
    return [unit for unit in residual_units(model) if unit.stream_module is not None]


def _units_of(name: str, module: Any) -> Iterator[Unit]:
    if isinstance(module, PreActivationUnit):
        kind: Kind = "attention" if isinstance(module, AttentionUnit) else "convolution"
        yield Unit(name, kind, module.drop_path, module, layer=name, block=module)
    elif isinstance(module, BasicBlock | Bottleneck):
        last = module.bn3 if isinstance(module, Bottleneck) else module.bn2
        yield Unit(name, "convolution", last, module, layer=name, block=module)
    elif isinstance(module, ConvNeXtBlock):
        yield Unit(name, "convolution", module.mlp, module, layer=name, block=module)
    elif isinstance(module, SpatialBlock | ChannelBlock) and module.ffn:
        # DaViT's: a position encoding before attention and one before the MLP are convolutions beside a shortcut.
        yield Unit(f"{name}.cpe1", "convolution", module.cpe1.act, module.cpe1, block=module)
        yield Unit(f"{name}.attn", "attention", module.attn, module.cpe2, "input")
        yield Unit(f"{name}.cpe2", "convolution", module.cpe2.act, module.cpe2)
        yield Unit(f"{name}.mlp", "mlp", module.mlp, module, layer=name)
    elif isinstance(module, ParallelScalingBlock) and module.out_proj is None:
        # Both branches add to one shortcut at once: no stream is of one alone.
        yield Unit(f"{name}.attn", "attention", module.attn_out_proj, None)
        yield Unit(f"{name}.mlp", "mlp", module.mlp_out_proj, None, layer=name)
    elif isinstance(module, DiffParallelScalingBlock):
        # One product takes both, each after a layer of its own; the product's bias is of neither and stays.
        yield Unit(f"{name}.attn", "attention", module.sub_norm, None)
        yield Unit(f"{name}.mlp", "mlp", module.mlp_drop, None, layer=name)
    elif isinstance(module, MultiScaleBlock | ClassAttentionBlock):
        return  # a shortcut pools and projects, or is the normalised token: none of the branches leaves x
    elif all(isinstance(getattr(module, part, None), nn.Module) for part in ("norm1", "attn", "norm2", "mlp")):
        # What reads the stream between attention and MLP, and what ends a branch: a norm that stands after it is part
        # of the branch, because a norm of zero is its bias.
        post_norm = isinstance(module, _POST_NORM)
        convolved = isinstance(module, XCABlock)  # between attention and MLP
        middle = module.mlp if post_norm else module.norm3 if convolved else module.norm2
        attention, mlp = (module.norm1, module.norm2) if post_norm else (module.attn, module.mlp)
        scale, nhwc = float(getattr(module, "residual_scale", 1.0)), _has_channels_last(module)
        read: dict[str, Any] = {"scale": scale, "channels_last": nhwc, "block": module}
        yield Unit(f"{name}.attn", "attention", attention, middle, "input", **read)
        if convolved:
            yield Unit(f"{name}.local_mp", "convolution", module.local_mp, module.norm2, "input")
        # The last block of SwinV2-CR, or of each stage, ends with a norm of the stream: no branch adds that.
        stream_norm = getattr(module, "norm3", None) if isinstance(module, SwinTransformerV2CrBlock) else None
        if isinstance(stream_norm, nn.LayerNorm):
            yield Unit(f"{name}.mlp", "mlp", mlp, stream_norm, "input", layer=name)
        else:
            yield Unit(f"{name}.mlp", "mlp", mlp, module, layer=name, channels_last=nhwc)


def _has_channels_last(block: Any) -> bool:
    """Whether the maps of a block with norm1 are (B, S, S, D): the norm over the last axis is of the channels then.

    The network does not say: timm's MaxxVit has blocks of both layouts, and Swin alone an `output_fmt`.
    """
    over_last = isinstance(block.norm1, nn.LayerNorm) and not isinstance(block.norm1, LayerNorm2d)
    # CSATv2's maps have the channels first, though a norm over the last axis reads them, as tokens.
    return over_last and not isinstance(block, CSATTransformerBlock)
