"""Figures of one run in grey: small panels with one line each, so that no colour has to be told from another."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vitx.core.panels import LINES, as_text, legend_names, panels
from vitx.train.loop.checkpoint import Metrics

COLUMNS = 4
LARGEST_WITH_NUMBERS = 20  # classes up to which the counts of a confusion matrix are written into its cells


def draw_curves(history: Sequence[Metrics], shown: int) -> Figure:
    """Each loss, top-1, NLL, ECE, the learning rate and the last block's CosSim by epoch; a line at `shown`."""
    curves = _curves(history)
    rows = math.ceil(len(curves) / COLUMNS)
    figure = Figure(figsize=(2.9 * COLUMNS, 2.2 * rows), layout="constrained")
    epochs = [row["epoch"] for row in history]
    for index, (title, values) in enumerate(curves.items(), 1):
        axes = figure.add_subplot(rows, COLUMNS, index)
        axes.plot(epochs, values, color="black", linewidth=1.2, marker="o" if len(epochs) == 1 else "")
        axes.axvline(shown, color="0.5", linestyle=":", linewidth=1)
        axes.set_title(title, fontsize="medium")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def _curves(history: Sequence[Metrics]) -> Mapping[str, Sequence[float]]:
    parts = {f"loss: {name}": [row["losses"][name] for row in history] for name in history[-1]["losses"]}
    measured = {
        "top-1 (%)": [100 * row["top1"] for row in history],
        "NLL": [row["nll"] for row in history],
        "ECE": [row["ece"] for row in history],
        "learning rate": [row["lr"] for row in history],
    }
    if history[-1]["cos_sim"]:
        measured["CosSim, last block"] = [row["cos_sim"][-1] for row in history]
    return {**parts, **measured}


def draw_layers(history: Sequence[Metrics], shown: int) -> Figure:
    """CosSim and spread of attention by block, after the first epoch and epoch `shown`; CosSim by block and epoch."""
    figure, (left, middle, right) = panels(3)
    chosen = {f"epoch {row['epoch']}": row for row in (history[0], history[shown - 1])}
    _by_block(left, {name: row["cos_sim"] for name, row in chosen.items()}, "CosSim of patches")
    _by_block(middle, {name: row["attention_std"] for name, row in chosen.items()}, "std of attention over keys")
    middle.set_ylim(bottom=0)
    values = np.array([row["cos_sim"] for row in history]).T  # (blocks, epochs)
    extent = (0.5, len(history) + 0.5, -0.5, len(values) - 0.5)
    low = min(0.0, float(values.min()))
    drawn = right.imshow(
        values, cmap="gray_r", vmin=low, vmax=1, origin="lower", aspect="auto", extent=extent, interpolation="nearest"
    )
    right.set(xlabel="epoch", ylabel="block")
    figure.colorbar(drawn, ax=right, label="CosSim of patches")
    for axes in (right.xaxis, right.yaxis):
        axes.set_major_locator(MaxNLocator(integer=True))
    return figure


def _by_block(axes: Axes, curves: Mapping[str, Sequence[float]], y: str) -> None:
    for (name, values), style in zip(curves.items(), reversed(LINES[: len(curves)]), strict=True):
        axes.plot(range(len(values)), values, label=name, markersize=4, linewidth=1.2, **style)
    axes.set(xlabel="block", ylabel=y)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize="small")


def draw_confusion(matrix: npt.NDArray[np.int64], class_names: Sequence[str]) -> Figure:
    """Counts by label (down) and prediction (right), darker for a larger share of the label; numbers where they fit."""
    classes = len(class_names)
    side = min(10.0, max(4.0, 0.45 * classes + 1.5))
    figure, (axes,) = panels(1, width=side, height=side)
    share = matrix / np.maximum(1, matrix.sum(axis=1, keepdims=True))
    axes.imshow(share, cmap="gray_r", vmin=0, vmax=1, interpolation="nearest")
    axes.set(xlabel="predicted", ylabel="label")
    if classes > LARGEST_WITH_NUMBERS:
        return figure
    names = [*map(as_text, legend_names(class_names))]
    axes.set(xticks=range(classes), yticks=range(classes), yticklabels=names)
    axes.set_xticklabels(names, rotation=90 if max(map(len, class_names)) > 2 else 0)
    for label, given in zip(*np.nonzero(matrix), strict=True):
        color = "white" if share[label, given] > 0.5 else "black"
        axes.text(given, label, str(matrix[label, given]), ha="center", va="center", color=color, fontsize="small")
    return figure
