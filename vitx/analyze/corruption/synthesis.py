"""Fifteen corruptions at five severities (Hendrycks & Dietterich, arXiv 1903.12261), computed for images of any size.

numpy, scipy and Pillow are enough; the authors' code also needs OpenCV, scikit-image and ImageMagick. The random
numbers are not theirs. Other differences are said at each corruption, which takes one image float64 (S, S, 3), 0 to 1.
"""

import io
from collections.abc import Callable

import numpy as np
from PIL import Image
from scipy import ndimage

from vitx.analyze.accuracy import require_batch
from vitx.analyze.corruption.blurs import Float64Array, defocus_blur, glass_blur, motion_blur, zoom_blur
from vitx.analyze.corruption.constants import CORRUPTIONS, Strength, strength
from vitx.analyze.corruption.weather import fog, frost, snow
from vitx.core.errors import InputError, unknown_name
from vitx.core.preprocess import UInt8Array

SEVERITIES = (1, 2, 3, 4, 5)
_Corruption = Callable[[Float64Array, Strength, float, np.random.Generator], Float64Array]


def corrupt(images: UInt8Array, corruption: str, severity: int, *, seed: int = 0, first: int = 0) -> UInt8Array:
    """Corrupt images uint8 (B, S, S, 3); return the same shape and type.

    Image i depends on itself and on (seed, corruption, severity, first + i) alone, however the images are batched:
    `first` is the index of the batch's first image among all. Raises InputError for an unknown corruption or severity,
    and for images of another shape.
    """
    check_corruption(corruption, severity)
    require_batch(images)
    constants, scale = strength(corruption, severity, images.shape[1])
    kind = CORRUPTIONS.index(corruption)
    corrupted = np.empty_like(images)
    for number, image in enumerate(images):
        rng = np.random.default_rng((seed, kind, severity, first + number))
        corrupted[number] = _to_uint8(_FUNCTIONS[corruption](image / 255, constants, scale, rng))
    return corrupted


def check_corruption(corruption: str, severity: int) -> None:
    """Raise InputError for a corruption or a severity that does not exist."""
    if corruption not in CORRUPTIONS:
        raise unknown_name("corruption", corruption, CORRUPTIONS)
    if severity not in SEVERITIES:
        raise InputError(f"severity {severity}: expected one of 1, 2, 3, 4, 5")


def _to_uint8(image: Float64Array) -> UInt8Array:
    return np.asarray(np.rint(image.clip(0, 1) * 255), dtype=np.uint8)


def _gaussian_noise(image: Float64Array, strength: Strength, _scale: float, rng: np.random.Generator) -> Float64Array:
    return image + rng.normal(0, strength[0], image.shape)


def _shot_noise(image: Float64Array, strength: Strength, _scale: float, rng: np.random.Generator) -> Float64Array:
    return np.asarray(rng.poisson(image * strength[0]) / strength[0])


def _impulse_noise(image: Float64Array, strength: Strength, _scale: float, rng: np.random.Generator) -> Float64Array:
    """Salt and pepper, each channel by itself."""
    hit = rng.random(image.shape) <= strength[0]
    return np.where(hit, rng.random(image.shape) <= 0.5, image)


def _brightness(image: Float64Array, strength: Strength, _scale: float, _rng: np.random.Generator) -> Float64Array:
    """HSV's value V = max(R, G, B) becomes min(V + c, 1). At constant hue and saturation colours scale with V."""
    value = image.max(axis=2, keepdims=True)
    brighter = np.minimum(value + strength[0], 1)
    return np.asarray(np.where(value > 0, image * (brighter / np.where(value > 0, value, 1)), brighter))


def _contrast(image: Float64Array, strength: Strength, _scale: float, _rng: np.random.Generator) -> Float64Array:
    """Every channel moves towards its mean."""
    mean = image.mean(axis=(0, 1), keepdims=True)
    return np.asarray((image - mean) * strength[0] + mean)


def _elastic_transform(
    image: Float64Array, strength: Strength, _scale: float, rng: np.random.Generator
) -> Float64Array:
    """A random affine map, then a displacement of each pixel by smoothed noise."""
    side = len(image)
    displacement, sigma, shift = (share * side for share in strength)
    image = _sample(image, _affine_positions(side, shift, rng), "mirror")
    if not displacement:
        return image
    # The Gaussian filter as a matrix: applied to the rows and to the columns of the noise below.
    smooth = ndimage.gaussian_filter1d(np.eye(side), sigma, axis=0, mode="reflect", truncate=3.0)
    noise = rng.uniform(-1, 1, (2, side, side))
    return _sample(image, np.mgrid[:side, :side] + displacement * (smooth @ noise @ smooth.T), "reflect")


def _affine_positions(side: int, shift: float, rng: np.random.Generator) -> Float64Array:
    """Where each pixel (row, column) of the result comes from, (2, S, S), when three points move by up to `shift`."""
    centre, leg = side // 2, side // 3
    points = np.array([[centre + leg, centre + leg], [centre + leg, centre - leg], [centre - leg, centre - leg]])
    moved = points + rng.uniform(-shift, shift, points.shape)
    if side < 3:  # the three points coincide and define no map
        return np.asarray(np.mgrid[:side, :side], dtype=np.float64)
    back = np.linalg.solve(np.column_stack([moved, np.ones(3)]), points)
    rows, columns = np.mgrid[:side, :side]
    return np.asarray(np.moveaxis(np.stack([rows, columns, np.ones_like(rows)], axis=-1) @ back, -1, 0))


def _sample(image: Float64Array, positions: Float64Array, mode: str) -> Float64Array:
    """The image read bilinearly at positions (2, S, S): rows and columns."""
    channels = [ndimage.map_coordinates(image[:, :, c], positions, order=1, mode=mode) for c in range(3)]
    return np.stack(channels, axis=-1)


def _pixelate(image: Float64Array, strength: Strength, _scale: float, _rng: np.random.Generator) -> Float64Array:
    side = len(image)
    small = max(1, int(side * strength[0]))
    picture = Image.fromarray(_to_uint8(image)).resize((small, small), Image.Resampling.BOX)
    return np.asarray(picture.resize((side, side), Image.Resampling.BOX)) / 255


def _jpeg_compression(
    image: Float64Array, strength: Strength, _scale: float, _rng: np.random.Generator
) -> Float64Array:
    file = io.BytesIO()
    Image.fromarray(_to_uint8(image)).save(file, "JPEG", quality=int(strength[0]))
    with Image.open(file) as picture:
        return np.asarray(picture) / 255


_FUNCTIONS: dict[str, _Corruption] = {
    "gaussian_noise": _gaussian_noise,
    "shot_noise": _shot_noise,
    "impulse_noise": _impulse_noise,
    "defocus_blur": defocus_blur,
    "glass_blur": glass_blur,
    "motion_blur": motion_blur,
    "zoom_blur": zoom_blur,
    "snow": snow,
    "frost": frost,
    "fog": fog,
    "brightness": _brightness,
    "contrast": _contrast,
    "elastic_transform": _elastic_transform,
    "pixelate": _pixelate,
    "jpeg_compression": _jpeg_compression,
}
