"""Fourier analysis: the spectrum of each unit's output (docs/maths.md §5.1)."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from vitx.analyze.activations import Activations, unit_kinds
from vitx.analyze.intervals import Measured, ends_text, layer_intervals, rounded
from vitx.analyze.metric import Metric, NotApplicable
from vitx.analyze.metric_figures import draw_by_kind
from vitx.analyze.spectrum import frequencies, image_log_amplitudes
from vitx.analyze.steps import MapSamples, steps_text
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


class Fourier(Measured):
    """By unit, in the order of the network; `kind` is None for the embedding.

    intervals["highest"]: of the log amplitude at the highest frequency; ["step"]: of how much a unit raises it.
    """

    units: dict[str, Spectrum]
    step: dict[str, float]


class FourierMetric:
    """log(|fft2|_{k,k} + 1e-6) of each unit's output, mean over images and channels, less its value at k = 0.

    Of feature maps (B, D, S, S), on the diagonal of the transform from DC to Nyquist, k = 0 … ⌊S/2⌋; the frequency is
    k·2π/S, in nats (Park & Kim, arXiv 2202.06709, §2; docs/maths.md §5.1).
    """

    def __init__(self, model: nn.Module) -> None:
        self._kinds, self._amplitudes = unit_kinds(model), MapSamples(model, image_log_amplitudes)

    def add(self, batch: Activations) -> None:
        self._amplitudes.add(batch)

    def result(self) -> Fourier:
        values = self._amplitudes.after.values()
        if not values:
            raise NotApplicable("no unit has a square feature map as its output")
        order = [name for name in self._kinds if name in values]
        relative = {name: values[name] - values[name][:, :1] for name in order}
        highest = {name: found[:, -1] for name, found in relative.items()}
        before = {name: found[:, -1] - found[:, 0] for name, found in self._amplitudes.before.values().items()}
        steps = self._amplitudes.steps(highest, before)
        return Fourier(
            units={
                name: Spectrum(
                    kind=self._kinds[name],
                    frequencies=tuple(frequencies(self._amplitudes.sizes[name])),
                    log_amplitude=tuple(found.mean(axis=0).tolist()),
                )
                for name, found in relative.items()
            },
            step={name: float(found.mean()) for name, found in steps.items()},
            intervals={"highest": layer_intervals(highest), "step": layer_intervals(steps)},
            per_image={"log amplitude at the highest frequency, last unit": rounded([*highest.values()][-1])},
        )


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
        network: [
            (spectrum.kind, spectrum.log_amplitude[-1], record.interval("highest", name))
            for name, spectrum in record.units.items()
        ]
        for network, record in records.items()
    }
    draw_by_kind(axes_of[-1], heights, "Δ log amplitude, highest frequency")
    return figure


def _fourier_line(found: Fourier) -> str:
    highest = {name: unit.log_amplitude[-1] for name, unit in found.units.items()}
    kinds = {name: unit.kind for name, unit in found.units.items()}
    steps = steps_text(found.step, found.intervals["step"], kinds)
    return f"highest frequency {ends_text(highest, found.intervals['highest'])}; {steps}"


FOURIER_METRIC = Metric(
    title="Fourier analysis",
    reading="Log amplitude of feature maps relative to the constant part, along the diagonal of the spectrum; right: "
    "at the highest frequency, unit by unit.",
    claim="Park & Kim (2202.06709): attention lowers high frequencies, MLPs and convolutions raise them.",
    precision="bootstrap over images, right; the curves on the left are too many to carry one",
    record=Fourier,
    line=_fourier_line,
    activation=lambda context: FourierMetric(context.source.model),
    streams=True,
    figure=draw_fourier,
)
