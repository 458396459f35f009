"""A certificate is replayed; a byte changed anywhere in a bundle is refused by serve and by --verify."""

import json
import shutil
from pathlib import Path

import pytest

from bundle_fixture import add_files, write_bundle
from cli_fixture import Vitx
from gpu_fixture import add_plan
from vitx.core.bundle import CERTIFICATE, LATENCY, MANIFEST, Bundle
from vitx.core.errors import InputError, VitxError
from vitx.core.files import write_json
from vitx.core.latency import Latency, LatencyPoint
from vitx.core.machine import describe_machine
from vitx.core.run import RunFolder
from vitx.data.open import open_images
from vitx.parity import certify_models
from vitx.parity.certification import record_verdicts
from vitx.parity.loaded_model import open_model
from vitx.parity.replay import verify_files
from vitx.serve.options import ServeOptions
from vitx.serve.server_core import verified


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory, tiny_run: RunFolder, colours_folder: Path) -> Bundle:
    bundle = write_bundle(tmp_path_factory.mktemp("replay") / "tiny.vitx", data=str(colours_folder))
    bundle = add_plan(bundle, "tensorrt")
    openvino = {"openvino/model.xml": b"<net/>", "openvino/model.bin": b"weights"}
    add_files(bundle, openvino)
    reference, candidate = open_model(tiny_run.path, device="cpu"), open_model(bundle.path, device="cpu")
    images = open_images(reference.data, "val")
    assert certify_models(reference, candidate, images, write=True, quiet=True).verdict == "pass"
    points = (LatencyPoint(batch_size=1, median_ms=1.0, p95_ms=1.5, images_per_second=1000.0),)
    bundle.record_latency(Latency(runtime={}, machine=describe_machine(), points=points, created="2026-01-01"))
    return bundle


@pytest.fixture
def bundle(certified: Bundle, tmp_path: Path) -> Bundle:
    return Bundle.open(shutil.copytree(certified.path, tmp_path / "tiny.vitx"))


EVERY_FILE = (
    "model.onnx",
    "engines/tensorrt.plan",
    "engines/tensorrt.plan.json",
    "openvino/model.xml",
    "openvino/model.bin",
    MANIFEST,
    CERTIFICATE,
    LATENCY,
)


def test_every_file_of_the_bundle_is_tampered_with_below(certified: Bundle) -> None:
    there = {path.relative_to(certified.path).as_posix() for path in certified.path.rglob("*") if path.is_file()}
    assert there == set(EVERY_FILE)


@pytest.mark.parametrize("name", EVERY_FILE)
@pytest.mark.parametrize("change", ["flipped", "appended", "cut"])
def test_verify_refuses_one_byte(bundle: Bundle, vitx: Vitx, name: str, change: str) -> None:
    path = bundle.path / name
    content = path.read_bytes()
    middle = len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    path.write_bytes({"flipped": flipped, "appended": content + b" ", "cut": content[:-1]}[change])
    code, out, err = vitx("parity", "--verify", bundle.path, "--device", "cpu", "--quiet")
    assert code in (1, 2), out
    assert err.startswith("error: ")
    with pytest.raises(VitxError):
        verified(ServeOptions(bundles=(bundle.path,)))


