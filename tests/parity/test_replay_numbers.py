"""Each number of a certificate, changed alone, is noticed by a replay, with the reference and without."""

import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bundle_fixture import LABELS, write_bundle
from gpu_fixture import add_plan
from run_fixture import write_run
from table_session import PIXEL, TableSession, numbered_images
from vitx.core.bundle import CERTIFICATE, Bundle
from vitx.core.certificate import Certificate, Executable, TokenSimilarity, Verdict
from vitx.core.errors import CheckFailed, InputError
from vitx.core.files import write_json
from vitx.core.latency import Latency
from vitx.core.machine import describe_machine
from vitx.core.preprocess import UInt8Array
from vitx.parity import replay as replaying
from vitx.parity.certification import AcceptanceCriteria, certify
from vitx.parity.loaded_model import LoadedModel
from vitx.parity.options import ParityOptions
from vitx.parity.replay import Replay, ReplayedNumber, certified_images, replay, verify_certificate, verify_files
from vitx.runtimes.session import Float32Array

IMAGES = numbered_images([index % 4 for index in range(40)], LABELS)
REFERENCE = np.random.default_rng(1).integers(-8, 8, (40, 4)).astype(np.float32)
MOVE = 2.0**-15  # less than float32 is allowed, and exact beside these logits
REFERENCE[3], REFERENCE[39] = (0, 1, 2 + MOVE, 2), (0, 1, 2, 2 + MOVE)
CANDIDATE = REFERENCE - np.array([0, 0, 0, MOVE / 2], np.float32)  # of equal logits the first is the class
CANDIDATE[3], CANDIDATE[39] = (0, 1, 2, 2 + MOVE), REFERENCE[39]  # a flip in every pass, to the label
ALONE = {1: {39: (0, 1, 2 + MOVE, 2)}}  # a flip of the last image, alone
SIZES = (1, 2, 7, 32)
TOKENS = TokenSimilarity(images=1, layers=("a",), reference=(0.5,), candidate=(0.75,), allowed=0.125)


def reference_model(**changes: Any) -> LoadedModel:
    plain = LoadedModel("a run", TableSession(REFERENCE), PIXEL, LABELS, data="numbers", sha256="4" * 64)
    return replace(plain, **changes)


def candidate_session() -> TableSession:
    def shuffled(numbers: list[int], logits: Any) -> None:
        if 7 in numbers and numbers != sorted(numbers):
            logits[numbers.index(7), 0] += MOVE

    return TableSession(CANDIDATE, at_batch=ALONE, change=shuffled)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return write_bundle(tmp_path_factory.mktemp("bundle") / "tiny.vitx")


def certified() -> Certificate:
    criteria = AcceptanceCriteria(batch_sizes=SIZES, max_flip_rate=0.25)
    return certify(
        TableSession(REFERENCE),
        candidate_session(),
        IMAGES,
        PIXEL,
        criteria=criteria,
        token_similarity=None,
        quiet=True,
    )


def disagreeing(bundle: Bundle, reference: LoadedModel | None, **changes: Any) -> list[str]:
    certificate = certified().model_copy(update=changes)
    numbers = replay(bundle, certificate, IMAGES, candidate_session(), reference, quiet=True)
    return [number.name for number in numbers if not number.agrees]


def test_a_certificate_is_reproduced_number_by_number(bundle: Bundle) -> None:
    found = replay(bundle, certified(), IMAGES, candidate_session(), reference_model(), quiet=True)
    assert all(number.agrees for number in found)
    expected = certified()
    assert [(number.name, number.certified) for number in found] == [
        ("verdict", "pass"),
        ("images", 40),
        ("batch sizes", "1, 2, 7, 32; all images at 32"),
        ("top-1 of the reference", expected.accuracy_reference),
        ("top-1 of the candidate", expected.accuracy_candidate),
        ("McNemar's p", 1.0),
        ("flips", 2),
        ("flip rate bound", expected.flip_rate_bound),
        ("images of another class in other batches", "1 of 40"),
        ("bound on their rate", expected.probe_flip_rate_bound),
        ("class of every image, sha256", expected.classes_sha256[:16]),
        ("logit error allowed", 1e-4),
        ("largest logit error", MOVE),
        *((f"at batch size {size}", MOVE) for size in SIZES),
        ("mean logit error", expected.mean_logit_error),
        ("largest change by neighbours", MOVE),
        ("largest change by place", MOVE),
        ("smallest cosine", expected.min_cosine),
        ("mean cosine", expected.mean_cosine),
        ("ECE of the reference", expected.ece_reference),
        ("ECE of the candidate", expected.ece_candidate),
    ]
    assert [number.seen for number in found] == [number.certified for number in found]


