"""A bundle is opened only whole, and served only with a certificate of its own files."""

import errno
import json
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import onnx
import pytest
from onnx.external_data_helper import set_external_data
from pydantic import ValidationError

from bundle_fixture import IMAGE_SIZE, LABELS, add_files, certificate, with_embedding, write_bundle
from vitx.core import bundle as core_bundle
from vitx.core.bundle import CERTIFICATE, LATENCY, MANIFEST, MODEL, Bundle, FileEntry, Manifest, timestamp
from vitx.core.certificate import Certificate
from vitx.core.errors import CheckFailed, InputError
from vitx.core.files import sha256_file, write_json
from vitx.core.latency import Latency, LatencyPoint, machine_key
from vitx.core.machine import describe_machine

REMEDY = "run `vitx parity RUN BUNDLE`, or give --allow-uncertified"


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return write_bundle(tmp_path / "tiny.vitx")


def test_what_is_no_bundle_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError) as caught:
        Bundle.open(tmp_path / "none")
    assert str(caught.value) == f"no bundle at '{tmp_path}/none': expected a folder made by `vitx export`, or its URL"
    with pytest.raises(InputError) as caught:
        Bundle.open(tmp_path)
    assert str(caught.value) == f"'{tmp_path}' is not a bundle: it has no manifest.json"
    (tmp_path / "run.json").touch()
    with pytest.raises(InputError) as caught:
        Bundle.open(tmp_path)
    assert str(caught.value) == f"'{tmp_path}' is not a bundle: it is a run: `vitx export {tmp_path}` makes one of it"


def test_every_file_of_the_manifest_is_verified(bundle: Bundle) -> None:
    bundle = add_files(bundle, {"engines/a.plan": b"plan"})
    assert bundle.model_path == bundle.path / "model.onnx"
    (bundle.path / "engines" / "a.plan").write_bytes(b"plaN")
    with pytest.raises(InputError, match=r"a\.plan is corrupt: sha256 [0-9a-f]{16}… but [0-9a-f]{16}… was recorded"):
        Bundle.open(bundle.path)
    (bundle.path / "engines" / "a.plan").unlink()
    with pytest.raises(InputError, match=r"a\.plan is missing: the folder is incomplete, make or copy it again"):
        Bundle.open(bundle.path)


def test_a_manifest_with_another_digest_is_named_not_the_file(bundle: Bundle) -> None:
    """The certificate says which of the two changed."""
    certified = certificate(subject=bundle.subject())
    write_json(bundle.path / CERTIFICATE, certified)
    manifest, digest = (bundle.path / MANIFEST).read_text(), bundle.manifest.files[MODEL].sha256
    (bundle.path / MANIFEST).write_text(manifest.replace(digest, digest[:-1] + ("0" if digest[-1] != "0" else "1")))
    with pytest.raises(InputError) as caught:
        Bundle.open(bundle.path)
    which = "its sha256 of model.onnx is neither the certificate's nor the file's"
    assert str(caught.value) == f"{bundle.path / MANIFEST} is corrupt: {which}"
    (bundle.path / CERTIFICATE).write_text("{}")  # which says nothing
    with pytest.raises(InputError, match=r"model\.onnx is corrupt: sha256"):
        Bundle.open(bundle.path)
    write_json(bundle.path / CERTIFICATE, certified)
    bundle.model_path.write_bytes(b"another graph")
    with pytest.raises(InputError, match=r"model\.onnx is corrupt: sha256"):
        Bundle.open(bundle.path)


def test_a_graph_with_weights_in_another_file_is_refused(bundle: Bundle) -> None:
    """A runtime would read that file whatever it is: here one that no manifest lists and no signature covers."""
    graph = onnx.load(bundle.model_path)
    weights = next(each for each in graph.graph.initializer if each.data_type == onnx.TensorProto.FLOAT)
    set_external_data(weights, ".latency.json.w")
    (bundle.path / ".latency.json.w").write_bytes(weights.raw_data)
    weights.ClearField("raw_data")
    onnx.save(graph, bundle.model_path)
    entry = FileEntry(sha256=sha256_file(bundle.model_path), size=bundle.model_path.stat().st_size)
    files = {**bundle.manifest.files, "model.onnx": entry}
    write_json(bundle.path / "manifest.json", bundle.manifest.model_copy(update={"files": files}))
    with pytest.raises(InputError, match=r"model\.onnx has external data: expected a graph with its weights in it"):
        Bundle.open(bundle.path)


