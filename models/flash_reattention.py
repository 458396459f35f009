"""Attention with a mix over heads without ever writing an N×N map: `vitx::reattention`, and the plain path beside it.

Re-Attention in evaluation mode (or without BatchNorm) and talking heads are `O = (W softmax(W₀·scale·QKᵀ + b₀) + b) V`
with mixes over heads W, W₀. The Triton kernels of flash_kernels.py compute it tile by tile; everywhere else the maps
are written out. `choose_impl` says which, and why.

Shape letters: B batch, H heads, N tokens, K head width.
"""

import functools
import importlib.util
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from vitx.core.errors import InputError

Impl = Literal["auto", "flash", "plain"]
# Triton's interpreter runs the kernels on a CPU, for tests; Triton reads the variable when it is imported.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
INSTALLED = importlib.util.find_spec("triton") is not None
DTYPES = (torch.float16, torch.bfloat16)
LARGEST_HEADS, LARGEST_WIDTH, LARGEST_TOKENS = 16, 64, 1025
SMALLEST_TILE = 16  # of a product on tensor cores


class Mixes(NamedTuple):
    """The mixes over heads: of the maps, weight (H, H) and bias (H,), and of the scores before softmax."""

    weight: Tensor
    bias: Tensor | None = None
    before_weight: Tensor | None = None
    before_bias: Tensor | None = None


class Tiles(NamedTuple):
    """Queries and keys of one tile, and how a GPU runs it."""

    queries: int = 16
    keys: int = 16
    warps: int = 8  # with 4, compiled code spills registers
    stages: int = 2


TILES = Tiles()
# What a sweep on a GPU tries.
CANDIDATES: tuple[Tiles, ...] = (Tiles(), Tiles(16, 32), Tiles(32, 16), Tiles(16, 16, 4))


@contextmanager
def using(tiles: Tiles) -> Iterator[None]:
    """Run the kernels with these tiles."""
    global TILES
    before, TILES = TILES, tiles
    try:
        yield
    finally:
        TILES = before


def reattention(
    q_BHNK: Tensor, k_BHNK: Tensor, v_BHNK: Tensor, mixes: Mixes, scale: float, *, impl: Impl = "auto"
) -> Tensor:
    """Return `(W softmax(W₀·scale·QKᵀ + b₀) + b) V`: (B, H, N, K), of the dtype of Q.

    "auto" takes the kernels where they apply and the plain path elsewhere; the reason is said once where a GPU was
    there. "flash" demands them: InputError with what stands against it. Under autocast Q, K and V are cast.
    Differentiable in all tensors by either path; the gradient of a bias before softmax is zero, as it is constant along
    a row.
    """
    if q_BHNK.device.type == "cuda" and torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        q_BHNK, k_BHNK, v_BHNK = (part.to(dtype) for part in (q_BHNK, k_BHNK, v_BHNK))
    if choose_impl(q_BHNK, impl) == "plain":
        return plain_reattention(q_BHNK, k_BHNK, v_BHNK, mixes, scale)
    return flash_reattention(q_BHNK, k_BHNK, v_BHNK, mixes, scale)


def flash_reattention(q_BHNK: Tensor, k_BHNK: Tensor, v_BHNK: Tensor, mixes: Mixes, scale: float) -> Tensor:
    """The same by the kernels, for a caller who has asked `choose_impl`."""
    floats = [None if part is None else part.float().contiguous() for part in mixes]
    out: Tensor = torch.ops.vitx.reattention(q_BHNK, k_BHNK, v_BHNK, *floats, scale)[0]
    return out


