"""What the plot of a sweep shows, and the files it may be written to."""

import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib import rc_context, rcParams
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Annotation

from bundle_fixture import write_bundle
from vitx.bench.plot import check_plot, save_plot
from vitx.core.errors import EnvironmentMissing, InputError
from vitx.core.latency import Latency, LatencyPoint
from vitx.core.panels import panels


def latency_of(*points: tuple[int, float, float]) -> Latency:
    """Of batch sizes, medians and 95th percentiles in milliseconds."""
    measured = tuple(
        LatencyPoint(batch_size=size, median_ms=median, p95_ms=p95, images_per_second=1000 * size / median)
        for size, median, p95 in points
    )
    return Latency(runtime={}, machine={}, points=measured, created="2026-01-01")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    figures: list[Figure] = []

    def kept(*arguments: Any, **options: Any) -> Any:
        figure, axes = panels(*arguments, **options)
        figures.append(figure)
        return figure, axes

    monkeypatch.setattr("vitx.bench.plot.panels", kept)
    return figures


def test_a_curve_for_each_runtime_and_a_point_for_each_batch_size(tmp_path: Path, drawn: list[Figure]) -> None:
    latencies = {
        "first": latency_of((1, 2.0, 3.0), (8, 10.0, 9.5)),  # a 95th percentile below the median, by hand
        "second": latency_of((1, 4.0, 6.0)),
        "third": latency_of((1, 5.0, 6.0)),
    }
    save_plot("a title", latencies, tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").read_text().startswith("<?xml")
    (axes,) = drawn[0].axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "linear")
    curves = axes.containers
    assert [curve.get_label() for curve in curves] == ["first", "second", "third"]
    lines = [curve[0] for curve in curves]
    assert [list(map(tuple, line.get_xydata().tolist())) for line in lines] == [
        [(2.0, 500.0), (10.0, 800.0)],
        [(4.0, 250.0)],
        [(5.0, 200.0)],
    ]
    assert [(line.get_linestyle(), line.get_marker()) for line in lines] == [("-", "o"), ("--", "s"), (":", "^")]
    assert [to_hex(line.get_color()) for line in lines] == [to_hex(str(grey)) for grey in (0.0, 0.275, 0.55)]
    whiskers = [segment.tolist() for segment in curves[0][2][0].get_segments()]
    assert whiskers == [[[2.0, 500.0], [3.0, 500.0]], [[10.0, 800.0], [10.0, 800.0]]]
    texts = [
        (text.get_text(), text.xy, to_hex(text.get_color())) for text in axes.texts if isinstance(text, Annotation)
    ]
    black, grey, light = (to_hex(str(value)) for value in (0.0, 0.275, 0.55))
    assert texts == [
        ("1", (2.0, 500.0), black),
        ("8", (10.0, 800.0), black),
        ("1", (4.0, 250.0), grey),
        ("1", (5.0, 200.0), light),
    ]
    for text in axes.texts:  # above and left of its point: the whiskers go to the right
        assert isinstance(text, Annotation)
        assert (text.get_horizontalalignment(), text.xyann) == ("right", (-2, 5))
    left, right = axes.get_xlim()
    assert 1.5 < left < 2 < 10 < right < 13
    assert all(line.get_visible() for line in axes.get_xgridlines())
    assert axes.get_ylim() == pytest.approx((0, 1.12 * 800))
    assert axes.get_title(loc="left") == "a title"
    assert axes.get_xlabel() == "latency of a call (ms): median, whisker to p95"
    assert axes.get_ylabel() == "throughput (images/s)"
    legend = axes.get_legend()
    assert legend is not None
    assert legend.get_title().get_text() == "numbers are batch sizes"
    assert [text.get_text() for text in legend.get_texts()] == ["first", "second", "third"]


def test_a_plot_is_in_our_style_whatever_matplotlib_is_told(tmp_path: Path) -> None:
    """On a black ground its black lines would not be seen, and TeX is not everywhere."""
    latencies = {"first": latency_of((1, 2.0, 3.0))}
    save_plot("100 %", latencies, tmp_path / "plot.png")
    with rc_context({"figure.facecolor": "black", "text.usetex": True}):
        save_plot("100 %", latencies, tmp_path / "told.png")
        assert rcParams["text.usetex"]
    assert (tmp_path / "told.png").read_bytes() == (tmp_path / "plot.png").read_bytes()


def test_lines_begin_again_after_the_last(tmp_path: Path, drawn: list[Figure]) -> None:
    save_plot("t", {f"r{number}": latency_of((1, 1.0 + number, 9.0)) for number in range(9)}, tmp_path / "plot.png")
    styles = [(curve[0].get_linestyle(), curve[0].get_marker()) for curve in drawn[0].axes[0].containers]
    assert len(set(styles)) == 8
    assert styles[0] == styles[8]


def test_the_file_is_checked_before_anything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("plot.png", "plot.SVG"):
        check_plot(tmp_path / "new" / "folders" / name)
    assert list((tmp_path / "new" / "folders").iterdir()) == []
    for name in ("plot.pdf", "plot", ".png"):
        with pytest.raises(InputError, match=r"expected a name that ends in \.png or \.svg$"):
            check_plot(tmp_path / name)
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(InputError, match=r"folder\.png.*plot\.png"):
        check_plot(tmp_path / "folder.png")
    with pytest.raises(InputError, match="would add to the bundle"):  # where latency.json is
        check_plot(write_bundle(tmp_path / "b.vitx").path / "plot.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(EnvironmentMissing, match=r"matplotlib.*pip install 'vitx\[analyze\]'"):
        check_plot(tmp_path / "plot.png")
