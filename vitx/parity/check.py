"""What `vitx parity REFERENCE CANDIDATE` does: certify, and on request compare over HTTP, trace and write a report."""

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vitx.core.bundle import refuse_in_bundle
from vitx.core.certificate import Certificate
from vitx.core.console import counted, log
from vitx.core.errors import CheckFailed, InputError
from vitx.core.files import check_file, write_bytes
from vitx.core.urls import read_token
from vitx.data.image_set import ImageSet
from vitx.data.open import log_skipped, open_images
from vitx.parity.certification import (
    certify_models,
    kept_certificate,
    record_verdicts,
    said_if_lost,
    sizes_left_out,
    warn_of_other_weights,
)
from vitx.parity.html_report import render
from vitx.parity.loaded_model import DEFAULT_RUNTIME, LoadedModel, open_model, open_served, require_run
from vitx.parity.options import ParityOptions
from vitx.parity.served import ServedComparison, compare_served, serving
from vitx.parity.statistics import images_needed
from vitx.parity.trace import TraceResult, diagnosis_note, measure_token_similarity, require_layers, trace
from vitx.parity.verdict import check_rate, flips_remedy
from vitx.runtimes.session import executable_of


@dataclass(frozen=True)
class ParityResult:
    """Everything that was measured. `written`: the certificate is in the bundle now; `notes`: what explains a fail."""

    reference: LoadedModel
    candidate: LoadedModel
    certificate: Certificate
    written: bool
    failures: tuple[str, ...]
    notes: tuple[str, ...]
    served: ServedComparison | None
    trace: TraceResult | None

    def as_json(self) -> dict[str, Any]:
        """The certificate and what else was measured; `verdict` and `reasons` are of all of it, the served path too."""
        return {
            **self.certificate.model_dump(mode="json"),
            "verdict": "fail" if self.failures else "pass",
            "reasons": list(self.failures or self.certificate.reasons),
            "written": self.written,
            "notes": list(self.notes),
            "served": self.served and self.served.model_dump(mode="json"),
            "trace": self.trace and self.trace.as_json(),
        }

    def require_pass(self, reference_path: Path, candidate_path: Path | str) -> None:
        """Raise CheckFailed with every failure and note, if there is a failure."""
        if self.failures:
            equal = "the checkpoint's equal" if self.reference.run else f"the equal of '{reference_path}'"
            raise CheckFailed(f"'{candidate_path}' is not {equal}: {'; '.join((*self.failures, *self.notes))}")


def check_parity(
    reference_path: Path, candidate_path: Path | str, options: ParityOptions, *, quiet: bool = False
) -> ParityResult:
    """Compare two of runs and bundles on real images; write the certificate if the candidate is a bundle to certify.

    The candidate may be the URL of a served model, too.
    """
    if options.report is not None:
        refuse_in_bundle(options.report)
        check_file(options.report, "report.html")
    open_one = partial(open_model, which=options.checkpoint, device=options.device, use_twin=True)
    with (
        open_one(reference_path, runtime=options.reference_runtime) as reference,
        (
            open_served(str(candidate_path), reference, options.precision, read_token(options.token_file))
            if "://" in str(candidate_path)
            else open_one(candidate_path, runtime=options.runtime)
        ) as candidate,
    ):
        if options.served and candidate.bundle is None:
            raise InputError("--served sends images to vitx serve: give a bundle as the candidate")
        require_run(options.checkpoint, reference, candidate)
        data, check_size = options.data or reference.data or candidate.data, reference.preprocessing.check_size
        split = open_images(data, "val", skip_bad=options.skip_bad, check_size=check_size)
        log_skipped(split)
        images = sample_images(split, options.images, options.max_flip_rate)
        if max(options.batch_sizes, default=0) > len(images):
            most = counted(len(images), "image")
            raise InputError(f"--batch-sizes {max(options.batch_sizes)}: expected at most the {most}")
        if options.trace:
            require_layers(reference, candidate, images)
        result = _measure(reference, candidate, images, options, whole=len(images) == len(split), quiet=quiet)
    if options.report is not None:
        title = f"Parity of {candidate_path} with {reference_path}"
        with said_if_lost(result.certificate):
            write_bytes(options.report, _html(title, result, images).encode())
    return result


