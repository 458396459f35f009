"""Attention with a mix over heads: the operator `vitx::reattention`, which writes no N×N map, and the plain path.

Re-Attention in evaluation mode (or without BatchNorm) and talking heads are `O = (W softmax(W₀·scale·QKᵀ + b₀) + b) V`
with H×H mixes over heads W and W₀. The Triton kernels of kernels.py compute it tile by tile; where they cannot run, the
maps are written out. `why_not_flash` says where, and why. docs/models.md tells what is measured.

Shape letters: B batch, H heads, N tokens, K head width.
"""

import functools
import importlib.util
import os
import warnings
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitx.models.flash.sizes import Sizes

# Triton's interpreter runs the kernels on a CPU, for tests; Triton reads the variable when it is imported.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TRITON_INSTALLED = importlib.util.find_spec("triton") is not None
DTYPES = (torch.float16, torch.bfloat16)
# What the kernels were tested with: the queries of all heads lie in shared memory; 1,025 tokens are 512 px at patch 16.
LARGEST_HEADS, LARGEST_WIDTH, LARGEST_TOKENS = 16, 64, 1025
SMALLEST_TILE = 16  # rows and columns of a product on tensor cores
WIDTH_MULTIPLE = 8  # so many elements of half precision are the 16 bytes that one load reads


class Mixes(NamedTuple):
    """The mixes over heads: of the maps, weight W (H, H) and bias b (H,); of the scores before softmax, W₀ and b₀."""

    weight: Tensor
    bias: Tensor | None = None
    before_weight: Tensor | None = None
    before_bias: Tensor | None = None


class Tiles(NamedTuple):
    """What one program (a block of threads) computes, and how it is compiled.

    queries: rows of the output, 16 a warp. keys: columns of the maps that it holds at a time. warps: of 32 threads.
    stages: tiles of keys in flight; with 1 nothing is fetched ahead. heads: outputs it makes, at most.
    """

    queries: int = 32
    keys: int = 16
    warps: int = 2
    stages: int = 2
    heads: int = 4


WEIGHT_GRAD_COLUMNS = 128
# "talking" are both passes of talking heads.
Launch = Literal["sums", "out", "talking", "weight_grad", "v_grad", "score_grad"]


def tiles_of(launch: Launch, heads: int, width: int) -> Tiles:
    """The tiles of one of the kernels' launches: the fastest of a sweep on an H100 (docs/benchmarks.md).

    Fetching the next tile of keys while one is computed is worth more than registers that do not spill; with two mixes
    Triton would also fetch each weight of the tile, and compile for minutes. The queries of all heads lie in shared
    memory, of which most GPUs give 99 KiB to a block: wide heads take fewer rows.
    """
    if launch in ("sums", "weight_grad"):  # of one head
        return Tiles(128, 32, 4, 3, 1)
    wide, few = heads * width > 512, 4 if width <= 32 else 3
    if launch == "talking":  # of a sweep on paper: it has not been timed
        return Tiles(32, 16, 2, 1, few) if wide else Tiles(64, 16, 4, 1, few)
    if wide:
        return Tiles(16, 16, 1, 2, 4)
    if launch == "out" and width <= 32:
        return Tiles(stages=3, heads=6)
    return Tiles(heads=few if launch == "score_grad" else 6)


def flash_reattention(q_BHNK: Tensor, k_BHNK: Tensor, v_BHNK: Tensor, mixes: Mixes, scale: float) -> Tensor:
    """`(W softmax(W₀·scale·QKᵀ + b₀) + b) V` by the kernels; Q, K, V and the result (B, H, N, K) in half precision.

    For a caller that knows they can run (`why_not_flash`). It is differentiable in all tensors. The gradient of b₀ is
    zero: it adds the same to a whole row of scores, which softmax does not see. Heads whose width is no multiple of 8
    are copied into wider ones; a layer avoids that by padding its weights.
    """
    width = q_BHNK.shape[-1]
    qkv = [_padded(part) for part in (q_BHNK, k_BHNK, v_BHNK)] if width % WIDTH_MULTIPLE else [q_BHNK, k_BHNK, v_BHNK]
    floats = [None if part is None else part.float().contiguous() for part in mixes]
    out: Tensor = torch.ops.vitx.reattention(*qkv, *floats, scale)[0]
    return out[..., :width] if width % WIDTH_MULTIPLE else out


