"""Attention whose maps are changed: Re-Attention (DeepViT), talking heads, AttnScale; plain attention and NeuTRENO.

All but the last are `proj(A V)` with maps `A = after(softmax(before(Q Kᵀ/√K)))` (docs/maths.md §3.1, §3.2, §3.6):

| | before softmax | after softmax |
|---|---|---|
| PlainAttention | – | – |
| AttnScaleAttention | – | a factor of each head, and a constant |
| TalkingHeadsAttention | H×H matrix | H×H matrix |
| ReAttention | – | H×H matrix, then a norm over heads |

Shape letters: B batch, N tokens (class token included), D width, H heads, K = D/H head width, E = 3·H·K' the width of
queries, keys and values together, K' the head width the flash kernels read (`padded_width`).
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
    flash_reattention,
    padded_width,
    warn_plain,
    why_not_flash,
)
from vitx.models.head_mix import mix_heads

HeadNorm = Literal["batch", "layer", "none"]
MixInit = Literal["random", "identity"]
T = TypeVar("T")


class FlashWeights(NamedTuple):
    """The weights of a layer as the flash kernels' path multiplies with them (`HeadMixAttention._flash_weights`).

    mixes: float32, `value_scale` folded in. qkv (E, D), qkv_bias (E,) and proj (D, H·K'): heads padded with zeros.
    """

    mixes: Mixes
    qkv: Tensor
    qkv_bias: Tensor | None
    proj: Tensor


class HeadMixAttention(nn.Module):
    """Self-attention (B, N, D) → (B, N, D) whose maps a subclass may mix over heads.

    No fused kernel of PyTorch has such a mix, so `forward` either writes the maps or runs the kernels of flash/.
    A hook on `attn_drop` sees the softmax maps (B, H, N, N); set `fused_attn = False` for it, or the flash kernels may
    run and there are no maps. `value_scale` is a factor of the mixed maps, applied to V, which is N/K times smaller.
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
        # Name → (versions of the weights, what `cached` computed from them).
        self._cache: dict[str, tuple[Any, Any]] = {}

    def before_softmax(self, scores_BHNN: Tensor) -> Tensor:
        """Mix the scores over heads, in subclasses that do; (B, H, N, N) → (B, H, N, N)."""
        return scores_BHNN

    def after_softmax(self, maps_BHNN: Tensor) -> Tensor:
        """Mix the maps over heads, after dropout and before the product with V, in subclasses that do."""
        return maps_BHNN

    def over_tokens(self, maps: Tensor) -> Tensor:
        """The maps that this layer computes, before or after the mix, with a column for each token: (B, H, N, N)."""
        return maps

    def mixes_linearly(self) -> bool:
        """Whether this layer, in its present mode, mixes heads by fixed matrices alone: what the kernels can do."""
        return False

    def linear_mixes(self) -> Mixes | None:
        """Those matrices, `value_scale` left out; None unless `mixes_linearly`."""
        return None

    def softmax_maps(self, q_BHNK: Tensor, k_BHNK: Tensor) -> Tensor:
        """The softmax maps (B, H, N, N), before dropout and before the mix of the maps."""
        # Q is scaled, not the scores: N·K multiplications instead of N².
        return self.before_softmax((q_BHNK * self.scale) @ k_BHNK.transpose(-2, -1)).softmax(dim=-1)

    def split_heads(self, qkv_BN3D: Tensor) -> Tensor:
        """Split the output of `qkv`, (B, N, 3·D), into queries, keys and values: (3, B, H, N, K)."""
        B, N, _ = qkv_BN3D.shape
        # (B, N, 3, H, K): columns of qkv are ordered as (query/key/value, head, channel), as in timm.
        return qkv_BN3D.view(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)

    def forward(self, x_BND: Tensor) -> Tensor:
        if self._uses_flash(x_BND):
            return self._flash_forward(x_BND)
        out: Tensor = self.proj_drop(self.proj(self.attended(self.qkv(x_BND))))
        return out

    def attended(self, qkv_BN3D: Tensor) -> Tensor:
        """What meets `proj`, (B, N, D), of the output of `qkv`, (B, N, 3·D)."""
        out_BHNK = self.product(*self.split_heads(qkv_BN3D))
        # Heads of a token side by side: (B, H, N, K) → (B, N, H, K) → (B, N, D).
        return out_BHNK.transpose(1, 2).flatten(2)

    def product(self, q_BHNK: Tensor, k_BHNK: Tensor, v_BHNK: Tensor) -> Tensor:
        """The maps' product with V, (B, H, N, K), by way of the maps."""
        if self.value_scale != 1.0:
            v_BHNK = v_BHNK * self.value_scale
        maps_BHNN = self.attn_drop(self.softmax_maps(q_BHNK, k_BHNK))
        return self.after_softmax(maps_BHNN) @ v_BHNK

    def _flash_forward(self, x_BND: Tensor) -> Tensor:
        """`forward` by the kernels that write no maps: two projections and the kernels are all that runs."""
        B, N, _ = x_BND.shape
        weights = self.cached("flash", self._flash_weights)
        qkv_BNE = F.linear(x_BND, weights.qkv, weights.qkv_bias)
        q_BHNK, k_BHNK, v_BHNK = qkv_BNE.view(B, N, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        out_BHNK = flash_reattention(q_BHNK, k_BHNK, v_BHNK, weights.mixes, self.scale)
        out: Tensor = F.linear(out_BHNK.transpose(1, 2).reshape(B, N, -1), weights.proj, self.proj.bias)
        dropped: Tensor = self.proj_drop(out)
        return dropped

    def _flash_weights(self) -> FlashWeights:
        """Fold `value_scale` into the mix, and pad heads to a multiple of 8 columns (docs/maths.md §4, rewrite 8).

        Heads of width 33 and 35 (DeepViT-S and -L) get columns of zeros, so that every head begins at a multiple of 16
        bytes, which a kernel reads at once. Zeros change no product: those of q and k add nothing to a score, those of
        v meet zero columns of `proj`.
        """
        mixes = self.linear_mixes()
        assert mixes is not None
        # The factor belongs to the mixed maps: to weight and bias after softmax, not to those before it.
        parts = zip(mixes, (self.value_scale, self.value_scale, 1.0, 1.0), strict=True)
        floats: list[Any] = [None if part is None else (scale * part.float()).contiguous() for part, scale in parts]
        H, K, D = self.num_heads, self.head_dim, self.proj.in_features
        extra = padded_width(K) - K
        qkv: Tensor = self.qkv.weight
        bias: Tensor | None = self.qkv.bias
        proj: Tensor = self.proj.weight
        if extra:  # F.pad counts dimensions from the last: (columns left, right, K before, K after)
            qkv = F.pad(qkv.view(3, H, K, D), (0, 0, 0, extra)).flatten(0, 2)
            bias = None if bias is None else F.pad(bias.view(3, H, K), (0, extra)).flatten()
            proj = F.pad(proj.view(D, H, K), (0, extra)).flatten(1)
        return FlashWeights(Mixes(*floats), qkv, bias, proj)

    def cached(self, name: str, compute: Callable[[], T]) -> T:
        """`compute()`, computed again only when a weight has changed; for values that depend on nothing but weights.

        Never cached where gradients must flow through the value, nor in a traced graph.
        """
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return compute()
        weights = (*self.parameters(), *self.buffers())
        if any(weight.is_inference() for weight in weights):  # tensors of inference mode count no versions
            return compute()
        # torch raises `_version` at every change in place; another tensor in its stead has another id or address.
        versions = [(id(weight), weight.data_ptr(), weight._version) for weight in weights]
        if name not in self._cache or self._cache[name][0] != versions:
            self._cache[name] = versions, compute()
        value: T = self._cache[name][1]
        return value

    def _uses_flash(self, x_BND: Tensor) -> bool:
        """Whether the kernels that write no maps run; on a GPU a reason against them becomes one warning."""
        device, drops = x_BND.device.type, self.training and self.attn_drop.p > 0
        # Ask for the device first: on the meta device, where FLOPs are counted, asking for autocast is an error.
        has_kernels = device == "cuda" or (device == "cpu" and INTERPRETED)
        if not has_kernels or not self.fused_attn or drops or not self.mixes_linearly():
            return False
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_BND.dtype
        reason = why_not_flash(device, dtype, self.num_heads, x_BND.shape[1], self.head_dim)
        if reason is not None:
            warn_plain(device, dtype, reason)
        return reason is None


class ReAttention(HeadMixAttention):
    """Re-Attention, `Norm(Θᵀ softmax(QKᵀ/√d)) V` (Zhou et al., DeepViT, arXiv 2103.11886, eq. 3).

    As the authors train it: softmax → dropout → 1×1 convolution over heads with bias (`reatten_matrix`, weight Θᵀ) →
    BatchNorm over heads (`var_norm`) → × `reatten_scale` → product with V. `norm="layer"` is a LayerNorm over heads, as
    in vit-pytorch, `"none"` leaves the norm out. `init="identity"` starts from plain attention (up to the norm).
    In evaluation BatchNorm is linear and is folded into the mix (`head_mix`).
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        norm: HeadNorm = "batch",
        init: MixInit = "random",
        reatten_scale: float = 1.0,
        device: Any = None,
        dtype: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, device=device, dtype=dtype, **kwargs)
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
        """Mix and norm, in float32 also inside autocast; the product with V, which follows, is autocast's again.

        The bias is some hundred times the deviation of a fresh network's maps from 1/N: half precision rounds their sum
        to it, and BatchNorm amplifies what is left (docs/maths.md §3.1).
        """
        device = maps_BHNN.device.type
        if device == "meta" or not torch.is_autocast_enabled(device):
            return self._mixed(maps_BHNN)
        with torch.autocast(device, enabled=False):
            return self._mixed(maps_BHNN.to(self.reatten_matrix.weight.dtype))

    def _mixed(self, maps_BHNN: Tensor) -> Tensor:
        if not self.var_norm.training and not isinstance(self.var_norm, nn.LayerNorm):
            return mix_heads(maps_BHNN, *self.cached("mix", self.head_mix))
        # In training: the statistics of BatchNorm are those of the mixed maps, over batch, queries and keys.
        mixed_BHNN = mix_heads(maps_BHNN, self.reatten_matrix.weight.flatten(1), self.reatten_matrix.bias)
        over_heads = isinstance(self.var_norm, nn.LayerNorm)  # which normalises the last axis: heads go there and back
        normed: Tensor = self.var_norm(mixed_BHNN.movedim(1, -1) if over_heads else mixed_BHNN)
        return normed.movedim(-1, 1) if over_heads else normed

    def mixes_linearly(self) -> bool:
        linear = not self.var_norm.training or isinstance(self.var_norm, nn.Identity)
        return linear and not isinstance(self.var_norm, nn.LayerNorm)

    def linear_mixes(self) -> Mixes | None:
        return Mixes(*self.head_mix()) if self.mixes_linearly() else None

    def head_mix(self) -> tuple[Tensor, Tensor]:
        """The mix of evaluation mode, without `reatten_scale`: weight (H, H) and bias (H,).

        BatchNorm is `s⊙(W A + b − μ) + β` with s = γ/√(σ² + eps), so the weight is s⊙W and the bias s⊙(b − μ) + β.
        Raises InputError for a LayerNorm over heads.
        """
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
    """Talking heads, `W_post softmax(W_pre QKᵀ/√d) V` (Shazeer et al., arXiv 2003.02436, §3).

    `proj_pre` and `proj_post` are W_pre and W_post, [out, in] over heads. `mix_bias=False` with `init="random"`
    (normal, .02, truncated) is the form of Gong et al. (arXiv 2104.12753); CaiT's (arXiv 2103.17239) has the bias.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        mix_bias: bool = False,
        init: MixInit = "random",
        device: Any = None,
        dtype: Any = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(dim, num_heads, device=device, dtype=dtype, **kwargs)
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

    def product(self, q_BHNK: Tensor, k_BHNK: Tensor, v_BHNK: Tensor) -> Tensor:
        written_or_fused = self.fused_product if self.fused_attn else super().product
        return written_or_fused(q_BHNK, k_BHNK, v_BHNK)

    def fused_product(self, q_BHNK: Tensor, k_BHNK: Tensor, v_BHNK: Tensor) -> Tensor:
        """The maps' product with V, (B, H, N, K), without the maps."""
        dropout = self.attn_drop.p if self.training else 0.0
        return F.scaled_dot_product_attention(q_BHNK, k_BHNK, v_BHNK, dropout_p=dropout)


class AttnScaleAttention(PlainAttention):
    """AttnScale, `1/N + (1 + ω)(A − 1/N)` of a softmax map A over N tokens (Wang et al., arXiv 2203.05962).

    `lamb` is ω, one a head and zero at first, by the authors' name. The scaled maps are written only where they are
    asked for: their product with V is `(1 + ω)·A V − ω·mean_j V_j`, behind PyTorch's fused kernel. `attn_drop` drops
    entries of A; the authors', who train without, of the scaled map.
    """

    def __init__(self, dim: int, num_heads: int, *, device: Any = None, dtype: Any = None, **kwargs: Any) -> None:
        super().__init__(dim, num_heads, device=device, dtype=dtype, **kwargs)
        self.lamb = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype))
        self.init_weights()

    def init_weights(self) -> None:
        """Start as plain attention."""
        nn.init.zeros_(self.lamb)

    def after_softmax(self, maps_BHNN: Tensor) -> Tensor:
        return scale_maps(maps_BHNN, self.lamb)

    def fused_product(self, q_BHNK: Tensor, k_BHNK: Tensor, v_BHNK: Tensor) -> Tensor:
        scale_H11 = self.lamb.view(-1, 1, 1)
        out_BHNK = super().fused_product(q_BHNK, k_BHNK, v_BHNK)
        return (1 + scale_H11) * out_BHNK - scale_H11 * v_BHNK.mean(dim=2, keepdim=True)


