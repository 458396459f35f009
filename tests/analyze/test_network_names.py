"""What networks are called in tables, figures and legends."""

from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib import rc_context

from run_fixture import digits_source, trained_deepvit
from vitx.analyze import Analysis, AnalysisOptions, analyze
from vitx.analyze.analysis_report import ReportWriter, draw, figure, network_names
from vitx.analyze.images import open_analysis_images
from vitx.core.panels import legend_names, png


@pytest.fixture(scope="module")
def found() -> Analysis:
    source, images = digits_source("deepvit", trained_deepvit()), open_analysis_images("digits", 24)
    return analyze(source, images, ("over-smoothing",), AnalysisOptions(), quiet=True)


def test_figures_are_in_our_style_whatever_a_notebook_has_set(found: Analysis, tmp_path: Path) -> None:
    """On a black ground black lines would not be seen, and TeX is not everywhere."""
    picture, file = figure("over-smoothing", found), Path("figures", "over-smoothing.png")
    ReportWriter(tmp_path / "plain").write([found])
    with rc_context({"figure.facecolor": "black", "text.usetex": True}):
        assert figure("over-smoothing", found) == picture
        ReportWriter(tmp_path / "told").write([found])
    assert (tmp_path / "told" / file).read_bytes() == (tmp_path / "plain" / file).read_bytes()


def test_names_are_as_short_as_tells_them_apart_and_leave_figures_their_room(found: Analysis) -> None:
    """Legends of 40 characters covered the axes, and matplotlib leaves names that begin with `_` out of them."""

    def named(*names: str) -> list[str]:
        return network_names([replace(found, source=replace(found.source, name=name)) for name in names])

    assert named("/data/a/best/") == ["best"]
    assert named("/data/a/best", "/data/b/best") == ["a/best", "b/best"]
    assert named("best", "x/best") == ["best", "x/best"]
    assert named("/data/best", "/data/best") == ["best (1)", "best (2)"]
    long = "deit_digits?num_classes=10&drop_path_rate=0.1&depth=12"
    assert legend_names(["_best", long]) == ["_best", "deit_digits…0.1&depth=12"]
    same = [long, long.replace("=10", "=20")]
    assert legend_names(same) == ["1: deit_digits…0.1&depth=12", "2: deit_digits…0.1&depth=12"]
    drawn = draw("over-smoothing", {"_best": found.results["over-smoothing"], long: found.results["over-smoothing"]})
    assert drawn is not None
    legend = drawn.axes[0].get_legend()
    assert legend is not None
    assert " _best" in [text.get_text() for text in legend.get_texts()]
    png(drawn)
    assert drawn.axes[0].get_position().width > 0.35  # of two panels