def _measure(
    reference: LoadedModel,
    candidate: LoadedModel,
    images: ImageSet,
    options: ParityOptions,
    *,
    whole: bool,
    quiet: bool,
) -> ParityResult:
    # A bundle carries what is of the whole split, all its batch sizes, and the runtime it is served in by default.
    kept = reference.run is not None and whole and _can_be_kept(candidate, images, options, quiet=quiet)
    write = kept and options.runtime is None
    if reference.run is not None and candidate.bundle is not None:
        warn_of_other_weights(candidate.bundle, reference.sha256, options.checkpoint, quiet=quiet)
    certificate = certify_models(
        reference,
        candidate,
        images,
        device=options.device,
        max_flip_rate=options.max_flip_rate,
        batch_sizes=options.batch_sizes or None,
        token_similarity=partial(measure_token_similarity, reference, candidate, images, quiet=quiet),
        write=write,
        quiet=quiet,
    )
    if kept and options.runtime is not None:
        with said_if_lost(certificate):
            _record_runtime(candidate, certificate)
    failed = certificate.verdict != "pass"
    failures = certificate.reasons if failed else ()
    served = _compare_served(reference, candidate, images, certificate, options, quiet) if options.served else None
    if served is not None:
        failures += served.failures(options.max_flip_rate)
    notes: tuple[str, ...] = ()
    if failed:
        elsewhere = options.trace or candidate.bundle is None
        found = diagnosis_note(reference, candidate, images, certificate, traced=elsewhere)
        notes = (*flips_remedy(certificate), found)
    traced = None
    if options.trace:
        from vitx.export import SourceRequest

        # As `vitx export` loads the network of a run; of a bundle there is none.
        source = SourceRequest(str(reference.run.path), which=options.checkpoint) if reference.run else None
        traced = trace(reference, candidate, source, images, repair=failed, quiet=quiet)
        notes += traced.notes
    return ParityResult(reference, candidate, certificate, write, failures, notes, served, traced)


def _can_be_kept(candidate: LoadedModel, images: ImageSet, options: ParityOptions, *, quiet: bool) -> bool:
    """Whether a bundle can be written, and is run at every batch size of its certificate; otherwise say what not."""
    if candidate.bundle is None:
        return False
    left_out = sizes_left_out(candidate.bundle, len(images), options.batch_sizes)
    if left_out:
        log(f"parity: nothing is written into the bundle: --batch-sizes leaves out {', '.join(left_out)}", quiet=quiet)
    elif not os.access(candidate.bundle.path, os.W_OK):
        log("parity: nothing is written into the bundle, it is read-only here: compare a copy that can be written")
        return False
    return not left_out


def _record_runtime(candidate: LoadedModel, measured: Certificate) -> None:
    """Write what was found in another runtime than the default into the certificate, if there is one of these files."""
    bundle = candidate.bundle
    assert bundle is not None
    if (certificate := kept_certificate(bundle)) is None:
        log("parity: the verdict is not kept, there is no certificate of these files: run `vitx parity RUN BUNDLE`")
    else:
        record_verdicts(bundle, certificate, [measured.as_verdict(executable_of(bundle.subject(), candidate.session))])


def sample_images(images: ImageSet, wanted: str, max_flip_rate: float) -> ImageSet:
    """All images; or evenly spaced ones, `wanted` many or as many as prove `max_flip_rate` if none flips ("enough")."""
    if wanted == "all":
        return images
    check_rate(max_flip_rate)
    if wanted != "enough" and not (wanted.isascii() and wanted.isdigit() and int(wanted)):
        raise InputError(f"--images {wanted}: expected all, enough or a number")
    return images.evenly_spaced(images_needed(max_flip_rate) if wanted == "enough" else int(wanted))


def _compare_served(
    reference: LoadedModel,
    candidate: LoadedModel,
    images: ImageSet,
    certificate: Certificate,
    options: ParityOptions,
    quiet: bool,
) -> ServedComparison:
    assert candidate.bundle is not None
    # What was compared: by default a server takes the fastest runtime of the certificate, whose limits are others.
    runtime = options.runtime or DEFAULT_RUNTIME
    # The bundle is what is being judged: it may have no certificate yet.
    with serving(candidate.bundle.path, device=options.device, runtime=runtime, allow_uncertified=True) as url:
        return compare_served(
            url,
            reference.session,
            images,
            reference.preprocessing,
            max_logit_error=certificate.max_logit_error_allowed,
            quiet=quiet,
        )


def _html(title: str, result: ParityResult, images: ImageSet) -> str:
    tables: dict[str, dict[str, object]] = {}
    if result.served is not None:
        rows = result.served.model_dump(exclude={"flips"})
        tables["Over HTTP"] = {name.replace("_", " "): value for name, value in rows.items()}
    if result.trace is not None and result.trace.nodes:
        tables["Nodes that add most error"] = {f"{n.name} ({n.tensor})": n.growth for n in result.trace.nodes}
    return render(
        title,
        result.certificate,
        images,
        result.reference.preprocessing,
        failures=result.failures,
        notes=result.notes,
        plots=result.trace.plots() if result.trace else (),
        tables=tables,
    )
