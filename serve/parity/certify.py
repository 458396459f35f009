"""Parity: is the candidate the same classifier as the reference, on real images? Semantics: docs/parity.md.

`compare` measures (comparison.py), `judge` holds the numbers against the limits (verdict.py), `certify` does both and
returns the certificate.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

from vitx.core.bundle import CERTIFICATE, Bundle, Precision, timestamp
from vitx.core.certificate import Certificate, TokenSimilarity
from vitx.core.console import log
from vitx.core.errors import CheckFailed
from vitx.core.files import read_record, sha256_file, write_json
from vitx.core.images import ImageSet, open_images
from vitx.core.plan import PlanInfo
from vitx.core.preprocess import Preprocessing
from vitx.core.run import RunFolder
from vitx.serve.parity.comparison import BATCH_SIZES, compare
from vitx.serve.parity.verdict import MAX_FLIP_RATE, allowed_logit_error, check_image_count, check_labels, judge
from vitx.serve.runtimes import Session, load_session


def certify(
    reference: Session,
    candidate: Session,
    images: ImageSet,
    preprocessing: Preprocessing,
    *,
    candidate_preprocessing: Preprocessing | None = None,
    reference_name: str = "reference",
    reference_sha256: str = "",
    candidate_name: str = "candidate",
    subject: Mapping[str, str] | None = None,
    batch_sizes: Sequence[int] = BATCH_SIZES,
    max_flip_rate: float = MAX_FLIP_RATE,
    max_logit_error: float | None = None,
    precision: Precision = "fp32",
    token_similarity: TokenSimilarity | None = None,
    quiet: bool = False,
) -> Certificate:
    """Compare two sessions over every image of `images` and return the certificate, whether it says pass or fail.

    It passes when the 95 % upper bound on the flip rate is at most `max_flip_rate`, no logit differs by more than
    `max_logit_error` at any of `batch_sizes`, no row's logits move by more than that with other neighbours or another
    place in the batch, and `token_similarity`, where it was measured, is within its own limit. The default of
    `max_logit_error` is `allowed_logit_error` of `precision`.
    Each session gets the images through its own preprocessing. `subject` is what the certificate is bound to
    (`Bundle.subject()`). Raises InputError when the images are too few for `max_flip_rate`, naming how many it takes.
    """
    check_image_count(len(images), max_flip_rate)
    found = compare(
        reference,
        candidate,
        images,
        preprocessing,
        candidate_preprocessing=candidate_preprocessing,
        batch_sizes=batch_sizes,
        quiet=quiet,
    )
    if max_logit_error is None:
        max_logit_error = allowed_logit_error(precision, found.logit_std)
    failures, findings = judge(
        found, max_flip_rate=max_flip_rate, max_logit_error=max_logit_error, token_similarity=token_similarity
    )
    return Certificate(
        verdict="fail" if failures else "pass",
        reasons=failures or findings,
        subject=dict(subject or {}),
        reference=reference_name,
        reference_sha256=reference_sha256,
        candidate=candidate_name,
        runtime=candidate.describe(),
        data=images.name,
        data_sha256=images.digest(),
        images=found.images,
        batch_sizes=found.batch_sizes,
        accuracy_reference=found.correct_reference / found.images,
        accuracy_candidate=found.correct_candidate / found.images,
        flips=found.flips,
        flip_rate_bound=found.flip_rate_bound,
        max_flip_rate=max_flip_rate,
        mcnemar_p=found.mcnemar_p,
        max_logit_error=found.max_logit_error,
        mean_logit_error=found.mean_logit_error,
        max_logit_error_by_batch_size=found.max_logit_error_by_batch_size,
        max_logit_error_allowed=max_logit_error,
        max_neighbour_error=found.max_neighbour_error,
        created=timestamp(),
        batch_size=found.batch_size,
        probe_images=found.probe_images,
        probe_flips=found.probe_flips,
        probe_flip_rate_bound=found.probe_flip_rate_bound,
        max_position_error=found.max_position_error,
        min_cosine=found.min_cosine,
        mean_cosine=found.mean_cosine,
        ece_reference=found.ece_reference,
        ece_candidate=found.ece_candidate,
        token_similarity=token_similarity,
        classes_sha256=found.classes_sha256,
        sha256="",
    ).sealed()


def certify_bundle(
    run: RunFolder,
    bundle: Bundle,
    *,
    data: str | None = None,
    max_flip_rate: float = MAX_FLIP_RATE,
    which: str = "best",
    candidate: Session | None = None,
    batch_sizes: Sequence[int] | None = None,
    token_similarity: TokenSimilarity | None = None,
    device: str = "auto",
    skip_bad: bool = False,
    quiet: bool = False,
) -> Certificate:
    """Certify a bundle against a run's checkpoint and write `certificate.json` into the bundle, pass or fail.

    `data` defaults to the run's own; its evaluation split is used whole. Raises InputError when the data's classes are
    not the bundle's labels or its images are too few.
    """
    from vitx.serve.runtimes.torch import load_run_session, weights_digest

    info = run.info
    images = open_images(data or info.data, "val", skip_bad=skip_bad)
    check_labels(images, bundle.manifest.labels)
    check_image_count(len(images), max_flip_rate)
    digest = weights_digest(run, which)
    warn_of_other_weights(bundle, digest, which, quiet=quiet)
    return certify_against(
        load_run_session(run, which, device=device),
        info.preprocessing,
        bundle,
        images,
        reference_name=f"{info.name}, checkpoint {which}",
        reference_sha256=digest,
        candidate=candidate,
        max_flip_rate=max_flip_rate,
        batch_sizes=batch_sizes,
        token_similarity=token_similarity,
        device=device,
        quiet=quiet,
    )


def certify_against(
    reference: Session,
    preprocessing: Preprocessing,
    bundle: Bundle,
    images: ImageSet,
    *,
    reference_name: str,
    reference_sha256: str,
    candidate: Session | None = None,
    max_flip_rate: float = MAX_FLIP_RATE,
    batch_sizes: Sequence[int] | None = None,
    token_similarity: TokenSimilarity | None = None,
    device: str = "auto",
    quiet: bool = False,
) -> Certificate:
    """Certify a bundle against any reference session and write `certificate.json` into it, pass or fail.

    candidate: the session that stands for the bundle; default: the bundle loaded on `device`.
    batch_sizes: default: those of the bundle (`bundle_batch_sizes`).
    Raises CheckFailed for a stale engine, and for a session that does not run where it was asked to.
    """
    check_labels(images, bundle.manifest.labels)
    check_engines(bundle)
    session = candidate or load_session(bundle, device=device)
    check_provider(session, device)
    certificate = certify(
        reference,
        session,
        images,
        preprocessing,
        candidate_preprocessing=bundle.manifest.preprocessing,
        reference_name=reference_name,
        reference_sha256=reference_sha256,
        candidate_name=bundle.manifest.name,
        subject=bundle.subject(),
        batch_sizes=batch_sizes or bundle_batch_sizes(bundle),
        max_flip_rate=max_flip_rate,
        precision=bundle.manifest.precision,
        token_similarity=token_similarity,
        quiet=quiet,
    )
    write_json(bundle.path / CERTIFICATE, certificate)
    return certificate


def warn_of_other_weights(bundle: Bundle, digest: str, which: str, *, quiet: bool = False) -> None:
    """Say so when a bundle comes from other weights than it is compared with: parity decides what that means."""
    if digest != bundle.manifest.provenance.checkpoint_sha256:
        log(f"parity: '{bundle.path}' was exported from other weights than this run's '{which}'", quiet=quiet)


def check_engines(bundle: Bundle) -> None:
    """Raise CheckFailed for a plan that was built from another graph than the bundle's."""
    graph = sha256_file(bundle.model_path)
    for path, plan in _plans(bundle).items():
        if plan.onnx_sha256 != graph:
            raise CheckFailed(
                f"stale engine: {path.name.removesuffix('.json')} was built from graph {plan.onnx_sha256[:16]}… and "
                f"the bundle holds {graph[:16]}…: export the bundle again"
            )