def test_the_candidate_alone_shows_its_own_numbers_and_what_follows_from_the_flips(bundle: Bundle) -> None:
    expected = certified()
    alone = replay(bundle, expected, IMAGES, candidate_session(), quiet=True)
    assert all(number.agrees and number.seen == number.certified for number in alone)
    assert [(number.name, number.certified) for number in alone] == [
        ("verdict", "pass"),
        ("images", 40),
        ("top-1 of the reference", expected.accuracy_reference),
        ("top-1 of the candidate", expected.accuracy_candidate),
        ("McNemar's p", 1.0),
        ("flip rate bound", expected.flip_rate_bound),
        ("bound on their rate", expected.probe_flip_rate_bound),
        ("class of every image, sha256", expected.classes_sha256[:16]),
        ("logit error allowed", 1e-4),
        ("largest logit error", MOVE),
        ("ECE of the candidate", expected.ece_candidate),
    ]


FLIP, LAST = certified().flips
OTHER_LABEL = FLIP.model_copy(update={"label": 1})


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"verdict": "fail"}, ["verdict"]),
        ({"max_flip_rate": 0.08}, ["verdict"]),
        ({"max_logit_error_allowed": 0.5}, ["logit error allowed"]),
        ({"token_similarity": TOKENS}, ["verdict", "change of CosSim allowed"]),
        ({"images": 41}, ["images"]),
        ({"batch_sizes": (1, 2, 32)}, ["batch sizes"]),
        ({"batch_size": 7}, ["batch sizes"]),
        ({"accuracy_reference": 0.5}, ["top-1 of the reference"]),
        ({"accuracy_candidate": 0.5}, ["top-1 of the candidate"]),
        ({"mcnemar_p": 0.5}, ["McNemar's p"]),
        ({"flips": ()}, ["flips"]),
        ({"flips": (FLIP,)}, ["flips"]),
        ({"flips": (FLIP, FLIP.model_copy(update={"key": "image 5"}))}, ["flips"]),
        ({"flips": (OTHER_LABEL, LAST)}, ["flips"]),
        ({"flip_rate_bound": 0.001}, ["flip rate bound"]),
        ({"probe_flips": 0}, ["images of another class in other batches"]),
        ({"probe_images": 400}, ["images of another class in other batches"]),
        ({"probe_flip_rate_bound": 0.001}, ["bound on their rate"]),
        ({"classes_sha256": "0" * 64}, ["class of every image, sha256"]),
        ({"max_logit_error": MOVE / 4.001}, ["largest logit error"]),
        ({"max_logit_error_by_batch_size": {1: 0.0, 2: MOVE, 7: MOVE, 32: MOVE}}, ["at batch size 1"]),
        ({"max_logit_error_by_batch_size": {2: MOVE, 7: MOVE, 32: MOVE}}, ["at batch size 1"]),
        ({"mean_logit_error": certified().mean_logit_error / 4.001}, ["mean logit error"]),
        ({"max_neighbour_error": MOVE / 4.001}, ["largest change by neighbours"]),
        ({"max_position_error": MOVE / 4.001}, ["largest change by place"]),
        ({"min_cosine": 1.00001}, ["smallest cosine"]),
        ({"mean_cosine": 1.00001}, ["mean cosine"]),
        ({"ece_reference": certified().ece_reference - 0.06}, ["ECE of the reference"]),
        ({"ece_candidate": certified().ece_candidate - 0.06}, ["ECE of the candidate"]),
    ],
)
def test_one_changed_number_alone_is_noticed(bundle: Bundle, changes: dict[str, Any], names: list[str]) -> None:
    assert disagreeing(bundle, reference_model(), **changes) == names


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"images": 41}, ["images"]),
        ({"flip_rate_bound": 0.001}, ["flip rate bound"]),
        ({"accuracy_candidate": 0.5}, ["top-1 of the candidate"]),
        ({"accuracy_reference": 0.5}, ["top-1 of the reference"]),
        ({"mcnemar_p": 0.5}, ["McNemar's p"]),
        ({"classes_sha256": "0" * 64}, ["class of every image, sha256"]),
        ({"ece_candidate": certified().ece_candidate - 0.06}, ["ECE of the candidate"]),
        ({"probe_flip_rate_bound": 0.001}, ["bound on their rate"]),
        ({"probe_images": 0, "probe_flips": 3}, ["verdict", "bound on their rate"]),
        # Without its flips the bound and the accuracy of the classes in the main pass are others.
        ({"flips": (FLIP,)}, ["top-1 of the candidate", "flip rate bound"]),
        ({"flips": (FLIP, LAST) * 30}, ["verdict", "flip rate bound"]),
        # What it says of itself must hold: its verdict, and the limit of its precision.
        ({"verdict": "fail"}, ["verdict"]),
        ({"max_flip_rate": 0.08}, ["verdict"]),
        ({"max_neighbour_error": 1e-3}, ["verdict"]),
        ({"max_logit_error_allowed": 0.5}, ["logit error allowed"]),
        ({"max_logit_error": 0.0}, ["largest logit error"]),
        ({"max_logit_error_by_batch_size": {1: 1e-3}, "max_logit_error": 1e-3}, ["verdict"]),
    ],
)
def test_the_candidate_alone_notices_its_own_numbers(bundle: Bundle, changes: dict[str, Any], names: list[str]) -> None:
    assert disagreeing(bundle, None, **changes) == names


