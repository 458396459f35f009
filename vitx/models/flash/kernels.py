# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Triton compiles the annotations of a kernel too, and knows constexpr alone.
# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005 - Triton joins tuples by +, and their lengths are no part of their types
"""Triton kernels of attention with a mix over heads: no map is ever written. Called by reattention.py alone.

With S = scale·Q Kᵀ for each head, an optional mix of the scores `S' = W₀S` (a bias there is constant along a row, so
the softmax does not see it), `P = softmax(S')`, and the mix of the maps `A = W P + b`, the output is `O = A V`. The
sums of the softmax rows must be known before maps are mixed, so there are two passes over the keys: `sums_kernel`, then
`mix_kernel`.

Each head's tile is a matrix of its own, with the same layout in registers as every other head's. So one thread holds
the same pixel of all maps, and the mix is its own multiply-adds: no data moves between threads, and the heads are not
padded. What limits the size of a tile are registers, which hold the outputs of a group of G heads; the maps of all
heads are made again for each group.

The backward pass makes S, P and A again (after Dao, FlashAttention-2, arXiv 2307.08691):

    dA = dO Vᵀ        dP = Wᵀ dA         D = Σ_j P ⊙ dP      dS = P ⊙ (dP − D)
    dV = Aᵀ dO        dQ = scale·dS K    dK = scale·dSᵀ Q    dW = Σ dA Pᵀ            db = Σ dA

dV is `mix_kernel` and dK is `score_grad_kernel` with queries and keys exchanged, where the sums go with the columns.
With R_g = P_g [V_1 … V_H], dW[h, g] = Σ dO_h ⊙ R_g's columns of h, and D follows from the same products
(`weight_grad_kernel`).

Shape letters: H heads, K head width, a multiple of 8, read as KA columns and KB more; M rows and N columns of a tile.
With CACHED the weights of the mix are read again for each tile: their place depends on the loop, by a number that is
always zero, so that the compiler does not keep them all in registers.
KO is KB without what only the sums of a product must be padded to. The heads of a token stand side by side, K apart.
Other strides are in units of 8 elements, which tells the compiler that 16 bytes can be read at once.
"""

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _load_rows(base, rows, limit, stride, FIRST: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr):
    """(rows, WIDTH) of one head's (N, K) from column FIRST on; zeros beyond the tokens and the head width."""
    columns = FIRST + tl.arange(0, WIDTH)
    inside = rows[:, None] < limit
    if FIRST + WIDTH > K:
        inside = inside & (columns[None, :] < K)
    return tl.load(base + rows[:, None] * stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _store_rows(base, value, rows, limit, stride, FIRST: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr):
    columns = FIRST + tl.arange(0, WIDTH)
    inside = rows[:, None] < limit
    if FIRST + WIDTH > K:
        inside = inside & (columns[None, :] < K)
    tl.store(base + rows[:, None] * stride + columns[None, :], value.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _load_heads(
    base, rows, limit, stride_n, first,
    COUNT: tl.constexpr, K: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr,
):  # fmt: skip
    """The tiles (rows, K) of COUNT heads from head `first` on: their first KA columns, and the KB after them."""
    wide, rest = (), ()
    for h in tl.static_range(COUNT):
        head = base + (first + h) * K
        wide = wide + (_load_rows(head, rows, limit, stride_n, 0, KA, K),)
        rest = rest + (_load_rows(head, rows, limit, stride_n, KA, KB, K) if KB > 0 else 0,)
    return wide, rest


@triton.jit
def _store_heads(
    base, wide, rest, factor, rows, limit, stride_n, first,
    COUNT: tl.constexpr, K: tl.constexpr, KA: tl.constexpr, KO: tl.constexpr,
):  # fmt: skip
    for h in tl.static_range(COUNT):
        head = base + (first + h) * K
        _store_rows(head, wide[h] * factor, rows, limit, stride_n, 0, KA, K)
        if KO > 0:
            _store_rows(head, rest[h] * factor, rows, limit, stride_n, KA, KO, K)


@triton.jit
def _products(
    wide, rest, base, rows, limit, stride,
    K: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr,
):  # fmt: skip
    """The products of a tile's rows, in its two parts, with `rows` of one head at `base`."""
    product = tl.dot(wide, tl.trans(_load_rows(base, rows, limit, stride, 0, KA, K)))
    if KB > 0:
        product = tl.dot(rest, tl.trans(_load_rows(base, rows, limit, stride, KA, KB, K)), product)
    return product


@triton.jit
def _zeros(COUNT: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    tiles = ()
    for _ in tl.static_range(COUNT):
        tiles = tiles + (tl.zeros((M, N), tl.float32),)
    return tiles


@triton.jit
def _add_mixed(sums, part, weights, STRIDE: tl.constexpr, COUNT: tl.constexpr):
    """sums[h] + weight[h]·part for COUNT sums; their weights are STRIDE apart.

    Written as fma: whether a compiler fuses by itself depends on its version.
    """
    more = ()
    for h in tl.static_range(COUNT):
        more = more + (tl.fma(part, tl.load(weights + h * STRIDE), sums[h]),)
    return more


@triton.jit
def _add_products(
    wide, rest, left, base, rows, limit, stride_n, first,
    COUNT: tl.constexpr, K: tl.constexpr, KA: tl.constexpr, KO: tl.constexpr,
):  # fmt: skip
    """Each head's sums plus `left[h]` times `rows` of that head at `base`."""
    more_wide, more_rest = (), ()
    for h in tl.static_range(COUNT):
        head = base + (first + h) * K
        right = _load_rows(head, rows, limit, stride_n, 0, KA, K)
        factor = left[h].to(right.dtype)
        more_wide = more_wide + (tl.dot(factor, right, wide[h]),)
        if KO > 0:
            right = _load_rows(head, rows, limit, stride_n, KA, KO, K)
            more_rest = more_rest + (tl.dot(factor, right, rest[h]),)
        else:
            more_rest = more_rest + (rest[h],)
    return more_wide, more_rest


@triton.jit
def _mixed_scores(
    q, q_rest, k_base, keys, tokens, stride_n, before_base, first,
    H: tl.constexpr, COUNT: tl.constexpr, K: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """W₀S of COUNT heads from `first` on, without the scale; needs the scores of all heads."""
    mixed = _zeros(COUNT, M, N)
    for f in tl.static_range(H):
        raw = _products(q[f], q_rest[f], k_base + f * K, keys, tokens, stride_n, K, KA, KB)
        mixed = _add_mixed(mixed, raw, before_base + first * H + f, H, COUNT)
    return mixed


@triton.jit
def _scores(
    q, q_rest, k_base, keys, tokens, stride_n, before_base, first,
    H: tl.constexpr, COUNT: tl.constexpr, K: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    """What the softmax of COUNT heads from `first` on reads, without the scale. `q`: all heads with BEFORE."""
    if BEFORE:
        scores = _mixed_scores(q, q_rest, k_base, keys, tokens, stride_n, before_base, first, H, COUNT, K, KA, KB, M, N)
    else:
        scores = ()
        for g in tl.static_range(COUNT):
            head = k_base + (first + g) * K
            scores = scores + (_products(q[g], q_rest[g], head, keys, tokens, stride_n, K, KA, KB),)
    return scores


@triton.jit
def _more_sums(
    largest, total, q, q_rest, k_base, keys, tokens, stride_n, before_base, factor, first,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, BEFORE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Each row's largest score, and its sum of exponentials relative to that, with N more keys; factor > 0."""
    scores = _scores(q, q_rest, k_base, keys, tokens, stride_n, before_base, first, H, G, K, KA, KB, M, N, BEFORE)
    next_largest, next_total = (), ()
    for g in tl.static_range(G):
        score = scores[g]
        if MASKED:
            score = tl.where(keys[None, :] < tokens, score, float("-inf"))
        higher = tl.maximum(largest[g], tl.max(score, 1))
        next_largest = next_largest + (higher,)
        part = tl.sum(tl.exp2(tl.fma(score, factor, -(higher * factor)[:, None])), 1)
        next_total = next_total + (total[g] * tl.exp2((largest[g] - higher) * factor) + part,)
    return next_largest, next_total


@triton.jit
def _row_sums(
    q_base, k_base, before_base, stride_n, rows, tokens, scale, first,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, CACHED: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    """log2 of each softmax row's sum of exponentials, for G heads of one image's queries: a tuple of (M,)."""
    q, q_rest = _load_heads(q_base, rows, tokens, stride_n, 0 if BEFORE else first, H if BEFORE else G, K, KA, KB)
    largest, total = (), ()
    for _ in tl.static_range(G):
        largest = largest + (tl.full((M,), float("-inf"), tl.float32),)
        total = total + (tl.zeros((M,), tl.float32),)
    factor = scale * LOG2_E
    whole = tokens // N * N
    for start in tl.range(0, whole, N):
        cached = (start >> 24) if CACHED else 0
        largest, total = _more_sums(
            largest, total, q, q_rest, k_base, start + tl.arange(0, N), tokens, stride_n, before_base + cached, factor,
            first, H, G, K, KA, KB, M, N, BEFORE, False,
        )  # fmt: skip
    LAST: tl.constexpr = min(N, 16)
    for start in tl.range(whole, tokens, LAST):
        cached = (start >> 24) if CACHED else 0
        largest, total = _more_sums(
            largest, total, q, q_rest, k_base, start + tl.arange(0, LAST), tokens, stride_n, before_base + cached,
            factor, first, H, G, K, KA, KB, M, LAST, BEFORE, True,
        )  # fmt: skip
    sums = ()
    for g in tl.static_range(G):
        sums = sums + (largest[g] * factor + tl.log2(total[g]),)
    return sums


@triton.jit
def _place(H: tl.constexpr, G: tl.constexpr, M: tl.constexpr):
    """A program's image, first head and rows: the groups of heads of one tile are neighbours, and share its reads."""
    group = tl.program_id(0) % (H // G)
    return tl.program_id(1).to(tl.int64), group * G, tl.program_id(0) // (H // G) * M + tl.arange(0, M)


@triton.jit
def sums_kernel(
    q_base, k_base, before_base, sums_base,
    stride_b, stride_n,
    tokens, scale,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr, KO: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, CACHED: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    """`_row_sums` of M queries and G heads of one image, into (B, H, tokens)."""
    image, first, rows = _place(H, G, M)
    begin = image * (8 * stride_b)
    sums = _row_sums(
        q_base + begin, k_base + begin, before_base, 8 * stride_n, rows, tokens, scale, first,
        H, G, K, KA, KB, M, N, CACHED, BEFORE,
    )  # fmt: skip
    for g in tl.static_range(G):
        tl.store(sums_base + (image * H + first + g) * tokens + rows, sums[g], mask=rows < tokens)


@triton.jit
def _load_rows_of_sums(base, rows, tokens, COUNT: tl.constexpr, DEFAULT: tl.constexpr):
    """One number a row for COUNT heads; a sum of +∞ makes the maps of rows beyond the tokens zero."""
    values = ()
    for h in tl.static_range(COUNT):
        values = values + (tl.load(base + h * tokens + rows, mask=rows < tokens, other=DEFAULT),)
    return values


@triton.jit
def _mixed_values(
    q_base, k_base, v_base, mix_base, bias_base, before_base, sums_base, sums,
    stride_n, v_stride_n, rows, tokens, scale, first,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr, KO: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, CACHED: tl.constexpr, BEFORE: tl.constexpr, BIAS: tl.constexpr,
    BY_COLUMN: tl.constexpr,
):  # fmt: skip
    """`A V` of G heads from `first` on, of one image's `rows`: (M, KA) a head, and the columns after them.

    `sums` are those of the rows of each head; BY_COLUMN reads those of the columns from `sums_base` instead.
    """
    q, q_rest = _load_heads(q_base, rows, tokens, stride_n, 0, H, K, KA, KB)
    wide, rest = _zeros(G, M, KA), _zeros(G, M, KO if KO > 0 else 16)
    for start in tl.range(0, tokens, N):
        columns = start + tl.arange(0, N)
        cached = (start >> 24) if CACHED else 0
        if BEFORE:
            scores = _mixed_scores(
                q, q_rest, k_base, columns, tokens, stride_n, before_base + cached, 0, H, H, K, KA, KB, M, N
            )
        # The bias needs no mask: values beyond the tokens are zero.
        mixed = ()
        for h in tl.static_range(G):
            mixed = mixed + (tl.zeros((M, N), tl.float32) + (tl.load(bias_base + first + h) if BIAS else 0.0),)
        for g in tl.static_range(H):
            if BEFORE:
                score = scores[g]
            else:
                score = _products(q[g], q_rest[g], k_base + g * K, columns, tokens, stride_n, K, KA, KB)
            if BY_COLUMN:
                total = tl.load(sums_base + g * tokens + columns, mask=columns < tokens, other=float("inf"))[None, :]
            else:
                total = sums[g][:, None]
            maps = tl.exp2(tl.fma(score, scale * LOG2_E, -total))
            mixed = _add_mixed(mixed, maps, mix_base + cached + first * H + g, H, G)
        wide, rest = _add_products(wide, rest, mixed, v_base, columns, tokens, v_stride_n, first, G, K, KA, KO)
    return wide, rest


@triton.jit
def mix_kernel(
    q_base, k_base, v_base, mix_base, bias_base, before_base, sums_base, out_base,
    stride_b, stride_n, v_stride_b, v_stride_n, out_stride_b, out_stride_n,
    tokens, scale,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr, KO: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, CACHED: tl.constexpr, BEFORE: tl.constexpr, BIAS: tl.constexpr,
    BY_COLUMN: tl.constexpr,
):  # fmt: skip
    """`A V` of M queries and G heads of one image; BY_COLUMN `Aᵀ V`, with keys as `q` and queries as `k`."""
    image, first, rows = _place(H, G, M)
    begin, sums_base = image * (8 * stride_b), sums_base + image * H * tokens
    sums = () if BY_COLUMN else _load_rows_of_sums(sums_base, rows, tokens, H, float("inf"))
    wide, rest = _mixed_values(
        q_base + begin, k_base + begin, v_base + image * (8 * v_stride_b), mix_base, bias_base, before_base, sums_base,
        sums, 8 * stride_n, 8 * v_stride_n, rows, tokens, scale, first,
        H, G, K, KA, KB, KO, M, N, CACHED, BEFORE, BIAS, BY_COLUMN,
    )  # fmt: skip
    out_base += image * (8 * out_stride_b)
    _store_heads(out_base, wide, rest, 1.0, rows, tokens, 8 * out_stride_n, first, G, K, KA, KO)


@triton.jit
def reattention_kernel(
    q_base, k_base, v_base, mix_base, bias_base, tokens, out_base,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr, KO: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, CACHED: tl.constexpr,
):  # fmt: skip
    """Re-Attention on (B, tokens, H, K) tensors, without scale, both passes: what an engine launches by position.

    Inputs come first, then integers, then outputs: the order of TensorRT's ahead-of-time plugins.
    """
    _joined(
        q_base,
        k_base,
        v_base,
        mix_base,
        bias_base,
        mix_base,
        tokens,
        out_base,
        H,
        G,
        K,
        KA,
        KB,
        KO,
        M,
        N,
        CACHED,
        False,
    )


@triton.jit
def talking_heads_kernel(
    q_base, k_base, v_base, before_base, before_bias_base, mix_base, bias_base, tokens, out_base,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr, KO: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, CACHED: tl.constexpr,
):  # fmt: skip
    """The same with a mix of the scores before softmax, whose bias changes nothing."""
    _joined(
        q_base,
        k_base,
        v_base,
        mix_base,
        bias_base,
        before_base,
        tokens,
        out_base,
        H,
        G,
        K,
        KA,
        KB,
        KO,
        M,
        N,
        CACHED,
        True,
    )


@triton.jit
def _joined(
    q_base, k_base, v_base, mix_base, bias_base, before_base, tokens, out_base,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr, KO: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, CACHED: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    image, first, rows = _place(H, G, M)
    begin = image * tokens * (H * K)
    q_base, k_base = q_base + begin, k_base + begin
    COLUMNS: tl.constexpr = N // 2 if BEFORE else N  # the sums of all heads and their scores share the registers
    sums = _row_sums(
        q_base, k_base, before_base, H * K, rows, tokens, 1.0, 0, H, H, K, KA, KB, M, COLUMNS, CACHED, BEFORE
    )
    wide, rest = _mixed_values(
        q_base, k_base, v_base + begin, mix_base, bias_base, before_base, mix_base, sums, H * K, H * K,
        rows, tokens, 1.0, first, H, G, K, KA, KB, KO, M, N, CACHED, BEFORE, True, False,
    )  # fmt: skip
    _store_heads(out_base + begin, wide, rest, 1.0, rows, tokens, H * K, first, G, K, KA, KO)


@triton.jit
def score_grad_kernel(
    q_base, k_base, left_base, right_base, mix_base, sums_base, row_sums_base, grad_base,
    stride_b, stride_n, left_stride_b, left_stride_n,
    right_stride_b, right_stride_n, grad_stride_b, grad_stride_n,
    tokens, scale,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr, KO: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, CACHED: tl.constexpr, BY_COLUMN: tl.constexpr,
):  # fmt: skip
    """dQ = scale·dS K of M queries and G heads of one image, with dA = left·rightᵀ: dO as `left`, V as `right`.

    BY_COLUMN dK = scale·dSᵀ Q, with keys as `q`, queries as `k`, V as `left` and dO as `right`. `row_sums` are D.
    """
    image, first, rows = _place(H, G, M)
    begin, begin_of_sums = image * (8 * stride_b), (image * H + first) * tokens
    left_base += image * (8 * left_stride_b)
    right_base += image * (8 * right_stride_b)
    q_base += begin + first * K
    k_base += begin + first * K
    sums_base += begin_of_sums
    row_sums_base += begin_of_sums
    left, left_rest = _load_heads(left_base, rows, tokens, 8 * left_stride_n, 0, H, K, KA, KB)
    q, q_rest = _load_heads(q_base, rows, tokens, 8 * stride_n, 0, G, K, KA, KB)
    if not BY_COLUMN:
        sums = _load_rows_of_sums(sums_base, rows, tokens, G, float("inf"))
        row_sums = _load_rows_of_sums(row_sums_base, rows, tokens, G, 0.0)
    wide, rest = _zeros(G, M, KA), _zeros(G, M, KO if KO > 0 else 16)
    for start in tl.range(0, tokens, N):
        columns = start + tl.arange(0, N)
        cached = (start >> 24) if CACHED else 0
        maps_grad = _zeros(G, M, N)
        for h in tl.static_range(H):
            head = right_base + h * K
            part = _products(left[h], left_rest[h], head, columns, tokens, 8 * right_stride_n, K, KA, KB)
            maps_grad = _add_mixed(maps_grad, part, mix_base + cached + h * H + first, 1, G)
        scores_grad = ()
        for g in tl.static_range(G):
            head = k_base + g * K
            score = _products(q[g], q_rest[g], head, columns, tokens, 8 * stride_n, K, KA, KB)
            if BY_COLUMN:
                place, inside = g * tokens + columns, columns < tokens
                total = tl.load(sums_base + place, mask=inside, other=float("inf"))[None, :]
                row_sum = tl.load(row_sums_base + place, mask=inside, other=0.0)[None, :]
            else:
                total, row_sum = sums[g][:, None], row_sums[g][:, None]
            maps = tl.exp2(tl.fma(score, scale * LOG2_E, -total))
            scores_grad = scores_grad + (maps * (maps_grad[g] - row_sum),)
        wide, rest = _add_products(wide, rest, scores_grad, k_base, columns, tokens, 8 * stride_n, 0, G, K, KA, KO)
    grad_base += image * (8 * grad_stride_b)
    _store_heads(grad_base, wide, rest, scale, rows, tokens, 8 * grad_stride_n, first, G, K, KA, KO)


@triton.jit
def weight_grad_kernel(
    q_base, k_base, v_base, mix_base, sums_base, out_grad_base, row_sums_base, shares_base,
    stride_b, stride_n, out_stride_b, out_stride_n,
    tokens, scale,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr, KO: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, CACHED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """For M queries and one head g of one image (G = 1): D, and the products of R_g with dO summed over the queries.

    R_g = P_g [V_1 … V_H] is made in blocks of C of its H·K columns. D goes to (B, H, tokens), the products to
    (programs, H, H·K).
    """
    image, g = tl.program_id(1).to(tl.int64), tl.program_id(0) % H
    rows = tl.program_id(0) // H * M + tl.arange(0, M)
    begin = image * (8 * stride_b)
    head = begin + g * K
    place = (image * H + g) * tokens + rows
    sums = tl.load(sums_base + place, mask=rows < tokens, other=float("inf"))
    wide = _load_rows(q_base + head, rows, tokens, 8 * stride_n, 0, KA, K)
    rest = _load_rows(q_base + head, rows, tokens, 8 * stride_n, KA, KB, K) if KB > 0 else 0
    row_sums = tl.zeros((M,), tl.float32)
    share_base = shares_base + (image * tl.num_programs(0) + tl.program_id(0)) * (H * K)
    for block in tl.range(0, H * K, C):
        column = block + tl.arange(0, C)
        inside = column[None, :] < H * K
        product = tl.zeros((M, C), tl.float32)
        for start in tl.range(0, tokens, N):
            keys = start + tl.arange(0, N)
            score = _products(wide, rest, k_base + head, keys, tokens, 8 * stride_n, K, KA, KB)
            maps = tl.exp2(tl.fma(score, scale * LOG2_E, -sums[:, None]))
            there = (keys[:, None] < tokens) & inside
            v = tl.load(v_base + begin + column[None, :] + keys[:, None] * (8 * stride_n), mask=there, other=0.0)
            product += tl.dot(maps.to(v.dtype), v)
        grads = image * (8 * out_stride_b) + column[None, :]
        there = (rows[:, None] < tokens) & inside
        out_grad = tl.load(out_grad_base + grads + rows[:, None] * (8 * out_stride_n), mask=there, other=0.0)
        product *= out_grad.to(tl.float32)
        weights = tl.load(mix_base + column // K * H + g, mask=column < H * K, other=0.0)
        row_sums += tl.sum(product * weights[None, :], 1)
        tl.store(share_base + column, tl.sum(product, 0), mask=column < H * K)
    tl.store(row_sums_base + place, row_sums, mask=rows < tokens)
