"""Exact rewrites of transformer blocks (docs/maths.md §4, whose numbers they carry), in place.

Each brings the blocks under a module to their canonical form first and returns the number of places it changed. All are
identities in exact arithmetic, for any parameters and statistics, in any order. The first line of a docstring is what
`vitx export --explain` prints.

Shape letters: H heads, K head width, C = H·K, D width, N tokens.
"""

import math
from typing import Any

import torch
from timm.layers import LayerScale
from torch import Tensor, nn

from vitx.export.rewrite.canonical import (
    NORMS,
    ExportAttention,
    HeadMix,
    canonical_blocks,
    class_tokens,
    classifiers,
    fixed_tokens,
    is_plain,
    scale_outputs,
    set_bias,
    vision_transformer,
)

# Matrix engines and vector registers take multiples of eight.
HEAD_DIM_MULTIPLE = 8


def fold_head_norm(root: nn.Module) -> int:
    """1. BatchNorm over heads and `reatten_scale` into the head mix; return how many.

    In evaluation BatchNorm is the affine map `s⊙(y − μ) + β`, s = γ/√(σ²+eps) (H,), and the values are scaled by r:
    `r·(s⊙(W P + b − μ) + β) = W'P + b'` with `W' = r·s⊙W` (H, H), row h scaled by s_h, and `b' = r·(s⊙(b − μ) + β)`
    (H,). A LayerNorm over heads is not linear in the maps P (H, N, N) and stays.
    """
    changed = 0
    for attention in _attentions(root):
        mix, norm = _mix_and_norm(attention)
        if mix is None or not (norm is None or isinstance(norm, nn.BatchNorm2d)):
            continue
        if norm is None and attention.value_scale == 1.0:
            continue  # nothing to fold
        scale_H, shift_H = _affine_of(norm, mix.weight_HH)
        bias_H = torch.zeros_like(shift_H) if mix.bias_H is None else mix.bias_H
        r = attention.value_scale
        attention.after = HeadMix(r * scale_H[:, None] * mix.weight_HH, r * (scale_H * bias_H + shift_H))
        attention.value_scale = 1.0
        changed += 1
    return changed


def split_rank_one_bias(root: nn.Module) -> int:
    """2. The bias of the last mix leaves the maps: `(W'P + b')V = (W'P)V + b'_h · 1·(Σ_j V_j)`; return how many.

    A constant added to a whole map (N, N) of head h is the rank-one matrix b'_h·1·1ᵀ; times V (N, K) it is the same row
    (K,) for every query, so no map is read and written again for it. `ExportAttention` computes the right-hand side.
    """
    changed = 0
    for attention in _attentions(root):
        mix = attention.after
        if isinstance(mix, HeadMix) and mix.bias_H is not None:
            attention.row_bias_H, mix.bias_H = mix.bias_H, None
            changed += 1
    return changed


def drop_row_constants(root: nn.Module) -> int:
    """10. Constants along a softmax row dropped: the bias of the mix before it and the keys' bias; return how many.

    `softmax(s + c·1) = softmax(s)` for a row s (N,). The bias of a mix adds b_h to the row. The key bias adds `q_i·b_k`
    to row i; a mix over heads adds such constants up to another one.
    """
    changed = 0
    for attention in _attentions(root):
        for module, name in ((attention.before, "bias_H"), (attention.key, "bias")):
            if module is not None and getattr(module, name) is not None:
                setattr(module, name, None)
                changed += 1
    return changed


def fold_attention_scale(root: nn.Module) -> int:
    """3. `1/√d` into W_q and b_q, a factor of the maps into W_v and b_v; return how many.

    `(c·q)kᵀ = c·(q kᵀ)` and `(c·A)V = A(c·V)`; W_q and W_v are (C, D), so the factor is multiplied in once, at export.
    """
    changed = 0
    for attention in _attentions(root):
        for linear, name in ((attention.query, "scale"), (attention.value, "value_scale")):
            factor = getattr(attention, name)
            if factor != 1.0:
                scale_outputs(linear, factor)
                setattr(attention, name, 1.0)
                changed += 1
    return changed


