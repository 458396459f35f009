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

Letters are those of `Sizes`: H heads, G heads whose outputs a program makes, K head width, M rows and N columns of a
tile. `rows` and `columns` are token numbers.
"""

import triton
import triton.language as tl

from vitx.models.flash.tile_functions import (
    BEFORE,
    BIAS,
    BLOCK,
    BY_COLUMN,
    COLUMNS,
    GROUP,
    HEADS,
    LOG2_E,
    ROWS,
    STRIDE,
    WIDTH,
    add_mixed,
    add_products,
    load_head,
    load_heads,
    load_row_values,
    products,
    read_each_time,
    store_heads,
    zero_outputs,
    zeros,
)


@triton.jit
def _mixed_scores(q, k_base, columns, tokens, before_base, first, COUNT: tl.constexpr, SIZES: tl.constexpr):
    """W₀Q Kᵀ of COUNT heads from `first` on, (M, N) each: each of the H heads' scores is made once and added to all."""
    H: tl.constexpr = SIZES[HEADS]
    mixed = zeros(COUNT, SIZES[ROWS], columns.shape[0])
    for f in tl.static_range(H):
        raw = products(q[f], k_base + f * SIZES[WIDTH], columns, tokens, SIZES[STRIDE], SIZES)
        mixed = add_mixed(mixed, raw, before_base + first * H + f, H, COUNT)
    return mixed


@triton.jit
def _scores(q, k_base, columns, tokens, before_base, first, COUNT: tl.constexpr, SIZES: tl.constexpr):
    """The scores that softmax sees, without the scale, of COUNT heads from `first` on.

    `q` holds all H heads with BEFORE, else those COUNT.
    """
    if SIZES[BEFORE]:
        scores = _mixed_scores(q, k_base, columns, tokens, before_base, first, COUNT, SIZES)
    else:
        scores = ()
        for g in tl.static_range(COUNT):
            head = k_base + (first + g) * SIZES[WIDTH]
            scores = scores + (products(q[g], head, columns, tokens, SIZES[STRIDE], SIZES),)
    return scores


@triton.jit
def _update_sums(largest, total, scores, columns, tokens, factor, COUNT: tl.constexpr, MASKED: tl.constexpr):
    """Online softmax: each row's largest score, and Σ 2^((score − largest)·factor), with N more keys; factor > 0."""
    next_largest, next_total = (), ()
    for g in tl.static_range(COUNT):
        score = scores[g]
        if MASKED:
            score = tl.where(columns[None, :] < tokens, score, float("-inf"))
        higher = tl.maximum(largest[g], tl.max(score, 1))
        next_largest = next_largest + (higher,)
        # As the largest score grows, the old sum shrinks by the same power of two.
        part = tl.sum(tl.exp2(tl.fma(score, factor, -(higher * factor)[:, None])), 1)
        next_total = next_total + (total[g] * tl.exp2((largest[g] - higher) * factor) + part,)
    return next_largest, next_total


@triton.jit
def _row_sums(
    q_base, k_base, before_base, rows, tokens, scale, first,
    COUNT: tl.constexpr, N: tl.constexpr, SIZES: tl.constexpr,
):  # fmt: skip
    """L of M queries and COUNT heads of one image: a tuple of vectors (M,).

    In registers: two vectors a head, and the tile at hand. Whole tiles of N keys need no mask; the last keys come in
    tiles of 16, masked.
    """
    H: tl.constexpr = SIZES[HEADS]
    M: tl.constexpr = SIZES[ROWS]
    if SIZES[BEFORE]:
        q = load_heads(q_base, rows, tokens, SIZES[STRIDE], 0, H, SIZES)
    else:
        q = load_heads(q_base, rows, tokens, SIZES[STRIDE], first, COUNT, SIZES)
    largest, total = (), ()
    for _ in tl.static_range(COUNT):
        largest = largest + (tl.full((M,), float("-inf"), tl.float32),)
        total = total + (tl.zeros((M,), tl.float32),)
    factor = scale * LOG2_E
    whole = tokens // N * N
    for start in tl.range(0, whole, N):
        before = read_each_time(before_base, start, SIZES)
        columns = start + tl.arange(0, N)
        scores = _scores(q, k_base, columns, tokens, before, first, COUNT, SIZES)
        largest, total = _update_sums(largest, total, scores, columns, tokens, factor, COUNT, False)
    LAST: tl.constexpr = min(N, 16)
    for start in tl.range(whole, tokens, LAST):
        before = read_each_time(before_base, start, SIZES)
        columns = start + tl.arange(0, LAST)
        scores = _scores(q, k_base, columns, tokens, before, first, COUNT, SIZES)
        largest, total = _update_sums(largest, total, scores, columns, tokens, factor, COUNT, True)
    sums = ()
    for g in tl.static_range(COUNT):
        sums = sums + (largest[g] * factor + tl.log2(total[g]),)
    return sums


