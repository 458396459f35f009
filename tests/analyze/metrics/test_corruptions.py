"""Accuracy under corruptions and under noise of one frequency band, of classifiers whose answers are known."""

import json
from pathlib import Path

import numpy as np
import pytest

from run_fixture import ColourMean, digits_source
from vitx.analyze.corruption.constants import CORRUPTIONS
from vitx.analyze.corruption.copies import open_corrupted_copies
from vitx.analyze.corruption.synthesis import corrupt
from vitx.analyze.metric import AnalysisOptions, MetricContext
from vitx.analyze.metrics.corruptions import (
    ALEXNET_ERRORS,
    CORRUPTIONS_METRIC,
    copies_robustness,
    corruption_robustness,
    mean_corruption_error,
)
from vitx.analyze.metrics.frequency_noise import band_masks, band_noise, frequency_robustness, white_spectra
from vitx.analyze.predictor import predictor
from vitx.core.errors import InputError
from vitx.core.preprocess import Preprocessing, UInt8Array
from vitx.data.open import open_images


@pytest.fixture(scope="module")
def digits() -> tuple[UInt8Array, np.ndarray]:
    images = open_images("digits", "val").first(40)
    return next(images.batches(Preprocessing(image_size=32), 40)), images.labels


@pytest.fixture(scope="module")
def nearest_mean() -> "NearestMean":
    return NearestMean()


class NearestMean:
    """Logits are minus the squared distance to each class's mean image: 89 % of the digits."""

    def __init__(self) -> None:
        images = open_images("digits", "train").first(500)
        pixels = next(images.batches(Preprocessing(image_size=32), 500)).astype(np.float64)
        self.means = np.stack([pixels[images.labels == digit].mean(axis=0).ravel() for digit in range(10)])

    def __call__(self, images: UInt8Array) -> np.ndarray:
        flat = images.reshape(len(images), -1).astype(np.float64)
        return np.asarray(-np.square(flat[:, None] - self.means).sum(axis=2))


def test_corruption_robustness_is_accuracy_on_corrupted_images(
    digits: tuple[UInt8Array, np.ndarray], nearest_mean: NearestMean
) -> None:
    images, labels = digits
    chosen, severities = ("impulse_noise", "elastic_transform", "brightness"), (5, 2)
    batches = [images[:17], images[17:18], images[18:]]
    measured = corruption_robustness(nearest_mean, batches, labels, chosen, severities, seed=3)
    for name in chosen:
        for severity, accuracy in zip(severities, measured.accuracy[name], strict=True):
            predicted = nearest_mean(corrupt(images, name, severity, seed=3)).argmax(axis=1)
            assert accuracy == (predicted == labels).mean()
    assert measured.clean == (nearest_mean(images).argmax(axis=1) == labels).mean() > 0.8
    assert measured.mean_accuracy == pytest.approx(np.mean(list(measured.accuracy.values())))
    assert min(measured.accuracy["elastic_transform"]) < (measured.clean or 0)
    assert measured.mce is None
    low, high = measured.intervals["mean_accuracy"][""]
    assert low < measured.mean_accuracy < high
    first_seed = corruption_robustness(nearest_mean, batches, labels, chosen, severities)
    assert first_seed == corruption_robustness(nearest_mean, batches, labels, chosen, severities, seed=0) != measured
    json.dumps(measured.model_dump(mode="json"), allow_nan=False)


def test_all_fifteen_at_five_severities_by_default(
    digits: tuple[UInt8Array, np.ndarray], nearest_mean: NearestMean
) -> None:
    measured = corruption_robustness(nearest_mean, [digits[0][:5]], digits[1][:5], baseline_errors=ALEXNET_ERRORS)
    assert tuple(measured.accuracy) == CORRUPTIONS
    assert {len(values) for values in measured.accuracy.values()} == {5}
    errors = [1 - np.mean(measured.accuracy[name]) for name in CORRUPTIONS]
    ratios = [error / ALEXNET_ERRORS[name] for error, name in zip(errors, CORRUPTIONS, strict=True)]
    assert measured.mce == pytest.approx(np.mean(ratios))


