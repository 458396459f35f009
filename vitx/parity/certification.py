"""From two classifiers to a certificate. Semantics: docs/parity.md.

`compare` measures (comparison.py), `judge` checks the numbers against the limits (verdict.py), `certify` does both and
returns the certificate.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

from vitx.core.bundle import CERTIFICATE, MANIFEST, SIGNATURE, WITNESS, Bundle, Precision, timestamp
from vitx.core.certificate import Certificate, TokenSimilarity, Verdict
from vitx.core.console import log
from vitx.core.errors import CheckFailed, InputError, VitxError
from vitx.core.files import read_sealed, sha256_file, write_json
from vitx.core.options import device_name
from vitx.core.preprocess import Preprocessing
from vitx.core.tolerance import allowed_logit_error, coarser
from vitx.data.image_set import ImageSet
from vitx.parity.comparison import BATCH_SIZES, Comparison, compare
from vitx.parity.executables.judgement import BATCH
from vitx.parity.executables.listing import RUNTIMES_BY_DEFAULT, merged, verdicts_of_bundle
from vitx.parity.executables.verdict_cache import keep_verdict
from vitx.parity.loaded_model import LoadedModel
from vitx.parity.verdict import MAX_FLIP_RATE, check_image_count, check_labels, judge
from vitx.runtimes.openvino import IR
from vitx.runtimes.plan_choice import plans_of
from vitx.runtimes.session import Session, executable_of


@dataclass(frozen=True)
class AcceptanceCriteria:
    """What is sampled, and what the candidate may show at most to pass.

    max_logit_error: None for `allowed_logit_error` of `precision` and the reference logits' standard deviation.
    """

    batch_sizes: Sequence[int] = BATCH_SIZES
    max_flip_rate: float = MAX_FLIP_RATE
    max_logit_error: float | None = None
    precision: Precision = "fp32"


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
    criteria: AcceptanceCriteria = AcceptanceCriteria(),
    token_similarity: TokenSimilarity | None = None,
    quiet: bool = False,
) -> Certificate:
    """Compare two sessions over every image of `images` and return the certificate, whether it says pass or fail.

    It passes when the 95 % upper bound on the flip rate is at most `max_flip_rate`, no logit differs by more than
    `max_logit_error` at any of `batch_sizes`, no row's logits move by more than that with other neighbours or another
    place in the batch, and `token_similarity`, where it was measured, is within its own limit. Each session gets the
    images through its own preprocessing. `subject` is what the certificate is bound to (`Bundle.subject()`). Raises
    InputError when the images are too few for `max_flip_rate`, naming how many it takes.
    """
    check_image_count(len(images), criteria.max_flip_rate)
    comparison = compare(
        reference,
        candidate,
        images,
        preprocessing,
        candidate_preprocessing=candidate_preprocessing,
        batch_sizes=criteria.batch_sizes,
        quiet=quiet,
    )
    certificate = _certificate(
        *(comparison, criteria, token_similarity),
        subject=dict(subject or {}),
        reference=reference_name,
        reference_sha256=reference_sha256,
        candidate=candidate_name,
        runtime=candidate.describe(),
        data=images.name,
        data_sha256=images.digest(),
    )
    verdict = certificate.as_verdict(executable_of(subject or {}, candidate))
    return certificate.model_copy(update={"executables": (verdict,)}).sealed()


def _certificate(
    comparison: Comparison, criteria: AcceptanceCriteria, token_similarity: TokenSimilarity | None, **about: Any
) -> Certificate:
    """The certificate of a comparison. `about`: its fields that say what was compared, and on which images."""
    max_logit_error = criteria.max_logit_error
    if max_logit_error is None:
        max_logit_error = allowed_logit_error(criteria.precision, comparison.logit_std)
    failures, findings = judge(
        comparison,
        max_flip_rate=criteria.max_flip_rate,
        max_logit_error=max_logit_error,
        token_similarity=token_similarity,
    )
    # A measurement has the same name in both records.
    measurements = {name: getattr(comparison, name) for name in Certificate.model_fields if hasattr(comparison, name)}
    return Certificate(
        **{**measurements, **about},
        verdict="fail" if failures else "pass",
        reasons=failures or findings,
        max_flip_rate=criteria.max_flip_rate,
        max_logit_error_allowed=max_logit_error,
        created=timestamp(),
        token_similarity=token_similarity,
    ).sealed()


def certify_models(
    reference: LoadedModel,
    candidate: LoadedModel,
    images: ImageSet,
    *,
    device: str = "auto",
    max_flip_rate: float = MAX_FLIP_RATE,
    batch_sizes: Sequence[int] | None = None,
    token_similarity: Callable[[], TokenSimilarity | None] = lambda: None,
    write: bool = False,
    runtimes: Sequence[str] = RUNTIMES_BY_DEFAULT,
    add_evidence: Callable[[Bundle, Comparison, Certificate], Bundle] | None = None,
    quiet: bool = False,
) -> Certificate:
    """Certify any two models; with `write` into the candidate, a bundle, as its `certificate.json`, pass or fail.

    What is written has a verdict on every executable of the bundle in one of `runtimes` that can run here. device:
    where both were asked to run. batch_sizes: by default those of the candidate (`bundle_batch_sizes`)
    for which there are enough images; a certificate that is written is of all of these.
    token_similarity: called once the checks below have passed, for it takes a pass over some images. add_evidence:
    called before a passing certificate is written; it may put a witness set into the bundle, and returns the bundle
    with it. Raises InputError when a model's classes are not the images' or the images are too few, CheckFailed for a
    stale engine, for a manifest of another precision than its graph's, for a session that does not run where it was
    asked to, and for a bundle that another has replaced meanwhile.
    """
    for model in (reference, candidate):
        check_labels(images, model.labels)
        check_provider(model, device)
        if model.bundle is not None:
            check_engines(model.bundle)
            check_graph(model.bundle, quiet=quiet)
    check_image_count(len(images), max_flip_rate)
    bundle = candidate.bundle
    if write:
        if bundle is None:
            raise InputError(f"{candidate.name} is no bundle: it has no place for a certificate")
        if left_out := sizes_left_out(bundle, len(images), batch_sizes):
            missing = ", ".join(left_out)
            raise InputError(f"a certificate is of all batch sizes, and {missing} of '{bundle.path}' are left out")
    criteria = AcceptanceCriteria(
        batch_sizes=batch_sizes or _default_batch_sizes(candidate, len(images), quiet=quiet),
        max_flip_rate=max_flip_rate,
        precision=coarser(reference.precision, candidate.precision),
    )
    measured = token_similarity()
    comparison = compare(
        *(reference.session, candidate.session, images, reference.preprocessing),
        candidate_preprocessing=candidate.preprocessing,
        batch_sizes=criteria.batch_sizes,
        quiet=quiet,
    )
    subject = bundle.subject() if bundle else {}
    if bundle and subject[MANIFEST] != candidate.sha256:
        raise CheckFailed(f"'{bundle.path}' was replaced while it was compared: compare it again")
    certificate = _certificate(
        *(comparison, criteria, measured),
        subject=subject,
        reference=reference.name,
        reference_sha256=reference.sha256,
        # What travels with a bundle names no path of this machine.
        candidate=bundle.manifest.name if bundle and write else candidate.name,
        runtime=candidate.session.describe(),
        data=images.name,
        data_sha256=images.digest(),
    )
    if not write or bundle is None:
        return certificate
    if add_evidence is not None and certificate.verdict == "pass":
        bundle = add_evidence(bundle, comparison, certificate)
    return _write_certificate(bundle, certificate, candidate, device, runtimes, quiet=quiet)


def _write_certificate(
    bundle: Bundle,
    certificate: Certificate,
    candidate: LoadedModel,
    device: str,
    runtimes: Sequence[str],
    *,
    quiet: bool,
) -> Certificate:
    """Write the certificate with a verdict on each executable, and keep the passing ones in this machine's cache."""
    own = certificate.as_verdict(executable_of(bundle.subject(), candidate.session))
    judged: list[Verdict] = []
    if certificate.verdict == "pass":
        device_of_all = device_name(device)
        judged = verdicts_of_bundle(bundle, certificate.max_flip_rate, device_of_all, runtimes, quiet=quiet)
        # The witness set is run in batches of another size. Its logits must agree too; flips are counted on the split.
        wrong = [v for v in judged if v.executable == own.executable and v.max_logit_error > v.max_logit_error_allowed]
        if wrong:
            reasons = (f"the witness set, in batches of {BATCH}: {'; '.join(wrong[0].reasons)}",)
            certificate = certificate.model_copy(update={"verdict": "fail", "reasons": reasons}).sealed()
            own = wrong[0]
    before = kept_certificate(bundle)  # not sooner: a comparison in another runtime may have ended meanwhile
    verdicts = [*(before.executables if before is not None else ()), *judged]
    if not candidate.twin:  # the last word on the runtime that ran all images, not only the witness set
        verdicts.append(own)
    if certificate.verdict == "pass" and WITNESS not in bundle.manifest.files:
        run = "run `vitx parity RUN BUNDLE --runtime"
        if not any(each.verdict == "pass" for each in verdicts):
            warning = "the graph passes, and no runtime was judged with it"
            log(f"warning: {warning}: {run} onnxruntime` where it will be served")
        if IR in bundle.manifest.files and not any(IR in each.executable.artefacts for each in verdicts):
            log(f"warning: without a witness set nothing judged {IR}, and no server runs it: {run} openvino`")
    with said_if_lost(certificate):
        return record_verdicts(bundle, certificate, verdicts)


