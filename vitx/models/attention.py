"""Attention with a mix over heads: Re-Attention (DeepViT), talking heads, and plain attention, which mixes nothing.

Shape letters: B batch, N tokens (class token included), D width, H heads, K head width.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vitx.core.errors import InputError
from vitx.models.flash.reattention import (
    INTERPRETED,
    Mixes,
    against_flash,
    flash_reattention,
    notice_plain,
    padded_width,
)
from vitx.models.head_mix import mix_heads

HeadNorm = Literal["batch", "layer", "none"]
MixInit = Literal["random", "identity"]
T = TypeVar("T")


class FlashWeights(NamedTuple):
    """What the kernels' path multiplies with: mixes with `value_scale` in them, float32; the projections' weights."""

    mixes: Mixes
    qkv: Tensor
    qkv_bias: Tensor | None
    proj: Tensor


class HeadMixAttention(nn.Module):
    """Self-attention whose maps a subclass may mix over heads, which no fused kernel offers.

    `attn_drop` sees the softmax maps (B, H, N, N), so a hook on it reads them, with `fused_attn = False` wherever the
    network runs. `value_scale` multiplies V, which is cheaper than multiplying the maps by it.
    """

    value_scale = 1.0
    fused_attn = True

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        if dim % num_heads:
            raise InputError(f"dim {dim} is not divisible by num_heads {num_heads}: change embed_dim or num_heads")
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.scale = self.head_dim**-0.5
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias, device=device, dtype=dtype)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim, device=device, dtype=dtype)
        self.proj_drop = nn.Dropout(proj_drop)
        # What was derived of the weights, by name, with the versions of the weights.
        self._derived: dict[str, tuple[Any, Any]] = {}

    def before_softmax(self, scores_BHNN: Tensor) -> Tensor:
        """What is done to the scores; nothing unless a subclass mixes them."""
        return scores_BHNN

    def after_softmax(self, maps_BHNN: Tensor) -> Tensor:
        """What is done to the maps between dropout and the product with V; nothing unless a subclass mixes them."""
        return maps_BHNN

    def mixes_linearly(self) -> bool:
        """Whether a forward pass as it would be now has mixes, all of them linear."""
        return False

    def linear_mixes(self) -> Mixes | None:
        """The mixes of a forward pass as it would be now, `value_scale` left out; None if one is not linear."""
        return None

    def softmax_maps(self, q_BHNK: Tensor, k_BHNK: Tensor) -> Tensor:
        """The attention maps (B, H, N, N) before dropout and before they are mixed."""
        return self.before_softmax((q_BHNK * self.scale) @ k_BHNK.transpose(-2, -1)).softmax(dim=-1)

    def split_heads(self, qkv_BN3D: Tensor) -> Tensor:
        """The output of `qkv` as queries, keys and values: (3, B, H, N, K)."""
        B, N, _ = qkv_BN3D.shape
        return qkv_BN3D.view(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)

    def forward(self, x_BND: Tensor) -> Tensor:
        B, N, D = x_BND.shape
        if self._takes_kernels(x_BND):
            return self._flash_forward(x_BND)
        q_BHNK, k_BHNK, v_BHNK = self.split_heads(self.qkv(x_BND))
        if self.value_scale != 1.0:
            v_BHNK = v_BHNK * self.value_scale
        maps_BHNN = self.attn_drop(self.softmax_maps(q_BHNK, k_BHNK))
        out_BHNK = self.after_softmax(maps_BHNN) @ v_BHNK
        out: Tensor = self.proj_drop(self.proj(out_BHNK.transpose(1, 2).reshape(B, N, D)))
        return out

    def _flash_forward(self, x_BND: Tensor) -> Tensor:
        """`forward` by the kernels that write no maps: they and the two projections are all that runs."""
        B, N, _ = x_BND.shape
        weights = self.derived("flash", self._flash_weights)
        qkv_BNE = F.linear(x_BND, weights.qkv, weights.qkv_bias)
        q_BHNK, k_BHNK, v_BHNK = qkv_BNE.view(B, N, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        out_BHNK = flash_reattention(q_BHNK, k_BHNK, v_BHNK, weights.mixes, self.scale)
        out: Tensor = F.linear(out_BHNK.transpose(1, 2).reshape(B, N, -1), weights.proj, self.proj.bias)
        dropped: Tensor = self.proj_drop(out)
        return dropped

    def _flash_weights(self) -> FlashWeights:
        """Widths of 33 and 35 get columns of zeros, so that a head begins where 16 bytes can be read.

        Rewrite 8 of docs/maths.md §4.
        """
        mixes = self.linear_mixes()
        assert mixes is not None
        scaled = [None if part is None else self.value_scale * part.float() for part in mixes[:2]]
        rest = [None if part is None else part.float() for part in mixes[2:]]
        floats: list[Any] = [None if part is None else part.contiguous() for part in (*scaled, *rest)]
        H, K, D = self.num_heads, self.head_dim, self.proj.in_features
        extra = padded_width(K) - K
        qkv: Tensor = self.qkv.weight
        bias: Tensor | None = self.qkv.bias
        proj: Tensor = self.proj.weight
        if extra:
            qkv = F.pad(qkv.view(3, H, K, D), (0, 0, 0, extra)).flatten(0, 2)
            bias = None if bias is None else F.pad(bias.view(3, H, K), (0, extra)).flatten()
            proj = F.pad(proj.view(D, H, K), (0, extra)).flatten(1)
        return FlashWeights(Mixes(*floats), qkv, bias, proj)

    def derived(self, name: str, make: Callable[[], T]) -> T:
        """`make()`, kept while no weight changes. Made anew where gradients flow through it, and in a traced graph."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return make()
        weights = (*self.parameters(), *self.buffers())
        if any(weight.is_inference() for weight in weights):  # which have no version
            return make()
        versions = [(id(weight), weight.data_ptr(), weight._version) for weight in weights]
        if name not in self._derived or self._derived[name][0] != versions:
            self._derived[name] = versions, make()
        kept: T = self._derived[name][1]
        return kept

    def _takes_kernels(self, x_BND: Tensor) -> bool:
        """Whether the kernels that write no maps run; on a GPU the reason why not is said once."""
        device, dropped = x_BND.device.type, self.training and self.attn_drop.p > 0
        # Elsewhere there are none; the meta device, on which FLOPs are counted, does not even know of autocast.
        somewhere = device == "cuda" or (device == "cpu" and INTERPRETED)
        if not somewhere or not self.fused_attn or dropped or not self.mixes_linearly():
            return False
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_BND.dtype
        against = against_flash(device, dtype, self.num_heads, x_BND.shape[1], self.head_dim)
        if against is not None:
            notice_plain(device, against)
        return against is None


