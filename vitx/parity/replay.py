"""What `vitx parity --verify BUNDLE` does: check a certificate's files, measure again, and compare the numbers."""

import math
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np

from vitx.core.bundle import MANIFEST, Bundle
from vitx.core.certificate import Certificate, Executable, Verdict
from vitx.core.console import log
from vitx.core.errors import CheckFailed, VitxError
from vitx.core.files import sha256_bytes
from vitx.core.options import Checkpoint
from vitx.core.run import RunFolder
from vitx.data.folder import CheckSize
from vitx.data.image_set import ImageSet
from vitx.data.open import open_images
from vitx.parity.certification import AcceptanceCriteria, certify, check_engines, check_provider
from vitx.parity.comparison import infer
from vitx.parity.executables.listing import CANDIDATES, RUNTIMES_BY_DEFAULT, merged, verdicts_of_bundle
from vitx.parity.loaded_model import LoadedModel, model_from_bundle, open_model
from vitx.parity.options import ParityOptions
from vitx.parity.statistics import clopper_pearson_upper
from vitx.parity.verdict import check_labels
from vitx.runtimes.session import Session, device_name

# A logit error may be this many times the certified one, or this large: another processor sums in another order.
ERROR_FACTOR, ERROR_FLOOR = 4.0, 1e-6
BATCH = 32


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

    Those of this machine are found anew by the witness set; those of others are as the certificate says. refused: the
    candidates that failed when the bundle was made, which nothing runs.
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
    swapped = second is not None and not (first / MANIFEST).is_file()
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
        numbers = replay(bundle, certificate, images, candidate.session, reference, quiet=quiet)
    listed = {each.executable.runtime for each in certificate.executables}
    runtimes = (*RUNTIMES_BY_DEFAULT, *(name for name in CANDIDATES if name in listed))
    here = verdicts_of_bundle(bundle, certificate.max_flip_rate, device_name(options.device), runtimes, quiet=quiet)
    failed = [each.executable for each in certificate.executables if each.verdict == "fail"]
    refused = tuple(each for each in failed if each.runtime in CANDIDATES)
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
    image must be the certified ones, and the bound what the certified flips prove.
    """
    check_labels(images, bundle.manifest.labels)
    if reference is None:
        return _replay_candidate(bundle, certificate, images, candidate)
    now = certify(
        reference.session,
        candidate,
        images,
        reference.preprocessing,
        candidate_preprocessing=bundle.manifest.preprocessing,
        criteria=AcceptanceCriteria(
            batch_sizes=certificate.batch_sizes,
            max_flip_rate=certificate.max_flip_rate,
            max_logit_error=certificate.max_logit_error_allowed,
            precision=bundle.manifest.precision,
        ),
        token_similarity=certificate.token_similarity,
        quiet=quiet,
    )
    certified_flips, flips = _flipped_keys(certificate), _flipped_keys(now)
    return (
        _same("verdict", certificate.verdict, now.verdict),
        _same("images", certificate.images, now.images),
        _same("top-1 of the reference", certificate.accuracy_reference, now.accuracy_reference),
        _same("top-1 of the candidate", certificate.accuracy_candidate, now.accuracy_candidate),
        ReplayedNumber("flips", len(certified_flips), len(flips), certified_flips == flips),
        _bound(certificate, now.flip_rate_bound),
        _same("class of every image, sha256", certificate.classes_sha256[:16], now.classes_sha256[:16]),
        _near("largest logit error", certificate.max_logit_error, now.max_logit_error),
        _near("mean logit error", certificate.mean_logit_error, now.mean_logit_error),
        _near("largest change by neighbours", certificate.max_neighbour_error, now.max_neighbour_error),
    )


def _replay_candidate(
    bundle: Bundle, certificate: Certificate, images: ImageSet, candidate: Session
) -> tuple[ReplayedNumber, ...]:
    size = certificate.batch_size or BATCH
    batches = images.batches(bundle.manifest.preprocessing, size)
    classes = np.concatenate([infer(candidate, block, size).argmax(axis=1) for block in batches])
    # The certified accuracy counts a flipped image as the class it was moved to, at whatever batch size.
    moved = {flip.key: flip.candidate for flip in certificate.flips}
    counted = [moved.get(key, int(found)) for key, found in zip(images.keys, classes, strict=True)]
    accuracy = float(np.mean(np.array(counted) == images.labels))
    digest = sha256_bytes(classes.astype("<i4").tobytes())
    flips = min(len(certificate.flips), len(images))
    return (
        _same("images", certificate.images, len(images)),
        _bound(certificate, clopper_pearson_upper(flips, len(images))),
        _same("top-1 of the candidate", certificate.accuracy_candidate, accuracy),
        _same("class of every image, sha256", certificate.classes_sha256[:16], digest[:16]),
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


def _flipped_keys(certificate: Certificate) -> set[str]:
    return {flip.key for flip in certificate.flips}


def _same(name: str, certified: float | str, seen: float | str) -> ReplayedNumber:
    equal = certified == seen
    if isinstance(certified, float) and isinstance(seen, float):
        equal = math.isclose(certified, seen, rel_tol=1e-12)
    return ReplayedNumber(name, certified, seen, equal)


def _bound(certificate: Certificate, seen: float) -> ReplayedNumber:
    certified = certificate.flip_rate_bound
    return ReplayedNumber("flip rate bound", certified, seen, math.isclose(certified, seen, rel_tol=1e-6))


def _near(name: str, certified: float, seen: float) -> ReplayedNumber:
    return ReplayedNumber(name, certified, seen, seen <= max(ERROR_FACTOR * certified, ERROR_FLOOR))
