# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Triton compiles the annotations of a kernel too, and knows constexpr alone.
"""Triton kernels of attention with a mix over heads: no map is ever written. Called by flash_reattention.py alone.

With S = scale·Q Kᵀ for each head, an optional mix of the scores `S' = W₀S + b₀`, `P = softmax(S')`, and the mix of the
maps `A = W P + b`, the output is `O = A V`. A program holds one tile of queries for all heads, since every head's map
enters every head's output, and walks over the keys twice: once for the sums of the softmax rows, once for `O`. The
backward pass makes S, P and A again, tile by tile (after Dao, FlashAttention-2, arXiv 2307.08691):

    dA = dO Vᵀ        dP = Wᵀ dA         D = Σ_j P ⊙ dP      dS' = P ⊙ (dP − D)      dS = W₀ᵀ dS'
    dV = Aᵀ dO        dQ = scale·dS K    dK = scale·dSᵀ Q    dW = Σ dA Pᵀ            db = Σ dA        dW₀ = Σ dS' Sᵀ

The rows of dS' sum to zero, so b₀, constant along a row, has no gradient.

Shape letters: H heads and K head width, both padded to powers of two by masks; M queries and N keys of a tile.
"""

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _load_tile(
    base, stride_h, stride_n, rows, limit, heads, width,
    H: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """(H, rows, K) of one image's (H, N, K); zeros beyond the heads, the tokens and the head width."""
    offsets = heads[:, None, None] * stride_h + rows[None, :, None] * stride_n + width[None, None, :]
    inside = (heads[:, None, None] < H) & (rows[None, :, None] < limit) & (width[None, None, :] < K)
    return tl.load(base + offsets, mask=inside, other=0.0)


@triton.jit
def _store_tile(
    base, value, stride_h, stride_n, rows, limit, heads, width,
    H: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    offsets = heads[:, None, None] * stride_h + rows[None, :, None] * stride_n + width[None, None, :]
    inside = (heads[:, None, None] < H) & (rows[None, :, None] < limit) & (width[None, None, :] < K)
    tl.store(base + offsets, value.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _load_matrix(base, heads, H: tl.constexpr):
    """(H, H) in float32, padded with zeros."""
    inside = (heads[:, None] < H) & (heads[None, :] < H)
    return tl.load(base + heads[:, None] * H + heads[None, :], mask=inside, other=0.0)


@triton.jit
def _load_mixes(
    mix_base, before_base, before_bias_base, heads, H: tl.constexpr, HP: tl.constexpr, BEFORE: tl.constexpr
):
    """The mix of the maps, that of the scores and its bias; without one before softmax the last two are not used."""
    mix = _load_matrix(mix_base, heads, H)
    before, before_bias = mix, tl.zeros((HP,), tl.float32)
    if BEFORE:
        before = _load_matrix(before_base, heads, H)
        before_bias = tl.load(before_bias_base + heads, mask=heads < H, other=0.0)
    return mix, before, before_bias


@triton.jit
def _mix(weight, maps, HP: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Σ_g weight[h, g] · maps[g]: (H, H) and (H, M, N) → (H, M, N)."""
    return tl.reshape(tl.dot(weight, tl.reshape(maps, (HP, M * N))), (HP, M, N))


@triton.jit
def _products(left, right, HP: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Σ_mn left[h] · right[g]: (H, M, N) twice → (H, H)."""
    return tl.dot(tl.reshape(left, (HP, M * N)), tl.trans(tl.reshape(right, (HP, M * N))))


@triton.jit
def _raw_scores(q, k, scale):
    return tl.dot(q, tl.permute(k, (0, 2, 1))) * scale


@triton.jit
def _masked_scores(
    raw, before, before_bias, keys, tokens,
    HP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    """What the softmax reads, in units of log2; −∞ beyond the tokens."""
    scores = raw
    if BEFORE:
        scores = _mix(before, raw, HP, M, N) + before_bias[:, None, None]
    return tl.where(keys[None, None, :] < tokens, scores * LOG2_E, float("-inf"))


@triton.jit
def _attend(
    q_base, k_base, v_base, mix_base, bias_base, before_base, before_bias_base,
    stride_h, stride_n, rows, heads, width, tokens, scale,
    H: tl.constexpr, HP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    BEFORE: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Output (HP, M, KP) of one image's queries `rows`, and log2 of each row's sum of exponentials (HP, M)."""
    mix, before, before_bias = _load_mixes(mix_base, before_base, before_bias_base, heads, H, HP, BEFORE)
    q = _load_tile(q_base, stride_h, stride_n, rows, tokens, heads, width, H, K)

    largest = tl.full((HP, M), float("-inf"), tl.float32)
    total = tl.zeros((HP, M), tl.float32)
    for start in range(0, tokens, N):
        keys = start + tl.arange(0, N)
        k = _load_tile(k_base, stride_h, stride_n, keys, tokens, heads, width, H, K)
        scores = _masked_scores(_raw_scores(q, k, scale), before, before_bias, keys, tokens, HP, M, N, BEFORE)
        higher = tl.maximum(largest, tl.max(scores, 2))
        total = total * tl.exp2(largest - higher) + tl.sum(tl.exp2(scores - higher[:, :, None]), 2)
        largest = higher
    sums = largest + tl.log2(total)

    out = tl.zeros((HP, M, KP), tl.float32)
    for start in range(0, tokens, N):
        keys = start + tl.arange(0, N)
        k = _load_tile(k_base, stride_h, stride_n, keys, tokens, heads, width, H, K)
        v = _load_tile(v_base, stride_h, stride_n, keys, tokens, heads, width, H, K)
        scores = _masked_scores(_raw_scores(q, k, scale), before, before_bias, keys, tokens, HP, M, N, BEFORE)
        mixed = _mix(mix, tl.exp2(scores - sums[:, :, None]), HP, M, N)
        if BIAS:  # values beyond the tokens are zero, so the bias needs no mask
            mixed += tl.load(bias_base + heads, mask=heads < H, other=0.0)[:, None, None]
        out += tl.dot(mixed.to(v.dtype), v)
    return out, sums


@triton.jit
def forward_kernel(
    q_base, k_base, v_base, mix_base, bias_base, before_base, before_bias_base,
    out_base, sums_base,
    stride_b, stride_h, stride_n, out_stride_b, out_stride_h, out_stride_n,
    tokens, scale,
    H: tl.constexpr, HP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    BEFORE: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """One tile of M queries of one image, all heads. `sums` (B, H, tokens): log2 of each row's sum of exponentials."""
    image = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * M + tl.arange(0, M)
    heads, width = tl.arange(0, HP), tl.arange(0, KP)
    first = image * stride_b
    out, sums = _attend(
        q_base + first, k_base + first, v_base + first, mix_base, bias_base, before_base, before_bias_base,
        stride_h, stride_n, rows, heads, width, tokens, scale, H, HP, K, KP, M, N, BEFORE, BIAS,
    )  # fmt: skip
    _store_tile(out_base + image * out_stride_b, out, out_stride_h, out_stride_n, rows, tokens, heads, width, H, K)
    inside = (heads[:, None] < H) & (rows[None, :] < tokens)
    tl.store(sums_base + (image * H + heads[:, None]) * tokens + rows[None, :], sums, mask=inside)


@triton.jit
def reattention_kernel(
    q_base, k_base, v_base, mix_base, bias_base, tokens, out_base,
    H: tl.constexpr, HP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Re-Attention on (B, tokens, H, K) tensors, without scale or sums: what an engine launches by position.

    Inputs come first, then integers, then outputs: the order of TensorRT's ahead-of-time plugins.
    """
    _joined(
        q_base, k_base, v_base, mix_base, bias_base, mix_base, bias_base, tokens, out_base, H, HP, K, KP, M, N, False
    )


@triton.jit
def talking_heads_kernel(
    q_base, k_base, v_base, before_base, before_bias_base, mix_base, bias_base, tokens, out_base,
    H: tl.constexpr, HP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """The same with a mix of the scores before softmax."""
    _joined(
        q_base, k_base, v_base, mix_base, bias_base, before_base, before_bias_base, tokens, out_base,
        H, HP, K, KP, M, N, True,
    )  # fmt: skip


@triton.jit
def _joined(
    q_base, k_base, v_base, mix_base, bias_base, before_base, before_bias_base, tokens, out_base,
    H: tl.constexpr, HP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    BEFORE: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * M + tl.arange(0, M)
    heads, width = tl.arange(0, HP), tl.arange(0, KP)
    first = tl.program_id(1).to(tl.int64) * tokens * (H * K)
    out, _ = _attend(
        q_base + first, k_base + first, v_base + first, mix_base, bias_base, before_base, before_bias_base,
        K, H * K, rows, heads, width, tokens, 1.0, H, HP, K, KP, M, N, BEFORE, True,
    )  # fmt: skip
    _store_tile(out_base + first, out, K, H * K, rows, tokens, heads, width, H, K)


@triton.jit
def backward_queries_kernel(
    q_base, k_base, v_base, mix_base, before_base, before_bias_base,
    sums_base, out_grad_base, q_grad_base, row_sums_base, weight_grads_base,
    stride_b, stride_h, stride_n, out_stride_b, out_stride_h, out_stride_n,
    tokens, scale,
    H: tl.constexpr, HP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    BEFORE: tl.constexpr,
):  # fmt: skip
    """dQ and D of one tile of queries; its share of dW with db as one more column, and of dW₀: (2, HP, HP + 1)."""
    image = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0) * M + tl.arange(0, M)
    heads, width = tl.arange(0, HP), tl.arange(0, KP)
    mix, before, before_bias = _load_mixes(mix_base, before_base, before_bias_base, heads, H, HP, BEFORE)
    q = _load_tile(q_base + image * stride_b, stride_h, stride_n, rows, tokens, heads, width, H, K)
    out_grad = _load_tile(
        out_grad_base + image * out_stride_b, out_stride_h, out_stride_n, rows, tokens, heads, width, H, K
    )
    inside = (heads[:, None] < H) & (rows[None, :] < tokens)
    row = (image * H + heads[:, None]) * tokens + rows[None, :]
    # Rows beyond the tokens read q = 0 and dO = 0; a sum of +∞ makes their maps zero.
    sums = tl.load(sums_base + row, mask=inside, other=float("inf"))

    row_sums = tl.zeros((HP, M), tl.float32)
    mix_grad = tl.zeros((HP, HP), tl.float32)
    bias_grad = tl.zeros((HP,), tl.float32)
    for start in range(0, tokens, N):
        keys = start + tl.arange(0, N)
        k = _load_tile(k_base + image * stride_b, stride_h, stride_n, keys, tokens, heads, width, H, K)
        v = _load_tile(v_base + image * stride_b, stride_h, stride_n, keys, tokens, heads, width, H, K)
        scores = _masked_scores(_raw_scores(q, k, scale), before, before_bias, keys, tokens, HP, M, N, BEFORE)
        maps = tl.exp2(scores - sums[:, :, None])
        mixed_grad = tl.dot(out_grad, tl.permute(v, (0, 2, 1)))
        row_sums += tl.sum(_mix(tl.trans(mix), mixed_grad, HP, M, N) * maps, 2)
        mix_grad += _products(mixed_grad, maps, HP, M, N)
        bias_grad += tl.sum(tl.sum(mixed_grad, 2), 1)

    q_grad = tl.zeros((HP, M, KP), tl.float32)
    before_grad = tl.zeros((HP, HP), tl.float32)
    for start in range(0, tokens, N):
        keys = start + tl.arange(0, N)
        k = _load_tile(k_base + image * stride_b, stride_h, stride_n, keys, tokens, heads, width, H, K)
        v = _load_tile(v_base + image * stride_b, stride_h, stride_n, keys, tokens, heads, width, H, K)
        raw = _raw_scores(q, k, scale)
        scores = _masked_scores(raw, before, before_bias, keys, tokens, HP, M, N, BEFORE)
        maps = tl.exp2(scores - sums[:, :, None])
        maps_grad = _mix(tl.trans(mix), tl.dot(out_grad, tl.permute(v, (0, 2, 1))), HP, M, N)
        scores_grad = maps * (maps_grad - row_sums[:, :, None])
        if BEFORE:
            before_grad += _products(scores_grad, raw, HP, M, N)
            scores_grad = _mix(tl.trans(before), scores_grad, HP, M, N)
        q_grad += tl.dot(scores_grad.to(k.dtype), k)
    _store_tile(
        q_grad_base + image * out_stride_b, q_grad * scale, out_stride_h, out_stride_n, rows, tokens, heads, width, H, K
    )
    tl.store(row_sums_base + row, row_sums, mask=inside)
    program = image * tl.num_programs(0) + tl.program_id(0)
    share = weight_grads_base + program * 2 * HP * (HP + 1)
    place = heads[:, None] * (HP + 1) + heads[None, :]
    tl.store(share + place, mix_grad)
    tl.store(share + heads * (HP + 1) + HP, bias_grad)
    tl.store(share + HP * (HP + 1) + place, before_grad)


@triton.jit
def backward_keys_kernel(
    q_base, k_base, v_base, mix_base, bias_base, before_base, before_bias_base,
    sums_base, out_grad_base, row_sums_base, k_grad_base, v_grad_base,
    stride_b, stride_h, stride_n, out_stride_b, out_stride_h, out_stride_n,
    tokens, scale,
    H: tl.constexpr, HP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    BEFORE: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """dK and dV of one tile of N keys of one image, all heads."""
    image = tl.program_id(1).to(tl.int64)
    keys = tl.program_id(0) * N + tl.arange(0, N)
    heads, width = tl.arange(0, HP), tl.arange(0, KP)
    mix, before, before_bias = _load_mixes(mix_base, before_base, before_bias_base, heads, H, HP, BEFORE)
    k = _load_tile(k_base + image * stride_b, stride_h, stride_n, keys, tokens, heads, width, H, K)
    v = _load_tile(v_base + image * stride_b, stride_h, stride_n, keys, tokens, heads, width, H, K)
    k_grad = tl.zeros((HP, N, KP), tl.float32)
    v_grad = tl.zeros((HP, N, KP), tl.float32)
    for start in range(0, tokens, M):
        rows = start + tl.arange(0, M)
        q = _load_tile(q_base + image * stride_b, stride_h, stride_n, rows, tokens, heads, width, H, K)
        out_grad = _load_tile(
            out_grad_base + image * out_stride_b, out_stride_h, out_stride_n, rows, tokens, heads, width, H, K
        )
        inside = (heads[:, None] < H) & (rows[None, :] < tokens)
        row = (image * H + heads[:, None]) * tokens + rows[None, :]
        sums = tl.load(sums_base + row, mask=inside, other=float("inf"))
        row_sums = tl.load(row_sums_base + row, mask=inside, other=0.0)
        scores = _masked_scores(_raw_scores(q, k, scale), before, before_bias, keys, tokens, HP, M, N, BEFORE)
        maps = tl.exp2(scores - sums[:, :, None])
        mixed = _mix(mix, maps, HP, M, N)
        if BIAS:
            mixed += tl.load(bias_base + heads, mask=heads < H, other=0.0)[:, None, None]
        v_grad += tl.dot(tl.permute(mixed, (0, 2, 1)).to(out_grad.dtype), out_grad)
        maps_grad = _mix(tl.trans(mix), tl.dot(out_grad, tl.permute(v, (0, 2, 1))), HP, M, N)
        scores_grad = maps * (maps_grad - row_sums[:, :, None])
        if BEFORE:
            scores_grad = _mix(tl.trans(before), scores_grad, HP, M, N)
        k_grad += tl.dot(tl.permute(scores_grad, (0, 2, 1)).to(q.dtype), q)
    _store_tile(
        k_grad_base + image * out_stride_b, k_grad * scale, out_stride_h, out_stride_n, keys, tokens, heads, width, H, K
    )
    _store_tile(
        v_grad_base + image * out_stride_b, v_grad, out_stride_h, out_stride_n, keys, tokens, heads, width, H, K
    )