@pytest.mark.parametrize("where", [2**20 - 12, 2**20 - 4, 2**20, 2**21 - 1])
def test_the_name_of_another_file_is_found_where_it_lies_in_two_blocks(bundle: Bundle, where: int) -> None:
    graph = bytearray(3 * 2**20)
    graph[where : where + 9] = b"\x08location"
    with pytest.raises(InputError, match="has external data"):
        Bundle.open(add_files(bundle, {"embedding.onnx": bytes(graph)}).path)


def test_what_is_no_graph_may_have_any_bytes(bundle: Bundle) -> None:
    add_files(bundle, {"openvino/model.bin": b"\x08location", "empty.onnx": b""})


def test_a_graph_that_is_cut_while_it_is_read_does_not_end_the_process(bundle: Bundle) -> None:
    """As `cp` does with the file that it overwrites, perhaps while a server loads the bundle again."""
    graph = onnx.load(bundle.model_path)
    graph.doc_string = "its location"
    bundle = add_files(bundle, {MODEL: graph.SerializeToString()})
    program = """
import os, sys
from types import SimpleNamespace
from vitx.core import bundle
search = bundle._EXTERNAL.search
def cut(content):
    os.truncate(os.path.join(sys.argv[1], bundle.MODEL), 0)
    return search(content)
bundle._EXTERNAL = SimpleNamespace(search=cut)
bundle.Bundle.open(sys.argv[1])
"""
    assert subprocess.run([sys.executable, "-c", program, bundle.path], check=False).returncode == 0


@pytest.mark.parametrize("size", [-5, 7, "12", 1e3, 2**63])
def test_a_size_is_that_of_the_file(bundle: Bundle, size: object) -> None:
    manifest = json.loads((bundle.path / MANIFEST).read_bytes())
    manifest["files"][MODEL]["size"] = size
    write_json(bundle.path / MANIFEST, manifest)
    with pytest.raises(InputError, match=r"model\.onnx has \d+ bytes: manifest\.json says 7|files\.model\.onnx\.size"):
        Bundle.open(bundle.path)


def test_every_file_of_the_folder_is_listed(bundle: Bundle) -> None:
    for left in (".certificate.json.k2x_", ".latency.json.1"):
        (bundle.path / left).write_bytes(b"")  # a killed writer's
    (bundle.path / "engines").mkdir()
    assert Bundle.open(bundle.path).manifest == bundle.manifest
    for name in ("model.onnx.data", "engines/a.plan", "engines/certificate.json", ".model.onnx.k2x_"):
        (bundle.path / name).write_bytes(b"x")
        with pytest.raises(InputError, match=rf"{re.escape(name)} is not listed in manifest\.json: remove it, or"):
            Bundle.open(bundle.path)
        (bundle.path / name).unlink()
    (bundle.path / "engines/a.plan").symlink_to(bundle.path / "no such file")
    with pytest.raises(InputError, match="is not listed"):
        Bundle.open(bundle.path)


def test_a_listing_without_the_graph_is_refused(bundle: Bundle) -> None:
    write_json(bundle.path / MANIFEST, bundle.manifest.model_copy(update={"files": {}}))
    with pytest.raises(InputError, match=r"manifest\.json does not list model\.onnx: nothing says"):
        Bundle.open(bundle.path)


