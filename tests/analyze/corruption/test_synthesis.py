"""The fifteen corruptions: exact definitions where they have one, statistics where they are random, and determinism."""

import colorsys
import io
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage
from sklearn.datasets import load_sample_image

from vitx.analyze.corruption.blurs import blur_along, zoom_factors, zoomed
from vitx.analyze.corruption.constants import CORRUPTIONS, PUBLISHED_SIZES, strength
from vitx.analyze.corruption.synthesis import SEVERITIES, corrupt
from vitx.analyze.corruption.weather import fog, frost, plasma, snow
from vitx.core.errors import InputError
from vitx.core.preprocess import UInt8Array

# Where a higher severity is a larger constant; the authors of the others trade one constant for another.
GROWING = set(CORRUPTIONS) - {"glass_blur", "motion_blur", "frost", "elastic_transform"}


# Σ severity · place · constant, of 32, 64 and 224 px: make_cifar_c.py, make_tinyimagenet_c.py and make_imagenet_c.py
# of the authors. Zooms are compared with their ranges below.
SUMS = {
    "gaussian_noise": (1.26, 2.06, 3.8),
    "shot_noise": (1850, 795, 181),
    "impulse_noise": (0.69, 1.22, 2.45),
    "defocus_blur": (23.1, 35.28, 125.2),
    "glass_blur": (106.75, 127.2, 196.4),
    "motion_blur": (174.0, 230.0, 565),
    "snow": (1729.7, 1710.45, 1937.55),
    "frost": (24.55, 26.1, 30.8),
    "fog": (81.45, 87.3, 86.2),
    "brightness": (3.0, 5.5, 5.5),
    "contrast": (4.9, 2.25, 2.25),
    "elastic_transform": (5.27, 5.62, 12.2109),
    "pixelate": (11.55, 9.5, 5.25),
    "jpeg_compression": (784, 616, 181),
}


def photographs(side: int, count: int = 6) -> UInt8Array:
    """Squares cut out of scikit-learn's two photographs."""
    rng = np.random.default_rng(0)
    squares = []
    for number in range(count):
        image = Image.fromarray(load_sample_image(("china.jpg", "flower.jpg")[number % 2]))
        width = int(rng.integers(200, 420))
        left, top = int(rng.integers(0, 640 - width)), int(rng.integers(0, 427 - width))
        squares.append(np.asarray(image.crop((left, top, left + width, top + width)).resize((side, side))))
    return np.stack(squares)


def distance(images: UInt8Array, corruption: str, severity: int) -> float:
    difference = corrupt(images, corruption, severity).astype(float) - images
    return float(np.sqrt(np.square(difference).mean()))


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_an_image_depends_on_its_number_and_the_seed_alone(corruption: str) -> None:
    images = photographs(32, 4)
    images[3] = images[2]
    whole = corrupt(images, corruption, 3, seed=5)
    assert whole.dtype == np.uint8
    assert whole.shape == images.shape
    np.testing.assert_array_equal(corrupt(images[1:], corruption, 3, seed=5, first=1), whole[1:])
    np.testing.assert_array_equal(corrupt(images, corruption, 3, seed=5), whole)
    chance = corruption not in {
        *("defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression"),
    }
    assert (whole[2] != whole[3]).any() == chance
    assert (corrupt(images, corruption, 3, seed=6) != whole).any() == chance


@pytest.mark.parametrize("corruption", CORRUPTIONS)
def test_severity_grows_the_distance(corruption: str) -> None:
    for side in (32, 64, 224):
        images = photographs(side)
        distances = [distance(images, corruption, severity) for severity in SEVERITIES]
        assert min(distances) > 1
        if corruption in GROWING and (corruption, side) != ("fog", 224):
            assert distances == sorted(distances), (corruption, side)


@pytest.mark.parametrize("side", [1, 2, 3, 7, 31, 48, 97, 128])
def test_any_size(side: int) -> None:
    images = np.random.default_rng(0).integers(0, 256, (2, side, side, 3), dtype=np.uint8)
    for corruption in CORRUPTIONS:
        assert corrupt(images, corruption, 5).shape == images.shape


def test_constants_are_those_of_the_nearest_size() -> None:
    assert strength("motion_blur", 5, 32) == ((9, 2.5), 1)
    assert strength("motion_blur", 5, 64) == ((12, 3), 1)
    assert strength("motion_blur", 5, 224) == ((20, 15), 1)
    assert strength("motion_blur", 1, 384) == ((10, 3), 384 / 224)
    assert strength("motion_blur", 1, 48) == ((10, 1), 0.75)
    assert strength("motion_blur", 1, 16) == ((6, 1), 1)


