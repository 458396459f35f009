"""Parts that the figures of several metrics share. Marks, hatches and greys tell curves apart, never colour alone."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from vitx.analyze.intervals import Interval
from vitx.analyze.similarity_matrix import SimilarityMatrix
from vitx.core.panels import LINES, Results, panels
from vitx.core.probabilities import wilson_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# By kind of unit; None is the embedding.
MARKS = {"attention": "o", "mlp": "s", "convolution": "^", None: "x"}
NAMES = {"attention": "attention", "mlp": "MLP", "convolution": "convolution", None: "embedding"}
# The bars of the first network, of the second, of the third.
BARS: tuple[dict[str, Any], ...] = (
    {"color": "0.75", "edgecolor": "black"},
    {"color": "white", "edgecolor": "black", "hatch": "///"},
    {"color": "0.45", "edgecolor": "black", "hatch": "..."},
)
HATCHES = {"attention": "", "mlp": "///", "convolution": "..."}

COLOURS = "cividis"  # even steps to the eye, also without colour vision and in grey
MOST_WRITTEN = 100  # entries up to which a matrix shows them as numbers


def whole_numbers(axis: "Axis") -> None:
    """Ticks at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))


class Curve(NamedTuple):
    """Values along the network, and each one's interval; None where there is none."""

    values: Sequence[float]
    intervals: Sequence[Interval | None]

    @classmethod
    def of(cls, values: Mapping[str, float], intervals: Mapping[str, Interval]) -> "Curve":
        return cls([*values.values()], [intervals.get(name) for name in values])

    @classmethod
    def of_shares(cls, shares: Iterable[float], n: int) -> "Curve":
        """Shares of n images in percent, with Wilson's intervals."""
        shares = list(shares)
        ends = [wilson_interval(round(share * n), n) for share in shares]
        return cls([100 * share for share in shares], [(100 * low, 100 * high) for low, high in ends])

    def errors(self) -> npt.NDArray[np.float64]:
        """Distances to the lower and the upper end, (2, K); NaN where there is no interval."""
        ends = [interval or (np.nan, np.nan) for interval in self.intervals]
        pairs = [(value - low, high - value) for value, (low, high) in zip(self.values, ends, strict=True)]
        # An interval of Wilson's around 0 or 1 may leave its value out by a rounding error.
        return np.maximum(np.array(pairs, dtype=np.float64).reshape(-1, 2).T, 0)


def draw_lines(axes: "Axes", curves: Mapping[str, Curve], x: str, y: str) -> None:
    """One line for each network, over the index of the layer, with bars of its intervals."""
    for (network, curve), style in zip(curves.items(), LINES, strict=False):
        draw_curve(axes, range(len(curve.values)), curve, network, style)
    axes.set(xlabel=x, ylabel=y)
    whole_numbers(axes.xaxis)
    if len(curves) > 1:
        axes.legend(fontsize="small")


def draw_curve(axes: "Axes", x: Sequence[float], curve: Curve, label: str | None, style: Mapping[str, Any]) -> None:
    axes.errorbar(
        x,
        curve.values,
        yerr=curve.errors(),
        label=label,
        markersize=4,
        linewidth=1.2,
        elinewidth=0.8,
        capsize=2,
        **style,
    )


def draw_matrix(axes: "Axes", record: SimilarityMatrix, title: str, x: str, y: str) -> None:
    """A matrix in colours from its smallest to its largest entry, the range in the title; None stays empty.

    The diagonal of a layer with itself is left out of the range. Entries of a small matrix are written into it.
    """
    values = np.array(
        [[np.nan if value is None else value for value in row] for row in record.matrix], dtype=np.float64
    )
    # Between two networks of the same layers there is nothing special about the diagonal, unless they are one.
    own = record.layers == record.columns and bool(np.allclose(values.diagonal(), 1, atol=1e-4, equal_nan=True))
    shown = np.where(np.eye(len(values), dtype=bool), np.nan, values) if own else values
    finite = shown[np.isfinite(shown)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    high = max(high, low + 1e-6)
    drawn = axes.imshow(values, cmap=COLOURS, vmin=low, vmax=high, origin="lower", interpolation="nearest")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(f"{title}\n{low:.3g} to {high:.3g}{' off the diagonal' if own else ''}", fontsize="medium")
    if values.size <= MOST_WRITTEN:
        _write_entries(axes, values, (low + high) / 2)
    for axis in (axes.xaxis, axes.yaxis):
        whole_numbers(axis)
    assert axes.figure is not None
    axes.figure.colorbar(drawn, ax=axes, label="similarity", extend="max" if finite.size < values.size else "neither")


def _write_entries(axes: "Axes", values: npt.NDArray[np.float64], middle: float) -> None:
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            colour = "black" if value > middle else "white"
            axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize="x-small", color=colour)


def draw_matrices(results: Results) -> "Figure":
    figure, axes_of = panels(len(results), height=3.6)
    for axes, (network, record) in zip(axes_of, results.items(), strict=True):
        draw_matrix(axes, record, network, "layer, from the input on", "layer, from the input on")
    return figure


def draw_by_kind(axes: "Axes", heights: Mapping[str, Sequence[tuple[Any, float, Interval | None]]], y: str) -> None:
    """Values along the network with their intervals, each marked with the kind of its unit."""
    seen = set()
    for (network, units), style in zip(heights.items(), LINES, strict=False):
        curve = Curve([value for _, value, _ in units], [interval for *_, interval in units])
        draw_curve(axes, range(len(units)), curve, network if len(heights) > 1 else None, {**style, "marker": ""})
        for index, (kind, value, _) in enumerate(units):
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