def test_files_outside_the_folder_are_refused(bundle: Bundle) -> None:
    outside = bundle.path.parent / "outside.plan"
    outside.write_bytes(b"plan")
    entry = FileEntry(sha256=sha256_file(outside), size=4)
    for name in ("../outside.plan", str(outside)):
        files = {**bundle.manifest.files, name: entry}
        write_json(bundle.path / MANIFEST, bundle.manifest.model_copy(update={"files": files}))
        with pytest.raises(InputError, match=r"outside\.plan leads out of the bundle: expected a file in it"):
            Bundle.open(bundle.path)
    write_json(bundle.path / MANIFEST, bundle.manifest)
    bundle.model_path.rename(bundle.path.parent / "model.onnx")
    bundle.model_path.symlink_to("../model.onnx")
    with pytest.raises(InputError, match=r"model\.onnx leads out of the bundle"):
        Bundle.open(bundle.path)
    through = bundle.path.parent / "through.vitx"
    bundle.model_path.unlink()
    (bundle.path.parent / "model.onnx").rename(bundle.model_path)
    through.symlink_to(bundle.path)
    assert Bundle.open(through).manifest == bundle.manifest


def test_two_names_of_one_file_are_refused(bundle: Bundle) -> None:
    with pytest.raises(InputError, match=r"lists engines/a\.plan and engines/A\.plan: one file, where case does not"):
        add_files(bundle, {"engines/a.plan": b"1", "engines/A.plan": b"2"})


def test_the_subject_is_the_manifest_and_every_file_it_names(bundle: Bundle) -> None:
    bundle = add_files(bundle, {"extra.bin": b"extra"})
    names = (MANIFEST, "model.onnx", "extra.bin")
    assert bundle.subject() == {name: sha256_file(bundle.path / name) for name in names}


def test_a_certificate_is_of_these_files_passes_and_is_unchanged(bundle: Bundle) -> None:
    path = bundle.path
    assert (bundle.certificate(), bundle.summary()["verdict"]) == (None, "not certified")
    with pytest.raises(CheckFailed) as caught:
        bundle.require_certificate()
    assert str(caught.value) == f"bundle '{path}' has no certificate: {REMEDY}"

    good = certificate(subject=bundle.subject()).sealed()
    write_json(path / CERTIFICATE, good)
    assert bundle.require_certificate() == good == bundle.certificate()
    assert (bundle.summary()["verdict"], bundle.summary()["images"]) == ("pass", good.images)

    other = bundle.subject() | {MANIFEST: "0" * 64}
    del other["model.onnx"]
    write_json(path / CERTIFICATE, certificate(subject=other).sealed())
    with pytest.raises(CheckFailed) as caught:
        bundle.require_certificate()
    assert str(caught.value) == (
        f"the certificate of '{path}' is of other files (manifest.json, model.onnx differ): {REMEDY}"
    )
    assert bundle.summary()["verdict"] == f"refused: {caught.value}", "a summary says what a server does"

    failed = certificate(subject=bundle.subject(), verdict="fail", reasons=("3 flips", "drift"))
    write_json(path / CERTIFICATE, failed.sealed())
    with pytest.raises(CheckFailed) as caught:
        bundle.require_certificate()
    assert str(caught.value) == f"the certificate of '{path}' says fail: 3 flips; drift"

    write_json(path / CERTIFICATE, good.model_copy(update={"accuracy_candidate": 0.99}))
    with pytest.raises(CheckFailed, match="its own digest differs") as caught:
        bundle.require_certificate()
    assert bundle.summary()["verdict"] == f"refused: {caught.value}"
    assert "images" not in bundle.summary(), "no number of a certificate that was edited"


def test_a_certificate_that_is_written_while_it_is_judged_is_not_taken_for_the_judged_one(bundle: Bundle) -> None:
    path = bundle.path / CERTIFICATE
    good = certificate(subject=bundle.subject()).sealed()
    write_json(path, good)

    class Overtaken(Bundle):
        def certificate(self) -> Certificate | None:
            found = super().certificate()
            write_json(path, certificate(verdict="fail").sealed())
            return found

    with pytest.raises(CheckFailed, match="was changed after it was written"):
        Overtaken(bundle.path, bundle.manifest).require_certificate()


