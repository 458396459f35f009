"""The plot of throughput against latency: a curve for each runtime, a point for each batch size."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from vitx.core.bundle import refuse_in_bundle
from vitx.core.errors import InputError, missing_package
from vitx.core.files import check_file, make_folder
from vitx.core.latency import Latency
from vitx.core.panels import as_text, own_style, panels

FORMATS = (".png", ".svg")
# Curves differ in line and marker as well as in their grey, so that a black-and-white print can be read.
_STYLES = (("-", "o"), ("--", "s"), (":", "^"), ("-.", "D"), ("-", "v"), ("--", "x"), (":", "P"), ("-.", "*"))


def check_plot(path: Path) -> None:
    """Make the folder; raise InputError for a suffix but .png or .svg and for a place in a bundle.

    Raises EnvironmentMissing without matplotlib.
    """
    if path.suffix.lower() not in FORMATS:
        raise InputError(f"plot '{path}': expected a name that ends in {' or '.join(FORMATS)}")
    if find_spec("matplotlib") is None:
        raise missing_package("matplotlib", "analyze")
    refuse_in_bundle(path)
    check_file(path, "plot.png")
    make_folder(path.parent)


@own_style()
def save_plot(title: str, latencies: Mapping[str, Latency], path: Path) -> None:
    """Write the picture; the whiskers reach from the median to the 95th percentile."""
    from matplotlib.ticker import ScalarFormatter

    figure, (axes,) = panels(1, width=7, height=4.5)
    for index, (name, latency) in enumerate(latencies.items()):
        line, marker = _STYLES[index % len(_STYLES)]
        grey = str(0.55 * index / max(1, len(latencies) - 1))
        points = latency.points
        medians = [point.median_ms for point in points]
        rates = [point.images_per_second for point in points]
        tails = [[0.0] * len(points), [max(0.0, point.p95_ms - point.median_ms) for point in points]]
        axes.errorbar(medians, rates, xerr=tails, color=grey, ls=line, marker=marker, capsize=3, label=name)
        for point in points:  # to the left: the whiskers go to the right
            at = (point.median_ms, point.images_per_second)
            axes.annotate(
                str(point.batch_size),
                at,
                textcoords="offset points",
                xytext=(-2, 5),
                ha="right",
                fontsize=8,
                color=grey,
            )
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(ScalarFormatter())
    highest = max(point.images_per_second for latency in latencies.values() for point in latency.points)
    axes.set_ylim(0, 1.12 * highest)
    axes.margins(x=0.1)
    axes.set_xlabel("latency of a call (ms): median, whisker to p95")
    axes.set_ylabel("throughput (images/s)")
    axes.set_title(as_text(title), loc="left", fontsize=10)
    axes.grid(visible=True, which="both", color="0.9")
    axes.legend(title="numbers are batch sizes", frameon=False)
    figure.savefig(path, dpi=150)
