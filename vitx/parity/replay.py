"""What `vitx parity --verify BUNDLE` does: check a certificate's files, measure again, and compare the numbers."""

import math
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args

import numpy as np

from vitx.core.bundle import Bundle
from vitx.core.certificate import Certificate, Executable, Verdict
from vitx.core.console import log
from vitx.core.errors import CheckFailed, VitxError
from vitx.core.files import sha256_bytes
from vitx.core.options import Checkpoint
from vitx.core.probabilities import confidences
from vitx.core.run import RunFolder
from vitx.core.tolerance import MAX_LOGIT_ERROR, SIMILARITY_ALLOWED, coarser
from vitx.data.folder import CheckSize
from vitx.data.image_set import ImageSet
from vitx.data.open import log_skipped, open_images
from vitx.parity.certification import (
    AcceptanceCriteria,
    bundle_batch_sizes,
    certify,
    check_engines,
    check_graph,
    check_provider,
)
from vitx.parity.comparison import REFERENCE_BATCH, Comparison, answers_ece, infer
from vitx.parity.executables.listing import CANDIDATES, RUNTIMES_BY_DEFAULT, merged, verdicts_of_bundle
from vitx.parity.executables.refuted import refuted
from vitx.parity.loaded_model import LoadedModel, model_from_bundle, open_model
from vitx.parity.options import ParityOptions
from vitx.parity.verdict import check_labels, judge
from vitx.runtimes.session import Session

# A logit error may be this many times the certified one, or this large: another processor sums in another order.
ERROR_FACTOR, ERROR_FLOOR = 4.0, 1e-6
ECE_CHANGE = 0.01
# What the candidate's classes, the certified flips and the precision give where no reference is at hand.
ALONE = (
    "verdict",
    "images",
    "top-1 of the reference",
    "top-1 of the candidate",
    "McNemar's p",
    "flip rate bound",
    "bound on their rate",
    "class of every image, sha256",
    "logit error allowed",
    "largest logit error",
    "ECE of the candidate",
    "change of CosSim allowed",
)


@dataclass(frozen=True)
class ReplayedNumber:
    """One number of a certificate, as certified and as seen now."""

    name: str
    certified: float | str
    seen: float | str
    agrees: bool


@dataclass(frozen=True)
class Replay:
    """The certificate of one bundle, number by number, and the verdicts on all its executables.

    Those of this machine are found anew by the witness set, and fail where they do not load; those of others are as the
    certificate says. refused: what the certificate says fail of, and nothing runs: candidates that failed when the
    bundle was made, and what failed on the whole split.
    """

    bundle: Bundle
    numbers: tuple[ReplayedNumber, ...]
    executables: tuple[Verdict, ...] = ()
    refused: tuple[Executable, ...] = ()

    def require_agreement(self) -> None:
        """Raise CheckFailed naming every number that was not measured again, and every executable that fails."""
        wrong = [
            f"{number.name} {number.seen}, certified {number.certified}" for number in self.numbers if not number.agrees
        ]
        failing = [each for each in self.executables if each.verdict == "fail" and each.executable not in self.refused]
        wrong += [f"{each.executable}: {'; '.join(each.reasons)}" for each in failing]
        if wrong:
            raise CheckFailed(f"the certificate of '{self.bundle.path}' is not reproduced: {'; '.join(wrong)}")


def verify_certificate(first: Path, second: Path | None, options: ParityOptions, *, quiet: bool = False) -> Replay:
    """Replay the certificate of a bundle; the two paths are the bundle and, if given, its run, in either order."""
    swapped = second is not None and RunFolder(first).exists()
    path, run = (second or first, first) if swapped else (first, second)
    bundle = Bundle.open(path)
    certificate = verify_files(bundle)
    check_size = bundle.manifest.preprocessing.check_size
    images = certified_images(certificate, options.data, skip_bad=options.skip_bad, check_size=check_size)
    with ExitStack() as opened:
        reference = _certified_reference(bundle, certificate, run, options, quiet=quiet)
        if reference is not None:
            opened.enter_context(reference)
        against = f"against {reference.name}" if reference else "no run at hand: the candidate alone"
        log(f"verify: {against}", quiet=quiet)
        candidate = opened.enter_context(model_from_bundle(bundle, device=options.device, use_twin=True))
        check_provider(candidate, options.device)
        check_graph(bundle, quiet=quiet)
        numbers = replay(bundle, certificate, images, candidate.session, reference, quiet=quiet)
    listed = {each.executable.runtime for each in certificate.executables}
    runtimes = (*RUNTIMES_BY_DEFAULT, *(name for name in CANDIDATES if name in listed))
    here = verdicts_of_bundle(bundle, certificate.max_flip_rate, options.device, runtimes, quiet=quiet)
    here += refuted(bundle, certificate.executables, here, options.device)
    failed = [each for each in certificate.executables if each.verdict == "fail"]
    refused = tuple(each.executable for each in failed if each.failed_on_split or each.executable.runtime in CANDIDATES)
    return Replay(bundle, numbers, merged(certificate.executables, here), refused)