class ReAttention(HeadMixAttention):
    """Re-Attention, `Norm(Θᵀ softmax(QKᵀ/√d)) V` (Zhou et al., DeepViT, arXiv 2103.11886, eq. 3).

    As the authors train it: softmax → dropout → 1×1 convolution over heads with bias → BatchNorm over heads →
    × `reatten_scale` → V. `norm="layer"` is a LayerNorm over heads, `"none"` leaves it out. `init="identity"` starts
    from plain attention (up to the norm).
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        qkv_bias: bool = True,
        norm: HeadNorm = "batch",
        init: MixInit = "random",
        reatten_scale: float = 1.0,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            dim, num_heads, qkv_bias=qkv_bias, attn_drop=attn_drop, proj_drop=proj_drop, device=device, dtype=dtype
        )
        if norm not in ("batch", "layer", "none"):
            raise InputError(f"norm '{norm}' of Re-Attention: expected batch, layer or none")
        self.norm = norm
        self.init: MixInit = init
        self.reatten_scale = self.value_scale = reatten_scale
        self.reatten_matrix = nn.Conv2d(num_heads, num_heads, 1, device=device, dtype=dtype)
        self.var_norm: nn.Module = nn.Identity()
        if norm == "batch":
            self.var_norm = nn.BatchNorm2d(num_heads, device=device, dtype=dtype)
        elif norm == "layer":
            self.var_norm = nn.LayerNorm(num_heads, device=device, dtype=dtype)
        self.init_weights()

    def init_weights(self) -> None:
        """Apply `init`; "random" keeps the convolution's own initialisation."""
        assert self.reatten_matrix.bias is not None
        if self.init == "identity":
            nn.init.dirac_(self.reatten_matrix.weight)
            nn.init.zeros_(self.reatten_matrix.bias)

    def after_softmax(self, maps_BHNN: Tensor) -> Tensor:
        if not self.var_norm.training and not isinstance(self.var_norm, nn.LayerNorm):
            return mix_heads(maps_BHNN, *self.derived("mix", self.head_mix))
        mixed_BHNN = mix_heads(maps_BHNN, self.reatten_matrix.weight.flatten(1), self.reatten_matrix.bias)
        over_heads = isinstance(self.var_norm, nn.LayerNorm)
        normed: Tensor = self.var_norm(mixed_BHNN.movedim(1, -1) if over_heads else mixed_BHNN)
        return normed.movedim(-1, 1) if over_heads else normed

    def mixes_linearly(self) -> bool:
        linear = not self.var_norm.training or isinstance(self.var_norm, nn.Identity)
        return linear and not isinstance(self.var_norm, nn.LayerNorm)

    def linear_mixes(self) -> Mixes | None:
        return Mixes(*self.head_mix()) if self.mixes_linearly() else None

    def head_mix(self) -> tuple[Tensor, Tensor]:
        """The mix in evaluation mode, BatchNorm folded in, without `reatten_scale`: weight (H, H), bias (H,)."""
        assert self.reatten_matrix.bias is not None
        weight_HH, bias_H = self.reatten_matrix.weight.flatten(1), self.reatten_matrix.bias
        norm = self.var_norm
        if isinstance(norm, _BatchNorm):
            assert norm.running_mean is not None
            assert norm.running_var is not None
            scale_H = norm.weight / torch.sqrt(norm.running_var + norm.eps)
            weight_HH, bias_H = scale_H[:, None] * weight_HH, scale_H * (bias_H - norm.running_mean) + norm.bias
        elif not isinstance(norm, nn.Identity):
            raise InputError("a LayerNorm over heads cannot be folded into the head mix: it is not linear in the maps")
        return weight_HH, bias_H

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, norm={self.norm!r}, reatten_scale={self.reatten_scale}"