def test_below_float32_a_limit_follows_from_the_logits_of_the_reference(bundle: Bundle) -> None:
    lowered = Bundle(bundle.path, bundle.manifest.model_copy(update={"precision": "int8"}))
    allowed = 0.5 * float(REFERENCE.std())
    for limit, names in ((allowed, []), (allowed * 1.01, ["logit error allowed"])):
        assert disagreeing(lowered, reference_model(), max_logit_error_allowed=limit) == names
        assert disagreeing(lowered, None, max_logit_error_allowed=limit) == []


def test_errors_may_be_four_times_the_certified_ones_or_a_millionth(bundle: Bundle) -> None:
    expected = certified()
    quarter = {
        name: getattr(expected, name) / 4 for name in ("max_logit_error", "mean_logit_error", "max_neighbour_error")
    }
    assert disagreeing(bundle, reference_model(), **quarter) == []
    for certified_error, seen, agrees in (
        (0.0, 1e-6, True),
        (0.0, math.nextafter(1e-6, 1), False),
        (0.25, 1.0, True),
        (0.25, math.nextafter(1, 2), False),
        (1.0, 0.0, True),  # smaller is no worse
    ):
        assert replaying._near("x", certified_error, seen) == ReplayedNumber("x", certified_error, seen, agrees)


def test_the_distance_of_cosines_may_be_sixteen_times_the_certified_one_or_a_millionth() -> None:
    for certified_cosine, seen, agrees in (
        (1.0, 1 - 0.99e-6, True),
        (1.0, 1 - 1.01e-6, False),
        (1 - 2.0**-10, 1 - 2.0**-6, True),
        (1 - 2.0**-10, 1 - 2.0**-6 - 1e-9, False),
        (1 - 2.0**-10, 1.0, True),  # nearer is no worse
        (1 + 1e-6, 1.0, True),
        (1 + 1.1e-6, 1.0, False),  # no cosine
    ):
        assert replaying._cosine("x", certified_cosine, seen).agrees is agrees, (certified_cosine, seen)


