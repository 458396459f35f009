"""A reference and a candidate: certified, and on request asked over HTTP and traced."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vitx.core.bundle import Bundle
    from vitx.core.certificate import Certificate
    from vitx.core.run import Checkpoint
    from vitx.data.image_set import ImageSet
    from vitx.export import SourceRequest
    from vitx.parity.compared import Side
    from vitx.parity.served import ServedComparison
    from vitx.parity.trace import TraceResult


@dataclass(frozen=True)
class PairOptions:
    """What was asked for, beside the two sides."""

    which: "Checkpoint"
    device: str
    max_flip_rate: float
    batch_sizes: tuple[int, ...] | None
    quiet: bool


@dataclass(frozen=True)
class PairOutcome:
    """Everything that was found; `written` says whether the certificate went into the bundle."""

    certificate: "Certificate"
    written: bool
    failures: tuple[str, ...]
    notes: tuple[str, ...]
    served: "ServedComparison | None"
    trace: "TraceResult | None"


def measure_pair(
    before: "Side", after: "Side", images: "ImageSet", options: PairOptions, *, write: bool, served: bool, trace: bool
) -> PairOutcome:
    from vitx.parity.trace import diagnosis
    from vitx.parity.trace import trace as trace_sides

    certificate = _certify(before, after, images, options, write=write)
    over_http = _served(before, after, images, certificate, options) if served else None
    failures = certificate.reasons if certificate.verdict != "pass" else ()
    if over_http is not None:
        failures += over_http.failures(options.max_flip_rate)
    notes: tuple[str, ...] = ()
    if certificate.verdict != "pass":
        notes += (diagnosis(before, after, images, certificate, traced=trace),)
    traced = None
    if trace:
        repair = certificate.verdict != "pass"
        traced = trace_sides(before, after, _request(before, options), images, repair=repair, quiet=options.quiet)
        notes += traced.notes
    return PairOutcome(certificate, write, failures, notes, over_http, traced)


def _request(side: "Side", options: PairOptions) -> "SourceRequest | None":
    """What a run's bundles are made of."""
    from vitx.export import SourceRequest

    return SourceRequest(str(side.run.path), which=options.which) if side.run is not None else None


def _certify(before: "Side", after: "Side", images: "ImageSet", options: PairOptions, *, write: bool) -> "Certificate":
    from functools import partial

    from vitx.parity import certify_sides, warn_of_other_weights
    from vitx.parity.trace import token_similarity

    if before.run is not None and after.bundle is not None:
        warn_of_other_weights(after.bundle, before.sha256, options.which, quiet=options.quiet)
    return certify_sides(
        before,
        after,
        images,
        device=options.device,
        max_flip_rate=options.max_flip_rate,
        batch_sizes=options.batch_sizes,
        token_similarity=partial(token_similarity, before, after, images, quiet=options.quiet),
        write=write,
        quiet=options.quiet,
    )


def _served(
    before: "Side", after: "Side", images: "ImageSet", certificate: "Certificate", options: PairOptions
) -> "ServedComparison":
    from vitx.core.errors import InputError
    from vitx.parity.served import compare_served, serving

    if after.bundle is None:
        raise InputError("--served sends images to vitx serve: give a bundle as the candidate")
    with serving(after.bundle.path, device=options.device) as url:
        return compare_served(
            url,
            before.session,
            images,
            before.preprocessing,
            max_logit_error=certificate.max_logit_error_allowed,
            quiet=options.quiet,
        )


def chosen_images(images: "ImageSet", wanted: str, max_flip_rate: float) -> "ImageSet":
    """All images, or some of them evenly spaced."""
    from vitx.core.errors import InputError
    from vitx.parity.comparison import subset
    from vitx.parity.statistics import images_needed
    from vitx.parity.verdict import check_rate

    if wanted == "all":
        return images
    check_rate(max_flip_rate)
    if wanted != "enough" and not (wanted.isascii() and wanted.isdigit() and int(wanted)):
        raise InputError(f"--images {wanted}: expected all, enough or a number")
    return subset(images, images_needed(max_flip_rate) if wanted == "enough" else int(wanted))


def certified_reference(
    bundle: "Bundle", certificate: "Certificate", run: Path | None, options: PairOptions
) -> "Side | None":
    """The run that was given, or the one the bundle was exported from if it is still there with the same weights."""
    from vitx.core.errors import CheckFailed
    from vitx.parity.compared import open_side

    provenance = bundle.manifest.provenance
    if run is not None:
        side = open_side(run, which=options.which, device=options.device)
        if side.sha256 != certificate.reference_sha256:
            raise CheckFailed(f"'{run}' is not the reference of the certificate: its weights have another sha256")
        return side
    source = Path(provenance.source)
    if not (source / "run.json").is_file() or provenance.checkpoint not in ("best", "last"):
        return None
    side = open_side(source, which=provenance.checkpoint, device=options.device)
    return side if side.sha256 == certificate.reference_sha256 else None
