"""The corruptions with numbers of chance, by their definitions, pixel by pixel, of numbers that were given or drawn."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import ndimage

from vitx.analyze.corruption import synthesis
from vitx.analyze.corruption.blurs import (
    blur_along,
    defocus_blur,
    glass_blur,
    motion_blur,
    zoom_blur,
    zoom_factors,
    zoomed,
)
from vitx.analyze.corruption.constants import CORRUPTIONS
from vitx.analyze.corruption.synthesis import corrupt

IMAGE = np.random.default_rng(9).random((24, 24, 3))
NO_CHANCE = np.random.default_rng(0)


def gives(*numbers: tuple[tuple[float, float], Any]) -> Any:
    """A generator whose `uniform` is asked with these bounds, in this order, and returns these numbers."""
    left = [*numbers]

    def uniform(low: float, high: float, shape: tuple[int, ...] = ()) -> Any:
        bounds, found = left.pop(0)
        assert (low, high) == pytest.approx(bounds)
        assert np.shape(found) == shape
        return found

    return SimpleNamespace(uniform=uniform)


def test_the_numbers_of_chance_are_those_of_the_seed_the_kind_the_severity_and_the_image() -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (2, 32, 32, 3), dtype=np.uint8)
    for number, image in enumerate(pixels):
        generators = [
            np.random.default_rng((5, CORRUPTIONS.index(kind), 2, 7 + number))
            for kind in ("gaussian_noise", "shot_noise", "impulse_noise")
        ]
        values = image / 255
        gaussian = values + generators[0].normal(0, 0.06, values.shape)
        shot = generators[1].poisson(values * 250) / 250
        hit, white = generators[2].random(values.shape) <= 0.02, generators[2].random(values.shape) <= 0.5
        expected = (gaussian, shot, np.where(hit, white, values))
        for kind, noisy in zip(("gaussian_noise", "shot_noise", "impulse_noise"), expected, strict=True):
            found = corrupt(pixels, kind, 2, seed=5, first=7)[number]
            np.testing.assert_array_equal(found, np.rint(noisy.clip(0, 1) * 255))


@pytest.mark.parametrize(("radius", "sigma", "scale"), [(3, 0.5, 1), (8, 0.5, 1), (18, 0.5, 0.5), (4, 0.1, 0.5)])
def test_a_defocused_pixel_is_the_mean_over_a_disk_with_a_soft_edge(radius: float, sigma: float, scale: float) -> None:
    wide = radius * scale > 8
    reach = math.ceil(radius * scale) if wide else 8
    squares = np.arange(-reach, reach + 1) ** 2
    disk = (np.add.outer(squares, squares) <= (radius * scale) ** 2).astype(float)
    taps = np.arange(-2, 3) if wide else np.arange(-1, 2)
    soft = np.exp(-(taps**2) / (2 * sigma**2))
    kernel = disk / disk.sum()
    for axis in (0, 1):
        kernel = ndimage.correlate1d(kernel, soft / soft.sum(), axis=axis, mode="mirror")
    expected = ndimage.convolve(IMAGE, kernel[:, :, None], mode="mirror")
    np.testing.assert_allclose(defocus_blur(IMAGE, (radius, sigma), scale, NO_CHANCE), expected, atol=1e-12)


@pytest.mark.parametrize(("strength", "scale"), [((0.5, 1, 1), 1), ((0.9, 4, 2), 0.5), ((0.7, 1, 2), 0.25)])
def test_a_pixel_behind_glass_is_a_copy_of_a_neighbour_one_after_the_other(
    strength: tuple[float, float, int], scale: float
) -> None:
    sigma, farthest = strength[0] * scale, max(1, round(strength[1] * scale))
    generator = np.random.default_rng(3)
    expected = ndimage.gaussian_filter(IMAGE, (sigma, sigma, 0), mode="nearest")
    places = range(24 - farthest, farthest, -1)
    for _ in range(strength[2]):
        down, right = generator.integers(-farthest, farthest, (2, len(places), len(places)))
        for i, row in enumerate(places):
            for j, column in enumerate(places):
                expected[row, column] = expected[row + down[i, j], column + right[i, j]]
    expected = ndimage.gaussian_filter(expected, (sigma, sigma, 0), mode="nearest")
    np.testing.assert_allclose(glass_blur(IMAGE, strength, scale, np.random.default_rng(3)), expected, atol=1e-12)


def test_motion_is_towards_a_direction_between_minus_45_and_45_degrees() -> None:
    found = motion_blur(IMAGE, (6, 3), 0.5, gives(((-45, 45), 30.0)))
    distances = np.arange(7)
    weights = np.exp(-(distances**2) / (2 * 1.5**2))
    expected = np.zeros_like(IMAGE)
    for distance, weight in zip(distances, weights / weights.sum(), strict=True):
        rows = np.arange(24) + round(distance * 0.5 - 1e-9)  # the nearest pixel, of two the nearer to the image
        columns = np.arange(24) + round(distance * math.cos(math.pi / 6))
        expected += weight * IMAGE[np.ix_(rows.clip(0, 23), columns.clip(0, 23))]
    np.testing.assert_allclose(found, expected)
    np.testing.assert_array_equal(found, blur_along(IMAGE, 3, 1.5, 30))


def test_a_zoomed_blur_is_the_mean_of_the_image_and_its_enlargements() -> None:
    factors = zoom_factors(3, 0.25)
    assert factors == [1, 1.25, 1.5]
    expected = np.mean([IMAGE, *(zoomed(IMAGE, factor) for factor in factors)], axis=0)
    np.testing.assert_allclose(zoom_blur(IMAGE, (3, 0.25), 1, NO_CHANCE), expected)


def test_three_points_of_an_affine_map_come_from_where_they_were() -> None:
    moves = np.array([[1, 0], [0, 1], [-1, 1]])
    rows, columns = synthesis._affine_positions(9, 2.5, gives(((-2.5, 2.5), moves.astype(float))))
    came = [(rows[place], columns[place]) for place in ((8, 7), (7, 2), (0, 2))]
    np.testing.assert_allclose(came, [(7, 7), (7, 1), (1, 1)], atol=1e-12)
    rows, columns = synthesis._affine_positions(2, 0.5, gives(((-0.5, 0.5), np.ones((3, 2)))))
    assert (rows.tolist(), columns.tolist()) == ([[0, 0], [1, 1]], [[0, 1], [0, 1]])


@pytest.mark.parametrize("share", [0.0, 0.125])
def test_an_elastic_image_is_moved_and_then_displaced_by_smooth_noise(share: float) -> None:
    """The same move of all three points is a shift; lengths are shares of the side, 24."""
    noise = np.random.default_rng(6).uniform(-1, 1, (2, 24, 24))
    asked = [((-1.5, 1.5), np.tile([1.0, -2.0], (3, 1))), ((-1, 1), noise)]
    found = synthesis._elastic_transform(IMAGE, (share, 0.25, 0.0625), 1, gives(*asked))
    moved = np.pad(IMAGE, ((1, 0), (0, 2), (0, 0)), mode="reflect")[:24, 2:]
    smooth = [ndimage.gaussian_filter(plane, 6, mode="reflect", truncate=3) for plane in noise]
    places = np.mgrid[:24, :24] + 24 * share * np.stack(smooth)
    channels = [ndimage.map_coordinates(moved[:, :, c], places, order=1, mode="reflect") for c in range(3)]
    np.testing.assert_allclose(found, np.stack(channels, axis=-1), atol=1e-12)


def test_pixels_keep_a_share_of_the_side_and_a_pixel_at_least() -> None:
    grey = np.repeat(np.arange(8.0)[:, None], 8, axis=1)[:, :, None].repeat(3, axis=2) * 16 / 255
    found = synthesis._pixelate(grey, (0.3,), 1, NO_CHANCE)  # two of 2.4
    np.testing.assert_array_equal(np.rint(255 * found[:, 0, 0]), [24] * 4 + [88] * 4)
    assert np.unique(synthesis._pixelate(grey, (0.1,), 1, NO_CHANCE) * 255).tolist() == [56]
