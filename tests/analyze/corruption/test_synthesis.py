"""The fifteen corruptions: exact definitions where they have one, statistics where they are random, and determinism."""

import colorsys
import io

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage
from sklearn.datasets import load_sample_image

from vitx.analyze.corruption.blurs import blur_along, zoom_factors, zoomed
from vitx.analyze.corruption.constants import CORRUPTIONS, strength
from vitx.analyze.corruption.synthesis import SEVERITIES, corrupt
from vitx.analyze.corruption.weather import plasma
from vitx.core.errors import InputError
from vitx.core.preprocess import UInt8Array

# Where a higher severity is a larger constant; the authors of the others trade one constant for another.
GROWING = set(CORRUPTIONS) - {"glass_blur", "motion_blur", "frost", "elastic_transform"}


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