@pytest.mark.parametrize("name", EVERY_FILE)
def test_one_changed_byte_anywhere_is_refused(bundle: Bundle, name: str) -> None:
    path = bundle.path / name
    original = path.read_bytes()
    step = max(1, len(original) // 100)
    places = {*range(0, len(original), step), len(original) - 1}
    for place in sorted(places):
        for changed in (original[place] ^ 1, ord("\t") if original[place] == ord(" ") else original[place] ^ 4):
            path.write_bytes(original[:place] + bytes([changed]) + original[place + 1 :])
            with pytest.raises(VitxError):
                verified(ServeOptions(bundles=(bundle.path,)))
            with pytest.raises(VitxError):
                verify_files(Bundle.open(bundle.path))
    path.write_bytes(original)
    assert verify_files(Bundle.open(bundle.path)).verdict == "pass"


def test_an_unknown_file_in_the_folder_is_named(bundle: Bundle) -> None:
    (bundle.path / "engines" / "other.plan").write_bytes(b"plan")
    with pytest.raises(InputError, match=r"other\.plan is not listed in manifest\.json: remove it"):
        Bundle.open(bundle.path)


def test_verify_with_the_run_repeats_the_comparison(
    bundle: Bundle, tiny_run: RunFolder, vitx: Vitx, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VITX_CACHE", str(tmp_path / "cache"))
    code, out, err = vitx("parity", "--verify", bundle.path, tiny_run.path, "--device", "cpu", "--json")
    assert code == 0, err
    numbers = {number["name"]: number for number in json.loads(out)["numbers"]}
    assert all(number["agrees"] for number in numbers.values())
    assert numbers["images"]["seen"] == 360
    assert 0 < numbers["largest logit error"]["seen"] < 1e-4
    url = f"file://{bundle.path}"
    for pair in ((tiny_run.path, bundle.path), (url, tiny_run.path)):
        code, _, err = vitx("parity", "--verify", *pair, "--device", "cpu", "--quiet")
        assert code == 0, err


def test_verify_without_a_run_replays_the_candidate(bundle: Bundle, vitx: Vitx) -> None:
    code, out, err = vitx("parity", "--verify", bundle.path, "--device", "cpu")
    assert code == 0, err
    assert "no run at hand" in err
    assert "class of every image" in out


@pytest.mark.parametrize(("evidence", "expected"), [("evaluation split", 0), ("witness set", 1)])
def test_a_fail_on_the_whole_split_is_no_difference(bundle: Bundle, vitx: Vitx, evidence: str, expected: int) -> None:
    """The certificate says so itself, and nothing runs it; what the few images of a set found may be of one machine."""
    certificate = bundle.require_certificate()
    own = certificate.executables[0]
    other = own.executable.model_copy(update={"runtime": "openvino"})
    failed = {"executable": other, "verdict": "fail", "reasons": ("drift",), "evidence": evidence}
    record_verdicts(bundle, certificate, [own.model_copy(update=failed)])
    code, out, err = vitx("parity", "--verify", bundle.path, "--device", "cpu")
    assert code == expected, err
    assert ("is not reproduced: openvino" in err) == bool(expected)
    assert "fail" in out


def test_numbers_that_are_not_reproduced_fail(bundle: Bundle, tiny_run: RunFolder, vitx: Vitx) -> None:
    certificate = bundle.certificate()
    assert certificate is not None
    better = certificate.model_copy(update={"accuracy_candidate": 1.0, "classes_sha256": "0" * 64}).sealed()
    write_json(bundle.path / CERTIFICATE, better)
    for arguments in ((bundle.path,), (bundle.path, tiny_run.path)):
        code, _, err = vitx("parity", "--verify", *arguments, "--device", "cpu", "--quiet")
        assert code == 1
        assert "is not reproduced: top-1 of the candidate" in err
        assert "class of every image" in err


def test_verify_with_another_run_is_refused(bundle: Bundle, colours_folder: Path, tmp_path: Path, vitx: Vitx) -> None:
    from run_fixture import write_run

    other = write_run(tmp_path / "other", str(colours_folder), bias_change=1e-3)
    code, _, err = vitx("parity", "--verify", bundle.path, other.path, "--device", "cpu", "--quiet")
    assert code == 1
    assert "is not the reference of the certificate" in err


def test_a_certificate_without_the_bad_images_is_verified(
    bundle: Bundle, tiny_run: RunFolder, colours_folder: Path, tmp_path: Path, vitx: Vitx
) -> None:
    folder = shutil.copytree(colours_folder, tmp_path / "photos")
    next(iter(sorted((folder / "val").rglob("*.png")))).write_bytes(b"no image")
    images = ("--data", folder, "--device", "cpu", "--quiet")
    code, _, err = vitx("parity", tiny_run.path, bundle.path, *images, "--skip-bad")
    assert code == 0, err
    code, _, err = vitx("parity", "--verify", bundle.path, tiny_run.path, *images, "--skip-bad")
    assert code == 0, err
    assert "left out 1 image: " in err
    code, _, err = vitx("parity", "--verify", bundle.path, *images)
    assert code == 2
    assert "--skip-bad" in err


def test_verify_on_other_images_is_refused(bundle: Bundle, tmp_path: Path, vitx: Vitx) -> None:
    from bundle_fixture import write_image_folder

    folder = write_image_folder(tmp_path / "others", 300)
    code, _, err = vitx("parity", "--verify", bundle.path, "--data", folder, "--device", "cpu", "--quiet")
    assert code == 1
    assert "holds other images than the certificate" in err


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"opset": 20}, "is of opset 18, and manifest.json says 20"),
        ({"precision": "int8"}, "has weights in fp32, and manifest.json says int8"),
        ({"precision": "fp8"}, "has weights in fp32, and manifest.json says fp8"),
    ],
)
def test_a_manifest_of_another_graph_is_refused(
    bundle: Bundle, tiny_run: RunFolder, vitx: Vitx, changes: dict[str, object], fault: str
) -> None:
    """Replayed, and before it is certified: a coarser precision would widen the limit of its logits."""
    write_json(bundle.path / MANIFEST, bundle.manifest.model_copy(update=changes))
    certificate = bundle.certificate()
    assert certificate is not None
    subject = Bundle.open(bundle.path).subject()
    write_json(bundle.path / CERTIFICATE, certificate.model_copy(update={"subject": subject}).sealed())
    for command in (("--verify", bundle.path), (tiny_run.path, bundle.path)):
        code, _, err = vitx("parity", *command, "--device", "cpu", "--quiet")
        assert code == 1
        assert f"error: '{bundle.model_path}' {fault}: export it again" in err
