"""How `vitx export` certifies its bundle, and how many images that will take."""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path

from vitx.core.bundle import INT8_MODEL, MANIFEST, Bundle, refuse_in_bundle
from vitx.core.certificate import Certificate
from vitx.core.console import log
from vitx.core.errors import CheckFailed, InputError, VitxError
from vitx.core.files import write_json
from vitx.core.options import device_name
from vitx.core.run import RunFolder
from vitx.core.tensorrt_plan import ENGINES_FOLDER
from vitx.data.image_set import ImageSet
from vitx.data.open import log_skipped, open_images
from vitx.export import ExportOptions, SamplingPlan, Source, SourceRequest, export_bundle, triton_repository
from vitx.export.bundling import bundle_name
from vitx.export.hub import check_hub_folder, write_hub_folder
from vitx.export.triton import check_triton_labels, check_triton_model, check_triton_precision
from vitx.parity.certification import certify_models, record_verdicts
from vitx.parity.comparison import Comparison
from vitx.parity.executables.listing import CANDIDATES, INT8, RUNTIMES_BY_DEFAULT
from vitx.parity.executables.witness_set import add_witness
from vitx.parity.loaded_model import LoadedModel, model_from_bundle
from vitx.parity.signature import check_private_key, sign_bundle
from vitx.parity.statistics import flips_allowed
from vitx.parity.trace import failure_notes, measure_token_similarity
from vitx.parity.verdict import check_image_count
from vitx.runtimes.torch import TorchSession, check_device


def export_certified(
    target: str | Path,
    out: Path | str | None = None,
    options: ExportOptions | None = None,
    *,
    weights: str = "pretrained",
    quiet: bool = False,
) -> Bundle:
    """Export a run, or a `model:` with weights, to a bundle that is certified unless `options.uncertified`.

    out: by default RUN.vitx, or NAME.vitx here. A bundle that fails its parity is not written: CheckFailed.
    """
    options = options or ExportOptions()
    request = source_request(target, options, weights)
    if request.is_model and options.data is None and not options.uncertified:
        raise InputError(f"'{target}' brings no images to certify on: give --data, or say --uncertified")
    check_device(options.device)
    if options.sign is not None:
        check_private_key(options.sign)
    if options.calibration is not None:  # found later, --for cpu would take it for a reason to leave the int8 graph out
        open_images(options.calibration, "train", skip_bad=options.skip_bad)
    # Through a Path, as `runs/net/` is how a shell completes a folder's name.
    out = Path(out or f"{request.network if request.is_model else _named(Path(target))}.vitx")
    written = {"--out": out}
    if options.hub is not None:
        check_hub_folder(options.hub)
        written["--hub"] = options.hub
    if options.triton is not None:
        written["--triton"] = options.triton / bundle_name(out)
        check_triton_model(written["--triton"])
        check_triton_labels(_class_names(request))
        if not options.trt:
            check_triton_precision(options.precision, options.base_type())
    if options.engine.timing_cache is not None:
        written["--timing-cache"] = options.engine.timing_cache
    _require_apart(written)
    for option, place in written.items():
        refuse_in_bundle(place.parent if option == "--out" else place)  # a bundle is replaced by a new one

    def accept(bundle: Bundle) -> None:
        if not options.uncertified:
            certify_export(bundle, request, options, quiet=quiet)
        if options.sign is not None:
            sign_bundle(Bundle.open(bundle.path), options.sign)

    log(f"export: {target} to {out}", quiet=quiet)
    plan = None
    if not options.uncertified:
        plan = sampling_plan(request, options.data, options.max_flip_rate, skip_bad=options.skip_bad)
    bundle = export_bundle(request, out, options, plan=plan, quiet=quiet, accept=accept)
    try:
        _write_beside(bundle, request, out, options, quiet=quiet)
    except (OSError, VitxError):
        log(f"export: '{out}' is written and stays; what follows it failed")
        raise
    return bundle


def _named(run: Path) -> Path:
    """The run by a path that ends in its name, which that of the folder a shell is in does not."""
    return run.resolve() if run.name in ("", "..") else run


def _write_beside(bundle: Bundle, request: SourceRequest, out: Path, options: ExportOptions, *, quiet: bool) -> None:
    if options.triton is not None:
        engine = bundle.path / ENGINES_FOLDER / "tensorrt.plan" if options.trt else None
        model = triton_repository(out, options.triton, plan=engine, allow_uncertified=options.uncertified)
        what = "the TensorRT plan, on the GPU" if engine else "the ONNX graph, on the CPU"
        log(f"export: in '{model}' Triton runs {what}", quiet=quiet)
    if options.hub is not None:
        log(f"export: '{write_hub_folder(request, bundle, options.hub)}' is a folder for timm", quiet=quiet)


def _require_apart(written: Mapping[str, Path]) -> None:
    """Raise InputError where one of these folders would be, hold or lie in another: it would damage it."""
    for (one, here), (other, there) in combinations(written.items(), 2):
        first, second = here.resolve(), there.resolve()
        if first.is_relative_to(second) or second.is_relative_to(first):
            raise InputError(f"{one} '{here}' and {other} '{there}' would be in one another: choose folders apart")


def _class_names(request: SourceRequest) -> Sequence[str]:
    """Those that the bundle will have; none of a `model:` without data, whose classes are numbers."""
    if request.is_model:
        return open_images(request.data, "val", skip_bad=True).class_names if request.data else ()
    return RunFolder.open(request.target).info.class_names