def verify_files(bundle: Bundle) -> Certificate:
    """Return the bundle's certificate if it is of exactly these files.

    `Bundle.open` has checked that the manifest lists every file of the folder, and their digests. Raises CheckFailed
    naming what is wrong, as `require_certificate` does, and for a stale engine.
    """
    certificate = bundle.require_certificate()
    check_engines(bundle)
    bundle.latency()  # raises for a damaged record
    return certificate


def certified_images(
    certificate: Certificate, data: str | None = None, *, skip_bad: bool = False, check_size: CheckSize | None = None
) -> ImageSet:
    """The images of a certificate; raise CheckFailed when `data` (default: the certificate's) holds others.

    skip_bad, check_size: as for `open_images`; a certificate made with them holds for the images that can be read.
    """
    images = open_images(data or certificate.data, "val", skip_bad=skip_bad, check_size=check_size)
    log_skipped(images)
    digest = images.digest()
    if digest != certificate.data_sha256:
        raise CheckFailed(
            f"'{images.name}' holds other images than the certificate: sha256 {digest[:16]}… and "
            f"{certificate.data_sha256[:16]}… of keys, labels and bytes"
        )
    return images


def replay(
    bundle: Bundle,
    certificate: Certificate,
    images: ImageSet,
    candidate: Session,
    reference: LoadedModel | None = None,
    *,
    quiet: bool = False,
) -> tuple[ReplayedNumber, ...]:
    """Measure again and compare every number with the certificate's.

    With a reference the whole comparison is repeated: flips, accuracies and classes must be the same, errors of logits
    at most four times the certified ones. Without one, the candidate alone is run: its accuracy and its class of every
    image must be the certified ones, and bounds, p and verdict what the certified flips and errors give.
    """
    check_labels(images, bundle.manifest.labels)
    if reference is None:
        now = _measured_alone(bundle, certificate, images, candidate)
        return tuple(number for number in _numbers(bundle, certificate, now) if number.name in ALONE)
    sizes = [size for size in bundle_batch_sizes(bundle) if size <= len(images)]
    now = certify(
        reference.session,
        candidate,
        images,
        reference.preprocessing,
        candidate_preprocessing=bundle.manifest.preprocessing,
        criteria=AcceptanceCriteria(
            batch_sizes=tuple(sorted({*certificate.batch_sizes, *sizes})),
            max_flip_rate=certificate.max_flip_rate,
            precision=coarser(reference.precision, bundle.manifest.precision),
        ),
        token_similarity=certificate.token_similarity,
        quiet=quiet,
    )
    return _numbers(bundle, certificate, now)


def _measured_alone(bundle: Bundle, certificate: Certificate, images: ImageSet, candidate: Session) -> Certificate:
    """The certificate with what the candidate's classes and the certified flips give, judged anew."""
    size = certificate.batch_size or REFERENCE_BATCH
    batches = images.batches(bundle.manifest.preprocessing, size)
    logits = np.concatenate([infer(candidate, block, size) for block in batches])
    classes, count = logits.argmax(axis=1), len(images)
    # The certified accuracy counts a flipped image as the class it was moved to, at whatever batch size.
    moved = {flip.key: flip.candidate for flip in certificate.flips}
    counted = [moved.get(key, int(found)) for key, found in zip(images.keys, classes, strict=True)]
    correct = int((np.array(counted) == images.labels).sum())
    flips = certificate.flips[:count]
    lost = sum(flip.reference == flip.label for flip in flips)
    won = sum(flip.candidate == flip.label for flip in flips)
    claimed: dict[str, Any] = {each.name: getattr(certificate, each.name, 0) for each in fields(Comparison)}
    probes = max(1, certificate.probe_images)
    about: dict[str, Any] = {
        "images": count,
        "flips": flips,
        "probe_images": probes,
        "probe_flips": min(certificate.probe_flips, probes),
        "correct_reference": correct + lost - won,
        "correct_candidate": correct,
        "only_reference_correct": lost,
        "only_candidate_correct": won,
        "ece_candidate": answers_ece(confidences(logits), classes == images.labels),
        "classes_sha256": sha256_bytes(classes.astype("<i4").tobytes()),
    }
    measured = Comparison(**{**claimed, **about})
    # Below float32 the limit follows from the reference's logits.
    allowed = MAX_LOGIT_ERROR if bundle.manifest.precision == "fp32" else certificate.max_logit_error_allowed
    failures, _ = judge(
        measured,
        max_flip_rate=certificate.max_flip_rate,
        max_logit_error=allowed,
        token_similarity=certificate.token_similarity,
    )
    found = {name: getattr(measured, name) for name in Certificate.model_fields if hasattr(measured, name)}
    verdict = "fail" if failures else "pass"
    return certificate.model_copy(update={**found, "verdict": verdict, "max_logit_error_allowed": allowed})