@contextmanager
def said_if_lost(measured: Certificate) -> Iterator[None]:
    """Say the verdict where the block cannot write, as on a full disk: what was measured may have taken hours."""
    try:
        yield
    except OSError:
        log(f"parity: {measured.verdict}: {'; '.join(measured.reasons)}")
        raise


def kept_certificate(bundle: Bundle) -> Certificate | None:
    """The certificate that a bundle has of its files as they are now, to be written again with other verdicts.

    None, which is said, for one that was damaged or edited: sealed anew, it would pass for what was measured.
    """
    path = bundle.path / CERTIFICATE
    if not path.is_file():
        return None
    try:
        certificate = read_sealed(path, Certificate, remedy="`vitx parity RUN BUNDLE` writes it anew")
    except VitxError as error:
        log(f"warning: nothing of the certificate is kept: {error}")
        return None
    return certificate if certificate.subject == bundle.subject() else None


def record_verdicts(bundle: Bundle, certificate: Certificate, verdicts: Sequence[Verdict]) -> Certificate:
    """Write a bundle's certificate with these verdicts beside those it has on other executables.

    Those found by the witness set are kept in this machine's cache too.
    """
    known = merged(certificate.executables, verdicts)
    written = certificate.model_copy(update={"subject": bundle.subject(), "executables": known}).sealed()
    write_json(bundle.path / CERTIFICATE, written)
    if (signature := bundle.path / SIGNATURE).is_file():
        log(f"warning: '{signature}' was made with the certificate before and does not hold any more: sign it anew")
    for verdict in verdicts:
        if verdict.evidence == "witness set":  # what a load here would find
            keep_verdict(bundle, verdict)
    return written


