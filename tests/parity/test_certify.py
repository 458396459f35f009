"""`certify` on four images worked out by hand, and what `certify_models` checks, asks and writes."""

import errno
import math
import struct
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bundle_fixture import LABELS, write_bundle
from gpu_fixture import add_plan
from table_session import PIXEL, TableSession, numbered_images
from vitx.core.bundle import CERTIFICATE, MANIFEST, SIGNATURE, Bundle, FileEntry
from vitx.core.certificate import Certificate, TokenSimilarity, Verdict
from vitx.core.errors import CheckFailed, InputError
from vitx.core.files import replace_folder, sha256_file
from vitx.core.machine import cpu_architecture, describe_machine
from vitx.core.tensorrt_plan import Profile
from vitx.data.image_set import ImageSet
from vitx.export.engines import tensorrt_graph
from vitx.parity import certification
from vitx.parity.certification import (
    AcceptanceCriteria,
    bundle_batch_sizes,
    certify,
    certify_models,
    check_graph,
    check_provider,
)
from vitx.parity.loaded_model import LoadedModel
from vitx.parity.statistics import clopper_pearson_upper
from vitx.runtimes.session import Float32Array, executable_of

# Of labels 0, 0, 1, 1 the reference has all but the last right.
REFERENCE: list[list[float]] = [[1, 0], [2, 0], [0, 1.5], [1, 0]]
# All at once image 1 is lost; in pairs image 2 is lost and image 3 won.
CANDIDATE: list[list[float]] = [[1, 0.25], [0, 0.5], [0, 1.5], [1, 0]]
IN_PAIRS = {2: {2: (2, 1.5), 3: (1, 1.75)}}
TOKENS = TokenSimilarity(images=4, layers=("blocks.0",), reference=(0.5,), candidate=(0.25,), allowed=0.25)
# The standard deviation of the eight logits: their sum is 5.5 and that of their squares 8.25.
STD = math.sqrt(8.25 / 8 - (5.5 / 8) ** 2)


def beside_others(numbers: list[int], logits: Float32Array) -> None:
    """Image 0 moves by 1/16 when all four are shuffled, and by 1/32 behind image 1."""
    if numbers == [1, 0]:
        logits[1, 0] += 0.03125
    elif len(numbers) == 4 and numbers != [0, 1, 2, 3]:
        logits[numbers.index(0), 0] += 0.0625


def four_images(**options: Any) -> Certificate:
    criteria = AcceptanceCriteria(**{"batch_sizes": (2, 4), "max_flip_rate": 0.6, **options})
    return certify(
        TableSession(REFERENCE, provider="first"),
        TableSession(CANDIDATE, at_batch=IN_PAIRS, change=beside_others, provider="second"),
        numbered_images((0, 0, 1, 1), ("a", "b"), name="four"),
        PIXEL,
        reference_name="the network",
        reference_sha256="5" * 64,
        candidate_name="the graph",
        subject={"manifest.json": "6" * 64},
        criteria=criteria,
        token_similarity=TOKENS,
        quiet=True,
    )


