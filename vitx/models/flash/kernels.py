# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Triton compiles the annotations of a kernel too, and knows constexpr alone.
# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005 - Triton joins tuples by +, and their lengths are no part of their types
"""Triton kernels of attention with a mix over heads: no N×N map is ever written to memory.

reattention.py launches them; for TensorRT export/engines/flash_kernel.py compiles the two that do both passes at once,
`reattention_kernel` and `talking_heads_kernel`. For one image:

    S = scale·Q Kᵀ      scores of each head, N×N
    S' = W₀ S           mix of the scores: talking heads (arXiv 2003.02436). A bias here adds the same to a whole row,
                        which softmax does not see, so it is left out
    P = softmax(S')     row by row
    A = W P + b         mix of the maps: talking heads, Re-Attention (arXiv 2103.11886, eq. 3; BatchNorm in W and b)
    O = A V             outputs, N×K a head

**Two passes over the keys.** FlashAttention corrects its outputs by one factor a row whenever a larger score appears.
Here an output is a sum over the softmaxes of all heads, each with another factor, so the sums of the softmax rows must
be known first: `sums_kernel` finds L = log₂ Σ_j exp(S'_ij), and `mix_kernel` computes P = 2^(S'·log₂e − L).

**Registers.** The tile of each head's map, M×N, is a tensor of its own, with the same layout as every other head's. So
one thread holds entry (i, j) of all maps, and the mix is multiply-adds of its own registers: nothing moves between
threads, and H need not be a power of two. A program keeps the outputs of G heads, not of all H, for which there are
too few registers (with M, N, K = 64, 16, 32 and 128 threads an output takes 16 of a thread's 255, a tile 8); the maps
of all heads are made again for each group of G. Queries are operands of products, and lie in shared memory.

**Backward** S, P and A are made again from Q, K and L (after Dao, FlashAttention-2, arXiv 2307.08691):

    dA = dO Vᵀ        dP = Wᵀ dA         D = Σ_j P ⊙ dP      dS = P ⊙ (dP − D)
    dV = Aᵀ dO        dQ = scale·dS K    dK = scale·dSᵀ Q    dW = Σ dA Pᵀ            db = Σ dA

dV is `mix_kernel`, dK is `score_grad_kernel`, both with queries and keys exchanged (BY_COLUMN): L and D then go with
the columns of a tile. With R_g = P_g [V_1 … V_H], dW[h, g] = Σ dO_h ⊙ (R_g's columns of h), and D follows from the
same products: `weight_grad_kernel`.

Constants: H heads, G heads whose outputs a program makes, K head width (a multiple of 8), read as KA columns (`main`)
and KB more (`tail`), of which KO are outputs; M rows and N columns of a tile. BEFORE: W₀ is there. BIAS: b is there.
CACHED: the weights of the mix are read again for each tile, from the cache. For that their address depends on the loop,
by a number that is always zero; otherwise the compiler would keep all H² of them in registers.
`rows` and `columns` are token numbers; the heads of a token stand side by side, K apart. Strides of image and token are
in units of 8 elements, which tells the compiler that 16 bytes can be read at once.
"""

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def _load_rows(base, rows, limit, stride, FIRST: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr):
    """WIDTH columns from FIRST on of `rows` of one head's (limit, K); zeros beyond `limit` rows and K columns."""
    columns = FIRST + tl.arange(0, WIDTH)
    inside = rows[:, None] < limit
    if FIRST + WIDTH > K:
        inside = inside & (columns[None, :] < K)
    return tl.load(base + rows[:, None] * stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _store_rows(base, value, rows, limit, stride, FIRST: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr):
    """The converse of `_load_rows`, in the dtype of the output."""
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
    """Two tuples of COUNT tiles, of the heads from `first` on: their first KA columns, and the KB after them."""
    main, tail = (), ()
    for h in tl.static_range(COUNT):
        head = base + (first + h) * K
        main = main + (_load_rows(head, rows, limit, stride_n, 0, KA, K),)
        tail = tail + (_load_rows(head, rows, limit, stride_n, KA, KB, K) if KB > 0 else 0,)
    return main, tail


@triton.jit
def _store_heads(
    base, main, tail, factor, rows, limit, stride_n, first,
    COUNT: tl.constexpr, K: tl.constexpr, KA: tl.constexpr, KO: tl.constexpr,
):  # fmt: skip
    """Write `factor` times the outputs of COUNT heads, KA + KO columns of each."""
    for h in tl.static_range(COUNT):
        head = base + (first + h) * K
        _store_rows(head, main[h] * factor, rows, limit, stride_n, 0, KA, K)
        if KO > 0:
            _store_rows(head, tail[h] * factor, rows, limit, stride_n, KA, KO, K)


@triton.jit
def _products(
    main, tail, base, rows, limit, stride,
    K: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr,
):  # fmt: skip
    """X Yᵀ, (M, N) float32: X = [main tail] is (M, KA + KB), Y are the `rows` of one head at `base`."""
    product = tl.dot(main, tl.trans(_load_rows(base, rows, limit, stride, 0, KA, K)))
    if KB > 0:
        product = tl.dot(tail, tl.trans(_load_rows(base, rows, limit, stride, KA, KB, K)), product)
    return product


@triton.jit
def _zeros(COUNT: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """COUNT tiles of zeros, (M, N) float32."""
    tiles = ()
    for _ in tl.static_range(COUNT):
        tiles = tiles + (tl.zeros((M, N), tl.float32),)
    return tiles


@triton.jit
def _add_mixed(sums, part, weights, STRIDE: tl.constexpr, COUNT: tl.constexpr):
    """sums[h] + weights[h·STRIDE]·part for COUNT sums: what one head's tile adds to all mixes it enters.

    Written as fma: whether a compiler fuses by itself depends on its version.
    """
    more = ()
    for h in tl.static_range(COUNT):
        more = more + (tl.fma(part, tl.load(weights + h * STRIDE), sums[h]),)
    return more


@triton.jit
def _add_products(
    main, tail, left, base, rows, limit, stride_n, first,
    COUNT: tl.constexpr, K: tl.constexpr, KA: tl.constexpr, KO: tl.constexpr,
):  # fmt: skip
    """Each head's sums, (M, KA) and (M, KO), plus left[h], (M, N), times the N `rows` of that head at `base`.

    Products on tensor cores take operands of half precision, so `left` is rounded; the sums stay in float32.
    """
    more_main, more_tail = (), ()
    for h in tl.static_range(COUNT):
        head = base + (first + h) * K
        right = _load_rows(head, rows, limit, stride_n, 0, KA, K)
        factor = left[h].to(right.dtype)
        more_main = more_main + (tl.dot(factor, right, main[h]),)
        if KO > 0:
            right = _load_rows(head, rows, limit, stride_n, KA, KO, K)
            more_tail = more_tail + (tl.dot(factor, right, tail[h]),)
        else:
            more_tail = more_tail + (tail[h],)
    return more_main, more_tail


@triton.jit
def _mixed_scores(
    q, q_tail, k_base, keys, tokens, stride_n, before_base, first,
    H: tl.constexpr, COUNT: tl.constexpr, K: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """W₀Q Kᵀ of COUNT heads from `first` on, (M, N) each: each of the H heads' scores is made once and added to all."""
    mixed = _zeros(COUNT, M, N)
    for f in tl.static_range(H):
        raw = _products(q[f], q_tail[f], k_base + f * K, keys, tokens, stride_n, K, KA, KB)
        mixed = _add_mixed(mixed, raw, before_base + first * H + f, H, COUNT)
    return mixed


@triton.jit
def _scores(
    q, q_tail, k_base, keys, tokens, stride_n, before_base, first,
    H: tl.constexpr, COUNT: tl.constexpr, K: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    """The scores that softmax sees, without the scale, of COUNT heads from `first` on.

    `q` holds all H heads with BEFORE, else those COUNT.
    """
    if BEFORE:
        scores = _mixed_scores(q, q_tail, k_base, keys, tokens, stride_n, before_base, first, H, COUNT, K, KA, KB, M, N)
    else:
        scores = ()
        for g in tl.static_range(COUNT):
            head = k_base + (first + g) * K
            scores = scores + (_products(q[g], q_tail[g], head, keys, tokens, stride_n, K, KA, KB),)
    return scores


@triton.jit
def _update_sums(
    largest, total, q, q_tail, k_base, keys, tokens, stride_n, before_base, factor, first,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, BEFORE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Online softmax: each row's largest score, and Σ 2^((score − largest)·factor), with N more keys; factor > 0."""
    scores = _scores(q, q_tail, k_base, keys, tokens, stride_n, before_base, first, H, G, K, KA, KB, M, N, BEFORE)
    next_largest, next_total = (), ()
    for g in tl.static_range(G):
        score = scores[g]
        if MASKED:
            score = tl.where(keys[None, :] < tokens, score, float("-inf"))
        higher = tl.maximum(largest[g], tl.max(score, 1))
        next_largest = next_largest + (higher,)
        # As the largest score grows, the old sum shrinks by the same power of two.
        part = tl.sum(tl.exp2(tl.fma(score, factor, -(higher * factor)[:, None])), 1)
        next_total = next_total + (total[g] * tl.exp2((largest[g] - higher) * factor) + part,)
    return next_largest, next_total


@triton.jit
def _row_sums(
    q_base, k_base, before_base, stride_n, rows, tokens, scale, first,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, CACHED: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    """L of M queries and G heads of one image: a tuple of G vectors (M,).

    In registers: two vectors a head, and the tile at hand. Whole tiles of keys need no mask; the last keys come in
    tiles of 16, masked.
    """
    q, q_tail = _load_heads(q_base, rows, tokens, stride_n, 0 if BEFORE else first, H if BEFORE else G, K, KA, KB)
    largest, total = (), ()
    for _ in tl.static_range(G):
        largest = largest + (tl.full((M,), float("-inf"), tl.float32),)
        total = total + (tl.zeros((M,), tl.float32),)
    factor = scale * LOG2_E
    whole = tokens // N * N
    for start in tl.range(0, whole, N):
        cached = (start >> 24) if CACHED else 0
        largest, total = _update_sums(
            largest, total, q, q_tail, k_base, start + tl.arange(0, N), tokens, stride_n, before_base + cached, factor,
            first, H, G, K, KA, KB, M, N, BEFORE, False,
        )  # fmt: skip
    LAST: tl.constexpr = min(N, 16)
    for start in tl.range(whole, tokens, LAST):
        cached = (start >> 24) if CACHED else 0
        largest, total = _update_sums(
            largest, total, q, q_tail, k_base, start + tl.arange(0, LAST), tokens, stride_n, before_base + cached,
            factor, first, H, G, K, KA, KB, M, LAST, BEFORE, True,
        )  # fmt: skip
    sums = ()
    for g in tl.static_range(G):
        sums = sums + (largest[g] * factor + tl.log2(total[g]),)
    return sums


@triton.jit
def _work_of_program(H: tl.constexpr, G: tl.constexpr, M: tl.constexpr):
    """A program's image, first head and token numbers (M,), of the grid (tiles · H/G, images).

    The groups of heads of one tile are neighbours in the grid, so that they run together and share reads in the cache.
    """
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
    """First pass: L of M queries and G heads of one image, into (B, H, tokens) float32."""
    image, first, rows = _work_of_program(H, G, M)
    begin = image * (8 * stride_b)
    sums = _row_sums(
        q_base + begin, k_base + begin, before_base, 8 * stride_n, rows, tokens, scale, first,
        H, G, K, KA, KB, M, N, CACHED, BEFORE,
    )  # fmt: skip
    for g in tl.static_range(G):
        tl.store(sums_base + (image * H + first + g) * tokens + rows, sums[g], mask=rows < tokens)


@triton.jit
def _load_row_values(base, rows, tokens, COUNT: tl.constexpr, DEFAULT: tl.constexpr):
    """One number a row (M,) of COUNT heads; with L = +∞ beyond the tokens, the maps are 2^−∞ = 0 there."""
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
    """A V of G heads from `first` on, for M `rows` of one image: two tuples of G tiles, (M, KA) and (M, KO).

    For each N keys: S of every head in turn, P from it, and P's share added to the G mixes it enters; then the mixes,
    complete, times V. In registers: G outputs, G mixed tiles, and one head's P (with BEFORE all H mixed scores).
    `sums` are L of the rows, for all heads; BY_COLUMN reads L of the columns from `sums_base` instead.
    """
    q, q_tail = _load_heads(q_base, rows, tokens, stride_n, 0, H, K, KA, KB)
    main, tail = _zeros(G, M, KA), _zeros(G, M, KO if KO > 0 else 16)
    for start in tl.range(0, tokens, N):
        columns = start + tl.arange(0, N)
        cached = (start >> 24) if CACHED else 0
        if BEFORE:
            scores = _mixed_scores(
                q, q_tail, k_base, columns, tokens, stride_n, before_base + cached, 0, H, H, K, KA, KB, M, N
            )
        # The bias starts the sum, also in columns beyond the tokens: V is zero there.
        mixed = ()
        for h in tl.static_range(G):
            mixed = mixed + (tl.zeros((M, N), tl.float32) + (tl.load(bias_base + first + h) if BIAS else 0.0),)
        for g in tl.static_range(H):
            if BEFORE:
                score = scores[g]
            else:
                score = _products(q[g], q_tail[g], k_base + g * K, columns, tokens, stride_n, K, KA, KB)
            if BY_COLUMN:
                total = tl.load(sums_base + g * tokens + columns, mask=columns < tokens, other=float("inf"))[None, :]
            else:
                total = sums[g][:, None]
            maps = tl.exp2(tl.fma(score, scale * LOG2_E, -total))
            mixed = _add_mixed(mixed, maps, mix_base + cached + first * H + g, H, G)
        main, tail = _add_products(main, tail, mixed, v_base, columns, tokens, v_stride_n, first, G, K, KA, KO)
    return main, tail


@triton.jit
def mix_kernel(
    q_base, k_base, v_base, mix_base, bias_base, before_base, sums_base, out_base,
    stride_b, stride_n, v_stride_b, v_stride_n, out_stride_b, out_stride_n,
    tokens, scale,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr, KO: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, CACHED: tl.constexpr, BEFORE: tl.constexpr, BIAS: tl.constexpr,
    BY_COLUMN: tl.constexpr,
):  # fmt: skip
    """Second pass: A V of M queries and G heads of one image, from L.

    BY_COLUMN: Aᵀ V, with keys as `q`, queries as `k` and dO as V, which is dV.
    """
    image, first, rows = _work_of_program(H, G, M)
    begin, sums_base = image * (8 * stride_b), sums_base + image * H * tokens
    sums = () if BY_COLUMN else _load_row_values(sums_base, rows, tokens, H, float("inf"))
    main, tail = _mixed_values(
        q_base + begin, k_base + begin, v_base + image * (8 * v_stride_b), mix_base, bias_base, before_base, sums_base,
        sums, 8 * stride_n, 8 * v_stride_n, rows, tokens, scale, first,
        H, G, K, KA, KB, KO, M, N, CACHED, BEFORE, BIAS, BY_COLUMN,
    )  # fmt: skip
    out_base += image * (8 * out_stride_b)
    _store_heads(out_base, main, tail, 1.0, rows, tokens, 8 * out_stride_n, first, G, K, KA, KO)


@triton.jit
def reattention_kernel(
    q_base, k_base, v_base, mix_base, bias_base, tokens, out_base,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr, KO: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, CACHED: tl.constexpr,
):  # fmt: skip
    """Re-Attention, both passes in one launch, on (B, tokens, H, K) tensors; the scale is in the queries already.

    Arguments go by position, inputs, then integers, then outputs: the order of TensorRT's ahead-of-time plugins.
    """
    _both_passes(
        q_base, k_base, v_base, mix_base, bias_base, mix_base, tokens, out_base,
        H, G, K, KA, KB, KO, M, N, CACHED, False,
    )  # fmt: skip


@triton.jit
def talking_heads_kernel(
    q_base, k_base, v_base, before_base, before_bias_base, mix_base, bias_base, tokens, out_base,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr, KO: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, CACHED: tl.constexpr,
):  # fmt: skip
    """The same for talking heads. `before_bias_base` is not read: softmax does not see it."""
    _both_passes(
        q_base, k_base, v_base, mix_base, bias_base, before_base, tokens, out_base,
        H, G, K, KA, KB, KO, M, N, CACHED, True,
    )  # fmt: skip


@triton.jit
def _both_passes(
    q_base, k_base, v_base, mix_base, bias_base, before_base, tokens, out_base,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr, KO: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, CACHED: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    """`sums_kernel` for all H heads, kept in registers, then `mix_kernel` for G of them: no memory between the passes.

    The price is that each of the H/G groups of a tile makes the sums of all heads again.
    """
    image, first, rows = _work_of_program(H, G, M)
    begin = image * tokens * (H * K)
    q_base, k_base = q_base + begin, k_base + begin
    COLUMNS: tl.constexpr = N // 2 if BEFORE else N  # the sums of all heads and their scores share the registers
    sums = _row_sums(
        q_base, k_base, before_base, H * K, rows, tokens, 1.0, 0, H, H, K, KA, KB, M, COLUMNS, CACHED, BEFORE
    )
    main, tail = _mixed_values(
        q_base, k_base, v_base + begin, mix_base, bias_base, before_base, mix_base, sums, H * K, H * K,
        rows, tokens, 1.0, first, H, G, K, KA, KB, KO, M, N, CACHED, BEFORE, True, False,
    )  # fmt: skip
    _store_heads(out_base + begin, main, tail, 1.0, rows, tokens, H * K, first, G, K, KA, KO)


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

    BY_COLUMN: dK = scale·dSᵀ Q, with keys as `q`, queries as `k`, V as `left` and dO as `right`. `row_sums` are D.
    For each N keys: dA of every head in turn, added to the G tiles of dP = Wᵀ dA; P of the G heads made again; dS; and
    dS times K added. In registers: G outputs and G tiles of dP. Without W₀ alone: dS would have to be mixed again.
    """
    image, first, rows = _work_of_program(H, G, M)
    begin, begin_of_sums = image * (8 * stride_b), (image * H + first) * tokens
    left_base += image * (8 * left_stride_b)
    right_base += image * (8 * right_stride_b)
    q_base += begin + first * K
    k_base += begin + first * K
    sums_base += begin_of_sums
    row_sums_base += begin_of_sums
    left, left_tail = _load_heads(left_base, rows, tokens, 8 * left_stride_n, 0, H, K, KA, KB)
    q, q_tail = _load_heads(q_base, rows, tokens, 8 * stride_n, 0, G, K, KA, KB)
    if not BY_COLUMN:
        sums = _load_row_values(sums_base, rows, tokens, G, float("inf"))
        row_sums = _load_row_values(row_sums_base, rows, tokens, G, 0.0)
    main, tail = _zeros(G, M, KA), _zeros(G, M, KO if KO > 0 else 16)
    for start in tl.range(0, tokens, N):
        columns = start + tl.arange(0, N)
        cached = (start >> 24) if CACHED else 0
        maps_grad = _zeros(G, M, N)
        for h in tl.static_range(H):
            head = right_base + h * K
            part = _products(left[h], left_tail[h], head, columns, tokens, 8 * right_stride_n, K, KA, KB)
            maps_grad = _add_mixed(maps_grad, part, mix_base + cached + h * H + first, 1, G)
        scores_grad = ()
        for g in tl.static_range(G):
            head = k_base + g * K
            score = _products(q[g], q_tail[g], head, columns, tokens, 8 * stride_n, K, KA, KB)
            if BY_COLUMN:
                place, inside = g * tokens + columns, columns < tokens
                total = tl.load(sums_base + place, mask=inside, other=float("inf"))[None, :]
                row_sum = tl.load(row_sums_base + place, mask=inside, other=0.0)[None, :]
            else:
                total, row_sum = sums[g][:, None], row_sums[g][:, None]
            maps = tl.exp2(tl.fma(score, scale * LOG2_E, -total))
            scores_grad = scores_grad + (maps * (maps_grad[g] - row_sum),)
        main, tail = _add_products(main, tail, scores_grad, k_base, columns, tokens, 8 * stride_n, 0, G, K, KA, KO)
    grad_base += image * (8 * grad_stride_b)
    _store_heads(grad_base, main, tail, scale, rows, tokens, 8 * grad_stride_n, first, G, K, KA, KO)


@triton.jit
def weight_grad_kernel(
    q_base, k_base, v_base, mix_base, sums_base, out_grad_base, row_sums_base, shares_base,
    stride_b, stride_n, out_stride_b, out_stride_n,
    tokens, scale,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr, KO: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, CACHED: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """dW and D, for M queries and one head g of one image (G = 1).

    R_g = P_g [V_1 … V_H] is made in blocks of C of its H·K columns, an (M, C) tile of registers, and multiplied by dO.
    Summed over the queries that is the program's share of dW[:, g], still a number a column: (B·tiles, H, H·K), added
    up by the caller. Weighted by W[h, g] and summed over the columns it is D = Σ_j P ⊙ dP: (B, H, tokens).
    """
    image, g = tl.program_id(1).to(tl.int64), tl.program_id(0) % H
    rows = tl.program_id(0) // H * M + tl.arange(0, M)
    begin = image * (8 * stride_b)
    head = begin + g * K
    place = (image * H + g) * tokens + rows
    sums = tl.load(sums_base + place, mask=rows < tokens, other=float("inf"))
    main = _load_rows(q_base + head, rows, tokens, 8 * stride_n, 0, KA, K)
    tail = _load_rows(q_base + head, rows, tokens, 8 * stride_n, KA, KB, K) if KB > 0 else 0
    row_sums = tl.zeros((M,), tl.float32)
    share_base = shares_base + (image * tl.num_programs(0) + tl.program_id(0)) * (H * K)
    for block in tl.range(0, H * K, C):
        column = block + tl.arange(0, C)
        inside = column[None, :] < H * K
        product = tl.zeros((M, C), tl.float32)
        for start in tl.range(0, tokens, N):
            keys = start + tl.arange(0, N)
            score = _products(main, tail, k_base + head, keys, tokens, 8 * stride_n, K, KA, KB)
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
