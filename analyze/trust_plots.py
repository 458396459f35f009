"""Figures of calibration, robustness and the loss surface; plots.py knows them by name."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vitx.analyze.adversarial import AdversarialRobustness
from vitx.analyze.confidence import Confidence
from vitx.analyze.hessian import HessianDensity, HessianSpectrum
from vitx.analyze.landscape import LossLandscape
from vitx.analyze.noise import FrequencyRobustness
from vitx.analyze.occlusion import Occlusion
from vitx.analyze.robustness import CorruptionRobustness
from vitx.analyze.trajectory import Trajectory
from vitx.core.panels import LINES, WIDTH, Results, panels

ACCURACY = "accuracy (%)"


def _confidence(results: Results) -> Figure:
    records: Mapping[str, Confidence] = results
    figure, (axes,) = panels(1)
    axes.plot([0, 1], [0, 1], color="0.7", linewidth=1)
    for (network, record), style in zip(records.items(), LINES, strict=False):
        filled = [(part.confidence, part.accuracy) for part in record.bins if part.count]
        axes.plot(*zip(*filled, strict=True), label=f"{network}, ECE {100 * record.ece:.1f} %", markersize=4, **style)
    axes.set(xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1.02))
    axes.legend(fontsize="small", loc="lower right")
    return figure


def _corruptions(results: Results) -> Figure:
    records: Mapping[str, CorruptionRobustness] = results
    figure, (left, right) = panels(2, width=1.2 * WIDTH, height=4.2)
    for (network, record), style in zip(records.items(), LINES, strict=False):
        by_severity = 100 * np.mean(list(record.accuracy.values()), axis=0)
        left.plot(record.severities, by_severity, label=network, markersize=4, **style)
        means = [100 * float(np.mean(values)) for values in record.accuracy.values()]
        right.plot(list(record.accuracy), means, markersize=4, **{**style, "linestyle": "none"})
        if record.clean is not None:
            left.axhline(100 * record.clean, color=style["color"], linewidth=0.8, linestyle=":")
    left.set(xlabel="severity (dotted: clean)", ylabel=f"{ACCURACY}, mean of corruptions")
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    left.legend(fontsize="small")
    right.set(xlabel="corruption", ylabel=f"{ACCURACY}, mean of severities")
    right.tick_params(axis="x", rotation=90)
    return figure


def _noise(results: Results) -> Figure:
    records: Mapping[str, FrequencyRobustness] = results
    figure, (axes,) = panels(1)
    for (network, record), style in zip(records.items(), LINES, strict=False):
        middles = [(low + high) / 2 for low, high in zip(record.edges, record.edges[1:], strict=False)]
        values = [100 * value for value in record.accuracy]
        axes.plot(middles, values, label=f"{network}, clean {100 * record.clean:.1f} %", markersize=4, **style)
    axes.set(xlabel="frequency of the noise (π rad / pixel)", ylabel=ACCURACY, ylim=(0, 102))
    axes.legend(fontsize="small")
    return figure


def _occlusion(results: Results) -> Figure:
    records: Mapping[str, Occlusion] = results
    figure, axes_of = panels(len(records))
    for axes, (network, record) in zip(axes_of, records.items(), strict=True):
        shares = [0.0, *(100 * ratio for ratio in record.ratios)]
        curves = {"random": record.random, "most salient": record.most_salient, "least salient": record.least_salient}
        for (name, values), mark in zip(curves.items(), ("o-k", "v--k", "^:k"), strict=True):
            if values is not None:
                points = [100 * record.clean, *(100 * value for value in values)]
                axes.plot(shares, points, mark, markersize=4, linewidth=1.2, label=name)
        axes.set(title=network, xlabel="patches painted over (%)", ylabel=ACCURACY)
        axes.legend(fontsize="small")
    return figure


def _adversarial(results: Results) -> Figure:
    records: Mapping[str, AdversarialRobustness] = results
    figure, (axes,) = panels(1)
    for (network, record), style in zip(records.items(), LINES, strict=False):
        radii = [0.0, *(255 * epsilon for epsilon in record.epsilons)]
        for name, values, line in (("FGSM", record.fgsm, ":"), ("PGD", record.pgd, "-")):
            points = [100 * record.clean, *(100 * value for value in values)]
            axes.plot(radii, points, label=f"{network}, {name}", markersize=4, **{**style, "linestyle": line})
    axes.set(xlabel="largest change of a pixel, ε (of 255)", ylabel=ACCURACY)
    axes.legend(fontsize="small")
    return figure


def _hessian(results: Results) -> Figure:
    records: Mapping[str, HessianSpectrum] = results
    figure, (axes,) = panels(1)
    values = {
        network: [value for batch in record.batches for value in batch.values] for network, record in records.items()
    }
    edges = np.histogram_bin_edges(np.concatenate([np.array(part) for part in values.values()]), bins=20)
    for (network, part), hatch in zip(values.items(), ("", "///"), strict=False):
        axes.hist(
            part,
            bins=edges.tolist(),
            histtype="stepfilled",
            alpha=0.6,
            color="0.7",
            edgecolor="black",
            hatch=hatch,
            label=network,
        )
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set(xlabel="largest eigenvalues of each batch", ylabel="count")
    axes.legend(fontsize="small")
    return figure


def _density(results: Results) -> Figure:
    records: Mapping[str, HessianDensity] = results
    figure, (axes,) = panels(1, width=1.2 * WIDTH)
    for (network, record), style in zip(records.items(), LINES, strict=False):
        density = np.maximum(record.smoothed.density, 1e-12)
        axes.plot(record.smoothed.grid, density, label=network, linewidth=1.2, **{**style, "marker": ""})
    axes.set(xlabel="eigenvalue", ylabel="density", yscale="log", ylim=(1e-9, None))
    axes.legend(fontsize="small")
    return figure


def _landscape(results: Results) -> Figure:
    records: Mapping[str, LossLandscape] = results
    figure, axes_of = panels(len(records), height=3.6)
    for axes, (network, record) in zip(axes_of, records.items(), strict=True):
        nll = np.array([[np.nan if value is None else value for value in row] for row in record.nll])
        drawn = axes.contourf(record.axis, record.axis, nll, levels=12, cmap="gray_r")
        lines = axes.contour(record.axis, record.axis, nll, levels=12, colors="black", linewidths=0.5)
        axes.clabel(lines, fontsize="x-small")
        axes.set(title=network, xlabel="second direction (filter norms)", ylabel="first direction (filter norms)")
        figure.colorbar(drawn, ax=axes, label="NLL (nats)")
    return figure


def _trajectory(results: Results) -> Figure:
    records: Mapping[str, Trajectory] = results
    figure = Figure(figsize=(WIDTH, WIDTH), layout="constrained")
    axes: Axes = figure.add_subplot(projection="polar")
    for (network, record), style in zip(records.items(), LINES, strict=False):
        angles = [0.0 if angle is None else angle for angle in record.angle]
        axes.plot(angles, record.radius, label=network, markersize=4, **style)
    axes.set(xlabel="angle to the way to the last weights", ylabel="distance from the first weights")
    axes.legend(fontsize="small")
    return figure


DRAWERS: dict[str, Callable[[Any], Figure]] = {
    "confidence": _confidence,
    "corruptions": _corruptions,
    "frequency-noise": _noise,
    "occlusion": _occlusion,
    "adversarial": _adversarial,
    "hessian": _hessian,
    "hessian-density": _density,
    "landscape": _landscape,
    "trajectory": _trajectory,
}