def test_the_metric_of_a_network_is_of_its_pixels_and_of_the_options(tmp_path: Path) -> None:
    """Without copies the images are corrupted by the seed; of copies as many are taken as there are images."""
    source = digits_source("colours", ColourMean(10))
    images = open_images("digits", "val").first(3)
    context = MetricContext(source, images, AnalysisOptions(seed=3, batch_size=2))
    predict = predictor(source.model, source.preprocessing)
    pixels = next(images.batches(source.preprocessing, 3))
    assert CORRUPTIONS_METRIC.measure is not None
    found = CORRUPTIONS_METRIC.measure(context)
    assert found == corruption_robustness(predict, [pixels], images.labels, seed=3)
    np.save(tmp_path / "fog.npy", np.random.default_rng(0).integers(0, 256, (25, 32, 32, 3), dtype=np.uint8))
    np.save(tmp_path / "labels.npy", np.arange(25) % 10)
    copies = open_corrupted_copies(tmp_path, source.class_names)
    for skip_bad in (False, True):
        options = AnalysisOptions(batch_size=2, corrupted=tmp_path, skip_bad=skip_bad)
        of_copies = CORRUPTIONS_METRIC.measure(context._replace(options=options))
        assert of_copies == copies_robustness(predict, copies, source.preprocessing, limit=3)


def test_mean_corruption_error() -> None:
    assert mean_corruption_error({"fog": 0.3, "snow": 0.5}, {"fog": 0.6, "snow": 0.25}) == pytest.approx(1.25)
    assert mean_corruption_error(ALEXNET_ERRORS, ALEXNET_ERRORS) == pytest.approx(1)


def test_bad_input_is_refused(digits: tuple[UInt8Array, np.ndarray], nearest_mean: NearestMean) -> None:
    images, labels = digits
    with pytest.raises(InputError, match="unknown corruption 'rain'"):
        corruption_robustness(nearest_mean, [images], labels, ["rain"])
    with pytest.raises(InputError, match="severity 9"):
        corruption_robustness(nearest_mean, [images], labels, ["fog"], [9])
    with pytest.raises(InputError, match="at least one of each"):
        corruption_robustness(nearest_mean, [images], labels, [])
    with pytest.raises(InputError, match="baseline has no error above 0 for snow"):
        corruption_robustness(nearest_mean, [images], labels, ["fog", "snow"], baseline_errors={"fog": 0.5, "snow": 0})
    with pytest.raises(InputError, match="40 images and 41 labels"):
        corruption_robustness(nearest_mean, [images], np.append(labels, 0), ["fog"], [1])
    with pytest.raises(InputError, match="more images than the 39 labels"):
        corruption_robustness(nearest_mean, [images], labels[:39], ["fog"], [1])
    with pytest.raises(InputError, match=r"shape \(32, 32, 3\)"):
        corruption_robustness(nearest_mean, images, labels, ["fog"], [1])
    with pytest.raises(InputError, match="20 frequency bands of an image 32 pixels wide: expected 1 to 16"):
        frequency_robustness(nearest_mean, [images], labels, bands=20)
    with pytest.raises(InputError, match="std 0"):
        frequency_robustness(nearest_mean, [images], labels, std=0)


