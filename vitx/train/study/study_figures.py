"""Figures of studies: rows differ in marks, line styles and grey values, never in colour alone."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from vitx.core.panels import HEIGHT, LINES, WIDTH, panels
from vitx.train.study.result import Row, Score, StudyResult, last_layers


def draw_study(result: StudyResult) -> Figure:
    """The figure of a study with at least one finished run."""
    return {"depth": _depth, "precision": _curves, "alternet": _staircase}.get(result.study, _rows)(result)


def _rows(result: StudyResult) -> Figure:
    """Top-1, CosSim and attention std of every row, one mark for each run; then CosSim of every block in grey."""
    rows, blocks = result.rows, bool(result.rows[0].cos_sim_by_block)
    figure, axes_of = panels(4 if blocks else 1, width=WIDTH * 0.95, height=0.9 + 0.36 * len(rows))
    _marks(axes_of[0], rows, [[100 * run.top1 for run in _runs(result, row)] for row in rows], "top-1 (%)")
    if blocks:
        similarity = [[float(np.mean(last_layers(run.cos_sim))) for run in _runs(result, row)] for row in rows]
        spread = [[float(np.mean(last_layers(run.attention_std))) for run in _runs(result, row)] for row in rows]
        _marks(axes_of[1], rows, similarity, "CosSim, last quarter of the blocks")
        _marks(axes_of[2], rows, spread, "std of attention over keys, last quarter")
        _by_block(axes_of[3], rows)
    for axes in axes_of[1:]:
        axes.set_yticklabels([])
    return figure


def _runs(result: StudyResult, row: Row) -> list[Score]:
    return [run for run in result.runs if run.variant == row.name]


def _marks(axes: Axes, rows: Sequence[Row], values: Sequence[Sequence[float]], x: str) -> None:
    """A circle for each run and a bar at the mean of a row; a dotted line at the mean of the first row."""
    for place, (row, of_runs) in enumerate(zip(rows, values, strict=True)):
        axes.plot(of_runs, [place] * len(of_runs), "o", color="0.45", markerfacecolor="none", markersize=5)
        axes.plot(np.mean(of_runs), place, "|", color="black", markersize=14, markeredgewidth=2)
        if row.name == rows[0].name:
            axes.axvline(float(np.mean(of_runs)), color="0.7", linestyle=":", linewidth=1, zorder=0)
    axes.set(xlabel=x, yticks=range(len(rows)), yticklabels=[row.name for row in rows])
    axes.invert_yaxis()


def _by_block(axes: Axes, rows: Sequence[Row]) -> None:
    """A cell for each block; rows of fewer blocks end earlier."""
    values = np.full((len(rows), max(len(row.cos_sim_by_block) for row in rows)), np.nan)
    for cells, row in zip(values, rows, strict=True):
        cells[: len(row.cos_sim_by_block)] = row.cos_sim_by_block
    drawn = axes.imshow(
        values, cmap="gray_r", vmin=min(0.0, float(np.nanmin(values))), vmax=1, aspect="auto", interpolation="nearest"
    )
    axes.set(xlabel="block", yticks=range(len(rows)))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    assert axes.figure is not None
    axes.figure.colorbar(drawn, ax=axes, label="CosSim of patches")


def _depth(result: StudyResult) -> Figure:
    """Accuracy and similarity by depth, a line for each kind of attention; bars are standard deviations over seeds."""
    figure, (left, right) = panels(2)
    kinds = dict.fromkeys(row.factors["attention"] for row in result.rows)
    for shift, (kind, style) in enumerate(zip(kinds, LINES, strict=False)):
        rows = [row for row in result.rows if row.factors["attention"] == kind]
        top1 = {row.factors["depth"]: row.top1 for row in rows}
        similarity = {row.factors["depth"]: row.cos_sim_last_block for row in rows}
        for axes, by_depth, scale in ((left, top1, 100), (right, similarity, 1)):
            depths = [depth for depth, spread in by_depth.items() if spread is not None]
            spreads = [spread for spread in by_depth.values() if spread is not None]
            means, bars = [scale * each.mean for each in spreads], [scale * (each.std or 0) for each in spreads]
            shifted = [depth + 0.3 * shift for depth in depths]  # so that the bars do not overlap
            axes.errorbar(shifted, means, bars, label=kind, markersize=4, linewidth=1.2, capsize=3, **style)
    left.set(xlabel="blocks", ylabel="top-1 (%)")
    right.set(xlabel="blocks", ylabel="CosSim of patches, last block")
    for axes in (left, right):
        axes.set_xticks(sorted({row.factors["depth"] for row in result.rows}))
    left.legend(fontsize="small")
    return figure


def _curves(result: StudyResult) -> Figure:
    """Loss and top-1 of every epoch: a row's mean over its seeds as a line, every run a thin one."""
    figure, (left, right) = panels(2)
    for row, style in zip(result.rows, LINES, strict=False):
        runs = _runs(result, row)
        for axes, curves in (
            (left, [run.loss_by_epoch for run in runs]),
            (right, [[100 * top1 for top1 in run.top1_by_epoch] for run in runs]),
        ):
            epochs = range(1, 1 + min(map(len, curves)))
            together = np.array([curve[: len(epochs)] for curve in curves])
            axes.plot(epochs, together.T, color=style["color"], linewidth=0.4)
            axes.plot(epochs, together.mean(axis=0), label=row.name, markersize=3, linewidth=1.2, **style)
    left.set(xlabel="epoch", ylabel="loss of training")
    right.set(xlabel="epoch", ylabel="top-1 (%)")
    for axes in (left, right):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    left.legend(fontsize="small")
    return figure


def _staircase(result: StudyResult) -> Figure:
    """The best top-1 so far as a line, and a mark for each step with its numbers of MSA units."""
    steps: Sequence[dict[str, Any]] = result.steps
    figure, (axes,) = panels(1, width=max(1.2 * WIDTH, 1.2 * len(steps)), height=1.1 * HEIGHT)
    best = [next(each for each in reversed(steps[: index + 1]) if each["kept"]) for index in range(len(steps))]
    axes.step(range(len(steps)), [100 * step["top1"] for step in best], where="post", color="black", linewidth=1.2)
    for kept, mark, label in ((True, "o", "kept"), (False, "x", "taken back")):
        chosen = [index for index, step in enumerate(steps) if step["kept"] is kept]
        heights = [100 * steps[index]["top1"] for index in chosen]
        axes.plot(chosen, heights, mark, color="black" if kept else "0.45", label=label)
    names = [" ".join(map(str, step["attention_depths"])) for step in steps]
    axes.set(xlabel="attention units of each stage", ylabel="top-1 (%)", xticks=range(len(steps)))
    axes.set_xticklabels(names, rotation=35, ha="right", fontsize="small")
    axes.margins(y=0.15)
    axes.legend(fontsize="small")
    return figure