def bundle_batch_sizes(bundle: Bundle) -> tuple[int, ...]:
    """At which batch sizes a bundle is compared: 1, 2, 7, 32, and the ends of each range its plans are made for.

    Beside each upper end stands the size one below it: a plan may have a kernel of its own for either.
    """
    ends = chain.from_iterable(
        (profile.minimum, profile.maximum - 1, profile.maximum)
        for plan in _plans(bundle).values()
        for profile in plan.profiles
    )
    return tuple(sorted({*BATCH_SIZES, *(size for size in ends if size >= 1)}))


def _plans(bundle: Bundle) -> dict[Path, PlanInfo]:
    """The sidecars of the bundle's plans."""
    names = [name for name in bundle.manifest.files if name.endswith(".plan.json")]
    return {bundle.path / name: read_record(bundle.path / name, PlanInfo) for name in names}


def check_provider(session: Session, device: str) -> None:
    """Raise CheckFailed when a session was asked onto a GPU and says that it runs on the CPU, or the other way."""
    provider = str(session.describe().get("provider", ""))
    on_cpu = "cpu" in provider.lower()
    if (device == "cuda" and on_cpu) or (device == "cpu" and "cuda" in provider.lower()):
        raise CheckFailed(
            f"fallback: device {device} was asked for and the candidate runs on {provider}; nothing was compared"
        )