def choose_impl(q_BHNK: Tensor, impl: Impl = "auto") -> Literal["flash", "plain"]:
    """What `reattention` runs for queries like these; raise InputError where "flash" is demanded and cannot be."""
    if impl not in ("auto", "flash", "plain"):
        raise InputError(f"impl '{impl}' of Re-Attention: expected auto, flash or plain")
    if impl == "plain":
        return "plain"
    against = why_not_flash(q_BHNK)
    if against is None:
        return "flash"
    if impl == "flash":
        raise InputError(f"flash Re-Attention was demanded, but {against}: take impl='auto' or change that")
    if q_BHNK.device.type == "cuda":
        _notice(against)
    return "plain"


def why_not_flash(q_BHNK: Tensor) -> str | None:
    """What stands against the kernels for queries (B, H, N, K) like these; None when nothing does."""
    _, heads, tokens, width = q_BHNK.shape
    if q_BHNK.device.type != "cuda" and not INTERPRETED:
        return f"the tensors are on '{q_BHNK.device.type}'"
    if q_BHNK.dtype not in DTYPES:
        return f"the dtype is {str(q_BHNK.dtype).removeprefix('torch.')}, not float16 or bfloat16"
    if (beyond := beyond_limits(heads, tokens, width)) is not None:
        return "{} is {}, above {}".format(*beyond)
    return None if INSTALLED else "Triton is not installed"


def beyond_limits(heads: int, tokens: int, width: int) -> tuple[str, int, int] | None:
    """Name, value and limit of the first size that is too large for the kernels; None when all fit."""
    limits = (("heads", heads, LARGEST_HEADS), ("tokens", tokens, LARGEST_TOKENS), ("head width", width, LARGEST_WIDTH))
    return next((size for size in limits if size[1] > size[2]), None)


def plain_reattention(q_BHNK: Tensor, k_BHNK: Tensor, v_BHNK: Tensor, mixes: Mixes, scale: float) -> Tensor:
    """The same with the maps written out, in the tensors' own dtype."""
    from vitx.models.attention import mix_heads

    scores_BHNN = (q_BHNK * scale) @ k_BHNK.transpose(-2, -1)
    if mixes.before_weight is not None:
        scores_BHNN = mix_heads(scores_BHNN, *_like(scores_BHNN, mixes.before_weight, mixes.before_bias))
    maps_BHNN = scores_BHNN.softmax(dim=-1)
    return mix_heads(maps_BHNN, *_like(maps_BHNN, mixes.weight, mixes.bias)) @ v_BHNK


@functools.cache
def _kernels() -> Any:
    from vitx.models import flash_kernels

    return flash_kernels


@functools.cache
def _notice(against: str) -> None:
    warnings.warn(f"Re-Attention writes its maps out: {against}", stacklevel=2)