def test_accuracies_agree_to_rounding_and_texts_exactly() -> None:
    assert replaying._same("x", 1 / 3, 1 / 3 + 1e-16).agrees
    assert not replaying._same("x", 0.5, 0.5 + 1e-11).agrees
    assert not replaying._same("x", 5, 6).agrees
    assert not replaying._same("x", "pass", "fail").agrees


def test_batches_are_those_of_the_certificate(bundle: Bundle) -> None:
    for batch_size, sizes in ((8, [8] * 5), (0, [32, 8]), (16, [16, 16, 8])):
        session = candidate_session()
        certificate = certified().model_copy(update={"batch_size": batch_size})
        assert all(number.agrees for number in replay(bundle, certificate, IMAGES, session, quiet=True))
        assert [len(batch) for batch in session.batches] == sizes


def test_what_is_not_reproduced_is_named_with_both_numbers(bundle: Bundle) -> None:
    numbers = (
        ReplayedNumber("flips", 1, 3, False),
        ReplayedNumber("images", 4, 4, True),
        ReplayedNumber("verdict", "pass", "fail", False),
    )
    with pytest.raises(CheckFailed) as caught:
        Replay(bundle, numbers).require_agreement()
    assert str(caught.value) == (
        f"the certificate of '{bundle.path}' is not reproduced: flips 3, certified 1; verdict fail, certified pass"
    )
    Replay(bundle, numbers[1:2]).require_agreement()


def test_an_executable_that_fails_is_named_unless_it_was_refused_before(bundle: Bundle) -> None:
    def verdict(runtime: str, found: Any) -> Verdict:
        executable = Executable(
            runtime=runtime, version="1", provider="cpu", architecture="x", precision="fp32", artefacts={"a": "0"}
        )
        return Verdict(executable=executable, verdict=found, reasons=("one", "two"), evidence="witness set")

    fails, refused = verdict("fails", "fail"), verdict("refused", "fail")
    verdicts = (verdict("passes", "pass"), fails, verdict("absent", "not run"), refused)
    with pytest.raises(CheckFailed) as caught:
        Replay(bundle, (), verdicts, (refused.executable,)).require_agreement()
    assert str(caught.value) == (
        f"the certificate of '{bundle.path}' is not reproduced: fails 1 in fp32 on cpu (x), a: one; two"
    )
    Replay(bundle, (), verdicts, (refused.executable, fails.executable)).require_agreement()


class Sized(TableSession):
    """The sides of the images it is given."""

    sides = 0

    def _infer(self, images: UInt8Array) -> Float32Array:
        self.sides = images.shape[1]
        return super()._infer(images)


def test_the_candidate_gets_images_as_its_bundle_says(bundle: Bundle) -> None:
    reference, candidate = Sized(REFERENCE), Sized(CANDIDATE)
    replay(bundle, certified(), IMAGES, candidate, reference_model(session=reference), quiet=True)
    assert (reference.sides, candidate.sides) == (1, bundle.manifest.preprocessing.image_size)
    alone = Sized(CANDIDATE)
    replay(bundle, certified(), IMAGES, alone, quiet=True)
    assert alone.sides == candidate.sides


def test_other_classes_are_refused(bundle: Bundle) -> None:
    others = numbered_images([0] * 40, ("blue", "green", "grey", "teal"))
    with pytest.raises(InputError, match="class 3 is 'teal' in 'numbers' and 'red' in the model"):
        replay(bundle, certified(), others, candidate_session())


