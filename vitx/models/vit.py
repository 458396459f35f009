"""The vision transformer of vitx: timm's, with a choice of attention in each block, and DeepViT's residual scale.

Shape letters: B batch, N tokens with class token, n patches, D width, C classes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import DropPath, LayerScale, Mlp, PatchEmbed, to_2tuple
from timm.models.vision_transformer import Attention
from timm.models.vision_transformer import VisionTransformer as TimmVisionTransformer
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitx.core.errors import InputError, unknown_name
from vitx.models.attention import (
    AttnScaleAttention,
    FirstValues,
    HeadNorm,
    MixInit,
    NeutrenoAttention,
    PlainAttention,
    ReAttention,
    TalkingHeadsAttention,
)
from vitx.models.patch_embedding import ConvPatchEmbed
from vitx.models.recalibration import set_closed_form_means
from vitx.models.window_attention import LocalAttention

AttentionKind = Literal["plain", "talking-heads", "re-attention", "attn-scale", "neutreno", "local"]
ATTENTION: dict[str, type[nn.Module]] = {
    "plain": PlainAttention,
    "talking-heads": TalkingHeadsAttention,
    "re-attention": ReAttention,
    "attn-scale": AttnScaleAttention,
    "neutreno": NeutrenoAttention,
    "local": LocalAttention,
}


@dataclass(frozen=True, kw_only=True)
class BlockOptions:
    """What timm's VisionTransformer asks of each of its blocks, by timm's names, where a block here has it."""

    mlp_ratio: float = 4.0
    qkv_bias: bool = True
    init_values: float | None = None
    attn_drop: float = 0.0
    proj_drop: float = 0.0
    drop_path: float = 0.0
    act_layer: type[nn.Module] = nn.GELU
    norm_layer: Any = nn.LayerNorm
    mlp_layer: Any = Mlp
    device: Any = None
    dtype: Any = None


def block_options(asked: Mapping[str, Any]) -> BlockOptions:
    """Those of timm's options that a block here has; raises InputError for another that asks for something."""
    known = {field.name for field in fields(BlockOptions)}
    others = {name: wanted for name, wanted in asked.items() if name not in known}
    layer = others.pop("attn_layer", Attention)
    if layer not in (Attention, "", "attn"):  # by its class or timm's names of it, which every block is given
        raise InputError(f"attn_layer {layer!r} is timm's choice of attention, which is not made here: give attention")
    others["proj_bias=False"] = not others.pop("proj_bias", True)
    refused = [name for name, wanted in others.items() if wanted]
    if refused:
        raise InputError(f"{', '.join(refused)} is not supported by this network: leave it out")
    return BlockOptions(**{name: asked[name] for name in known & asked.keys()})


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """Arguments of VisionTransformer for the layers of one kind of attention: see ReAttention, TalkingHeadsAttention.

    neutreno_alpha: α of NeutrenoAttention.
    local_kernel_size: side of the neighbourhood of LocalAttention, which has no class token (`global_pool="avg"`).
    """

    reatten_norm: HeadNorm = "batch"
    reatten_init: MixInit = "random"
    reatten_scale: float = 1.0
    talking_heads_bias: bool = False
    talking_heads_init: MixInit = "random"
    neutreno_alpha: float = 0.6
    local_kernel_size: int = 3

    def by_kind(self) -> dict[str, dict[str, Any]]:
        """What the layers of each kind are built with."""
        return {
            "re-attention": {
                "norm": self.reatten_norm,
                "init": self.reatten_init,
                "reatten_scale": self.reatten_scale,
            },
            "talking-heads": {"mix_bias": self.talking_heads_bias, "init": self.talking_heads_init},
            "neutreno": {"alpha": self.neutreno_alpha},
            "local": {"kernel_size": self.local_kernel_size},
        }