@triton.jit
def _work_of_program(SIZES: tl.constexpr):
    """A program's image, first head and token numbers (M,), of the grid (tiles · H/G, images).

    The groups of heads of one tile are neighbours in the grid, so that they run together and share reads in the cache.
    """
    GROUPS: tl.constexpr = SIZES[HEADS] // SIZES[GROUP]
    M: tl.constexpr = SIZES[ROWS]
    first, image = tl.program_id(0) % GROUPS * SIZES[GROUP], tl.program_id(1).to(tl.int64)
    return image, first, tl.program_id(0) // GROUPS * M + tl.arange(0, M)


@triton.jit
def sums_kernel(q_base, k_base, before_base, sums_base, tokens, scale, SIZES: tl.constexpr):
    """First pass: L of M queries and G heads of one image, into (B, H, tokens) float32."""
    G: tl.constexpr = SIZES[GROUP]
    scale = tl.cast(scale, tl.float32)  # torch.compile passes it as float64
    image, first, rows = _work_of_program(SIZES)
    begin = image * tokens * SIZES[STRIDE]
    sums = _row_sums(q_base + begin, k_base + begin, before_base, rows, tokens, scale, first, G, SIZES[COLUMNS], SIZES)
    for g in tl.static_range(G):
        tl.store(sums_base + (image * SIZES[HEADS] + first + g) * tokens + rows, sums[g], mask=rows < tokens)


@triton.jit
def _mixed_values(q_base, k_base, v_base, mixes, sums, rows, tokens, scale, first, SIZES: tl.constexpr):
    """A V of G heads from `first` on, for M `rows` of one image.

    For each N keys: S of every head in turn, P from it, and P's share added to the G mixes it enters; then the mixes,
    complete, times V. In registers: G outputs, G mixed tiles, and one head's P (with BEFORE all H mixed scores).
    `mixes` are the pointers to W, b and W₀. `sums` are L of the rows, for all heads; BY_COLUMN they are a pointer, from
    which L of the columns is read.
    """
    H: tl.constexpr = SIZES[HEADS]
    G: tl.constexpr = SIZES[GROUP]
    M: tl.constexpr = SIZES[ROWS]
    N: tl.constexpr = SIZES[COLUMNS]
    V_STRIDE: tl.constexpr = H * SIZES[WIDTH] if SIZES[BY_COLUMN] else SIZES[STRIDE]  # BY_COLUMN it is dO, dense
    mix_base, bias_base, before_base = mixes
    q = load_heads(q_base, rows, tokens, SIZES[STRIDE], 0, H, SIZES)
    outputs = zero_outputs(SIZES)
    for start in tl.range(0, tokens, N):
        columns = start + tl.arange(0, N)
        if SIZES[BEFORE]:
            before = read_each_time(before_base, start, SIZES)
            scores = _mixed_scores(q, k_base, columns, tokens, before, 0, H, SIZES)
        weights = read_each_time(mix_base, start, SIZES)
        # The bias starts the sum, also in columns beyond the tokens: V is zero there.
        mixed = ()
        for h in tl.static_range(G):
            bias = tl.load(bias_base + first + h) if SIZES[BIAS] else 0.0
            mixed = mixed + (tl.zeros((M, N), tl.float32) + bias,)
        for g in tl.static_range(H):
            if SIZES[BEFORE]:
                score = scores[g]
            else:
                score = products(q[g], k_base + g * SIZES[WIDTH], columns, tokens, SIZES[STRIDE], SIZES)
            if SIZES[BY_COLUMN]:
                total = tl.load(sums + g * tokens + columns, mask=columns < tokens, other=float("inf"))[None, :]
            else:
                total = sums[g][:, None]
            maps = tl.exp2(tl.fma(score, scale * LOG2_E, -total))
            mixed = add_mixed(mixed, maps, weights + first * H + g, H, G)
        outputs = add_products(outputs, mixed, v_base, columns, tokens, V_STRIDE, first, SIZES)
    return outputs