def test_the_summary_is_of_the_manifest_and_the_certificate(bundle: Bundle) -> None:
    bundle = with_embedding(add_files(bundle, {"engines/a.plan": bytes(1_234_000)}))
    size = sum(path.stat().st_size for path in bundle.path.rglob("*") if path.is_file() and path.name != MANIFEST)
    about = {
        "bundle": str(bundle.path),
        "model": "tiny",
        "size_mb": round(size / 1e6, 2),
        "precision": "fp32",
        "islands": 0,
        "opset": 18,
        "rewrites": "",
        "files": "model.onnx, engines/a.plan, outputs/embedding.onnx",
        "outputs": "embedding",
    }
    assert bundle.summary() == {**about, "verdict": "not certified"}
    write_json(bundle.path / CERTIFICATE, certificate(subject=bundle.subject()).sealed())
    measured = {"verdict": "pass", "images": 300, "flips": 0, "flip_rate_bound": 0.01, "max_logit_error": 1e-5}
    assert bundle.summary() == {**about, **measured}


def test_an_output_that_a_bundle_has_not_is_named(bundle: Bundle) -> None:
    content = with_embedding(bundle).manifest.model_dump(mode="json")
    Bundle(bundle.path, Manifest.model_validate(content)).require_outputs(["embedding"])
    with pytest.raises(InputError) as caught:
        bundle.require_outputs(["embedding"])
    fault = f"'{bundle.path}' has no output 'embedding' (logits alone): export it again with --output embedding"
    assert str(caught.value) == fault
    del content["files"]["outputs/embedding.onnx"]
    with pytest.raises(
        ValidationError, match=r"lists the output embedding and not outputs/embedding\.onnx, which comp"
    ):
        Manifest.model_validate(content)
    content["files"]["outputs/embedding.onnx"] = content["files"]["model.onnx"]
    content["outputs"] *= 2
    with pytest.raises(ValidationError, match="lists the output embedding twice"):
        Manifest.model_validate(content)


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "free some space, and bench it again"),
        (errno.EROFS, "bench a copy that can be written"),
    ],
)
def test_latencies_that_cannot_be_kept_are_told(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], number: int, remedy: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, "refused")

    monkeypatch.setattr(core_bundle, "write_json", refuse)
    bundle.record_latency(Latency(runtime={}, machine=describe_machine(), points=(), created="now"))
    said = f"vitx: what was measured is not kept in the bundle ([Errno {number}] refused): {remedy}\n"
    assert capsys.readouterr().err == said


def test_latencies_of_other_machines_stay(bundle: Bundle) -> None:
    assert bundle.latency() is None
    here = describe_machine()
    there: dict[str, str | int] = {"processor": "Other", "cores": 4, "system": "Linux x"}
    assert machine_key(there) == "Other, 4 cores, Linux x"

    def measured(machine: dict[str, str | int], milliseconds: float) -> Latency:
        point = LatencyPoint(batch_size=1, median_ms=milliseconds, p95_ms=9.0, images_per_second=1.0)
        return Latency(runtime={}, machine=machine, points=(point,), created="now")

    for latency in (measured(there, 5.0), measured(here, 2.0), measured(here, 3.0)):
        bundle.record_latency(latency)
    assert bundle.latency() == measured(here, 3.0)
    assert bundle.latency_file().machines == {
        machine_key(there): measured(there, 5.0),
        machine_key(here): measured(here, 3.0),
    }
    path = bundle.path / LATENCY
    path.write_text(path.read_text().replace("3.0", "1.0"))
    with pytest.raises(CheckFailed, match=r"its own digest differs\): remove it, and run `vitx bench BUNDLE` again"):
        bundle.latency()


@pytest.mark.parametrize(
    ("name", "valid"), [("a-1.B_c", True), ("9", True), (".a", False), ("a/b", False), ("stats", False), ("", False)]
)
def test_a_name_fits_into_a_url(bundle: Bundle, name: str, valid: bool) -> None:
    plain = bundle.manifest.model_dump() | {"name": name}
    if valid:
        assert Manifest(**plain).name == name
    else:
        with pytest.raises(ValueError, match="name"):
            Manifest(**plain)


