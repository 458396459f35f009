"""`vitx analyze`: what the training did to a network, or to two."""

from typing import TYPE_CHECKING, Annotated

import typer

from vitx.analyze.options import AnalysisRequest, check_metrics
from vitx.cli.options import Json, Quiet, from_records, not_empty
from vitx.core.console import counted, log_next, print_json, print_table

if TYPE_CHECKING:
    from vitx.analyze import Analysis


_DEFAULTS = AnalysisRequest()


@from_records("analyze")
def command(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A run folder, model:NAME or model:timm/NAME.")],
    other: Annotated[
        str | None, typer.Argument(metavar="OTHER", help="Another one, to be set beside it.", callback=not_empty)
    ] = None,
    request: AnalysisRequest = _DEFAULTS,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure a network layer by layer: over-smoothing, attention, spectra, similarity, lesions and more.

    With --out, results are kept: a second call measures only what is new. A metric that does not apply is listed.
    """
    check_metrics(request.only)
    from vitx.analyze import chosen_metrics
    from vitx.analyze.analysis_report import report_json
    from vitx.analyze.network_analyses import analyze_networks
    from vitx.cli.next_command import export_of

    metrics = chosen_metrics(request.only or None)
    names = [source] if other is None else [source, other]
    analyses, cka_between = analyze_networks(names, metrics, request, quiet=quiet)
    if as_json:
        print_json(report_json(analyses, cka_between))
    else:
        _print_findings(analyses)
        _print_table(analyses, metrics)
    if other is None and not source.startswith("model:") and not quiet:  # the images are listed to name the command
        log_next(*export_of(source, skip_bad=request.skip_bad))


def _print_findings(analyses: "list[Analysis]") -> None:
    from vitx.analyze.analysis_report import network_names
    from vitx.analyze.findings.differences import differences
    from vitx.analyze.findings.finding import effect_text
    from vitx.analyze.report_page import difference_text

    names = network_names(analyses)
    for name, analysis in zip(names, analyses, strict=True):
        findings = analysis.findings()
        rows = [(each.statement, effect_text(each), each.baseline) for each in findings.found]
        if rows:
            print_table(f"findings of {name}", ("finding", "effect", "baseline"), rows)
        else:
            print(f"no finding of {name}: {counted(sum(findings.tests.values()), 'test')}")
    if len(analyses) == 2:
        compared = differences(analyses[0].results, analyses[1].results)
        changes = [(each.quantity, difference_text(each)) for each in compared]
        if changes:
            print_table(f"{names[1]} less {names[0]}", ("number", "difference"), changes)
        else:
            print(f"{names[1]} less {names[0]}: nothing was measured of both on ten images or more")


def _print_table(analyses: "list[Analysis]", metrics: tuple[str, ...]) -> None:
    from vitx.analyze import METRICS
    from vitx.analyze.analysis_report import network_names

    def cell(analysis: "Analysis", name: str) -> str:
        if name in analysis.results:
            return METRICS[name].line(analysis.results[name])
        return f"not applicable: {analysis.not_applicable[name]}"

    rows = [(name, *(cell(analysis, name) for analysis in analyses)) for name in metrics]
    images = analyses[0].images
    print_table(f"{counted(len(images), 'image')} of {images.name}", ("metric", *network_names(analyses)), rows)
