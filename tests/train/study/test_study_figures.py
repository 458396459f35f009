"""What is drawn of each study: the numbers of the lines and marks, and their labels."""

from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from numpy.testing import assert_allclose

from vitx.core.panels import png
from vitx.train.study.result import Score, StudyResult, Variant, rows_of
from vitx.train.study.study_figures import draw_study
from vitx.train.study.variants import STUDIES

FACTORS = [{"depth": 6, "attention": "plain"}, {"depth": 12, "attention": "plain"}]
FACTORS += [{"depth": 6, "attention": "local"}, {"depth": 12, "attention": "local"}]


def score(variant: str, seed: int, top1: float, blocks: int = 4, epochs: int = 2) -> Score:
    """Similarities 0.1, 0.2, … and deviations 0.01, 0.02, … of the blocks, more of each by the seed."""
    steps = np.arange(1, 1 + blocks)
    return Score(
        variant=variant,
        seed=seed,
        epochs=epochs,
        top1=top1,
        best_top1=top1,
        nll=0.5,
        cos_sim=tuple((0.1 * steps + 0.2 * seed).tolist()),
        attention_std=tuple((0.01 * steps + 0.02 * seed).tolist()),
        loss_by_epoch=tuple(2.0 - 0.5 * epoch - seed for epoch in range(epochs)),
        top1_by_epoch=tuple(0.25 * (1 + epoch) + 0.125 * seed for epoch in range(epochs)),
        seconds=1.0,
    )


def result(kind: str, runs: list[Score], steps: list[dict[str, Any]] | None = None) -> StudyResult:
    names = dict.fromkeys(run.variant for run in runs)
    variants = [Variant(name, (), factors) for name, factors in zip(names, FACTORS, strict=False)]
    rows = tuple(rows_of(variants, runs))
    return StudyResult.model_construct(study=kind, rows=rows, runs=tuple(runs), steps=tuple(steps or ()))


def lines(axes: Axes) -> list[tuple[list[float], list[float]]]:
    return [(np.asarray(line.get_xdata()).tolist(), np.asarray(line.get_ydata()).tolist()) for line in axes.lines]


def ticks(axes: Axes) -> list[str]:
    return [label.get_text() for label in axes.get_yticklabels()]