def test_constants_are_those_of_the_authors() -> None:
    for corruption, expected in SUMS.items():
        for side, total in zip(PUBLISHED_SIZES, expected, strict=True):
            constants = [strength(corruption, severity, side)[0] for severity in SEVERITIES]
            weighted = np.arange(1, 6) @ np.array(constants) @ np.arange(1, len(constants[0]) + 1)
            assert weighted == pytest.approx(total, abs=6e-5), (corruption, side)


@pytest.mark.parametrize(("side", "published"), [(47, 32), (48, 64), (127, 64), (128, 224), (1000, 224)])
def test_an_image_takes_the_constants_of_the_nearest_size(side: int, published: int) -> None:
    constants, scale = strength("motion_blur", 3, side)
    assert (constants, scale) == (strength("motion_blur", 3, published)[0], side / published)


def test_brightness_is_added_to_the_value_of_hsv() -> None:
    image = photographs(32, 1)
    image[0, 0, :3] = ((0, 0, 0), (255, 255, 255), (3, 3, 3))
    bright = corrupt(image, "brightness", 4)
    for row in range(0, 32, 5):
        for column in range(32):
            hue, saturation, value = colorsys.rgb_to_hsv(*(image[0, row, column] / 255))
            expected = colorsys.hsv_to_rgb(hue, saturation, min(value + 0.2, 1))
            np.testing.assert_allclose(bright[0, row, column], np.array(expected) * 255, atol=0.5 + 1e-9)


def test_contrast_draws_every_channel_to_its_mean() -> None:
    image = photographs(32, 1)
    mean = image[0].reshape(-1, 3).mean(axis=0)
    np.testing.assert_allclose(corrupt(image, "contrast", 5)[0], mean + 0.15 * (image[0] - mean), atol=0.5 + 1e-9)


def test_pixelate_averages_blocks() -> None:
    image = photographs(64, 1)
    blocks = image[0].reshape(32, 2, 32, 2, 3).mean(axis=(1, 3))
    expected = blocks.repeat(2, axis=0).repeat(2, axis=1)
    np.testing.assert_allclose(corrupt(image, "pixelate", 5)[0], expected, atol=1)  # Pillow rounds after each axis


def test_jpeg_is_pillows_at_that_quality() -> None:
    image = photographs(224, 1)
    file = io.BytesIO()
    Image.fromarray(image[0]).save(file, "JPEG", quality=7)
    with Image.open(file) as expected:
        np.testing.assert_array_equal(corrupt(image, "jpeg_compression", 5)[0], np.asarray(expected))


def test_noise_has_its_statistics() -> None:
    grey = np.full((1, 224, 224, 3), 128, np.uint8)
    level = 128 / 255
    gaussian = corrupt(grey, "gaussian_noise", 2) / 255 - level
    assert gaussian.mean() == pytest.approx(0, abs=1e-3)
    assert gaussian.std() == pytest.approx(0.12, rel=0.01)
    shot = corrupt(grey, "shot_noise", 1) / 255 - level
    assert shot.std() == pytest.approx(np.sqrt(level / 60), rel=0.02)
    impulse = corrupt(grey, "impulse_noise", 5)
    assert [(impulse == value).mean() for value in (0, 255)] == pytest.approx([0.135, 0.135], rel=0.03)
    assert set(np.unique(impulse)) == {0, 128, 255}


@pytest.mark.parametrize("corruption", [name for name in CORRUPTIONS if "blur" in name or "elastic" in name])
def test_blurs_and_warps_leave_a_flat_image_alone(corruption: str) -> None:
    flat = np.full((1, 64, 64, 3), (200, 100, 7), np.uint8)
    for severity in SEVERITIES:
        np.testing.assert_array_equal(corrupt(flat, corruption, severity), flat)


@pytest.mark.parametrize(("severity", "factor"), [(1, 1), (2, 1), (3, 1), (4, 1.01298), (5, 1.01079)])
def test_the_widest_disks_brighten_as_the_authors_do(severity: int, factor: float) -> None:
    """The sums of the kernels that their code makes with OpenCV."""
    flat = np.full((1, 224, 224, 3), 200, np.uint8)
    assert corrupt(flat, "defocus_blur", severity).mean() == round(200 * factor)


@pytest.mark.parametrize(("side", "first"), [(32, 1.06), (64, 1.06), (224, 1.11)])
def test_zooms_are_numpys_ranges_of_the_authors(side: int, first: float) -> None:
    for severity in SEVERITIES:
        (count, step), _ = strength("zoom_blur", severity, side)
        expected = np.arange(1, round(first + 0.05 * (severity - 1), 2), step)
        assert zoom_factors(int(count), step) == expected.tolist()