def padded_width(width: int) -> int:
    """The head width, rounded up to a multiple of 8, that the kernels read without a copy."""
    return _ceil_div(width, WIDTH_MULTIPLE) * WIDTH_MULTIPLE


def _padded(part_BHNK: Tensor) -> Tensor:
    width = part_BHNK.shape[-1]
    # Padded as (B, N, H, K), so that the heads of a token stay side by side in memory.
    return F.pad(part_BHNK.transpose(1, 2), (0, padded_width(width) - width)).transpose(1, 2)


def warn_plain(device: str, dtype: torch.dtype, reason: str) -> None:
    """Warn, once a reason, that a GPU writes the maps out; elsewhere, and in float32, nobody expects the kernels."""
    if device == "cuda" and dtype in DTYPES:
        _warn_once(reason)


def why_not_flash(device: str, dtype: torch.dtype, heads: int, tokens: int, width: int) -> str | None:
    """Why the kernels cannot run on queries like these; None when they can."""
    if device != "cuda" and not INTERPRETED:
        return f"the tensors are on '{device}'"
    if dtype not in DTYPES:
        return f"the dtype is {str(dtype).removeprefix('torch.')}, not float16 or bfloat16"
    if (beyond := beyond_limits(heads, tokens, width)) is not None:
        return "{} is {}, above {}".format(*beyond)
    return None if TRITON_INSTALLED else "Triton is not installed"


def beyond_limits(heads: int, tokens: int, width: int) -> tuple[str, int, int] | None:
    """Name, value and limit of the first size that is too large for the kernels; None when all fit."""
    limits = (("heads", heads, LARGEST_HEADS), ("tokens", tokens, LARGEST_TOKENS), ("head width", width, LARGEST_WIDTH))
    return next((size for size in limits if size[1] > size[2]), None)


def plain_reattention(q_BHNK: Tensor, k_BHNK: Tensor, v_BHNK: Tensor, mixes: Mixes, scale: float) -> Tensor:
    """`flash_reattention` with the maps written out, in the tensors' own dtype: what the kernels are tested against."""
    from vitx.models.head_mix import mix_heads

    scores_BHNN = (q_BHNK * scale) @ k_BHNK.transpose(-2, -1)
    if mixes.before_weight is not None:
        scores_BHNN = mix_heads(scores_BHNN, *_like(scores_BHNN, mixes.before_weight, mixes.before_bias))
    maps_BHNN = scores_BHNN.softmax(dim=-1)
    return mix_heads(maps_BHNN, *_like(maps_BHNN, mixes.weight, mixes.bias)) @ v_BHNK


@functools.cache
def _kernels() -> Any:
    from vitx.models.flash import kernels

    return kernels


@functools.cache
def _warn_once(reason: str) -> None:
    warnings.warn(f"Re-Attention writes its maps out: {reason}", stacklevel=2)


