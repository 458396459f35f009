"""The report of an analysis: report.json, figures as PNG, and one HTML page that needs nothing else."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitx.analyze.analysis import Analysis
from vitx.analyze.findings.differences import differences
from vitx.analyze.metric_figures import draw_matrices
from vitx.analyze.metrics import METRICS
from vitx.analyze.report_page import BETWEEN, report_page
from vitx.analyze.similarity_matrix import SimilarityMatrix
from vitx.core.errors import unknown_name
from vitx.core.files import Record, write_bytes, write_json
from vitx.core.panels import Picture, Results, as_text, elided, legend_names, own_style, png

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class ReportWriter:
    """Writes the report into a folder, as often as more is known; a figure is drawn when its results are new."""

    def __init__(self, folder: Path) -> None:
        import matplotlib  # noqa: F401  # a writer without it fails here, before hours of measuring

        self._folder = folder
        self._drawn: dict[str, tuple[list[Record], bytes | None]] = {}

    def write(self, analyses: Sequence[Analysis], between: SimilarityMatrix | None = None) -> Path:
        """Write report.json, figures/METRIC.png and index.html for one network, or two; return the page."""
        names = network_names(analyses)
        results = results_by_metric(names, analyses, between)
        figures = {metric: image for metric in results if (image := self._figure(metric, results[metric])) is not None}
        for metric in {*METRICS, BETWEEN} - {*figures}:  # of an earlier report, of other networks or images
            (self._folder / "figures" / f"{metric}.png").unlink(missing_ok=True)
        write_json(self._folder / "report.json", report_json(analyses, between))
        index = self._folder / "index.html"
        write_bytes(index, report_page(names, analyses, results, figures).encode())
        return index

    def _figure(self, metric: str, results: Mapping[str, Record]) -> bytes | None:
        drawn_of, image = self._drawn.get(metric, ([], None))
        if len(drawn_of) != len(results) or any(
            old is not new for old, new in zip(drawn_of, results.values(), strict=True)
        ):
            with own_style():
                figure = draw(metric, results)
                image = None if figure is None else png(figure)
            if image is not None:
                write_bytes(self._folder / "figures" / f"{metric}.png", image)
            self._drawn[metric] = [*results.values()], image
        return image


def report_json(analyses: Sequence[Analysis], between: SimilarityMatrix | None = None) -> dict[str, Any]:
    """What report.json holds, and `vitx analyze --json` prints."""
    report: dict[str, Any] = {"format_version": 2, "networks": [analysis.as_json() for analysis in analyses]}
    if len(analyses) == 2:
        compared = differences(analyses[0].results, analyses[1].results)
        report["differences"] = [each.model_dump(mode="json") for each in compared]
    if between is not None:
        report["cka_between"] = between.model_dump(mode="json")
    return report


def network_names(analyses: Sequence[Analysis]) -> list[str]:
    """The networks' names in tables and figures: as many last parts of their paths as tell them apart."""
    parts = [analysis.source.name.rstrip("/").split("/") for analysis in analyses]
    for length in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(each[-length:]) for each in parts]
        if len({*names}) == len(names):
            return names
    return [f"{each[-1]} ({index})" for index, each in enumerate(parts, 1)]


def results_by_metric(
    names: Sequence[str], analyses: Sequence[Analysis], between: SimilarityMatrix | None
) -> dict[str, dict[str, Record]]:
    """Metric → network → result, in the report's order."""
    found: dict[str, dict[str, Record]] = {}
    for metric in METRICS:
        results = {
            name: analysis.results[metric]
            for name, analysis in zip(names, analyses, strict=True)
            if metric in analysis.results
        }
        if results:
            found[metric] = results
    if between is not None:
        up, right = map(elided, names)
        found[BETWEEN] = {f"{up} (up),\n{right} (right)": between}
    return found


def figure(metric: str, *analyses: Analysis) -> Picture:
    """The figure of a metric for one network, or two beside each other; InputError where there is none."""
    results = results_by_metric(network_names(analyses), analyses, None).get(metric, {})
    with own_style():
        drawn = draw(metric, results) if results else None
        if drawn is not None:
            return png(drawn, pixel_ratio=1)
    known = [name for name in METRICS if all(name in each.results for each in analyses) and METRICS[name].figure]
    raise unknown_name("figure", metric, known)


def draw(name: str, results: Results) -> "Figure | None":
    """The figure of metric `name` for the networks in `results`; None for a metric that is only a table."""
    figure = draw_matrices if name == BETWEEN else METRICS[name].figure
    if figure is None:
        return None
    names = results if name == BETWEEN else legend_names(results)
    return figure({as_text(network): record for network, record in zip(names, results.values(), strict=True)})
