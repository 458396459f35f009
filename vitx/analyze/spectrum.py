"""Feature maps as signals: how much of high frequencies each layer keeps (docs/maths.md §5.1).

Park & Kim (arXiv 2202.06709), §2 and §3. Shape letters: B batch, C channels, N tokens, S side of a square map.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor

from vitx.core.errors import InputError
from vitx.models.similarity import at_least_float32

# Added to amplitudes before the logarithm, as the paper's code does.
EPS = 1e-6


def image_log_amplitudes(features_BCSS: Tensor) -> Tensor:
    """log(|F[k, k]| + 1e-6) of the 2-D Fourier transform, k = 0 … S//2, averaged over C: (B, S//2 + 1), nats.

    Only the diagonal of the transform is computed: one product with a (S², S//2 + 1) basis. Frequencies are k·2π/S; the
    last is Nyquist's for an even S. Raises InputError for maps that are not square.
    """
    *_, height, width = features_BCSS.shape
    if height != width:
        raise InputError(f"feature maps of {height} × {width}: the diagonal of the spectrum needs square ones")
    values = at_least_float32(features_BCSS).flatten(-2)  # a sum of 56 × 56 ordinary values is infinite in float16
    real, imaginary = (values @ part.to(values) for part in _diagonal_basis(width))
    return torch.log(torch.hypot(real, imaginary) + EPS).mean(dim=-2)


@lru_cache(maxsize=8)
def _diagonal_basis(side: int) -> tuple[Tensor, Tensor]:
    """cos and sin of 2π·k·(x + y)/S: (S², S//2 + 1), float64."""
    index = torch.arange(side)
    # On the diagonal kx = ky = k, so a pixel enters by x + y alone. Reduced mod S in integers, the angles are exact.
    x_plus_y = ((index[:, None] + index) % side).flatten()
    phase = x_plus_y[:, None] * torch.arange(side // 2 + 1) % side
    angle = phase.double() * (2 * math.pi / side)
    return angle.cos(), angle.sin()


def fourier_log_amplitude(features_BCSS: Tensor) -> Tensor:
    """`image_log_amplitudes` averaged over B, less that of DC: (S//2 + 1,), nats, 0 first.

    At -2.3 an amplitude is a tenth of DC's. Nyquist's frequency is included, and `frequencies` is the axis: the paper's
    code leaves Nyquist out and labels the axis wrongly.
    """
    amplitudes = image_log_amplitudes(features_BCSS).mean(dim=0)
    return amplitudes - amplitudes[0]


def frequencies(side: int) -> list[float]:
    """The axis of `fourier_log_amplitude` of maps (S, S), S = side, in units of π radians a pixel: 0 … 1."""
    return [2 * k / side for k in range(side // 2 + 1)]


def feature_variance(features_BCSS: Tensor) -> Tensor:
    """The variance (unbiased) of a map over its S² positions, averaged over B and C; a scalar, squared activations."""
    return feature_variances(features_BCSS).mean()


def feature_variances(features_BCSS: Tensor) -> Tensor:
    """The variance (unbiased) of an image's map over its S² positions, averaged over C: (B,), squared activations."""
    values = at_least_float32(features_BCSS).flatten(-2)
    axis = -1
    if values.stride(-1) != 1:  # tokens: the channels of a position are contiguous; reduced as they lie in memory
        values, axis = values.transpose(-1, -2), -2
    centred = values - values.mean(dim=axis, keepdim=True)
    # A third of the time of `var`, which updates mean and variance value by value.
    variance_B: Tensor = torch.linalg.vector_norm(centred, dim=axis).square().mean(dim=-1) / (values.shape[axis] - 1)
    return variance_B


def square_map(tokens: Tensor, prefix_tokens: int, *, channels_last: bool) -> Tensor | None:
    """The map (B, C, S, S) of tokens (B, N, C), of (B, S, S, C) with `channels_last`, or of (B, C, S, S) itself.

    None for anything else, and for fewer than 2 × 2 positions.
    """
    if tokens.ndim == 3:
        patches = tokens[:, prefix_tokens:]
        side = math.isqrt(patches.shape[1])
        if side < 2 or side * side != patches.shape[1]:
            return None
        tokens, channels_last = patches.reshape(len(patches), side, side, -1), True
    if tokens.ndim != 4:
        return None
    features = tokens.movedim(-1, 1) if channels_last else tokens
    return features if features.shape[-1] == features.shape[-2] >= 2 else None