def _numbers(bundle: Bundle, certified: Certificate, now: Certificate) -> tuple[ReplayedNumber, ...]:
    flips, seen_flips = _flipped(certified), _flipped(now)
    tokens, allowed_change = certified.token_similarity, SIMILARITY_ALLOWED[bundle.manifest.precision]
    by_size = certified.max_logit_error_by_batch_size
    return (
        _same("verdict", certified.verdict, now.verdict),
        _same("images", certified.images, now.images),
        _same("batch sizes", _sizes(certified), _sizes(now)),
        _same("top-1 of the reference", certified.accuracy_reference, now.accuracy_reference),
        _same("top-1 of the candidate", certified.accuracy_candidate, now.accuracy_candidate),
        _close("McNemar's p", certified.mcnemar_p, now.mcnemar_p),
        ReplayedNumber("flips", len(flips), len(seen_flips), flips == seen_flips),
        _close("flip rate bound", certified.flip_rate_bound, now.flip_rate_bound),
        _same("images of another class in other batches", _unstable(certified), _unstable(now)),
        _close("bound on their rate", certified.probe_flip_rate_bound, now.probe_flip_rate_bound),
        _same("class of every image, sha256", certified.classes_sha256[:16], now.classes_sha256[:16]),
        # Of half types and 8 bits a share of the standard deviation of logits, which another processor sums otherwise.
        _close("logit error allowed", certified.max_logit_error_allowed, now.max_logit_error_allowed, within=1e-3),
        _near("largest logit error", certified.max_logit_error, now.max_logit_error),
        *(
            _near(f"at batch size {size}", by_size.get(size, 0.0), error)
            for size, error in now.max_logit_error_by_batch_size.items()
        ),
        _near("mean logit error", certified.mean_logit_error, now.mean_logit_error),
        _near("largest change by neighbours", certified.max_neighbour_error, now.max_neighbour_error),
        _near("largest change by place", certified.max_position_error, now.max_position_error),
        _cosine("smallest cosine", certified.min_cosine, now.min_cosine),
        _cosine("mean cosine", certified.mean_cosine, now.mean_cosine),
        _ece("ECE of the reference", certified.ece_reference, now.ece_reference, now.images),
        _ece("ECE of the candidate", certified.ece_candidate, now.ece_candidate, now.images),
        *([_same("change of CosSim allowed", tokens.allowed, allowed_change)] if tokens else []),
    )


def _certified_reference(
    bundle: Bundle, certificate: Certificate, run: Path | None, options: ParityOptions, *, quiet: bool
) -> LoadedModel | None:
    """The run that was given, or the one the bundle was exported from if it is still there with the same weights.

    One that was not given and cannot be opened is left out, which is logged.
    """
    if run is not None:
        given = open_model(run, which=options.checkpoint, device=options.device)
        if given.sha256 != certificate.reference_sha256:
            given.session.close()
            raise CheckFailed(f"'{run}' is not the reference of the certificate: its weights have another sha256")
        return given
    provenance = bundle.manifest.provenance
    source = Path(provenance.source)
    if not RunFolder(source).exists() or provenance.checkpoint not in get_args(Checkpoint):
        return None
    try:
        exported = open_model(source, which=provenance.checkpoint, device=options.device)
    except VitxError as reason:
        log(f"verify: the run of the export is left out: {reason}", quiet=quiet)
        return None
    if exported.sha256 == certificate.reference_sha256:
        return exported
    exported.session.close()
    return None


def _flipped(certificate: Certificate) -> set[tuple[str, int, int, int]]:
    return {(flip.key, flip.label, flip.reference, flip.candidate) for flip in certificate.flips}


def _sizes(certificate: Certificate) -> str:
    return f"{', '.join(map(str, certificate.batch_sizes))}; all images at {certificate.batch_size}"


def _unstable(certificate: Certificate) -> str:
    return f"{certificate.probe_flips} of {certificate.probe_images}"


def _same(name: str, certified: float | str, seen: float | str) -> ReplayedNumber:
    if isinstance(certified, float) and isinstance(seen, float):
        return _close(name, certified, seen, within=1e-12)
    return ReplayedNumber(name, certified, seen, certified == seen)


def _close(name: str, certified: float, seen: float, *, within: float = 1e-6) -> ReplayedNumber:
    return ReplayedNumber(name, certified, seen, math.isclose(certified, seen, rel_tol=within))


def _near(name: str, certified: float, seen: float) -> ReplayedNumber:
    return ReplayedNumber(name, certified, seen, seen <= max(ERROR_FACTOR * certified, ERROR_FLOOR))


def _cosine(name: str, certified: float, seen: float) -> ReplayedNumber:
    """The distance 1 − cosine goes with the square of an error."""
    distance, limit = 1 - seen, max(ERROR_FACTOR**2 * (1 - certified), ERROR_FLOOR)
    return ReplayedNumber(name, certified, seen, certified <= 1 + ERROR_FLOOR and distance <= limit)


def _ece(name: str, certified: float, seen: float, images: int) -> ReplayedNumber:
    """Rounding may put an image into the next bin: it then counts in two bins otherwise."""
    return ReplayedNumber(name, certified, seen, abs(certified - seen) <= max(ECE_CHANGE, 2 / images))
