"""What a certificate passes and this machine cannot run is not listed as passed, whoever sealed the files anew."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from bundle_fixture import tiny_graph, with_embedding, write_bundle
from cli_fixture import Vitx
from vitx.core.bundle import INT8_MODEL, Bundle, output_file
from vitx.core.certificate import Executable, Verdict
from vitx.parity import replay
from vitx.parity.certification import record_verdicts
from vitx.parity.executables.listing import CANDIDATES, RUNTIMES_BY_DEFAULT, verdicts_of_bundle
from vitx.parity.executables.refuted import refuted
from vitx.runtimes.session import outputs_of
from witnessed_bundle import IMAGES, certify_bundle, seal_certificate, seal_manifest, write_ir

IR, WEIGHTS, EMBEDDING = "openvino/model.xml", "openvino/model.bin", output_file("embedding")
RUNTIMES = (*RUNTIMES_BY_DEFAULT, *CANDIDATES)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Certified with a witness set in ONNX Runtime, OpenVINO and int8, the embedding too."""
    bundle = with_embedding(write_bundle(tmp_path_factory.mktemp("refuted") / "tiny.vitx"))
    write_ir(bundle.path)
    (bundle.path / INT8_MODEL).parent.mkdir()
    (bundle.path / INT8_MODEL).write_bytes(tiny_graph().SerializeToString())
    certify_bundle(seal_manifest(bundle.path))
    bundle = Bundle.open(bundle.path)
    found = verdicts_of_bundle(bundle, 0.02, "cpu", RUNTIMES, quiet=True)
    record_verdicts(bundle, bundle.require_certificate(), found)
    return bundle


@pytest.fixture
def bundle(tmp_path: Path, original: Bundle) -> Bundle:
    return Bundle.open(shutil.copytree(original.path, tmp_path / "tiny.vitx"))


def seal(
    bundle: Bundle, change: Callable[[Executable], Executable] = lambda one: one, *, digests: bool = True
) -> Bundle:
    """Seal manifest and certificate anew; with `digests` also those that the verdicts on executables have."""
    bundle = seal_manifest(bundle.path)
    subject, certificate = bundle.subject(), bundle.certificate()
    assert certificate is not None

    def sealed(verdict: Verdict) -> Verdict:
        files = verdict.executable.artefacts
        now = {name: subject.get(name, digest) if digests else digest for name, digest in files.items()}
        executable = change(verdict.executable.model_copy(update={"artefacts": now}))
        return verdict.model_copy(update={"executable": executable})

    seal_certificate(bundle, executables=tuple(map(sealed, certificate.executables)))
    return bundle


def refuted_names(bundle: Bundle, judged: list[Verdict] | None = None) -> list[tuple[str, list[str]]]:
    if judged is None:
        judged = verdicts_of_bundle(bundle, 0.02, "cpu", RUNTIMES, quiet=True)
    found = refuted(bundle, bundle.require_certificate().executables, judged, "cpu")
    assert {verdict.verdict for verdict in found} <= {"fail"}
    return sorted((one.executable.runtime, sorted(outputs_of(one.executable))) for one in found)


DAMAGE = [
    (INT8_MODEL, [("onnxruntime-int8", [])]),
    (WEIGHTS, [("openvino", [])]),
    (EMBEDDING, [("onnxruntime", ["embedding"]), ("openvino", ["embedding"])]),
]


def test_nothing_of_a_whole_bundle_is_refuted(bundle: Bundle) -> None:
    assert len(bundle.require_certificate().executables) >= 5
    assert refuted_names(bundle) == []
    assert refuted_names(bundle, judged=[]) == []  # each is loaded again and runs


@pytest.mark.parametrize("digests", [True, False])
@pytest.mark.parametrize(("name", "expected"), DAMAGE)
def test_verify_lists_what_does_not_load_as_failed(
    bundle: Bundle,
    vitx: Vitx,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    expected: list[tuple[str, list[str]]],
    digests: bool,
) -> None:
    path = bundle.path / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    bundle = seal(bundle, digests=digests)
    monkeypatch.setattr(replay, "open_images", lambda *given, **options: IMAGES)
    code, out, err = vitx("parity", "--verify", bundle.path, "--device", "cpu", "--quiet", "--json")
    assert code == 1
    listed = [Verdict.model_validate(one) for one in json.loads(out)["executables"]]
    failed = [one for one in listed if one.verdict == "fail" and "bf16" not in one.executable.runtime]
    found = sorted((one.executable.runtime, sorted(outputs_of(one.executable))) for one in failed)
    assert found == expected
    fault = (
        "does not run on this one: " if digests else f"files that the bundle does not have: {name} of another sha256"
    )
    for one in failed:
        (reason,) = one.reasons
        assert fault in reason
        assert reason in err


def test_a_file_that_was_taken_out_is_missed(bundle: Bundle) -> None:
    shutil.rmtree((bundle.path / IR).parent)
    names = {name for name, outputs in refuted_names(seal(bundle)) if not outputs}
    assert {"openvino"} <= names <= {"openvino", "openvino-bf16"}


def test_without_a_witness_set_it_is_loaded_all_the_same(bundle: Bundle) -> None:
    path = bundle.path / WEIGHTS
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert ("openvino", []) in refuted_names(seal(bundle), judged=[])


@pytest.mark.parametrize(
    "change", [{"version": "0.1"}, {"architecture": "riscv64"}, {"provider": "Tesla V100 (sm70)"}, {"runtime": "later"}]
)
def test_what_is_of_another_machine_stays_as_certified(bundle: Bundle, change: dict[str, str]) -> None:
    for name, _ in DAMAGE:
        (bundle.path / name).write_bytes(b"")
    assert refuted_names(seal(bundle, lambda one: one.model_copy(update=change)), judged=[]) == []


def test_what_is_not_asked_for_stays_as_certified(bundle: Bundle) -> None:
    (bundle.path / WEIGHTS).write_bytes(b"")
    bundle = seal(bundle)
    assert refuted(bundle, bundle.require_certificate().executables, [], "cuda") == []


def test_a_package_that_is_not_installed_refutes_nothing(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitx.core.errors import EnvironmentMissing
    from vitx.parity.executables import refuted as module

    def missing(*given: object, **options: object) -> None:
        raise EnvironmentMissing("needs a package")

    monkeypatch.setattr(module, "load_session", missing)
    assert refuted_names(bundle, judged=[]) == []


@pytest.mark.parametrize("installed", ["tensorrt", "tensorrt_lean", "tensorrt_rtx"])
def test_a_plan_s_library_of_here_may_be_the_lean_one(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    from vitx.core.tensorrt_plan import InstalledLibrary
    from vitx.parity.executables import refuted as module

    monkeypatch.setattr(module, "local_architectures", lambda: ("sm89",))
    monkeypatch.setattr(module, "cuda_driver", lambda: "13.0")
    monkeypatch.setattr(
        module, "installed_library", lambda name: InstalledLibrary(name, "11.4") if name == installed else None
    )
    about = {"provider": "A (sm89)", "architecture": "sm89", "driver": "13.0", "precision": "fp16", "artefacts": {}}
    found = [
        (runtime, version)
        for runtime in ("tensorrt", "tensorrt-rtx")
        for version in ("11.4", "11.3")
        if module.is_of_here(Executable.model_validate({"runtime": runtime, "version": version, **about}))
    ]
    assert found == [("tensorrt-rtx" if installed == "tensorrt_rtx" else "tensorrt", "11.4")]