@triton.jit
def mix_kernel(
    q_base, k_base, v_base, mix_base, bias_base, before_base, sums_base, out_base, tokens, scale, SIZES: tl.constexpr
):
    """Second pass: A V of M queries and G heads of one image, from L.

    BY_COLUMN: Aᵀ V, with keys as `q`, queries as `k` and dO as V, which is dV.
    """
    scale = tl.cast(scale, tl.float32)  # torch.compile passes it as float64
    H: tl.constexpr = SIZES[HEADS]
    DENSE: tl.constexpr = H * SIZES[WIDTH]
    image, first, rows = _work_of_program(SIZES)
    begin, sums = image * tokens, sums_base + image * H * tokens
    q_base += begin * SIZES[STRIDE]
    k_base += begin * SIZES[STRIDE]
    v_base += begin * (DENSE if SIZES[BY_COLUMN] else SIZES[STRIDE])
    if not SIZES[BY_COLUMN]:
        sums = load_row_values(sums, rows, tokens, H, float("inf"))
    mixes = mix_base, bias_base, before_base
    outputs = _mixed_values(q_base, k_base, v_base, mixes, sums, rows, tokens, scale, first, SIZES)
    store_heads(out_base + begin * DENSE, outputs, 1.0, rows, tokens, first, SIZES)


@triton.jit
def reattention_kernel(q_base, k_base, v_base, mix_base, bias_base, tokens, out_base, SIZES: tl.constexpr):
    """Re-Attention, both passes in one launch, on (B, tokens, H, K) tensors; the scale is in the queries already.

    Arguments go by position, inputs, then integers, then outputs: the order of TensorRT's ahead-of-time plugins.
    SIZES are with `bias` and without `before`.
    """
    _both_passes(q_base, k_base, v_base, (mix_base, bias_base, mix_base), tokens, out_base, SIZES)


@triton.jit
def talking_heads_kernel(
    q_base, k_base, v_base, before_base, before_bias_base, mix_base, bias_base, tokens, out_base, SIZES: tl.constexpr
):
    """The same for talking heads, `before` too. `before_bias_base` is not read: softmax does not see it."""
    _both_passes(q_base, k_base, v_base, (mix_base, bias_base, before_base), tokens, out_base, SIZES)


@triton.jit
def _both_passes(q_base, k_base, v_base, mixes, tokens, out_base, SIZES: tl.constexpr):
    """`sums_kernel` for all H heads, kept in registers, then `mix_kernel` for G of them: no memory between the passes.

    The price is that each of the H/G groups of a tile makes the sums of all heads again.
    """
    H: tl.constexpr = SIZES[HEADS]
    N: tl.constexpr = SIZES[COLUMNS]
    image, first, rows = _work_of_program(SIZES)
    begin = image * tokens * (H * SIZES[WIDTH])
    q_base, k_base = q_base + begin, k_base + begin
    SUMS_N: tl.constexpr = N // 2 if SIZES[BEFORE] else N  # the sums of all heads and their scores share the registers
    sums = _row_sums(q_base, k_base, mixes[2], rows, tokens, 1.0, 0, H, SUMS_N, SIZES)
    outputs = _mixed_values(q_base, k_base, v_base + begin, mixes, sums, rows, tokens, 1.0, first, SIZES)
    store_heads(out_base + begin, outputs, 1.0, rows, tokens, first, SIZES)


@triton.jit
def score_grad_kernel(
    q_base, k_base, left_base, right_base, mix_base, sums_base, row_sums_base, grad_base,
    tokens, scale, SIZES: tl.constexpr,
):  # fmt: skip
    """dQ = scale·dS K of M queries and G heads of one image, with dA = left·rightᵀ: dO as `left`, V as `right`.

    BY_COLUMN: dK = scale·dSᵀ Q, with keys as `q`, queries as `k`, V as `left` and dO as `right`. `row_sums` are D.
    For each N keys: dA of every head in turn, added to the G tiles of dP = Wᵀ dA; P of the G heads made again; dS; and
    dS times K added. In registers: G outputs and G tiles of dP. Without W₀ alone: dS would have to be mixed again.
    """
    scale = tl.cast(scale, tl.float32)  # torch.compile passes it as float64
    H: tl.constexpr = SIZES[HEADS]
    G: tl.constexpr = SIZES[GROUP]
    K: tl.constexpr = SIZES[WIDTH]
    N: tl.constexpr = SIZES[COLUMNS]
    DENSE: tl.constexpr = H * K
    LEFT: tl.constexpr = SIZES[STRIDE] if SIZES[BY_COLUMN] else DENSE
    RIGHT: tl.constexpr = DENSE if SIZES[BY_COLUMN] else SIZES[STRIDE]
    image, first, rows = _work_of_program(SIZES)
    begin, begin_of_sums = image * tokens, (image * H + first) * tokens
    left_base += begin * LEFT
    right_base += begin * RIGHT
    q_base += begin * SIZES[STRIDE] + first * K
    k_base += begin * SIZES[STRIDE] + first * K
    sums_base += begin_of_sums
    row_sums_base += begin_of_sums
    left = load_heads(left_base, rows, tokens, LEFT, 0, H, SIZES)
    q = load_heads(q_base, rows, tokens, SIZES[STRIDE], 0, G, SIZES)
    if not SIZES[BY_COLUMN]:
        sums = load_row_values(sums_base, rows, tokens, G, float("inf"))
        row_sums = load_row_values(row_sums_base, rows, tokens, G, 0.0)
    outputs = zero_outputs(SIZES)
    for start in tl.range(0, tokens, N):
        columns = start + tl.arange(0, N)
        weights = read_each_time(mix_base, start, SIZES)
        maps_grad = zeros(G, SIZES[ROWS], N)
        for h in tl.static_range(H):
            part = products(left[h], right_base + h * K, columns, tokens, RIGHT, SIZES)
            maps_grad = add_mixed(maps_grad, part, weights + h * H + first, 1, G)
        scores_grad = ()
        for g in tl.static_range(G):
            score = products(q[g], k_base + g * K, columns, tokens, SIZES[STRIDE], SIZES)
            if SIZES[BY_COLUMN]:
                place, inside = g * tokens + columns, columns < tokens
                total = tl.load(sums_base + place, mask=inside, other=float("inf"))[None, :]
                row_sum = tl.load(row_sums_base + place, mask=inside, other=0.0)[None, :]
            else:
                total, row_sum = sums[g][:, None], row_sums[g][:, None]
            maps = tl.exp2(tl.fma(score, scale * LOG2_E, -total))
            scores_grad = scores_grad + (maps * (maps_grad[g] - row_sum),)
        outputs = add_products(outputs, scores_grad, k_base, columns, tokens, SIZES[STRIDE], 0, SIZES)
    store_heads(grad_base + begin * DENSE, outputs, scale, rows, tokens, first, SIZES)