def test_a_timestamp_is_in_utc_to_the_second() -> None:
    before = datetime.now(UTC).replace(microsecond=0)
    stamp = timestamp()
    assert stamp.endswith("+00:00")
    assert len(stamp) == len("2026-01-02T03:04:05+00:00")
    assert before <= datetime.fromisoformat(stamp) <= datetime.now(UTC)


@pytest.mark.parametrize("name", [MODEL, CERTIFICATE])
def test_a_link_to_itself_is_refused(name: str, bundle: Bundle) -> None:
    (bundle.path / name).unlink(missing_ok=True)
    (bundle.path / name).symlink_to(name)
    with pytest.raises(InputError, match=r"leads out of the bundle|is missing"):
        Bundle.open(bundle.path)


def test_labels_and_the_output_have_one_number_of_classes(bundle: Bundle) -> None:
    """Else the row of an image could name a class that there is not."""
    fewer = bundle.manifest.output.model_copy(update={"shape": ("N", len(bundle.manifest.labels) - 1)})
    for changes in ({"labels": bundle.manifest.labels[1:]}, {"labels": ()}, {"output": fewer}):
        write_json(bundle.path / MANIFEST, bundle.manifest.model_copy(update=changes))
        with pytest.raises(InputError, match=r"labels and an output .* for \d+ classes"):
            Bundle.open(bundle.path)


@pytest.mark.parametrize(
    ("tensor", "change", "message"),
    [
        ("input", {"shape": ("N", "N", IMAGE_SIZE, 3)}, r"an input \('N', 'N', 16, 3\) for images of 16 × 16 pixels"),
        ("input", {"shape": ("N", IMAGE_SIZE)}, "an input"),
        ("input", {"shape": ()}, "an input"),
        ("input", {"shape": (2, IMAGE_SIZE, IMAGE_SIZE, 3)}, "an input"),
        ("input", {"shape": ("N", 17, 17, 3)}, "an input"),
        ("input", {"dtype": "float32"}, "float32 images and float32 logits: expected uint8 and float32"),
        ("output", {"dtype": "uint8"}, "uint8 images and uint8 logits"),
        ("output", {"shape": (3, len(LABELS))}, "labels and an output"),
    ],
)
def test_tensors_are_those_of_the_format(bundle: Bundle, tensor: str, change: dict[str, object], message: str) -> None:
    """Else who reads S of the shape would get a traceback, or pixels of another size than the graph takes."""
    spec = getattr(bundle.manifest, tensor).model_copy(update=change)
    write_json(bundle.path / MANIFEST, bundle.manifest.model_copy(update={tensor: spec}))
    with pytest.raises(InputError, match=message):
        Bundle.open(bundle.path)


@pytest.mark.parametrize("shape", [["N", "N"], ["N"], ["N", 0], ["N", 3.5], [3, 3], ["N", 3, 3], []])
def test_a_further_output_is_a_vector_of_each_image(bundle: Bundle, shape: list[object]) -> None:
    """Else a server would end in a traceback."""
    manifest = with_embedding(bundle).manifest.model_dump(mode="json")
    manifest["outputs"][0]["shape"] = shape
    write_json(bundle.path / MANIFEST, manifest)
    with pytest.raises(InputError, match=r"manifest\.json is not a valid Manifest: outputs\.0\.shape"):
        Bundle.open(bundle.path)


@pytest.mark.parametrize("name", ["a\0b", "", "./model.onnx", "engines//a.plan"])
def test_a_name_that_no_file_has_is_refused(bundle: Bundle, name: str) -> None:
    files = {**bundle.manifest.files, name: bundle.manifest.files[MODEL]}
    write_json(bundle.path / MANIFEST, bundle.manifest.model_copy(update={"files": files}))
    with pytest.raises(InputError, match="leads out of the bundle: expected a file in it"):
        Bundle.open(bundle.path)
