"""The int8 graph that `vitx export --for cpu` puts beside the float32 one: judged by itself, kept only if it passes."""

import re
from collections.abc import Callable

import pytest

from bundle_fixture import Fault, tiny_graph
from vitx.core.bundle import INT8_MODEL, Bundle
from vitx.core.errors import CheckFailed, InputError
from vitx.core.files import sha256_file
from vitx.parity.certification import certify_models, record_verdicts
from vitx.parity.executables.choice import load_fastest, runtimes_by_speed
from vitx.parity.executables.first_load import require_verdict
from vitx.parity.executables.listing import CANDIDATES, INT8, RUNTIMES_BY_DEFAULT, verdicts_of_bundle
from vitx.parity.executables.verdict_cache import cached_verdicts, keep_verdict
from vitx.parity.exported import _drop_failed_int8
from vitx.parity.loaded_model import open_model
from vitx.parity.replay import Replay
from vitx.runtimes import load_session
from vitx.serve.models.loading import Loader
from vitx.serve.options import ServeOptions
from witnessed_bundle import IMAGES, seal_certificate, seal_manifest


@pytest.fixture
def with_int8(witnessed: Bundle) -> Callable[[Fault | None], Bundle]:
    """A bundle certified with a second graph, which has a fault: rounded as it may be, or another classifier's."""

    def made(fault: Fault | None) -> Bundle:
        path = witnessed.path / INT8_MODEL
        path.parent.mkdir()
        path.write_bytes(tiny_graph(fault).SerializeToString())
        bundle = seal_manifest(witnessed.path)
        seal_certificate(bundle)
        found = verdicts_of_bundle(bundle, 0.02, "cpu", (*RUNTIMES_BY_DEFAULT, *CANDIDATES), quiet=True)
        certificate = bundle.require_certificate()
        record_verdicts(bundle, certificate, found)
        return bundle

    return made


def test_it_is_an_executable_of_its_own(with_int8: Callable[[Fault | None], Bundle]) -> None:
    bundle = with_int8(None)
    _drop_failed_int8(bundle.path, quiet=True)
    bundle = Bundle.open(bundle.path)
    (verdict,) = (each for each in bundle.require_certificate().executables if each.executable.runtime == INT8)
    executable = verdict.executable
    assert (verdict.verdict, executable.precision, [*executable.artefacts]) == ("pass", "int8", [INT8_MODEL])
    assert executable.artefacts[INT8_MODEL] == sha256_file(bundle.path / INT8_MODEL)
    # The limit on logits is int8's, not float32's.
    assert verdict.max_logit_error_allowed > 1e-2
    with load_session(bundle, INT8, threads=1) as session:
        assert require_verdict(bundle, session, quiet=True).executable == executable


def test_auto_takes_it_where_it_is_the_fastest(with_int8: Callable[[Fault | None], Bundle]) -> None:
    bundle = with_int8(None)
    for verdict in cached_verdicts(bundle):
        speed = 9.0 if verdict.executable.runtime == INT8 else 4.0
        keep_verdict(bundle, verdict.model_copy(update={"images_per_second": speed}))
    assert runtimes_by_speed(bundle, "auto", device="cpu", threads=1, quiet=True)[0] == INT8
    with load_fastest(bundle, "auto", device="cpu", threads=1) as session:
        assert (session.describe()["runtime"], session.describe()["precision"]) == (INT8, "int8")


def test_the_server_s_canary_has_the_limit_of_what_runs(with_int8: Callable[[Fault | None], Bundle]) -> None:
    """Int8 rounds a value the other way for less than what float32 is allowed."""
    bundle = with_int8(None)
    loader = Loader(ServeOptions(device="cpu", runtime=INT8, threads=1))
    warm = loader.warm(loader.verify(bundle.path))
    warm.session.close()
    assert warm.verdict is not None
    assert warm.verdict.max_logit_error_allowed > 100 * bundle.require_certificate().max_logit_error_allowed
    assert warm.canary._allowed == warm.verdict.max_logit_error_allowed


def test_a_comparison_has_the_limit_of_what_runs(with_int8: Callable[[Fault | None], Bundle]) -> None:
    """`vitx parity RUN BUNDLE --runtime onnxruntime-int8` of a bundle of float32."""
    bundle = with_int8("drift")  # more than float32 allows
    with open_model(bundle.path) as reference, open_model(bundle.path, runtime=INT8) as candidate:
        certificate = certify_models(reference, candidate, IMAGES, quiet=True)
    assert 1e-4 < certificate.max_logit_error < 1e-2 < certificate.max_logit_error_allowed
    assert certificate.verdict == "pass"


def test_one_that_fails_is_dropped_and_the_certificate_says_why(
    with_int8: Callable[[Fault | None], Bundle], capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = with_int8("class_off_by_one")
    _drop_failed_int8(bundle.path, quiet=False)
    assert re.search(
        r"export: the int8 candidate is dropped: \d+ of 340 witness images flipped", capsys.readouterr().err
    )
    left = Bundle.open(bundle.path)
    assert (INT8_MODEL in left.manifest.files, (left.path / "int8").exists()) == (False, False)
    (verdict,) = (each for each in left.require_certificate().executables if each.executable.runtime == INT8)
    assert (verdict.verdict, "flipped" in verdict.reasons[0]) == ("fail", True)
    # The others are certified as before, and the missing graph is named when it is asked for.
    assert INT8 not in runtimes_by_speed(left, "auto", device="cpu", threads=1, quiet=True)
    with pytest.raises(InputError, match=r"has no int8/model\.onnx: export it again with --for cpu, which says why"):
        load_session(left, INT8)
    # A replay finds what the export found, and that is no contradiction; that it should fail and passed is one.
    certified = left.require_certificate().executables
    Replay(left, (), certified, (verdict.executable,)).require_agreement()
    with pytest.raises(CheckFailed, match="is not reproduced: onnxruntime-int8"):
        Replay(left, (), certified).require_agreement()


def test_one_that_nothing_judged_is_dropped(witnessed: Bundle, capsys: pytest.CaptureFixture[str]) -> None:
    path = witnessed.path / INT8_MODEL
    path.parent.mkdir()
    path.write_bytes(tiny_graph().SerializeToString())
    seal_certificate(seal_manifest(witnessed.path))
    _drop_failed_int8(witnessed.path, quiet=False)
    assert capsys.readouterr().err == "export: the int8 candidate is dropped: nothing judged it here\n"
    assert INT8_MODEL not in Bundle.open(witnessed.path).manifest.files


def test_another_classifier_s_int8_graph_is_refused(with_int8: Callable[[Fault | None], Bundle]) -> None:
    """Swapped after the export and sealed again: the witness set finds it, whatever the certificate says."""
    bundle = with_int8(None)
    (bundle.path / INT8_MODEL).write_bytes(tiny_graph("bgr").SerializeToString())
    with pytest.raises(InputError, match=INT8_MODEL):
        Bundle.open(bundle.path)
    bundle = seal_manifest(bundle.path)
    seal_certificate(bundle)
    with load_session(bundle, INT8) as session, pytest.raises(CheckFailed, match=r"onnxruntime-int8 .* flipped"):
        require_verdict(bundle, session, quiet=True)
