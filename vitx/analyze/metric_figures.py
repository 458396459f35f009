"""Parts that the figures of several metrics share. Marks, hatches and greys tell curves apart, never colour alone."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vitx.analyze.similarity_matrix import SimilarityMatrix
from vitx.core.panels import LINES, Results, panels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# By kind of unit; None is the embedding.
MARKS = {"attention": "o", "mlp": "s", "convolution": "^", None: "x"}
NAMES = {"attention": "attention", "mlp": "MLP", "convolution": "convolution", None: "embedding"}
HATCHES = {"attention": "", "mlp": "///", "convolution": "..."}


def whole_numbers(axis: "Axis") -> None:
    """Ticks at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))


def draw_lines(axes: "Axes", curves: Mapping[str, Sequence[float]], x: str, y: str) -> None:
    """One line for each network, over the index of the layer."""
    for (network, values), style in zip(curves.items(), LINES, strict=False):
        axes.plot(range(len(values)), values, label=network, markersize=4, linewidth=1.2, **style)
    axes.set(xlabel=x, ylabel=y)
    whole_numbers(axes.xaxis)
    if len(curves) > 1:
        axes.legend(fontsize="small")


def draw_matrix(axes: "Axes", record: SimilarityMatrix, title: str, x: str, y: str) -> None:
    """A matrix in greys, from 0 (or the smallest value, if negative) in white to 1 in black; None stays empty."""
    values = np.array(
        [[np.nan if value is None else value for value in row] for row in record.matrix], dtype=np.float64
    )
    low = min(0.0, float(np.nanmin(values))) if np.isfinite(values).any() else 0.0
    drawn = axes.imshow(values, cmap="gray_r", vmin=low, vmax=1, origin="lower", interpolation="nearest")
    axes.set(title=title, xlabel=x, ylabel=y)
    for axis in (axes.xaxis, axes.yaxis):
        whole_numbers(axis)
    assert axes.figure is not None
    axes.figure.colorbar(drawn, ax=axes, label="similarity (1: the same)")


def draw_matrices(results: Results) -> "Figure":
    figure, axes_of = panels(len(results), height=3.6)
    for axes, (network, record) in zip(axes_of, results.items(), strict=True):
        draw_matrix(axes, record, network, "layer, from the input on", "layer, from the input on")
    return figure


def draw_by_kind(axes: "Axes", heights: Mapping[str, Sequence[tuple[Any, float]]], y: str) -> None:
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
            label = None if kind in seen else NAMES[kind]
            seen.add(kind)
            filled = "white" if kind == "mlp" else style["color"]
            axes.plot(
                index, value, MARKS[kind], color=style["color"], markerfacecolor=filled, markersize=5, label=label
            )
    axes.set(xlabel="unit, from the input on", ylabel=y)
    whole_numbers(axes.xaxis)
    axes.legend(fontsize="small")


ACCURACY = "accuracy (%)"
