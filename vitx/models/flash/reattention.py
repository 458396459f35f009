"""Attention with a mix over heads without ever writing an N×N map: `vitx::reattention`, and the plain path beside it.

Re-Attention in evaluation mode (or without BatchNorm) and talking heads are `O = (W softmax(W₀·scale·QKᵀ + b₀) + b) V`
with mixes over heads W, W₀. The Triton kernels of kernels.py compute it tile by tile; everywhere else the maps
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
import torch.nn.functional as F
from torch import Tensor

from vitx.core.errors import InputError

Impl = Literal["auto", "flash", "plain"]
# Triton's interpreter runs the kernels on a CPU, for tests; Triton reads the variable when it is imported.
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
INSTALLED = importlib.util.find_spec("triton") is not None
DTYPES = (torch.float16, torch.bfloat16)
LARGEST_HEADS, LARGEST_WIDTH, LARGEST_TOKENS = 16, 64, 1025
SMALLEST_TILE = 16  # of a product on tensor cores
WIDTH_MULTIPLE = 8  # of half precision: 16 bytes


class Mixes(NamedTuple):
    """The mixes over heads: of the maps, weight (H, H) and bias (H,), and of the scores before softmax."""

    weight: Tensor
    bias: Tensor | None = None
    before_weight: Tensor | None = None
    before_bias: Tensor | None = None


class Tiles(NamedTuple):
    """Rows, columns and heads of one program's outputs, and how a GPU runs it.

    With 64 rows and 4 warps Hopper's products are asynchronous (wgmma), otherwise those of every GPU since Ampere. With
    one stage the next tile is not fetched ahead, and the weights of the mix are read from the cache.
    """

    queries: int = 64
    keys: int = 16
    warps: int = 4
    stages: int = 1
    heads: int = 4


# What a sweep on a GPU tries; `forward_tiles` is what runs.
CANDIDATES = (
    *(Tiles(), Tiles(heads=3), Tiles(heads=6), Tiles(stages=2), Tiles(heads=6, stages=2)),
    *(Tiles(32, 16, 2), Tiles(32, 16, 2, 2), Tiles(32, 16, 2, 2, 6), Tiles(64, 32, 4, 1, 3), Tiles(128, 16, 8)),
)
SUMS_TILES = Tiles(64, 64, 4, 2, 1)
WEIGHT_GRAD_TILES = Tiles(64, 32, 4, 2, 1)
WEIGHT_GRAD_COLUMNS = 128
_forced: Tiles | None = None


def forward_tiles(heads: int, width: int) -> Tiles:
    """The tiles of the output: at the published shapes they spill no register on any GPU since Ampere.

    benchmarks/flash_resources.py shows it.
    """
    return _forced or _of_rows(heads, width, 4 if width <= 32 else 3)


def backward_tiles(heads: int, width: int) -> Tiles:
    """The same for the gradients of queries, keys and values."""
    return _of_rows(heads, width, 2)


def _of_rows(heads: int, width: int, outputs: int) -> Tiles:
    """The queries of all heads lie in shared memory, of which a block has 99 KiB on most GPUs: fewer of wide ones."""
    return Tiles(heads=outputs) if heads * width <= 512 else Tiles(32, 16, 2, 1, outputs)


@contextmanager
def using(tiles: Tiles) -> Iterator[None]:
    """Make the outputs with these tiles; for measurements."""
    global _forced
    before, _forced = _forced, tiles
    try:
        yield
    finally:
        _forced = before


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
    """The same by the kernels, for a caller who has asked `choose_impl`.

    They read 16 bytes at once: heads whose width is no multiple of 8 are copied to one that is.
    """
    width = q_BHNK.shape[-1]
    qkv = [_padded(part) for part in (q_BHNK, k_BHNK, v_BHNK)] if width % WIDTH_MULTIPLE else [q_BHNK, k_BHNK, v_BHNK]
    floats = [None if part is None else part.float().contiguous() for part in mixes]
    out: Tensor = torch.ops.vitx.reattention(*qkv, *floats, scale)[0]
    return out[..., :width] if width % WIDTH_MULTIPLE else out


def padded_width(width: int) -> int:
    """The head width in memory that the kernels read without a copy."""
    return _tiles(width, WIDTH_MULTIPLE) * WIDTH_MULTIPLE


def _padded(part_BHNK: Tensor) -> Tensor:
    width = part_BHNK.shape[-1]
    return F.pad(part_BHNK.transpose(1, 2), (0, padded_width(width) - width)).transpose(1, 2)


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
    notice_plain(q_BHNK.device.type, against)
    return "plain"


def notice_plain(device: str, against: str) -> None:
    """Say once why maps are written out where a GPU was there."""
    if device == "cuda":
        _notice(against)


def why_not_flash(q_BHNK: Tensor) -> str | None:
    """What stands against the kernels for queries (B, H, N, K) like these; None when nothing does."""
    return against_flash(q_BHNK.device.type, q_BHNK.dtype, *q_BHNK.shape[1:])


def against_flash(device: str, dtype: torch.dtype, heads: int, tokens: int, width: int) -> str | None:
    """The same for queries of these sizes."""
    if device != "cuda" and not INTERPRETED:
        return f"the tensors are on '{device}'"
    if dtype not in DTYPES:
        return f"the dtype is {str(dtype).removeprefix('torch.')}, not float16 or bfloat16"
    if (beyond := beyond_limits(heads, tokens, width)) is not None:
        return "{} is {}, above {}".format(*beyond)
    return None if INSTALLED else "Triton is not installed"


def beyond_limits(heads: int, tokens: int, width: int) -> tuple[str, int, int] | None:
    """Name, value and limit of the first size that is too large for the kernels; None when all fit."""
    limits = (("heads", heads, LARGEST_HEADS), ("tokens", tokens, LARGEST_TOKENS), ("head width", width, LARGEST_WIDTH))
    return next((size for size in limits if size[1] > size[2]), None)


def plain_reattention(q_BHNK: Tensor, k_BHNK: Tensor, v_BHNK: Tensor, mixes: Mixes, scale: float) -> Tensor:
    """The same with the maps written out, in the tensors' own dtype."""
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
def _notice(against: str) -> None:
    warnings.warn(f"Re-Attention writes its maps out: {against}", stacklevel=2)


