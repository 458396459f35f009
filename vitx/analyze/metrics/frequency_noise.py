"""Accuracy under noise of one frequency band (Park & Kim, arXiv 2202.06709, fig. 2b; docs/maths.md §5.3)."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from vitx.analyze.accuracy import AccuracyCounter, Labels, Predict, labelled_batches
from vitx.analyze.intervals import share_text
from vitx.analyze.metric import Metric, MetricContext
from vitx.analyze.metric_figures import ACCURACY, Curve, draw_curve
from vitx.analyze.predictor import predictor
from vitx.core.errors import InputError
from vitx.core.files import Record
from vitx.core.panels import LINES, Results, panels
from vitx.core.preprocess import UInt8Array
from vitx.core.probabilities import Float64Array

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Complex128Array = npt.NDArray[np.complex128]


class FrequencyRobustness(Record):
    """Accuracies, 0 to 1: `accuracy[i]` under noise of the band (`edges[i]`, `edges[i+1]`], `clean` without noise.

    Edges are in units of π radians a pixel. `std` is the noise's root mean square on the scale 0 to 1, before the noisy
    image is rounded and clipped to uint8; `applied_std[i]` that of the change after rounding and clipping.
    """

    images: int
    std: float
    edges: tuple[float, ...]
    clean: float
    accuracy: tuple[float, ...]
    applied_std: tuple[float, ...]


def frequency_robustness(
    predict: Predict,
    images: Iterable[UInt8Array],
    labels: Labels,
    *,
    bands: int = 10,
    std: float = 0.1,
    seed: int = 0,
) -> FrequencyRobustness:
    """Top-1 accuracy with noise of each band: `x + F⁻¹(F(δ) ⊙ M_f)`, δ white and M_f the ring |k|∞ around f.

    (Park & Kim, arXiv 2202.06709, fig. 2b; docs/maths.md §5.3.) Every band has the same power, `std²` for each value,
    in pixels before normalisation, so that bands can be compared; all bands of an image are cut from one δ.
    Convolutions lose more accuracy at high frequencies than attention does. images: batches uint8 (B, S, S, 3), read
    once; labels (N,). Raises InputError for more bands than S/2, or a std outside (0, 1].
    """
    if not 0 < std <= 1:
        raise InputError(f"std {std}: expected a value above 0 and at most 1, on the scale 0 to 1")
    counter = AccuracyCounter()
    squares = np.zeros(bands)
    values = 0
    for first, pixels, truth in labelled_batches(images, labels):
        counter.add(None, predict(pixels), truth)
        side = pixels.shape[1]
        spectra = white_spectra(side, range(first, first + len(pixels)), seed)
        for band, mask in enumerate(band_masks(side, bands)):
            noise = 255 * std * band_noise(spectra, mask)
            noisy = np.rint(pixels + noise).clip(0, 255).astype(np.uint8)
            counter.add(band, predict(noisy), truth)
            squares[band] += np.square((noisy.astype(np.float64) - pixels) / 255).sum()
        values += pixels.size
    return FrequencyRobustness(
        images=counter.images(None),
        std=std,
        edges=tuple(band / bands for band in range(bands + 1)),
        clean=counter.accuracy(None),
        accuracy=tuple(counter.accuracy(band) for band in range(bands)),
        applied_std=tuple(np.sqrt(squares / values).tolist()),
    )


def band_masks(side: int, bands: int) -> npt.NDArray[np.bool_]:
    """Masks (bands, S, ⌊S/2⌋+1) over rfft2's frequencies: |k|∞·2/S in (i/bands, (i+1)/bands]; the first includes 0.

    |k|∞ is the same at k and −k, so the half that rfft2 leaves out has the same mask, for even and odd S. Raises
    InputError for more bands than ⌊S/2⌋: some would be empty.
    """
    if not 1 <= bands <= side // 2:
        raise InputError(f"{bands} frequency bands of an image {side} pixels wide: expected 1 to {side // 2}")
    rows = np.abs(np.rint(np.fft.fftfreq(side) * side)).astype(int)
    farthest = np.maximum(rows[:, None], np.arange(side // 2 + 1))
    # ⌈2k·bands/S⌉ − 1 in integers: a frequency exactly on an edge must belong to the band below it.
    band = np.maximum(-(-2 * farthest * bands // side) - 1, 0)
    return np.asarray(band == np.arange(bands)[:, None, None])


def white_spectra(side: int, indices: Iterable[int], seed: int) -> Complex128Array:
    """rfft2 of white noise, (B, 3, S, ⌊S/2⌋+1); it depends on the image's index and the seed, not on the batches."""
    white = [np.random.default_rng((seed, index)).standard_normal((3, side, side)) for index in indices]
    return np.asarray(np.fft.rfft2(np.stack(white)))


def band_noise(spectra: Complex128Array, mask: npt.NDArray[np.bool_]) -> Float64Array:
    """Real noise (B, S, S, 3) of one band; each image's has root mean square 1."""
    side = spectra.shape[2]
    noise = np.fft.irfft2(spectra * mask, s=(side, side))
    noise /= np.sqrt(np.square(noise).mean(axis=(1, 2, 3), keepdims=True))
    return np.moveaxis(noise, 1, -1)


def measure_frequency_noise(context: MetricContext) -> FrequencyRobustness:
    source = context.source
    predict = predictor(source.model, source.preprocessing)
    bands = min(10, source.preprocessing.image_size // 2)
    return frequency_robustness(
        predict, context.batches(), context.images.labels, bands=bands, seed=context.options.seed
    )


def draw_frequency_noise(results: Results) -> "Figure":
    records: Mapping[str, FrequencyRobustness] = results
    figure, (axes,) = panels(1)
    for (network, record), style in zip(records.items(), LINES, strict=False):
        middles = [(low + high) / 2 for low, high in zip(record.edges, record.edges[1:], strict=False)]
        label = f"{network}, clean {100 * record.clean:.1f} %"
        draw_curve(axes, middles, Curve.of_shares(record.accuracy, record.images), label, style)
    axes.set(xlabel="frequency of the noise (π rad / pixel)", ylabel=ACCURACY, ylim=(0, 102))
    axes.legend(fontsize="small")
    return figure


def _noise_line(found: FrequencyRobustness) -> str:
    clean, low, high = (
        share_text(share, found.images) for share in (found.clean, found.accuracy[0], found.accuracy[-1])
    )
    return f"clean {clean}; lowest band {low}, highest {high}"


FREQUENCY_NOISE_METRIC = Metric(
    title="Noise by frequency",
    reading="Accuracy under noise of equal power in one band of frequencies.",
    claim="Park & Kim (2202.06709): convolutions suffer from noise of high frequencies, attention from low ones.",
    precision="Wilson's",
    record=FrequencyRobustness,
    line=_noise_line,
    measure=measure_frequency_noise,
    labels=True,
    options=("seed",),
    default=False,
    figure=draw_frequency_noise,
)