def test_every_field_of_the_certificate_of_four_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(certification, "timestamp", lambda: "2026-01-01T00:00:00+00:00")
    # (1 + ¼·0) / √(1 + 1/16), (2·0 + 0·½) / (2·½), 1, 1: the cosines of the pairs of logits.
    cosines = (1 / math.sqrt(1.0625), 0.0, 1.0, 1.0)
    # Confidences 1 / (1 + exp(−margin)). The reference's 0.731 and 0.731 share a bin, 0.881 and 0.818 have their own.
    sure = {margin: 1 / (1 + math.exp(-margin)) for margin in (0.5, 0.75, 1, 1.5, 2)}
    ece_reference = (abs(1 - 2 * sure[1]) + (1 - sure[2]) + (1 - sure[1.5])) / 4
    # The candidate's 0.679 (right), 0.622 (wrong), 0.818 (right), 0.731 (wrong): bins 11, 10, 13 and 11.
    ece_candidate = (abs(1 - sure[0.75] - sure[1]) + sure[0.5] + (1 - sure[1.5])) / 4
    keys = ("key", "label", "reference", "candidate", "reference_margin", "batch_size")
    flips = (("image 1", 0, 0, 1, 2.0, 4), ("image 2", 1, 1, 0, 1.5, 2), ("image 3", 1, 0, 1, 1.0, 2))
    bound = 0.95**0.25  # P(X ≤ 3 | 4, p) = 1 − p⁴ is 0.05
    expected = {
        "format_version": 2,
        "verdict": "fail",
        "reasons": [
            "3 of 4 images flipped, the clearest with a reference margin of 2: "
            "flip rate at most 0.987259 (95 %), allowed 0.6",
            "largest logit error 2, at batch size 2, allowed 0.0001",
            "a row's logits move by up to 0.0625 with other neighbours in its batch or another place, allowed 0.0001",
        ],
        "subject": {"manifest.json": "6" * 64},
        "reference": "the network",
        "reference_sha256": "5" * 64,
        "candidate": "the graph",
        "runtime": {"runtime": "table", "provider": "second"},
        "data": "four",
        "data_sha256": numbered_images((0, 0, 1, 1), ("a", "b"), name="other").digest(),
        "images": 4,
        "batch_sizes": [2, 4],
        "accuracy_reference": 0.75,
        "accuracy_candidate": 0.5,  # two lost, one won
        "flips": [dict(zip(keys, flip, strict=True)) for flip in flips],
        "flip_rate_bound": pytest.approx(bound, abs=1e-12),
        "max_flip_rate": 0.6,
        "mcnemar_p": 1.0,  # two against one
        "max_logit_error": 2.0,
        "mean_logit_error": 2.75 / 8,  # all at once: ¼ + 2 + ½
        "max_logit_error_by_batch_size": {"2": 2.0, "4": 2.0},
        "max_logit_error_allowed": 1e-4,
        "max_neighbour_error": 0.0625,
        "created": "2026-01-01T00:00:00+00:00",
        "batch_size": 4,
        "probe_images": 4,
        "probe_flips": 2,  # 2 and 3
        # P(X ≤ 2 | 4, p) = 1 − p⁴ − 4p³(1 − p) is 0.05
        "probe_flip_rate_bound": pytest.approx(0.902389, abs=1e-6),
        "max_position_error": 0.03125,
        "min_cosine": 0.0,
        "mean_cosine": pytest.approx(sum(cosines) / 4, abs=1e-12),
        "ece_reference": pytest.approx(ece_reference, abs=1e-6),
        "ece_candidate": pytest.approx(ece_candidate, abs=1e-6),
        "token_similarity": TOKENS.model_dump(mode="json"),
        "classes_sha256": sha256(struct.pack("<4i", 0, 1, 1, 0)).hexdigest(),
    }
    copied = ("verdict", "reasons", "images", "flip_rate_bound", "max_flip_rate", "max_logit_error", "created")
    of_candidate = {
        **{name: expected[name] for name in (*copied, "max_logit_error_allowed")},
        "evidence": "evaluation split",
        "population": 4,
        "flips": 3,
        "images_per_second": None,
        "machine": describe_machine(),
        "executable": {
            "runtime": "table",
            "version": "",
            "provider": "second",
            "architecture": cpu_architecture(),
            "driver": "",
            "precision": "",
            "artefacts": {},
        },
    }
    expected["executables"] = [of_candidate]
    certificate = four_images()
    written = certificate.model_dump(mode="json")
    assert written.pop("sha256") == certificate.digest()
    assert written == expected


@pytest.mark.parametrize(
    ("criteria", "allowed"),
    [
        ({}, 1e-4),
        ({"precision": "fp16"}, 0.02 * STD),
        ({"precision": "bf16"}, 0.15 * STD),
        ({"precision": "int8"}, 0.5 * STD),
        ({"precision": "fp8"}, 0.5 * STD),
        ({"precision": "int8", "max_logit_error": 0.375}, 0.375),
        ({"max_logit_error": 0.0}, 0.0),
    ],
)
def test_the_limit_on_logits_is_given_or_a_share_of_the_reference_s_spread(
    criteria: dict[str, Any], allowed: float
) -> None:
    assert four_images(**criteria).max_logit_error_allowed == pytest.approx(allowed, abs=1e-12)