class Block(nn.Module):
    """`x + attn(LN(s·x))/s`, then `x + mlp(LN(s·x))/s`, with s the residual scale (DeepViT's scale_adjustment).

    `feat_scale=True` puts FeatScale (`scale_frequencies`) behind attention, with `lamb1` and `lamb2` (D,), its authors'
    names, zero at first. Children are named as in timm's block, so that published checkpoints load. timm's
    VisionTransformer builds it with its own arguments, `depth` being the block's number and the rest BlockOptions; what
    attention here does not have (`qk_norm`, `scale_attn_norm`, `scale_mlp_norm`, `proj_bias=False`) is refused when it
    is asked for.
    """

    lamb1: nn.Parameter | None
    lamb2: nn.Parameter | None

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        attention: Sequence[AttentionKind],
        attention_options: dict[str, dict[str, Any]],
        depth: int,
        residual_scale: float = 1.0,
        feat_scale: bool = False,
        **timm_options: Any,
    ) -> None:
        super().__init__()
        options = block_options(timm_options)
        factory = {"device": options.device, "dtype": options.dtype}
        rates = {"attn_drop": options.attn_drop, "proj_drop": options.proj_drop}
        kind, gamma, dropped = attention[depth], options.init_values, options.drop_path
        of_kind = attention_options.get(kind, {})
        if kind == "neutreno":
            of_kind = {**of_kind, "first": kind not in attention[:depth]}
        self.residual_scale = residual_scale
        self.norm1 = options.norm_layer(dim, **factory)
        self.attn = ATTENTION[kind](dim, num_heads, qkv_bias=options.qkv_bias, **rates, **factory, **of_kind)
        self.ls1 = LayerScale(dim, init_values=gamma, **factory) if gamma else nn.Identity()
        self.drop_path1 = DropPath(dropped) if dropped > 0 else nn.Identity()
        self.norm2 = options.norm_layer(dim, **factory)
        hidden = int(dim * options.mlp_ratio)
        self.mlp = options.mlp_layer(dim, hidden, act_layer=options.act_layer, drop=options.proj_drop, **factory)
        self.ls2 = LayerScale(dim, init_values=gamma, **factory) if gamma else nn.Identity()
        self.drop_path2 = DropPath(dropped) if dropped > 0 else nn.Identity()
        for name in ("lamb1", "lamb2"):
            self.register_parameter(name, nn.Parameter(torch.empty(dim, **factory)) if feat_scale else None)
        self.init_weights()

    def init_weights(self) -> None:
        """Start without FeatScale's change."""
        if self.lamb1 is not None and self.lamb2 is not None:
            nn.init.zeros_(self.lamb1)
            nn.init.zeros_(self.lamb2)

    def forward(self, x: Tensor, attn_mask: Tensor | FirstValues | None = None, is_causal: bool = False) -> Tensor:
        """`attn_mask` is what timm hands to all blocks: here no mask, but what NeuTRENO's blocks share."""
        if isinstance(attn_mask, Tensor) or is_causal:
            raise InputError("attention masks are not supported: images have none")
        s = self.residual_scale
        if s == 1.0:  # x is (B, N, D) throughout
            x = x + self.drop_path1(self.ls1(self._attended(self.norm1(x), attn_mask)))
            x = x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))
        else:
            # LN(s·x; eps) = LN(x; eps/s²), so in effect each branch is multiplied by 1/s (docs/maths.md §3.3).
            x = x + self.drop_path1(self.ls1(self._attended(self.norm1(x * s), attn_mask))) / s
            x = x + self.drop_path2(self.ls2(self.mlp(self.norm2(x * s)))) / s
        return x

    def _attended(self, x_BND: Tensor, shared: FirstValues | None) -> Tensor:
        out_BND: Tensor = self.attn(x_BND, shared) if isinstance(self.attn, NeutrenoAttention) else self.attn(x_BND)
        if self.lamb1 is None or self.lamb2 is None:
            return out_BND
        return scale_frequencies(out_BND, self.lamb1, self.lamb2)


def scale_frequencies(x_BND: Tensor, low_D: Tensor, high_D: Tensor, *, times: int = 2) -> Tensor:
    """FeatScale of tokens (B, N, D): their mean m becomes `(1 + 2·low)·m`, what is left `(1 + 2·high)·(x − m)`.

    Wang et al., arXiv 2203.05962. The factor of 2, `times`, is of the authors' code for DeiT, which adds both parts
    twice, and so of their checkpoints; that for CaiT adds them once (docs/maths.md §3.6).
    """
    mean_B1D = x_BND.mean(dim=1, keepdim=True)
    return x_BND + times * (low_D * mean_B1D + high_D * (x_BND - mean_B1D))


