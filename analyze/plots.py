"""Figures of results: each draws one network, or two beside each other; shapes and grey values tell them apart."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vitx.analyze.activation_metrics import AttentionCollapse, Fourier, OverSmoothing, SimilarityMatrix, Variance
from vitx.analyze.lesions import Lesions
from vitx.analyze.trust_plots import DRAWERS
from vitx.core.panels import LINES, WIDTH, Results, panels

# A kind of unit's mark. No two differ in colour alone.
_MARKS = {"attention": "o", "mlp": "s", "convolution": "^", None: "x"}
_NAMES = {"attention": "attention", "mlp": "MLP", "convolution": "convolution", None: "embedding"}
_HATCHES = {"attention": "", "mlp": "///", "convolution": "..."}


def draw(name: str, results: Results) -> Figure | None:
    """The figure of metric `name` for the networks in `results`; None for a metric that is only a table."""
    drawer = _DRAWERS.get(name)
    return None if drawer is None else drawer(results)


def _lines(axes: Axes, curves: Mapping[str, Sequence[float]], x: str, y: str) -> None:
    """One line a network, over the index of the layer."""
    for (network, values), style in zip(curves.items(), LINES, strict=False):
        axes.plot(range(len(values)), values, label=network, markersize=4, linewidth=1.2, **style)
    axes.set(xlabel=x, ylabel=y)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(curves) > 1:
        axes.legend(fontsize="small")


def _over_smoothing(results: Results) -> Figure:
    records: Mapping[str, OverSmoothing] = results
    figure, (left, right) = panels(2)
    cos_sim = {network: list(record.cos_sim.values()) for network, record in records.items()}
    spread = {network: list(record.attention_std.values()) for network, record in records.items()}
    _lines(left, cos_sim, "block", "CosSim of patch tokens")
    _lines(right, spread, "attention layer", "std of attention over keys")
    right.set_ylim(bottom=0)
    return figure


def _matrix(axes: Axes, record: SimilarityMatrix, title: str, x: str, y: str) -> None:
    values = np.array(
        [[np.nan if value is None else value for value in row] for row in record.matrix], dtype=np.float64
    )
    low = min(0.0, float(np.nanmin(values))) if np.isfinite(values).any() else 0.0
    drawn = axes.imshow(values, cmap="gray_r", vmin=low, vmax=1, origin="lower", interpolation="nearest")
    axes.set(title=title, xlabel=x, ylabel=y)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(MaxNLocator(integer=True))
    assert axes.figure is not None
    axes.figure.colorbar(drawn, ax=axes, label="similarity (1: the same)")


def _matrices(results: Results) -> Figure:
    figure, axes_of = panels(len(results), height=3.6)
    for axes, (network, record) in zip(axes_of, results.items(), strict=True):
        _matrix(axes, record, network, "layer, from the input on", "layer, from the input on")
    return figure


def _attention_collapse(results: Results) -> Figure:
    records: Mapping[str, AttentionCollapse] = results
    figure, axes_of = panels(len(records) + 1, height=3.6)
    for axes, (network, record) in zip(axes_of, records.items(), strict=False):
        title = f"{network}\n{record.similar_blocks} layers > {record.threshold:g} to the one before"
        _matrix(axes, record, title, "attention layer", "attention layer")
    diversity = {network: list(record.head_diversity.values()) for network, record in records.items()}
    _lines(axes_of[-1], diversity, "attention layer", "1 − cosine between heads")
    return figure


def _fourier(results: Results) -> Figure:
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
    _by_kind(axes_of[-1], heights, "Δ log amplitude, highest frequency")
    return figure


def _variance(results: Results) -> Figure:
    records: Mapping[str, Variance] = results
    figure, (axes,) = panels(1, width=1.4 * WIDTH)
    heights = {
        network: [(record.kinds[name], value) for name, value in record.variance.items()]
        for network, record in records.items()
    }
    _by_kind(axes, heights, "variance over space")
    axes.set_yscale("log")
    return figure


def _by_kind(axes: Axes, heights: Mapping[str, Sequence[tuple[Any, float]]], y: str) -> None:
    """Values along the network, each marked with the kind of its unit."""
    seen = set()
    for (network, values), style in zip(heights.items(), LINES, strict=False):
        axes.plot(
            range(len(values)),
            [value for _, value in values],
            color=style["color"],
            linestyle=style["linestyle"],
            linewidth=1,
            label=network if len(heights) > 1 else None,
        )
        for index, (kind, value) in enumerate(values):
            label = None if kind in seen else _NAMES[kind]
            seen.add(kind)
            filled = "white" if kind == "mlp" else style["color"]
            axes.plot(
                index, value, _MARKS[kind], color=style["color"], markerfacecolor=filled, markersize=5, label=label
            )
    axes.set(xlabel="unit, from the input on", ylabel=y)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize="small")


def _lesions(results: Results) -> Figure:
    records: Mapping[str, Lesions] = results
    figure, axes_of = panels(len(records), width=1.4 * WIDTH)
    for axes, (network, record) in zip(axes_of, records.items(), strict=True):
        seen = set()
        for index, unit in enumerate(record.units.values()):
            axes.bar(
                index,
                100 * unit.accuracy,
                color="0.75" if unit.kind == "attention" else "white",
                edgecolor="black",
                hatch=_HATCHES[unit.kind],
                label=None if unit.kind in seen else f"without one {_NAMES[unit.kind]} unit",
            )
            seen.add(unit.kind)
        axes.axhline(100 * record.accuracy, color="black", linestyle="--", linewidth=1, label="whole network")
        axes.set(title=network, xlabel="unit removed, from the input on", ylabel="accuracy (%)", ylim=(0, 100))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.18), ncols=2)
    return figure


_DRAWERS: dict[str, Callable[[Results], Figure]] = {
    "over-smoothing": _over_smoothing,
    "attention-collapse": _attention_collapse,
    "feature-similarity": _matrices,
    "fourier": _fourier,
    "variance": _variance,
    "cka": _matrices,
    "cka-between": _matrices,
    "lesions": _lesions,
    **DRAWERS,
}