def warn_of_other_weights(bundle: Bundle, digest: str, which: str, *, quiet: bool) -> None:
    """Log that a bundle was exported from other weights than it is compared with; the comparison decides, not this."""
    if digest != bundle.manifest.provenance.checkpoint_sha256:
        log(f"parity: '{bundle.path}' was exported from other weights than this run's '{which}'", quiet=quiet)


def check_engines(bundle: Bundle) -> None:
    """Raise CheckFailed for a TensorRT plan that was built from another graph than the bundle's."""
    graph = sha256_file(bundle.model_path)
    for name, plan in plans_of(bundle).items():
        if plan.onnx_sha256 != graph:
            raise CheckFailed(
                f"stale engine: {Path(name).name} was built from graph {plan.onnx_sha256[:16]}… and "
                f"the bundle holds {graph[:16]}…: export the bundle again"
            )


def check_graph(bundle: Bundle, *, quiet: bool) -> None:
    """Raise CheckFailed where the manifest says another operator set or precision than the bundle's graph has.

    A coarser precision would widen the limit of its logits.
    """
    if find_spec("onnx") is None:
        log("parity: the graph is not held against the manifest's precision: onnx is not installed", quiet=quiet)
        return
    from vitx.export.engines.tensorrt_graph import precision_of
    from vitx.export.graph.dataflow import STANDARD, read_onnx

    graph, manifest = read_onnx(bundle.model_path), bundle.manifest
    opsets = [entry.version for entry in graph.opset_import if entry.domain in STANDARD]
    if opsets != [manifest.opset]:
        raise CheckFailed(
            f"'{bundle.model_path}' is of opset {', '.join(map(str, opsets))}, and {MANIFEST} says {manifest.opset}: "
            "export it again"
        )
    kept = manifest.islands or manifest.lowering.get("not_quantized")  # perhaps all of it
    weights = precision_of(graph)
    holds = weights in ("fp32", "none") if manifest.precision == "fp32" else manifest.precision in weights or kept
    if not holds:
        raise CheckFailed(
            f"'{bundle.model_path}' has weights in {weights}, and {MANIFEST} says {manifest.precision}: export it again"
        )


