"""The four blurs of Hendrycks & Dietterich (arXiv 1903.12261), of one image float64 (S, S, 3), 0 to 1.

`strength` holds a corruption's constants (constants.py); `scale` multiplies those that are lengths in pixels.
"""

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy import ndimage, signal

from vitx.analyze.corruption.constants import Strength

Float64Array = npt.NDArray[np.float64]


def defocus_blur(image: Float64Array, strength: Strength, scale: float, _rng: np.random.Generator) -> Float64Array:
    """Convolution with a disk."""
    kernel = _disk(strength[0] * scale, strength[1])
    reach = len(kernel) // 2
    # An image of one row cannot be mirrored.
    padded = np.pad(image, ((reach, reach), (reach, reach), (0, 0)), mode="reflect" if len(image) > 1 else "edge")
    return np.asarray(signal.fftconvolve(padded, kernel[:, :, None], mode="valid", axes=(0, 1)))


@lru_cache
def _disk(radius: float, edge_sigma: float) -> Float64Array:
    """A disk, its edge smoothed over 3 × 3 pixels, or 5 × 5 for a radius above 8.

    As in the authors' code its sum is 1 before that: where the disk touches the edge of the array, the smoothing
    mirrors it, and images become brighter by about 1 %.
    """
    reach = 8 if radius <= 8 else math.ceil(radius)
    squares = np.arange(-reach, reach + 1) ** 2
    disk = (squares[:, None] + squares <= radius**2).astype(np.float64)
    radius_of_edge = 1 if radius <= 8 else 2
    return np.asarray(ndimage.gaussian_filter(disk / disk.sum(), edge_sigma, radius=radius_of_edge, mode="mirror"))


def glass_blur(image: Float64Array, strength: Strength, scale: float, rng: np.random.Generator) -> Float64Array:
    """Blur, replace pixels by neighbours at random, blur again.

    The authors mean to swap two pixels, but swap views of one array: their code copies the neighbour, and so does this.
    """
    sigma = strength[0] * scale
    farthest = max(1, round(strength[1] * scale))
    side = len(image)
    rows = np.arange(side - farthest, farthest, -1)
    targets = rows[:, None] * side + rows
    # The source of each pixel, as flat indices, set one after the other: a later copy sees the earlier ones.
    sources = list(range(side * side))
    for _ in range(int(strength[2])):
        down, right = rng.integers(-farthest, farthest, (2, *targets.shape))
        neighbours = targets + down * side + right
        for target, neighbour in zip(targets.ravel().tolist(), neighbours.ravel().tolist(), strict=True):
            sources[target] = sources[neighbour]
    jumped = _gaussian(image, sigma).reshape(-1, 3)[sources].reshape(image.shape)
    return _gaussian(jumped, sigma)


def _gaussian(image: Float64Array, sigma: float) -> Float64Array:
    return np.asarray(ndimage.gaussian_filter(image, (sigma, sigma, 0), mode="nearest"))


def motion_blur(image: Float64Array, strength: Strength, scale: float, rng: np.random.Generator) -> Float64Array:
    """One-sided Gaussian along a line at a random angle from −45° to 45°."""
    return blur_along(image, strength[0] * scale, strength[1] * scale, rng.uniform(-45, 45))


def blur_along(image: Float64Array, radius: float, sigma: float, degrees: float) -> Float64Array:
    """ImageMagick's motion blur of (S, S, C): a weighted mean of the pixels at distances 0 … 2·radius in one direction.

    Edge pixels are repeated beyond the border.
    """
    distance = np.arange(2 * math.ceil(radius) + 1)
    weights = np.exp(-(distance**2) / (2 * sigma**2))
    angle = math.radians(degrees)
    # ⌈x − ½⌉ rounds to the nearest pixel, as ImageMagick does.
    down = np.ceil(distance * math.sin(angle) - 0.5).astype(int)
    right = np.ceil(distance * math.cos(angle) - 0.5).astype(int)
    reach, side = len(distance), len(image)
    padded = np.pad(image, ((reach, reach), (reach, reach), (0, 0)), mode="edge")
    blurred = np.zeros_like(image)
    for weight, row, column in zip(weights / weights.sum(), reach + down, reach + right, strict=True):
        blurred += weight * padded[row : row + side, column : column + side]
    return blurred


def zoom_blur(image: Float64Array, strength: Strength, _scale: float, _rng: np.random.Generator) -> Float64Array:
    """The mean of the image and of enlargements of its centre."""
    factors = zoom_factors(int(strength[0]), strength[1])
    total = image + sum(zoomed(image, factor) for factor in factors)
    return np.asarray(total / (len(factors) + 1))


def zoom_factors(zooms: int, step: float) -> list[float]:
    """`zooms` factors from 1 on, to the bit those of the authors' np.arange(1, end, step).

    It takes the difference of the first two for the step: the 26th of 0.01 is 1.2500000000000002, by which 26 pixels
    become 33, and by 1.25 they become 32.
    """
    delta = (1 + step) - 1
    return [1 + delta * number for number in range(zooms)]


def zoomed(image: Float64Array, factor: float) -> Float64Array:
    """The centre of (S, S, C), enlarged bilinearly to (S, S, C)."""
    low, high, weight = _zoom_taps(len(image), factor)
    rows = image[low] + weight[:, None, None] * (image[high] - image[low])
    return np.asarray(rows[:, low] + weight[:, None] * (rows[:, high] - rows[:, low]))


@lru_cache(maxsize=256)
def _zoom_taps(side: int, factor: float) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Float64Array]:
    """The two source rows that each row of the enlarged image lies between, and the weight of the second, (S,) each."""
    crop = math.ceil(side / factor)
    top = (side - crop) // 2
    enlarged = round(crop * factor)
    kept = np.arange(side) + (enlarged - side) // 2
    position = kept * ((crop - 1) / max(enlarged - 1, 1))
    low = np.floor(position).astype(np.int64)
    return low + top, np.minimum(low + 1, crop - 1) + top, position - low
