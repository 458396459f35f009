# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Triton compiles the annotations of a kernel too, and knows constexpr alone.
# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005 - Triton joins tuples by +, and their lengths are no part of their types
"""What the flash kernels do with tiles: read, write and multiply those of one head, and mix them over heads.

A tile of a head, (M, K), is a tuple of its first KA columns and, where KB is not 0, of the KB after them: the sides of
a tensor are powers of two. `rows` and `columns` are token numbers; the heads of a token stand side by side, K apart.
Constants of a kernel are in SIZES, whose places have the names of `Sizes`. Triton 3.6 reads a place as a plain number,
which it takes as an argument and in a condition, but not in a shape or range: `H: tl.constexpr = SIZES[HEADS]` it does.
"""

import triton
import triton.language as tl

from vitx.models.flash.sizes import Sizes

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
HEADS, GROUP, WIDTH, MAIN, TAIL, STORED, ROWS, COLUMNS, STRIDE, BEFORE, BIAS, BY_COLUMN, BLOCK = (
    tl.constexpr(place) for place in range(len(Sizes._fields))
)


@triton.jit
def load_rows(base, rows, tokens, stride, FIRST: tl.constexpr, COUNT: tl.constexpr, K: tl.constexpr):
    """COUNT columns from FIRST on of `rows` of one head's (tokens, K); zeros beyond the tokens and K columns."""
    columns = FIRST + tl.arange(0, COUNT)
    inside = rows[:, None] < tokens
    if FIRST + COUNT > K:
        inside = inside & (columns[None, :] < K)
    return tl.load(base + rows[:, None] * stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _store_rows(base, value, rows, tokens, stride, FIRST: tl.constexpr, COUNT: tl.constexpr, K: tl.constexpr):
    """The converse of `load_rows`, in the dtype of the output."""
    columns = FIRST + tl.arange(0, COUNT)
    inside = rows[:, None] < tokens
    if FIRST + COUNT > K:
        inside = inside & (columns[None, :] < K)
    tl.store(base + rows[:, None] * stride + columns[None, :], value.to(base.dtype.element_ty), mask=inside)


@triton.jit
def load_head(base, rows, tokens, stride, SIZES: tl.constexpr):
    """The tile of one head whose token 0 is at `base`."""
    K: tl.constexpr = SIZES[WIDTH]
    KA: tl.constexpr = SIZES[MAIN]
    KB: tl.constexpr = SIZES[TAIL]
    tile = (load_rows(base, rows, tokens, stride, 0, KA, K),)
    if KB > 0:
        tile = tile + (load_rows(base, rows, tokens, stride, KA, KB, K),)
    return tile


@triton.jit
def load_heads(base, rows, tokens, stride, first, COUNT: tl.constexpr, SIZES: tl.constexpr):
    """A tuple of the tiles of COUNT heads from `first` on."""
    tiles = ()
    for h in tl.static_range(COUNT):
        tiles = tiles + (load_head(base + (first + h) * SIZES[WIDTH], rows, tokens, stride, SIZES),)
    return tiles


@triton.jit
def store_heads(base, outputs, factor, rows, tokens, first, SIZES: tl.constexpr):
    """Write `factor` times the outputs of the G heads from `first` on, KA + KO columns of each."""
    G: tl.constexpr = SIZES[GROUP]
    K: tl.constexpr = SIZES[WIDTH]
    KA: tl.constexpr = SIZES[MAIN]
    KO: tl.constexpr = SIZES[STORED]
    DENSE: tl.constexpr = SIZES[HEADS] * K
    for h in tl.static_range(G):
        head = base + (first + h) * K
        _store_rows(head, outputs[h][0] * factor, rows, tokens, DENSE, 0, KA, K)
        if KO > 0:
            _store_rows(head, outputs[h][1] * factor, rows, tokens, DENSE, KA, KO, K)


@triton.jit
def products(tile, base, rows, tokens, stride, SIZES: tl.constexpr):
    """X Yᵀ, (M, N) float32: X is the tile of a head, (M, K), Y are the N `rows` of one head at `base`."""
    K: tl.constexpr = SIZES[WIDTH]
    KA: tl.constexpr = SIZES[MAIN]
    KB: tl.constexpr = SIZES[TAIL]
    product = tl.dot(tile[0], tl.trans(load_rows(base, rows, tokens, stride, 0, KA, K)))
    if KB > 0:
        product = tl.dot(tile[1], tl.trans(load_rows(base, rows, tokens, stride, KA, KB, K)), product)
    return product


@triton.jit
def zeros(COUNT: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """COUNT tensors of zeros, (M, N) float32."""
    tensors = ()
    for _ in tl.static_range(COUNT):
        tensors = tensors + (tl.zeros((M, N), tl.float32),)
    return tensors


@triton.jit
def zero_outputs(SIZES: tl.constexpr):
    """The outputs of G heads before anything is added: a tuple of tiles of (M, KA) and (M, KO), float32."""
    G: tl.constexpr = SIZES[GROUP]
    M: tl.constexpr = SIZES[ROWS]
    KA: tl.constexpr = SIZES[MAIN]
    KO: tl.constexpr = SIZES[STORED]
    outputs = ()
    for _ in tl.static_range(G):
        output = (tl.zeros((M, KA), tl.float32),)
        if KO > 0:
            output = output + (tl.zeros((M, KO), tl.float32),)
        outputs = outputs + (output,)
    return outputs


@triton.jit
def add_products(outputs, left, base, rows, tokens, stride, first, SIZES: tl.constexpr):
    """Each of G heads' outputs, plus left[h], (M, N), times the N `rows` of that head, the `first` + h-th at `base`.

    Products on tensor cores take operands of half precision, so `left` is rounded; the sums stay in float32.
    """
    G: tl.constexpr = SIZES[GROUP]
    K: tl.constexpr = SIZES[WIDTH]
    KA: tl.constexpr = SIZES[MAIN]
    KO: tl.constexpr = SIZES[STORED]
    more = ()
    for h in tl.static_range(G):
        head = base + (first + h) * K
        right = load_rows(head, rows, tokens, stride, 0, KA, K)
        factor = left[h].to(right.dtype)
        output = (tl.dot(factor, right, outputs[h][0]),)
        if KO > 0:
            right = load_rows(head, rows, tokens, stride, KA, KO, K)
            output = output + (tl.dot(factor, right, outputs[h][1]),)
        more = more + (output,)
    return more


@triton.jit
def add_mixed(sums, part, weights, STEP: tl.constexpr, COUNT: tl.constexpr):
    """sums[h] + weights[h·STEP]·part for COUNT sums: what one head's tile adds to all mixes it enters.

    Written as fma: whether a compiler fuses by itself depends on its version.
    """
    more = ()
    for h in tl.static_range(COUNT):
        more = more + (tl.fma(part, tl.load(weights + h * STEP), sums[h]),)
    return more


@triton.jit
def read_each_time(weights, start, SIZES: tl.constexpr):
    """The pointer `weights`, in a loop over `start`: with two mixes the weights are read from the cache for each tile.

    For that their address depends on the loop, by a number that is always zero; otherwise the compiler would keep all
    of them in registers.
    """
    return weights + ((start >> 24) if SIZES[BEFORE] else 0)


@triton.jit
def load_row_values(base, rows, tokens, COUNT: tl.constexpr, DEFAULT: tl.constexpr):
    """One number a row (M,) of COUNT heads; with L = +∞ beyond the tokens, the maps are 2^−∞ = 0 there."""
    values = ()
    for h in tl.static_range(COUNT):
        values = values + (tl.load(base + h * tokens + rows, mask=rows < tokens, other=DEFAULT),)
    return values
