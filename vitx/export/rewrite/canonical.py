"""The canonical form of transformer blocks: supported blocks are brought to it before they are rewritten.

Queries, keys and values have their own projections, the residual scale and the head mixes are plain attributes, and
nothing that only training needs is left, so a rewrite is a few lines of arithmetic on parameters.

Shape letters: B batch, N tokens, M queries (N, or 1 in a class-token tail), D width, H heads, K head width, C = H·K.
"""

from collections import Counter
from typing import Any

import torch
import torch.onnx.ops
from timm.layers import LayerNorm, LayerScale, Mlp, RmsNorm, RmsNormFp32, SimpleNorm, SimpleNormFp32
from timm.layers.attention import Attention as TimmAttention
from timm.models.cait import Cait
from timm.models.cait import LayerScaleBlock as CaitBlock
from timm.models.cait import TalkingHeadAttn as CaitAttention
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Block as TimmBlock
from timm.models.vision_transformer import VisionTransformer as TimmVisionTransformer
from torch import Tensor, nn

from vitx.models import (
    AttnScaleAttention,
    Block,
    NeutrenoAttention,
    PlainAttention,
    ReAttention,
    TalkingHeadsAttention,
    VisionTransformer,
)
from vitx.models.attention import FirstValues
from vitx.models.cait import AttnScaleTalkingHeadAttn, FeatScaleBlock
from vitx.models.head_mix import mix_heads
from vitx.models.vit import ContraNorm, Contrast

# A factor of AttnScale that is nearer to zero is not divided by: in half precision weights times it are subnormal.
SMALLEST_FACTOR = 1e-2
# timm's runs one kernel more or less, and computes the same.
NORMS = (nn.LayerNorm, LayerNorm)
# What normalises each token alone: a norm that mixes tokens would see others than in the network.
_OF_ONE_TOKEN = (*NORMS, nn.RMSNorm, RmsNorm, RmsNormFp32, SimpleNorm, SimpleNormFp32, nn.Identity)