class Contrast(nn.Module):
    """`x − s·softmax(x̂x̂ᵀ/τ)·x` of tokens (B, N, D), x̂ being x with rows of length 1; k·x gives k times as much.

    One step down the gradient of the contrastive loss's uniformity: what a token shares with those that are like it
    is taken from it. No parameters.
    """

    def __init__(self, scale: float, temperature: float = 1.0) -> None:
        super().__init__()
        self.scale, self.temperature = scale, temperature

    def forward(self, x_BND: Tensor) -> Tensor:
        unit_BND = F.normalize(x_BND, dim=-1)
        maps_BNN = (unit_BND @ unit_BND.transpose(-2, -1) / self.temperature).softmax(dim=-1)
        return x_BND - self.scale * (maps_BNN @ x_BND)

    def extra_repr(self) -> str:
        return f"scale={self.scale}, temperature={self.temperature}"


class ContraNorm(nn.Module):
    """`LayerNorm(contrast(x))` of tokens (B, N, D): Guo et al., ICLR 2023, arXiv 2303.06562.

    Parameters are named as in the authors' code. Of its variants: `identity` with scale s is a scale of s/(1 + s) here,
    up to LayerNorm's eps; the dual, pre-normalised and learnt ones are not built.

    Args:
        scale: s > 0. The paper takes 0.005 to 0.2 for BERT and 0.2 to 1 for graphs.
        temperature: τ > 0.

    Raises InputError for another scale or temperature.
    """

    def __init__(
        self,
        dim: int,
        *,
        scale: float,
        temperature: float = 1.0,
        eps: float = 1e-6,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        for name, value in (("scale", scale), ("temperature", temperature)):
            if not 0 < value < math.inf:
                raise InputError(f"contranorm_{name} is {value}: expected a number above 0")
        self.contrast = Contrast(scale, temperature)
        self.layernorm = nn.LayerNorm(dim, eps=eps, device=device, dtype=dtype)

    def forward(self, x_BND: Tensor) -> Tensor:
        normed_BND: Tensor = self.layernorm(self.contrast(x_BND))
        return normed_BND


class TokenOutputs(NamedTuple):
    """What the over-smoothing losses (docs/maths.md §2) need of one forward pass; the n patches without class token.

    logits: the network's output, of timm's distilled networks two in training. embedding: before positions are added.
    early: after the first block. late: after the final LayerNorm. patch_logits: of the late patches, by the patch head;
    None without one.
    """

    logits_BC: Any
    embedding_BnD: Tensor
    early_BnD: Tensor
    late_BnD: Tensor
    patch_logits_BnC: Tensor | None


_MOST_BLOCKS = 1000  # a slip of the keyboard is told before it takes all memory
# timm's arguments whose default is another here, and those that are read before timm has them.
TIMM_DEFAULTS: dict[str, Any] = {
    "img_size": 224,
    "patch_size": 16,
    "embed_dim": 768,
    "depth": 12,
    "num_heads": 12,
    "global_pool": "token",
    "class_token": None,
    "fc_norm": False,
    "norm_layer": partial(nn.LayerNorm, eps=1e-6),
}


class VisionTransformer(TimmVisionTransformer):
    """timm's vision transformer with another attention in chosen blocks, or FeatScale behind it in all.

    Args:
        attention: one kind for all blocks, or a list with one kind a block.
        residual_scale: s of `Block`.
        feat_scale: FeatScale behind attention, in all blocks.
        contranorm_scale, contranorm_temperature: s and τ of `ContraNorm`, every norm of tokens then; 0 is LayerNorm.
        patch_embedding: "patch" (one convolution) or "cnn" (DeepViT's three).
        patch_head: add a linear classifier of single patches, for the patch mixing loss.
        position_std: standard deviation of the initial positions. timm's .02 is far below the patch embedding's scale,
            so positions have to be learnt first; large values help where positions decide, as on very small images.
        options: those of AttentionOptions, and every other argument of timm's but `embed_layer` and `block_fn`.
            Defaults are timm's, except that LayerNorm has an eps of 1e-6 and comes before the pooling
            (`fc_norm=False`), and that `class_token` is there only with `global_pool="token"`.
    """

    def __init__(
        self,
        *,
        attention: AttentionKind | Sequence[AttentionKind] = "plain",
        residual_scale: float = 1.0,
        feat_scale: bool = False,
        contranorm_scale: float = 0.0,
        contranorm_temperature: float = 1.0,
        patch_embedding: Literal["patch", "cnn"] = "patch",
        patch_head: bool = False,
        position_std: float = 0.02,
        **options: Any,
    ) -> None:
        of_attention = {
            field.name: options.pop(field.name) for field in fields(AttentionOptions) if field.name in options
        }
        timm = {**TIMM_DEFAULTS, **options}
        if timm["class_token"] is None:
            timm["class_token"] = timm["global_pool"] == "token"
        _check_geometry(timm["img_size"], timm["patch_size"], timm["embed_dim"], timm["num_heads"])
        if contranorm_scale:
            if timm["fc_norm"] or timm["global_pool"] == "map" or "norm_layer" in options:
                raise InputError(
                    "contranorm_scale is for norms of tokens: leave out fc_norm, global_pool=map, norm_layer"
                )
            timm["norm_layer"] = partial(ContraNorm, scale=contranorm_scale, temperature=contranorm_temperature)
        kinds = attention_of_blocks(attention, timm["depth"])
        if "local" in kinds and timm["class_token"]:
            raise InputError("attention 'local' needs a map of patches without class token: set global_pool=avg")
        # timm calls it once a block with the block's number as `depth`.
        block = partial(
            Block,
            attention=kinds,
            attention_options=AttentionOptions(**of_attention).by_kind(),
            residual_scale=residual_scale,
            feat_scale=feat_scale,
        )
        embedding = {"patch": PatchEmbed, "cnn": ConvPatchEmbed}[patch_embedding]
        super().__init__(embed_layer=embedding, block_fn=block, **timm)  # type: ignore[arg-type]  # any callable works
        self.shares_values = "neutreno" in kinds
        if position_std != 0.02 and self.pos_embed is not None:
            nn.init.trunc_normal_(self.pos_embed, std=position_std)
        self.patch_head = None
        if patch_head:
            place: dict[str, Any] = {name: options.get(name) for name in ("device", "dtype")}
            self.patch_head = nn.Linear(self.embed_dim, self.num_classes, **place)
            nn.init.trunc_normal_(self.patch_head.weight, std=0.02)
            nn.init.zeros_(self.patch_head.bias)

    def init_weights(self, mode: str = "", needs_reset: bool = True) -> None:
        """timm's initialisation, with the class token as DeiT and DeepViT draw it (normal, .02, truncated)."""
        super().init_weights(mode, needs_reset)
        if self.cls_token is not None:
            nn.init.trunc_normal_(self.cls_token, std=0.02)

    def forward_features(self, x: Tensor, attn_mask: Any = None, is_causal: bool = False) -> Tensor:
        """timm's, whose gradient checkpointing hands nothing to blocks beside their tokens."""
        if not self.shares_values or attn_mask is not None or is_causal:
            return super().forward_features(x, attn_mask, is_causal)
        x_BND = self.norm_pre(self.patch_drop(self._pos_embed(self.patch_embed(x))))
        tokens: Tensor = self.norm(_through_blocks(self, x_BND)[1])
        return tokens

    def forward_intermediates(self, x: Tensor, *args: Any, **options: Any) -> Any:
        """timm's; where NeuTRENO's blocks share values, without gradient checkpointing."""
        if self.shares_values and options.get("attn_mask") is None:
            options["attn_mask"] = FirstValues()
        return super().forward_intermediates(x, *args, **options)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier, and the patch head with it."""
        super().reset_classifier(num_classes, global_pool)
        if self.patch_head is not None:
            reference = self.patch_head.weight
            self.patch_head = nn.Linear(self.embed_dim, num_classes, device=reference.device, dtype=reference.dtype)

    def set_input_size(self, img_size: Any = None, patch_size: Any = None) -> None:
        """Change the image or patch size: position embeddings are interpolated, Re-Attention's means follow.

        The variances of Re-Attention's BatchNorm belong to the old number of tokens until `recalibrate` measures them.
        """
        _check_geometry(
            img_size or self.patch_embed.img_size, patch_size or self.patch_embed.patch_size, self.embed_dim, 1
        )
        before = self.num_tokens
        super().set_input_size(img_size, patch_size)
        if self.num_tokens != before:
            set_closed_form_means(self, self.num_tokens)

    @property
    def num_tokens(self) -> int:
        """N: patches and, where there is one, the class token."""
        return int(self.patch_embed.num_patches) + int(self.num_prefix_tokens)

    def classify_patches(self, patches: Tensor) -> Tensor:
        """Final patches, or means of them, (…, D) → (…, C), through the patch head, with the head's dropout."""
        assert self.patch_head is not None, "the network was built without patch_head=True"
        logits: Tensor = self.patch_head(self.head_drop(patches))
        return logits


def forward_with_tokens(model: TimmVisionTransformer, images: Tensor, *, classify_patches: bool = True) -> TokenOutputs:
    """`model(images)` of images (B, 3, S, S), with tokens: of vitx's ViT and timm's, of its distilled ones too.

    `classify_patches=False` leaves the patches' logits out, which only a network with a patch head has.
    """
    embedding_BnD = model.patch_embed(images)
    # The class token is put in front and positions are added: (B, n, D) → (B, N, D).
    x_BND = model.norm_pre(model.patch_drop(model._pos_embed(embedding_BnD)))
    early_BND, x_BND = _through_blocks(model, x_BND)
    x_BND = model.norm(x_BND)
    late_BnD = x_BND[:, model.num_prefix_tokens :]
    has_head = isinstance(model, VisionTransformer) and model.patch_head is not None
    return TokenOutputs(
        logits_BC=model.forward_head(x_BND),
        embedding_BnD=embedding_BnD.flatten(1, -2),  # with dynamic_img_size they are (B, h, w, D)
        early_BnD=early_BND[:, model.num_prefix_tokens :],
        late_BnD=late_BnD,
        patch_logits_BnC=model.classify_patches(late_BnD) if has_head and classify_patches else None,  # type: ignore[operator]
    )


def _through_blocks(model: TimmVisionTransformer, x_BND: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens (B, N, D) after the first block and after the last."""
    shared = (FirstValues(),) if getattr(model, "shares_values", False) else ()
    early_BND = x_BND
    for index, block in enumerate(model.blocks):
        if model.grad_checkpointing:
            x_BND = checkpoint(block, x_BND, *shared, use_reentrant=False)
        else:
            x_BND = block(x_BND, *shared)
        if index == 0:
            early_BND = x_BND
    return early_BND, x_BND


def attention_of_blocks(attention: AttentionKind | Sequence[AttentionKind], depth: int) -> list[AttentionKind]:
    """One attention kind a block; raise InputError for unknown kinds, another number of them, or no depth."""
    if not 1 <= depth <= _MOST_BLOCKS:
        raise InputError(f"depth is {depth}: expected 1 to {_MOST_BLOCKS:,} blocks")
    kinds: list[AttentionKind] = [attention] * depth if isinstance(attention, str) else list(attention)
    for kind in kinds:
        if kind not in ATTENTION:
            raise unknown_name("attention", kind, ATTENTION)
    if len(kinds) != depth:
        raise InputError(f"attention lists {len(kinds)} blocks but depth is {depth}: give one kind a block")
    return kinds


def _check_geometry(
    img_size: int | tuple[int, int], patch_size: int | tuple[int, int], embed_dim: int, num_heads: int
) -> None:
    if any(side % patch for side, patch in zip(to_2tuple(img_size), to_2tuple(patch_size), strict=True)):
        raise InputError(f"img_size {img_size} is not divisible by patch_size {patch_size}: change one of them")
    if embed_dim % num_heads:
        raise InputError(f"embed_dim {embed_dim} is not divisible by num_heads {num_heads}: change one of them")