def test_the_certified_images_are_opened_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str, bool]] = []
    sizes: list[object] = []

    def open_images(data: str, split: str, *, skip_bad: bool, check_size: object) -> Any:
        asked.append((data, split, skip_bad))
        sizes.append(check_size)
        return IMAGES

    monkeypatch.setattr(replaying, "open_images", open_images)
    assert certified_images(certified()) is IMAGES
    assert certified_images(certified(), "elsewhere", skip_bad=True, check_size=max) is IMAGES
    assert sizes == [None, max]
    assert asked == [("numbers", "val", False), ("elsewhere", "val", True)]
    with pytest.raises(CheckFailed) as caught:
        certified_images(certified().model_copy(update={"data_sha256": "3" * 64}))
    assert str(caught.value) == (
        f"'numbers' holds other images than the certificate: sha256 {IMAGES.digest()[:16]}… and 3333333333333333… "
        "of keys, labels and bytes"
    )


def test_the_reference_is_the_run_given_or_the_one_that_was_exported(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened: list[tuple[Path, dict[str, Any], LoadedModel]] = []

    def open_model(path: Path, **options: Any) -> LoadedModel:
        opened.append((path, options, reference_model()))
        return opened[-1][2]

    monkeypatch.setattr(replaying, "open_model", open_model)
    source, there = tmp_path / "source", {str(tmp_path / "source")}
    monkeypatch.setattr(replaying, "RunFolder", lambda path: SimpleNamespace(exists=lambda: str(path) in there))

    def found(checkpoint: str = "last", sha256: str = "4" * 64, run: Path | None = None) -> LoadedModel | None:
        changed = {"source": str(source), "checkpoint": checkpoint}
        provenance = bundle.manifest.provenance.model_copy(update=changed)
        exported = Bundle(bundle.path, bundle.manifest.model_copy(update={"provenance": provenance}))
        certificate = certified().model_copy(update={"reference_sha256": sha256})
        options = ParityOptions(checkpoint="best", device="cpu")
        return replaying._certified_reference(exported, certificate, run, options, quiet=False)

    def freed() -> bool:
        session = opened[-1][2].session
        assert isinstance(session, TableSession)
        return session.was_freed

    given = found(run=Path("given"))
    assert (opened[-1][:2], given) == ((Path("given"), {"which": "best", "device": "cpu"}), opened[-1][2])
    assert not freed()
    with pytest.raises(CheckFailed) as caught:
        found(run=Path("given"), sha256="5" * 64)
    assert str(caught.value) == "'given' is not the reference of the certificate: its weights have another sha256"
    assert freed()
    exported = found()
    assert (opened[-1][:2], exported) == ((source, {"which": "last", "device": "cpu"}), opened[-1][2])
    assert not freed()
    assert found(sha256="5" * 64) is None
    assert freed()
    count = len(opened)
    assert found(checkpoint="numpy") is None
    there.clear()
    assert found() is None
    assert len(opened) == count


def test_a_run_without_its_checkpoint_is_missed_only_where_it_was_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", "digits")
    shutil.rmtree(run.path / "checkpoints")
    bundle = write_bundle(tmp_path / "tiny.vitx")
    changed = {"source": str(run.path), "checkpoint": "best"}
    provenance = bundle.manifest.provenance.model_copy(update=changed)
    exported = Bundle(bundle.path, bundle.manifest.model_copy(update={"provenance": provenance}))
    options, reason = ParityOptions(device="cpu"), f"run '{run.path}' has no 'best' checkpoint yet"
    assert replaying._certified_reference(exported, certified(), None, options, quiet=False) is None
    assert capsys.readouterr().err == f"verify: the run of the export is left out: {reason}\n"
    with pytest.raises(InputError) as caught:
        replaying._certified_reference(exported, certified(), run.path, options, quiet=False)
    assert str(caught.value) == reason


def test_verified_files_are_those_of_the_certificate_with_whole_latencies(tmp_path: Path) -> None:
    """Folders, the certificate and the latencies need not be listed."""
    bundle = write_bundle(tmp_path / "tiny.vitx")
    good = certified().model_copy(update={"subject": bundle.subject()}).sealed()
    write_json(bundle.path / CERTIFICATE, good)
    (bundle.path / "engines" / "empty").mkdir(parents=True)
    bundle.record_latency(Latency(runtime={}, machine=describe_machine(), points=(), created="now"))
    assert verify_files(Bundle.open(bundle.path)) == good
    latencies = bundle.path / "latency.json"
    latencies.write_text(latencies.read_text().replace("now", "new"))
    with pytest.raises(CheckFailed, match="its own digest differs"):
        verify_files(bundle)
    latencies.unlink()
    assert verify_files(bundle) == good
    (bundle.path / CERTIFICATE).unlink()
    with pytest.raises(CheckFailed, match="has no certificate"):
        verify_files(bundle)


def test_a_stale_engine_is_refused(tmp_path: Path) -> None:
    bundle = add_plan(write_bundle(tmp_path / "tiny.vitx"), "tensorrt", onnx_sha256="f" * 64)
    write_json(bundle.path / CERTIFICATE, certified().model_copy(update={"subject": bundle.subject()}).sealed())
    with pytest.raises(CheckFailed, match="stale engine"):
        verify_files(bundle)


@pytest.fixture
def verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[Any], list[TableSession]]:
    """A certified bundle; what was opened for it, and the sessions of the reference and of the candidate."""
    bundle = write_bundle(tmp_path / "tiny.vitx")
    write_json(bundle.path / CERTIFICATE, certified().model_copy(update={"subject": bundle.subject()}).sealed())
    asked: list[Any] = []
    sessions = [TableSession(REFERENCE), candidate_session()]

    def opened_reference(
        bundle: Bundle, certificate: Certificate, run: Path | None, options: ParityOptions, *, quiet: bool
    ) -> Any:
        asked.append(("reference", bundle.path, certificate.images, run, options.device))
        return None if run is None else reference_model(session=sessions[0])

    def opened_candidate(bundle: Bundle, **options: Any) -> LoadedModel:
        asked.append(("candidate", bundle.path, options))
        sessions[1] = candidate_session()
        return reference_model(name="candidate", session=sessions[1], bundle=bundle)

    monkeypatch.setattr(replaying, "open_images", lambda data, split, **options: IMAGES)
    monkeypatch.setattr(replaying, "_certified_reference", opened_reference)
    monkeypatch.setattr(replaying, "model_from_bundle", opened_candidate)
    return bundle.path, asked, sessions


