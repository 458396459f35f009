"""`vitx analyze`: what the training did to a network, or to two."""

from pathlib import Path
from typing import Annotated

import typer

from vitx.cli.options import Data, DeviceOption, Json, Quiet, SkipBad, Which


def command(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A run folder, model:NAME or model:timm/NAME.")],
    other: Annotated[str | None, typer.Argument(metavar="[OTHER]", help="Another one, to be set beside it.")] = None,
    data: Data = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Write index.html, report.json and figures into this folder.")
    ] = None,
    only: Annotated[
        str | None, typer.Option("--only", metavar="A,B", help="These metrics; 'all' adds those that take long.")
    ] = None,
    images: Annotated[int, typer.Option("--images", min=1, help="At most so many images, evenly spaced.")] = 512,
    batch_size: Annotated[int, typer.Option("--batch", min=1, help="Images at a time.")] = 16,
    module: Annotated[
        str, typer.Option("--module", help="The Hessian in one module's weights: blocks.3.attn. Default: in all.")
    ] = "",
    corrupted: Annotated[
        Path | None,
        typer.Option("--corrupted", metavar="DIR", help="Take corruptions from copies of CIFAR-C or ImageNet-C."),
    ] = None,
    weights: Annotated[
        str, typer.Option("--weights", help="Of a model: a checkpoint file, 'pretrained' (timm's) or 'random'.")
    ] = "pretrained",
    checkpoint: Which = "best",
    device: DeviceOption = "auto",
    skip_bad: SkipBad = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure a network layer by layer: over-smoothing, attention, spectra, similarity, lesions and more.

    With --out, results are kept: a second call measures only what is new. A metric that does not apply is listed.
    """
    from vitx.analyze.analysis import analyze, chosen_metrics, compare_representations
    from vitx.analyze.images import open_analysis_images
    from vitx.analyze.metric import NotApplicable, Options
    from vitx.analyze.metrics import METRICS
    from vitx.analyze.report import network_names, report_json, write_report
    from vitx.core.console import log, print_json, print_table
    from vitx.core.errors import InputError
    from vitx.models.device import choose_device
    from vitx.models.source import SourceRequest

    names = chosen_metrics([name.strip() for name in only.split(",")] if only else None)
    place = choose_device(device)
    sources = [SourceRequest(target, checkpoint, weights, data).load() for target in (source, other) if target]
    chosen = data or sources[0].data
    if not chosen:
        raise InputError(f"'{source}' brings no images: give --data")
    shown = open_analysis_images(chosen, images, skip_bad=skip_bad)
    options = Options(batch_size=batch_size, module=module, corrupted=corrupted)
    analyses = []
    for one in sources:
        one.model.to(place)
        log(f"analyze: {one.name}, {len(shown)} images of {shown.name}", quiet=quiet)
        analyses.append(analyze(one, shown, names, options, cache=out / "metrics" if out else None, quiet=quiet))
    between = None
    if len(sources) == 2 and "cka" in names:
        try:
            between = compare_representations(sources[0], sources[1], shown, options, quiet=quiet)
        except NotApplicable as reason:
            log(f"analyze: no CKA between the two: {reason}", quiet=quiet)
    if out is not None:
        log(f"analyze: {write_report(out, analyses, between)}", quiet=quiet)
    if as_json:
        print_json(report_json(analyses, between))
        return
    columns = network_names(analyses)
    rows = []
    for name in names:
        cells = [
            METRICS[name].line(analysis.results[name])
            if name in analysis.results
            else f"not applicable: {analysis.not_applicable[name]}"
            for analysis in analyses
        ]
        rows.append((name, *cells))
    print_table(f"{len(shown)} images of {shown.name}", ("metric", *columns), rows)