class TalkingHeadsAttention(HeadMixAttention):
    """Talking heads, `post(softmax(pre(QKᵀ/√d))) V` (Shazeer et al., arXiv 2003.02436).

    `mix_bias=False` with `init="random"` (normal, .02, truncated) is the form of Gong et al.; CaiT's has the bias.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        qkv_bias: bool = True,
        mix_bias: bool = False,
        init: MixInit = "random",
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            dim, num_heads, qkv_bias=qkv_bias, attn_drop=attn_drop, proj_drop=proj_drop, device=device, dtype=dtype
        )
        self.init: MixInit = init
        self.proj_pre = nn.Linear(num_heads, num_heads, bias=mix_bias, device=device, dtype=dtype)
        self.proj_post = nn.Linear(num_heads, num_heads, bias=mix_bias, device=device, dtype=dtype)
        self.init_weights()

    def init_weights(self) -> None:
        """Apply `init` to both mixes; biases start at zero."""
        for mix in (self.proj_pre, self.proj_post):
            if self.init == "identity":
                nn.init.eye_(mix.weight)
            else:
                nn.init.trunc_normal_(mix.weight, std=0.02)
            if mix.bias is not None:
                nn.init.zeros_(mix.bias)

    def mixes_linearly(self) -> bool:
        return True

    def linear_mixes(self) -> Mixes | None:
        return Mixes(self.proj_post.weight, self.proj_post.bias, self.proj_pre.weight, self.proj_pre.bias)

    def before_softmax(self, scores_BHNN: Tensor) -> Tensor:
        return mix_heads(scores_BHNN, self.proj_pre.weight, self.proj_pre.bias)

    def after_softmax(self, maps_BHNN: Tensor) -> Tensor:
        return mix_heads(maps_BHNN, self.proj_post.weight, self.proj_post.bias)


class PlainAttention(HeadMixAttention):
    """Multi-head self-attention through PyTorch's fused kernel; `fused_attn = False` makes the maps observable."""

    def __init__(self, dim: int, num_heads: int, **kwargs: Any) -> None:
        super().__init__(dim, num_heads, **kwargs)
        self.fused_attn = True

    def forward(self, x_BND: Tensor) -> Tensor:
        if not self.fused_attn:
            return super().forward(x_BND)
        B, N, D = x_BND.shape
        q_BHNK, k_BHNK, v_BHNK = self.split_heads(self.qkv(x_BND))
        dropout = self.attn_drop.p if self.training else 0.0
        out_BHNK = F.scaled_dot_product_attention(q_BHNK, k_BHNK, v_BHNK, dropout_p=dropout)
        out: Tensor = self.proj_drop(self.proj(out_BHNK.transpose(1, 2).reshape(B, N, D)))
        return out


def reattention_impl(model: nn.Module) -> str | None:
    """How the mixes over heads of `model` run where it is now: "flash", or "plain" and why; None if it has none."""
    for layer in model.modules():
        if isinstance(layer, ReAttention | TalkingHeadsAttention):
            like = layer.qkv.weight
            if not layer.mixes_linearly():
                return "plain: BatchNorm in training, or a LayerNorm over heads"
            tokens = int(getattr(model, "num_tokens", 1))
            against = against_flash(like.device.type, like.dtype, layer.num_heads, tokens, layer.head_dim)
            return "flash" if against is None else f"plain: {against}"
    return None


def fold_head_mix(re_attention: ReAttention) -> tuple[Tensor, Tensor]:
    """Fold the BatchNorm and `reatten_scale` of a Re-Attention into its head mix (docs/maths.md §4, rewrite 1).

    Returns weight (H, H) and bias (H,) so that the evaluation-mode map is `weight · maps + bias`. With
    s = γ/√(σ²+eps): weight = r·s⊙W, bias = r·(s⊙(b−μ)+β). Raises InputError for a LayerNorm over heads, which is not
    linear in the maps.
    """
    weight_HH, bias_H = re_attention.head_mix()
    return re_attention.reatten_scale * weight_HH.detach(), re_attention.reatten_scale * bias_H.detach()