def source_request(target: str | Path, options: ExportOptions, weights: str) -> SourceRequest:
    """What `vitx export` loads: `data` names the classes of a `model:`, and is the images of a run.

    Raises InputError for weights of a run and a checkpoint of a `model:`, which would not be the ones exported.
    """
    request = SourceRequest(str(target), which=options.checkpoint, weights=weights, data=options.data)
    request.require_used()
    return request if request.is_model else replace(request, data=None)


def sampling_plan(
    request: SourceRequest, data: str | None, max_flip_rate: float, *, skip_bad: bool = False
) -> SamplingPlan:
    """How many images the certificate will look at, and how many of them may flip.

    Known before the export, so that an image set too small for the flip rate is refused before hours are spent.
    """
    request.require_known()
    check_size = None  # of a `model:`, which is not loaded yet, the certificate looks at the sizes
    if not request.is_model:
        info = RunFolder.open(request.target).info
        data, check_size = data or info.data, info.preprocessing.check_size
    assert data is not None
    count = len(open_images(data, "val", skip_bad=skip_bad, check_size=check_size))
    check_image_count(count, max_flip_rate)
    return SamplingPlan(count, flips_allowed(count, max_flip_rate))


def certify_export(bundle: Bundle, request: SourceRequest, options: ExportOptions, *, quiet: bool) -> None:
    """Compare the bundle with the network it was exported from, and write its witness set and its certificate.

    Raises CheckFailed with the reasons, the mistake and the layer when it fails, when an executable that was asked for
    does, and when the weights are not those of the bundle any more.
    """
    device, witness = options.device, options.witness
    log("export: certifying the graph against the checkpoint", quiet=quiet)
    source = request.load_again(bundle.manifest.provenance.checkpoint_sha256)
    with (
        model_from_source(source, device) as reference,
        model_from_bundle(bundle, device=device, use_twin=True) as candidate,
    ):
        check_size = reference.preprocessing.check_size
        data = options.data or reference.data
        images = open_images(data, "val", skip_bad=options.skip_bad, check_size=check_size)
        log_skipped(images)
        tokens = partial(measure_token_similarity, reference, candidate, images, quiet=quiet)
        certificate = certify_models(
            reference,
            candidate,
            images,
            device=device,
            max_flip_rate=options.max_flip_rate,
            # Float32 keeps tokens apart; coarser rounding may make them alike while the logits agree.
            token_similarity=tokens if bundle.manifest.precision != "fp32" else lambda: None,
            write=True,
            runtimes=(*RUNTIMES_BY_DEFAULT, *(CANDIDATES if options.for_ == "cpu" else ())),
            add_evidence=None if witness == 0 else partial(_add_witness, reference, images, witness, quiet),
            quiet=quiet,
        )
        if certificate.verdict != "pass":
            notes = failure_notes(reference, candidate, images, certificate, request, quiet=quiet)
            reasons = "; ".join((*certificate.reasons, *notes))
            raise CheckFailed(f"the graph is not the checkpoint's equal, no bundle written: {reasons}")
    for verdict in certificate.executables:
        # Where a candidate of --for cpu fails, the certificate says so, and nothing runs it.
        if verdict.verdict == "fail" and verdict.executable.runtime not in CANDIDATES:
            reasons = "; ".join(verdict.reasons)
            raise CheckFailed(f"{verdict.executable} is not the checkpoint's equal, no bundle written: {reasons}")
    _drop_failed_int8(bundle.path, quiet=quiet)


def _drop_failed_int8(path: Path, *, quiet: bool) -> None:
    """Take the int8 candidate out of a certified bundle that is being made, unless it passed here.

    Its verdict stays in the certificate, with the reasons. Its bytes would only travel: nothing would run them.
    """
    if not (path / INT8_MODEL).is_file():
        return
    bundle = Bundle.open(path)
    certificate = bundle.require_certificate()
    judged = [each for each in certificate.executables if each.executable.runtime == INT8]
    if any(each.verdict == "pass" for each in judged):
        return
    reasons = [reason for each in judged for reason in each.reasons] or ["nothing judged it here"]
    log(f"export: the int8 candidate is dropped: {'; '.join(reasons)}", quiet=quiet)
    shutil.rmtree((path / INT8_MODEL).parent)
    files = {name: entry for name, entry in bundle.manifest.files.items() if name != INT8_MODEL}
    manifest = bundle.manifest.model_copy(update={"files": files})
    write_json(path / MANIFEST, manifest)
    record_verdicts(Bundle(path, manifest), certificate, certificate.executables)


def _add_witness(
    reference: LoadedModel,
    images: ImageSet,
    count: int | None,
    quiet: bool,
    bundle: Bundle,
    comparison: Comparison,
    certificate: Certificate,
) -> Bundle:
    assert isinstance(reference.session, TorchSession)
    outputs = tuple(spec.name for spec in bundle.manifest.outputs)
    exact = partial(reference.session.infer_float64, outputs=outputs)
    return add_witness(
        *(bundle, images, comparison, certificate, exact),
        count=count,
        flops=reference.session.flops() if count is None else None,
        quiet=quiet,
    )


def model_from_source(source: Source, device: str) -> LoadedModel:
    """The exported network in torch: the reference of its own bundle."""
    session = TorchSession(source.model, source.preprocessing, device=device_name(device))
    return LoadedModel(
        name=f"{source.name}, checkpoint {source.checkpoint}",
        session=session,
        preprocessing=source.preprocessing,
        labels=source.class_names,
        data=source.data,
        sha256=source.checkpoint_sha256,
        network=session.network,
        renormalized=session.with_normalization,
    )
