"""A bundle's certificate, replayed: are the files those it speaks of, and are its numbers seen again?"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vitx.core.bundle import CERTIFICATE, LATENCY, MANIFEST, Bundle
from vitx.core.certificate import Certificate, read_certificate
from vitx.core.errors import CheckFailed
from vitx.core.files import sha256_bytes
from vitx.core.preprocess import Preprocessing
from vitx.data.image_set import ImageSet
from vitx.data.open import open_images
from vitx.parity.certification import certify, check_engines
from vitx.parity.comparison import infer
from vitx.parity.verdict import check_labels
from vitx.runtimes.session import Session

# How far a logit error may be from the certificate's: another processor sums in another order.
ERROR_FACTOR, ERROR_FLOOR = 4.0, 1e-6
BATCH = 32


@dataclass(frozen=True)
class Number:
    """One number of a certificate, as certified and as seen now."""

    name: str
    certified: float | str
    seen: float | str
    agrees: bool


def verify_files(bundle: Bundle) -> Certificate:
    """Return the bundle's certificate if every file is the one it speaks of and none is a stranger.

    `Bundle.open` has compared the files that the manifest names with their digests. Raises CheckFailed naming what is
    wrong, as `require_certificate` does, and for a stale engine.
    """
    certificate = bundle.require_certificate()
    read_certificate(bundle.path / CERTIFICATE)
    check_engines(bundle)
    known = {MANIFEST, CERTIFICATE, LATENCY, *bundle.manifest.files}
    strangers = sorted(
        path.relative_to(bundle.path).as_posix()
        for path in bundle.path.rglob("*")
        if path.is_file() and path.relative_to(bundle.path).as_posix() not in known
    )
    if strangers:
        raise CheckFailed(f"'{bundle.path}' holds '{strangers[0]}', which its manifest does not name: remove it")
    bundle.latency()  # a record that cannot be read is refused
    return certificate


def certified_images(certificate: Certificate, data: str | None = None) -> ImageSet:
    """The images of a certificate; raise CheckFailed when `data` (default: the certificate's) holds others."""
    images = open_images(data or certificate.data, "val")
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
    *,
    reference: tuple[Session, Preprocessing] | None = None,
    quiet: bool = False,
) -> tuple[Number, ...]:
    """Measure again and hold every number against the certificate's.

    With a reference the whole comparison is repeated: flips, accuracies and classes must be the same, errors of logits
    at most four times the certified ones. Without one, the candidate alone is run: its accuracy and its class of every
    image must be the certified ones.
    """
    check_labels(images, bundle.manifest.labels)
    if reference is None:
        return _replay_candidate(bundle, certificate, images, candidate)
    session, preprocessing = reference
    now = certify(
        session,
        candidate,
        images,
        preprocessing,
        candidate_preprocessing=bundle.manifest.preprocessing,
        batch_sizes=certificate.batch_sizes,
        max_flip_rate=certificate.max_flip_rate,
        max_logit_error=certificate.max_logit_error_allowed,
        precision=bundle.manifest.precision,
        token_similarity=certificate.token_similarity,
        quiet=quiet,
    )
    keys, seen = _keys(certificate), _keys(now)
    return (
        _same("verdict", certificate.verdict, now.verdict),
        _same("images", certificate.images, now.images),
        _same("top-1 of the reference", certificate.accuracy_reference, now.accuracy_reference),
        _same("top-1 of the candidate", certificate.accuracy_candidate, now.accuracy_candidate),
        Number("flips", len(keys), len(seen), keys == seen),
        _same("class of every image, sha256", certificate.classes_sha256[:16], now.classes_sha256[:16]),
        _near("largest logit error", certificate.max_logit_error, now.max_logit_error),
        _near("mean logit error", certificate.mean_logit_error, now.mean_logit_error),
        _near("largest change by neighbours", certificate.max_neighbour_error, now.max_neighbour_error),
    )


def _replay_candidate(
    bundle: Bundle, certificate: Certificate, images: ImageSet, candidate: Session
) -> tuple[Number, ...]:
    size = certificate.batch_size or BATCH
    batches = images.batches(bundle.manifest.preprocessing, size)
    classes = np.concatenate([infer(candidate, block, size).argmax(axis=1) for block in batches])
    # The certified accuracy counts a flipped image as the class it was moved to, at whatever batch size.
    moved = {flip.key: flip.candidate for flip in certificate.flips}
    counted = [moved.get(key, int(found)) for key, found in zip(images.keys, classes, strict=True)]
    accuracy = float(np.mean(np.array(counted) == images.labels))
    digest = sha256_bytes(classes.astype("<i4").tobytes())
    return (
        _same("images", certificate.images, len(images)),
        _same("top-1 of the candidate", certificate.accuracy_candidate, accuracy),
        _same("class of every image, sha256", certificate.classes_sha256[:16], digest[:16]),
    )


def require_agreement(bundle: Bundle, numbers: Sequence[Number]) -> None:
    """Raise CheckFailed naming every number that is not seen again."""
    wrong = [f"{number.name} {number.seen}, certified {number.certified}" for number in numbers if not number.agrees]
    if wrong:
        raise CheckFailed(f"the certificate of '{bundle.path}' is not seen again: {'; '.join(wrong)}")


def _keys(certificate: Certificate) -> set[str]:
    return {flip.key for flip in certificate.flips}


def _same(name: str, certified: float | str, seen: float | str) -> Number:
    equal = certified == seen
    if isinstance(certified, float) and isinstance(seen, float):
        equal = math.isclose(certified, seen, rel_tol=1e-12)
    return Number(name, certified, seen, equal)


def _near(name: str, certified: float, seen: float) -> Number:
    return Number(name, certified, seen, seen <= max(ERROR_FACTOR * certified, ERROR_FLOOR))