def bundle_batch_sizes(bundle: Bundle) -> tuple[int, ...]:
    """The batch sizes at which a bundle is compared: 1, 2, 7, 32, and the ends of each profile of its plans.

    The size one below each upper end is included: TensorRT may choose another kernel for it.
    """
    ends = chain.from_iterable(
        (profile.minimum, profile.maximum - 1, profile.maximum)
        for plan in plans_of(bundle).values()
        for profile in plan.profiles
    )
    return tuple(sorted({*BATCH_SIZES, *(size for size in ends if size >= 1)}))


def sizes_left_out(bundle: Bundle, images: int, batch_sizes: Sequence[int] | None) -> list[str]:
    """Those of `bundle_batch_sizes`, as far as there are enough images, that the chosen ones, if any, leave out."""
    wanted = [size for size in bundle_batch_sizes(bundle) if size <= images]
    return [str(size) for size in wanted if batch_sizes and size not in batch_sizes]


def _default_batch_sizes(candidate: LoadedModel, images: int, *, quiet: bool) -> tuple[int, ...]:
    sizes = bundle_batch_sizes(candidate.bundle) if candidate.bundle else BATCH_SIZES
    if most := candidate.session.max_batch:
        sizes = (*(size for size in sizes if size < most), most)
    if large := [str(size) for size in sizes if size > images]:
        log(f"parity: batches of {', '.join(large)} are not compared, there are {images} images", quiet=quiet)
    return tuple(size for size in sizes if size <= images)


def check_provider(model: LoadedModel, device: str) -> None:
    """Raise CheckFailed when a session was asked onto a GPU and says that it runs on the CPU, or the other way."""
    provider = str(model.session.describe().get("provider", ""))
    on_cpu = "cpu" in provider.lower()
    if (device == "cuda" and on_cpu) or (device == "cpu" and "cuda" in provider.lower()):
        raise CheckFailed(
            f"fallback: device {device} was asked for and {model.name} runs on {provider}; nothing was compared"
        )