@triton.jit
def weight_grad_kernel(
    q_base, k_base, v_base, mix_base, sums_base, out_grad_base, row_sums_base, shares_base,
    tokens, scale, SIZES: tl.constexpr,
):  # fmt: skip
    """dW and D, for M queries and one head g of one image (G = 1).

    R_g = P_g [V_1 … V_H] is made in blocks of C of its H·K columns, an (M, C) tile of registers, and multiplied by dO.
    Summed over the queries that is the program's share of dW[:, g], still a number a column: (B·tiles, H, H·K), added
    up by the caller. Weighted by W[h, g] and summed over the columns it is D = Σ_j P ⊙ dP: (B, H, tokens).
    """
    scale = tl.cast(scale, tl.float32)  # torch.compile passes it as float64
    H: tl.constexpr = SIZES[HEADS]
    M: tl.constexpr = SIZES[ROWS]
    N: tl.constexpr = SIZES[COLUMNS]
    C: tl.constexpr = SIZES[BLOCK]
    DENSE: tl.constexpr = H * SIZES[WIDTH]
    image, g, rows = _work_of_program(SIZES)
    begin = image * tokens * SIZES[STRIDE]
    head = begin + g * SIZES[WIDTH]
    place = (image * H + g) * tokens + rows
    sums = tl.load(sums_base + place, mask=rows < tokens, other=float("inf"))
    q = load_head(q_base + head, rows, tokens, SIZES[STRIDE], SIZES)
    row_sums = tl.zeros((M,), tl.float32)
    share_base = shares_base + (image * tl.num_programs(0) + tl.program_id(0)) * DENSE
    for block in tl.range(0, DENSE, C):
        column = block + tl.arange(0, C)
        inside = column[None, :] < DENSE
        product = tl.zeros((M, C), tl.float32)
        for start in tl.range(0, tokens, N):
            keys = start + tl.arange(0, N)
            score = products(q, k_base + head, keys, tokens, SIZES[STRIDE], SIZES)
            maps = tl.exp2(tl.fma(score, scale * LOG2_E, -sums[:, None]))
            there = (keys[:, None] < tokens) & inside
            v = tl.load(v_base + begin + column[None, :] + keys[:, None] * SIZES[STRIDE], mask=there, other=0.0)
            product += tl.dot(maps.to(v.dtype), v)
        grads = image * tokens * DENSE + column[None, :]
        there = (rows[:, None] < tokens) & inside
        out_grad = tl.load(out_grad_base + grads + rows[:, None] * DENSE, mask=there, other=0.0)
        product *= out_grad.to(tl.float32)
        weights = tl.load(mix_base + column // SIZES[WIDTH] * H + g, mask=column < DENSE, other=0.0)
        row_sums += tl.sum(product * weights[None, :], 1)
        tl.store(share_base + column, tl.sum(product, 0), mask=column < DENSE)
    tl.store(row_sums_base + place, row_sums, mask=rows < tokens)
