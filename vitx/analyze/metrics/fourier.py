"""Fourier analysis: the spectrum of each unit's output (docs/maths.md §5.1)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

from vitx.analyze.activations import Activations, Layout, feature_maps_of, unit_kinds
from vitx.analyze.metric import Metric, NotApplicable, first_to_last
from vitx.analyze.metric_figures import draw_by_kind
from vitx.analyze.spectrum import frequencies, log_amplitudes
from vitx.analyze.units import Kind
from vitx.core.files import Record
from vitx.core.panels import Results, panels

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Spectrum(Record):
    """Of one unit: log amplitude (nats) less that of DC, at `frequencies` in units of π radians a pixel."""

    kind: Kind | None
    frequencies: tuple[float, ...]
    log_amplitude: tuple[float, ...]


class Fourier(Record):
    """By unit, in the order of the network; `kind` is None for the embedding."""

    units: dict[str, Spectrum]


class FourierMetric:
    """log(|fft2|_{k,k} + 1e-6) of each unit's output, mean over images and channels, less its value at k = 0.

    Of feature maps (B, D, S, S), on the diagonal of the transform from DC to Nyquist, k = 0 … ⌊S/2⌋; the frequency is
    k·2π/S, in nats (Park & Kim, arXiv 2202.06709, §2; docs/maths.md §5.1).
    """

    def __init__(self, model: nn.Module) -> None:
        self._layout, self._kinds = Layout.of(model), unit_kinds(model)
        self._sums: dict[str, Tensor] = {}
        self._map_sizes: dict[str, int] = {}
        self._images = 0

    def add(self, batch: Activations) -> None:
        self._images += batch.images
        for name, features in feature_maps_of(self._layout, batch):
            found = log_amplitudes(features).double() * batch.images
            self._sums[name] = self._sums[name] + found if name in self._sums else found
            self._map_sizes[name] = features.shape[-1]

    def result(self) -> Fourier:
        if not self._sums:
            raise NotApplicable("no unit has a square feature map as its output")
        units = {}
        for name, kind in self._kinds.items():
            if name in self._sums:
                amplitudes = self._sums[name] / self._images
                units[name] = Spectrum(
                    kind=kind,
                    frequencies=tuple(frequencies(self._map_sizes[name])),
                    log_amplitude=tuple((amplitudes - amplitudes[0]).tolist()),
                )
        return Fourier(units=units)


def draw_fourier(results: Results) -> "Figure":
    records: Mapping[str, Fourier] = results
    figure, axes_of = panels(len(records) + 1)
    for axes, (network, record) in zip(axes_of, records.items(), strict=False):
        last = max(1, len(record.units) - 1)
        for index, spectrum in enumerate(record.units.values()):
            axes.plot(spectrum.frequencies, spectrum.log_amplitude, color=str(0.8 * (1 - index / last)), linewidth=1)
        axes.set(
            title=network,
            xlabel="frequency (π rad / pixel)",
            ylabel="Δ log amplitude to DC\n(light: early, dark: late)",
        )
    heights = {
        network: [(spectrum.kind, spectrum.log_amplitude[-1]) for spectrum in record.units.values()]
        for network, record in records.items()
    }
    draw_by_kind(axes_of[-1], heights, "Δ log amplitude, highest frequency")
    return figure


def _fourier_line(found: Fourier) -> str:
    return f"highest frequency {first_to_last(unit.log_amplitude[-1] for unit in found.units.values())}"


FOURIER_METRIC = Metric(
    title="Fourier analysis",
    reading="Log amplitude of feature maps relative to the constant part. A falling curve along the network means "
    "that high frequencies are lost: attention is a low-pass filter, MLPs and convolutions are not.",
    record=Fourier,
    line=_fourier_line,
    activation=lambda context: FourierMetric(context.source.model),
    streams=True,
    figure=draw_fourier,
)