@pytest.mark.parametrize("swapped", [False, True])
def test_bundle_and_run_are_given_in_either_order(
    verified: tuple[Path, list[Any], list[TableSession]], capsys: pytest.CaptureFixture[str], swapped: bool
) -> None:
    path, asked, sessions = verified
    run = path.parent / "run"
    run.mkdir()
    (run / "run.json").touch()
    pair = (run, path) if swapped else (path, run)
    found = verify_certificate(*pair, ParityOptions(device="cpu"))
    assert asked == [
        ("reference", path, 40, run, "cpu"),
        ("candidate", path, {"device": "cpu", "use_twin": True}),
    ]
    assert (found.bundle.path, len(found.numbers), all(number.agrees for number in found.numbers)) == (path, 24, True)
    assert [session.was_freed for session in sessions] == [True, True]
    assert capsys.readouterr().err.startswith("verify: against a run\n")


def test_a_bundle_alone_is_verified(
    verified: tuple[Path, list[Any], list[TableSession]], capsys: pytest.CaptureFixture[str]
) -> None:
    path, asked, sessions = verified
    found = verify_certificate(path, None, ParityOptions())
    assert (asked[0], len(found.numbers)) == (("reference", path, 40, None, "auto"), 11)
    assert [session.was_freed for session in sessions] == [False, True]
    assert capsys.readouterr().err == "verify: no run at hand: the candidate alone\n"
    verify_certificate(path, None, ParityOptions(), quiet=True)
    assert capsys.readouterr().err == ""
    with pytest.raises(CheckFailed, match="fallback: device cuda was asked for and candidate runs on cpu"):
        verify_certificate(path, None, ParityOptions(device="cuda"), quiet=True)
    with pytest.raises(InputError, match="is not a bundle"):
        verify_certificate(path.parent, None, ParityOptions(), quiet=True)
