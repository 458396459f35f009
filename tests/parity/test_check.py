"""`check_parity` without networks: which pair is written, which images are taken, what a failure says."""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from bundle_fixture import LABELS, write_bundle
from gpu_fixture import add_plan
from table_session import PIXEL, Change, TableSession, numbered_images
from vitx.core.bundle import CERTIFICATE, MANIFEST, Bundle
from vitx.core.errors import CheckFailed, InputError
from vitx.core.run import RunFolder
from vitx.core.tensorrt_plan import Profile
from vitx.data.image_set import ImageSet
from vitx.parity import certification, check
from vitx.parity.check import ParityResult, check_parity, sample_images
from vitx.parity.divergence import LayerError, NodeError, Trace
from vitx.parity.html_report import summary
from vitx.parity.loaded_model import LoadedModel
from vitx.parity.options import ParityOptions
from vitx.parity.served import ServedComparison
from vitx.parity.trace import TraceResult

LOGITS = np.random.default_rng(3).integers(-16, 16, (320, 4)).astype(np.float32)
RUN, BUNDLE = Path("a run"), Path("a bundle")


class Models:
    """Stands for `open_model` and `open_images`: a run, a bundle, and what they were asked for."""

    def __init__(self, bundle: Bundle) -> None:
        self.logits = {RUN: LOGITS, BUNDLE: LOGITS}
        self.bundle = bundle
        self.opened: list[tuple[Path, dict[str, Any]]] = []
        self.images_asked: list[tuple[str, str, bool]] = []
        self.sessions: list[TableSession] = []
        self.change: Change | None = None
        self.network: type[nn.Module] | None = None

    def open_model(self, path: Path, **options: Any) -> LoadedModel:
        self.opened.append((path, options))
        self.sessions.append(TableSession(self.logits[path], change=self.change if path == BUNDLE else None))
        return LoadedModel(
            f"{path} by name",
            self.sessions[-1],
            PIXEL,
            LABELS,
            data=f"data of {path}",
            sha256=self.bundle.subject()[MANIFEST] if path == BUNDLE else "0" * 64,
            run=RunFolder(path) if path == RUN else None,
            bundle=self.bundle if path == BUNDLE else None,
            network=self.network if path == RUN else None,
        )

    def open_images(self, data: str, split: str, *, skip_bad: bool, check_size: object) -> ImageSet:
        assert check_size == PIXEL.check_size
        self.images_asked.append((data, split, skip_bad))
        return numbered_images([index % 4 for index in range(320)], LABELS, name=data)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Models:
    models = Models(write_bundle(tmp_path / "tiny.vitx"))
    monkeypatch.setattr(check, "open_model", models.open_model)
    monkeypatch.setattr(check, "open_images", models.open_images)
    return models


def checked(first: Path = RUN, second: Path = BUNDLE, **options: Any) -> ParityResult:
    return check_parity(first, second, ParityOptions(**options), quiet=True)


@pytest.mark.parametrize(
    ("pair", "options", "written"),
    [
        ((RUN, BUNDLE), {}, True),
        ((RUN, BUNDLE), {"images": "all", "batch_sizes": (1, 2, 4, 7, 32), "max_flip_rate": 0.02}, True),
        ((RUN, BUNDLE), {"batch_sizes": (1,)}, False),
        ((RUN, BUNDLE), {"batch_sizes": (1, 2, 32)}, False),
        ((RUN, BUNDLE), {"images": "320"}, True),
        ((RUN, BUNDLE), {"images": "1000"}, True),
        ((RUN, BUNDLE), {"reference_runtime": "torch"}, True),
        ((RUN, BUNDLE), {"images": "319"}, False),
        ((RUN, BUNDLE), {"images": "enough"}, False),
        ((RUN, BUNDLE), {"runtime": "onnxruntime"}, False),
        ((BUNDLE, BUNDLE), {}, False),
        ((BUNDLE, RUN), {}, False),
        ((RUN, RUN), {}, False),
    ],
)
def test_a_certificate_is_of_a_run_its_bundle_the_default_runtime_and_the_whole_split(
    models: Models, pair: tuple[Path, Path], options: dict[str, Any], written: bool
) -> None:
    result = checked(*pair, **options)
    path = models.bundle.path / CERTIFICATE
    assert (result.written, path.exists(), result.as_json()["written"]) == (written,) * 3
    assert result.certificate.verdict == "pass"
    if written:
        assert models.bundle.require_certificate() == result.certificate