def fold_residual_scale(root: nn.Module) -> int:
    """4. `1/s` and LayerScale's γ into proj and fc2, and `LN(s·x; eps) = LN(x; eps/s²)`; return how many.

    `(s·x − s·μ)/√(s²σ² + eps) = (x − μ)/√(σ² + eps/s²)` for s > 0. `γ⊙(Wx + b) = (γ⊙W)x + γ⊙b`, γ (D,), W (D, in).
    """
    changed = 0
    for block in canonical_blocks(root):
        norms = (block.norm1, block.norm2)
        s = block.residual_scale
        if s != 1.0 and s > 0 and all(isinstance(norm, nn.LayerNorm) for norm in norms):
            for norm in norms:
                norm.eps /= s * s
            for last in (block.attn.proj, block.mlp.fc2):
                scale_outputs(last, 1 / s)
            block.residual_scale = 1.0
            changed += 1
        for name, last in (("ls1", block.attn.proj), ("ls2", block.mlp.fc2)):
            layer_scale = getattr(block, name)
            if isinstance(layer_scale, LayerScale):
                scale_outputs(last, layer_scale.gamma)
                setattr(block, name, nn.Identity())
                changed += 1
    return changed


def fold_layer_norm_affine(root: nn.Module) -> int:
    """5. γ and β of a LayerNorm into the Linear after it: `W(γ⊙x̂ + β) + b = (Wγ)x̂ + (Wβ + b)`; return how many.

    γ and β are (D,), W (out, D); Wγ scales column d by γ_d. Norms in blocks always. The last norm goes into the
    classifier where pooling takes one token or the average of tokens: both commute with an affine map; with a
    distillation token into both classifiers.
    """
    pairs: list[tuple[Any, list[nn.Linear]]] = []
    for block in canonical_blocks(root):
        pairs.append((block.norm1, [block.attn.query, block.attn.key, block.attn.value]))
        pairs.append((block.norm2, [block.mlp.fc1]))
    model = vision_transformer(root)
    if model is not None and model.global_pool in ("token", "avg"):
        heads = [head for head in classifiers(model) if isinstance(head, nn.Linear)]
        if len(heads) == len(classifiers(model)):
            pairs.append((last_norm(root), heads))
    return sum(_fold_affine(norm, linears) for norm, linears in pairs)


def last_norm(root: nn.Module) -> nn.LayerNorm | None:
    """The norm before the classifier of the vision transformer under `root`; None without one that is a LayerNorm."""
    model = vision_transformer(root)
    if model is None:
        return None
    last = model.norm if isinstance(model.fc_norm, nn.Identity) else model.fc_norm
    return last if isinstance(last, nn.LayerNorm) else None


def fold_value_bias(root: nn.Module) -> int:
    """11. The values' bias into proj's: every row of a map sums to a known number; return how many.

    `A(V + 1·b_vᵀ) = A V + (A·1)b_vᵀ`, and A·1 is known: rows of softmax sum to 1, those of the mixed maps to
    w_h = Σ_g W'[h, g], and a bias b'_h on the map adds b'_h for each of the N tokens. So proj's bias (D,) becomes
    `b_o + W_o((w_h + N·b'_h)·b_v)`. With such a bias the number of tokens must be fixed; the mix must be linear.
    NeuTRENO's −α·V leaves 1 − α of a softmax row; its first layer's values, which others read, keep their bias.
    """
    tokens = fixed_tokens(root)
    changed = 0
    for attention in _attentions(root):
        bias, mix = attention.value.bias, attention.after
        if bias is None or attention.first or not (mix is None or isinstance(mix, HeadMix)):
            continue  # already folded, or a norm over heads, whose rows sum to no constant
        row_sum_H = bias.new_ones(attention.num_heads) if mix is None else mix.weight_HH.sum(dim=1)
        row_sum_H = row_sum_H - attention.alpha
        biases = [b for b in (attention.row_bias_H, getattr(mix, "bias_H", None)) if b is not None]
        if biases:
            if tokens is None:
                continue
            row_sum_H = row_sum_H + tokens * sum(biases)
        constant = attention.value_scale * (row_sum_H[:, None] * bias.view(attention.num_heads, -1)).flatten()
        shift = attention.proj.weight @ constant
        set_bias(attention.proj, shift if attention.proj.bias is None else attention.proj.bias + shift)
        attention.value.register_parameter("bias", None)
        changed += 1
    return changed


