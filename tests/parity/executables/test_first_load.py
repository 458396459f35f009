"""What may run: only what has a passing verdict on exactly itself, found here or written in the certificate."""

import errno
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bundle_fixture import NumpySession, with_embedding
from vitx.core import machine
from vitx.core.bundle import CERTIFICATE, MANIFEST, Bundle
from vitx.core.certificate import Certificate, Verdict
from vitx.core.errors import CheckFailed, EnvironmentMissing, InputError
from vitx.core.files import cache_folder, read_record, sha256_file, write_json
from vitx.parity.executables import first_load, verdict_cache
from vitx.parity.executables.first_load import certify_here, require_verdict
from vitx.parity.executables.judgement import judge_executable
from vitx.parity.executables.listing import runtimes_for, verdicts_of_bundle
from vitx.parity.executables.verdict_cache import cached_verdict, cached_verdicts, keep_verdict
from vitx.parity.options import ParityOptions
from vitx.runtimes import load_session
from vitx.runtimes.session import executable_of
from witnessed_bundle import certify_bundle, seal_certificate, seal_manifest, write_ir


@pytest.fixture
def judgements(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runtimes whose witness set was run."""
    seen: list[str] = []

    def judge(bundle: Bundle, witness: Any, session: Any, *args: Any, **options: Any) -> Verdict:
        seen.append(session.describe()["runtime"])
        return judge_executable(bundle, witness, session, *args, **options)

    monkeypatch.setattr(first_load, "judge_executable", judge)
    return seen


def require(bundle: Bundle, runtime: str = "onnxruntime-cpu") -> Verdict:
    with load_session(bundle, runtime, device="cpu", threads=1) as session:
        return require_verdict(bundle, session, quiet=True)


def test_the_witness_set_is_run_once_for_each_executable(witnessed: Bundle, judgements: list[str], cache: Path) -> None:
    first = [require(witnessed, name) for name in ("onnxruntime-cpu", "openvino")]
    again = [require(witnessed, name) for name in ("onnxruntime-cpu", "openvino", "onnxruntime")]
    assert judgements == ["onnxruntime", "openvino"]
    assert again == [*first, first[0]]
    assert [found.executable.runtime for found in first] == ["onnxruntime", "openvino"]
    assert sorted(first[1].executable.artefacts) == ["openvino/model.bin", "openvino/model.xml"]
    assert len([*cache.rglob("*.json")]) == 2


def test_what_failed_on_the_whole_split_does_not_run_by_its_smaller_witness_set(witnessed: Bundle) -> None:
    """Also where the set has passed before. A runtime of which the certificate says nothing is judged by the set."""
    passed = require(witnessed)
    failed = passed.model_copy(update={"verdict": "fail", "reasons": ("4 flips",), "evidence": "evaluation split"})
    seal_certificate(witnessed, executables=(failed,))
    with pytest.raises(CheckFailed, match=r"says fail of onnxruntime .*: 4 flips; take another --runtime, or run"):
        require(witnessed)
    assert require(witnessed, "openvino").verdict == "pass"
    seal_certificate(witnessed, executables=(failed.model_copy(update={"evidence": "witness set"}),))
    assert require(witnessed) == passed


def test_a_damaged_verdict_is_found_anew(witnessed: Bundle, judgements: list[str], cache: Path) -> None:
    require(witnessed)
    (path,) = cache.rglob("*.json")
    whole = path.read_bytes()
    changed = [whole.replace(b": 0.0", other, 1) for other in (b": 0.1", b": 9e999")]
    for content in (b"", b"{}", whole.replace(b'"pass"', b'"fail"'), whole[:-2], *changed):
        path.write_bytes(content)
        before = len(judgements)
        require(witnessed)
        assert len(judgements) == before + 1
        assert path.read_bytes() != content
    require(witnessed)
    assert len(judgements) == 7


def test_a_verdict_is_of_one_bundle_and_one_executable(witnessed: Bundle) -> None:
    found = require(witnessed)
    assert cached_verdict(witnessed, found.executable) == found
    for field in ("version", "architecture", "driver", "provider", "precision", "runtime"):
        assert cached_verdict(witnessed, found.executable.model_copy(update={field: "other"})) is None
    other = witnessed.manifest.model_copy(update={"name": "other"})
    write_json(witnessed.path / "manifest.json", other)
    assert cached_verdict(Bundle.open(witnessed.path), found.executable) is None
    # One that failed is not kept as a pass.
    keep_verdict(witnessed, found.model_copy(update={"verdict": "fail"}))
    assert cached_verdict(witnessed, found.executable) is None


def test_a_verdict_that_was_put_into_another_s_place_is_not_taken(witnessed: Bundle, cache: Path) -> None:
    require(witnessed, "openvino")
    (openvino,) = cache.rglob("*.json")
    found = require(witnessed)
    (onnx,) = {*cache.rglob("*.json")} - {openvino}
    onnx.write_bytes(openvino.read_bytes())
    assert cached_verdict(witnessed, found.executable) is None
    assert [each.executable.runtime for each in cached_verdicts(witnessed)] == ["openvino"]
    manifest = witnessed.path / MANIFEST
    write_json(manifest, witnessed.manifest.model_copy(update={"name": "other"}))
    openvino.parent.rename(openvino.parent.with_name(sha256_file(manifest)))
    assert cached_verdicts(Bundle.open(witnessed.path)) == []


def test_what_was_found_after_the_cache_could_not_be_written_is_the_newest(
    witnessed: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    first, second = require(witnessed), require(witnessed, "openvino")
    assert cached_verdicts(witnessed) == [first, second]
    monkeypatch.setattr(verdict_cache, "write_json", full)
    monkeypatch.setattr(verdict_cache, "_unwritten", {})
    keep_verdict(witnessed, first)
    assert cached_verdicts(witnessed) == [second, first]


def test_a_cache_that_cannot_be_written_is_said_and_stops_nothing(
    witnessed: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("VITX_CACHE", str(tmp_path / "a file"))
    assert require(witnessed).verdict == "pass"
    assert "the verdict is not kept" in capsys.readouterr().err


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("VITX_CACHE")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "vitx"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "vitx"
    monkeypatch.setenv("VITX_CACHE", "~/a cache")
    assert cache_folder() == tmp_path / "a cache"
    monkeypatch.delenv("VITX_CACHE")
    with monkeypatch.context() as without_user:
        without_user.delenv("HOME")
        without_user.setattr("pwd.getpwuid", {}.__getitem__)  # raises KeyError, as of a user it does not know
        with pytest.raises(EnvironmentMissing, match=r"^no home folder: set VITX_CACHE to a folder that can be "):
            cache_folder()
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache_folder() == tmp_path / "Library" / "Caches" / "vitx"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "local"))
    assert cache_folder() == tmp_path / "local" / "vitx"


def test_a_pass_at_a_higher_rate_is_none_for_a_server(witnessed: Bundle, judgements: list[str]) -> None:
    (loose,) = certify_here(witnessed.path, ParityOptions(device="cpu", max_flip_rate=0.5), quiet=True)
    assert (loose.verdict, loose.max_flip_rate) == ("pass", 0.5)
    assert require(witnessed).max_flip_rate == 0.01
    assert judgements == ["onnxruntime"] * 2
    assert require(witnessed).max_flip_rate == 0.01
    assert judgements == ["onnxruntime"] * 2


def test_a_manifest_of_a_coarser_precision_than_its_graph_s_widens_no_limit(witnessed: Bundle) -> None:
    write_json(witnessed.path / MANIFEST, witnessed.manifest.model_copy(update={"precision": "int8"}))
    bundle = Bundle.open(witnessed.path)
    seal_certificate(bundle)
    refusal = r"model\.onnx' has weights in fp32, and manifest\.json says int8: export it again$"
    with pytest.raises(CheckFailed, match=refusal):
        certify_here(bundle.path, ParityOptions(device="cpu"), quiet=True)
    with pytest.raises(CheckFailed, match=refusal):
        require(bundle)


def test_the_first_layer_that_differs_is_named(witnessed: Bundle) -> None:
    write_ir(witnessed.path, "class_off_by_one")
    bundle = seal_manifest(witnessed.path)
    seal_certificate(bundle)
    with pytest.raises(CheckFailed, match=r"the first layer that differs from model\.onnx is logits, by 1\.\d+ of its"):
        require(bundle, "openvino")
    assert require(bundle).verdict == "pass"


def test_without_a_witness_set_the_certificate_must_name_the_executable(bare: Bundle) -> None:
    assert require(bare).evidence == "evaluation split"
    with pytest.raises(
        CheckFailed, match=r"^no verdict on openvino .* of '.*bare\.vitx': compare it with the run here"
    ):
        require(bare, "openvino")


@pytest.mark.parametrize(
    ("field", "words"), [("version", "version 0.1, here"), ("architecture", "architecture 0.1, here")]
)
def test_another_version_is_named_and_not_trusted(bare: Bundle, field: str, words: str) -> None:
    certificate = bare.require_certificate()
    (verdict,) = certificate.executables
    changed = verdict.executable.model_copy(update={field: "0.1"})
    seal_certificate(bare, executables=(verdict.model_copy(update={"executable": changed}),))
    with pytest.raises(CheckFailed, match=words):
        require(bare)


def test_other_files_are_named_and_not_trusted(bare: Bundle) -> None:
    (verdict,) = bare.require_certificate().executables
    changed = verdict.executable.model_copy(update={"artefacts": {"model.onnx": "0" * 64}})
    seal_certificate(bare, executables=(verdict.model_copy(update={"executable": changed}),))
    with pytest.raises(CheckFailed, match="certified was: other files"):
        require(bare)


@pytest.mark.parametrize("verdict", ["fail", "not run"])
def test_only_a_pass_may_run(bare: Bundle, verdict: str) -> None:
    (found,) = bare.require_certificate().executables
    seal_certificate(bare, executables=(found.model_copy(update={"verdict": verdict, "reasons": ("because",)}),))
    with pytest.raises(CheckFailed, match=f"says {verdict} of onnxruntime .*: because"):
        require(bare)


def test_the_last_verdict_on_an_executable_counts(bare: Bundle) -> None:
    (found,) = bare.require_certificate().executables
    seal_certificate(bare, executables=(found, found.model_copy(update={"verdict": "fail"})))
    with pytest.raises(CheckFailed, match="says fail"):
        require(bare)


def test_without_a_witness_set_no_output_is_certified(bare: Bundle) -> None:
    """A verdict on logits measured nothing of it, though its files are listed."""
    bundle = with_embedding(bare)
    with load_session(bundle, "onnxruntime-cpu", device="cpu", threads=1, outputs=("embedding",)) as session:
        (verdict,) = read_record(bundle.path / CERTIFICATE, Certificate).executables
        whole = verdict.model_copy(update={"executable": executable_of(bundle.subject(), session)})
        seal_certificate(bundle, executables=(whole,))
        with pytest.raises(CheckFailed, match="no witness set, which alone certifies embedding"):
            require_verdict(bundle, session)


def test_a_session_of_one_s_own_has_a_verdict_by_the_witness_set(witnessed: Bundle) -> None:
    with NumpySession() as session:
        assert require_verdict(witnessed, session, quiet=True).executable.runtime == "numpy"


def test_a_list_of_what_can_run_here(witnessed: Bundle, bare: Bundle) -> None:
    names = runtimes_for(witnessed, "cpu")
    bfloat16 = {"avx512_bf16", "amx_bf16", "bf16"} & {*machine.cpu_architecture().split()}
    assert names == ("onnxruntime-cpu", "openvino", *(["openvino-bf16"] if bfloat16 else []))
    found = verdicts_of_bundle(witnessed, 0.02, "cpu", quiet=True)
    assert [each.executable.runtime for each in found][:2] == ["onnxruntime", "openvino"]
    assert {each.verdict for each in found} == {"pass"}
    assert verdicts_of_bundle(bare, 0.02, "cpu", quiet=True) == []


def test_an_export_s_certificate_lists_all(witnessed_original: Bundle) -> None:
    certificate = witnessed_original.require_certificate()
    evidence = {each.executable.runtime: each.evidence for each in certificate.executables}
    assert evidence["onnxruntime"] == "evaluation split"
    assert evidence["openvino"] == "witness set"
    assert len({str(each.executable) for each in certificate.executables}) == len(certificate.executables)


def test_certified_here_by_the_command(vitx: Any, witnessed: Bundle, bare: Bundle, cache: Path) -> None:
    code, out, err = vitx("parity", witnessed.path, "--runtime", "openvino", "--json", "--device", "cpu")
    assert (code, err) == (0, f"next: vitx serve {witnessed.path}\n")
    (found,) = json.loads(out)["executables"]
    assert (found["verdict"], found["executable"]["runtime"], found["images"]) == ("pass", "openvino", 340)
    assert found in [json.loads(path.read_text())["verdict"] for path in cache.rglob("*.json")]
    assert vitx("parity", witnessed.path, "--device", "cpu")[0] == 0
    code, _, err = vitx("parity", witnessed.path, "--max-flip-rate", "0.01")
    assert (code, "is too small for a flip rate of at most 0.01" in err) == (2, True)
    code, _, err = vitx("parity", bare.path)
    assert (code, "has no witness set: compare it with its run" in err) == (2, True)
    code, _, err = vitx("parity", bare.path / "openvino")
    assert (code, "is no bundle, it has no manifest.json" in err) == (2, True)
    write_ir(witnessed.path, "drift")
    seal_certificate(seal_manifest(witnessed.path))
    code, out, err = vitx("parity", witnessed.path, "--runtime", "openvino", "--json", "--device", "cpu")
    assert (code, json.loads(out)["executables"][0]["verdict"]) == (1, "fail")
    assert "is not the checkpoint's equal in openvino" in err


def test_a_bundle_alone_fails_where_its_whole_split_did_as_every_load_of_it_does(vitx: Any, witnessed: Bundle) -> None:
    passed = require(witnessed, "openvino")
    failed = passed.model_copy(update={"verdict": "fail", "reasons": ("4 flips",), "evidence": "evaluation split"})
    seal_certificate(witnessed, executables=(failed,))
    code, out, err = vitx("parity", witnessed.path, "--runtime", "openvino", "--json", "--device", "cpu")
    (found,) = json.loads(out)["executables"]
    assert (code, found["verdict"], found["evidence"]) == (1, "fail", "evaluation split")
    assert err.endswith(": 4 flips\n")
    assert vitx("parity", witnessed.path, "--device", "cpu")[0] == 0


def test_a_bundle_behind_a_url_or_in_a_mounted_volume_passes_and_is_named_as_it_was_given(
    vitx: Any, witnessed: Bundle, tmp_path: Path
) -> None:
    url = f"file://{witnessed.path}"
    code, out, err = vitx("parity", url, "--device", "cpu", "--json")
    assert (code, json.loads(out)["bundle"]) == (0, url), err
    assert err.endswith(f"\nnext: vitx serve {url}\n")
    mounted = tmp_path / "mounted.vitx"
    mounted.mkdir()
    witnessed.path.rename(mounted / "..data")  # as Kubernetes lays out a ConfigMap
    for file in (mounted / "..data").iterdir():
        (mounted / file.name).symlink_to(f"..data/{file.name}")
    code, _, err = vitx("parity", mounted, "--device", "cpu")
    assert (code, f"next: vitx serve {mounted}\n" in err) == (0, True), err


def test_a_rate_that_was_certified_holds_unless_another_is_asked_for(witnessed: Bundle) -> None:
    seal_certificate(witnessed, max_flip_rate=0.25)
    options = ParityOptions(device="cpu")

    def rate(asked: ParityOptions) -> float:
        (verdict,) = certify_here(witnessed.path, asked, quiet=True)
        return verdict.max_flip_rate

    assert rate(options) == 0.25
    assert rate(ParityOptions(device="cpu", max_flip_rate=0.5)) == 0.5
    path = witnessed.path / CERTIFICATE
    path.write_bytes(path.read_bytes().replace(b'"max_flip_rate": 0.25', b'"max_flip_rate": 0.99'))
    with pytest.raises(CheckFailed, match=r"certificate\.json was changed after it was written"):
        rate(options)
    assert rate(ParityOptions(device="cpu", max_flip_rate=0.5)) == 0.5
    path.write_bytes(b"{")
    assert rate(ParityOptions(device="cpu", max_flip_rate=0.5)) == 0.5
    path.unlink()
    assert rate(options) == 0.01
    with pytest.raises(InputError, match="no bundle at '"):
        certify_here(witnessed.path / "none", options, quiet=True)


def test_verdicts_of_other_machines_are_kept_by_a_new_certificate(witnessed: Bundle) -> None:
    """Of the same files: a bundle that was certified again where OpenVINO is missing has its IR's verdict still."""
    certificate = witnessed.require_certificate()
    elsewhere = [
        each.model_copy(update={"executable": each.executable.model_copy(update={"architecture": "another"})})
        for each in certificate.executables
    ]
    seal_certificate(witnessed, executables=tuple(elsewhere))
    again = certify_bundle(witnessed, witness_images=0)
    assert again.executables[: len(elsewhere)] == tuple(elsewhere)
    assert len(again.executables) == 2 * len(elsewhere)
    write_ir(witnessed.path, "bgr")
    assert len(certify_bundle(seal_manifest(witnessed.path), witness_images=0).executables) == len(elsewhere)


def test_other_runtimes_are_added_by_the_whole_split(bare: Bundle) -> None:
    """Beside those that the certificate has; the same executable again replaces its verdict."""
    from vitx.parity.certification import record_verdicts

    certificate = certify_bundle(bare, witness_images=0)
    with load_session(bare, "openvino", threads=1) as session:
        verdict = certificate.as_verdict(executable_of(bare.subject(), session))
    for _ in range(2):
        written: Certificate = record_verdicts(bare, bare.require_certificate(), [verdict])
        assert [each.executable.runtime for each in written.executables] == ["onnxruntime", "openvino"]
    assert require(bare, "openvino") == verdict