def _like(maps: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return weight.to(maps.dtype), None if bias is None else bias.to(maps.dtype)


def sizes(heads: int, width: int, tiles: Tiles, **flags: bool) -> dict[str, Any]:
    """The constants a kernel is compiled with: heads and width padded for tensor cores."""
    padded = max(SMALLEST_TILE, 1 << (heads - 1).bit_length()), max(SMALLEST_TILE, 1 << (width - 1).bit_length())
    return {"H": heads, "HP": padded[0], "K": width, "KP": padded[1], "M": tiles.queries, "N": tiles.keys, **flags}


def options_of(tiles: Tiles) -> dict[str, Any]:
    """What the compiler is told besides."""
    return {"num_warps": tiles.warps, "num_stages": tiles.stages, "enable_fp_fusion": True}


def _one_layout(*tensors: Tensor) -> list[Tensor]:
    """The tensors with the same strides and K last, copied if they are not."""
    same = all(tensor.stride() == tensors[0].stride() and tensor.stride(-1) == 1 for tensor in tensors)
    return list(tensors) if same else [tensor.contiguous() for tensor in tensors]


def _empty(q: Tensor) -> Tensor:
    """(B, H, N, K) in memory as (B, N, H, K): joining the heads afterwards copies nothing."""
    B, H, N, K = q.shape
    return q.new_empty(B, N, H, K).transpose(1, 2)


def _run(kernel: Any, grid: tuple[int, int], *arguments: Any, tiles: Tiles, **constants: Any) -> None:
    kernel[grid](*arguments, **constants, **options_of(tiles))


def _tiles(length: int, tile: int) -> int:
    return -(-length // tile)


@torch.library.custom_op("vitx::reattention", mutates_args=())
def _reattention(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None,
    before_bias: Tensor | None, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Out (B, H, N, K) and, for the backward pass, log2 of the sums of each softmax row, float32 (B, H, N)."""
    q, k, v = _one_layout(q, k, v)
    out, tiles = _empty(q), TILES
    B, H, N, K = q.shape
    sums = q.new_empty(B, H, N, dtype=torch.float32)
    zeros = weight.new_zeros(H)
    _run(
        _kernels().forward_kernel,
        (_tiles(N, tiles.queries), B),
        *(q, k, v, weight, zeros if bias is None else bias, weight if before is None else before),
        *(zeros if before_bias is None else before_bias, out, sums, *q.stride()[:3], *out.stride()[:3], N, scale),
        tiles=tiles,
        **sizes(H, K, tiles, BEFORE=before is not None, BIAS=bias is not None),
    )
    return out, sums


@_reattention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None,
    before_bias: Tensor | None, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _empty(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("vitx::reattention_backward", mutates_args=())
def _reattention_backward(
    out_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None,
    before_bias: Tensor | None, sums: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v, and those of the mixes in float32: (2, H, H + 1), the bias as the last column."""
    q, k, v = _one_layout(q, k, v)
    tiles = TILES
    B, H, N, K = q.shape
    out_grad = out_grad.transpose(1, 2).contiguous().transpose(1, 2)
    grads = [_empty(q) for _ in range(3)]
    row_sums = torch.empty_like(sums)
    zeros = weight.new_zeros(H)
    given = before is not None
    before, before_bias = weight if before is None else before, zeros if before_bias is None else before_bias
    constants = sizes(H, K, tiles, BEFORE=given)
    padded = constants["HP"]
    shares = weight.new_empty(B * _tiles(N, tiles.queries), 2, padded, padded + 1)
    places = (*q.stride()[:3], *out_grad.stride()[:3], N, scale)
    _run(
        _kernels().backward_queries_kernel,
        (_tiles(N, tiles.queries), B),
        *(q, k, v, weight, before, before_bias, sums, out_grad, grads[0], row_sums, shares, *places),
        tiles=tiles,
        **constants,
    )
    _run(
        _kernels().backward_keys_kernel,
        (_tiles(N, tiles.keys), B),
        *(q, k, v, weight, zeros if bias is None else bias, before, before_bias, sums, out_grad, row_sums),
        *(*grads[1:], *places),
        tiles=tiles,
        **constants,
        BIAS=bias is not None,
    )
    mixes = shares.sum(dim=0)
    return *grads, torch.cat([mixes[:, :H, :H], mixes[:, :H, padded:]], dim=2)  # type: ignore[return-value]  # three


@_reattention_backward.register_fake
def _(
    out_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None,
    before_bias: Tensor | None, sums: Tensor, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    heads = q.shape[1]
    return _empty(q), _empty(q), _empty(q), weight.new_empty(2, heads, heads + 1)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, out_grad: Tensor | None, _sums_grad: None) -> tuple[Tensor | None, ...]:
    if out_grad is None:
        return (None,) * 8
    q, k, v, weight, bias, before, before_bias, sums = ctx.saved_tensors
    *grads, mixes = torch.ops.vitx.reattention_backward(
        out_grad, q, k, v, weight, bias, before, before_bias, sums, ctx.scale
    )
    return (
        *grads,
        mixes[0, :, :-1],
        None if bias is None else mixes[0, :, -1],
        None if before is None else mixes[1, :, :-1],
        None if before_bias is None else torch.zeros_like(before_bias),
        None,
    )


_reattention.register_autograd(_gradients, setup_context=_keep)
