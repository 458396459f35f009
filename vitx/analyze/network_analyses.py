"""What `vitx analyze SOURCE [OTHER]` does: load one network or two, measure each, compare them, write the report."""

import json
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from vitx.analyze.analysis import Analysis, analyze, compare_representations
from vitx.analyze.analysis_report import ReportWriter
from vitx.analyze.images import is_plain_folder, open_analysis_images
from vitx.analyze.metric import AnalysisOptions, NotApplicable
from vitx.analyze.options import AnalysisRequest
from vitx.analyze.similarity_matrix import SimilarityMatrix
from vitx.core.bundle import refuse_in_bundle
from vitx.core.console import counted, log
from vitx.core.errors import InputError
from vitx.core.files import check_folder
from vitx.data.flat_folder import check_outside
from vitx.data.image_set import ImageSet
from vitx.data.open import log_skipped
from vitx.models.device import choose_device
from vitx.models.source import Source, SourceRequest


def analyze_networks(
    targets: Sequence[str | Path], metrics: tuple[str, ...], request: AnalysisRequest, *, quiet: bool = False
) -> tuple[list[Analysis], SimilarityMatrix | None]:
    """Measure one network or two on the same images; return the analyses, and the CKA between two where it applies.

    Raises InputError for another number of networks, when no data is named and the first network was trained on none,
    for `corrupted` or `module` without its metric, for `weights` where all are runs and `checkpoint` where none is, and
    where `out` cannot be a folder, or is in a bundle or the folder of the images.
    """
    if len(targets) not in (1, 2):
        raise InputError(f"{len(targets)} networks: expected one, or two to be compared")
    if request.corrupted is not None and "corruptions" not in metrics:
        raise InputError(f"--corrupted {request.corrupted} is for the metric corruptions: name it with --only")
    if request.module and not {"hessian", "hessian-density"} & {*metrics}:
        raise InputError(
            f"--module {request.module} is for the metrics hessian and hessian-density: name one with --only"
        )
    if request.out is not None:
        check_folder(request.out)
        refuse_in_bundle(request.out)
    device = choose_device(request.device)
    options = AnalysisOptions(**request.model_dump(include={"batch_size", "module", "corrupted", "skip_bad"}))
    # A plain folder names no classes for a network that brings none.
    classes = request.data if request.data and not is_plain_folder(request.data) else None
    requests = [SourceRequest(target, request.checkpoint, request.weights, classes) for target in targets]
    requests[0].require_used(*requests[1:])
    sources = [each.load() for each in requests]
    data = request.data or sources[0].data
    if not data:
        raise InputError(f"'{targets[0]}' brings no images: give --data")
    check_size = partial(_check_size, sources)
    images = open_analysis_images(data, request.images, skip_bad=request.skip_bad, check_size=check_size)
    if request.out is not None:
        check_outside(images, request.out)
    log_skipped(images)
    cache = request.out / "metrics" if request.out else None
    writer = None if request.out is None else ReportWriter(request.out)
    if request.out is not None:
        _say_what_is_replaced(request.out, sources, images, quiet=quiet)
    analyses: list[Analysis] = []

    def report(analysis: Analysis) -> None:
        if writer is not None:
            writer.write([*analyses, analysis])

    for source in sources:
        source.model.to(device)
        log(f"analyze: {source.name}, {counted(len(images), 'image')} of {images.name}", quiet=quiet)
        if source.lacks:
            log(f"warning: {source.lacks}")
        analyses.append(analyze(source, images, metrics, options, cache=cache, report=report, quiet=quiet))
    shown = all("cka" in analysis.results for analysis in analyses)
    cka_between = _cka_between(sources, images, options, cache, quiet=quiet) if shown else None
    if writer is not None:
        log(f"analyze: {writer.write(analyses, cka_between)}", quiet=quiet)
    return analyses, cka_between


def _check_size(sources: Sequence[Source], width: int, height: int) -> None:
    """Raise ImageError for an image that one of the networks cannot be shown."""
    for source in sources:
        source.preprocessing.check_size(width, height)


def _say_what_is_replaced(out: Path, sources: list[Source], images: ImageSet, *, quiet: bool) -> None:
    """A report of the same networks and images grows; one of others is replaced, its results stay in OUT/metrics."""
    path = out / "report.json"
    if not path.is_file():
        return
    before: list[Any] = []
    with suppress(ValueError, LookupError, TypeError):  # it is replaced, whatever it is
        networks = json.loads(path.read_bytes())["networks"]
        before = [(each["checkpoint_sha256"], each["data"], each["images"]) for each in networks]
    if before != [(source.checkpoint_sha256, images.name, len(images)) for source in sources]:
        log(
            f"analyze: '{path}' is of other networks or images and is replaced; its results stay in metrics/",
            quiet=quiet,
        )


def _cka_between(
    sources: list[Source], images: ImageSet, options: AnalysisOptions, cache: Path | None, *, quiet: bool
) -> SimilarityMatrix | None:
    if len(sources) < 2:
        return None
    first, second = sources
    try:
        return compare_representations(first, second, images, options, cache=cache, quiet=quiet)
    except NotApplicable as reason:
        log(f"analyze: no CKA between the two: {reason}", quiet=quiet)
        return None