@pytest.mark.parametrize(("side", "bands"), [(32, 10), (32, 16), (33, 10), (7, 3), (8, 4), (224, 10), (2, 1)])
def test_band_noise_is_real_of_equal_power_and_in_its_ring(side: int, bands: int) -> None:
    spectra = white_spectra(side, range(4, 6), seed=1)
    waves = np.abs(np.fft.fftfreq(side)) * 2
    farthest = np.maximum(waves[:, None], waves)
    covered = np.zeros((side, side), dtype=int)
    for band, mask in enumerate(band_masks(side, bands)):
        noise = band_noise(spectra, mask)
        assert noise.shape == (2, side, side, 3)
        assert noise.dtype == np.float64
        np.testing.assert_allclose(np.square(noise).mean(axis=(1, 2, 3)), 1)
        power = np.square(np.abs(np.fft.fft2(noise, axes=(1, 2)))).sum(axis=(0, 3))
        inside = (farthest > band / bands + 1e-9) & (farthest <= (band + 1) / bands + 1e-9)
        inside |= (farthest == 0) & (band == 0)
        assert power[~inside].sum() < 1e-20 * power.sum()
        assert (power[inside] > 0).all()
        covered += inside
    assert (covered == 1).all()


@pytest.mark.parametrize("side", range(2, 41))
def test_no_band_is_empty(side: int) -> None:
    for bands in range(1, side // 2 + 1):
        masks = band_masks(side, bands)
        assert masks.any(axis=(1, 2)).all()
        assert (masks.sum(axis=0) == 1).all()


def test_noise_of_an_image_is_its_own_whatever_the_batches() -> None:
    one, three = white_spectra(16, [7], seed=2), white_spectra(16, range(6, 9), seed=2)
    np.testing.assert_allclose(one[0], three[1])
    assert not np.allclose(three[0], three[1])
    assert not np.allclose(white_spectra(16, [7], seed=3), one)


def test_noise_is_added_to_pixels_of_255_levels_and_rounded() -> None:
    images, seen = np.full((2, 16, 16, 3), 128, np.uint8), list[UInt8Array]()
    images[:, 8:] = 250

    def keeping(batch: UInt8Array) -> np.ndarray:
        seen.append(batch)
        return np.eye(2)[: len(batch)]

    measured = frequency_robustness(keeping, [images[:1], images[1:]], np.arange(2), bands=2, std=0.5, seed=4)
    for index, batch in enumerate((seen[:3], seen[3:])):
        noises = [band_noise(white_spectra(16, [index], 4), mask) for mask in band_masks(16, 2)]
        expected = [images[:1], *(np.rint(images[:1] + 127.5 * noise).clip(0, 255) for noise in noises)]
        for given, found in zip(expected, batch, strict=True):
            np.testing.assert_array_equal(given, found)
    changes = [np.concatenate([seen[band], seen[band + 3]]) / 255 - images / 255 for band in (1, 2)]
    assert measured.applied_std == pytest.approx([np.sqrt(np.square(change).mean()) for change in changes])


def test_a_classifier_of_the_finest_pattern_is_hurt_by_its_band_alone() -> None:
    checkers = np.indices((16, 16)).sum(axis=0)[None, :, :, None] % 2 * 2 - 1
    labels = np.arange(60) % 2
    images = np.broadcast_to(128 + 4 * np.where(labels, 1, -1)[:, None, None, None] * checkers, (60, 16, 16, 3))

    def by_checkers(batch: UInt8Array) -> np.ndarray:
        phase = ((batch.astype(float) - 128) * checkers).mean(axis=(1, 2, 3))
        return np.stack([-phase, phase], axis=1)

    measured = frequency_robustness(by_checkers, [images.astype(np.uint8)], labels, bands=8, std=0.4)
    assert measured.clean == 1
    assert measured.accuracy[:7] == (1,) * 7
    assert measured.accuracy[7] < 0.9
    assert measured.edges == pytest.approx(np.arange(9) / 8)
    assert all(0.3 < applied < 0.4 for applied in measured.applied_std)  # what clipping leaves of .4 around mid-grey
    weak = frequency_robustness(by_checkers, [images.astype(np.uint8)], labels, bands=8, std=0.05)
    assert weak.applied_std == pytest.approx([0.05] * 8, rel=1e-2)
    json.dumps(measured.model_dump(mode="json"), allow_nan=False)