def test_a_certificate_that_passes_says_what_holds() -> None:
    images = numbered_images((0, 0, 1, 1), ("a", "b"))
    criteria = AcceptanceCriteria(max_flip_rate=0.6)
    session = TableSession(REFERENCE)
    certificate = certify(session, session, images, PIXEL, criteria=criteria, quiet=True)
    assert certificate.verdict == "pass"
    assert [reason.split()[0] for reason in certificate.reasons] == ["0", "largest", "a", "0", "0"]
    assert (certificate.subject, certificate.reference, certificate.candidate) == ({}, "reference", "candidate")
    assert (certificate.reference_sha256, certificate.token_similarity) == ("", None)
    assert certificate.batch_sizes == (1, 2, 4)  # there are four images


# A model of every kind, on 300 images of the bundle's four classes.
LOGITS = np.random.default_rng(3).integers(-16, 16, (300, 4)).astype(np.float32)


@pytest.fixture
def images() -> ImageSet:
    return numbered_images([0, 1, 2] * 100, LABELS)


def model(bundle: Bundle | None = None, **changes: Any) -> LoadedModel:
    session = TableSession(LOGITS)
    name = "the network" if bundle is None else f"{bundle.path} in onnxruntime"
    digest = "7" * 64 if bundle is None else bundle.subject()[MANIFEST]
    plain = LoadedModel(name, session, PIXEL, LABELS, data="numbers", sha256=digest, bundle=bundle)
    return replace(plain, **changes)


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return write_bundle(tmp_path / "tiny.vitx", name="tiny-name")


def test_what_is_written_is_returned_and_names_no_path(bundle: Bundle, images: ImageSet) -> None:
    certificate = certify_models(model(), model(bundle), images, write=True, quiet=True)
    assert bundle.certificate() == certificate
    assert certificate.verdict == "pass"
    assert (certificate.reference, certificate.reference_sha256) == ("the network", "7" * 64)
    assert certificate.candidate == "tiny-name"
    names = (MANIFEST, "model.onnx")
    assert certificate.subject == {name: sha256_file(bundle.path / name) for name in names}
    assert str(bundle.path) not in (bundle.path / CERTIFICATE).read_text()


def test_a_failure_is_written_too(bundle: Bundle, images: ImageSet) -> None:
    other = model(bundle, session=TableSession(LOGITS + np.float32(0.5)))
    certificate = certify_models(model(), other, images, write=True, quiet=True)
    assert certificate.verdict == "fail"
    assert bundle.certificate() == certificate


@pytest.mark.parametrize("write", [True, False])
def test_a_bundle_that_was_replaced_meanwhile_gets_no_certificate(
    bundle: Bundle, images: ImageSet, tmp_path: Path, write: bool
) -> None:
    """Another export had put other preprocessing beside the same graph, and was certified by what ran before it."""
    loaded, new = model(bundle), write_bundle(tmp_path / "new.vitx", name="another")
    certified = certify_models(model(), model(new), images, write=True, quiet=True)
    replace_folder(new.path, bundle.path)
    with pytest.raises(CheckFailed) as caught:
        certify_models(model(), loaded, images, write=write, quiet=True)
    assert str(caught.value) == f"'{bundle.path}' was replaced while it was compared: compare it again"
    assert Bundle.open(bundle.path).require_certificate() == certified


