"""The report of an analysis: report.json, figures as PNG, and one HTML page that needs nothing else."""

import base64
import html
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vitx.analyze.activation_metrics import SimilarityMatrix
from vitx.analyze.analysis import Analysis
from vitx.analyze.metrics import METRICS
from vitx.analyze.plots import draw
from vitx.core.files import Record, write_bytes, write_json

BETWEEN = "cka-between"
DOTS_PER_INCH = 110

_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#111;background:#fff}
h1{font-size:1.6rem}h2{font-size:1.2rem;margin-top:2.5rem}img{max-width:100%;height:auto}
table{border-collapse:collapse;margin:.8rem 0}th,td{border-bottom:1px solid #bbb;padding:.2rem .8rem;text-align:left}
td.n{text-align:right;font-variant-numeric:tabular-nums}details{margin:.5rem 0}summary{cursor:pointer}
"""


def write_report(folder: Path, analyses: Sequence[Analysis], between: SimilarityMatrix | None = None) -> Path:
    """Write report.json, figures/METRIC.png and index.html for one network, or two side by side; return the page."""
    names = network_names(analyses)
    figures = {}
    for metric, results in _results(names, analyses, between).items():
        figure = draw(metric, results)
        if figure is not None:
            buffer = io.BytesIO()
            figure.savefig(buffer, format="png", dpi=DOTS_PER_INCH)
            figures[metric] = buffer.getvalue()
            write_bytes(folder / "figures" / f"{metric}.png", figures[metric])
    write_json(folder / "report.json", report_json(analyses, between))
    page = folder / "index.html"
    write_bytes(page, _page(names, analyses, between, figures).encode())
    return page


def report_json(analyses: Sequence[Analysis], between: SimilarityMatrix | None = None) -> dict[str, Any]:
    """What report.json holds, and `vitx analyze --json` prints."""
    report: dict[str, Any] = {"format_version": 1, "networks": [analysis.as_json() for analysis in analyses]}
    if between is not None:
        report["cka_between"] = between.model_dump(mode="json")
    return report


def network_names(analyses: Sequence[Analysis]) -> list[str]:
    """What the networks are called in tables and figures: the shortest that tells them apart."""
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
    title = html.escape(" and ".join(names))
    body = [f"<h1>{title}</h1>", _facts(names, analyses)]
    for metric, results in _results(names, analyses, between).items():
        heading, reading = _words(metric)
        body += [f'<h2 id="{metric}">{html.escape(heading)}</h2>', f"<p>{html.escape(reading)}</p>"]
        if metric in METRICS:
            body.append(_table([(name, METRICS[metric].line(result)) for name, result in results.items()]))
        if metric in figures:
            data = base64.b64encode(figures[metric]).decode()
            body.append(f'<img alt="{html.escape(heading)}" src="data:image/png;base64,{data}">')
    for name, analysis in zip(names, analyses, strict=True):
        if analysis.not_applicable:
            body.append(f"<h2>Not applicable to {html.escape(name)}</h2>")
            body.append(_table([(METRICS[key].title, reason) for key, reason in analysis.not_applicable.items()]))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><link rel="icon" href="data:,">'
        f'<meta name="viewport" content="width=device-width"><title>{title}</title><style>{_STYLE}</style></head>'
        f"<body>{''.join(body)}</body></html>\n"
    )


def _words(metric: str) -> tuple[str, str]:
    if metric == BETWEEN:
        return "CKA between the two networks", "Which layers of one network tell images apart as those of the other."
    return METRICS[metric].title, METRICS[metric].reading


def _facts(names: Sequence[str], analyses: Sequence[Analysis]) -> str:
    rows = []
    for name, analysis in zip(names, analyses, strict=True):
        source = analysis.source
        rows.append((name, f"{source.spec.name}, {source.checkpoint}, {source.checkpoint_sha256[:16]}…"))
    first = analyses[0]
    return _table([*rows, ("images", f"{len(first.images)} of {first.images.name}")])


def _table(rows: Iterable[tuple[str, object]]) -> str:
    cells = "".join(
        f'<tr><th scope="row">{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>' for name, value in rows
    )
    return f"<table>{cells}</table>"