def scale_maps(maps_BHNN: Tensor, omega_H: Tensor) -> Tensor:
    """AttnScale of maps over N keys, `1/N + (1 + ω)(A − 1/N)`, with ω (H,)."""
    omega_H11 = omega_H.view(-1, 1, 1)
    return (1 + omega_H11) * maps_BHNN - omega_H11 / maps_BHNN.shape[-1]


class FirstValues:
    """V⁰ (B, N, D) of one forward pass: NeuTRENO's first layer writes it, the others read it.

    Blocks are handed it beside their tokens, so that passes at the same time, and blocks that gradient checkpointing
    runs again, have their own.
    """

    values_BND: Tensor | None = None


class NeutrenoAttention(PlainAttention):
    """NeuTRENO, `A V + α(V⁰ − V)` with V⁰ of the network's first such layer (Nguyen et al., arXiv 2312.00751).

    That layer (`first=True`) computes plain attention. The difference is of (B, N, D), behind PyTorch's fused kernel.
    """

    def __init__(self, dim: int, num_heads: int, *, alpha: float = 0.6, first: bool = False, **kwargs: Any) -> None:
        super().__init__(dim, num_heads, **kwargs)
        self.alpha, self.first = alpha, first

    def forward(self, x_BND: Tensor, shared: FirstValues | None = None) -> Tensor:
        qkv_BN3D = self.qkv(x_BND)
        out_BND, v_BND = self.attended(qkv_BN3D), qkv_BN3D.chunk(3, dim=-1)[2]
        if self.first:
            if shared is not None:
                shared.values_BND = v_BND
        elif shared is None or shared.values_BND is None:
            raise InputError("NeuTRENO's layers read the values of the first: call the network, not one of its blocks")
        else:
            # While a network is rewritten for export, blocks that are may have the tokens of all images in one axis.
            out_BND = out_BND + self.alpha * (shared.values_BND.view(v_BND.shape) - v_BND)
        out: Tensor = self.proj_drop(self.proj(out_BND))
        return out