@pytest.mark.parametrize("kind", STUDIES)
@pytest.mark.parametrize(("blocks", "seeds"), [(24, 3), (0, 1)])
def test_every_study_has_a_figure(kind: str, blocks: int, seeds: int) -> None:
    """Rows may have different depths."""
    runs = [
        score(variant, seed, 0.5, depth, epochs=1 + seed)
        for seed in range(seeds)
        for variant, depth in (("none", blocks), ("cosine", blocks // 2))
    ]
    steps = [{"attention_depths": [0, i], "top1": 0.9, "kept": i < 2} for i in range(3)]
    assert png(draw_study(result(kind, runs, steps))).startswith(b"\x89PNG")


def test_a_row_has_a_mark_for_each_run_and_one_at_their_mean() -> None:
    runs = [score("plain", 0, 0.5), score("plain", 1, 0.75), score("mixed", 0, 0.25, 2)]
    figure = draw_study(result("ablation", runs))
    top1, similarity, spread, blocks, _bar = figure.axes
    assert [axes.get_xlabel() for axes in figure.axes[:4]] == [
        "top-1 (%)",
        "CosSim, last quarter of the blocks",
        "std of attention over keys, last quarter",
        "block",
    ]
    for axes, of_plain, of_mixed in (
        (top1, [50.0, 75.0], 25.0),
        (similarity, [0.4, 0.6], 0.2),
        (spread, [0.04, 0.06], 0.02),
    ):
        (xs, ys), mean, baseline, (mixed, _), mean_of_mixed = lines(axes)
        assert_allclose(xs, of_plain)
        assert ys == [0, 0]
        assert_allclose(mean[0], [np.mean(of_plain)])
        assert mean[1] == [0]
        assert_allclose(baseline[0], [np.mean(of_plain)] * 2)
        assert_allclose([mixed, mean_of_mixed[0]], [[of_mixed]] * 2)
        assert mean_of_mixed[1] == [1]
        assert axes.yaxis_inverted()  # the first row is on top
        of_runs, of_mean, of_first = axes.lines[:3]
        assert of_runs.get_markerfacecolor() == "none"  # runs of one result are seen behind each other
        assert of_first.get_zorder() < min(of_runs.get_zorder(), of_mean.get_zorder())
    assert [ticks(axes) for axes in (top1, similarity, spread, blocks)] == [["plain", "mixed"], *[["", ""]] * 3]
    assert blocks.get_aspect() == "auto"  # a row is as high as those of the marks
    (image,) = blocks.images
    drawn: Any = np.ma.filled(np.ma.asarray(image.get_array()), np.nan)
    assert_allclose(drawn, [[0.2, 0.3, 0.4, 0.5], [0.1, 0.2, np.nan, np.nan]])
    assert image.get_clim() == (0, 1)


def test_a_similarity_below_zero_is_in_the_scale_and_networks_without_blocks_have_one_panel() -> None:
    below = score("plain", 0, 0.5).model_copy(update={"cos_sim": (0.5, -0.25)})
    (image,) = draw_study(result("methods", [below])).axes[3].images
    assert image.get_clim() == (-0.25, 1)
    assert len(draw_study(result("methods", [score("plain", 0, 0.5, 0)])).axes) == 1


def test_a_kind_of_attention_is_a_line_over_the_depths() -> None:
    runs = [
        score(name, seed, top1 + 0.1 * seed)
        for name, top1 in (("6-plain", 0.5), ("12-plain", 0.6), ("6-local", 0.7), ("12-local", 0.8))
        for seed in range(2)
    ]
    figure = draw_study(result("depth", runs))
    left, right = figure.axes
    assert [(axes.get_xlabel(), axes.get_ylabel()) for axes in (left, right)] == [
        ("blocks", "top-1 (%)"),
        ("blocks", "CosSim of patches, last block"),
    ]
    assert [*left.get_xticks()] == [*right.get_xticks()] == [6, 12]
    panels: tuple[tuple[Axes, Any, float], ...] = (
        (left, [[55, 65], [75, 85]], 5.0),
        (right, [[0.5] * 2] * 2, 0.1),
    )
    for axes, means, half in panels:
        for bars, label, xs, ys in zip(axes.containers, ("plain", "local"), ([6, 12], [6.3, 12.3]), means, strict=True):
            assert bars.get_label() == label
            line, _, (collection,) = bars
            assert_allclose(line.get_xydata(), np.transpose([xs, ys]))
            for segment, y in zip(collection.get_segments(), ys, strict=True):
                assert_allclose(segment[:, 1], [y - half * 2**0.5, y + half * 2**0.5])
    legend = left.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["plain", "local"]
    (bars,) = draw_study(result("depth", [score("6-plain", 0, 0.5, 0)])).axes[0].containers
    assert_allclose(bars[0].get_xydata(), [[6, 50]])


def test_every_epoch_is_on_a_curve_as_far_as_all_seeds_go() -> None:
    figure = draw_study(result("precision", [score("float32", 0, 0.5, epochs=3), score("float32", 1, 0.5)]))
    left, right = figure.axes
    assert lines(left) == [([1, 2], [2.0, 1.5]), ([1, 2], [1.0, 0.5]), ([1, 2], [1.5, 1.0])]
    assert lines(right) == [([1, 2], [25, 50]), ([1, 2], [37.5, 62.5]), ([1, 2], [31.25, 56.25])]
    assert [(axes.get_xlabel(), axes.get_ylabel()) for axes in (left, right)] == [
        ("epoch", "loss of training"),
        ("epoch", "top-1 (%)"),
    ]
    legend = left.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["float32"]


def test_the_build_up_is_a_staircase_of_what_was_kept() -> None:
    steps = [
        {"attention_depths": [0, 0], "top1": 0.5, "kept": True},
        {"attention_depths": [0, 1], "top1": 0.75, "kept": True},
        {"attention_depths": [1, 1], "top1": 0.25, "kept": False},
    ]
    (axes,) = draw_study(result("alternet", [score("msa-0-0", 0, 0.5, 0)], steps)).axes
    assert lines(axes) == [([0, 1, 2], [50, 75, 75]), ([0, 1], [50, 75]), ([2], [25])]
    assert axes.lines[0].get_drawstyle() == "steps-post"  # the best so far stays until a step is kept
    assert [label.get_text() for label in axes.get_xticklabels()] == ["0 0", "0 1", "1 1"]
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["kept", "taken back"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("attention units of each stage", "top-1 (%)")


def test_a_long_build_up_has_room_for_the_names_of_its_steps() -> None:
    def width(count: int) -> float:
        steps = [{"attention_depths": [0, 0, 0, 0], "top1": 0.5, "kept": True}] * count
        figure = draw_study(result("alternet", [score("msa-0-0", 0, 0.5, 0)], steps))
        return float(figure.get_figwidth())

    assert [width(1), width(10), width(20)] == pytest.approx([5.04, 12, 24])