def test_what_a_full_disk_does_not_take_is_said(
    bundle: Bundle, images: ImageSet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A comparison may take hours: its numbers were lost with the certificate."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(certification, "write_json", full)
    with pytest.raises(OSError, match="No space left"):
        certify_models(model(), model(bundle), images, write=True, quiet=True)
    bound = clopper_pearson_upper(0, len(images))
    assert f"parity: pass: 0 of {len(images)} images flipped: flip rate at most {bound:.6f}" in capsys.readouterr().err


def test_a_pass_with_which_nothing_runs_yet_names_the_command(
    bundle: Bundle, images: ImageSet, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a half-precision bundle a float32 twin runs here: without a witness set no runtime has a verdict."""
    certificate = certify_models(model(), model(bundle, twin=True), images, write=True, quiet=True)
    assert (certificate.verdict, certificate.executables) == ("pass", ())
    assert capsys.readouterr().err == (
        "warning: the graph passes, and no runtime was judged with it: run "
        "`vitx parity RUN BUNDLE --runtime onnxruntime` where it will be served\n"
    )
    certify_models(model(), model(bundle), images, write=True, quiet=True)
    certify_models(model(), model(bundle, session=TableSession(LOGITS + 1), twin=True), images, write=True, quiet=True)
    assert capsys.readouterr().err == ""


def test_an_ir_that_nothing_judged_is_told(
    bundle: Bundle, images: ImageSet, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a bundle without a witness set, asked for or because not one image fits, only one runtime is certified."""
    entry = FileEntry(sha256="0" * 64, size=0)
    manifest = bundle.manifest.model_copy(update={"files": {**bundle.manifest.files, "openvino/model.xml": entry}})
    with_ir = Bundle(bundle.path, manifest)
    certify_models(model(), model(with_ir), images, write=True, quiet=True)
    assert capsys.readouterr().err == (
        "warning: without a witness set nothing judged openvino/model.xml, and no server runs it: run "
        "`vitx parity RUN BUNDLE --runtime openvino`\n"
    )
    of_ir = TableSession(LOGITS)
    of_ir.artefacts = ("openvino/model.xml",)
    certify_models(model(), model(with_ir, session=of_ir), images, write=True, quiet=True)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("error", "verdict"), [(1e-4, "pass"), (1.1e-4, "fail")])
def test_the_witness_set_s_logits_are_within_the_limit_too(
    bundle: Bundle, images: ImageSet, monkeypatch: pytest.MonkeyPatch, error: float, verdict: str
) -> None:
    """It runs in batches of another size. Of a failed comparison nothing more is run."""
    asked: list[tuple[Any, ...]] = []
    failing = model(bundle, session=TableSession(LOGITS + 1))
    of_set = certify_models(model(), model(bundle), images, quiet=True).as_verdict(
        executable_of(bundle.subject(), failing.session)
    )
    of_set = of_set.model_copy(update={"max_logit_error": error, "reasons": ("too far",), "evidence": "witness set"})
    kept: list[Any] = []

    def verdicts(*given: Any, quiet: bool) -> list[Verdict]:
        asked.append(given)
        return [of_set]

    monkeypatch.setattr(certification, "verdicts_of_bundle", verdicts)
    monkeypatch.setattr(certification, "keep_verdict", lambda *given: kept.append(given))
    assert certify_models(model(), failing, images, write=True, quiet=True).verdict == "fail"
    assert asked == []
    written = certify_models(model(), model(bundle), images, runtimes=("one",), device="cpu", write=True, quiet=True)
    assert asked == [(bundle, 0.01, "cpu", ("one",))]
    assert kept[0] == (bundle, of_set)
    assert all(verdict.evidence == "witness set" for _, verdict in kept)
    assert written.verdict == verdict
    if verdict == "fail":
        assert written.reasons == ("the witness set, in batches of 16: too far",)


def test_a_new_certificate_needs_a_new_signature(
    bundle: Bundle, images: ImageSet, capsys: pytest.CaptureFixture[str]
) -> None:
    (bundle.path / SIGNATURE).write_text("{}")
    certify_models(model(), model(bundle), images, write=True, quiet=True)
    assert capsys.readouterr().err == (
        f"warning: '{bundle.path / SIGNATURE}' was made with the certificate before and does not hold any more: sign "
        "it anew\n"
    )


@pytest.mark.parametrize("which", ["reference", "candidate"])
@pytest.mark.parametrize(
    ("changes", "weights", "fault"),
    [
        ({}, "none", None),
        ({"opset": 20}, "fp32", "is of opset 18, and manifest.json says 20"),
        ({"precision": "int8"}, "fp32", "has weights in fp32, and manifest.json says int8"),
        ({"precision": "int8", "lowering": {"not_quantized": ["all"]}}, "fp32", None),
        ({"precision": "fp16", "islands": ("all",)}, "fp32", None),
        ({"precision": "fp16"}, "fp32, fp16", None),
        ({}, "fp16", "has weights in fp16, and manifest.json says fp32"),
    ],
)
def test_the_graph_of_both_is_what_its_manifest_says(
    *,
    bundle: Bundle,
    images: ImageSet,
    monkeypatch: pytest.MonkeyPatch,
    which: str,
    changes: Any,
    weights: str,
    fault: Any,
) -> None:
    """A coarser precision would widen the limit of its logits."""
    monkeypatch.setattr(tensorrt_graph, "precision_of", lambda graph: weights)
    of_bundle = model(Bundle(bundle.path, bundle.manifest.model_copy(update=changes)))
    pair = (of_bundle, model()) if which == "reference" else (model(), of_bundle)
    if fault is None:
        assert certify_models(*pair, images, quiet=True).verdict == "pass"
        return
    with pytest.raises(CheckFailed) as caught:
        certify_models(*pair, images, quiet=True)
    assert str(caught.value) == f"'{bundle.model_path}' {fault}: export it again"


def test_where_no_onnx_is_installed_it_is_said_that_the_graph_is_not_looked_at(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(certification, "find_spec", lambda name: None)
    check_graph(bundle, quiet=True)
    check_graph(bundle, quiet=False)
    said = "parity: the graph is not held against the manifest's precision: onnx is not installed"
    assert capsys.readouterr().err == f"{said}\n"


def test_nothing_is_written_unasked(bundle: Bundle, images: ImageSet) -> None:
    certificate = certify_models(model(), model(bundle), images, quiet=True)
    assert certificate.candidate == f"{bundle.path} in onnxruntime"
    assert certificate.subject == bundle.subject()
    assert not (bundle.path / CERTIFICATE).exists()


def test_a_certificate_of_no_bundle_has_no_place(images: ImageSet) -> None:
    assert certify_models(model(), model(), images, quiet=True).subject == {}
    with pytest.raises(InputError) as caught:
        certify_models(model(), model(), images, write=True, quiet=True)
    assert str(caught.value) == "the network is no bundle: it has no place for a certificate"


@pytest.mark.parametrize("which", ["reference", "candidate"])
def test_classes_and_provider_and_engines_of_both_are_checked(
    bundle: Bundle, images: ImageSet, tmp_path: Path, which: str
) -> None:
    def refused(wrong: LoadedModel, device: str = "auto") -> None:
        pair = (wrong, model(bundle)) if which == "reference" else (model(bundle), wrong)
        certify_models(*pair, images, device=device, quiet=True)

    with pytest.raises(InputError, match="class 0 is 'blue' in 'numbers' and 'teal' in the model"):
        refused(model(labels=("teal", *LABELS[1:])))
    with pytest.raises(CheckFailed, match="fallback: device cpu was asked for and the network runs on CUDA"):
        refused(model(session=TableSession(LOGITS, provider="CUDAExecutionProvider")), device="cpu")
    stale = add_plan(write_bundle(tmp_path / "stale.vitx"), "tensorrt", onnx_sha256="f" * 64)
    with pytest.raises(CheckFailed) as caught:
        refused(model(stale))
    assert str(caught.value) == (
        "stale engine: tensorrt.plan was built from graph ffffffffffffffff… and the bundle holds "
        f"{sha256_file(stale.model_path)[:16]}…: export the bundle again"
    )


def test_tokens_are_measured_once_and_only_if_the_images_are_enough(images: ImageSet) -> None:
    calls: list[str] = []

    def tokens() -> TokenSimilarity:
        calls.append("measured")
        return TOKENS

    with pytest.raises(InputError, match=r"cannot prove a flip rate of at most 0\.005"):
        certify_models(model(), model(), images, max_flip_rate=0.005, token_similarity=tokens, quiet=True)
    assert calls == []
    certificate = certify_models(model(), model(), images, max_flip_rate=0.02, token_similarity=tokens, quiet=True)
    assert (calls, certificate.token_similarity, certificate.max_flip_rate) == (["measured"], TOKENS, 0.02)


@pytest.mark.parametrize("precisions", [("int8", "fp32"), ("fp32", "int8"), ("int8", "fp16"), ("fp16", "int8")])
def test_the_coarser_precision_of_the_two_sets_the_limit(images: ImageSet, precisions: tuple[str, str]) -> None:
    first, second = (model(precision=precision) for precision in precisions)
    certificate = certify_models(first, second, images, quiet=True)
    assert certificate.max_logit_error_allowed == pytest.approx(0.5 * LOGITS.astype(np.float64).std(), abs=1e-9)


def test_batch_sizes_are_those_asked_for_or_those_of_the_plans(
    bundle: Bundle, images: ImageSet, capsys: pytest.CaptureFixture[str]
) -> None:
    few = certify_models(model(), model(), images.subset(np.arange(5)), max_flip_rate=0.6)
    assert few.batch_sizes == (1, 2)
    assert "parity: batches of 7, 32 are not compared, there are 5 images\n" in capsys.readouterr().err
    planned = add_plan(bundle, "tensorrt", profiles=(Profile(minimum=3, optimum=4, maximum=5),))
    assert certify_models(model(), model(planned), images, quiet=True).batch_sizes == (1, 2, 3, 4, 5, 7, 32)
    assert certify_models(model(planned), model(), images, quiet=True).batch_sizes == (1, 2, 7, 32)
    asked = certify_models(model(), model(planned), images, batch_sizes=(1, 16), quiet=True)
    assert asked.batch_sizes == (1, 16)


def test_what_is_written_is_of_all_batch_sizes(bundle: Bundle, images: ImageSet) -> None:
    """Images that run alone have no neighbours, and a server puts those of strangers together."""
    with pytest.raises(InputError, match=r"a certificate is of all batch sizes, and 2, 7, 32 of .* are left out"):
        certify_models(model(), model(bundle), images, batch_sizes=(1,), write=True, quiet=True)
    assert not (bundle.path / CERTIFICATE).exists()
    more = (1, 2, 5, 7, 32)
    assert certify_models(model(), model(bundle), images, batch_sizes=more, write=True, quiet=True).batch_sizes == more


def test_each_model_reads_images_of_its_own_preprocessing(images: ImageSet) -> None:
    sides: dict[str, set[int]] = {"reference": set(), "candidate": set()}

    class Sides(TableSession):
        def __init__(self, which: str) -> None:
            super().__init__(LOGITS)
            self.which = which

        def _infer(self, images: Any) -> Float32Array:
            sides[self.which].add(images.shape[1])
            return super()._infer(images)

    larger = PIXEL.model_copy(update={"image_size": 2})
    first, second = model(session=Sides("reference")), model(session=Sides("candidate"), preprocessing=larger)
    assert certify_models(first, second, images, quiet=True).verdict == "pass"
    assert sides == {"reference": {1}, "candidate": {2}}


def test_sizes_of_profiles_start_at_one(bundle: Bundle) -> None:
    profiles = tuple(Profile(minimum=low, optimum=high, maximum=high) for low, high in ((1, 1), (48, 64)))
    assert bundle_batch_sizes(bundle) == (1, 2, 7, 32)
    planned = add_plan(bundle, "tensorrt", profiles=profiles)
    assert bundle_batch_sizes(planned) == (1, 2, 7, 32, 48, 63, 64)


@pytest.mark.parametrize(
    ("device", "provider", "refused"),
    [
        ("cuda", "CPUExecutionProvider", True),
        ("cuda", "CUDAExecutionProvider", False),
        ("cuda", "cpu", True),
        ("cpu", "cuda:0", True),
        ("cpu", "CUDAExecutionProvider", True),
        ("cpu", "CPUExecutionProvider", False),
        ("auto", "cpu", False),
        ("auto", "cuda:0", False),
    ],
)
def test_a_session_runs_where_it_was_asked_to(device: str, provider: str, refused: bool) -> None:
    loaded = model(session=TableSession(LOGITS, provider=provider))
    if not refused:
        check_provider(loaded, device)
        return
    with pytest.raises(CheckFailed) as caught:
        check_provider(loaded, device)
    assert str(caught.value) == (
        f"fallback: device {device} was asked for and the network runs on {provider}; nothing was compared"
    )