def compute_class_token_only(root: nn.Module) -> int:
    """7. With class-token pooling the last block computes one token, of distilled DeiT two; return 1 if it does.

    No other token of the last block is read. Queries, projection and MLP are computed for those tokens; keys and values
    are not formed at all, as `ExportAttention` describes: a block's 12·N·D² + 2·N²·D multiply-adds become
    12·D² + 2·H·N·D.
    """
    model = vision_transformer(root)
    blocks = canonical_blocks(root)
    if model is None or not blocks or not class_tokens(model) or model.blocks[-1] is not blocks[-1]:
        return 0
    # A norm over each token alone does not see that the others are gone.
    if not isinstance(model.norm, nn.LayerNorm | nn.Identity) or blocks[-1].attn.queries:
        return 0
    if blocks[-1].reads_all_outputs:
        return 0
    blocks[-1].attn.queries = class_tokens(model)
    return 1


def join_tokens(root: nn.Module) -> int:
    """12. The tokens of all images in one axis: each Linear is one `Gemm` with its bias inside; return how many.

    On (B, N, D) a Linear is exported as MatMul and Add, on (B·N, D) as one Gemm; the numbers are the same.
    """
    blocks = [block for block in canonical_blocks(root) if not block.joined]
    for block in blocks:
        block.joined = True
    return len(blocks)


def pad_head_dim(root: nn.Module) -> int:
    """8. Zero-pad the head width to a multiple of eight in W_q, W_k, W_v and W_o; return how many.

    Channels that are zero in q and k add nothing to `q·k`, and channels that are zero in V meet zero columns of W_o.
    The softmax scale stays that of the true width. NeuTRENO's layers keep theirs: their values go from one to another.
    """
    changed = 0
    for attention in _attentions(root):
        width = math.ceil(attention.head_dim / HEAD_DIM_MULTIPLE) * HEAD_DIM_MULTIPLE
        if width == attention.head_dim or attention.first or attention.alpha:
            continue
        H, K = attention.num_heads, attention.head_dim
        for linear in (attention.query, attention.key, attention.value):
            weight = linear.weight.new_zeros(H, width, linear.in_features)  # outputs are head by head
            weight[:, :K] = linear.weight.view(H, K, -1)
            if linear.bias is not None:
                bias = linear.bias.new_zeros(H, width)
                bias[:, :K] = linear.bias.view(H, K)
                linear.bias = nn.Parameter(bias.flatten())
            _set_weight(linear, weight.flatten(0, 1))
        proj = attention.proj.weight  # (D, H·K): its inputs are head by head
        padded = proj.new_zeros(len(proj), H, width)
        padded[:, :, :K] = proj.view(-1, H, K)
        _set_weight(attention.proj, padded.flatten(1))
        attention.head_dim = width
        changed += 1
    return changed


def _attentions(root: nn.Module) -> list[ExportAttention]:
    return [block.attn for block in canonical_blocks(root)]


def _mix_and_norm(attention: ExportAttention) -> tuple[HeadMix | None, nn.Module | None]:
    """The mix after softmax and the norm behind it, each None where there is none."""
    after = attention.after
    if isinstance(after, nn.Sequential):
        mix = after[0]
        assert isinstance(mix, HeadMix)
        return mix, after[1]
    return (after, None) if isinstance(after, HeadMix) else (None, None)


def _affine_of(norm: nn.Module | None, like: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and shift (H,) that a BatchNorm applies in evaluation mode; one and zero without it."""
    if norm is None:
        return like.new_ones(len(like)), like.new_zeros(len(like))
    assert isinstance(norm, nn.BatchNorm2d)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    scale_H = norm.weight / torch.sqrt(norm.running_var + norm.eps)
    return scale_H, norm.bias - scale_H * norm.running_mean


def _fold_affine(norm: nn.Module, linears: list[nn.Linear]) -> int:
    if not is_plain(norm, *NORMS) or not all(is_plain(linear, nn.Linear) for linear in linears):
        return 0
    assert isinstance(norm, nn.LayerNorm)
    if not norm.elementwise_affine:
        return 0
    for linear in linears:
        if norm.bias is not None:
            shift = linear.weight @ norm.bias
            set_bias(linear, shift if linear.bias is None else linear.bias + shift)
        _set_weight(linear, linear.weight * norm.weight)
    norm.weight = norm.bias = None  # type: ignore[assignment]  # as elementwise_affine=False has it
    norm.elementwise_affine = False
    return 1


def _set_weight(linear: nn.Linear, weight: Tensor) -> None:
    linear.weight = nn.Parameter(weight)
    linear.out_features, linear.in_features = weight.shape