def test_a_zoom_that_numpy_rounds_up_has_a_pixel_more() -> None:
    """The last factor of severity 5 at 32 px: 26 pixels become 33, of which the first 32 are kept."""
    columns = np.tile(np.arange(32.0)[:, None, None], (1, 32, 3))
    top = zoomed(columns, zoom_factors(26, 0.01)[25])[:, 0, 0]
    np.testing.assert_allclose(top, 3 + np.arange(32) * 25 / 32)


def test_defocus_spreads_a_point_over_a_disk() -> None:
    point = np.zeros((1, 224, 224, 3), np.uint8)
    point[0, 112, 112] = 255
    bright = np.argwhere(corrupt(255 - point, "defocus_blur", 1)[0, :, :, 0] < 255) - 112
    assert np.square(bright).sum(axis=1).max() <= 9
    assert len(bright) == sum(x * x + y * y <= 9 for x in range(-3, 4) for y in range(-3, 4))


def test_motion_blur_is_half_a_gaussian_in_one_direction() -> None:
    point = np.zeros((21, 21, 3))
    point[10, 10] = 1
    weights = np.exp(-(np.arange(7) ** 2) / 8)
    weights /= weights.sum()
    along = blur_along(point, 3, 2, 0)[:, :, 0]
    np.testing.assert_allclose(along[10, 10:3:-1], weights)
    assert along.sum() == pytest.approx(1)
    down = blur_along(point, 3, 2, 90)[:, :, 0]
    np.testing.assert_allclose(down[10:3:-1, 10], weights)


@pytest.mark.parametrize("factor", [1.0, 1.05, 1.25, 2.25, 4.5])
@pytest.mark.parametrize("side", [32, 33])
def test_zooming_is_scipys_zoom_of_the_centre(side: int, factor: float) -> None:
    image = np.random.default_rng(1).random((side, side, 3))
    crop = int(np.ceil(side / factor))
    top = (side - crop) // 2
    enlarged = ndimage.zoom(image[top : top + crop, top : top + crop], (factor, factor, 1), order=1)
    cut = (len(enlarged) - side) // 2
    np.testing.assert_allclose(zoomed(image, factor), enlarged[cut : cut + side, cut : cut + side], atol=1e-12)