def reattention_impl(model: nn.Module) -> str | None:
    """How the mixes over heads of `model` run where it is now: "flash", or "plain: " and why; None if it has none."""
    for layer in model.modules():
        if isinstance(layer, ReAttention | TalkingHeadsAttention):
            like = layer.qkv.weight  # outside autocast, tokens are of its device and dtype
            if not layer.mixes_linearly():
                return "plain: BatchNorm in training, or a LayerNorm over heads"
            tokens = int(getattr(model, "num_tokens", 1))
            reason = why_not_flash(like.device.type, like.dtype, layer.num_heads, tokens, layer.head_dim)
            return "flash" if reason is None else f"plain: {reason}"
    return None


def fold_head_mix(re_attention: ReAttention) -> tuple[Tensor, Tensor]:
    """Fold the BatchNorm and `reatten_scale` of a Re-Attention into its head mix (docs/maths.md §4, rewrite 1).

    Returns weight (H, H) and bias (H,) so that the evaluation-mode map is `weight · maps + bias`. With
    s = γ/√(σ²+eps): weight = r·s⊙W, bias = r·(s⊙(b−μ)+β). Raises InputError for a LayerNorm over heads, which is not
    linear in the maps.
    """
    weight_HH, bias_H = re_attention.head_mix()
    return re_attention.reatten_scale * weight_HH.detach(), re_attention.reatten_scale * bias_H.detach()
