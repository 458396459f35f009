"""Snow, frost and fog of Hendrycks & Dietterich (arXiv 1903.12261), of one image float64 (S, S, 3), 0 to 1."""

import numpy as np

from vitx.analyze.corruption.blurs import Float64Array, blur_along, zoomed
from vitx.analyze.corruption.constants import Strength

LUMA = np.array([0.299, 0.587, 0.114])  # weights of R, G, B in the luma of ITU-R BT.601
# The colour of ice in daylight: bluish white.
ICE = np.array([0.82, 0.92, 1.0])


def snow(image: Float64Array, strength: Strength, scale: float, rng: np.random.Generator) -> Float64Array:
    """Flakes blurred into streaks, and the same turned by 180°, over a whitened image."""
    mean, deviation, flake_size, threshold, radius, sigma, kept = strength
    side = len(image)
    flakes = zoomed(rng.normal(mean, deviation, (side, side, 1)), max(1.0, flake_size * scale))
    flakes = np.where(flakes < threshold, 0, flakes).clip(0, 1)
    flakes = blur_along(flakes, radius * scale, sigma * scale, rng.uniform(-135, -45))
    whitened = np.maximum(image, (image @ LUMA)[:, :, None] * 1.5 + 0.5)
    return np.asarray(kept * image + (1 - kept) * whitened + flakes + np.rot90(flakes, 2))


def frost(image: Float64Array, strength: Strength, _scale: float, rng: np.random.Generator) -> Float64Array:
    """Ice crystals over the image: the authors' blend, but with computed crystals.

    The authors overlay photographs, this the ridges of plasma fractals: results do not compare with published ones.
    """
    kept, ice = strength
    side = len(image)
    ridges = [1 - np.abs(2 * plasma(side, decay, rng) - 1) for decay in (1.3, 1.7)]
    crystals = np.maximum(ridges[0] ** 3, ridges[1] ** 6)
    return np.asarray(kept * image + ice * crystals[:, :, None] * ICE)


def fog(image: Float64Array, strength: Strength, _scale: float, rng: np.random.Generator) -> Float64Array:
    """Add a plasma fractal, and dim the sum to the image's own maximum."""
    thickness, decay = strength
    brightest = image.max()
    fogged = image + thickness * plasma(len(image), decay, rng)[:, :, None]
    return np.asarray(fogged * (brightest / (brightest + thickness)))


def plasma(side: int, decay: float, rng: np.random.Generator) -> Float64Array:
    """Heights (S, S) from 0 to 1 by the diamond-square algorithm, on a torus whose size is the next power of two.

    From octave to octave the noise is divided by decay², as in the authors' code.
    """
    size = 1 << max(1, (side - 1).bit_length())
    heights = np.zeros((size, size))
    step, amplitude = size, 1.0

    def noisy_mean(first: Float64Array, second: Float64Array) -> Float64Array:
        """The mean of four neighbours, whose sums by two are given, plus noise."""
        return np.asarray((first + second) / 4 + amplitude * rng.uniform(-1, 1, first.shape))

    while step > 1:
        half = step // 2
        corners = heights[::step, ::step]
        pairs = corners + np.roll(corners, -1, axis=0)
        centres = noisy_mean(pairs, np.roll(pairs, -1, axis=1))
        heights[half::step, half::step] = centres
        heights[::step, half::step] = noisy_mean(
            centres + np.roll(centres, 1, axis=0), corners + np.roll(corners, -1, axis=1)
        )
        heights[half::step, ::step] = noisy_mean(centres + np.roll(centres, 1, axis=1), pairs)
        step, amplitude = half, amplitude / decay**2
    heights -= heights.min()
    return np.asarray(heights[:side, :side] / heights.max())