def _like(maps: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return weight.to(maps.dtype), None if bias is None else bias.to(maps.dtype)


def sizes(heads: int, width: int, tiles: Tiles, **flags: Any) -> dict[str, Any]:
    """The constants a kernel is compiled with.

    The width is read as a power of two and, from 33 to 48, 16 columns more; the outputs' last columns are 8 or 16.
    """
    first = max(SMALLEST_TILE, 1 << (width.bit_length() - 1))
    rest = max(0, width - first)
    if rest > SMALLEST_TILE:
        first, rest = 2 * first, 0
    split = {"KA": first, "KB": SMALLEST_TILE if rest else 0, "KO": _tiles(rest, WIDTH_MULTIPLE) * WIDTH_MULTIPLE}
    tile = {"M": tiles.queries, "N": tiles.keys, "CACHED": tiles.stages == 1}
    return {"H": heads, "G": group_of(heads, tiles), "K": width, **split, **tile, **flags}


def group_of(heads: int, tiles: Tiles) -> int:
    """How many heads' outputs a program makes: a divisor of `heads`."""
    return next(count for count in range(min(heads, tiles.heads), 0, -1) if heads % count == 0)


def options_of(tiles: Tiles) -> dict[str, Any]:
    """What the compiler is told besides."""
    return {"num_warps": tiles.warps, "num_stages": tiles.stages, "enable_fp_fusion": True}


def _tiles(length: int, tile: int) -> int:
    return -(-length // tile)


def _one_layout(*tensors: Tensor) -> list[Tensor]:
    """The tensors with the same strides, the heads of a token side by side and 16 bytes readable at once; or copies."""
    first, width = tensors[0].stride(), tensors[0].shape[-1]
    fits = first[1] == width and first[3] == 1 and first[0] % WIDTH_MULTIPLE == 0 and first[2] % WIDTH_MULTIPLE == 0
    if fits and all(tensor.stride() == first for tensor in tensors):
        return list(tensors)
    return [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors]


def _empty(q: Tensor) -> Tensor:
    """(B, H, N, K) in memory as (B, N, H, K): joining the heads afterwards copies nothing."""
    B, H, N, K = q.shape
    return q.new_empty(B, N, H, K).transpose(1, 2)


def _strides(tensor: Tensor) -> tuple[int, int]:
    """From image to image and from token to token, in units of 8 elements."""
    return tensor.stride(0) // WIDTH_MULTIPLE, tensor.stride(2) // WIDTH_MULTIPLE


def _run(name: str, q: Tensor, *arguments: Any, tiles: Tiles, **constants: Any) -> None:
    """Launch a kernel for every tile and group of heads of every image of `q`."""
    B, H, N, _ = q.shape
    kernel = getattr(_kernels(), name)
    launch: Any = kernel if INTERPRETED else torch.library.wrap_triton(kernel)
    grid = (_tiles(N, tiles.queries) * (H // group_of(H, tiles)), B)
    options = options_of(tiles)
    if type(q) is not Tensor:  # traced by torch.compile, which takes this option from elsewhere
        del options["enable_fp_fusion"]
    launch[grid](*arguments, **constants, **options)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None,
    before_bias: Tensor | None, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Out (B, H, N, K) and, for the backward pass, log2 of the sums of each softmax row, float32 (B, H, N)."""
    q, k, v = _one_layout(q, k, v)
    _, H, N, K = q.shape
    given, tiles = before is not None, forward_tiles(H, K)
    first_pass = tiles if given else SUMS_TILES
    mixes = weight, weight if bias is None else bias, weight if before is None else before
    out, sums = _empty(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    constants = sizes(H, K, first_pass, BEFORE=given)
    _run("sums_kernel", q, q, k, mixes[2], sums, *_strides(q), N, scale, tiles=first_pass, **constants)
    constants = sizes(H, K, tiles, BEFORE=given, BIAS=bias is not None, BY_COLUMN=False)
    places = *_strides(q), *_strides(v), *_strides(out), N, scale
    _run("mix_kernel", q, q, k, v, *mixes, sums, out, *places, tiles=tiles, **constants)
    return out, sums


def _fake(
    q: Tensor, k: Tensor, v: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None,
    before_bias: Tensor | None, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _empty(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def _backward(
    out_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, bias: Tensor | None, sums: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, and that of the mix in float32: (H, H)."""
    q, k, v = _one_layout(q, k, v)
    (out_grad,) = _one_layout(out_grad)
    B, H, N, K = q.shape
    qkv, given = _strides(q), _strides(out_grad)
    q_grad, k_grad, v_grad = (_empty(q) for _ in range(3))
    made = _strides(q_grad)

    row_sums, tiles = torch.empty_like(sums), WEIGHT_GRAD_TILES
    shares = torch.empty(B * _tiles(N, tiles.queries), H, H * K, dtype=torch.float32, device=q.device)
    constants = sizes(H, K, tiles, C=WEIGHT_GRAD_COLUMNS)
    arguments: tuple[Any, ...] = q, k, v, weight, sums, out_grad, row_sums, shares, *qkv, *given, N, scale
    _run("weight_grad_kernel", q, *arguments, tiles=tiles, **constants)

    tiles = backward_tiles(H, K)
    constants = sizes(H, K, tiles, BEFORE=False, BIAS=bias is not None, BY_COLUMN=True)
    arguments = k, q, out_grad, weight, weight if bias is None else bias, weight, sums, v_grad
    _run("mix_kernel", q, *arguments, *qkv, *given, *made, N, scale, tiles=tiles, **constants)

    constants = sizes(H, K, tiles)
    arguments = q, k, out_grad, v, weight, sums, row_sums, q_grad, *qkv, *given, *qkv, *made, N, scale
    _run("score_grad_kernel", q, *arguments, tiles=tiles, **constants, BY_COLUMN=False)
    arguments = k, q, v, out_grad, weight, sums, row_sums, k_grad, *qkv, *qkv, *given, *made, N, scale
    _run("score_grad_kernel", q, *arguments, tiles=tiles, **constants, BY_COLUMN=True)
    return q_grad, k_grad, v_grad, shares.sum(0).view(H, H, K).sum(-1).t()


def _fake_backward(
    out_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, weight: Tensor, bias: Tensor | None, sums: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _empty(q), _empty(q), _empty(q), torch.empty_like(weight)


# torch.compile reads a triton_op and sees the kernels; the interpreter's are no kernels to it.
_operator: Any = torch.library.custom_op if INTERPRETED else torch.library.triton_op
_reattention = _operator("vitx::reattention", mutates_args=())(_forward)
_reattention_backward = _operator("vitx::reattention_backward", mutates_args=())(_backward)
if INTERPRETED:
    _reattention.register_fake(_fake)
    _reattention_backward.register_fake(_fake_backward)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, out_grad: Tensor | None, _sums_grad: None) -> tuple[Tensor | None, ...]:
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
    """Σ dA of each head, from the sums over its rows and columns."""
    return (out_grad.float().sum(2) * v.float().sum(2)).sum((0, 2))


def _plain_gradients(
    out_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mixes: Mixes, scale: float
) -> tuple[Tensor | None, ...]:
    """Gradients with a mix of the scores, with the maps of this layer written out: q, k, v, weight, bias, before.

    Both mixes need all heads at once in both directions, which takes more registers than a thread has.
    """
    from vitx.models.head_mix import mix_heads

    assert mixes.before_weight is not None
    weight, before = mixes.weight.to(q.dtype), mixes.before_weight.to(q.dtype)
    scores = (q * scale) @ k.transpose(-2, -1)
    maps = mix_heads(scores, before).softmax(dim=-1)
    mixed = mix_heads(maps, *_like(maps, mixes.weight, mixes.bias))
    mixed_grad = out_grad @ v.transpose(-2, -1)
    maps_grad = mix_heads(mixed_grad, weight.t())
    score_grad = maps * (maps_grad - (maps * maps_grad).sum(dim=-1, keepdim=True))
    raw_grad = mix_heads(score_grad, before.t()) * scale
    return (
        raw_grad @ k,
        raw_grad.transpose(-2, -1) @ q,
        mixed.transpose(-2, -1) @ out_grad,
        _over_pixels(mixed_grad, maps),
        None if mixes.bias is None else _bias_gradient(out_grad, v),
        _over_pixels(score_grad, scores),
    )


def _over_pixels(left: Tensor, right: Tensor) -> Tensor:
    """Σ left[h] ⊙ right[g] over images and pixels, float32 (H, H)."""
    first, second = (part.transpose(0, 1).flatten(1).float() for part in (left, right))
    return first @ second.t()


_reattention.register_autograd(_gradients, setup_context=_keep)