def _like(maps: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return weight.to(maps.dtype), None if bias is None else bias.to(maps.dtype)


def kernel_constants(heads: int, width: int, tiles: Tiles, **more: Any) -> dict[str, Any]:
    """The constants a kernel is compiled with (see Sizes; `more` are fields of it), by the name of its parameter.

    A tile's sides are powers of two, so a width of 33 to 48 is read as KA = 32 and KB = 16 columns rather than as 64,
    which would multiply a third more. KO is what of KB is stored: 8 or 16.
    """
    first = max(SMALLEST_TILE, 1 << (width.bit_length() - 1))
    rest = max(0, width - first)
    if rest > SMALLEST_TILE:
        first, rest = 2 * first, 0
    sizes = Sizes(
        heads=heads,
        group=heads_per_program(heads, tiles),
        width=width,
        main=first,
        tail=SMALLEST_TILE if rest else 0,
        stored=padded_width(rest),
        rows=tiles.queries,
        columns=tiles.keys,
        stride=heads * width,
    )
    return {"SIZES": tuple(sizes._replace(**more))}


def heads_per_program(heads: int, tiles: Tiles) -> int:
    """How many heads' outputs a program makes: the largest divisor of `heads` that is at most `tiles.heads`."""
    return next(count for count in range(min(heads, tiles.heads), 0, -1) if heads % count == 0)


def launch_options(tiles: Tiles) -> dict[str, Any]:
    """Triton's options of a launch; fusing a·b + c into one rounding is what the kernels' own fma does too."""
    return {"num_warps": tiles.warps, "num_stages": tiles.stages, "enable_fp_fusion": True}


def _ceil_div(length: int, tile: int) -> int:
    return -(-length // tile)


def _same_layout(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """The tensors (B, H, N, K), copied unless they lie as the kernels read them; and the elements from token to token.

    They lie so with the heads of a token side by side, each at a multiple of 16 bytes, the tokens of an image after
    those of the image before, and as far apart in all three.
    """
    _, H, N, K = q.shape
    stride = q.stride(2)
    if q.stride() == k.stride() == v.stride() == (N * stride, K, stride, 1) and stride % WIDTH_MULTIPLE == 0:
        return q, k, v, stride
    return _dense(q), _dense(k), _dense(v), H * K


def _dense(tensor: Tensor) -> Tensor:
    """The tensor (B, H, N, K), copied unless it lies as (B, N, H, K), as outputs do."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _empty(q: Tensor) -> Tensor:
    """An empty (B, H, N, K) that lies as (B, N, H, K): joining the heads, (B, N, H·K), then copies nothing."""
    B, H, N, K = q.shape
    return q.new_empty(B, N, H, K).transpose(1, 2)


def _launch(name: str, q: Tensor, *arguments: Any, tiles: Tiles, **constants: Any) -> None:
    """Launch a kernel with one program for each tile of queries, group of heads, and image of `q`."""
    B, H, N, _ = q.shape
    kernel = getattr(_kernels(), name)
    launch: Any = kernel if INTERPRETED else torch.library.wrap_triton(kernel)
    grid = (_ceil_div(N, tiles.queries) * (H // heads_per_program(H, tiles)), B)
    options = launch_options(tiles)
    if type(q) is not Tensor:  # a FakeTensor of torch.compile, which sets this option itself and refuses it here
        del options["enable_fp_fusion"]
    launch[grid](*arguments, **constants, **options)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None,
    before_bias: Tensor | None, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Out (B, H, N, K) and, for the backward pass, log2 of the sum of each softmax row, float32 (B, H, N)."""
    q, k, v, stride = _same_layout(q, k, v)
    _, H, N, K = q.shape
    has_before = before is not None
    tiles = tiles_of("talking" if has_before else "out", H, K)
    # Without a mix before softmax a head's sums need that head alone, so a program takes one head and larger tiles.
    sums_tiles = tiles if has_before else tiles_of("sums", H, K)
    # A kernel does not read a mix that is absent, but its pointer must be one: any tensor's.
    mixes = weight, weight if bias is None else bias, weight if before is None else before
    out, sums = _empty(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    constants = kernel_constants(H, K, sums_tiles, stride=stride, before=has_before)
    _launch("sums_kernel", q, q, k, mixes[2], sums, N, scale, tiles=sums_tiles, **constants)
    constants = kernel_constants(H, K, tiles, stride=stride, before=has_before, bias=bias is not None)
    _launch("mix_kernel", q, q, k, v, *mixes, sums, out, N, scale, tiles=tiles, **constants)
    return out, sums


def _fake(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None,
    before_bias: Tensor | None, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _empty(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def _backward(
    out_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, bias: Tensor | None, sums: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k and v (B, H, N, K), and that of the mix after softmax, float32 (H, H); see kernels.py."""
    q, k, v, stride = _same_layout(q, k, v)
    out_grad = _dense(out_grad)
    B, H, N, K = q.shape
    q_grad, k_grad, v_grad = (_empty(q) for _ in range(3))

    # First dW and D = Σ_j P ⊙ dP of each row, which dQ and dK need.
    row_sums, tiles = torch.empty_like(sums), tiles_of("weight_grad", H, K)
    # Each program writes its share of dW, summed at the end: no atomics, so the result does not depend on their order.
    shares = torch.empty(B * _ceil_div(N, tiles.queries), H, H * K, dtype=torch.float32, device=q.device)
    constants = kernel_constants(H, K, tiles, stride=stride, block=WEIGHT_GRAD_COLUMNS)
    arguments: tuple[Any, ...] = q, k, v, weight, sums, out_grad, row_sums, shares, N, scale
    _launch("weight_grad_kernel", q, *arguments, tiles=tiles, **constants)

    # dV = Aᵀ dO: the forward kernel with queries and keys exchanged, and dO in the place of V.
    tiles = tiles_of("v_grad", H, K)
    constants = kernel_constants(H, K, tiles, stride=stride, bias=bias is not None, by_column=True)
    arguments = k, q, out_grad, weight, weight if bias is None else bias, weight, sums, v_grad, N, scale
    _launch("mix_kernel", q, *arguments, tiles=tiles, **constants)

    # dQ = scale·dS K, then dK = scale·dSᵀ Q by the same kernel with queries and keys exchanged.
    tiles = tiles_of("score_grad", H, K)
    constants = kernel_constants(H, K, tiles, stride=stride)
    arguments = q, k, out_grad, v, weight, sums, row_sums, q_grad, N, scale
    _launch("score_grad_kernel", q, *arguments, tiles=tiles, **constants)
    constants = kernel_constants(H, K, tiles, stride=stride, by_column=True)
    arguments = k, q, v, out_grad, weight, sums, row_sums, k_grad, N, scale
    _launch("score_grad_kernel", q, *arguments, tiles=tiles, **constants)
    # shares[g, h·K + c] summed over programs and the K columns of head h is dW[h, g].
    return q_grad, k_grad, v_grad, shares.sum(0).view(H, H, K).sum(-1).t()


def _fake_backward(
    out_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, bias: Tensor | None, sums: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty(q), _empty(q), _empty(q), torch.empty_like(weight)


# torch.compile traces into a triton_op and sees the kernels. Those of the interpreter are Python to it: a custom_op.
_operator: Any = torch.library.custom_op if INTERPRETED else torch.library.triton_op
_reattention = _operator("vitx::reattention", mutates_args=())(_forward)
_reattention_backward = _operator("vitx::reattention_backward", mutates_args=())(_backward)
if INTERPRETED:
    _reattention.register_fake(_fake)
    _reattention_backward.register_fake(_fake_backward)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, out_grad: Tensor | None, _sums_grad: None) -> tuple[Tensor | None, ...]:
    if out_grad is None:
        return (None,) * 8
    q, k, v, weight, bias, before, before_bias, sums = ctx.saved_tensors
    before_bias_grad = None if before_bias is None else torch.zeros_like(before_bias)
    if before is not None:
        grads = _plain_gradients(out_grad, q, k, v, Mixes(weight, bias, before), ctx.scale)
        return *grads, before_bias_grad, None
    *grads, weight_grad = torch.ops.vitx.reattention_backward(out_grad, q, k, v, weight, bias, sums, ctx.scale)
    bias_grad = None if bias is None else _bias_gradient(out_grad, v)
    return *grads, weight_grad, bias_grad, None, before_bias_grad, None


def _bias_gradient(out_grad: Tensor, v: Tensor) -> Tensor:
    """Σ dA of each head, (H,): as dA = dO Vᵀ, it is the product of the sums of dO and of V over their tokens."""
    return (out_grad.float().sum(2) * v.float().sum(2)).sum((0, 2))


def _plain_gradients(
    out_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mixes: Mixes, scale: float
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, weight, bias and before_weight where scores are mixed too, with the maps written out.

    No kernel does this: both mixes need all heads at once in both directions, which is more than a thread's registers.
    """
    from vitx.models.head_mix import mix_heads

    assert mixes.before_weight is not None
    weight, before = mixes.weight.to(q.dtype), mixes.before_weight.to(q.dtype)
    # The forward pass again: scores, P = maps and A = mixed, each (B, H, N, N).
    scores = (q * scale) @ k.transpose(-2, -1)
    maps = mix_heads(scores, before).softmax(dim=-1)
    mixed = mix_heads(maps, *_like(maps, mixes.weight, mixes.bias))
    # Then backwards: dA, dP, d(W₀S) by the softmax's rule, and dS; a mix's transpose carries a gradient through it.
    mixed_grad = out_grad @ v.transpose(-2, -1)
    maps_grad = mix_heads(mixed_grad, weight.t())
    score_grad = maps * (maps_grad - (maps * maps_grad).sum(dim=-1, keepdim=True))
    raw_grad = mix_heads(score_grad, before.t()) * scale
    return (
        raw_grad @ k,
        raw_grad.transpose(-2, -1) @ q,
        mixed.transpose(-2, -1) @ out_grad,
        _head_products(mixed_grad, maps),
        None if mixes.bias is None else _bias_gradient(out_grad, v),
        _head_products(score_grad, scores),
    )


def _head_products(left: Tensor, right: Tensor) -> Tensor:
    """Σ left[h] ⊙ right[g] over images and map entries, float32 (H, H), of maps (B, H, N, N): a mix's gradient."""
    first, second = (part.transpose(0, 1).flatten(1).float() for part in (left, right))
    return first @ second.t()


_reattention.register_autograd(_autograd, setup_context=_setup_context)