class HeadMix(nn.Module):
    """A linear map over heads: (B, H, M, N) → Σ_g weight[h, g] · maps[:, g] + bias[h], the same shape.

    Re-Attention (DeepViT, arXiv 2103.11886) has one after softmax, talking heads (arXiv 2003.02436) one on each side.
    """

    weight_HH: Tensor
    bias_H: Tensor | None

    def __init__(self, weight_HH: Tensor, bias_H: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("weight_HH", weight_HH.detach().clone())
        self.register_buffer("bias_H", None if bias_H is None else bias_H.detach().clone())

    def forward(self, maps_BHMN: Tensor) -> Tensor:
        return mix_heads(maps_BHMN, self.weight_HH, self.bias_H)


class LayerNormOverHeads(nn.Module):
    """A LayerNorm over the heads of maps (B, H, M, N): not linear in the maps, so it is never folded."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, maps_BHMN: Tensor) -> Tensor:
        normed: Tensor = self.norm(maps_BHMN.movedim(1, -1)).movedim(-1, 1)
        return normed


class ExportAttention(nn.Module):
    """Self-attention in evaluation mode with separate projections and optional mixes over heads.

    `A = after(softmax(before((scale · Q)Kᵀ)))`, out = `proj(value_scale · (A V + row_bias ⊗ Σ_j V_j))`, with A
    (B, H, M, N), V (B, H, N, K) and row_bias (H,).
    With `alpha`, of NeuTRENO, `alpha · (V⁰ − V)` is added before `proj`, V⁰ of the layer that is `first`.
    `queries`: compute the outputs of so many first tokens only; 0: of all. `fused`: trace to one `Attention` node
    (opset 23) instead of two products around a Softmax, where no mix comes before or after the softmax.
    """

    row_bias_H: Tensor | None

    def __init__(self, trained: Any, tokens: int | None = None) -> None:
        super().__init__()
        self.num_heads, self.scale = trained.num_heads, float(trained.scale)
        self.head_dim = trained.qkv.out_features // (3 * self.num_heads)
        self.query, self.key, self.value = _split(trained.qkv, 3)
        self.proj = trained.proj
        self.before: nn.Module | None = None
        self.after: nn.Module | None = None
        self.value_scale = 1.0
        self.queries, self.fused = 0, False
        self.alpha, self.first = 0.0, False
        self.register_buffer("row_bias_H", None)
        if isinstance(trained, TalkingHeadsAttention):
            self.before = HeadMix(trained.proj_pre.weight, trained.proj_pre.bias)
            self.after = HeadMix(trained.proj_post.weight, trained.proj_post.bias)
        elif isinstance(trained, CaitAttention):
            self.before = HeadMix(trained.proj_l.weight, trained.proj_l.bias)
            weight_HH: Tensor = trained.proj_w.weight
            bias_H: Tensor = trained.proj_w.bias
            if isinstance(trained, AttnScaleTalkingHeadAttn):
                assert tokens is not None
                # (1+ω)(WA + b) − ω/N is a mix as well.
                factor_H = 1 + trained.lamb
                weight_HH, bias_H = factor_H[:, None] * weight_HH, factor_H * bias_H - trained.lamb / tokens
            self.after = HeadMix(weight_HH, bias_H)
        elif isinstance(trained, ReAttention):
            mix = HeadMix(trained.reatten_matrix.weight.flatten(1), trained.reatten_matrix.bias)
            norm = trained.var_norm
            if isinstance(norm, nn.LayerNorm):
                norm = LayerNormOverHeads(norm)
            self.after = mix if isinstance(norm, nn.Identity) else nn.Sequential(mix, norm)
            self.value_scale = float(trained.reatten_scale)
        elif isinstance(trained, AttnScaleAttention):
            assert tokens is not None
            # ((1+ω)A − ω/N)V = A((1+ω)V) − ω/(N(1+ω)) · 1·Σ_j (1+ω)V_j: no map is touched.
            factor_H = 1 + trained.lamb.detach()
            scale_outputs(self.value, factor_H.repeat_interleave(self.head_dim))
            self.row_bias_H = (1 / factor_H - 1) / tokens
        elif isinstance(trained, NeutrenoAttention):
            self.alpha, self.first = 0.0 if trained.first else trained.alpha, trained.first

    @property
    def is_fused(self) -> bool:
        """Whether it is traced to one `Attention` node: asked for, and without a mix, which that node cannot have."""
        return self.fused and not self.queries and self.before is None and self.after is None

    def forward(self, x: Tensor, tokens: int, shared: FirstValues | None = None) -> Tensor:
        """(B, N, D) → (B, M, D), or (B·N, D) → (B·M, D) where blocks are joined; `tokens` is N."""
        value: Tensor | None = None
        if self.queries:
            out_BMC = self._first_tokens(x, tokens)
        else:
            out_BMC, value = self._all_tokens(x, tokens)
        out = out_BMC.flatten(0, 1) if x.ndim == 2 else out_BMC
        if self.first and shared is not None:
            shared.values_BND = value
        elif self.alpha:
            assert shared is not None
            out = out + self._towards_first(x, value, tokens, shared).view(out.shape)
        projected: Tensor = self.proj(out)
        return projected

    def _towards_first(self, x: Tensor, value: Tensor | None, tokens: int, shared: FirstValues) -> Tensor:
        """`alpha · (V⁰ − V)` in the shape of the values of all tokens; without them of the first M, (B, M, C)."""
        first = shared.values_BND
        assert first is not None
        if value is None:
            value = self.value(x.view(-1, tokens, x.shape[-1])[:, : self.queries])
            first = first.view(-1, tokens, first.shape[-1])[:, : self.queries]
        return self.alpha * ((first if first.ndim == value.ndim else first.view(value.shape)) - value)

    def _all_tokens(self, x: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """(B, N, D) or (B·N, D) → (B, N, C), before the output projection, and the values, not split as x is not."""
        width = self.num_heads * self.head_dim
        parts = self.query(x), self.key(x), self.value(x)
        query, key, value = (part.view(-1, tokens, width) for part in parts)
        if self.is_fused and torch.compiler.is_exporting():
            # Attention (ONNX opset 23) takes (B, N, C) and splits the heads itself, so that nothing is transposed.
            heads = {"q_num_heads": self.num_heads, "kv_num_heads": self.num_heads}
            out_BNC: Tensor = torch.onnx.ops.attention(query, key, value, scale=self.scale, **heads)[0]
        else:
            query_BHNK, key_BHNK, value_BHNK = map(self._heads, (self._scaled(query), key, value))
            out_BHNK = self._maps(query_BHNK @ key_BHNK.transpose(-2, -1)) @ value_BHNK
            out_BNC = out_BHNK.transpose(1, 2).flatten(2)
        if self.row_bias_H is not None:
            # b_h · Σ_j V_j: a sum (B, 1, C), the same for every query, scaled for each head's K channels.
            bias_C = self.row_bias_H[:, None].expand(-1, self.head_dim).reshape(-1)
            out_BNC = out_BNC + bias_C * value.sum(dim=1, keepdim=True)
        return (out_BNC if self.value_scale == 1.0 else out_BNC * self.value_scale), parts[2]

    def _first_tokens(self, x: Tensor, tokens: int) -> Tensor:
        """The output of the first M tokens (B, M, C), without forming keys or values.

        By associativity `q·W_k x_j = (W_kᵀq)·x_j` and `Σ_j a_j W_v x_j = W_v Σ_j a_j x_j`: for each query two products
        of D·K a head instead of N·D·K. The key bias adds the same number to every score of a row, so softmax drops it.
        """
        H, K, M = self.num_heads, self.head_dim, self.queries
        x_BND = x.view(-1, tokens, self.key.in_features)
        first = x_BND[:, 0] if M == 1 else x_BND[:, :M]
        # The queries of a head together, for all images: P = B·M.
        query_HPK = self._scaled(self.query(first)).view(-1, H, K).transpose(0, 1)
        query_PHD = (query_HPK @ self.key.weight.view(H, K, -1)).transpose(0, 1)
        scores = query_PHD.reshape(-1, M * H, x_BND.shape[2]) @ x_BND.transpose(1, 2)
        maps_BHMN = self._maps(scores.unsqueeze(2) if M == 1 else scores.view(-1, M, H, tokens).transpose(1, 2))
        if self.row_bias_H is not None:
            # Here the bias goes back into the map: M rows of N are small, and Σ_j V_j is not at hand.
            maps_BHMN = maps_BHMN + self.row_bias_H[:, None, None]
        if self.value_scale != 1.0:
            maps_BHMN = maps_BHMN * self.value_scale
        maps = maps_BHMN.squeeze(2) if M == 1 else maps_BHMN.transpose(1, 2).reshape(-1, M * H, tokens)
        values_HPD = (maps @ x_BND).view(-1, H, x_BND.shape[2]).transpose(0, 1)
        out_PHK = (values_HPD @ self.value.weight.view(H, K, -1).transpose(1, 2)).transpose(0, 1)
        if self.value.bias is not None:
            # Σ_j a_j (W_v x_j + b_v): the bias counts as often as the row sums to, which after a mix is not 1.
            out_PHK = out_PHK + maps.sum(dim=2).view(-1, H, 1) * self.value.bias.view(H, K)
        return out_PHK.reshape(-1, M, H * K)

    def _maps(self, scores_BHMN: Tensor) -> Tensor:
        if self.before is not None:
            scores_BHMN = self.before(scores_BHMN)
        maps_BHMN = scores_BHMN.softmax(dim=-1)
        return maps_BHMN if self.after is None else self.after(maps_BHMN)

    def _scaled(self, query: Tensor) -> Tensor:
        return query if self.scale == 1.0 else query * self.scale

    def _heads(self, x_BNC: Tensor) -> Tensor:
        return x_BNC.view(-1, x_BNC.shape[1], self.num_heads, self.head_dim).transpose(1, 2)

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, head_dim={self.head_dim}, queries={self.queries or 'all'}"


class ExportBlock(nn.Module):
    """`x + ls1(attn(norm1(s·x)))/s`, then `x + ls2(mlp(norm2(s·x)))/s`: (B, N, D) → (B, M, D).

    With FeatScale attention's output y becomes `own_scale_D ⊙ y + mean_scale_D ⊙ m`, m its mean over tokens.
    s is the residual scale, 1 in most networks. M is N, or the number of queries of attention. With `joined` the tokens
    of all images share one axis (B·N, D) inside the block: each Linear is one matrix product with its bias inside.
    """

    own_scale_D: Tensor | None
    mean_scale_D: Tensor | None

    def __init__(self, trained: Any, tokens: int | None = None) -> None:
        super().__init__()
        self.residual_scale = float(getattr(trained, "residual_scale", 1.0))
        self.contrast1, self.norm1 = _contrast_and_norm(trained.norm1)
        self.contrast2, self.norm2 = _contrast_and_norm(trained.norm2)
        self.attn = ExportAttention(trained.attn, tokens)
        # Of l = lamb1 and h = lamb2: y + 2(l⊙m + h⊙(y − m)) = (1 + 2h)⊙y + 2(l − h)⊙m; in CaiT 1 for 2.
        high_D, times = getattr(trained, "lamb2", None), 1 if isinstance(trained, CaitBlock) else 2
        self.register_buffer("own_scale_D", None if high_D is None else 1 + times * high_D.detach())
        self.register_buffer("mean_scale_D", None if high_D is None else times * (trained.lamb1 - high_D).detach())
        self.mlp = trained.mlp
        self.ls1, self.ls2 = _layer_scales(trained)
        self.joined = False

    def forward(self, x_BND: Tensor, attn_mask: FirstValues | None = None, is_causal: bool = False) -> Tensor:
        # timm's forward passes these on to its blocks; image classifiers have no masks.
        assert attn_mask is None or isinstance(attn_mask, FirstValues)
        assert not is_causal
        tokens, s = x_BND.shape[1], self.residual_scale
        x = x_BND.flatten(0, 1) if self.joined else x_BND
        skip = x
        queries = self.attn.queries
        if queries == 1:  # the shortcut of the class token alone
            skip = x_BND[:, 0] if self.joined else x_BND[:, :1]
        elif queries:
            skip = x_BND[:, :queries].flatten(0, 1) if self.joined else x_BND[:, :queries]
        normed = self.norm1(_parted(self.contrast1, x if s == 1.0 else x * s, tokens))
        x = skip + self._branch(self.ls1(self._attended(normed, tokens, attn_mask)))
        x = x + self._branch(self.ls2(self.mlp(self.norm2(_parted(self.contrast2, x if s == 1.0 else x * s, tokens)))))
        return x.view(-1, queries or tokens, x.shape[-1]) if self.joined else x

    def _attended(self, x: Tensor, tokens: int, shared: FirstValues | None) -> Tensor:
        out: Tensor = self.attn(x, tokens, shared)
        if self.own_scale_D is None or self.mean_scale_D is None:
            return out
        out_BND = out.view(-1, tokens, out.shape[-1])
        mean_B1D = out_BND.mean(dim=1, keepdim=True)
        return (self.own_scale_D * out_BND + self.mean_scale_D * mean_B1D).view(out.shape)

    @property
    def reads_all_outputs(self) -> bool:
        """Whether a token of what the block gives depends on attention's output for others: FeatScale, ContraNorm."""
        return self.mean_scale_D is not None or self.contrast2 is not None

    def _branch(self, out: Tensor) -> Tensor:
        return out if self.residual_scale == 1.0 else out / self.residual_scale


def canonical_blocks(root: nn.Module) -> list[ExportBlock]:
    """Replace every supported block under `root` by an `ExportBlock`, in place; return all of them in order.

    Supported are vitx's blocks (AttnScale's where the number of tokens is fixed), timm's plain ones and those of CaiT
    before its class attention: self-attention without gates, masks or normalised queries, an MLP of two linear layers,
    LayerScale or nothing after each branch. Other blocks stay as they are, and so do those of which a part is used
    elsewhere too, has hooks, or is of a subclass, which may compute something else.
    """
    shared, tokens = _shared_parts(root), fixed_tokens(root)
    for name, module in list(root.named_modules()):
        if _is_supported(module, tokens) and not shared.intersection(
            map(id, (*module.modules(), *module.parameters()))
        ):
            parent, _, child = name.rpartition(".")
            setattr(root.get_submodule(parent), child, ExportBlock(module, tokens).train(module.training))
    return [module for module in root.modules() if isinstance(module, ExportBlock)]


def vision_transformer(root: nn.Module) -> TimmVisionTransformer | None:
    """The vision transformer that `root` is, or that it calls as its `model`; None for others.

    Its features, pooling and head are timm's own. Distilled DeiT is one, with two class tokens and two classifiers
    (`class_tokens`, `classifiers`). A subclass with its own forward pass, or a module around it, may use the blocks'
    outputs in other ways than the rewrites assume; layers that are used twice would be changed for both.
    """
    module = root if isinstance(root, TimmVisionTransformer) else getattr(root, "model", None)
    if not isinstance(module, TimmVisionTransformer) or module.attn_pool is not None or _shared_parts(root):
        return None
    kinds = (VisionTransformerDistilled, VisionTransformer, TimmVisionTransformer)
    known = next(kind for kind in kinds if isinstance(module, kind))
    own = ("forward", "forward_features", "pool", "forward_head")
    # Of the object too, where a function was put into it.
    same = all(getattr(getattr(module, name), "__func__", None) is getattr(known, name) for name in own)
    between = (module.blocks, module.norm, module.fc_norm, module.head_drop)  # the last block and the classifier
    return module if same and not any(map(has_hooks, between)) else None


def is_plain(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether it computes what one of these classes does: it is no subclass, and has no hooks."""
    return type(module) in kinds and not has_hooks(module) and "forward" not in vars(module)


def has_hooks(module: nn.Module) -> bool:
    return any((module._forward_hooks, module._forward_pre_hooks))


def _shared_parts(root: nn.Module) -> set[int]:
    """The ids of modules and parameters that lie under `root` in more than one place."""
    parts = (*root.named_modules(remove_duplicate=False), *root.named_parameters(remove_duplicate=False))
    return {part for part, count in Counter(id(part) for _, part in parts).items() if count > 1}


def fixed_tokens(root: nn.Module) -> int | None:
    """The number of tokens of the vision transformer that `root` is; None for others, and where it is not fixed.

    Of CaiT that of its blocks before the class attention, which alone are rewritten.
    """
    cait: Any = root if type(root) is Cait else getattr(root, "model", None)
    if type(cait) is Cait:
        return cait.pos_embed.shape[1]
    model = vision_transformer(root)
    if model is None or model.dynamic_img_size:
        return None
    return int(model.patch_embed.num_patches) + int(model.num_prefix_tokens)


def class_tokens(model: TimmVisionTransformer) -> int:
    """How many first tokens alone the head reads; 0 where it reads others."""
    if isinstance(model, VisionTransformerDistilled):
        return 2
    return 1 if model.global_pool == "token" else 0


def classifiers(model: TimmVisionTransformer) -> list[nn.Module]:
    """The classifiers, each of which reads the output of the last norm."""
    return [model.head, model.head_dist] if isinstance(model, VisionTransformerDistilled) else [model.head]


def _is_supported(module: nn.Module, tokens: int | None = None) -> bool:
    if not is_plain(module, Block, TimmBlock, CaitBlock, FeatScaleBlock) or any(map(has_hooks, module.modules())):
        return False
    block: Any = module
    scales = all(is_plain(scale, LayerScale, nn.Identity) for scale in _layer_scales(block))
    mlp = block.mlp
    linear = is_plain(mlp, Mlp) and all(is_plain(layer, nn.Linear) for layer in (mlp.fc1, mlp.fc2))
    norms = all(is_plain(_contrast_and_norm(norm)[1], *_OF_ONE_TOKEN) for norm in (block.norm1, block.norm2))
    plain = scales and linear and norms and isinstance(mlp.norm, nn.Identity)
    return plain and _is_supported_attention(block.attn, tokens)


def _contrast_and_norm(norm: Any) -> tuple[Contrast | None, Any]:
    """ContraNorm's first step, which mixes the tokens of an image, or None, and the norm of each token."""
    return (norm.contrast, norm.layernorm) if is_plain(norm, ContraNorm) else (None, norm)


def _parted(contrast: Contrast | None, x: Tensor, tokens: int) -> Tensor:
    """(B, N, D) or (B·N, D) → the same shape."""
    return x if contrast is None else contrast(x.view(-1, tokens, x.shape[-1])).view(x.shape)


def _layer_scales(block: Any) -> tuple[nn.Module, nn.Module]:
    """What multiplies the output of attention and of the MLP; CaiT's blocks keep its factors (D,) themselves."""
    if not isinstance(block, CaitBlock):
        return block.ls1, block.ls2
    scales = LayerScale(len(block.gamma_1)), LayerScale(len(block.gamma_2))
    for scale, gamma_D in zip(scales, (block.gamma_1, block.gamma_2), strict=True):
        scale.gamma = gamma_D
    return scales


def _is_supported_attention(attention: Any, tokens: int | None) -> bool:
    of_vitx = (AttnScaleAttention, NeutrenoAttention, PlainAttention, ReAttention, TalkingHeadsAttention)
    if not is_plain(attention, *of_vitx, TimmAttention, CaitAttention, AttnScaleTalkingHeadAttn):
        return False
    mixes = (attention.proj_l, attention.proj_w) if isinstance(attention, CaitAttention) else ()
    if not all(is_plain(linear, nn.Linear) for linear in (attention.qkv, attention.proj, *mixes)):
        return False
    if isinstance(attention, AttnScaleTalkingHeadAttn):
        return tokens is not None
    if isinstance(attention, AttnScaleAttention):
        return tokens is not None and bool(((1 + attention.lamb).abs() > SMALLEST_FACTOR).all())
    if type(attention) is not TimmAttention:
        return True
    if getattr(attention, "gate", None) is not None:
        return False
    norms = (attention.q_norm, attention.k_norm, getattr(attention, "norm", nn.Identity()))
    return all(isinstance(norm, nn.Identity) for norm in norms)


def _split(linear: nn.Linear, parts: int) -> list[nn.Linear]:
    """Split the outputs into `parts` equal slices: a Linear for each, of weights (out / parts, in)."""
    biases = [None] * parts if linear.bias is None else linear.bias.detach().chunk(parts)
    return [
        linear_of(weight.clone(), None if bias is None else bias.clone())
        for weight, bias in zip(linear.weight.detach().chunk(parts), biases, strict=True)
    ]


def linear_of(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A Linear with these parameters: weight (out, in), bias (out,) or none."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight)
    if bias is not None:
        linear.bias = nn.Parameter(bias)
    return linear


def set_bias(linear: nn.Linear, bias: Tensor) -> None:
    linear.bias = nn.Parameter(bias.to(linear.weight))


def scale_outputs(linear: nn.Linear, factor: float | Tensor) -> None:
    """Multiply the outputs by a number, or each output by its own: (out,)."""
    linear.weight = nn.Parameter(linear.weight * (factor[:, None] if isinstance(factor, Tensor) else factor))
    if linear.bias is not None:
        linear.bias = nn.Parameter(linear.bias * factor)
