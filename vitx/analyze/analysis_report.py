"""The report of an analysis: report.json, figures as PNG, and one HTML page that needs nothing else."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitx.analyze.analysis import Analysis
from vitx.analyze.metric_figures import draw_matrices
from vitx.analyze.metrics import METRICS
from vitx.analyze.similarity_matrix import SimilarityMatrix
from vitx.core.files import Record, write_bytes, write_json
from vitx.core.page import page, picture, section, table
from vitx.core.panels import Results, png

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BETWEEN = "cka-between"  # named as a metric, but it is of two networks


def write_report(folder: Path, analyses: Sequence[Analysis], between: SimilarityMatrix | None = None) -> Path:
    """Write report.json, figures/METRIC.png and index.html for one network, or two side by side; return the page."""
    names = network_names(analyses)
    figures = {}
    for metric, results in _results(names, analyses, between).items():
        figure = draw(metric, results)
        if figure is not None:
            figures[metric] = png(figure)
            write_bytes(folder / "figures" / f"{metric}.png", figures[metric])
    write_json(folder / "report.json", report_json(analyses, between))
    index = folder / "index.html"
    write_bytes(index, _page(names, analyses, between, figures).encode())
    return index


def report_json(analyses: Sequence[Analysis], between: SimilarityMatrix | None = None) -> dict[str, Any]:
    """What report.json holds, and `vitx analyze --json` prints."""
    report: dict[str, Any] = {"format_version": 1, "networks": [analysis.as_json() for analysis in analyses]}
    if between is not None:
        report["cka_between"] = between.model_dump(mode="json")
    return report


def network_names(analyses: Sequence[Analysis]) -> list[str]:
    """The networks' names in tables and figures: the last part of the path if that tells them apart."""
    full = [analysis.source.name for analysis in analyses]
    short = [name.rstrip("/").rpartition("/")[2] for name in full]
    names = short if len(set(short)) == len(short) else full
    return names if len(set(names)) == len(names) else [f"{name} ({index})" for index, name in enumerate(names, 1)]


def _results(
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
        found[BETWEEN] = {f"{names[0]} (up), {names[1]} (right)": between}
    return found


def _page(
    names: Sequence[str],
    analyses: Sequence[Analysis],
    between: SimilarityMatrix | None,
    figures: Mapping[str, bytes],
) -> str:
    body = [_networks_table(names, analyses)]
    for metric, results in _results(names, analyses, between).items():
        heading, reading = _heading_and_reading(metric)
        body.append(section(metric, heading, reading))
        if metric in METRICS:
            body.append(table([(name, METRICS[metric].line(result)) for name, result in results.items()]))
        if metric in figures:
            body.append(picture(figures[metric], heading))
    for name, analysis in zip(names, analyses, strict=True):
        if analysis.not_applicable:
            body.append(f"<h2>Not applicable to {html.escape(name)}</h2>")
            body.append(table([(METRICS[key].title, reason) for key, reason in analysis.not_applicable.items()]))
    return page(" and ".join(names), body)


def _heading_and_reading(metric: str) -> tuple[str, str]:
    if metric == BETWEEN:
        return "CKA between the two networks", "Which layers of one network tell images apart as those of the other."
    return METRICS[metric].title, METRICS[metric].reading


def _networks_table(names: Sequence[str], analyses: Sequence[Analysis]) -> str:
    rows = []
    for name, analysis in zip(names, analyses, strict=True):
        source = analysis.source
        rows.append((name, f"{source.spec.name}, {source.checkpoint}, {source.checkpoint_sha256[:16]}…"))
    first = analyses[0]
    return table([*rows, ("images", f"{len(first.images)} of {first.images.name}")])


def draw(name: str, results: Results) -> "Figure | None":
    """The figure of metric `name` for the networks in `results`; None for a metric that is only a table."""
    figure = draw_matrices if name == BETWEEN else METRICS[name].figure
    return None if figure is None else figure(results)