def test_glass_moves_pixels_and_makes_none() -> None:
    numbers = np.arange(32 * 32, dtype=np.uint32)
    image = np.stack([numbers // 256, numbers % 256, numbers % 7], axis=-1).astype(np.uint8).reshape(1, 32, 32, 3)
    moved = corrupt(image, "glass_blur", 1)[0].reshape(-1, 3)
    assert {tuple(pixel) for pixel in moved} < {tuple(pixel) for pixel in image[0].reshape(-1, 3)}
    source = moved[:, 0].astype(int) * 256 + moved[:, 1]
    assert 0.4 < (source != numbers).mean() < 0.9


def test_snow_and_frost_lighten_and_fog_keeps_the_range() -> None:
    images = photographs(32)
    assert (corrupt(images, "snow", 3) >= images).all()
    assert (corrupt(images, "frost", 1) >= images).all()
    fogged = corrupt(images, "fog", 5)
    assert (fogged.max(axis=(1, 2, 3)) <= images.max(axis=(1, 2, 3))).all()
    assert not corrupt(np.zeros((1, 32, 32, 3), np.uint8), "fog", 5).any()


def drawn(flakes: np.ndarray, degrees: float) -> Any:
    """A generator that draws these flakes, of mean 0.3 and deviation 0.2, and lets them fall in one direction."""

    def normal(mean: float, deviation: float, shape: tuple[int, ...]) -> np.ndarray:
        assert (mean, deviation, shape) == (0.3, 0.2, flakes.shape)
        return flakes

    def uniform(low: float, high: float) -> float:
        assert (low, high) == (-135, -45)
        return degrees

    return SimpleNamespace(normal=normal, uniform=uniform)


def test_snow_is_streaks_of_flakes_and_the_same_turned_over_a_whitened_image() -> None:
    image = photographs(32, 1)[0] / 255
    luma = 0.299 * image[:, :, 0] + 0.587 * image[:, :, 1] + 0.114 * image[:, :, 2]
    white = 0.75 * image + 0.25 * np.maximum(image, 1.5 * luma[:, :, None] + 0.5)
    none = np.full((32, 32, 1), 0.49)
    np.testing.assert_allclose(snow(image, (0.3, 0.2, 3, 0.5, 4, 2, 0.75), 1, drawn(none, -90)), white)
    flakes = none.copy()
    flakes[10, 8], flakes[20, 5] = 0.5, 7  # the bound is snow, and no flake is whiter than white
    fallen = np.zeros((32, 32, 1))
    fallen[10, 8], fallen[20, 5] = 0.5, 1
    streaks = blur_along(fallen, 2, 1, -60)
    found = snow(image, (0.3, 0.2, 1.5, 0.5, 4, 2, 0.75), 0.5, drawn(flakes, -60))  # radius and sigma are halved
    np.testing.assert_allclose(found, white + streaks + streaks[::-1, ::-1])
    large = snow(image, (0.3, 0.2, 4, 0.5, 4, 2, 0.75), 0.5, drawn(flakes, -60))  # twice as large as they were drawn
    zoom = zoomed(flakes, 2)
    streaks = blur_along(np.where(zoom < 0.5, 0, zoom.clip(0, 1)), 2, 1, -60)
    np.testing.assert_allclose(large, white + streaks + streaks[::-1, ::-1])


def test_frost_is_the_ridges_of_two_fractals_in_the_colour_of_ice() -> None:
    image = photographs(32, 1)[0] / 255
    generator = np.random.default_rng(4)
    coarse, fine = plasma(32, 1.3, generator), plasma(32, 1.7, generator)
    ridges = np.maximum((1 - abs(2 * coarse - 1)) ** 3, (1 - abs(2 * fine - 1)) ** 6)
    expected = 0.75 * image + 0.5 * np.stack([0.82 * ridges, 0.92 * ridges, ridges], axis=-1)
    np.testing.assert_allclose(frost(image, (0.75, 0.5), 1, np.random.default_rng(4)), expected)


def test_fog_is_a_fractal_dimmed_to_the_images_own_maximum() -> None:
    image = photographs(32, 1)[0] / 300
    added = 1.5 * plasma(32, 1.75, np.random.default_rng(4))
    most = image.max()
    expected = (image + added[:, :, None]) * most / (most + 1.5)
    np.testing.assert_allclose(fog(image, (1.5, 1.75), 1, np.random.default_rng(4)), expected)


@pytest.mark.parametrize(("side", "size"), [(1, 2), (2, 2), (5, 8), (16, 16)])
def test_plasma_is_diamond_square_point_by_point(side: int, size: int) -> None:
    generator = np.random.default_rng(2)
    heights = np.zeros((size, size))
    step, amplitude = size, 1.0
    while step > 1:
        half, count = step // 2, size // step
        noise = amplitude * generator.uniform(-1, 1, (3, count, count))  # of centres, of edges in rows, in columns
        cells = [(number, number[0] * step, number[1] * step) for number in np.ndindex(count, count)]
        for number, row, column in cells:
            around = [
                heights[(row + down) % size, (column + right) % size] for down in (0, step) for right in (0, step)
            ]
            heights[row + half, column + half] = np.mean(around) + noise[0][number]
        for edge, (down, right) in enumerate(((0, half), (half, 0)), 1):
            for number, row, column in cells:
                at = row + down, column + right
                around = [
                    heights[(at[0] + near[0]) % size, (at[1] + near[1]) % size]
                    for near in ((half, 0), (-half, 0), (0, half), (0, -half))
                ]
                heights[at] = np.mean(around) + noise[edge][number]
        step, amplitude = half, amplitude / 2.5**2
    heights = (heights - heights.min()) / np.ptp(heights)
    np.testing.assert_allclose(plasma(side, 2.5, np.random.default_rng(2)), heights[:side, :side], atol=1e-12)


def test_plasma_fills_its_range_and_is_rougher_where_it_fades_less() -> None:
    smooth, rough = (plasma(200, decay, np.random.default_rng(3)) for decay in (3, 1.4))
    for heights in (smooth, rough):
        assert heights.shape == (200, 200)
        assert heights.min() >= 0
        assert heights.max() <= 1
        assert np.ptp(heights) > 0.5
    assert np.abs(np.diff(rough)).mean() > 2 * np.abs(np.diff(smooth)).mean()


def test_bad_input_is_refused() -> None:
    images = photographs(32, 1)
    with pytest.raises(InputError, match="unknown corruption 'fogg': did you mean fog"):
        corrupt(images, "fogg", 1)
    with pytest.raises(InputError, match="severity 6: expected one of 1, 2, 3, 4, 5"):
        corrupt(images, "fog", 6)
    with pytest.raises(InputError, match="type float64: expected uint8"):
        corrupt(images / 255, "fog", 1)  # type: ignore[arg-type]  # what is tested
    with pytest.raises(InputError, match=r"shape \(32, 32, 3\)"):
        corrupt(images[0], "fog", 1)