def test_batch_sizes_that_are_left_out_are_said_and_no_verdict_on_a_runtime_is_written(
    models: Models, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows that lean on their neighbours: an image alone has none, so a batch of one shows nothing of it."""

    def lean(numbers: list[int], logits: Any) -> None:
        logits += np.float32(len(numbers) - 1)

    models.change = lean
    certificate = check_parity(RUN, BUNDLE, ParityOptions(batch_sizes=(1,))).certificate
    said = "parity: nothing is written into the bundle: --batch-sizes leaves out 2, 7, 32\n"
    assert said in capsys.readouterr().err
    assert certificate.verdict == "pass"
    assert not [reason for reason in certificate.reasons if "neighbours" in reason]
    assert not [row for row in summary(certificate) if "neighbours" in row or "place" in row or "depends" in row]
    written = checked()
    assert (written.written, written.certificate.verdict) == (True, "fail")
    models.change = None
    for sizes, word in (((1,), "fail"), ((1, 2, 7, 32), "pass")):
        checked(batch_sizes=sizes, runtime="openvino")
        kept = models.bundle.certificate()
        assert kept is not None
        (verdict,) = kept.executables
        assert verdict.verdict == word


@pytest.mark.parametrize("options", [{}, {"runtime": "openvino"}])
def test_a_bundle_that_cannot_be_written_is_compared_and_the_certificate_that_it_had_stays(
    models: Models, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: dict[str, Any]
) -> None:
    """Volumes of clusters are mounted for reading alone: what took minutes is told all the same."""
    checked()
    before = (models.bundle.path / CERTIFICATE).read_bytes()
    monkeypatch.setattr(os, "access", lambda path, mode: path != models.bundle.path)
    result = checked(**options)
    assert (result.written, result.certificate.verdict, result.failures) == (False, "pass", ())
    said = "parity: nothing is written into the bundle, it is read-only here: compare a copy that can be written\n"
    assert capsys.readouterr().err == said
    assert (models.bundle.path / CERTIFICATE).read_bytes() == before


def test_a_bundle_whose_plan_takes_one_image_is_certified_as_any_other(models: Models) -> None:
    """A larger batch is run in parts there."""
    models.bundle = add_plan(models.bundle, "tensorrt", profiles=(Profile(minimum=1, optimum=1, maximum=1),))
    result = checked()
    assert (result.written, result.certificate.batch_sizes) == (True, (1, 2, 7, 32))


def test_a_certificate_that_fails_is_written_and_says_why(models: Models) -> None:
    models.logits[BUNDLE] = LOGITS + np.array([0.5, 0, 0, 0], np.float32)
    result = checked()
    assert (result.written, result.certificate.verdict) == (True, "fail")
    assert models.bundle.certificate() == result.certificate
    assert result.failures == result.certificate.reasons
    (note,) = result.notes
    assert note == (
        "bias of the classifier dropped or changed: class 0 has +0.5 on every image (largest logit error 0.5 "
        "in 64 of 320 images, 0 once it is undone)"
    )
    with pytest.raises(CheckFailed) as caught:
        result.require_pass(RUN, BUNDLE)
    assert str(caught.value) == f"'a bundle' is not the checkpoint's equal: {'; '.join((*result.failures, note))}"
    other = checked(BUNDLE, RUN)
    with pytest.raises(
        CheckFailed, match=r"^'a run' is not the equal of 'a bundle': largest logit error 0.5, at batch"
    ):
        other.require_pass(BUNDLE, RUN)


@pytest.mark.parametrize("options", [{"runtime": "openvino"}, {"report": "report.html", "images": "319"}])
def test_what_a_full_disk_does_not_take_is_said(
    models: Models,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: dict[str, Any],
) -> None:
    """The verdict on another runtime, and the report: what was measured was lost with them."""
    checked()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(certification, "write_json", full)
    monkeypatch.setattr(check, "write_bytes", full)
    if "report" in options:
        options = options | {"report": tmp_path / options["report"]}
    with pytest.raises(OSError, match="No space left"):
        checked(**options)
    assert "parity: pass: 0 of 3" in capsys.readouterr().err


def test_a_verdict_that_no_certificate_takes_is_not_lost_in_silence(
    models: Models, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not checked(runtime="openvino").failures
    assert capsys.readouterr().err.startswith("parity: the verdict is not kept, there is no certificate of these files")
    assert models.bundle.certificate() is None


@pytest.mark.parametrize("options", [{}, {"runtime": "openvino"}])
@pytest.mark.parametrize("change", ["edited", "cut short"])
def test_what_an_edited_certificate_says_is_not_sealed_anew(
    models: Models, capsys: pytest.CaptureFixture[str], change: str, options: dict[str, Any]
) -> None:
    """A verdict on another runtime, or the list of the others, sealed it again: the edit passed for a measurement."""
    certificate = checked().certificate
    path = models.bundle.path / CERTIFICATE
    forged = certificate.executables[0].executable.model_copy(update={"runtime": "forged"})
    verdicts = (*certificate.executables, certificate.executables[0].model_copy(update={"executable": forged}))
    edited = certificate.model_copy(update={"images": 10**6, "executables": verdicts}).file_bytes()
    path.write_bytes(edited if change == "edited" else edited[:500])
    before = path.read_bytes()
    result = checked(**options)
    assert "warning: nothing of the certificate is kept: " in (said := capsys.readouterr().err)
    assert "`vitx parity RUN BUNDLE` writes it anew" in said or change == "cut short"
    assert (result.written, result.certificate.verdict) == (not options, "pass")
    if options:
        assert path.read_bytes() == before
    else:
        assert [verdict.executable for verdict in models.bundle.require_certificate().executables] == [
            verdict.executable for verdict in certificate.executables
        ]


def test_a_certificate_of_version_1_is_refused_and_written_anew(
    models: Models, capsys: pytest.CaptureFixture[str]
) -> None:
    old = checked().certificate.model_copy(update={"format_version": 1}).sealed()
    (models.bundle.path / CERTIFICATE).write_bytes(old.file_bytes())
    with pytest.raises(InputError, match=r"certificate\.json.*format_version: Input should be 2"):
        models.bundle.require_certificate()
    assert checked().written
    assert models.bundle.require_certificate().format_version == 2
    assert "nothing of the certificate is kept: " in capsys.readouterr().err


def test_what_passes_has_no_failures_and_no_notes(models: Models) -> None:
    result = checked()
    assert (result.failures, result.notes, result.served, result.trace) == ((), (), None, None)
    result.require_pass(RUN, BUNDLE)
    printed = result.as_json()
    assert printed == {
        **result.certificate.model_dump(mode="json"),
        "written": True,
        "notes": [],
        "served": None,
        "trace": None,
    }


def test_models_and_images_are_opened_as_asked_and_closed(models: Models) -> None:
    options: dict[str, Any] = {
        "reference_runtime": "torch-compile",
        "runtime": "openvino",
        "checkpoint": "last",
        "device": "cpu",
    }
    checked(**options, data="other data", skip_bad=True)
    common = {"which": "last", "device": "cpu", "use_twin": True}
    assert models.opened == [(RUN, {**common, "runtime": "torch-compile"}), (BUNDLE, {**common, "runtime": "openvino"})]
    assert models.images_asked == [("other data", "val", True)]
    assert [session.was_freed for session in models.sessions] == [True, True]
    checked()
    assert models.opened[2:] == [
        (path, {**common, "which": "best", "device": "auto", "runtime": None}) for path in (RUN, BUNDLE)
    ]
    assert models.images_asked[1:] == [("data of a run", "val", False)]
    checked(BUNDLE, RUN)
    assert models.images_asked[2:] == [("data of a bundle", "val", False)]


def test_limits_and_batch_sizes_reach_the_certificate(models: Models) -> None:
    certificate = checked(max_flip_rate=0.125, batch_sizes=(2, 3)).certificate
    assert (certificate.max_flip_rate, certificate.batch_sizes) == (0.125, (2, 3))
    assert ParityOptions.model_validate({"batch_sizes": "8, 1"}).batch_sizes == (8, 1)
    assert checked().certificate.batch_sizes == (1, 2, 7, 32)
    with pytest.raises(CheckFailed, match="fallback: device cuda was asked for and a run by name runs on cpu"):
        checked(device="cuda")


def test_other_weights_of_a_run_are_logged(models: Models, capsys: pytest.CaptureFixture[str]) -> None:
    provenance = models.bundle.manifest.provenance.model_copy(update={"checkpoint_sha256": "1" * 64})
    manifest = models.bundle.manifest.model_copy(update={"provenance": provenance})
    models.bundle = Bundle(models.bundle.path, manifest)
    text = f"parity: '{models.bundle.path}' was exported from other weights than this run's 'last'\n"
    for pair, quiet, said in (
        ((RUN, BUNDLE), False, True),
        ((RUN, BUNDLE), True, False),
        ((BUNDLE, RUN), False, False),
    ):
        check_parity(*pair, ParityOptions(checkpoint="last"), quiet=quiet)
        assert (text in capsys.readouterr().err) is said


def test_images_are_all_or_enough_or_a_number_evenly_spaced() -> None:
    images = numbered_images([0] * 320, LABELS)
    assert sample_images(images, "all", 0.01) is images
    assert len(sample_images(images, "enough", 0.01)) == 299
    assert len(sample_images(images, "enough", 0.02)) == 149
    assert sample_images(images, "3", 0.01).keys == ("image 0", "image 159", "image 319")
    for wanted in ("0", "-1", "1.5", "some", "", "²"):
        with pytest.raises(InputError) as caught:
            sample_images(images, wanted, 0.01)
        assert str(caught.value) == f"--images {wanted}: expected all, enough or a number"
    with pytest.raises(InputError, match="max flip rate 1: expected a rate above 0 and below 1"):
        sample_images(images, "enough", 1.0)


def test_a_folder_or_a_bundle_as_the_place_of_the_report_is_refused_before_anything_is_opened(
    models: Models, tmp_path: Path
) -> None:
    with pytest.raises(InputError) as caught:
        checked(report=tmp_path)
    assert str(caught.value) == f"'{tmp_path}' is a folder: expected a file name, such as {tmp_path / 'report.html'}"
    with pytest.raises(InputError, match="would add to the bundle"):
        checked(report=write_bundle(tmp_path / "b.vitx").path / "report.html")
    assert (models.opened, models.images_asked) == ([], [])


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stands for the server: what was asked of it; it gives two of 320 images another class."""
    asked: list[Any] = []

    @contextmanager
    def serving(path: Path, *, device: str, runtime: str, allow_uncertified: bool) -> Iterator[str]:
        asked.append((path, device, runtime, allow_uncertified))
        yield "http://here"
        asked.append("stopped")

    def compare_served(
        url: str, session: Any, images: ImageSet, preprocessing: Any, **options: Any
    ) -> ServedComparison:
        asked.append((url, session, len(images), preprocessing, options))
        return ServedComparison(
            images=320, flips=("a", "b"), flip_rate_bound=0.0195, max_error=3.0, mean_error=1.0, max_error_allowed=2.0
        )

    monkeypatch.setattr(check, "serving", serving)
    monkeypatch.setattr(check, "compare_served", compare_served)
    return asked


def test_what_the_server_answers_can_fail_alone(models: Models, served: list[Any], tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    result = checked(served=True, device="cpu", report=report)
    assert served[0] == (models.bundle.path, "cpu", "onnxruntime", True), "what was compared, certified or not"
    options = {"max_logit_error": result.certificate.max_logit_error_allowed, "quiet": True}
    assert served[1:] == [("http://here", models.sessions[0], 320, PIXEL, options), "stopped"]
    assert result.certificate.verdict == "pass"
    assert result.failures == (
        "over HTTP 2 of 320 images get another class: flip rate at most 0.019500 (95 %), allowed 0.01",
        "over HTTP a log probability differs by 3, allowed 2",
    )
    assert result.notes == ()
    printed = result.as_json()
    assert printed["served"]["flips"] == ["a", "b"]
    assert (printed["verdict"], printed["reasons"]) == ("fail", [*result.failures]), "a machine reads no exit code"
    with pytest.raises(CheckFailed, match="is not the checkpoint's equal: over HTTP 2 of 320"):
        result.require_pass(RUN, BUNDLE)
    page = report.read_text()
    assert "<h1>Parity of a bundle with a run</h1>" in page
    assert "<h2>Over HTTP</h2>" in page
    assert '<th scope="row">max error allowed</th><td>2</td>' in page
    assert page.count("over HTTP a log probability differs by 3") == 1
    assert "('a', 'b')" not in page
    assert checked(served=True, max_flip_rate=0.02).failures == (result.failures[1],)


def test_a_run_is_not_served(models: Models, served: list[Any]) -> None:
    with pytest.raises(InputError) as caught:
        checked(BUNDLE, RUN, served=True)
    assert str(caught.value) == "--served sends images to vitx serve: give a bundle as the candidate"


@pytest.mark.parametrize("fails", [False, True])
def test_a_trace_adds_its_notes_and_repairs_what_failed(
    models: Models, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    asked: list[Any] = []

    def trace(
        reference: LoadedModel, candidate: LoadedModel, source: Any, images: ImageSet, **options: Any
    ) -> TraceResult:
        asked.append((reference.name, candidate.name, source, len(images), options))
        return TraceResult(None, (), ("a node adds most",))

    monkeypatch.setattr(check, "trace", trace)
    monkeypatch.setattr(check, "diagnosis_note", lambda *models, traced: f"diagnosed, traced {traced}")
    if fails:
        models.logits[BUNDLE] = LOGITS + np.float32(1)
    result = checked(trace=True, checkpoint="last")
    ((reference, candidate, source, count, options),) = asked
    assert (reference, candidate, count) == ("a run by name", "a bundle by name", 320)
    assert (source.target, source.which) == ("a run", "last")
    assert options == {"repair": fails, "quiet": True}
    assert result.notes == (*(("diagnosed, traced True",) if fails else ()), "a node adds most")
    assert result.as_json()["trace"] == {"layers": None, "nodes": [], "notes": ["a node adds most"]}
    assert json.loads(json.dumps(result.as_json()))["notes"] == list(result.notes)
    checked(BUNDLE, BUNDLE, trace=True)
    assert asked[1][2] is None


@pytest.mark.parametrize(
    ("network", "pair", "reason"),
    [
        (nn.Identity, (RUN, BUNDLE), "Identity has no list of blocks to trace: layers cannot be compared"),
        (None, (BUNDLE, RUN), "--trace looks into a bundle's graph: give a bundle as the candidate"),
    ],
)
def test_what_cannot_be_traced_is_refused_before_all_images_are_compared(
    models: Models, network: type[nn.Module] | None, pair: tuple[Path, Path], reason: str
) -> None:
    models.network = network
    with pytest.raises(InputError) as caught:
        checked(*pair, trace=True)
    assert str(caught.value) == reason
    assert [session.batches for session in models.sessions] == [[], []]


def test_the_report_of_a_trace_lists_nodes_layers_and_notes(
    models: Models, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nodes = (NodeError("n<1>", "t", 0.5, 1 / 3), NodeError("m", "u", 0.5, 0.25))
    layers = Trace(8, (LayerError("blocks.0", 0.5, 0.25),), "blocks.0")
    monkeypatch.setattr(check, "trace", lambda *_, **__: TraceResult(layers, nodes, ("a node adds most",)))
    report = tmp_path / "report.html"
    checked(trace=True, report=report)
    page = report.read_text()
    assert "<ul><li>a node adds most</li></ul>" in page
    assert (
        '<h2>Nodes that add most error</h2><table><tr><th scope="row">n&lt;1&gt; (t)</th><td>0.333333</td>'
        '</tr><tr><th scope="row">m (u)</th><td>0.25</td></tr></table>'
    ) in page
    assert page.count("<figure ") == 1  # CosSim has no values
    assert "<h2>Relative error by layer</h2>" in page
